"""A deployment's step costs frozen into integer tables: about a microsecond per question, exact under jumps.

`CompiledCosts` tabulates `StepModel` once: `linear` per number of tokens, `head` per number of sampled
rows, `prefill` per prompt length, and for each number of decodes, when first asked, a row of decode
attention: knots over the mean context, eight per octave but where a line is as good, with whole ticks at the
knots and whole ticks per context token between them. Because both are integers, a pure decode step is exactly
affine in the context tokens between two knots, which is what `simtune.costs.protocol.StepCosts` asks for.

Base times are tabulated densely. What residuals and curves add to them costs a thousand times more to
evaluate and is smooth: its logarithm is taken on knots, summed over all operators of a table, and
interpolated. Two things a residual may do on noisy data are not let through: decode attention that falls with
the context, and prefill attention that falls with the length of the prompt. Where they do, a table follows the
middle between what it has reached before and what it comes down to later (`_rising`), so that no chunk of a
prompt takes less than no time.

`LinearCosts` is the same face on four numbers, for oracles and for users with a formula of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.costs.iteration import StepModel, padded_tokens
from simtune.costs.protocol import UNBOUNDED
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.specs.hardware import Correction, Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Pool

KNOTS_PER_OCTAVE = 8
CORRECTION_KNOTS_PER_OCTAVE = 4
STRAIGHT = 5e-4
"""Share of decode attention by which what lies between knots may be off for one knot less: jumps end at knots."""


class _Row(NamedTuple):
    """Decode attention of one number of decodes, piecewise affine in the context tokens of the step."""

    starts: list[int]  # context tokens at the knots, ascending; then more than there can be
    ticks: list[int]  # at the knots
    slopes: list[int]  # ticks per context token from each knot on


class _Tables(NamedTuple):
    """What steps of one kind take, in ticks, corrected where the profile is; decode attention apart."""

    linear: list[int]  # by tokens
    head: list[int]  # by sampled rows
    floor: list[int]  # by sequences
    after: list[int]  # by sequences


class _DecodeAttention:
    """Decode attention in steps whose longest prefill chunk has `chunk` tokens, 0 for none, with `width` query tokens
    for each sequence: a row for each number of decodes, made when first asked for. `scale` multiplies all of it.
    """

    def __init__(
        self,
        model: StepModel,
        plain: StepModel,
        contexts: Array,
        max_num_seqs: int,
        chunk: int,
        scale: float,
        width: int = 1,
    ) -> None:
        self.chunk, self._width = chunk, width
        self._model, self._plain, self._contexts = model, plain, contexts
        self._max_num_seqs, self._scale = max_num_seqs, scale
        self.rows: list[_Row | None] = [None] * (max_num_seqs + 1)

    def ticks(self, num_decodes: int, context_tokens: int) -> int:
        starts, values, slopes = self.rows[num_decodes] or self.make(num_decodes)
        at = bisect_right(starts, context_tokens, 1) - 1
        return values[at] + slopes[at] * (context_tokens - starts[at])

    def make(self, num_decodes: int) -> _Row:
        contexts = self._contexts
        ticks = self.at_knots(num_decodes)
        starts = contexts.astype(np.int64) * num_decodes
        kept = _bends(starts, ticks)
        starts, ticks = starts[kept], ticks[kept]
        # Rounded down, so that no segment ends above the knot it leads to.
        slopes = np.diff(ticks) // np.diff(starts)
        row = _Row([*starts[:-1].tolist(), UNBOUNDED * num_decodes], ticks[:-1].tolist(), slopes.tolist())
        self.rows[num_decodes] = row
        return row

    def at_knots(self, num_decodes: int) -> Ints:
        """Ticks at all contexts."""
        return np.rint(self._scale * self._seconds(num_decodes) * TICKS_PER_SECOND).astype(np.int64)

    def _seconds(self, num_decodes: int) -> Array:
        """At all contexts: base times what was interpolated between numbers of decodes, then between contexts."""
        plain = self._plain.decode(num_decodes, self._contexts, self._width, self.chunk)
        if self._plain is self._model:
            return plain
        counts, log_contexts, log_ratio = self._correction
        above = min(max(1, int(np.searchsorted(counts, np.log(num_decodes)))), len(counts) - 1)
        share = (np.log(num_decodes) - counts[above - 1]) / (counts[above] - counts[above - 1])
        at_count = (1 - share) * log_ratio[above - 1] + share * log_ratio[above]
        corrected: Array = plain * np.exp(np.interp(np.log(self._contexts), log_contexts, at_count))
        return _rising(corrected)

    @cached_property
    def _correction(self) -> tuple[Array, Array, Array]:
        """(log numbers of decodes, log contexts, log ratio of the step model to the plain one at both)."""
        counts = _knots(CORRECTION_KNOTS_PER_OCTAVE, self._max_num_seqs, set())
        contexts = _knots(CORRECTION_KNOTS_PER_OCTAVE, int(self._contexts[-1]), self._model.windows)
        ratio = [
            self._model.decode(int(n), contexts, self._width, self.chunk)
            / self._plain.decode(int(n), contexts, self._width, self.chunk)
            for n in counts
        ]
        return np.log(counts), np.log(contexts), np.log(ratio)


def compile_costs(
    model: Model, hardware: Hardware, pool: Pool, max_model_len: int, factors: Mapping[str, float] | None = None
) -> CompiledCosts:
    """The step costs of one instance of the pool for requests of up to max_model_len tokens.

    `factors` multiply the times of kinds (`simtune.costs.iteration.KINDS`), to draw a world in which they are
    off. Raises Infeasible when the model cannot be sharded as the pool asks, or the profile lacks an operator or
    link.
    """
    return CompiledCosts(model, hardware, pool, max_model_len, factors)


def _uncorrected(hardware: Hardware) -> Hardware:
    """The same operators by their base parameters alone."""
    nothing = {"residual": None, "curves": ()}
    operators = {key: operator.model_copy(update=nothing) for key, operator in hardware.operators.items()}
    return hardware.model_copy(update={"operators": operators})


class CompiledCosts:
    """Step costs of one instance; see the module. Answers for any batch within the pool's limits.

    What goes to another process is what it was compiled from; it is compiled there again.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        pool: Pool,
        max_model_len: int,
        factors: Mapping[str, float] | None = None,
        width: int = 1,
    ) -> None:
        """With `width` a sequence may have so many tokens in a step, all of them sampled."""
        self._compiled_from: tuple[Any, ...] = (model, hardware, pool, max_model_len, factors, width)
        self._model = self._plain = step_model = StepModel(model, hardware, pool, factors=factors)
        if any(operator.residual or operator.curves for operator in hardware.operators.values()):
            self._plain = StepModel(model, _uncorrected(hardware), pool, factors=factors)
        self._max_num_seqs = pool.batching.max_num_seqs
        self._max_samples = width * self._max_num_seqs
        self._contexts = _knots(KNOTS_PER_OCTAVE, max_model_len, step_model.windows)
        without, with_chunks = step_model.correction(False), step_model.correction(True)
        self._pure = self._mixed = self._tables(pool, without)
        self._steps: list[_Row | None] = [None] * (self._max_num_seqs + 1)  # pure decode steps, by decodes
        self._decode_floor, self._decode_after = self._pure.floor, self._pure.after
        self._alone = self._decode_attention(0, without)
        self._beside = [self._alone]
        if with_chunks != without:
            self._mixed = self._tables(pool, with_chunks)
        if with_chunks != without or step_model.mixes:
            chunks = _chunks(pool.batching.max_num_batched_tokens) if step_model.mixes else [0]
            self._beside = [self._decode_attention(chunk, with_chunks) for chunk in chunks]
        scale, overhead_s = 1.0 if with_chunks is None else with_chunks.scale, step_model.prefill_overhead_s
        lengths = np.arange(1, max_model_len + 1, dtype=np.float64)
        prefill = self._dense(lambda model, x: model.prefill(x) + overhead_s, lengths) - overhead_s
        prefill = scale * _rising(np.maximum(prefill, 0))
        past = scale * self._dense(lambda model, x: model.past(x), lengths)
        self._prefill = [0, *_ticks(prefill)]
        # What a chunk after so many cached tokens is not charged: their prefill, less what it does again for them.
        self._cached = [0, *_ticks(prefill - past)]
        self._chunk = to_ticks(scale * overhead_s)
        self._context_cost_s: float | None = None
        self._uneven = tuple(
            [0] + [self._uneven_ticks(n, chunks, correction) for n in range(1, self._max_num_seqs + 1)]
            for chunks, correction in ((False, without), (True, with_chunks))
        )

    @property
    def is_even(self) -> bool:
        """Whether `uneven` is always 0."""
        return not any(any(row) for row in self._uneven)

    def _uneven_ticks(self, num_decodes: int, with_chunks: bool, correction: Correction | None) -> int:
        scale = 1.0 if correction is None else correction.scale
        return to_ticks(scale * self._model.imbalance_s(num_decodes, with_chunks))

    def _tables(self, pool: Pool, correction: Correction | None) -> _Tables:
        model, seqs = self._model, self._max_num_seqs
        scale = 1.0 if correction is None else correction.scale
        samples = np.arange(1, self._max_samples + 1, dtype=np.float64)
        tokens = np.arange(1, max(pool.batching.max_num_batched_tokens, self._max_samples) + 1, dtype=np.float64)
        padded = padded_tokens(tokens) if pool.cuda_graphs else tokens
        linear = scale * self._dense(lambda model, x: _total(model.linear(x)), padded)
        head = scale * self._dense(lambda model, x: _total(model.head(x)), samples)
        launch = to_ticks(scale * model.launch_s)
        host = [to_ticks(model.host_s(n)) for n in range(seqs + 1)]
        # A step takes max(GPU, floor) + after: the host hides behind the GPU or comes after it.
        hides = pool.schedules_async and correction is None
        after = host if correction is None else [to_ticks(correction.offset_s)] * (seqs + 1)
        return _Tables(
            linear=[0, *_ticks(linear)],
            head=[0, *_ticks(head)],
            floor=[max(launch, ticks) if hides else launch for ticks in host],
            after=[0] * (seqs + 1) if hides else after,
        )

    def _decode_attention(self, chunk: int, correction: Correction | None, width: int = 1) -> _DecodeAttention:
        scale = 1.0 if correction is None else correction.scale
        return _DecodeAttention(self._model, self._plain, self._contexts, self._max_num_seqs, chunk, scale, width)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._compiled_from

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `simtune.costs.protocol.StepCosts.decode`."""
        starts, values, slopes = self._steps[num_decodes] or self._make_step(num_decodes)
        at = bisect_right(starts, context_tokens, 1)
        start, per_token = starts[at - 1], slopes[at - 1]
        ticks = values[at - 1] + per_token * (context_tokens - start)
        span = -((context_tokens - starts[at]) // num_decodes)
        floor, after = self._decode_floor[num_decodes], self._decode_after[num_decodes]
        if ticks >= floor:
            return ticks + after if after else ticks, per_token * num_decodes, span
        if per_token:
            span = min(span, (floor - ticks) // (per_token * num_decodes) + 1)
        return floor + after, 0, span

    def _make_step(self, num_decodes: int) -> _Row:
        """The row of attention, everything else that a pure decode step takes on the GPU added."""
        starts, values, slopes = self._alone.rows[num_decodes] or self._alone.make(num_decodes)
        rest = self._pure.linear[num_decodes] + self._pure.head[num_decodes]
        row = self._steps[num_decodes] = _Row(starts, [ticks + rest for ticks in values], slopes)
        return row

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """See `simtune.costs.protocol.StepCosts.mixed`."""
        if not chunks:
            return self.decode(num_decodes, context_tokens)[0]
        mixed, prefill, cached = self._mixed, self._prefill, self._cached
        tokens, longest = num_decodes, 0
        ticks = self._chunk * len(chunks) + mixed.head[num_samples]
        for past, new in chunks:
            tokens += new
            if new > longest:
                longest = new
            ticks += prefill[past + new] - cached[past]
        ticks += mixed.linear[tokens]
        if num_decodes:
            beside = self._beside
            if len(beside) == 1:
                ticks += beside[0].ticks(num_decodes, context_tokens)
            else:
                ticks += self._attention_beside(longest, num_decodes, context_tokens)
        num_seqs = num_decodes + len(chunks)
        floor = mixed.floor[num_seqs]
        return (ticks if ticks > floor else floor) + mixed.after[num_seqs]

    def _dense(self, seconds: Callable[[StepModel, Array], Array], x: Array) -> Array:
        """Seconds at all x: the plain model's, times what the step model makes of them at knots among the x."""
        plain = seconds(self._plain, x)
        if self._plain is self._model:
            return plain
        knots = _sizes(x)
        at_knots = seconds(self._plain, knots)
        some = at_knots > 0
        ratio = np.where(some, seconds(self._model, knots) / np.where(some, at_knots, 1), 1)
        corrected: Array = plain * np.exp(np.interp(np.log(x), np.log(knots), np.log(ratio)))
        return corrected

    def uneven(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        """See `simtune.costs.protocol.StepCosts`: what steps with these decodes take longer than `decode` and `mixed`
        say, their longest context being so many tokens; the same along a jump.
        """
        per_token = self._uneven[with_chunks][num_decodes]
        return per_token * (longest_context * num_decodes - context_tokens) // num_decodes if per_token else 0

    def _attention_beside(self, chunk: int, num_decodes: int, context_tokens: int) -> int:
        """Ticks of decode attention beside prefill, linear between the two nearest knots of the chunk's length."""
        beside = self._beside
        ticks = beside[0].ticks(num_decodes, context_tokens)
        for below, above in pairwise(beside):
            if chunk <= below.chunk:
                break
            last, ticks = ticks, above.ticks(num_decodes, context_tokens)
            if chunk < above.chunk:
                return last + (ticks - last) * (chunk - below.chunk) // (above.chunk - below.chunk)
        return ticks

    # What a bound on capacity needs. Each is at most what `decode` and `mixed` charge, so that for every step
    #   time >= max over (c0, c1) of c0 + c1 m  +  context_cost_s C  +  head_cost_s n  +  its share of prefill
    # with m tokens, C context tokens and n sampled rows; the host, or the offset that stands for it, is left out, which
    # only lowers the bound.

    def linear_minorants(self) -> list[tuple[float, float]]:
        """Lines c0 + c1 m in seconds, c0 and c1 >= 0, none above what a step's m tokens take.

        They are the lower convex hull of the largest non-decreasing table below the one charged, less its edges
        that are within 0.1 % of parallel to the one before. Edges that would meet the axis below zero give way to
        the steepest line through the origin.
        """
        least = np.minimum(self._pure.linear, self._mixed.linear)
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
        if self._context_cost_s is not None:
            return self._context_cost_s
        last, lowest = int(self._contexts[-1]), float("inf")
        for attention in {self._alone, *self._beside}:
            for num_decodes in range(1, self._max_num_seqs + 1):
                row = attention.rows[num_decodes] or attention.make(num_decodes)
                ends = np.array([*row.starts[1:-1], last * num_decodes])
                starts, values, slopes = np.array(row.starts[:-1]), np.array(row.ticks), np.array(row.slopes)
                at_ends = (values + slopes * (ends - starts)) / ends
                lowest = min(lowest, float((values / starts).min()), float(at_ends.min()))
        self._context_cost_s = lowest / TICKS_PER_SECOND
        return self._context_cost_s

    def prefill_cost_s(self, prompt_tokens: NDArray[np.integer]) -> Array:
        """Attention seconds of whole prompts, however they are cut into chunks.

        The differences of the chunks add up to the whole; the overhead of at least one chunk comes on top.
        Prompts longer than max_model_len count as if they were that long.
        """
        lengths = np.minimum(prompt_tokens, len(self._prefill) - 1)
        whole: Array = (np.array(self._prefill)[lengths] + self._chunk) / TICKS_PER_SECOND
        return whole

    def head_cost_s(self) -> float:
        """The largest c with head and sampling >= c n for all numbers n of sampled rows."""
        least = map(min, self._pure.head[1:], self._mixed.head[1:])
        return min(ticks / n for n, ticks in enumerate(least, start=1)) / TICKS_PER_SECOND


@dataclass(frozen=True)
class LinearCosts:
    """t = step + per_token m + per_context C + per_pair A in seconds, for m tokens and C context tokens; drafts take
    `per_level_s` more for each level.

    A is the number of pairs of tokens that prefill attention relates: t p + t (t + 1) / 2 for a chunk of t
    tokens after p cached ones. The numbers are rounded to ticks.
    """

    step_s: float
    per_token_s: float = 0.0
    per_context_s: float = 0.0
    per_pair_s: float = 0.0
    per_level_s: float = 0.0

    def __post_init__(self) -> None:
        times = (self.step_s, self.per_token_s, self.per_context_s, self.per_pair_s, self.per_level_s)
        if min(times) < 0:
            raise ValueError(f"times cannot be negative: {times}")

    @cached_property
    def _four_ticks(self) -> tuple[int, int, int, int]:
        return (
            to_ticks(self.step_s),
            to_ticks(self.per_token_s),
            to_ticks(self.per_context_s),
            to_ticks(self.per_pair_s),
        )

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `simtune.costs.protocol.StepCosts.decode`; the form holds for ever."""
        step, per_token, per_context, _ = self._four_ticks
        return (
            step + per_token * num_decodes + per_context * context_tokens,
            per_context * num_decodes,
            UNBOUNDED,
        )

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """See `simtune.costs.protocol.StepCosts.mixed`; sampling is free."""
        step, per_token, per_context, per_pair = self._four_ticks
        tokens = num_decodes + sum(new for _, new in chunks)
        pairs = sum(new * past + new * (new + 1) // 2 for past, new in chunks)
        return step + per_token * tokens + per_context * context_tokens + per_pair * pairs

    def round(
        self,
        num_decodes: int,
        verify_tokens: int,
        levels: int,
        context_tokens: int,
        chunks: Sequence[tuple[int, int]] = (),
        completing: int = 0,
    ) -> int:
        """See `simtune.costs.protocol.RoundCosts.round`."""
        ticks = self.mixed(verify_tokens, context_tokens, chunks, verify_tokens + completing)
        return ticks + to_ticks(self.per_level_s) * levels

    def rounds(
        self, num_decodes: int, verify_tokens: int, levels: int, computed: Sequence[int] | Ints
    ) -> Sequence[int]:
        """See `simtune.costs.protocol.RoundCosts.rounds`."""
        first = self.round(num_decodes, verify_tokens, levels, verify_tokens)
        ends: list[int] = (first + self._four_ticks[2] * np.asarray(computed)).cumsum().tolist()
        return ends


def _chunks(budget: int) -> list[int]:
    """Knots of the length of the longest chunk in a step, a factor of four apart up to the token budget."""
    chunks = [budget]
    while chunks[-1] > 16:
        chunks.append(max(16, chunks[-1] // 4))
    return chunks[::-1]


def _total(by_kind: dict[str, Array]) -> Array:
    total: Array = np.sum(list(by_kind.values()), axis=0)
    return total


def _rising(values: Array) -> Array:
    """Never falling: the mean of the running maximum and of the minimum still to come, both the values themselves
    where these rise.
    """
    reached, to_come = np.maximum.accumulate(values), np.minimum.accumulate(values[::-1])[::-1]
    return (reached + to_come) / 2


def _ticks(seconds: Array) -> list[int]:
    ticks: list[int] = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64).tolist()
    return ticks


def _knots(per_octave: int, longest: int, windows: set[int]) -> Array:
    """Whole numbers from 1 to `longest` (at least 2), geometric, and every window's edge."""
    longest = max(2, longest)
    count = round(per_octave * np.log2(longest)) + 1
    knots = set(np.rint(np.geomspace(1, longest, count)).astype(int).tolist())
    return np.array(sorted(knots | {w for w in windows if w < longest}), dtype=np.float64)


def _sizes(x: Array) -> Array:
    """Knots among ascending sizes: all of them where few, eight per octave, and both sides of every tile of
    128 rows up to 8,192.
    """
    sizes = np.unique(x)
    edges = np.arange(128, 8193, 128)
    wanted = np.concatenate([sizes[:64], edges, edges + 1, _knots(KNOTS_PER_OCTAVE, int(sizes[-1]), set())])
    at = np.searchsorted(sizes, wanted[wanted <= sizes[-1]])
    return np.unique(sizes[at])


def _bends(x: Ints, y: Ints) -> list[int]:
    """Which knots to keep so that straight lines between them pass all others within `STRAIGHT`, both ends among them.

    From each one as far as some line stays within reach of everything on the way (the swing filter of Elmeleegy et
    al., VLDB 2009).
    """
    kept, (x0, y0), least, most = [0], (int(x[0]), int(y[0])), -math.inf, math.inf
    for i, (x1, y1) in enumerate(zip(x[1:].tolist(), y[1:].tolist(), strict=True), start=1):
        if not least <= (y1 - y0) / (x1 - x0) <= most:
            kept.append(i - 1)
            x0, y0, least, most = int(x[i - 1]), int(y[i - 1]), -math.inf, math.inf
        least = max(least, (y1 * (1 - STRAIGHT) - y0) / (x1 - x0))
        most = min(most, (y1 * (1 + STRAIGHT) - y0) / (x1 - x0))
    return [*kept, len(x) - 1]


def _turns_down(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
