"""The best use of the drafters of a study: on each cut of the GPUs, by their costs there and by the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from simtune.arrays import Array
from simtune.costs.drafting import RoundModel
from simtune.errors import Infeasible
from simtune.sim.drafting import Drafting
from simtune.sim.feasibility import check
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.schemes import Chain, Scheme
from simtune.specs.speculation import DrafterChoice, Speculation
from simtune.tuner.drafting.choose import RoundCost, Schedule, choose
from simtune.workload.requests import RequestStream

MAX_LENGTH = 8
"""Depth of the deepest draft that is tried."""

RARE = 0.005
"""Share of the tokens below which a context is left out."""


@dataclass(frozen=True)
class Draft:
    """A drafter of a study with its named inputs loaded."""

    choice: DrafterChoice
    drafting: Drafting

    def speculation(self, scheme: Scheme) -> Speculation:
        """Return the speculation of a pool that drafts by this scheme."""
        return Speculation(drafter=self.choice.drafter, scheme=scheme, acceptance=self.choice.acceptance)


@dataclass(frozen=True)
class DraftContexts:
    """Powers of two around the contexts at which tokens are decoded, and the share of the tokens nearest to each.

    Contexts with fewer than RARE of the tokens are left out.
    """

    tokens: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, stream: RequestStream) -> DraftContexts:
        """Return the contexts of a load; each request counts at the middle of its output, with all of its tokens."""
        octaves = np.rint(np.log2(stream.prompt_tokens + stream.output_tokens / 2)).astype(int)
        weights = np.bincount(octaves, stream.output_tokens)
        frequent = np.flatnonzero(weights >= RARE * weights.sum())
        return cls(tuple((2**frequent).tolist()), tuple((weights[frequent] / weights[frequent].sum()).tolist()))

    @classmethod
    def even(cls, tokens: Sequence[int]) -> DraftContexts:
        """Return these contexts with equal shares."""
        return cls(tuple(tokens), (1 / len(tokens),) * len(tokens))


def batches_up_to(most: int) -> tuple[int, ...]:
    """Return powers of two, and the largest batch itself."""
    return (*(2**i for i in range((most - 1).bit_length())), most)


def round_costs(draft: Draft, model: Model, hardware: Hardware, pool: Pool) -> RoundCost:
    """Return the cost of rounds on an instance of a pool, each round computed once.

    Pools that differ in role, instances or limits alone have the same costs. Raise Infeasible if the drafter does not
    work with the pool.
    """
    return cache(RoundModel(model, hardware, pool, draft.choice.drafter, draft.drafting.model))


@dataclass(frozen=True)
class DraftGrid:
    """Batches and contexts for which drafts are chosen: all that the choice depends on, but the costs of rounds."""

    contexts: DraftContexts
    batches: tuple[int, ...]
    fits: tuple[tuple[bool, ...], ...]
    """True if the KV cache holds a batch at a context; rows of batches."""

    @classmethod
    def of(cls, draft: Draft, model: Model, hardware: Hardware, pool: Pool, contexts: DraftContexts) -> DraftGrid:
        """Return the grid of an instance of a pool. Raise Infeasible if the drafter does not work with the pool, or if
        its KV cache holds no sequence."""
        pp = pool.parallelism.pp
        smallest = pool.model_copy(update={"speculation": draft.speculation(Chain(tokens=1))})
        kv_tokens = check(smallest, model, hardware, draft.drafting).num_blocks // pp * pool.kv_cache.block_size
        shortest = contexts.tokens[0]
        batches = [b for b in batches_up_to(pool.batching.max_num_seqs // pp) if b * shortest <= kv_tokens]
        if not batches:
            raise Infeasible(f"{kv_tokens:,} tokens of KV cache do not hold one sequence of {shortest:,}")
        return cls(contexts, tuple(batches), tuple(tuple(b * c <= kv_tokens for c in contexts.tokens) for b in batches))

    def schedule(self, draft: Draft, round_s: RoundCost, max_nodes: int = 0) -> Schedule:
        """Return the best settings in every cell, by the seconds of rounds; see `schedule`."""
        cells = list(zip(self.contexts.tokens, self.contexts.shares, strict=True))
        shares: Array = np.array(
            [
                [share * round_s(b, c, 1, 0, 1) if fits else 0.0 for (c, share), fits in zip(cells, row, strict=True)]
                for b, row in zip(self.batches, self.fits, strict=True)
            ]
        )
        shares /= shares.sum(axis=1, keepdims=True)
        return choose(
            draft.drafting.acceptance.rates,
            round_s,
            self.batches,
            self.contexts.tokens,
            max_length=min(MAX_LENGTH, draft.choice.drafter.most_depth or MAX_LENGTH),
            max_nodes=max_nodes,
            shares=shares,
        )

    def speculation(self, draft: Draft, round_s: RoundCost) -> Speculation | None:
        """Return the best speculation as vLLM offers it: a chain whose length follows the batch; None if drafting pays
        at no batch size."""
        scheme = self.schedule(draft, round_s).by_batch().scheme
        if scheme is None:
            return None
        return draft.speculation(Chain(tokens=scheme.max_tokens) if len(scheme.ranges) == 1 else scheme)


def schedule(
    draft: Draft,
    model: Model,
    hardware: Hardware,
    pool: Pool,
    contexts: DraftContexts,
    max_nodes: int = 0,
) -> Schedule:
    """Return the best settings on an instance of the pool over (batch, context), including trees of up to max_nodes
    tokens.

    Acceptance is that of all requests together. Time without speculation is shared evenly among the batches, and
    within each among the contexts by their tokens, as far as the KV cache holds that many; batches that do not fit at
    any context are left out. Raise Infeasible if the drafter does not work with the pool.
    """
    grid = DraftGrid.of(draft, model, hardware, pool, contexts)
    return grid.schedule(draft, round_costs(draft, model, hardware, pool), max_nodes)
