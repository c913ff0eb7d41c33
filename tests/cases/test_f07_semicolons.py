"""A spreadsheet's CSV of a country with decimal commas, with names and dates of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.errors import SpecError
from simtune.specs.trace_formats import LogReading
from simtune.specs.traces import Trace, read_trace
from tests.cli.conftest import call

WEEK = Path(__file__).parent / "data" / "f07-semicolons" / "week.csv"
NAMED = "arrival=ts,prompt=tokens_in,output=tokens_out"


def named(path: Path, columns: str) -> Trace:
    return read_trace(path, LogReading(columns=tuple(tuple(pair.split("=")) for pair in columns.split(","))))  # type: ignore[misc]


def written(folder: Path, text: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_columns_are_seen_and_the_message_says_what_they_may_be_called() -> None:
    said = call("workload", WEEK)
    assert said.code == 2
    assert "found: ts, status, tokens_in, tokens_out; it may also be called input_tokens" in said.err
    assert "--columns arrival=NAME,prompt=NAME,output=NAME" in said.err


def test_columns_are_named_by_hand(tmp_path: Path) -> None:
    out = tmp_path / "requests.csv"
    said = call("workload", WEEK, "--columns", NAMED, "--out", out, "--json")
    assert said.code == 0
    assert "columns not read: status" in said.err
    trace = read_trace(out)
    assert trace.rate_rps == pytest.approx(1.0)
    assert trace.prompt_tokens.tolist() == list(range(150, 170))
    assert trace.output_tokens.tolist() == list(range(40, 60))


def test_the_clock_is_read_to_the_millisecond() -> None:
    trace = named(WEEK, NAMED)
    assert trace.began_s == pytest.approx(1794182400.118, abs=1e-6)  # 2026-11-09 00:00:00.118 UTC


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_what_stands_between_columns(tmp_path: Path, delimiter: str) -> None:
    rows = ["arrival_s,prompt_tokens,output_tokens", "0.5,5,6", "1.5,7,8"]
    trace = read_trace(written(tmp_path, "\n".join(row.replace(",", delimiter) for row in rows)))
    assert trace.arrival_s is not None
    assert (trace.arrival_s.tolist(), trace.output_tokens.tolist()) == ([0, 1], [6, 8])


def test_decimal_commas(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "arrival_s;prompt_tokens;output_tokens\n0,25;5;6\n1,75;7;8\n"))
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0, 1.5]


def test_points_that_may_mean_thousands_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_s;prompt_tokens;output_tokens\n0;1.500;6\n")
    with pytest.raises(SpecError, match=r"prompt_tokens: 1\.500 may be 1500 or a fraction"):
        read_trace(path)


@pytest.mark.parametrize(("unit", "seconds"), [("arrival_s", 2000.0), ("arrival_ms", 2.0), ("arrival_ns", 2e-6)])
def test_the_unit_of_numbers_is_said_with_their_name(tmp_path: Path, unit: str, seconds: float) -> None:
    path = written(tmp_path, "t,in,out\n0,5,6\n2000,7,8\n")
    trace = named(path, f"{unit}=t,prompt=in,output=out")
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == pytest.approx([0, seconds])
    with pytest.raises(SpecError, match="--columns arrival_s=t"):
        named(path, "arrival=t,prompt=in,output=out")


def test_keys_of_json_lines_are_named_too(tmp_path: Path) -> None:
    rows = '{"at": {"begin": "2026-08-01T10:00:00Z"}, "n": {"in": 5, "out": 6}}\n'
    rows += '{"at": {"begin": "2026-08-01T10:00:03Z"}, "n": {"in": 7, "out": 8}}\n'
    trace = named(written(tmp_path, rows, "log.jsonl"), "arrival=at.begin,prompt=n.in,output=n.out")
    assert trace.arrival_s is not None
    assert (trace.arrival_s.tolist(), trace.prompt_tokens.tolist()) == ([0, 3], [5, 7])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("arrival", "write FIELD=NAME"),
        ("time=ts", "write FIELD=NAME"),
        ("prompt=", "write FIELD=NAME"),
        ("arrival=ts,arrival_s=ts", "names a field twice"),
        ("prompt=tokens_inn", "no column has this name, did you mean tokens_in?"),
    ],
)
def test_columns_that_cannot_be_meant(columns: str, said: str) -> None:
    result = call("workload", WEEK, "--columns", columns)
    assert result.code == 2
    assert said in result.err
