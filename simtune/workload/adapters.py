"""LoRA adapters of the requests of a load: drawn by the popularity of each adapter, or those that a trace names.

The adapter of a request depends on the seed and its number alone, or on the number of its session or family, all of
whose requests ask for the same one. Blocks of prompts are shared only by requests with the same adapter: an engine's
prefix cache names blocks by their adapter as well (vLLM 0.33: `_gen_lora_extra_hash_keys`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.errors import UsageError
from simtune.specs.adapters import NO_ADAPTER, Adapters
from simtune.specs.traces import Trace
from simtune.specs.workload import Workload
from simtune.workload.sampling import ADAPTER, Span, drawn, uniforms


class AdapterBlocks(Sequence[tuple[int, ...]]):
    """Names of the blocks of prompts, different for each of `count` adapters and the base model."""

    def __init__(self, rows: Sequence[tuple[int, ...]], adapter: Ints, count: int) -> None:
        self._rows, self._adapter, self._count = rows, adapter, count

    def __len__(self) -> int:
        return len(self._adapter)

    @overload
    def __getitem__(self, at: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> AdapterBlocks: ...
    def __getitem__(self, at: int | slice) -> tuple[int, ...] | AdapterBlocks:
        if isinstance(at, slice):
            return AdapterBlocks(self._rows[at], self._adapter[at], self._count)
        step, shift = self._count + 1, int(self._adapter[at]) + 1
        return tuple([name * step + shift for name in self._rows[at]])

    def kept(self, which: NDArray[np.bool_]) -> AdapterBlocks:
        """Return the blocks of the requests for which `which` is true."""
        rows = tuple(self._rows[i] for i in np.flatnonzero(which).tolist())
        return AdapterBlocks(rows, self._adapter[which], self._count)


class Asking(NamedTuple):
    """Requests of a range as far as their adapters depend on them."""

    class_index: Ints
    session: Ints | None
    """Session or family of each; a group with a shared prefix is one for routing only."""
    replayed: bool
    """True if they are the turns of a trace's sessions, which follow answers."""


def adapters_of(
    asking: Asking, workload: Workload, trace: Trace | None, span: Span, seed: int
) -> tuple[Ints, int] | None:
    """Return the adapter of each request of a range, and the number of all adapters; None if no request asks for one.

    Raises UsageError if both the workload and its trace name adapters."""
    of_trace = None if trace is None or workload.classes or workload.prompt.kind != "trace" else trace.adapter
    specs = [c.adapters or workload.adapters for c in workload.classes] or [workload.adapters]
    if of_trace is not None:
        if any(specs):
            raise UsageError(f"{workload.trace}: the trace names adapters already; remove adapters")
        numbers = _rows_of_turns(asking, trace) if asking.replayed else span.numbers
        return of_trace[numbers % len(of_trace)], int(of_trace.max()) + 1
    if not any(specs):
        return None
    # A group of requests with a shared prefix is a session for routing only.
    follows = bool(workload.graph) or workload.sessions is not None or workload.shared_prefix is None
    session = asking.session if follows else None
    if session is None:
        levels = drawn(seed, ADAPTER, span)
    else:
        levels = uniforms(seed, ADAPTER, int(session.max()) + 1)[session]
    return _drawn(specs, asking.class_index, levels)


def _rows_of_turns(asking: Asking, trace: Trace | None) -> Ints:
    """Return the row of the trace that each turn of repeated sessions comes from."""
    assert trace is not None
    assert trace.turns is not None
    assert asking.session is not None
    first, session = trace.turns.first, asking.session
    begins = np.concatenate([[0], np.flatnonzero(np.diff(session)) + 1])
    within = np.arange(len(session)) - np.repeat(begins, np.diff([*begins, len(session)]))
    rows: Ints = first[session % (len(first) - 1)] + within
    return rows


def _drawn(specs: Sequence[Adapters | None], class_index: Ints, levels: Array) -> tuple[Ints, int]:
    """Return the adapters at these levels, by the classes of the requests, and the number of all adapters."""
    first: dict[int, int] = {}
    count = 0
    for spec in specs:
        if spec is not None and id(spec) not in first:
            first[id(spec)] = count
            count += spec.count
    adapter = np.full(len(levels), NO_ADAPTER, dtype=np.int64)
    for index, spec in enumerate(specs):
        if spec is None:
            continue
        of_class = slice(None) if len(specs) == 1 else class_index == index
        adapter[of_class] = _at_levels(spec, levels[of_class], first[id(spec)])
    return adapter, count


def _at_levels(spec: Adapters, levels: Array, first: int) -> Ints:
    """Return the adapters at levels in [0, 1): below `base_share` none, above it by their popularity."""
    weights = np.arange(1, spec.count + 1, dtype=np.float64) ** -spec.zipf
    upper = np.cumsum(weights)
    at = (levels - spec.base_share) / (1 - spec.base_share) * upper[-1]
    numbers = np.minimum(np.searchsorted(upper, at, side="right"), spec.count - 1) + first
    adapter: Ints = np.where(levels < spec.base_share, NO_ADAPTER, numbers)
    return adapter
