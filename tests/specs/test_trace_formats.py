"""Files of load generators and gateways are recognised by content, read, and refused by the name of their format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import SpecError, UsageError
from simtune.specs import catalog
from simtune.specs.trace_formats import LogReading
from simtune.specs.traces import Trace, read_trace

# As vllm/benchmarks/serve.py writes it with --save-result --save-detailed; the third request failed.
VLLM: dict[str, Any] = {
    "date": "20260301-093000",
    "endpoint_type": "openai-chat",
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "num_prompts": 4,
    "request_rate": 2.0,
    "duration": 9.5,
    "completed": 3,
    "total_input_tokens": 1600,
    "total_output_tokens": 130,
    "request_throughput": 0.3157894736842105,
    "input_lens": [1000, 200, 700, 400],
    "output_lens": [100, 20, 0, 10],
    "ttfts": [0.1, 0.05, 0.0, 0.06],
    "itls": [[0.01], [0.01], [], [0.01]],
    "start_times": [5123.5, 5124.0, 5124.25, 5126.0],
    "generated_texts": ["a", "b", "", "d"],
    "errors": ["", "", "Timeout", ""],
}


def aiperf(start_ns: int, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    metadata = {"session_num": 0, "benchmark_phase": "profiling", "request_start_ns": start_ns, "turn_index": 0}
    metadata |= more.pop("metadata", {})
    metrics = {
        "input_sequence_length": {"value": prompt, "unit": "tokens"},
        "output_sequence_length": {"value": output, "unit": "tokens"},
        "time_to_first_token": {"value": 55.0, "unit": "ms"},
    }
    return {"metadata": metadata, "metrics": metrics, "error": None, **more}


START = 1_770_000_000_000_000_000
AIPERF: list[dict[str, Any]] = [
    aiperf(START + 1_500_000_000, 30, 3, metadata={"x_correlation_id": "b"}),
    aiperf(START, 550, 40, metadata={"x_correlation_id": "a"}),
    aiperf(START + 2_000_000_001, 900, 9, metadata={"x_correlation_id": "a", "turn_index": 1}),
    aiperf(START - 5_000_000_000, 10, 1, metadata={"benchmark_phase": "warmup"}),
    aiperf(START + 1, 10, 1, error={"code": 500, "message": "no"}),
]


def guidellm_request(start: float, prompt: int, output: int) -> dict[str, Any]:
    stats = {"type_": "generative_request_stats", "request_id": "r", "prompt_tokens": prompt, "output_tokens": output}
    return {**stats, "start_time": start, "end_time": start + 1}


GUIDELLM = {
    "benchmarks": [
        {
            "requests": {
                "successful": [guidellm_request(1770000002.5, 128, 64), guidellm_request(1770000000.0, 256, 32)],
                "incomplete": [guidellm_request(1770000003.0, 128, 1)],
                "errored": [],
            }
        },
        {"requests": {"successful": [guidellm_request(1770000100.0, 512, 5)], "incomplete": [], "errored": []}},
    ]
}

GENAI_PERF = {
    "service_kind": "openai",
    "endpoint": "v1/chat/completions",
    "experiments": [
        {
            "experiment": {"mode": "concurrency", "value": 1},
            "requests": [
                {
                    "timestamp": START + 250_000_000,
                    "request_inputs": {
                        "payload": json.dumps({"messages": [{"role": "user", "content": "x" * 400}], "model": "m"})
                    },
                    "response_timestamps": [START + 300_000_000],
                    "response_outputs": [
                        {"response": 'data: {"choices":[{"delta":{"content":"' + "y" * 30 + '"}}]}'},
                        {"response": 'data: {"choices":[{"delta":{"content":"' + "z" * 10 + '"}}]}\n\ndata: [DONE]'},
                    ],
                },
                {
                    "timestamp": START,
                    "request_inputs": {"payload": json.dumps({"prompt": "p" * 80})},
                    "response_timestamps": [START + 1],
                    "response_outputs": [
                        {"response": '{"choices":[{"text":"q"}],"usage":{"prompt_tokens":21,"completion_tokens":7}}'}
                    ],
                },
            ],
        }
    ],
}

SHAREGPT = [
    {
        "id": "one",
        "conversations": [
            {"from": "human", "value": "a" * 400},
            {"from": "gpt", "value": "b" * 200},
            {"from": "human", "value": "c" * 40},
            {"from": "gpt", "value": "d" * 80},
        ],
    },
    {"id": "no answer", "conversations": [{"from": "human", "value": "hello"}]},
    {"id": "two", "conversations": [{"from": "system", "value": "s" * 64}, {"from": "gpt", "value": "ok"}]},
]

OPENAI: list[dict[str, Any]] = [
    {
        "timestamp": "2026-03-01T10:30:00+01:00",
        "session_id": "x",
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
    },
    {"timestamp": "2026-03-01T09:30:02.5Z", "session_id": "y", "usage": {"prompt_tokens": 8, "completion_tokens": 2}},
    {"timestamp": "2026-03-01T09:30:01Z", "session_id": "x", "usage": {"prompt_tokens": 7, "completion_tokens": 1}},
    {"timestamp": "2026-03-01T09:30:09Z", "status_code": 429, "session_id": "z", "usage": None},
]


def document(folder: Path, data: Any, name: str = "log.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data, indent=1))
    return path


def lines(folder: Path, rows: list[Any], name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def columns(trace: Trace) -> tuple[list[float] | None, list[int], list[int]]:
    times = None if trace.arrival_s is None else trace.arrival_s.tolist()
    return times, trace.prompt_tokens.tolist(), trace.output_tokens.tolist()


def refused(path: Path, reading: LogReading | None = None) -> str:
    with pytest.raises(SpecError) as error:
        read_trace(path, reading or LogReading())
    assert str(error.value).startswith(str(path))
    return str(error.value).removeprefix(str(path)).lstrip(":0123456789 ")


# --- what is read -----------------------------------------------------------------------------------------


def test_vllm_bench_results_agree_with_their_own_totals(tmp_path: Path) -> None:
    trace = read_trace(document(tmp_path, VLLM))
    assert columns(trace) == ([0.0, 0.5, 2.5], [1000, 200, 400], [100, 20, 10])
    assert int(trace.prompt_tokens.sum()) == VLLM["total_input_tokens"]
    assert int(trace.output_tokens.sum()) == VLLM["total_output_tokens"]
    assert trace.notes == ("read as vllm bench serve", "1 failed requests left out")
    assert trace.began_s is None  # its clock is no time of day


def test_vllm_bench_on_one_line_and_without_start_times(tmp_path: Path) -> None:
    old = {key: value for key, value in VLLM.items() if key != "start_times"}
    trace = read_trace(lines(tmp_path, [old]))
    assert columns(trace) == (None, [1000, 200, 400], [100, 20, 10])
    assert trace.notes[-1] == "it has no start_times, so it is lengths only"


def test_aiperf_records_are_sorted_and_keep_their_conversations(tmp_path: Path) -> None:
    trace = read_trace(lines(tmp_path, AIPERF))
    assert columns(trace) == ([0.0, 1.5, 2.000000001], [550, 30, 900], [40, 3, 9])
    assert trace.session is not None
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.began_s == START / 1e9
    assert trace.notes == ("read as aiperf", "1 requests of the warm-up left out", "1 failed requests left out")


def test_guidellm_asks_which_of_several_benchmarks(tmp_path: Path) -> None:
    path = document(tmp_path, GUIDELLM)
    assert refused(path) == "holds 2 benchmarks; choose one, --part 1 to --part 2"
    assert refused(path, LogReading(part=3)) == "has no part 3: it holds 2 benchmarks"
    trace = read_trace(path, LogReading(part=1))
    assert columns(trace) == ([0.0, 2.5], [256, 128], [32, 64])
    assert trace.notes == ("read as guidellm", "1 incomplete requests left out")


def test_newer_guidellm_keeps_its_numbers_deeper(tmp_path: Path) -> None:
    row = {
        "info": {"timings": {"request_start": 12.5}},
        "input_metrics": {"text_tokens": 7},
        "output_metrics": {"text_tokens": 5},
    }
    one = {"benchmarks": [{"requests": {"successful": [row], "incomplete": [], "errored": []}}]}
    assert columns(read_trace(document(tmp_path, one))) == ([0.0], [7], [5])


def test_genai_perf_counts_what_the_server_counted_and_estimates_the_rest(tmp_path: Path) -> None:
    trace = read_trace(document(tmp_path, GENAI_PERF))
    assert columns(trace) == ([0.0, 0.25], [21, 100], [7, 10])
    assert trace.notes[-1] == "lengths estimated from texts, 4 characters to a token"


def test_what_is_no_request_or_no_list_of_them_is_said(tmp_path: Path) -> None:
    requests = GENAI_PERF["experiments"][0]["requests"]  # type: ignore[index]
    for broken, said in (
        (["no request", *requests], "timestamp"),
        ([*requests, {"timestamp": START, "response_outputs": 5}], "response_outputs: must be at least 1 token"),
        (5, "has no list of requests"),
    ):
        experiments = [{"requests": requests}, {"requests": broken}]
        path = document(tmp_path, {"service_kind": "openai", "experiments": experiments})
        assert said in refused(path, LogReading(part=2))
    benchmarks = [{"requests": {"successful": []}}, 5]
    path = document(tmp_path, {"benchmarks": benchmarks})
    assert "no successful request" in refused(path, LogReading(part=2))
    rows = {"successful": [guidellm_request(1.0, 8, 4)], "incomplete": 7}
    assert columns(read_trace(document(tmp_path, {"benchmarks": [{"requests": rows}]}))) == ([0.0], [8], [4])


def test_sharegpt_turns_contain_what_was_said_before(tmp_path: Path) -> None:
    trace = read_trace(document(tmp_path, SHAREGPT), LogReading(characters_per_token=2.0))
    assert columns(trace) == (None, [200, 320, 32], [100, 40, 1])
    assert trace.hash_ids is not None
    assert trace.session is not None
    first, second, other = trace.hash_ids
    assert second[: len(first)] == first
    assert not set(second) & set(other)
    assert trace.session.tolist() == [0, 0, 1]
    assert trace.block_tokens == 16
    assert columns(read_trace(lines(tmp_path, SHAREGPT)))[1] == [100, 160, 16]


def test_gateway_logs_know_the_time_of_day(tmp_path: Path) -> None:
    trace = read_trace(lines(tmp_path, OPENAI))
    assert columns(trace) == ([0.0, 1.0, 2.5], [9, 7, 8], [3, 1, 2])
    assert trace.began_s == 1772357400.0  # 2026-03-01 09:30 UTC
    assert trace.session is not None
    assert trace.session.tolist() == [0, 0, 1]
    assert trace.notes[-1] == "1 lines without an answer left out"


@pytest.mark.parametrize(("created", "per_s"), [(1772357400, 1), (1772357400000, 1e3), (1772357400000000000, 1e9)])
def test_numbers_since_1970_are_told_by_their_size(tmp_path: Path, created: int, per_s: float) -> None:
    rows = [{"created": int(created + i * per_s), "prompt_tokens": 5, "completion_tokens": i + 1} for i in range(3)]
    assert columns(read_trace(lines(tmp_path, rows))) == ([0.0, 1.0, 2.0], [5, 5, 5], [1, 2, 3])


def test_milliseconds_since_a_start_stay_what_they_were(tmp_path: Path) -> None:
    rows = [{"timestamp": 1500 * i, "prompt_tokens": 5, "completion_tokens": 1} for i in range(3)]
    trace = read_trace(lines(tmp_path, rows))
    assert (columns(trace)[0], trace.began_s) == ([0.0, 1.5, 3.0], None)


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_requests_of_no_output_token_have_an_option(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t"
    rows = [{"arrival_s": i, "prompt_tokens": 5, "output_tokens": i} for i in range(3)]
    table = "arrival_s,prompt_tokens,output_tokens\n0,5,0\n1,5,1\n2,5,2\n"
    path.write_text(table if kind == "csv" else "".join(json.dumps(row) + "\n" for row in rows))
    assert "must be at least 1 token, not 0" in refused(path)
    dropped = read_trace(path, LogReading(zero_output="drop"))
    assert (columns(dropped), dropped.notes) == (
        ([0.0, 1.0], [5, 5], [1, 2]),
        ("1 requests of no output token left out",),
    )
    given = read_trace(path, LogReading(zero_output="one"))
    assert columns(given) == ([0.0, 1.0, 2.0], [5, 5, 5], [1, 1, 2])


def test_clocks_ahead_of_utc_are_set_back(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    times = ("2024-05-10 02:00:00.5+02:00", "2024-05-10 00:00:01Z", "2024-05-09 20:00:02-04:00")
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{t},4,2\n" for t in times))
    trace = read_trace(path)
    assert (columns(trace)[0], trace.began_s) == ([0.0, 0.5, 1.5], 1715299200.5)


# --- what is refused --------------------------------------------------------------------------------------


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    totals = {key: value for key, value in VLLM.items() if key != "output_lens"}
    assert refused(document(tmp_path, totals)).startswith("output_lens: the requests are missing, only totals are here")
    assert refused(document(tmp_path, VLLM | {"start_times": [1.0]})) == (
        "start_times: has 1 entries, input_lens has 4"
    )
    summary = {"request_throughput": {"unit": "requests/sec", "avg": 2.0}, "input_config": {}}
    assert "is the summary of aiperf or genai-perf and holds no requests" in refused(document(tmp_path, summary))
    lost = {**AIPERF[1], "metrics": {}}
    assert refused(lines(tmp_path, [AIPERF[0], lost])).endswith("metrics.input_sequence_length.value: is missing here")
    assert refused(lines(tmp_path, [*OPENAI[:1], OPENAI[1] | {"timestamp": "soon"}])).startswith(
        "timestamp: must be a time such as 2026-03-01T09:30:00+01:00"
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{**row, "status_code": 500} for row in OPENAI], "usage: no line has prompt and completion tokens"),
        ([OPENAI[0], OPENAI[1] | {"timestamp": True}], "timestamp: must be a time such as 2026-03-01T09:30:00+01:00"),
        ([OPENAI[0], OPENAI[1] | {"timestamp": 7}], "timestamp: must be a time such as 2026-03-01T09:30:00+01:00"),
        (
            [OPENAI[0], OPENAI[1] | {"timestamp": "2026-13-01T09:30:00Z"}],
            "timestamp: must be a time such as 2026-03-01T09:30:00+01:00",
        ),
        ([{"conversations": [{"from": "human", "value": "so?"}]}], "conversations: no conversation has an answer"),
    ],
)
def test_a_log_without_requests_or_times_says_so(tmp_path: Path, rows: list[Any], said: str) -> None:
    assert refused(lines(tmp_path, rows)).startswith(said)


def test_a_log_without_times_is_lengths_only(tmp_path: Path) -> None:
    path = lines(tmp_path, [{key: value for key, value in row.items() if key != "timestamp"} for row in OPENAI])
    trace = read_trace(path)
    assert trace.arrival_s is None
    assert any(note.startswith("it has no times, so it is lengths only; a time may be called") for note in trace.notes)


def test_a_benchmark_without_a_successful_request_is_no_load(tmp_path: Path) -> None:
    endings: tuple[Any, ...] = ({"successful": []}, {"errored": [1]}, "none")
    for ended in endings:
        said = refused(document(tmp_path, {"benchmarks": [{"requests": ended}]}))
        assert said == "requests.successful: no successful request is in this benchmark"
    failed = VLLM | {"errors": ["out of memory"] * len(VLLM["input_lens"])}
    assert refused(document(tmp_path, failed)) == "no request is left"


def test_a_benchmark_is_a_load_and_no_model(tmp_path: Path) -> None:
    path = document(tmp_path, VLLM, "bench.json")
    workload, trace = catalog.load_workload(str(path))
    assert (workload.name, workload.requests, trace is not None) == ("bench", 3, True)
    assert catalog.load(str(path)) == workload
    with pytest.raises(UsageError, match=r"looks like vllm bench serve, which is a load and no model"):
        catalog.load_model(str(path))
