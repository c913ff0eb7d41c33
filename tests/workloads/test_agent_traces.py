"""Runs of agents as WEKA's kv-cache-tester and OpenTelemetry write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtune.cli.workload import workload as verb
from simtune.errors import SpecError, UsageError
from simtune.specs.columns import replay
from simtune.specs.trace_cut import merged
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import ClosedLoop
from simtune.workload.requests import build_stream
from tests.sim.test_agent_sessions import check_order, deployed


def call(t: float, tokens: int, output: int, ids: range, **fields: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": tokens, "out": output, "hash_ids": [*ids], **fields}


def session(**fields: Any) -> dict[str, Any]:
    """A call of 2 s, another 1 s later that starts two sub-agents, and one that waits for them."""
    agent = {"type": "subagent", "agent_id": "a", "subagent_type": "Explore", "status": "completed", "models": ["m"]}
    first = [call(6.5, 640, 64, range(500, 510), api_time=1.0), call(9.0, 768, 64, range(500, 512), api_time=2.0)]
    second = [call(6.5, 320, 10, range(700, 705), api_time=0.5)]
    requests = [
        call(0.0, 1280, 128, range(20), api_time=2.0),
        call(3.0, 1536, 128, range(24), api_time=3.0, think_time=1.0),
        {**agent, "t": 6.5, "requests": first},
        {**agent, "t": 6.5, "agent_id": "b", "requests": second},
        call(14.0, 1792, 64, range(28), api_time=1.0, think_time=0.25),
    ]
    return {"id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests, **fields}


def read(folder: Path, *objects: Any, name: str = "trace.json") -> Trace:
    file = folder / name
    file.write_text("".join(json.dumps(x) + "\n" for x in objects))
    return read_trace(file)


def test_sub_agents_run_at_once_and_are_waited_for(tmp_path: Path) -> None:
    trace = read(tmp_path, session())
    assert trace.turns is not None
    assert trace.arrival_s is None
    assert trace.prompt_tokens.tolist() == [1280, 1536, 640, 768, 320, 1792]
    assert list(trace.turns.after) == [(), (0,), (1,), (2,), (1,), (1, 3, 4)]
    assert trace.turns.pause_s == pytest.approx([0.0, 1.0, 0.5, 1.5, 0.5, 3.0]), "after the last answer that it needs"
    assert "WEKA" in trace.notes[0]


def test_a_prompt_names_the_answer_before_it(tmp_path: Path) -> None:
    trace = read(tmp_path, session(), session(id="t"))
    assert trace.hash_ids is not None
    assert trace.block_tokens == 64
    first, second, *_ = trace.hash_ids
    assert (len(first), len(second)) == (22, 26)
    assert trace.hash_ids[5][:26] == second
    assert not set(first) & set(trace.hash_ids[6]), "names are local to a session"
    whole = read(tmp_path, session(hash_id_scope="global"), session(id="t", hash_id_scope="global"))
    assert whole.hash_ids is not None
    assert whole.hash_ids[0] == whole.hash_ids[6]


def test_sessions_run_in_lanes(tmp_path: Path) -> None:
    """A trace without times is replayed by a closed loop: each lane takes the next session after its last."""
    trace = merged([read(tmp_path, session(), name="a.json"), read(tmp_path, session(), session(), name="b.json")])
    load = replay(trace, "t").model_copy(update={"arrivals": ClosedLoop(users=2)})
    stream = build_stream(load, trace, requests=5, seed=0)
    assert len(stream) == 30
    result = deployed().simulate(stream)
    check_order(stream, result)
    assert result.outcome.family_begin[2] == result.outcome.family_end[:2].min()
    with pytest.raises(UsageError, match="has no arrival times"):
        build_stream(replay(trace, "t"), trace, requests=3, seed=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 0}, "block_size: must be a whole number of tokens, not 0"),
        ({"hash_id_scope": "planet"}, "hash_id_scope: must be local or global, not 'planet'"),
        ({"requests": []}, "requests: has no call: the session is empty"),
        ({"requests": {}}, "requests: must be a list of calls"),
        ({"requests": [{"type": "x"}]}, "requests: type must be n, s or subagent, not 'x'"),
        ({"requests": [{"type": "n", "in": 5, "out": 5, "t": None}]}, "t: must be a number of seconds"),
        ({"requests": [{"type": "n", "out": 5, "t": 0}]}, "in: is missing in a call"),
        ({"requests": [{"type": "n", "in": 5, "out": 5, "t": 0, "hash_ids": [-1]}]}, "hash_ids: must be a list of"),
        ({"requests": [{"type": "n", "in": 0, "out": 5, "t": 0}]}, "in: must be at least 1 token, not 0"),
        ({"requests": [{"type": "subagent", "t": 0}]}, "requests: a sub-agent must have a list of calls"),
    ],
)
def test_odd_weka_files_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, session(**changed))
    assert message in str(caught.value)


def test_a_cut_weka_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_text(json.dumps(session())[:-40])
    with pytest.raises(SpecError, match="not valid JSON"):
        read_trace(file)


# --- OpenTelemetry --------------------------------------------------------------------------------------------------


def span(name: str, begin_s: float, end_s: float, parent: str = "", tokens: tuple[int, int] | None = None,
         **fields: Any) -> dict[str, Any]:  # fmt: skip
    attributes = [] if tokens is None else [
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": str(tokens[0])}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": str(tokens[1])}},
    ]  # fmt: skip
    start = 1_700_000_000
    times = {"startTimeUnixNano": str(int((start + begin_s) * 1e9)), "endTimeUnixNano": str(int((start + end_s) * 1e9))}
    return {"traceId": "t", "spanId": name, "parentSpanId": parent, "name": name, "attributes": attributes, **times,
            **fields}  # fmt: skip


def spans(*of: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": [*of]}]}]}


RUN = [
    span("agent", 0, 20, tokens=(9000, 900)),
    span("plan", 0, 2, "agent", (1000, 100)),
    span("tool", 2, 5, "agent"),
    span("left", 5, 8, "tool", (400, 50)),
    span("right", 5, 9, "tool", (500, 60)),
    span("sum", 10, 12, "agent", (1300, 80)),
]


def test_spans_become_a_session_that_forks_and_joins(tmp_path: Path) -> None:
    other = [{**x, "traceId": "u", "spanId": f"u{x['spanId']}",
              "parentSpanId": x["parentSpanId"] and f"u{x['parentSpanId']}"} for x in RUN]  # fmt: skip
    trace = read(tmp_path, spans(*RUN), spans(*other), name="spans.jsonl")
    assert trace.turns is not None
    assert trace.num_arrivals == 2
    assert list(trace.turns.after) == [(), (0,), (0,), (1, 2)] * 2
    assert trace.turns.pause_s == pytest.approx([0.0, 3.0, 3.0, 1.0] * 2)
    assert trace.prompt_tokens.tolist() == [1000, 400, 500, 1300] * 2
    assert trace.began_s == pytest.approx(1_700_000_000)
    assert "2 spans that contain counted calls left out" in trace.notes
    assert "2 spans that are no calls to a model left out" in trace.notes
    stream = build_stream(replay(trace, "t"), trace, requests=2, seed=0)
    check_order(stream, deployed().simulate(stream))


def test_a_prompt_of_the_same_agent_goes_on_from_the_one_before(tmp_path: Path) -> None:
    chain = [span(f"c{i}", 3 * i, 3 * i + 1, "agent", (1000 + 200 * i, 100)) for i in range(3)]
    trace = read(tmp_path, spans(*chain))
    assert trace.hash_ids is not None
    assert trace.hash_ids[1][: 1100 // 16] == trace.hash_ids[0]
    assert trace.hash_ids[2][: 1300 // 16] == trace.hash_ids[1]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ([span("x", 0, 1)], "no span has counts of tokens"),
        ([span("x", 2, 1, tokens=(5, 5))], "endTimeUnixNano: is before startTimeUnixNano"),
        ([span("x", 0, 1, tokens=(5, 5), startTimeUnixNano="soon")], "must be nanoseconds since 1970, not 'soon'"),
        ([span("x", 0, 1, tokens=(0, 5))], "must be at least 1 token, not 0"),
    ],
)
def test_odd_spans_are_refused(tmp_path: Path, of: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, spans(*of))
    assert message in str(caught.value)


def test_the_verb_finds_agents_among_all_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path, session(), name="weka.json")
    assert verb.main([str(tmp_path / "weka.json")], standalone_mode=False) is None
    shown = capsys.readouterr()
    assert "1, 6.00 turns each" in shown.out
    assert "6 requests in 1 sessions: turns follow the answers before them" in shown.err
