"""Lower bounds on the time of steps, from their tables, for bounds on capacity.

Each is at most the time charged for a step or round, so that for every one

    time >= max over (c0, c1) of c0 + c1 m  +  context_cost_s C  +  head_cost_s n  +  its share of prefill

with m tokens, C context tokens and n sampled rows. The host's time after the GPU comes on top, and no step is shorter
than its launch. `CostBounds` reads these from tables; `LeastCosts` has them for tables and a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.costs.compiled import CompiledCosts, DecodeTable, LinearCosts, StepTables
from simtune.costs.drafting import CompiledRounds
from simtune.costs.protocol import StepCosts
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks

R = TypeVar("R")


@dataclass(frozen=True)
class LeastCosts:
    """Least seconds of every step, prompt and sample."""

    lines: Sequence[tuple[float, float]]
    """(c0, c1) >= 0: no step of m tokens takes less than c0 + c1 m besides its attention and sampling."""
    context_s: float
    """Seconds of decode attention for each context token."""
    attention_s: float
    """Seconds of decode attention in any step that decodes."""
    head_s: float
    """Seconds of head and sampling for each sampled row."""
    least_head_s: float
    """Seconds of head and sampling in any step that samples."""
    after_s: float
    """Seconds of the host in every step, after the GPU is done."""
    shortest_s: float
    """Seconds of any step before the host's part: launching, or a host that hides behind the GPU."""
    prefill_s: Callable[[Ints, Ints], Array]
    """Seconds of attention of whole prompts (tokens, of which cached), however they are cut into chunks."""

    @classmethod
    def of_tables(cls, tables: StepTables) -> LeastCosts:
        """Return the bounds that `CostBounds` reads from tables."""
        bounds = CostBounds(tables)
        kinds = (tables.pure, tables.mixed)
        return cls(
            lines=bounds.linear_minorants(),
            context_s=bounds.context_cost_s(),
            attention_s=bounds.least_attention_s(),
            head_s=bounds.head_cost_s(),
            least_head_s=min(min(kind.head[1:]) for kind in kinds) / TICKS_PER_SECOND,
            after_s=min(min(kind.after[1:]) for kind in kinds) / TICKS_PER_SECOND,
            shortest_s=min(min(kind.floor[1:]) for kind in kinds) / TICKS_PER_SECOND,
            prefill_s=_PromptCosts(tables).least_s,
        )

    @classmethod
    def of_formula(cls, costs: LinearCosts) -> LeastCosts:
        """Return the formula itself: it is its own lower bound."""
        step, token, context, pair = (
            to_ticks(seconds) / TICKS_PER_SECOND
            for seconds in (costs.step_s, costs.per_token_s, costs.per_context_s, costs.per_pair_s)
        )

        def prefill_s(prompt: Ints, cached: Ints) -> Array:
            pairs: Array = prompt * (prompt + 1.0) - cached * (cached + 1.0)
            return pair * pairs / 2

        return cls([(step, token)], context, context, 0.0, 0.0, 0.0, step, prefill_s)


def _once(of: Callable[[StepTables], R]) -> Callable[[StepTables], R]:
    """Cache a function of tables as long as the tables exist, and no longer: they are large."""
    cached: WeakKeyDictionary[StepTables, R] = WeakKeyDictionary()

    def read(tables: StepTables) -> R:
        if tables not in cached:
            cached[tables] = of(tables)
        return cached[tables]

    return read


@_once
def _least_of(tables: StepTables) -> LeastCosts:
    return LeastCosts.of_tables(tables)


def least_of_all(several: Sequence[LeastCosts]) -> LeastCosts:
    """Return bounds that hold for the steps of each of several cost models, such as those of an instance whose ranks
    come and go."""
    if len(several) == 1:
        return several[0]

    def prefill_s(prompt: Ints, cached: Ints) -> Array:
        least: Array = np.min([least.prefill_s(prompt, cached) for least in several], axis=0)
        return least

    names = ("context_s", "attention_s", "head_s", "least_head_s", "after_s", "shortest_s")
    least = {name: min(getattr(of_one, name) for of_one in several) for name in names}
    return LeastCosts(lines=lines_below([of_one.lines for of_one in several]), prefill_s=prefill_s, **least)


def lines_below(several: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return lines c0 + c1 m with c0 >= 0 that are below the highest of the lines of each of several lists, for all
    m >= 0, in order of c1. Each list has a line with c1 = 0.

    Of a slope each list allows the intercept by which a line just touches its highest lines: below these, which are
    convex, at one of the points at which two of them meet.
    """
    lines: list[tuple[float, float]] = []
    for slope in sorted({c1 for of_one in several for _, c1 in of_one}):
        if any(max(c1 for _, c1 in of_one) < slope for of_one in several):
            # A line this steep rises above every line of some list.
            break
        intercept = min(_intercept_below(of_one, slope) for of_one in several)
        if intercept >= 0:
            lines.append((intercept, slope))
    return lines


def _intercept_below(lines: Sequence[tuple[float, float]], slope: float) -> float:
    """Return the largest c0 by which c0 + slope m is nowhere above the highest of these lines."""
    meets = [(a0 - b0) / (b1 - a1) for a0, a1 in lines for b0, b1 in lines if a1 < b1 and a0 >= b0]
    return min(max(c0 + c1 * m for c0, c1 in lines) - slope * m for m in (0.0, *meets))


def least_costs(costs: StepCosts) -> LeastCosts | None:
    """Return the least costs of a cost model; None if it is of a type without known bounds."""
    if isinstance(costs, CompiledCosts | CompiledRounds):
        return _least_of(costs.tables)
    return LeastCosts.of_formula(costs) if type(costs) is LinearCosts else None


class CostBounds:
    """Lower bounds on the parts of a step's time, from its tables; see the module."""

    def __init__(self, tables: StepTables) -> None:
        self._tables = tables

    def linear_minorants(self) -> list[tuple[float, float]]:
        """Lines c0 + c1 m in seconds, c0 and c1 >= 0, none above the time of a step's m tokens.

        They are the lower convex hull of the largest non-decreasing table below the charged one, without edges that are
        within 0.1 % of parallel to the one before. Edges that would meet the axis below zero are replaced by the
        steepest line through the origin. With data-parallel attention the other groups are taken to be idle.
        """
        groups = self._tables.groups
        least = np.minimum(self._tables.pure.least(groups), self._tables.mixed.least(groups))
        if self._tables.shared is not None:
            least[1:] -= self._tables.shared.most(np.arange(1.0, len(least)))
        # the largest non-decreasing table below the charged one: a larger step that is cheaper bounds the smaller ones
        table = np.minimum.accumulate(least[:0:-1])[::-1]
        steepest = float((table / np.arange(1, len(table) + 1)).min())
        hull = _lower_hull(table)
        lines = [(float(hull[0][1]), 0.0)]
        for (m0, t0), (m1, t1) in pairwise(hull):
            c1 = min((t1 - t0) / (m1 - m0), steepest)
            if c1 > 1.001 * lines[-1][1]:
                lines.append((max(0.0, t0 - c1 * m0), c1))
        return [(c0 / TICKS_PER_SECOND, c1 / TICKS_PER_SECOND) for c0, c1 in lines]

    def context_cost_s(self) -> float:
        """Return the largest c with decode attention >= c C for all batches within the pool's limits.

        Attention is affine between knots, so the ratio is smallest at an end of some segment. Slopes are rounded down
        to whole ticks, by less than one per context token: no segment ends more than that below its knots, so segments
        are examined only for batches whose knots come near to the lowest.
        """
        return _least_attention(self._tables).context_s

    def least_attention_s(self) -> float:
        """Least seconds of decode attention: it does not fall with the context, so the shortest contexts have it."""
        return _least_attention(self._tables).any_s

    def prefill_cost_s(self, prompt_tokens: NDArray[np.integer], cached_tokens: NDArray[np.integer] | int = 0) -> Array:
        """Seconds of attention of whole prompts, however they are cut into chunks; the first tokens may be cached.

        The differences of the chunks add up to the whole. A call may serve chunks of others too, but no more tokens
        than a step has at most: each token is charged its part of such a call.
        Prompts longer than max_model_len count as if they were that long.
        """
        return _PromptCosts(self._tables).least_s(prompt_tokens, cached_tokens)

    def head_cost_s(self) -> float:
        """Return the largest c with head and sampling >= c n for all numbers n of sampled rows."""
        least = map(min, self._tables.pure.head[1:], self._tables.mixed.head[1:])
        return min(ticks / n for n, ticks in enumerate(least, start=1)) / TICKS_PER_SECOND


class BoundsOfAll:
    """Bounds that hold for the steps of each of several tables; see `CostBounds`."""

    def __init__(self, several: Sequence[StepTables]) -> None:
        self._bounds = [CostBounds(tables) for tables in several]

    def linear_minorants(self) -> list[tuple[float, float]]:
        """See `CostBounds.linear_minorants`."""
        if len(self._bounds) == 1:
            return self._bounds[0].linear_minorants()
        return lines_below([bounds.linear_minorants() for bounds in self._bounds])

    def context_cost_s(self) -> float:
        """See `CostBounds.context_cost_s`."""
        return min(bounds.context_cost_s() for bounds in self._bounds)

    def prefill_cost_s(self, prompt_tokens: NDArray[np.integer], cached_tokens: NDArray[np.integer] | int = 0) -> Array:
        """See `CostBounds.prefill_cost_s`."""
        least: Array = np.min([of.prefill_cost_s(prompt_tokens, cached_tokens) for of in self._bounds], axis=0)
        return least

    def head_cost_s(self) -> float:
        """See `CostBounds.head_cost_s`."""
        return min(bounds.head_cost_s() for bounds in self._bounds)


def _lower_hull(table: Ints) -> list[tuple[int, int]]:
    """Return the corners of the lower convex hull of (1, table[0]), (2, table[1]), ...

    A point above the hull of some of the points is no corner, so the hull of every 32nd point is made first.
    """
    at = np.arange(1, len(table) + 1)
    some = np.unique(np.append(at[::32], at[-1]))
    coarse = np.array(_hull(zip(some.tolist(), table[some - 1].tolist(), strict=True)))
    near = table <= np.interp(at, coarse[:, 0], coarse[:, 1]) + 1
    return _hull(zip(at[near].tolist(), table[near].tolist(), strict=True))


def _hull(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    hull: list[tuple[int, int]] = []
    for point in points:
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_down(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """True if b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


class _PromptCosts:
    """Bounds on whole prompts from tables, without a reference to them, so that the tables can be freed."""

    def __init__(self, tables: StepTables) -> None:
        # However few prompts are in a step, each takes no less than among enough to fill the device.
        self._whole, self._cached = np.array(tables.among), np.array(tables.cached_among)
        self._call_per_token = tables.prefill_call / (len(tables.mixed.linear) - 1)

    def least_s(self, prompt_tokens: NDArray[np.integer], cached_tokens: NDArray[np.integer] | int = 0) -> Array:
        """See `CostBounds.prefill_cost_s`."""
        most = len(self._whole) - 1
        full_ticks, cached = self._whole[np.minimum(prompt_tokens, most)], self._cached[np.minimum(cached_tokens, most)]
        computed = np.maximum(np.minimum(prompt_tokens, most) - cached_tokens, 0)
        ticks = np.maximum(full_ticks - cached, 0) + self._call_per_token * computed
        seconds: Array = ticks / TICKS_PER_SECOND
        return seconds


class _LeastAttention(NamedTuple):
    context_s: float
    any_s: float


@_once
def _least_attention(tables: StepTables) -> _LeastAttention:
    if tables.shares_prefixes:
        # How much of a context is attended to for all at once is not known before the run.
        return _LeastAttention(0.0, 0.0)
    per_context, least = float("inf"), float("inf")
    numbers = np.arange(1, tables.max_num_seqs + 1)
    for attention in {tables.alone, *tables.beside}:
        ticks = np.array([attention.at_knots(int(n)) for n in numbers])
        least = min(least, float(ticks[:, 0].min()))
        at_least = (ticks / tables.contexts).min(axis=1) / numbers - 1
        for row in np.argsort(at_least, kind="stable"):
            if at_least[row] >= per_context:
                break
            per_context = min(per_context, _context_ticks(tables, attention, int(numbers[row])))
    return _LeastAttention(per_context / TICKS_PER_SECOND, least / TICKS_PER_SECOND)


def _context_ticks(tables: StepTables, attention: DecodeTable, num_decodes: int) -> float:
    """Least ticks per context token for one number of decodes."""
    knots, values, slopes = map(np.array, attention.rows[num_decodes] or attention.make(num_decodes))
    starts, ends = knots[:-1], np.array([*knots[1:-1], int(tables.contexts[-1]) * num_decodes])
    at_ends = (values + slopes * (ends - starts)) / ends
    return min(float((values / starts).min()), float(at_ends.min()))
