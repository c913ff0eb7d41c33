"""Trace files as published are read as they are; a broken one is refused with every problem and its line."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import SpecError, UsageError
from simtune.specs.traces import MAX_HASH_ID, MAX_SHOWN, read_trace
from simtune.specs.workload import MAX_TOKENS

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """\
{"timestamp": 1500, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 4500, "input_length": 700, "output_length": 6, "hash_ids": [0, 3], "extra": "x"}
"""


def written(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def problems(folder: Path, text: str, name: str = "t") -> list[str]:
    """What is said about the file, without its path."""
    path = written(folder, text, name)
    with pytest.raises(SpecError) as error:
        read_trace(path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(str(path)) for line in lines)
    return [line.removeprefix(str(path)).removeprefix(":").strip() for line in lines]


# --- what is read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz", "no_suffix"])
def test_an_azure_trace_keeps_its_100_ns_clock(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, AZURE, name)
    trace = read_trace(path)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 4.3145790, 4.5418770]
    assert trace.prompt_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.hash_ids is None
    assert len(trace) == 3
    assert trace.rate_rps == pytest.approx(2 / 4.5418770)
    assert trace.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_mooncake_trace_keeps_its_block_ids(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE, "m.jsonl"))
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert trace.prompt_tokens.tolist() == [1025, 700]
    assert trace.output_tokens.tolist() == [5, 6]
    assert trace.hash_ids == ((0, 1, 2), (0, 3))
    assert trace.block_tokens == 512


def test_lengths_without_times_are_a_lengths_only_trace(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens,pd_ratio\n3772,54,69.9\n2015,156,12.9\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.arrival_s is None
    assert trace.rate_rps is None
    assert trace.prompt_tokens.tolist() == [3772, 2015]


@pytest.mark.parametrize(
    ("header", "first", "second"),
    [
        ("arrival_s,prompt_tokens,output_tokens", 5, 7.25),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", 5, 7.25),
        ("Arrival_ms , Input_Tokens,completion_tokens", 5000, 7250),
        ("arrival_time_ns,input_toks,output_toks", 5_000_000_000, 7_250_000_000),
        ('timestamp,"input_length",output_length', "2024-05-12 23:59:59.5+00:00", "2024-05-13T00:00:01.75Z"),
    ],
)
def test_columns_go_by_many_names_and_units(tmp_path: Path, header: str, first: object, second: object) -> None:
    text = f"\ufeff{header},note\r\n{first},10,2,\r\n\r\n{second},11.0,3,late\r\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 2.25]
    assert trace.prompt_tokens.tolist() == [10, 11]
    assert trace.output_tokens.tolist() == [2, 3]


def test_columns_cannot_be_written_to(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 1


ROWS = st.lists(
    st.tuples(st.integers(0, 10**12), st.integers(1, MAX_TOKENS), st.integers(1, MAX_TOKENS)),
    min_size=1,
    max_size=30,
)


@given(ROWS)
def test_any_trace_reads_back_from_all_three_shapes(rows: list[tuple[int, int, int]]) -> None:
    """Times in units of 100 ns since some moment, written as a wall clock, as milliseconds, as seconds."""
    rows = sorted(rows)
    ticks = np.array([t - rows[0][0] for t, _, _ in rows])
    start = datetime(2023, 11, 16, 18, 15, 46)  # noqa: DTZ001
    azure, plain = io.StringIO(), io.StringIO()
    csv.writer(azure).writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
    csv.writer(plain).writerow(["arrival_s", "prompt_tokens", "output_tokens"])
    mooncake = []
    for t, p, o in rows:
        clock = start + timedelta(seconds=t // 10**7)
        csv.writer(azure).writerow([f"{clock:%Y-%m-%d %H:%M:%S}.{t % 10**7:07d}", p, o])
        csv.writer(plain).writerow([f"{t // 10**7}.{t % 10**7:07d}", p, o])
        mooncake.append(json.dumps({"timestamp": t / 1e4, "input_length": p, "output_length": o}))
    with tempfile.TemporaryDirectory() as folder:
        for text in (azure.getvalue(), plain.getvalue(), "\n".join(mooncake)):
            trace = read_trace(written(Path(folder), text))
            assert trace.arrival_s is not None
            np.testing.assert_allclose(trace.arrival_s, ticks / 1e7, rtol=0, atol=2e-11 * max(1, rows[-1][0] / 1e7))
            assert trace.prompt_tokens.tolist() == [p for _, p, _ in rows]
            assert trace.output_tokens.tolist() == [o for _, _, o in rows]


# --- what is refused --------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    text = """\
arrival_s,prompt_tokens,output_tokens
0,10,0
1,-5,2
abc,10,2
4,nan,2
3.5,10,1.5
inf,10,
5,2000000000,2
6,10
"""
    assert problems(tmp_path, text) == [
        "2: output_tokens: must be at least 1 token, not 0; drop requests that generated nothing, "
        "or give the first token its 1: simtune workload --zero-output",
        "3: prompt_tokens: must be at least 1 token, not -5; drop requests without a prompt",
        "4: arrival_s: must be a finite number, not 'abc'",
        "5: prompt_tokens: must be a finite number, not 'nan'",
        "6: arrival_s: 3.5 is earlier than 4 of line 5; sort the rows by time",
        "6: output_tokens: must be a whole number of tokens, not 1.5",
        "7: arrival_s: must be a finite number, not 'inf'",
        "7: output_tokens: must be a finite number, not an empty cell",
        "8: prompt_tokens: must be at most 1000000000 tokens, not 2000000000",
        "9: has 2 columns, the header has 3; the file seems to be cut off",
    ]


def test_long_lists_of_problems_are_cut_with_a_count(tmp_path: Path) -> None:
    text = "prompt_tokens,output_tokens\n" + "0,1\n" * (MAX_SHOWN + 7)
    found = problems(tmp_path, text)
    assert len(found) == MAX_SHOWN + 1
    assert found[-1] == "... and 7 more"
    assert len(problems(tmp_path, "prompt_tokens,output_tokens\n" + "0,1\n" * MAX_SHOWN)) == MAX_SHOWN


def test_an_unsorted_wall_clock_shows_both_times(tmp_path: Path) -> None:
    text = AZURE.replace("18:15:51.2224670", "18:15:50.9951689")
    assert problems(tmp_path, text) == [
        "4: TIMESTAMP: 2023-11-16 18:15:50.9951689 is earlier than 2023-11-16 18:15:50.9951690 of line 3; "
        "sort the rows by time"
    ]


@pytest.mark.parametrize(
    "clock", ["18:15:50", "2023-13-16 18:15:50", "1700158550.5", "2023-11-16 18:15:50+2", "now", ""]
)
def test_a_time_that_is_no_utc_wall_clock_is_refused(tmp_path: Path, clock: str) -> None:
    (told,) = problems(tmp_path, AZURE.replace("2023-11-16 18:15:50.9951690", clock))
    assert told.startswith("3: TIMESTAMP: must be a time such as 2026-03-01T09:30:00+01:00, ")
    assert told.endswith(f"nanoseconds since 1970, not {clock!r}")


def test_a_wrong_column_name_is_answered_with_the_right_one(tmp_path: Path) -> None:
    assert problems(tmp_path, "arival_s,prompt_tokns,tokens_out\n1,2,3\n") == [
        "1: arival_s: unknown column, did you mean arrival_s?",
        "1: prompt_tokns: unknown column, did you mean prompt_tokens?",
        "1: output_tokens: this column is missing; found: arival_s, prompt_tokns, tokens_out; it may also be called "
        "generated_tokens, generatedtokens, completion_tokens, num_decode_tokens, output_length, output_toks; another "
        "name: simtune workload FILE --columns arrival=NAME,prompt=NAME,output=NAME",
    ]
    assert problems(tmp_path, "arrival_s,prompt_tokens,input_tokens,output_tokens\n1,2,2,3\n") == [
        "1: input_tokens: prompt_tokens and input_tokens both give the prompt; keep one of them"
    ]
    assert problems(tmp_path, "0.5,100,20\n0.7,100,20\n") == [
        "1: the first line must name the columns, for example arrival_s,prompt_tokens,output_tokens"
    ]


def test_an_empty_trace_is_not_a_light_load(tmp_path: Path) -> None:
    assert problems(tmp_path, "") == ["the file is empty; a trace has one request per line"]
    assert problems(tmp_path, "\n \n") == ["the file is empty; a trace has one request per line"]
    assert problems(tmp_path, "", "t.csv.gz") == ["the file is empty; a trace has one request per line"]
    assert problems(tmp_path, "arrival_s,prompt_tokens,output_tokens\n") == [
        "1: the trace is empty: a header and no request"
    ]


def test_rows_that_are_all_too_short_are_all_that_is_said(tmp_path: Path) -> None:
    assert problems(tmp_path, "prompt_tokens,output_tokens\n5\n6,7,8\n") == [
        "2: has 1 columns, the header has 2",
        "3: has 3 columns, the header has 2",
    ]
    assert problems(tmp_path, 'prompt_tokens,output_tokens\n5,"6\n') == ["2: not valid CSV: unexpected end of data"]


def test_what_a_trace_says_of_its_blocks_is_looked_at(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [%s], "block_tokens": %s}\n'
    for tokens in ("0", "1.5", "true"):
        (told,) = problems(tmp_path, row % (1, tokens))
        assert told == f"1: block_tokens: must be a whole number of tokens, not {json.loads(tokens)!r}"
    assert problems(tmp_path, row % (MAX_HASH_ID + 1, 4)) == [
        f"1: hash_ids: must be at most {MAX_HASH_ID}, not {MAX_HASH_ID + 1}"
    ]


def test_lines_of_which_none_is_a_request_are_all_that_is_said(tmp_path: Path) -> None:
    assert [told.partition(" JSON: ")[0] for told in problems(tmp_path, '{"a"\n{"b": }\n')] == [
        f"{n}: not valid" for n in (1, 2)
    ]
    assert problems(tmp_path, '{"timestamp": 0}\n')[0].startswith("1: ")
    times = "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\nlater,1,1\n"
    assert [told.partition(", ")[0] for told in problems(tmp_path, times)] == [
        f"{n}: TIMESTAMP: must be a time such as 2026-03-01T09:30:00+01:00" for n in (2, 3)
    ]


def test_json_lines_are_judged_line_by_line(tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}\n'
    text = (
        good
        + "[1, 2]\n"
        + '{"timestamp": true, "input_length": "5", "output_length": 0, "hash_ids": [0]}\n'
        + '{"timestamp": null, "input_length": 513, "output_length": 1, "hash_ids": [0, 1.5]}\n'
        + '{"timestamp": 2, "input_length": 512, "output_length": 1, "hash_ids": [0, 1]}\n'
        + '{"timestamp": 1, "input_length": 10000000000, "output_length": 1, "hash_ids": [-1]}\n'
        + '{"timestamp": 1, "input_length": 1' + "0" * 400 + ', "output_length": 1, "hash_ids": []}\n'
        + '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}\n'
        + '{"timestamp": 3, "input_le'
    )  # fmt: skip
    assert problems(tmp_path, text) == [
        "2: must be a JSON object with one request",
        "3: timestamp: must be a finite number, not True",
        "3: input_length: must be a finite number, not '5'",
        "3: output_length: must be at least 1 token, not 0; drop requests that generated nothing, "
        "or give the first token its 1: simtune workload --zero-output",
        "4: timestamp: must be a finite number, not None",
        "4: hash_ids: must be a list of whole numbers of at least 0",
        "5: hash_ids: has 2 ids, the prompt 1 blocks of 512 tokens",
        "6: timestamp: 1 is earlier than 2 of line 5; sort the rows by time",
        "6: input_length: must be at most 1000000000 tokens, not 10000000000",
        "6: hash_ids: must be a list of whole numbers of at least 0",
        "7: not valid JSON: 1000000000000000000000000000000000000000... (401 characters) is larger than any number "
        "of 64 bits",
        "8: not valid JSON: NaN is not JSON: write null where there is no number",
        "9: not valid JSON: Unterminated string starting at; the file seems to be cut off",
    ]


def test_json_lines_with_missing_keys_and_lists(tmp_path: Path) -> None:
    text = MOONCAKE + '{"timestamp": 5000, "input_length": 7, "output_length": 6}\n{"timestamp": 5000}\n'
    assert problems(tmp_path, text) == [
        "3: hash_ids: is missing here",
        "4: input_length: is missing here",
        "4: output_length: is missing here",
        "4: hash_ids: is missing here",
    ]
    assert problems(tmp_path, '[{"timestamp": 0}]') == [
        "1: a JSON list was found; write one JSON object per line (JSON lines)"
    ]
    assert problems(tmp_path, '{"timestamp": 0, "input_length": 7, "outputlength": 6}\n') == [
        "1: outputlength: unknown column, did you mean output_length?"
    ]


def test_damaged_compression_is_told_from_damaged_text(tmp_path: Path) -> None:
    whole = gzip.compress(AZURE.encode() * 50)
    for name, raw, told in [
        ("cut.csv.gz", whole[:-20], "cut off"),
        ("bad.csv.gz", whole[:40] + b"\x00\xff" * 20 + whole[80:], "damaged"),
        ("plain.csv.gz", AZURE.encode(), "is named .gz but is not gzip-compressed"),
    ]:
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(SpecError) as error:
            read_trace(path)
        assert str(error.value).startswith(f"{path}: ")
        assert told in str(error.value)


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv: no such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="is a folder, a file was expected"):
        read_trace(tmp_path)
    (tmp_path / "latin.csv").write_bytes(b"arrival_s,prompt_tokens,caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin\.csv:1: not a UTF-8 text file"):
        read_trace(tmp_path / "latin.csv")


@given(st.binary(max_size=200), st.sampled_from([b"", AZURE.encode(), MOONCAKE.encode(), b"\x1f\x8b\x08\x00"]))
def test_whatever_the_bytes_the_answer_is_a_trace_or_a_simtune_error(tail: bytes, head: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        path.write_bytes(head + tail)
        try:
            trace = read_trace(path)
        except (SpecError, UsageError) as error:
            told = str(error)
        else:
            told = str(path)
            assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 1
        assert told.startswith(str(path))


# --- the published traces ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "prompt_median", "prompt_mean", "prompt_max", "output_median", "output_mean"),
    [
        ("azure_2023_conv.csv.gz", 12_000, 1025, 1254.3, 14_050, 116, 204.8),
        ("azure_2023_code.csv.gz", 5_500, 1463, 2026.0, 7_437, 13, 27.3),
    ],
)
def test_the_azure_traces_have_their_published_statistics(
    data_dir: Path, name: str, requests: int, prompt_median: float, prompt_mean: float, prompt_max: int,
    output_median: float, output_mean: float,
) -> None:  # fmt: skip
    trace = read_trace(data_dir / "traces" / name)
    assert len(trace) == requests
    assert np.median(trace.prompt_tokens) == pytest.approx(prompt_median, abs=0.5)
    assert trace.prompt_tokens.mean() == pytest.approx(prompt_mean, abs=0.06)
    assert trace.prompt_tokens.max() == prompt_max
    assert np.median(trace.output_tokens) == pytest.approx(output_median, abs=0.5)
    assert trace.output_tokens.mean() == pytest.approx(output_mean, abs=0.06)


def test_an_unbounded_prefix_cache_would_reuse_the_known_share_of_mooncake_blocks(data_dir: Path) -> None:
    trace = read_trace(data_dir / "traces" / "mooncake_conversation.jsonl.gz")
    assert trace.arrival_s is not None
    assert trace.hash_ids is not None
    assert (len(trace), float(trace.arrival_s[-1])) == (7_000, 2_166.0)
    seen: set[int] = set()
    reused = 0
    for ids in trace.hash_ids:
        for block in ids:
            if block not in seen:
                break
            reused += 1
        seen.update(ids)
    assert reused / sum(map(len, trace.hash_ids)) == pytest.approx(0.3468, abs=5e-5)


def test_vidur_lengths_and_measured_workloads_are_read_too(data_dir: Path) -> None:
    lengths = read_trace(data_dir / "traces" / "vidur_arxiv_summarization.csv.gz")
    assert (len(lengths), lengths.arrival_s) == (14_128, None)
    (measured,) = (data_dir / "validation").glob("*/sharegpt*workload.csv.gz")
    assert len(read_trace(measured)) == 300


def test_other_tables_are_refused_with_what_they_lack(data_dir: Path) -> None:
    with pytest.raises(SpecError, match=r"rates\.csv\.gz:1: prompt_tokens: this column is missing; found: client,"):
        read_trace(data_dir / "traces" / "servegen_m_small_rates.csv.gz")
