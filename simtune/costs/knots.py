"""Knots of tables, and the knots that straight lines make unnecessary."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import UsageError

KNOTS_PER_OCTAVE = 8
STRAIGHT = 5e-4
"""Share of a value by which a line may miss it to save a knot: fewer knots make longer jumps, which end at knots."""

LONGEST_S = 1e5
"""Upper limit of a step's seconds, about a day. Ticks of more than 97 days do not fit 63 bits."""


def knots(per_octave: int, longest: int, edges: Collection[int] = ()) -> Array:
    """Return whole numbers from 1 to `longest` (at least 2), geometric, and the edges within."""
    longest = max(2, longest)
    count = round(per_octave * np.log2(longest)) + 1
    numbers = set(np.rint(np.geomspace(1, longest, count)).astype(int).tolist())
    return np.array(sorted(numbers.union(edge for edge in edges if edge < longest)), dtype=np.float64)


def sizes(x: Array) -> Array:
    """Return knots among ascending sizes: all of them if few, eight per octave, and both sides of every tile of 128
    rows up to 8,192.
    """
    distinct = np.unique(x)
    edges = np.arange(128, 8193, 128)
    candidates = np.concatenate([distinct[:64], edges, edges + 1, knots(KNOTS_PER_OCTAVE, int(distinct[-1]))])
    at = np.searchsorted(distinct, candidates[candidates <= distinct[-1]])
    return np.unique(distinct[at])


def bends(x: Ints, y: Ints) -> list[int]:
    """Return the knots to keep so that straight lines between them pass all others within `STRAIGHT`, both ends among
    them.

    From each knot the line reaches as far as some line stays within tolerance of every knot on the way (the swing
    filter of Elmeleegy et al., VLDB 2009).
    """
    corners, (x0, y0), least, most = [0], (int(x[0]), int(y[0])), -math.inf, math.inf
    for i, (x1, y1) in enumerate(zip(x[1:].tolist(), y[1:].tolist(), strict=True), start=1):
        if not least <= (y1 - y0) / (x1 - x0) <= most:
            corners.append(i - 1)
            x0, y0, least, most = int(x[i - 1]), int(y[i - 1]), -math.inf, math.inf
        least = max(least, (y1 * (1 - STRAIGHT) - y0) / (x1 - x0))
        most = min(most, (y1 * (1 + STRAIGHT) - y0) / (x1 - x0))
    return [*corners, len(x) - 1]


def rising(values: Array) -> Array:
    """Return values that never fall along the last axis: the mean of the running maximum and of the minimum still to
    come, both equal to the values while these rise.
    """
    reached = np.maximum.accumulate(values, axis=-1)
    to_come = np.minimum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]
    return (reached + to_come) / 2


def whole_ticks(seconds: Array) -> list[int]:
    """Return seconds in ticks, rounded. Raises UsageError for seconds that no step can take: NaN, or over a day."""
    wrong = ~(np.abs(seconds) < LONGEST_S)
    if wrong.any():
        raise UsageError(
            f"the hardware profile gives a step {seconds[wrong][0]:g} s: its numbers or the sizes of the model are not "
            "realistic; `simtune check` the profile, or fit it again"
        )
    ticks: list[int] = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64).tolist()
    return ticks
