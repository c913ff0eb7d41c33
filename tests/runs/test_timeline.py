"""Steps become slices and counters that Perfetto can draw."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.runs.timeline import TraceSlice, chrome_trace

PREFILL = TraceSlice("instance 0", 0, 0.0, 0.020, 1, 0, 512, 1, 2, 90)
MIXED = TraceSlice("instance 0", 0, 0.020, 0.030, 1, 1, 256, 2, 1, 80)
JUMP = TraceSlice("instance 0", 0, 0.031, 0.131, 10, 2, 0, 2, 1, 80)
OTHER = TraceSlice("instance 1", 3, 0.010, 0.015, 1, 5, 0, 5, 0, 7)


def read(trace: bytes) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    assert isinstance(events, list)
    return events


@pytest.mark.parametrize("wrong", [PREFILL._replace(end_s=-1.0), MIXED._replace(start_s=0.019)])
def test_a_core_does_one_thing_at_a_time(wrong: TraceSlice) -> None:
    with pytest.raises(ValueError, match=r"its core is busy until .* s, or it ends before it begins"):
        chrome_trace([PREFILL, wrong])


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == kind]


def test_each_step_is_one_slice_on_the_track_of_its_core_in_microseconds() -> None:
    slices = of_kind(read(chrome_trace([PREFILL, MIXED, JUMP, OTHER])), "X")
    assert [(s["name"], s["pid"], s["tid"], s["ts"], s["dur"]) for s in slices] == [
        ("prefill", 0, 0, 0, 20_000),
        ("mixed", 0, 0, 20_000, 10_000),
        ("decode x 10", 0, 0, 31_000, 100_000),
        ("decode", 1, 3, 10_000, 5_000),
    ]
    assert slices[0]["args"] == {
        "steps": 1,
        "decodes": 0,
        "prefill tokens": 512,
        "running": 1,
        "waiting": 2,
        "free KV blocks": 90,
    }


def test_counters_speak_only_when_something_changed() -> None:
    counters = of_kind(read(chrome_trace([PREFILL, MIXED, JUMP])), "C")
    assert [(c["name"], c["ts"], c["args"]) for c in counters] == [
        ("requests", 0, {"running": 1, "waiting": 2}),
        ("free KV blocks", 0, {"blocks": 90}),
        ("requests", 20_000, {"running": 2, "waiting": 1}),
        ("free KV blocks", 20_000, {"blocks": 80}),
    ]


def test_instances_and_cores_are_named_and_ordered() -> None:
    named = {(m["name"], m["pid"], m["tid"]): m["args"] for m in of_kind(read(chrome_trace([OTHER, PREFILL])), "M")}
    assert named["process_name", 1, 0] == {"name": "instance 1"}
    assert named["process_sort_index", 1, 0] == {"sort_index": 1}
    assert named["thread_name", 1, 3] == {"name": "engine core 3"}
    assert named["thread_sort_index", 1, 3] == {"sort_index": 3}


def test_order_of_arrival_does_not_matter_and_the_bytes_hold_no_time_of_day() -> None:
    forward, backward = chrome_trace([PREFILL, MIXED, OTHER]), chrome_trace([OTHER, MIXED, PREFILL])
    assert forward == backward
    assert forward[4:8] == bytes(4)  # the modification time of a gzip header
    assert forward[9] == 255  # no system: Python's releases name it differently


@pytest.mark.parametrize(
    "broken",
    [
        MIXED._replace(start_s=0.019),
        MIXED._replace(start_s=0.030, end_s=0.029),
        PREFILL._replace(start_s=-1e-3),
    ],
)
def test_steps_that_could_not_be_drawn_are_refused(broken: TraceSlice) -> None:
    with pytest.raises(ValueError, match="core"):
        chrome_trace([PREFILL, broken])


def test_nothing_happened_is_a_valid_trace() -> None:
    assert read(chrome_trace([])) == []


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.floats(0, 0.5), st.floats(0, 0.5)), max_size=60),
    st.floats(0, 1e5),
)
def test_slices_of_a_track_never_overlap_once_written(
    gaps: list[tuple[int, int, float, float]], origin_s: float
) -> None:
    """Floats that touch exactly must not be pulled over each other by the change of unit."""
    clock: dict[tuple[int, int], float] = {}
    steps = []
    for instance, core, idle_s, busy_s in gaps:
        start_s = clock.get((instance, core), origin_s) + idle_s
        clock[instance, core] = start_s + busy_s
        steps.append(TraceSlice(f"mixed {instance}", core, start_s, start_s + busy_s, 1, 1, 0, 1, 0, 1))
    slices = of_kind(read(chrome_trace(steps)), "X")
    assert len(slices) == len(steps)
    for track in {(s["pid"], s["tid"]) for s in slices}:
        spans = [
            (round(s["ts"] * 1000), round((s["ts"] + s["dur"]) * 1000)) for s in slices if (s["pid"], s["tid"]) == track
        ]
        assert all(a <= b for a, b in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
