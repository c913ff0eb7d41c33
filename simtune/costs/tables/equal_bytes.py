"""Tables of one kernel in two number formats of equal bytes: where one takes much longer, it times something else.

A product of few rows reads its weights and does little besides, so that formats whose weights take as many bytes take
about as long. Sound pairs of published tables, on six cards and three engines, are within a factor of 1.7 of each other
in the median of their common shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import numpy as np

from simtune.costs.tables.common import Dispute, Table
from simtune.specs.base import DTYPE_BYTES

KINDS = ("gemm", "moe")
"""Operators whose time is that of reading weights."""
UNLIKE = 2.0
COMMON = 30
"""Shapes that both tables must have."""


def disputes(operators: Mapping[str, Table]) -> dict[str, Dispute]:
    """Return, by key, the tables that take at least `UNLIKE` times as long as one in a format of equal bytes."""
    refused: dict[str, Dispute] = {}
    pairs = permutations([key for key, table in operators.items() if table.kind in KINDS], 2)
    for key, rival in pairs:
        slow, fast = operators[key], operators[rival]
        same_bytes = DTYPE_BYTES.get(slow.dtype) == DTYPE_BYTES.get(fast.dtype) is not None
        if (slow.kind, slow.kv_dtype, slow.variant) != (fast.kind, fast.kv_dtype, fast.variant) or not same_bytes:
            continue
        times, faster = _by_shape(slow), _by_shape(fast)
        common = times.keys() & faster.keys()
        if len(common) < COMMON:
            continue
        ratio = float(np.median([times[shape] / faster[shape] for shape in common]))
        if ratio >= UNLIKE and (key not in refused or ratio > refused[key].ratio):
            refused[key] = Dispute(key, rival, ratio, len(common))
    return refused


def _by_shape(table: Table) -> dict[tuple[float, ...], float]:
    """Return the median seconds of each shape."""
    names = sorted(table.shape)
    rows: dict[tuple[float, ...], list[float]] = {}
    for *shape, seconds in zip(*(table.shape[name].tolist() for name in names), table.seconds.tolist(), strict=True):
        rows.setdefault(tuple(shape), []).append(seconds)
    return {shape: float(np.median(times)) for shape, times in rows.items()}
