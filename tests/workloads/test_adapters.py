"""LoRA adapters of requests: drawn by their popularity, or named by a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.errors import SpecError, UsageError
from simtune.sim.streamed import StreamedLoad
from simtune.specs.columns import trace_of
from simtune.specs.trace_cut import Cut, merged
from simtune.specs.trace_write import trace_text
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import Workload
from simtune.workload.requests import RequestStream, build_stream

LENGTHS = {"prompt": {"kind": "fixed", "tokens": 64}, "output": {"kind": "fixed", "tokens": 8}}


def load(adapters: Any = None, **keys: Any) -> Workload:
    usual = {"name": "w", "arrivals": {"kind": "poisson", "rate_rps": 10.0}, **LENGTHS}
    with_adapters = {} if adapters is None else {"adapters": adapters}
    return Workload.model_validate(usual | with_adapters | keys, strict=False)


def drawn(workload: Workload, requests: int = 20_000, seed: int = 0, trace: Trace | None = None) -> RequestStream:
    return build_stream(workload, trace, requests=requests, seed=seed)


def adapters_of(stream: RequestStream) -> list[int]:
    assert stream.adapter is not None
    return [int(number) for number in stream.adapter]


def test_a_load_without_adapters_names_none() -> None:
    assert drawn(load(), 100).adapter is None


@pytest.mark.parametrize("zipf", [0.0, 0.9, 2.0])
def test_they_are_asked_for_by_their_popularity(zipf: float) -> None:
    """Within 5 standard errors of k**-zipf, among the requests that ask for one."""
    n = 20_000
    numbers = np.array(adapters_of(drawn(load({"count": 5, "zipf": zipf, "base_share": 0.25}), n)))
    share = np.array([1.0, *[0] * 5])
    popularity = np.arange(1, 6) ** -zipf
    share = np.concatenate([[0.25], 0.75 * popularity / popularity.sum()])
    counts = np.bincount(numbers + 1, minlength=6)
    assert len(counts) == 6
    assert (np.abs(counts / n - share) < 5 * np.sqrt(share * (1 - share) / n)).all()


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 90))
@settings(max_examples=20, deadline=None)
def test_a_request_has_the_same_whatever_else_is_drawn(seed: int, count: int, fewer: int) -> None:
    workload = load({"count": count, "zipf": 1.0, "base_share": 0.1})
    more = drawn(workload, 90, seed)
    assert adapters_of(drawn(workload, fewer, seed)) == adapters_of(more)[:fewer]
    # All else is drawn as without adapters.
    plain = drawn(load(), 90, seed)
    assert plain.arrivals_s is not None
    assert more.arrivals_s is not None
    assert np.array_equal(plain.arrivals_s, more.arrivals_s)
    chosen = np.arange(90) % 3 == 0
    assert adapters_of(more.kept(chosen)) == [x for x, keep in zip(adapters_of(more), chosen, strict=True) if keep]


def test_streamed_requests_have_those_of_kept_ones() -> None:
    workload = load({"count": 40, "zipf": 1.0}, shared_prefix={"groups": 2, "tokens": 32})
    streamed = list(StreamedLoad(workload, None, requests=40_000, seed=3).chunks())
    kept = drawn(workload, 40_000, 3)
    assert len(streamed) == 2
    assert [x for chunk in streamed for x in adapters_of(chunk)] == adapters_of(kept)
    assert streamed[1].hash_ids is not None
    assert kept.hash_ids is not None
    assert [*streamed[1].hash_ids[:50]] == [*kept.hash_ids[1 << 15 : (1 << 15) + 50]]


def test_classes_with_adapters_of_their_own_share_them_with_no_other() -> None:
    classes = [
        {"name": "a", "share": 1.0, "adapters": {"count": 3}},
        {"name": "b", "share": 1.0},
        {"name": "c", "share": 1.0},
    ]
    stream = drawn(load({"count": 2}, classes=classes), 5000)
    numbers = np.array(adapters_of(stream))
    of_class = [set(numbers[stream.class_index == index].tolist()) for index in range(3)]
    assert of_class == [{0, 1, 2}, {3, 4}, {3, 4}]
    alone = drawn(load(None, classes=classes), 5000)
    assert set(np.array(adapters_of(alone))[alone.class_index > 0].tolist()) == {-1}


@pytest.mark.parametrize("keys", [
    {"sessions": {"turns": 4, "concurrent": 6}},
    {"sessions": {"turns": 4, "pause_s": 1.0}},
    {"graph": [{"name": "first", "count": 2}, {"name": "then", "after": ["first"]}]},
])  # fmt: skip
def test_all_requests_of_a_session_or_family_ask_for_one(keys: dict[str, Any]) -> None:
    stream = drawn(load({"count": 50}, **keys), 48)
    assert stream.session is not None
    by_session: dict[int, set[int]] = {}
    for session, number in zip(stream.session.tolist(), adapters_of(stream), strict=True):
        by_session.setdefault(session, set()).add(number)
    assert {len(numbers) for numbers in by_session.values()} == {1}
    assert len({min(numbers) for numbers in by_session.values()}) > 5


def test_requests_share_blocks_with_those_of_their_adapter_only() -> None:
    stream = drawn(load({"count": 4, "base_share": 0.3}, shared_prefix={"groups": 1, "tokens": 32}), 200)
    assert stream.hash_ids is not None
    names: dict[int, set[tuple[int, ...]]] = {}
    for number, blocks in zip(adapters_of(stream), stream.hash_ids, strict=True):
        names.setdefault(number, set()).add(blocks)
    assert {len(texts) for texts in names.values()} == {1}
    every = [name for texts in names.values() for text in texts for name in text]
    assert len(names) == 5
    assert len(set(every)) == len(every) == 5 * 2


# --- traces --------------------------------------------------------------------------------------------------


CSV = """arrival_s,prompt_tokens,output_tokens,adapter
0,10,2,fr
1,20,3,
2,30,4,de
3,40,5,fr
"""


def replay(trace: Trace, **keys: Any) -> Workload:
    lengths = {"kind": "trace"}
    return load(arrivals={"kind": "trace"}, prompt=lengths, output=lengths, trace=trace.file, **keys)


def test_a_column_of_a_trace_names_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    trace = read_trace(path)
    stream = drawn(replay(trace), 6, trace=trace)
    assert adapters_of(stream) == [0, -1, 1, 0, 0, -1]
    for name in ("again.csv", "again.jsonl"):
        (tmp_path / name).write_text(trace_text(trace, name))
        again = read_trace(tmp_path / name)
        assert again.adapter is not None
        assert again.adapter.tolist() == [0, -1, 1, 0]
    with pytest.raises(UsageError, match="the trace names adapters already; remove adapters"):
        drawn(replay(trace, adapters={"count": 2}), 6, trace=trace)


def test_sessions_of_a_trace_are_replayed_with_theirs(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(0, "[]", '"a"'), (0, "[0]", '"a"'), (1, "[]", "null"), (2, "[]", '"b"')]
    line = '{{"arrival_s": {0}, "prompt_tokens": 8, "output_tokens": 2, "session": {0}, "after": {1}, "adapter": {2}, '
    path.write_text("".join(line.format(*row) + '"pause_s": 0.5}\n' for row in rows))
    trace = read_trace(path)
    assert trace.turns is not None
    assert adapters_of(drawn(replay(trace), 5, trace=trace)) == [0, 0, -1, 1, 0, 0, -1]


def test_parts_of_traces_keep_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    trace = read_trace(path)
    busiest = Cut(peak="1.5s").of(trace)
    assert busiest.adapter is not None
    assert len(busiest.adapter) == len(busiest)
    both = merged([trace, trace])
    assert both.adapter is not None
    assert sorted(both.adapter.tolist()) == [-1, -1, 0, 0, 1, 2, 2, 3]


def test_columns_in_memory_may_name_them() -> None:
    columns = {"arrival_s": [0.0, 1.0, 2.0], "prompt_tokens": [5, 5, 5], "output_tokens": [1, 1, 1]}
    trace = trace_of({**columns, "adapter": ["x", None, "y"]})
    assert trace.adapter is not None
    assert trace.adapter.tolist() == [0, -1, 1]
    assert trace.sha256 != trace_of(columns).sha256
    with pytest.raises(UsageError, match="must be of one length"):
        trace_of({**columns, "adapter": ["x"]})


def test_what_is_no_name_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 8, "output_tokens": 2, "adapter": [1]}\n')
    with pytest.raises(SpecError, match=r":1: adapter: must be the name of an adapter or null, not \[1\]"):
        read_trace(path)
