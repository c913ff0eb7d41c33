"""Piecewise affine functions of the context tokens of a step, on whole numbers."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simtune.arrays import Ints
from simtune.costs.knots import bends
from simtune.costs.protocol import UNBOUNDED


class TickLine(NamedTuple):
    """Ticks by context tokens: affine from each start to the next, and from the last one on."""

    starts: list[int]
    ticks: list[int]
    """Ticks at the starts."""
    slopes: list[int]
    """Ticks per context token from each start on."""

    @classmethod
    def flat(cls, ticks: int) -> TickLine:
        """Return a line with the same ticks at all contexts."""
        return cls([0], [ticks], [0])

    @classmethod
    def through(cls, starts: Ints, ticks: Ints) -> TickLine:
        """Return a line through these knots, without those that a straight line passes; the last knot ends it."""
        corners = bends(starts, ticks)
        starts, ticks = starts[corners], ticks[corners]
        slopes = np.diff(ticks) // np.diff(starts)
        return cls(starts[:-1].tolist(), ticks[:-1].tolist(), slopes.tolist())

    def at(self, context_tokens: int) -> int:
        """Return the ticks at `context_tokens`."""
        i = bisect_right(self.starts, context_tokens, 1) - 1
        return self.ticks[i] + self.slopes[i] * (context_tokens - self.starts[i])

    def piece(self, context_tokens: int) -> tuple[int, int, int]:
        """Return (ticks without any context, ticks per context token, contexts below which that holds)."""
        starts, ticks, slopes = self
        i = bisect_right(starts, context_tokens, 1) - 1
        end = starts[i + 1] if i + 1 < len(starts) else UNBOUNDED
        return ticks[i] - slopes[i] * starts[i], slopes[i], end

    def many(self, context_tokens: Ints) -> Ints:
        """Return the ticks at contexts that rise."""
        starts, ticks, slopes = self
        i, last = bisect_right(starts, int(context_tokens[0]), 1) - 1, int(context_tokens[-1])
        values: Ints = context_tokens * slopes[i]
        values += ticks[i] - slopes[i] * starts[i]
        while i + 1 < len(starts) and starts[i + 1] <= last:
            i += 1
            at = int(context_tokens.searchsorted(starts[i]))
            values[at:] = ticks[i] + slopes[i] * (context_tokens[at:] - starts[i])
        return values

    def plus(self, more: int) -> TickLine:
        """Return the line with `more` ticks more everywhere."""
        return TickLine(self.starts, [ticks + more for ticks in self.ticks], self.slopes)

    def moved(self, shift: int) -> TickLine:
        """Return self(x - shift)."""
        return TickLine([start + shift for start in self.starts], self.ticks, self.slopes)

    def at_speed(self, speed: float) -> TickLine:
        """Return self(x) / speed; ticks at the starts are rounded up, ticks per context token down."""
        ticks = [math.ceil(t / speed) for t in self.ticks]
        return TickLine(self.starts, ticks, [math.floor(s / speed) for s in self.slopes])

    def added_to(self, other: TickLine) -> TickLine:
        """Return self(x) + other(x)."""
        starts = _starts(self, other)
        slopes = [self.piece(x)[1] + other.piece(x)[1] for x in starts]
        return TickLine(starts, [self.at(x) + other.at(x) for x in starts], slopes)

    def or_larger(self, other: TickLine) -> TickLine:
        """Return max(self(x), other(x)), on whole numbers."""
        pieces = []
        for x, end in pairwise([*_starts(self, other), UNBOUNDED]):
            (p, q, _), (r, s, _) = self.piece(x), other.piece(x)
            upper, lower = (p + q * x, q), (r + s * x, s)
            if upper < lower:
                upper, lower = lower, upper
            pieces.append((x, *upper))
            if lower[1] > upper[1] and (cross := x + -(-(upper[0] - lower[0]) // (lower[1] - upper[1]))) < end:
                pieces.append((cross, lower[0] + lower[1] * (cross - x), lower[1]))
        return TickLine(*map(list, zip(*pieces, strict=True)))


def _starts(a: TickLine, b: TickLine) -> list[int]:
    """Return the starts of the pieces of both lines together, from the first start of `a`."""
    return [a.starts[0], *sorted({x for x in (*a.starts, *b.starts) if x > a.starts[0]})]
