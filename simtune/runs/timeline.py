"""The steps of a simulation over time: sampled for the summary, and every one of them for ui.perfetto.dev.

The latter is gzipped Chrome trace JSON, opened by dropping it on the page: one process per instance, one track per
engine core. A core runs one step at a time: overlapping slices could not be drawn. Counters are those of the latest
step, until the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.result import Result
from simtune.runs.files import packed
from simtune.runs.schema import Timeline

POINTS = 400
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def sampled(result: Result, pool: str | None = None) -> Timeline:
    """Return running, waiting and KV use of the whole deployment or of one pool, at POINTS even times."""
    outcome = result.outcome
    if not outcome.records:
        return Timeline(t_s=(), running=(), waiting=(), kv_used=())
    records, cores = outcome.records, [n for n, core in enumerate(outcome.cores) if pool in (None, core.pool)]
    grid = np.linspace(0, records.column("end").max(), POINTS)
    running, waiting, kv_used = np.zeros(POINTS), np.zeros(POINTS), np.zeros(POINTS)
    for number in cores:
        of_core = np.flatnonzero(records.column("core") == number)
        if not len(of_core):
            continue
        at = np.searchsorted(records.column("start")[of_core], grid, side="right") - 1
        latest = of_core[at]
        inside = (at >= 0) & (grid < records.column("end")[latest])
        free = records.column("free_blocks")[latest] / outcome.cores[number].blocks
        running += np.where(inside, records.column("running")[latest], 0)
        waiting += np.where(inside, records.column("waiting")[latest], 0)
        kv_used += np.where(inside, 1 - free, 0)
    return Timeline(
        t_s=tuple((grid / TICKS_PER_SECOND).tolist()),
        running=tuple(running.tolist()),
        waiting=tuple(waiting.tolist()),
        kv_used=tuple((kv_used / len(cores)).tolist()),
    )


# --- for ui.perfetto.dev ----------------------------------------------------------------------------------


class TraceSlice(NamedTuple):
    """A step, or a run of `steps` equal ones, on the track of an engine core.

    `running`, `waiting` and `free_blocks` are as the scheduler left them when the step began.
    """

    instance: str
    core: int
    start_s: float
    end_s: float
    steps: int
    num_decodes: int
    prefill_tokens: int
    running: int
    waiting: int
    free_blocks: int

    @property
    def name(self) -> str:
        """Kind of the step, and the number of equal steps."""
        kind = "mixed" if self.num_decodes and self.prefill_tokens else "prefill" if self.prefill_tokens else "decode"
        return kind if self.steps == 1 else f"{kind} x {self.steps}"


def trace_file(result: Result, window_s: tuple[float, float] | None = None) -> bytes:
    """Yield the simulated steps; only those in the window, if one is given."""
    return packed(_trace_json(_SlicesInOrder(result, window_s)))


class _SlicesInOrder:
    """Yield the slices of a simulation by instance, start and core, one by one: a list of them would take several times
    the memory of the steps.
    """

    def __init__(self, result: Result, window_s: tuple[float, float] | None) -> None:
        records, cores = result.outcome.records, result.outcome.cores
        self._records = records
        self._of_core = [(f"{core.pool} {core.instance}", core.virtual_engine) for core in cores]
        places = np.array([sorted({name for name, _ in self._of_core}).index(name) for name, _ in self._of_core])
        engines = np.array([engine for _, engine in self._of_core])
        start, end, core = (records.column(name) for name in ("start", "end", "core"))
        self._order = np.lexsort((end, engines[core], start, places[core])) if len(records) else np.zeros(0, int)
        if window_s is not None:
            first, last = (x * TICKS_PER_SECOND for x in window_s)
            self._order = self._order[(end[self._order] > first) & (start[self._order] < last)]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[TraceSlice]:
        for at in self._order.tolist():
            core, start, end, *counts = self._records.counts(at)
            yield TraceSlice(
                *self._of_core[core], start / TICKS_PER_SECOND, end / TICKS_PER_SECOND, *counts[: len(counts) - 1]
            )


def chrome_trace(slices: Iterable[TraceSlice]) -> bytes:
    """The same bytes for the same slices, in whatever order they come.

    Times are rounded to nanoseconds. Raises ValueError when two slices of one track overlap.
    """
    return packed(_trace_json(sorted(slices, key=lambda s: (s.instance, s.start_s, s.core, s.end_s))))


def _trace_json(ordered: Collection[TraceSlice] | _SlicesInOrder) -> Iterator[str]:
    """Yield the text in parts: all events together would take ten times the memory of the steps."""
    separator = '{"displayTimeUnit":"ms","traceEvents":['
    for event in _events(ordered):
        yield separator
        yield _JSON.encode(event)
        separator = ","
    yield "]}" if ordered else f"{separator}]}}"


def _events(ordered: Iterable[TraceSlice]) -> Iterator[dict[str, Any]]:
    tracks = sorted({(s.instance, s.core) for s in ordered})
    processes = {name: number for number, name in enumerate(sorted({s.instance for s in ordered}, key=_natural))}
    yield from _track_names(processes, tracks)
    free_ns = dict.fromkeys(tracks, 0)
    last_values: dict[tuple[str, str], dict[str, int]] = {}
    for s in ordered:
        process, start_ns, end_ns = processes[s.instance], round(s.start_s * 1e9), round(s.end_s * 1e9)
        busy_until_ns = free_ns[s.instance, s.core]
        if not busy_until_ns <= start_ns <= end_ns:
            raise ValueError(f"{s}: its core is busy until {busy_until_ns / 1e9} s, or it ends before it begins")
        free_ns[s.instance, s.core] = end_ns
        yield _slice_event(s, process, start_ns, end_ns)
        for counter, values in (
            ("requests", {"running": s.running, "waiting": s.waiting}),
            ("free KV blocks", {"blocks": s.free_blocks}),
        ):
            if last_values.get((s.instance, counter)) != values:
                last_values[s.instance, counter] = values
                yield {"ph": "C", "name": counter, "pid": process, "ts": start_ns / 1000, "args": values}


def _slice_event(s: TraceSlice, process: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": s.name,
        "pid": process,
        "tid": s.core,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {
            "steps": s.steps,
            "decodes": s.num_decodes,
            "prefill tokens": s.prefill_tokens,
            "running": s.running,
            "waiting": s.waiting,
            "free KV blocks": s.free_blocks,
        },
    }


def _track_names(processes: dict[str, int], tracks: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the names of the processes and tracks, and their order on the page."""
    events = []
    for instance, number in processes.items():
        events.append(_metadata("process_name", number, 0, name=instance))
        events.append(_metadata("process_sort_index", number, 0, sort_index=number))
    for instance, core in tracks:
        events.append(_metadata("thread_name", processes[instance], core, name=f"engine core {core}"))
        events.append(_metadata("thread_sort_index", processes[instance], core, sort_index=core))
    return events


def _natural(name: str) -> list[tuple[int, str]]:
    """`mixed 10` after `mixed 9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _metadata(what: str, instance: int, core: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": instance, "tid": core, "args": args}
