"""A deployment's step costs frozen into integer tables: about a microsecond per lookup, exact under jumps.

`StepTables` tabulates `StepModel` once: `linear` per number of tokens, `head` per number of sampled
rows, `prefill` per prompt length, and for each number of decodes, when first used, a row of decode
attention: knots over the mean context, eight per octave unless a line is as good, with whole ticks at the
knots and whole ticks per context token between them. Because both are integers, a pure decode step is exactly
affine in the context tokens between two knots, which is what `simtune.costs.protocol.StepCosts` requires.
`CompiledCosts` reads steps off them, `simtune.costs.drafting.CompiledRounds` rounds of drafting and verifying.

Base times are tabulated densely. The factors of residuals and curves cost a thousand times more to
evaluate and are smooth: the logarithm is taken on knots, summed over all operators of a table, and
interpolated. Two artefacts of residuals on noisy data are removed: decode attention that falls with
the context, and prefill attention that falls with the length of the prompt. There a table follows the
middle between the largest value before and the smallest value after (`rising`), so that no chunk of a
prompt takes negative time.

`LinearCosts` has the same interface on four numbers, for oracles and for users with a formula.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.iteration import StepModel, padded_tokens
from simtune.costs.knots import KNOTS_PER_OCTAVE, bends, knots, rising, sizes, whole_ticks
from simtune.costs.protocol import UNBOUNDED
from simtune.costs.shared_experts import SharedExperts
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.specs import room
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Pool

CORRECTION_KNOTS_PER_OCTAVE = 4
_ENTRY_BYTES = 200.0
"""Bytes of a table's entry while the table is made."""


# --- tables -----------------------------------------------------------------------------------------------


AttentionRow = tuple[list[int], list[int], list[int]]
"""Decode attention of one number of decodes, piecewise affine in the context tokens of the step: (context tokens at the
knots, ascending, then more than there can be; ticks at the knots; ticks per context token from each knot on). Plain
tuples, because they are unpacked at every step."""

DecodeRow = tuple[list[int], list[int], list[int], int, int]
"""Ticks of pure decode steps of one number of sequences, by context tokens: on the GPU as in an `AttentionRow`, then
the least ticks on the GPU, and the ticks added after that."""


class TokenTables(NamedTuple):
    """Ticks of steps of one kind without attention, corrected if the profile is."""

    linear: list[int]  # by tokens
    head: list[int]  # by sampled rows
    floor: list[int]  # by sequences
    after: list[int]  # by sequences
    experts: list[int]  # by tokens of each group with data-parallel attention; empty where there are no groups

    def least(self, groups: int) -> Ints:
        """`linear` of a step in which no other of the groups has any tokens."""
        least = np.array(self.linear)
        if self.experts:
            experts = np.array(self.experts)
            least += experts[-(-np.arange(len(experts)) // groups)] - experts
        return least


class _Models(NamedTuple):
    """A step model, and the same by its base parameters alone; one object if nothing corrects these."""

    model: StepModel
    plain: StepModel

    @classmethod
    def of(cls, model: Model, hardware: Hardware, pool: Pool, factors: Mapping[str, float] | None) -> _Models:
        step_model = StepModel(model, hardware, pool, factors=factors)
        corrected = any(operator.residual or operator.curves for operator in hardware.operators.values())
        # With feed-forward blocks on other devices attention may add no time: no ratio can interpolate zeros.
        if not corrected or pool.studied.afd is not None:
            return cls(step_model, step_model)
        nothing = {"residual": None, "curves": ()}
        operators = {key: operator.model_copy(update=nothing) for key, operator in hardware.operators.items()}
        plain = hardware.model_copy(update={"operators": operators})
        return cls(step_model, StepModel(model, plain, pool, factors=factors))

    def dense(self, seconds: Callable[[StepModel, Array], Array], x: Array) -> Array:
        """Seconds at all x: the plain model's, times the ratio of the step model to it at knots among the x."""
        plain = seconds(self.plain, x)
        # Nothing corrects the base, so there is no ratio to interpolate.
        if self.plain is self.model:
            return plain
        # A residual costs far more than the base, so it is evaluated at knots only.
        at = sizes(x)
        at_knots = seconds(self.plain, at)
        positive = at_knots > 0
        ratio = np.where(positive, seconds(self.model, at) / np.where(positive, at_knots, 1), 1)
        corrected: Array = plain * np.exp(np.interp(np.log(x), np.log(at), np.log(ratio)))
        return corrected


_BLOCK = 64
"""Numbers of decodes whose attention is computed at once."""


class DecodeTable:
    """Decode attention in steps whose longest prefill chunk has `chunk` tokens, 0 for none, with `width` query tokens
    for each sequence: a row for each number of decodes, made when first used. `scale` multiplies all of it.
    """

    def __init__(
        self, models: _Models, contexts: Array, max_num_seqs: int, chunk: int, scale: float, width: int = 1
    ) -> None:
        self.chunk, self._width = chunk, width
        self._models, self._contexts = models, contexts
        self._max_num_seqs, self._scale = max_num_seqs, scale
        self.rows: list[AttentionRow | None] = [None] * (max_num_seqs + 1)
        self._blocks: dict[int, Ints] = {}

    def ticks(self, num_decodes: int, context_tokens: int) -> int:
        """Ticks in a step whose decodes read `context_tokens` in all."""
        starts, values, slopes = self.rows[num_decodes] or self.make(num_decodes)
        at = bisect_right(starts, context_tokens, 1) - 1
        return values[at] + slopes[at] * (context_tokens - starts[at])

    def make(self, num_decodes: int) -> AttentionRow:
        """Make and store the row of one number of decodes."""
        contexts = self._contexts
        ticks = self.at_knots(num_decodes)
        starts = contexts.astype(np.int64) * num_decodes
        # Knots on a line are dropped: rows are searched in every step, and fewer entries are found sooner.
        at_bends = bends(starts, ticks)
        starts, ticks = starts[at_bends], ticks[at_bends]
        # Rounded down, so that no segment ends above the knot at its end.
        slopes = np.diff(ticks) // np.diff(starts)
        row = [*starts[:-1].tolist(), UNBOUNDED * num_decodes], ticks[:-1].tolist(), slopes.tolist()
        self.rows[num_decodes] = row
        return row

    def at_knots(self, num_decodes: int) -> Ints:
        """Ticks at all contexts."""
        block, row = divmod(num_decodes - 1, _BLOCK)
        # A block at a time: one call of the model for many rows costs little more than one for a row.
        if block not in self._blocks:
            first = 1 + block * _BLOCK
            numbers = np.arange(first, min(first + _BLOCK, self._max_num_seqs + 1), dtype=np.float64)
            seconds = self._seconds(numbers)
            self._blocks[block] = np.rint(self._scale * seconds * TICKS_PER_SECOND).astype(np.int64)
        ticks: Ints = self._blocks[block][row]
        return ticks

    def _seconds(self, numbers: Array) -> Array:
        """Seconds of numbers of decodes, a row each, at all contexts: base times factors that are interpolated between
        numbers of decodes, then between contexts."""
        (model, base), contexts = self._models, self._contexts
        batch, context = np.repeat(numbers, len(contexts)), np.tile(contexts, len(numbers))
        plain = base.decode(batch, context, self._width, self.chunk).reshape(len(numbers), len(contexts))
        if base is model:
            return plain
        counts, log_contexts, log_ratio = self._correction
        above = np.clip(np.searchsorted(counts, np.log(numbers)), 1, len(counts) - 1)
        share = ((np.log(numbers) - counts[above - 1]) / (counts[above] - counts[above - 1]))[:, None]
        at_counts = (1 - share) * log_ratio[above - 1] + share * log_ratio[above]
        log_context = np.log(contexts)
        factors = np.exp([np.interp(log_context, log_contexts, at_count) for at_count in at_counts])
        return rising(plain * factors)

    @cached_property
    def _correction(self) -> tuple[Array, Array, Array]:
        """Return (log numbers of decodes, log contexts, log ratio of the step model to the plain one at both)."""
        model, plain = self._models
        counts = knots(CORRECTION_KNOTS_PER_OCTAVE, self._max_num_seqs)
        contexts = knots(CORRECTION_KNOTS_PER_OCTAVE, int(self._contexts[-1]), model.windows)
        shapes = np.repeat(counts, len(contexts)), np.tile(contexts, len(counts)), self._width, self.chunk
        ratio = (model.decode(*shapes) / plain.decode(*shapes)).reshape(len(counts), len(contexts))
        return np.log(counts), np.log(contexts), np.log(ratio)


@dataclass(frozen=True, eq=False)
class StepTables:
    """Tables from which steps and rounds of one model on one instance of a pool are read; see the module.

    Each of pure, mixed is of steps without and with prefill chunks.
    """

    models: _Models
    max_num_seqs: int
    contexts: Array
    """Mean contexts at which decode attention is tabulated."""
    pure: TokenTables
    mixed: TokenTables
    alone: DecodeTable
    beside: tuple[DecodeTable, ...]
    """Decode attention beside prefill, by the length of the longest chunk."""
    prefill: list[int]
    """Ticks of the attention of a prompt, by its tokens."""
    cached: list[int]
    """Ticks that a chunk is not charged, by the cached tokens before it: their prefill, less the work repeated for
    them."""
    among: list[int]
    """`prefill` if prompts fill the device together; a step takes no less than the longest of its chunks alone."""
    cached_among: list[int]
    """`cached` if prompts fill the device together."""
    prefill_call: int
    """Ticks of a step with prefill chunks besides those of the chunks."""
    imbalance: tuple[list[int], list[int]]
    """(without, with chunks) by decodes: ticks per token by which the longest context exceeds the mean."""
    groups: int
    """Ranks with data-parallel attention that share experts."""
    shared: SharedExperts | None = None
    """Time that verifications save; None if tokens of a sequence visit no experts in common."""
    shares_prefixes: bool = False
    """True if decodes may attend once to what all their contexts begin with, in less time than the tables have."""

    @property
    def model(self) -> StepModel:
        """The step model that was tabulated."""
        return self.models.model

    def scale(self, mixed: bool) -> float:
        """Factor by which a correction multiplies the GPU's time."""
        correction = self.model.correction(mixed)
        return 1.0 if correction is None else correction.scale

    @property
    def largest_graphs(self) -> tuple[float, float]:
        """Tokens of the largest step with a graph, without and with chunks."""
        return self.model.launches.largest_graphs

    def launched(self, mixed: bool) -> int:
        """Return the ticks of launching the kernels of a larger step one by one."""
        return to_ticks(self.scale(mixed) * self.model.launches.large_s)

    @cached_property
    def large(self) -> tuple[list[int], list[int]]:
        """(without, with chunks), by sequences: least ticks of a larger step, whose kernels are launched one by one,
        after the host's other work for it."""
        pure, mixed = (
            [self.launched(kind) + host for host in _hidden_host(self.model, self.max_num_seqs, kind)]
            for kind in (False, True)
        )
        return pure, mixed

    def floor(self, num_tokens: int, num_seqs: int, mixed: bool) -> int:
        """Return the least ticks of a step on the GPU."""
        floor = (self.mixed if mixed else self.pure).floor[num_seqs]
        return floor if num_tokens <= self.largest_graphs[mixed] else max(floor, self.large[mixed][num_seqs])

    def prompts(self, chunks: Sequence[tuple[int, int]]) -> int:
        """Return the ticks of attention to the prefill chunks of a step: of all that fill the device together, but no
        less than the longest takes alone."""
        if not chunks:
            return 0
        together = sum(self.among[past + new] - self.cached_among[past] for past, new in chunks)
        alone = max(self.prefill[past + new] - self.cached[past] for past, new in chunks)
        return self.prefill_call + max(together, alone)

    def attention(self, chunk: int, mixed: bool, width: int = 1) -> DecodeTable:
        """Return a table of decode attention, with `width` query tokens for each sequence."""
        return DecodeTable(self.models, self.contexts, self.max_num_seqs, chunk, self.scale(mixed), width)


def compile_tables(
    model: Model,
    hardware: Hardware,
    pool: Pool,
    max_model_len: int,
    factors: Mapping[str, float] | None = None,
    width: int = 1,
) -> StepTables:
    """Compile the tables of one instance of the pool; a sequence may have `width` tokens in a step, all sampled.

    Raises Infeasible when the model cannot be sharded as the pool asks, or the profile lacks an operator or link.
    """
    models, seqs = _Models.of(model, hardware, pool, factors), pool.batching.max_num_seqs
    step_model, attention = models.model, models.model.attention
    entries = max_model_len + 3 * max(pool.batching.max_num_batched_tokens, width * seqs)
    room.need(entries * _ENTRY_BYTES, f"step costs up to max_model_len {max_model_len:,}", "lower max_model_len")
    contexts = knots(KNOTS_PER_OCTAVE, max_model_len, step_model.windows)
    differs = step_model.correction(True) != step_model.correction(False)
    separate = differs or step_model.differs_with_prompts
    pure = _token_tables(models, pool, width * seqs, with_chunks=False)
    mixed = _token_tables(models, pool, width * seqs, with_chunks=True) if separate else _launched(pure, models, pool)
    scales = [1.0 if c is None else c.scale for c in (step_model.correction(False), step_model.correction(True))]
    alone = DecodeTable(models, contexts, seqs, 0, scales[False])
    beside: tuple[DecodeTable, ...] = (alone,)
    if differs or attention.mixes:
        chunks = _chunks(pool.batching.max_num_batched_tokens) if attention.mixes else [0]
        beside = tuple(DecodeTable(models, contexts, seqs, chunk, scales[True]) for chunk in chunks)
    prefill, among, past = _prompt_times(models, max_model_len, scales[True])
    decodes = np.arange(1, seqs + 1, dtype=np.float64)
    imbalance = [[0, *whole_ticks(scales[kind] * attention.imbalance_s(decodes, kind))] for kind in (False, True)]
    return StepTables(
        models=models,
        max_num_seqs=seqs,
        contexts=contexts,
        pure=pure,
        mixed=mixed,
        alone=alone,
        beside=beside,
        prefill=[0, *whole_ticks(prefill)],
        cached=[0, *whole_ticks(prefill - past)],
        among=[0, *whole_ticks(among)],
        cached_among=[0, *whole_ticks(among - past)],
        prefill_call=to_ticks(scales[True] * attention.prefill_call_s),
        imbalance=(imbalance[False], imbalance[True]),
        groups=pool.parallelism.attention_dp,
        shared=SharedExperts.of(step_model, scales[False], width),
        shares_prefixes=bool(pool.cascade_attention),
    )


def _prompt_times(models: _Models, longest: int, scale: float) -> tuple[Array, Array, Array]:
    """Return seconds by tokens, from 1 on: of prompts alone, of each among enough to fill the device, and of work that
    chunks repeat for cached tokens."""
    # With the overhead, which is not 0, residuals have a ratio to the base.
    call_s = models.model.attention.prefill_call_s
    lengths = np.arange(1, longest + 1, dtype=np.float64)
    computed: dict[tuple[int, int], tuple[Array, Array]] = {}

    def with_call_s(at: int, model: StepModel, tokens: Array) -> Array:
        # Both are computed at once, for each model and set of lengths.
        key = id(model), len(tokens)
        if key not in computed:
            computed[key] = model.attention.prompts(tokens)
        seconds: Array = computed[key][at] + call_s
        return seconds

    alone, among = (rising(np.maximum(models.dense(partial(with_call_s, at), lengths) - call_s, 0)) for at in (0, 1))
    past = models.dense(lambda model, x: model.attention.past(x), lengths)
    return scale * alone, scale * np.minimum(among, alone), scale * past


def _token_tables(models: _Models, pool: Pool, max_samples: int, with_chunks: bool) -> TokenTables:
    model, seqs, correction = models.model, pool.batching.max_num_seqs, models.model.correction(with_chunks)
    scale = 1.0 if correction is None else correction.scale
    samples = np.arange(1, max_samples + 1, dtype=np.float64)
    tokens = np.arange(1, max(pool.batching.max_num_batched_tokens, max_samples) + 1, dtype=np.float64)
    padded = padded_tokens(tokens, model.launches.largest_graph)
    linear = models.dense(lambda model, x: _total(model.padded(x, with_chunks)), padded)
    experts: list[int] = []
    if models.model.routes:
        linear = linear + models.dense(lambda model, x: _total(model.routed(x, with_chunks)), tokens)
        if pool.parallelism.attention_dp > 1:
            experts = [
                0,
                *whole_ticks(scale * models.dense(lambda model, x: model.routed(x, with_chunks)["moe"], tokens)),
            ]
    head = scale * models.dense(lambda model, x: _total(model.head(x)), samples)
    # A step takes max(GPU, floor) + after: the host hides behind the GPU or comes after it.
    after_s = [model.exposed_s(n) for n in range(seqs + 1)]
    if correction is not None:
        after_s = [correction.offset_s] * (seqs + 1)
    return TokenTables(
        linear=[0, *whole_ticks(scale * linear)],
        head=[0, *whole_ticks(head)],
        floor=_floors(model, pool, with_chunks),
        after=list(map(to_ticks, after_s)),
        experts=experts,
    )


def _launched(pure: TokenTables, models: _Models, pool: Pool) -> TokenTables:
    """Return the tables of steps with chunks that differ from other steps by their launches at most."""
    return pure._replace(floor=_floors(models.model, pool, with_chunks=True)) if pool.prompt_launch_s else pure


def _floors(model: StepModel, pool: Pool, with_chunks: bool) -> list[int]:
    """Least ticks of a step by its sequences: the launch of its kernels, and the host if it hides behind the GPU."""
    correction = model.correction(with_chunks)
    launch = to_ticks((1.0 if correction is None else correction.scale) * model.launches.floors_s[with_chunks])
    return [max(launch, host) for host in _hidden_host(model, pool.batching.max_num_seqs, with_chunks)]


def _hidden_host(model: StepModel, seqs: int, with_chunks: bool) -> list[int]:
    """Ticks of the host that hide behind the GPU, by sequences up to `seqs`; 0 if none do or a log corrects steps."""
    if model.correction(with_chunks) is not None:
        return [0] * (seqs + 1)
    return [to_ticks(model.host.seconds(n)) - to_ticks(model.exposed_s(n)) for n in range(seqs + 1)]


def _chunks(budget: int) -> list[int]:
    """Knots of the length of the longest chunk in a step, a factor of four apart up to the token budget."""
    chunks = [budget]
    while chunks[-1] > 16:
        chunks.append(max(16, chunks[-1] // 4))
    return chunks[::-1]


def _total(by_kind: dict[str, Array]) -> Array:
    total: Array = np.sum(list(by_kind.values()), axis=0)
    return total


# --- steps ------------------------------------------------------------------------------------------------


def compile_costs(
    model: Model, hardware: Hardware, pool: Pool, max_model_len: int, factors: Mapping[str, float] | None = None
) -> CompiledCosts:
    """Compile the step costs of one instance of the pool for requests of up to max_model_len tokens.

    `factors` multiply the times of kinds (`simtune.costs.iteration.KINDS`), to draw a world in which they are
    off. Raises Infeasible when the model cannot be sharded as the pool asks, or the profile lacks an operator or
    link.
    """
    return CompiledCosts(model, hardware, pool, max_model_len, factors)


class CompiledCosts:
    """Step costs of one instance, for any batch within the pool's limits; see the module.

    Pickling passes on the arguments; the other process compiles the tables again.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        pool: Pool,
        max_model_len: int,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self._compiled_from: tuple[Any, ...] = (model, hardware, pool, max_model_len, factors)
        self.tables = tables = compile_tables(model, hardware, pool, max_model_len, factors)
        # Looked up in every step: taken out of the tables for speed.
        self._steps: list[DecodeRow | None] = [None] * (tables.max_num_seqs + 1)  # pure decode steps, by decodes
        self._mixed, self._beside = tables.mixed, tables.beside
        self._mixed_lists = tables.mixed[:4]
        self._prefill, self._cached, self._call = tables.prefill, tables.cached, tables.prefill_call
        self._among, self._cached_among = tables.among, tables.cached_among
        self._largest, self._large = tables.largest_graphs[True], tables.large[True]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._compiled_from

    @property
    def balanced(self) -> bool:
        """True if `imbalance` is always 0."""
        return not any(any(row) for row in self.tables.imbalance)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `simtune.costs.protocol.StepCosts.decode`."""
        starts, values, slopes, floor, after = self._steps[num_decodes] or self._make_step(num_decodes)
        at = bisect_right(starts, context_tokens, 1)
        start, per_token = starts[at - 1], slopes[at - 1]
        ticks = values[at - 1] + per_token * (context_tokens - start)
        span = -((context_tokens - starts[at]) // num_decodes)
        if ticks >= floor:
            return ticks + after, per_token * num_decodes, span
        # steps stay at the floor until attention outgrows it
        if per_token:
            span = min(span, (floor - ticks) // (per_token * num_decodes) + 1)
        return floor + after, 0, span

    def _make_step(self, num_decodes: int) -> DecodeRow:
        """Make the row of attention with all other GPU time of a pure decode step added."""
        alone, pure = self.tables.alone, self.tables.pure
        starts, values, slopes = alone.rows[num_decodes] or alone.make(num_decodes)
        other_ticks = pure.linear[num_decodes] + pure.head[num_decodes]
        row = self._steps[num_decodes] = (
            starts,
            [ticks + other_ticks for ticks in values],
            slopes,
            self.tables.floor(num_decodes, num_decodes, False),
            pure.after[num_decodes],
        )
        return row

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """See `simtune.costs.protocol.StepCosts.mixed`."""
        if not chunks:
            return self.decode(num_decodes, context_tokens)[0]
        linear, head, floors, after = self._mixed_lists
        prefill, cached, among, cached_among = self._prefill, self._cached, self._among, self._cached_among
        tokens, longest, together, alone = num_decodes, 0, 0, 0
        for past, new in chunks:
            tokens += new
            if new > longest:
                longest = new
            context = past + new
            together += among[context] - cached_among[past]
            ticks = prefill[context] - cached[past]
            if ticks > alone:
                alone = ticks
        ticks = (together if together > alone else alone) + self._call + head[num_samples] + linear[tokens]
        if num_decodes:
            beside = self._beside
            if len(beside) == 1:
                ticks += beside[0].ticks(num_decodes, context_tokens)
            else:
                ticks += self._attention_beside(longest, num_decodes, context_tokens)
        num_seqs = num_decodes + len(chunks)
        floor = floors[num_seqs]
        if tokens > self._largest and floor < self._large[num_seqs]:
            floor = self._large[num_seqs]
        return (ticks if ticks > floor else floor) + after[num_seqs]

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        """See `simtune.costs.protocol.ImbalanceCosts`."""
        per_token = self.tables.imbalance[with_chunks][num_decodes]
        return per_token * (longest_context * num_decodes - context_tokens) // num_decodes if per_token else 0

    def together(self, ticks: int, num_tokens: int, num_seqs: int, everybodys: int, with_chunks: bool) -> int:
        """See `simtune.costs.protocol.GroupCosts`; if groups differ, the experts take the time of the mean."""
        tables = self._mixed if with_chunks else self.tables.pure
        floor = self.tables.floor(num_tokens, num_seqs, with_chunks)
        after, experts = tables.after[num_seqs], tables.experts
        if not experts or ticks - after <= floor:
            return ticks
        mean = min(-(-everybodys // self.tables.groups), len(experts) - 1)
        return max(ticks - after - experts[num_tokens] + experts[mean], floor) + after

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


# --- a formula --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearCosts:
    """t = step + per_token m + per_context C + per_pair A in seconds, for m tokens and C context tokens; drafts take
    `per_depth_s` more for each draft made in turn.

    A is the number of pairs of tokens that prefill attention relates: t p + t (t + 1) / 2 for a chunk of t
    tokens after p cached ones. The numbers are rounded to ticks.
    """

    step_s: float
    per_token_s: float = 0.0
    per_context_s: float = 0.0
    per_pair_s: float = 0.0
    per_depth_s: float = 0.0

    def __post_init__(self) -> None:
        times = (self.step_s, self.per_token_s, self.per_context_s, self.per_pair_s, self.per_depth_s)
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
        depth: int,
        context_tokens: int,
        chunks: Sequence[tuple[int, int]] = (),
        completing: int = 0,
    ) -> int:
        """See `simtune.costs.protocol.RoundCosts.round`."""
        ticks = self.mixed(verify_tokens, context_tokens, chunks, verify_tokens + completing)
        return ticks + to_ticks(self.per_depth_s) * depth

    def rounds(self, num_decodes: int, verify_tokens: int, depth: int, computed: Sequence[int] | Ints) -> Sequence[int]:
        """See `simtune.costs.protocol.RoundCosts.rounds`."""
        first = self.round(num_decodes, verify_tokens, depth, verify_tokens)
        ends: list[int] = (first + self._four_ticks[2] * np.asarray(computed)).cumsum().tolist()
        return ends
