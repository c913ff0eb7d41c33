"""Steps of a simulation as a timeline: gzipped Chrome trace JSON, opened by dropping it on ui.perfetto.dev.

One process per instance, one track per engine core. A core runs one step at a time: overlapping slices could not be
drawn. Counters are those of the latest step and stand until the next one.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """One step, or a run of `steps` equal ones, of one instance.

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


def chrome_trace(events: Iterable[StepRecord]) -> bytes:
    """The same bytes for the same steps, in whatever order they come.

    Times are rounded to nanoseconds. Raises ValueError when two steps of one core overlap.
    """
    steps = sorted(events, key=lambda e: (e.instance, e.start_s, e.core, e.end_s))
    cores = sorted({(e.instance, e.core) for e in steps})
    out: list[dict[str, Any]] = []
    processes = {instance: number for number, instance in enumerate(sorted({e.instance for e in steps}, key=_natural))}
    for instance, number in processes.items():
        out.append(_metadata("process_name", number, 0, name=instance))
        out.append(_metadata("process_sort_index", number, 0, sort_index=number))
    for instance, core in cores:
        out.append(_metadata("thread_name", processes[instance], core, name=f"engine core {core}"))
        out.append(_metadata("thread_sort_index", processes[instance], core, sort_index=core))
    free_ns = dict.fromkeys(cores, 0)
    shown: dict[tuple[str, str], dict[str, int]] = {}
    for step in steps:
        start_ns, end_ns = round(step.start_s * 1e9), round(step.end_s * 1e9)
        core_of = (step.instance, step.core)
        if not free_ns[core_of] <= start_ns <= end_ns:
            raise ValueError(f"{step}: its core is busy until {free_ns[core_of] / 1e9} s, or it ends before it begins")
        free_ns[core_of] = end_ns
        out.append(
            {
                "ph": "X",
                "name": _name(step),
                "pid": processes[step.instance],
                "tid": step.core,
                "ts": start_ns / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "args": {
                    "steps": step.steps,
                    "decodes": step.num_decodes,
                    "prefill tokens": step.prefill_tokens,
                    "running": step.running,
                    "waiting": step.waiting,
                    "free KV blocks": step.free_blocks,
                },
            }
        )
        for counter, values in (
            ("requests", {"running": step.running, "waiting": step.waiting}),
            ("free KV blocks", {"blocks": step.free_blocks}),
        ):
            if shown.get((step.instance, counter)) != values:
                shown[step.instance, counter] = values
                out.append(
                    {"ph": "C", "name": counter, "pid": processes[step.instance], "ts": start_ns / 1000, "args": values}
                )
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": out}, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), mtime=0)


def _natural(name: str) -> list[tuple[int, str]]:
    """`mixed 10` after `mixed 9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _metadata(what: str, instance: int, core: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": instance, "tid": core, "args": args}


def _name(step: StepRecord) -> str:
    kind = "mixed" if step.num_decodes and step.prefill_tokens else "prefill" if step.prefill_tokens else "decode"
    return kind if step.steps == 1 else f"{kind} x {step.steps}"
