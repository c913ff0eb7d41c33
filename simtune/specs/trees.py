"""Trees of drafts: their nodes, their size, and how far a round is likely to come.

A node is the ranks along its path, from 1; its weight is the product of P[d][r], the probability that the candidate
of rank r at depth d is what the target takes, its parent having been taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice

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
    """Length of the longest path."""
    return max((len(node) for node in nodes), default=0)


def width_of(nodes: Sequence[Node]) -> int:
    """Nodes of the widest depth: how many tokens of one sequence a drafting step works on."""
    return max((sum(len(node) == d for node in nodes) for d in range(1, depth_of(nodes) + 1)), default=0)


def at_least(nodes: Sequence[Node], ranks: Ranks) -> tuple[float, ...]:
    """P(at least d draft tokens are kept), d = 1 ... depth: the weights of the nodes at each depth added up."""
    sums = [0.0] * depth_of(nodes)
    for node in nodes:
        sums[len(node) - 1] += weight(node, ranks)
    return tuple(sums)


def dynamic(ranks: Ranks, steps: int, topk: int, tokens: int) -> list[Node]:
    """The tree EAGLE-2 (arXiv 2406.16858) would verify if confidence were the weight by depth and rank alone.

    Each step expands the topk heaviest of the deepest nodes by topk children each; of all nodes the `tokens`
    heaviest are kept. Real confidences know the context and choose better: this is a lower bound on its value.
    """
    deepest: list[Node] = [()]
    drafted: list[tuple[float, Node]] = []
    for depth in range(min(steps, len(ranks))):
        children = [
            (-weight(node, ranks) * p, (*node, rank))
            for node in deepest
            for rank, p in enumerate(islice(ranks[depth], topk), start=1)
        ]
        drafted += children
        deepest = [node for _, node in heapq.nsmallest(topk, children)]
    return [node for _, node in heapq.nsmallest(tokens, drafted)]
