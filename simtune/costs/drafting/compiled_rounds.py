"""Time of rounds of drafting and verifying, frozen into integer tables: `RoundModel` for the simulator.

A step with B decodes that verify T tokens between them, beside some prefill chunks, takes

    T_gpu = linear(T + chunk tokens) + head(T + completed chunks) + attention(B, T / B) + prefill
            + drafting(sequences that got a token) + the drafter's own pass over the chunks

where drafting is that of the next drafts: of every decode and of every chunk that completes its prompt. If the
drafter drafts in parallel with the target, on its own devices, that is

    max(target, drafting(decodes) + the drafter's own pass over the chunks)

and every draft is one pass over one token of each decode: rejected drafts are forgotten, and the token that replaced
them is read as the first draft is made. The messages between the two are not counted. With a target of R replicas
(DSI, arXiv 2405.14105) this is a tick: on one of them the verification of a window begins, of every decode whether it
is accepted or not, and it takes R ticks, so that it counts 1 / R, rounded up to whole ticks. Prefill chunks are
computed by all replicas at once while verifications continue: their additional time is not divided; nor is the host's.

A chain in chunks that are verified while the next one is drafted (like FASER, arXiv 2604.20503; a model of ours, the
paper has no closed form) takes

    d_1 + sum over j >= 2 of max(d_j / draft_share, v_(j-1) / verify_share) + v_last

with d_j the drafting of chunk j, in the first with the pass over the tokens verified last, and v_j a pass of the target
over as many tokens of each decode, in the last with one more. Prefill chunks are computed once, with v_1 and d_1, and
the first drafts of a prompt just completed are made in its first round. As in `simtune.costs.compiled` all tables
contain whole ticks, and attention has whole ticks per context token between knots, so that every round has an exact
time: a jump is the sum of its rounds. If T is no multiple of B, attention is interpolated between the two nearest
widths; if T is less than B, as in a chunk that not every decode got to, it is that of B.

Known biases besides those of `simtune.costs.drafting.round_model`. Decode attention in steps with prefill chunks is
that of steps without. A prompt just completed is taken to be as long as the chunks of its step are on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.compiled import StepTables, compile_tables
from simtune.costs.drafting.draft_memory import drafting_pool
from simtune.costs.drafting.lines import TickLine
from simtune.costs.drafting.orders import order_of
from simtune.costs.drafting.passes import DraftPasses, TargetPasses
from simtune.costs.knots import sizes, whole_ticks
from simtune.costs.predict import Profile
from simtune.costs.protocol import ChunkList
from simtune.costs.ticks import to_ticks
from simtune.specs.drafters import Drafter
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.schemes import RoundShape


class CompiledRounds:
    """Step costs of one instance that drafts; see the module. `draft` is the model that a draft model names.

    Pickling passes on the arguments; the other process compiles the tables again. Raises Infeasible if the target or
    the draft model cannot be sharded, the draft model has another vocabulary, or the profile cannot predict a time.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        pool: Pool,
        max_model_len: int,
        drafter: Drafter,
        shape: RoundShape,
        draft: Model | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self._compiled_from: tuple[Any, ...] = (model, hardware, pool, max_model_len, drafter, shape, draft, factors)
        if pool.awaits(drafter):
            pool = pool.model_copy(update={"async_scheduling": False})
        self.tables = tables = compile_tables(model, hardware, pool, max_model_len, factors, 1 + shape.drafts)
        draft_tables: StepTables | None = None
        network = drafter.network(model, draft)
        if network is not None:
            draft_pool = drafting_pool(drafter, pool)
            width = max(shape.depth + 1, shape.width)
            draft_tables = compile_tables(network, hardware, draft_pool, max_model_len, factors, width)
        gemm = _GemmRows(hardware, model, factors)
        target = TargetPasses(tables)
        drafts = DraftPasses(
            drafter,
            shape,
            tables,
            draft_tables,
            join=gemm.joins(draft_tables) if drafter.joins_hidden_states and draft_tables is not None else (),
            heads=gemm.heads(drafter.parallel_heads, pool) if drafter.parallel_heads else (),
        )
        # Without graphs, and if nothing hides the host, the host prepares every pass of the drafter like a step, unless
        # the engine's release states what it does for them.
        stated, corrected = tables.model.host.states_drafting, tables.model.correction(False) is not None
        self._prepares_each = not (pool.cuda_graphs or pool.hides_host or corrected or stated)
        # Passes on devices of their own are prepared beside the target's.
        counted = not (corrected or shape.overlapped)
        self._passes = [drafter.passes(depth) * counted for depth in range(shape.depth + 1)]
        self.order = order_of(shape)(shape, target, drafts, self._prepares_each)
        self._host = to_ticks(drafter.host_cost_s)
        self._lines: dict[tuple[int, int, int], TickLine] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._compiled_from

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `simtune.costs.protocol.StepCosts.decode`: rounds without drafts."""
        computed = context_tokens - num_decodes
        base, slope, end = self._line(num_decodes, num_decodes, 0).piece(computed)
        return base + slope * computed, slope * num_decodes, -((computed - end) // num_decodes)

    def mixed(self, num_decodes: int, context_tokens: int, chunks: ChunkList, num_samples: int) -> int:
        """See `simtune.costs.protocol.StepCosts.mixed`: a round without drafts."""
        return self.round(num_decodes, num_decodes, 0, context_tokens, chunks, num_samples - num_decodes)

    def round(
        self,
        num_decodes: int,
        verify_tokens: int,
        depth: int,
        context_tokens: int,
        chunks: ChunkList = (),
        completing: int = 0,
    ) -> int:
        """See `simtune.costs.protocol.RoundCosts.round`."""
        if not chunks:
            return self._line(num_decodes, verify_tokens, depth).at(context_tokens - verify_tokens)
        ticks = self.order.beside_chunks(num_decodes, verify_tokens, depth, context_tokens, chunks, completing)
        num_seqs = num_decodes + len(chunks)
        floor = self.tables.mixed.floor[num_seqs]
        return (ticks if ticks > floor else floor) + self._after(num_seqs, depth, True)

    def rounds(self, num_decodes: int, verify_tokens: int, depth: int, computed: Sequence[int] | Ints) -> Sequence[int]:
        """See `simtune.costs.protocol.RoundCosts.rounds`."""
        line = self._line(num_decodes, verify_tokens, depth)
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

    def _line(self, num_decodes: int, verify_tokens: int, depth: int) -> TickLine:
        """Return the line of a round without chunks, by the tokens that the decodes have computed before it."""
        key = (num_decodes, verify_tokens, depth)
        line = self._lines.get(key)
        if line is None:
            line = self.order.line(num_decodes, verify_tokens, depth)
            line = line.or_larger(TickLine.flat(self.tables.pure.floor[num_decodes]))
            line = line.plus(self._after(num_decodes, depth, False)).moved(-verify_tokens)
            self._lines[key] = line
        return line

    def _after(self, num_seqs: int, depth: int, mixed: bool) -> int:
        """Ticks of the host that nothing hides."""
        after = (self.tables.mixed if mixed else self.tables.pure).after[num_seqs]
        if not depth:
            return after
        if self._prepares_each:
            after *= self.order.steps_prepared(depth)
        drafting = to_ticks(self.tables.model.host.drafting_s(num_seqs, self._passes[depth]))
        return after + drafting + self._host * num_seqs


class _GemmRows:
    """Matrix products that a drafter adds to those of its network, in ticks."""

    def __init__(self, hardware: Hardware, target: Model, factors: Mapping[str, float] | None) -> None:
        self._gemm = Profile(hardware).predictor("gemm", target.dtype)
        self._target, self._factor = target, (factors or {}).get("gemm", 1.0)

    def joins(self, tables: StepTables) -> list[int]:
        """Ticks of joining embeddings to hidden states, by tokens."""
        hidden = self._target.hidden_size
        tokens = np.arange(1, len(tables.pure.linear), dtype=np.float64)
        at = sizes(tokens)
        seconds: Array = np.interp(tokens, at, self._gemm.seconds(m=at, n=hidden, k=2 * hidden))
        return [0, *whole_ticks(self._factor * seconds)]

    def heads(self, number: int, pool: Pool) -> list[int]:
        """Ticks of `number` parallel heads, by sequences."""
        hidden, vocab = self._target.hidden_size, -(-self._target.vocab_size // pool.parallelism.tp)
        rows = np.arange(1, pool.batching.max_num_seqs + 1, dtype=np.float64)
        per_head = self._gemm.seconds(m=rows, n=hidden, k=hidden) + self._gemm.seconds(m=rows, n=vocab, k=hidden)
        return [0, *whole_ticks(self._factor * number * per_head)]
