"""What rounds of drafting and verifying take, frozen into integer tables: `simtune.costs.drafting` for the simulator.

A step with B decodes that verify T tokens between them, beside some prefill chunks, takes

    T_gpu = linear(T + chunk tokens) + head(T + completed chunks) + attention(B, T / B) + prefill
            + drafting(sequences that got a token) + the drafter's own pass over the chunks

of which drafting is that of the next drafts: of every decode and of every chunk that completes its prompt. Where the
drafter drafts beside the target, on devices of its own, that is

    max(target, drafting(decodes) + the drafter's own pass over the chunks)

and every draft is one pass over one token of each decode: what was rejected is forgotten, and the token that came in
its place is read as the first draft is made. What the two send each other is not counted. Of a target with R replicas
(DSI, arXiv 2405.14105) this is a tick: on one of them the verification of a window begins, of every decode whatever
becomes of it, and it takes R ticks, so that it counts 1 / R, rounded up to whole ticks. Prefill chunks are computed by
all replicas at once, beside which they go on: what a step takes longer for them is not divided; nor is the host.

A chain in chunks that are verified while the next one is drafted (like FASER, arXiv 2604.20503; the formula is that of
`simtune.tuner.speculation.overlap.frontier_seconds`) takes

    d_1 + sum over j >= 2 of max(d_j / draft_share, v_(j-1) / verify_share) + v_last

with d_j the drafting of chunk j, in the first with the pass over what was verified last, and v_j a pass of the target
over as many tokens of each decode, in the last with one more. Prefill chunks are computed once, with v_1 and d_1, and
the first drafts of a prompt just completed are made in its first round. As in
`simtune.costs.compiled` all tables hold whole ticks and attention has whole ticks per context token between knots, so
that every round is told by itself, exactly: a jump is the sum of its rounds. Where T is no multiple of B attention is
that between the two nearest widths; where it is less than B, as in a chunk that not every decode got to, that of B.

Known leanings besides those of `simtune.costs.drafting`. Decode attention beside prefill chunks is that of steps
without. A prompt just completed is taken to be as long as the chunks of its step are on average.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from simtune.arrays import Ints
from simtune.costs.compiled import CompiledCosts, _bends, _DecodeAttention, _sizes, _ticks
from simtune.costs.drafting import drafting_model, drafting_parallelism
from simtune.costs.predict import Profile
from simtune.costs.protocol import UNBOUNDED
from simtune.costs.ticks import to_ticks
from simtune.specs.drafts import Shape
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Pool
from simtune.specs.speculation import BlockDrafter, Drafter, Eagle, Medusa, awaited


class _Line(NamedTuple):
    """Piecewise affine in context tokens, on whole numbers."""

    starts: list[int]
    ticks: list[int]
    slopes: list[int]

    def at(self, context_tokens: int) -> int:
        i = bisect_right(self.starts, context_tokens, 1) - 1
        return self.ticks[i] + self.slopes[i] * (context_tokens - self.starts[i])

    def piece(self, context_tokens: int) -> tuple[int, int, int]:
        """(ticks without any context, ticks per context token, contexts below which that holds)."""
        starts, ticks, slopes = self
        i = bisect_right(starts, context_tokens, 1) - 1
        end = starts[i + 1] if i + 1 < len(starts) else UNBOUNDED
        return ticks[i] - slopes[i] * starts[i], slopes[i], end

    def many(self, context_tokens: Ints) -> Ints:
        """At contexts that rise."""
        starts, ticks, slopes = self
        i, last = bisect_right(starts, int(context_tokens[0]), 1) - 1, int(context_tokens[-1])
        found: Ints = context_tokens * slopes[i]
        found += ticks[i] - slopes[i] * starts[i]
        while i + 1 < len(starts) and starts[i + 1] <= last:
            i += 1
            at = int(context_tokens.searchsorted(starts[i]))
            found[at:] = ticks[i] + slopes[i] * (context_tokens[at:] - starts[i])
        return found


def _line(starts: Ints, ticks: Ints) -> _Line:
    kept = _bends(starts, ticks)
    starts, ticks = starts[kept], ticks[kept]
    slopes = np.diff(ticks) // np.diff(starts)
    return _Line(starts[:-1].tolist(), ticks[:-1].tolist(), slopes.tolist())


def _plus(a: _Line, more: int) -> _Line:
    return _Line(a.starts, [ticks + more for ticks in a.ticks], a.slopes)


def _moved(a: _Line, shift: int) -> _Line:
    """a(x - shift)."""
    return _Line([start + shift for start in a.starts], a.ticks, a.slopes)


def _at_speed(a: _Line, speed: float) -> _Line:
    """a(x) / speed, rounded up to whole ticks where a piece starts, and down to whole ticks per context token."""
    return _Line(a.starts, [math.ceil(t / speed) for t in a.ticks], [math.floor(s / speed) for s in a.slopes])


def _starts(a: _Line, b: _Line) -> list[int]:
    """Of the pieces of both together, from where a starts."""
    return [a.starts[0], *sorted({x for x in (*a.starts, *b.starts) if x > a.starts[0]})]


def _sum(a: _Line, b: _Line) -> _Line:
    """a(x) + b(x)."""
    starts = _starts(a, b)
    return _Line(starts, [a.at(x) + b.at(x) for x in starts], [a.piece(x)[1] + b.piece(x)[1] for x in starts])


def _larger(a: _Line, b: _Line) -> _Line:
    """max(a(x), b(x)), on whole numbers."""
    pieces = []
    for x, end in pairwise([*_starts(a, b), UNBOUNDED]):
        (p, q, _), (r, s, _) = a.piece(x), b.piece(x)
        mine, other = (p + q * x, q), (r + s * x, s)
        if mine < other:
            mine, other = other, mine
        pieces.append((x, *mine))
        if other[1] > mine[1] and (cross := x + -(-(mine[0] - other[0]) // (other[1] - mine[1]))) < end:
            pieces.append((cross, other[0] + other[1] * (cross - x), other[1]))
    return _Line(*map(list, zip(*pieces, strict=True)))


class CompiledRounds(CompiledCosts):
    """Step costs of one instance that drafts; see the module. `draft` is the model that a `draft_model` names.

    Raises Infeasible where the target or the draft model cannot be sharded, the draft model speaks another vocabulary,
    or the profile cannot tell a time.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        pool: Pool,
        max_model_len: int,
        drafter: Drafter,
        shape: Shape,
        draft: Model | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        if awaited(drafter):
            pool = pool.model_copy(update={"async_scheduling": False})
        super().__init__(model, hardware, pool, max_model_len, factors, 1 + shape.drafts)
        self._compiled_from = (model, hardware, pool, max_model_len, drafter, shape, draft, factors)
        self._drafter, self._shape = drafter, shape
        self._network: CompiledCosts | None = None
        network = drafting_model(drafter, model, draft)
        if network is not None:
            draft_pool = pool.model_copy(update={"parallelism": drafting_parallelism(drafter, pool)})
            width = max(shape.levels + 1, shape.width)
            self._network = CompiledCosts(network, hardware, draft_pool, max_model_len, factors, width)
        self._join, self._heads = self._extras(hardware, model, factors or {})
        self._host = to_ticks(getattr(drafter, "host_s", 0.0))
        self._apart = not pool.cuda_graphs and not pool.schedules_async and self._model.correction(False) is None
        self._widths: dict[tuple[bool, int, bool], _DecodeAttention] = {}
        self._attended: dict[tuple[bool, int, bool, int], Ints] = {}
        self._alike = self._model.correction(False) == self._model.correction(True)
        self._verifying: dict[tuple[int, int, bool], _Line] = {}
        self._drafting: dict[tuple[int, int, bool, int], _Line] = {}
        self._whole: dict[tuple[int, int, int], _Line] = {}
        self._launches = self._model.launch_s > 0
        # Of the target's step, without chunks and with them; it hides them or waits for them.
        self._launch = [to_ticks(self._scale(mixed) * self._model.launch_s) for mixed in (False, True)]
        self._in_turn = not shape.overlapped and shape.frontier is None

    def _extras(self, hardware: Hardware, model: Model, factors: Mapping[str, float]) -> tuple[list[int], list[int]]:
        """Ticks, by tokens, of joining embeddings to hidden states, and, by sequences, of parallel heads."""
        drafter, hidden, factor = self._drafter, model.hidden_size, factors.get("gemm", 1.0)
        gemm = Profile(hardware).predictor("gemm", model.dtype)
        if isinstance(drafter, Eagle) and self._network is not None:
            tokens = np.arange(1, len(self._network._pure.linear), dtype=np.float64)
            knots = _sizes(tokens)
            return [0, *_ticks(factor * np.interp(tokens, knots, gemm.seconds(m=knots, n=hidden, k=2 * hidden)))], []
        if isinstance(drafter, Medusa):
            rows, vocab = np.arange(1, self._max_num_seqs + 1, dtype=np.float64), -(-model.vocab_size // self._tp)
            one = gemm.seconds(m=rows, n=hidden, k=hidden) + gemm.seconds(m=rows, n=vocab, k=hidden)
            return [], [0, *_ticks(factor * drafter.heads * one)]
        return [], []

    @property
    def _tp(self) -> int:
        pool: Pool = self._compiled_from[2]
        return pool.parallelism.tp

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
        if not chunks:
            return self._pure_line(num_decodes, verify_tokens, levels).at(context_tokens - verify_tokens)
        if self._in_turn:
            return self._mixed_round(num_decodes, verify_tokens, levels, context_tokens, chunks, completing)
        tables, num_seqs = self._mixed, num_decodes + len(chunks)
        new = length = 0
        more, prefill, cached = self._chunk * len(chunks), self._prefill, self._cached
        for past, tokens in chunks:
            new += tokens
            length += past + tokens
            more += prefill[past + tokens] - cached[past]
        parts = self._parts(num_decodes, verify_tokens, levels)
        together = min(len(tables.linear) - 1, parts[0] + new)
        more += tables.linear[together] - tables.linear[together - new]
        more += tables.head[parts[0] + completing] - tables.head[parts[0]]
        left, speed, launch = verify_tokens, max(1, self._shape.replicas), self._launch[True]
        verifies = []
        for part in parts:
            left -= part
            ticks = tables.linear[part] + tables.head[part]
            if num_decodes:
                ticks += self._verify_line(num_decodes, part, True).at(context_tokens - max(0, left))
            verifies.append(max(-(-ticks // speed) + more, -(-launch // speed)))
            more = 0
        ticks = verifies[-1]
        if levels:
            if self._shape.overlapped or self._shape.frontier:
                completing = 0  # the first drafts are made in the first round
            drafting = num_decodes + completing
            context = context_tokens - self._rewound(num_decodes, verify_tokens, levels)
            if completing:
                context += completing * (length // len(chunks) + levels)
            drafts = [self._draft(drafting, levels, context, True, part) for part in range(len(parts))]
            if self._network is not None:
                drafts[0] += self._draft_chunks(self._network, drafting * self._first(levels), chunks, new)
            if self._shape.overlapped:
                ticks = max(ticks, drafts[0] + self._prepared(num_seqs, levels, True))
            else:
                beside = zip(drafts[1:], verifies[:-1], strict=True)
                draft_share, verify_share = self._shares
                ticks += drafts[0]
                ticks += sum(max(math.ceil(d / draft_share), math.ceil(v / verify_share)) for d, v in beside)
        return max(ticks, tables.floor[num_seqs]) + self._after(num_seqs, levels, True)

    def _mixed_round(
        self,
        num_decodes: int,
        verify_tokens: int,
        levels: int,
        context_tokens: int,
        chunks: Sequence[tuple[int, int]],
        completing: int,
    ) -> int:
        """What `round` comes to where drafts are made and verified in turn, in less time."""
        tables, prefill, cached, network = self._mixed, self._prefill, self._cached, self._network
        ticks, new, length, number = 0, 0, 0, len(chunks)
        for past, tokens in chunks:
            new += tokens
            length += past + tokens
            ticks += prefill[past + tokens] - cached[past]
        ticks += self._chunk * number + tables.linear[verify_tokens + new] + tables.head[verify_tokens + completing]
        if num_decodes:
            line = self._verifying.get((num_decodes, verify_tokens, True))
            ticks += (line or self._verify_line(num_decodes, verify_tokens, True)).at(context_tokens)
        if self._launches:
            ticks = max(ticks, self._launch[True])
        if levels:
            drafting = num_decodes + completing
            if drafting:
                context = context_tokens - verify_tokens + levels * num_decodes
                context += completing * (length // number + levels)
                ticks += self._draft(drafting, levels, context, True)
            if network is not None:
                ticks += self._draft_chunks(network, drafting * (levels + 1), chunks, new)
        num_seqs = num_decodes + number
        floor = tables.floor[num_seqs]
        return (ticks if ticks > floor else floor) + self._after(num_seqs, levels, True)

    def rounds(
        self, num_decodes: int, verify_tokens: int, levels: int, computed: Sequence[int] | Ints
    ) -> Sequence[int]:
        """See `simtune.costs.protocol.RoundCosts.rounds`."""
        line = self._pure_line(num_decodes, verify_tokens, levels)
        if isinstance(computed, np.ndarray):
            return array("q", line.many(computed).cumsum().tobytes())
        base, slope, end = line.piece(computed[0])
        if computed[-1] < end:
            return list(accumulate([base + slope * tokens for tokens in computed]))
        ticks = []
        for tokens in computed:
            if tokens >= end:
                base, slope, end = line.piece(tokens)
            ticks.append(base + slope * tokens)
        return list(accumulate(ticks))

    def _pure_line(self, num_decodes: int, verify_tokens: int, levels: int) -> _Line:
        """Of a round without chunks, by the tokens that the decodes have computed before it."""
        key = (num_decodes, verify_tokens, levels)
        line = self._whole.get(key)
        if line is None:
            verifies, left = [], verify_tokens
            for part in self._parts(num_decodes, verify_tokens, levels):
                left -= part
                verify = _plus(self._verify_line(num_decodes, part, False), self._pure.head[part])
                verify = _moved(_plus(verify, self._pure.linear[part]), max(0, left))
                verifies.append(_larger(verify, _Line([0], [self._launch[False]], [0])) if self._launches else verify)
            line = verifies[-1]
            if levels and self._network is not None:
                shift = self._rewound(num_decodes, verify_tokens, levels)
                drafts = [
                    _moved(self._draft_line(num_decodes, levels, False, part), shift) for part in range(len(verifies))
                ]
                if self._shape.overlapped:
                    drafting = _plus(drafts[0], self._prepared(num_decodes, levels, False))
                    line = _larger(_at_speed(line, self._shape.replicas), drafting)
                else:
                    line = _sum(line, drafts[0])
                    draft_share, verify_share = self._shares
                    for draft, verify in zip(drafts[1:], verifies[:-1], strict=True):
                        line = _sum(line, _larger(_at_speed(draft, draft_share), _at_speed(verify, verify_share)))
            elif levels:
                line = _plus(line, self._draft(num_decodes, levels, 0, False))
            line = _larger(line, _Line([0], [self._pure.floor[num_decodes]], [0]))
            line = _moved(_plus(line, self._after(num_decodes, levels, False)), -verify_tokens)
            self._whole[key] = line
        return line

    def _parts(self, num_decodes: int, verify_tokens: int, levels: int) -> list[int]:
        """Tokens that the target computes in one pass after the other; drafts are taken to be spread evenly."""
        if levels and self._shape.replicas > 1:
            return [num_decodes * levels]
        parts, left = [], verify_tokens
        if levels and num_decodes and self._shape.frontier is not None:
            for size in self._shape.frontier.sizes[:-1]:
                parts.append(min(left, num_decodes * size))
                left -= parts[-1]
        return [*parts, left]

    @property
    def _shares(self) -> tuple[float, float]:
        """Of the processors, for the drafter and for the target, while both run."""
        frontier = self._shape.frontier
        return (1.0, 1.0) if frontier is None else (frontier.draft_share, frontier.verify_share)

    def _after(self, num_seqs: int, levels: int, mixed: bool) -> int:
        """Ticks of the host that nothing hides."""
        after = (self._mixed if mixed else self._pure).after[num_seqs]
        if levels and self._apart and not self._shape.overlapped:
            frontier = self._shape.frontier
            after *= (1 if frontier is None else frontier.chunks) + self._passes(levels)
        return after + (self._host * num_seqs if levels else 0)

    def _prepared(self, num_seqs: int, levels: int, mixed: bool) -> int:
        """Ticks of the host before every pass but one of a drafter that runs beside the target, if nothing hides it."""
        if not self._apart or not self._shape.overlapped:
            return 0
        return (self._passes(levels) - 1) * (self._mixed if mixed else self._pure).after[num_seqs]

    def _rewound(self, num_decodes: int, verify_tokens: int, levels: int) -> int:
        """By how many tokens the contexts that are drafted on are shorter than those that the target verifies."""
        if self._shape.overlapped:
            return -levels * self._shape.replicas * num_decodes
        return verify_tokens - levels * num_decodes

    def _first(self, levels: int) -> int:
        """Tokens of a sequence that the drafter reads as it makes the first draft."""
        return 1 if self._shape.overlapped else levels + 1

    def _passes(self, levels: int) -> int:
        if self._network is None:
            return int(bool(self._heads))
        return 1 if isinstance(self._drafter, BlockDrafter) else levels

    def _scale(self, mixed: bool) -> float:
        correction = self._model.correction(mixed)
        return 1.0 if correction is None else correction.scale

    def _draft(self, sequences: int, levels: int, context_tokens: int, mixed: bool, part: int = 0) -> int:
        if not sequences:
            return 0
        if self._network is not None:
            return self._draft_line(sequences, levels, mixed, part).at(context_tokens)
        return round(self._scale(mixed) * self._heads[sequences]) if self._heads else 0

    def _draft_chunks(self, network: CompiledCosts, tokens: int, chunks: Sequence[tuple[int, int]], new: int) -> int:
        """Ticks by which prefill chunks lengthen the drafter's first pass, which has `tokens` without them."""
        linear, prefill, cached, join = network._mixed.linear, network._prefill, network._cached, self._join
        most = len(linear) - 1
        without = tokens if tokens < most else most
        together = tokens + new if tokens + new < most else most
        ticks = network._chunk * len(chunks) + linear[together] - linear[without]
        if join:
            ticks += join[together] - join[without]
        for past, more in chunks:
            ticks += prefill[past + more] - cached[past]
        return ticks

    def _verify_line(self, num_decodes: int, verify_tokens: int, mixed: bool) -> _Line:
        key = (num_decodes, verify_tokens, mixed)
        line = self._verifying.get(key)
        if line is None:
            width, rest = divmod(max(verify_tokens, num_decodes), num_decodes)
            ticks = self._attention(self, width, num_decodes, mixed)
            if rest:
                above = self._attention(self, width + 1, num_decodes, mixed)
                ticks = ticks + (above - ticks) * rest // num_decodes
            line = self._verifying[key] = _line(self._contexts.astype(np.int64) * num_decodes, ticks)
        return line

    def _draft_line(self, sequences: int, levels: int, mixed: bool, part: int = 0) -> _Line:
        """Of a chunk of the drafts, if they are made in chunks; the first begins with what was verified last."""
        key = (sequences, levels, mixed, part)
        line = self._drafting.get(key)
        if line is None:
            if isinstance(self._drafter, BlockDrafter):
                ticks = self._pass(sequences, levels, sequences * levels, mixed)
            else:
                frontier, width = self._shape.frontier, self._shape.width
                each = self._pass(sequences, width, sequences * width, mixed)
                ticks = each * (levels if frontier is None else frontier.sizes[part])
                if part == 0:
                    ticks = ticks - each + self._pass(sequences, self._first(levels), sequences, mixed)
            line = self._drafting[key] = _line(self._contexts.astype(np.int64) * sequences, ticks)
        return line

    def _pass(self, sequences: int, width: int, samples: int, mixed: bool) -> Ints:
        """Ticks of one pass of the drafter over so many tokens of each sequence, at all contexts."""
        network = self._network
        assert network is not None
        tables = network._mixed if mixed else network._pure
        tokens = min(sequences * width, len(tables.linear) - 1)
        ticks = self._attention(network, width, sequences, mixed)
        ticks = ticks + tables.linear[tokens] + tables.head[min(samples, len(tables.head) - 1)]
        launch = to_ticks(self._scale(mixed) * network._model.launch_s)
        joins = round(self._scale(mixed) * self._join[tokens]) if self._join else 0
        return np.maximum(ticks, launch) + joins

    def _attention(self, costs: CompiledCosts, width: int, sequences: int, mixed: bool) -> Ints:
        """Ticks of the target's or the drafter's, at all contexts."""
        mixed = mixed and not self._alike
        ticks = self._attended.get(key := (costs is self, width, mixed, sequences))
        if ticks is None:
            if key[:3] not in self._widths:
                self._widths[key[:3]] = costs._decode_attention(0, costs._model.correction(mixed), width)
            ticks = self._attended[key] = self._widths[key[:3]].at_knots(sequences)
        return ticks
