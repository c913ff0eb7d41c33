"""Files that load generators wrote, as they wrote them: tokens and times are those of the tool's own summary."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import SpecError
from simtune.specs.trace_formats import LogReading
from simtune.specs.traces import Trace, read_trace

TOOLS = Path(__file__).parent / "tools"


def written(name: str) -> Any:
    return json.loads((TOOLS / name).read_text())


def arrivals(trace: Trace) -> list[float]:
    assert trace.arrival_s is not None
    return [float(t) for t in trace.arrival_s]


def test_vllm_bench_serve() -> None:
    trace, said = read_trace(TOOLS / "vllm-bench.json"), written("vllm-bench.json")
    assert len(trace.prompt_tokens) == said["completed"] == 8
    assert int(trace.prompt_tokens.sum()) == said["total_input_tokens"]
    assert int(trace.output_tokens.sum()) == said["total_output_tokens"]
    ends = [start + latency for start, latency in zip(arrivals(trace), said["latencies"], strict=True)]
    assert max(ends) == pytest.approx(said["duration"], rel=0.15)  # the tool starts its clock before its first request
    assert trace.notes == ("read as vllm bench serve",)


@pytest.mark.parametrize("part", [1, 2])
def test_guidellm(part: int) -> None:
    trace = read_trace(TOOLS / "guidellm.json", LogReading(part=part))
    said = written("guidellm.json")["benchmarks"][part - 1]
    count = said["metrics"]["request_totals"]["successful"]
    assert len(trace.prompt_tokens) == count == 6
    for tokens, kind in ((trace.prompt_tokens, "prompt_token_count"), (trace.output_tokens, "output_token_count")):
        own = said["metrics"][kind]["successful"]
        assert (int(tokens.sum()), int(tokens.min()), int(tokens.max())) == (own["total_sum"], own["min"], own["max"])
    assert trace.began_s == said["start_time"]
    assert 0 < arrivals(trace)[-1] < said["duration"]
    assert trace.session is not None
    assert sorted(trace.session.tolist()) == [0, 0, 1, 1, 2, 2]
    turns = [t for s in range(3) for t in trace.prompt_tokens[trace.session == s].tolist()]
    assert all(first < second for first, second in zip(turns[::2], turns[1::2], strict=True))


def test_aiperf() -> None:
    trace, said = read_trace(TOOLS / "aiperf.jsonl"), written("aiperf-summary.json")
    assert len(trace.prompt_tokens) == said["request_count"]["avg"] == 4
    assert int(trace.prompt_tokens.sum()) == said["total_isl"]["avg"]
    assert int(trace.output_tokens.sum()) == said["total_osl"]["avg"]
    failed = said["error_request_count"]["avg"]
    assert trace.notes == (
        "read as aiperf",
        "1 requests of the warm-up left out",
        f"{failed:.0f} failed requests left out",
    )
    begin, end = (datetime.fromisoformat(said[key]).replace(tzinfo=None) for key in ("start_time", "end_time"))
    assert arrivals(trace)[-1] < (end - begin).total_seconds()


def test_genai_perf() -> None:
    trace = read_trace(TOOLS / "genai-perf.json", LogReading(characters_per_token=1.0))
    said = written("genai-perf-summary.json")
    assert len(trace.prompt_tokens) == said["request_count"]["avg"] == 6
    for tokens, kind in ((trace.prompt_tokens, "input"), (trace.output_tokens, "output")):
        own = said[f"{kind}_sequence_length"]
        assert (tokens.mean(), tokens.min(), tokens.max()) == (pytest.approx(own["avg"]), own["min"], own["max"])
    # The tool's throughput counts the seventh request too, of which it says nothing else.
    duration_s = (len(trace.prompt_tokens) + 1) / said["request_throughput"]["avg"]
    assert arrivals(trace)[-1] + said["request_latency"]["max"] / 1e3 == pytest.approx(duration_s, rel=0.02)
    assert trace.notes[1] == "1 requests that nothing came back for left out"
    assert trace.session is not None
    assert trace.session.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_wrong_field_of_genai_perf_is_named(tmp_path: Path) -> None:
    wrong = written("genai-perf.json")
    del wrong["experiments"][0]["requests"][2]["timestamp"]
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    with pytest.raises(SpecError, match=r"wrong\.json.*timestamp"):
        read_trace(tmp_path / "wrong.json")
