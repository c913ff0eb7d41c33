"""The least that steps take, read off their tables: what a bound on capacity needs.

Each is at most what a step or round is charged, so that for every one

    time >= max over (c0, c1) of c0 + c1 m  +  context_cost_s C  +  head_cost_s n  +  its share of prefill

with m tokens, C context tokens and n sampled rows; the host, or the offset that stands for it, is left out, which only
lowers the bound.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array
from simtune.costs.compiled import StepTables
from simtune.costs.ticks import TICKS_PER_SECOND


class CostBounds:
    """Lower bounds on the parts of a step's time; see the module."""

    def __init__(self, tables: StepTables) -> None:
        self._tables = tables

    def linear_minorants(self) -> list[tuple[float, float]]:
        """Lines c0 + c1 m in seconds, c0 and c1 >= 0, none above what a step's m tokens take.

        They are the lower convex hull of the largest non-decreasing table below the one charged, less its edges
        that are within 0.1 % of parallel to the one before. Edges that would meet the axis below zero give way to
        the steepest line through the origin. With data-parallel attention the other groups are taken to be idle.
        """
        groups = self._tables.groups
        least = np.minimum(self._tables.pure.least(groups), self._tables.mixed.least(groups))
        table = np.minimum.accumulate(least[:0:-1])[::-1]
        steepest = float((table / np.arange(1, len(table) + 1)).min())
        hull: list[tuple[int, int]] = []
        for point in enumerate(table.tolist(), start=1):
            while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        lines = [(float(hull[0][1]), 0.0)]
        for (m0, t0), (m1, t1) in pairwise(hull):
            c1 = min((t1 - t0) / (m1 - m0), steepest)
            if c1 > 1.001 * lines[-1][1]:
                lines.append((max(0.0, t0 - c1 * m0), c1))
        return [(c0 / TICKS_PER_SECOND, c1 / TICKS_PER_SECOND) for c0, c1 in lines]

    def context_cost_s(self) -> float:
        """The largest c with decode attention >= c C for all batches within the pool's limits.

        Attention is affine between knots, so the ratio is smallest at an end of some segment.
        """
        tables, lowest = self._tables, float("inf")
        last = int(tables.contexts[-1])
        for attention in {tables.alone, *tables.beside}:
            for num_decodes in range(1, tables.max_num_seqs + 1):
                row = attention.rows[num_decodes] or attention.make(num_decodes)
                ends = np.array([*row.starts[1:-1], last * num_decodes])
                starts, values, slopes = np.array(row.starts[:-1]), np.array(row.ticks), np.array(row.slopes)
                at_ends = (values + slopes * (ends - starts)) / ends
                lowest = min(lowest, float((values / starts).min()), float(at_ends.min()))
        return lowest / TICKS_PER_SECOND

    def prefill_cost_s(self, prompt_tokens: NDArray[np.integer]) -> Array:
        """Attention seconds of whole prompts, however they are cut into chunks.

        The differences of the chunks add up to the whole; the overhead of at least one chunk comes on top.
        Prompts longer than max_model_len count as if they were that long.
        """
        lengths = np.minimum(prompt_tokens, len(self._tables.prefill) - 1)
        whole: Array = (np.array(self._tables.prefill)[lengths] + self._tables.chunk) / TICKS_PER_SECOND
        return whole

    def head_cost_s(self) -> float:
        """The largest c with head and sampling >= c n for all numbers n of sampled rows."""
        least = map(min, self._tables.pure.head[1:], self._tables.mixed.head[1:])
        return min(ticks / n for n, ticks in enumerate(least, start=1)) / TICKS_PER_SECOND


def _turns_down(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
