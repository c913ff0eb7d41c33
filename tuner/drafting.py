"""How the drafters of a study are best used: on each cut of the GPUs, by what they cost there and by the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simtune.arrays import Array
from simtune.costs.drafting import RoundCosts
from simtune.errors import Infeasible
from simtune.sim.feasibility import check
from simtune.sim.requests import RequestStream
from simtune.sim.speculation import Drafting
from simtune.specs.acceptance import Rates
from simtune.specs.drafts import Node, depth_of, weight
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Pool
from simtune.specs.speculation import (
    ByBatch,
    Chain,
    Dsi,
    DynamicTree,
    Frontier,
    Medusa,
    Pearl,
    Scheme,
    Speculation,
    StaticTree,
    Threshold,
    TokenBudget,
)
from simtune.specs.study import DrafterChoice
from simtune.tuner.speculation import Schedule, choose
from simtune.tuner.speculation.chain import expected_tokens

MAX_LENGTH = 8
"""Levels of the longest draft that is tried."""

RARE = 0.005


@dataclass(frozen=True)
class Draft:
    """A drafter of a study with what it names loaded."""

    choice: DrafterChoice
    drafting: Drafting

    def speculation(self, scheme: Scheme) -> Speculation:
        return Speculation(drafter=self.choice.drafter, scheme=scheme, acceptance=self.choice.acceptance)


@dataclass(frozen=True)
class Contexts:
    """Powers of two around the contexts at which tokens are decoded, and the share of the tokens nearest to each.

    Those of fewer than RARE of the tokens are left out.
    """

    tokens: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, stream: RequestStream) -> Contexts:
        """Of a load; each request counts at the middle of its answer, with all of its tokens."""
        levels = np.rint(np.log2(stream.prompt_tokens + stream.output_tokens / 2)).astype(int)
        weights = np.bincount(levels, stream.output_tokens)
        kept = np.flatnonzero(weights >= RARE * weights.sum())
        return cls(tuple((2**kept).tolist()), tuple((weights[kept] / weights[kept].sum()).tolist()))

    @classmethod
    def even(cls, tokens: Sequence[int]) -> Contexts:
        return cls(tuple(tokens), (1 / len(tokens),) * len(tokens))


def batches_up_to(most: int) -> tuple[int, ...]:
    """Powers of two, and the largest batch itself."""
    return (*(2**i for i in range((most - 1).bit_length())), most)


def schedule(
    draft: Draft, model: Model, hardware: Hardware, pool: Pool, contexts: Contexts, max_nodes: int = 0
) -> Schedule:
    """The best settings on an instance of the pool over (batch, context), trees of up to max_nodes tokens among them.

    Acceptance is that of all requests together. Time without speculation is shared evenly among the batches, and
    within each among the contexts by their tokens, as far as the KV cache holds that many; batches that do not fit at
    any context are left out. Raises Infeasible where the drafter does not go with the pool.
    """
    drafter, pp = draft.choice.drafter, pool.parallelism.pp
    smallest = pool.model_copy(update={"speculation": draft.speculation(Chain(tokens=1))})
    kv_tokens = check(smallest, model, hardware, draft.drafting).num_blocks // pp * pool.kv_cache.block_size
    costs = RoundCosts(model, hardware, pool, drafter, draft.drafting.model)
    shortest = contexts.tokens[0]
    batches = [b for b in batches_up_to(pool.batching.max_num_seqs // pp) if b * shortest <= kv_tokens]
    if not batches:
        raise Infeasible(f"{kv_tokens:,} tokens of KV cache do not hold one sequence of {shortest:,}")
    cells = list(zip(contexts.tokens, contexts.shares, strict=True))
    shares: Array = np.array(
        [[share * costs(b, c, 1) if b * c <= kv_tokens else 0.0 for c, share in cells] for b in batches]
    )
    shares /= shares.sum(axis=1, keepdims=True)
    longest = min(MAX_LENGTH, drafter.heads) if isinstance(drafter, Medusa) else MAX_LENGTH
    return choose(
        draft.drafting.acceptance.rates,
        costs,
        batches,
        contexts.tokens,
        max_length=longest,
        max_nodes=max_nodes,
        shares=shares,
    )


def speculation_on(
    draft: Draft, model: Model, hardware: Hardware, pool: Pool, stream: RequestStream
) -> Speculation | None:
    """How the instances of a pool best draft for a load, as vLLM can be told it: the study's own scheme where it has
    one, else a chain whose length follows the batch. None where drafting pays at no batch size.

    Raises Infeasible where the drafter does not go with the pool.
    """
    if draft.choice.scheme is not None:
        return draft.speculation(draft.choice.scheme)
    scheme = schedule(draft, model, hardware, pool, Contexts.of(stream)).by_batch().scheme
    if not isinstance(scheme, ByBatch):
        return None
    return draft.speculation(Chain(tokens=scheme.max_tokens) if len(scheme.ranges) == 1 else scheme)


def in_words(scheme: Scheme | None) -> str:
    """A scheme in a cell of a table."""
    if scheme is None:
        return "none"
    if isinstance(scheme, Chain):
        return f"chain of {scheme.tokens}"
    if isinstance(scheme, ByBatch):
        parts = [f"{min(r.tokens, scheme.max_tokens)} to batch {r.last}" for r in scheme.ranges]
        return "chain of " + ", ".join(parts)
    if isinstance(scheme, Threshold):
        return f"chain of {scheme.max_tokens} at most, stopped at {scheme.stop_at:g}"
    if isinstance(scheme, Pearl):
        return f"chain of {scheme.tokens} beside every step (PEARL)"
    if isinstance(scheme, Dsi):
        return f"chain of {scheme.tokens} in every tick of {scheme.replicas} replicas (DSI)"
    if isinstance(scheme, Frontier):
        return f"chain of {scheme.tokens} in {scheme.chunks} chunks"
    if isinstance(scheme, StaticTree):
        return f"tree of {len(scheme.nodes)}, {max(map(len, scheme.nodes))} deep"
    if isinstance(scheme, DynamicTree):
        if scheme.topk == 1:
            return f"chain of {scheme.tokens}"
        return f"EAGLE-2 tree of {scheme.tokens}: {scheme.steps} steps, topk {scheme.topk}"
    return f"{scheme.tokens} tokens for the batch, {scheme.max_tokens} for each at most"


def in_short(scheme: Scheme | None) -> str:
    """A scheme in a cell of a map: draft tokens, with a T before those of a tree."""
    if scheme is None:
        return "off"
    if isinstance(scheme, StaticTree):
        return f"T{len(scheme.nodes)}"
    if isinstance(scheme, DynamicTree) and scheme.topk > 1:
        return f"T{scheme.tokens}"
    return f"≤{scheme.max_tokens}" if isinstance(scheme, Threshold | TokenBudget | ByBatch) else str(scheme.tokens)


def described(draft: Draft, found: Schedule) -> dict[str, Any]:
    """Plain data of a schedule: the best setting of every cell, gains, what each batch size gets of a chain, and the
    draft of the cell that gains most.
    """
    cells = [[found.best(b, c) for c in found.contexts] for b in found.batches]
    fixed, fixed_gain = found.fixed()
    gains = np.where(found.shares > 0, found.gains(), 0)
    row, column = np.unravel_index(int(gains.argmax()), gains.shape)
    return {
        "drafter": draft.choice.label,
        "acceptance": {"name": draft.drafting.acceptance.name, "origin": draft.drafting.acceptance.origin},
        "batches": list(found.batches),
        "contexts": list(found.contexts),
        "cells": [
            [
                {
                    "scheme": in_words(s.scheme),
                    "short": in_short(s.scheme),
                    "off": s.scheme is None,
                    "gain": gain,
                    "occurs": share > 0,
                }
                for (s, gain), share in zip(row, shares, strict=True)
            ]
            for row, shares in zip(cells, found.shares.tolist(), strict=True)
        ],
        "chain_lengths": found.chain_lengths().tolist(),
        "gain": found.gain,
        "fixed": {"scheme": in_words(fixed.scheme), "gain": fixed_gain},
        "by_batch": _by_batch(draft, found),
        "draft": {
            "batch": found.batches[row],
            "context": found.contexts[column],
            "nodes": _nodes(cells[row][column][0].scheme, draft.drafting.acceptance.rates),
        },
    }


def _by_batch(draft: Draft, found: Schedule) -> list[dict[str, Any]]:
    """Of each batch size, what a round of the chain that vLLM would be told yields and wastes, per sequence."""
    scheme = found.by_batch().scheme
    rows = []
    for batch in found.batches:
        length = scheme.tokens_for(batch) if isinstance(scheme, ByBatch) else 0
        tokens = expected_tokens(draft.drafting.acceptance.rates.chain(length))
        rows.append({"batch": batch, "draft_tokens": length, "tokens": tokens, "wasted": length + 1 - tokens})
    return rows


def _nodes(scheme: Scheme | None, rates: Rates) -> list[dict[str, Any]]:
    """The drafted tokens, each by the ranks along its path, with the probability that the target takes it."""
    if isinstance(scheme, StaticTree):
        nodes: Sequence[Node] = scheme.nodes
    elif isinstance(scheme, Chain):
        nodes = [(1,) * depth for depth in range(1, scheme.tokens + 1)]
    elif isinstance(scheme, Threshold):
        nodes = [(1,) * depth for depth in range(1, scheme.max_tokens + 1)]
    else:
        return []
    ranks = rates.ranks(depth_of(nodes))
    return [{"path": list(node), "probability": weight(node, ranks)} for node in sorted(nodes)]
