"""What a scheme drafts: the nodes of trees, how many levels and tokens a round takes, how far it is likely to come.

A node is the ranks along its path, from 1; its weight is the product of P[d][r], the probability that the candidate
of rank r at depth d is what the target takes, its parent having been taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import mul
from typing import NamedTuple

from simtune.specs.acceptance import Rates
from simtune.specs.speculation import ByBatch, Chain, Dsi, DynamicTree, Frontier, Pearl, Scheme, StaticTree

Node = tuple[int, ...]
Ranks = Sequence[Sequence[float]]
"""P[d][r], depths and ranks from 0."""


def weight(node: Node, ranks: Ranks) -> float:
    """The probability that the target takes this node."""
    product = 1.0
    for depth, rank in enumerate(node):
        product *= ranks[depth][rank - 1]
    return product


def depth_of(nodes: Sequence[Node]) -> int:
    return max((len(node) for node in nodes), default=0)


def width_of(nodes: Sequence[Node]) -> int:
    """Nodes of the widest level: how many tokens of one sequence a drafting step works on."""
    return max((sum(len(node) == d for node in nodes) for d in range(1, depth_of(nodes) + 1)), default=0)


def at_least(nodes: Sequence[Node], ranks: Ranks) -> tuple[float, ...]:
    """P(at least d draft tokens are kept), d = 1 ... depth: the weights of the nodes at each depth added up."""
    sums = [0.0] * depth_of(nodes)
    for node in nodes:
        sums[len(node) - 1] += weight(node, ranks)
    return tuple(sums)


def dynamic(ranks: Ranks, steps: int, topk: int, tokens: int) -> list[Node]:
    """The tree EAGLE-2 (arXiv 2406.16858) would verify if confidence were the weight by depth and rank alone.

    Each step expands the topk heaviest nodes of the last level by topk children each; of all nodes the `tokens`
    heaviest are kept. Real confidences know the context and choose better: this is a lower bound on its value.
    """
    level: list[Node] = [()]
    drafted: list[tuple[float, Node]] = []
    for depth in range(min(steps, len(ranks))):
        children = [
            (-weight(node, ranks) * p, (*node, rank))
            for node in level
            for rank, p in enumerate(islice(ranks[depth], topk), start=1)
        ]
        drafted += children
        level = [node for _, node in heapq.nsmallest(topk, children)]
    return [node for _, node in heapq.nsmallest(tokens, drafted)]


class Shape(NamedTuple):
    """What one sequence drafts and verifies in a round, at most."""

    levels: int
    """Drafts in turn."""
    width: int
    """Tokens of the widest level."""
    drafts: int
    """Draft tokens that the target computes, besides the one that is certain."""
    tree: bool
    replicas: int = 0
    """Of a target that verifies what was drafted before while the drafter goes on; 0 where one waits for the other."""
    frontier: Frontier | None = None
    """Where a chain is verified in chunks."""

    @property
    def overlapped(self) -> bool:
        """Drafted while the target verifies what was drafted before, on devices of the drafter's own."""
        return self.replicas > 0


def shape_of(scheme: Scheme) -> Shape:
    if isinstance(scheme, StaticTree):
        return Shape(depth_of(scheme.nodes), width_of(scheme.nodes), len(scheme.nodes), True)
    if isinstance(scheme, DynamicTree):
        return Shape(scheme.steps, scheme.topk, scheme.tokens, True)
    if isinstance(scheme, Pearl | Dsi):
        # The last draft of a window need not be computed to be verified: that it is right shows before it.
        return Shape(scheme.tokens, 1, scheme.tokens - 1, False, replicas=scheme.replicas)
    if isinstance(scheme, Frontier):
        return Shape(scheme.tokens, 1, scheme.tokens, False, frontier=scheme)
    longest = scheme.tokens if isinstance(scheme, Chain) else scheme.max_tokens
    if isinstance(scheme, ByBatch):
        longest = min(longest, max(r.tokens for r in scheme.ranges))
    return Shape(longest, 1, longest, False)


def survival(scheme: Scheme, rates: Rates) -> tuple[float, ...]:
    """P(at least d draft tokens are kept), d = 1 ... levels, of a round that drafts all a scheme may draft.

    Raises ValueError where the rates do not reach as far as the drafts.
    """
    shape = shape_of(scheme)
    if rates.longest is not None and rates.longest < shape.levels:
        raise ValueError(f"drafts are {shape.levels} tokens deep, and the rates are known for {rates.longest}")
    if not shape.tree:
        return tuple(accumulate(rates.chain(shape.levels), mul))
    ranks = rates.ranks(shape.levels)
    if isinstance(scheme, DynamicTree):
        nodes: Sequence[Node] = dynamic(ranks, scheme.steps, scheme.topk, scheme.tokens)
    else:
        assert isinstance(scheme, StaticTree)
        nodes = scheme.nodes
    for node in nodes:
        for depth, rank in enumerate(node):
            if rank > len(ranks[depth]):
                raise ValueError(
                    f"node {list(node)} of the tree has rank {rank} at depth {depth + 1}, where the rates know "
                    f"{len(ranks[depth])}"
                )
    return at_least(nodes, ranks)
