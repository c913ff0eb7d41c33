"""Trees for a size, a budget or a hardware: what greedy choices and the dynamic programme lead to."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.specs.trees import Node, Ranks, at_least, depth_of, weight
from simtune.tuner.drafting.tree import best_trees, expected_accepted, greedy


def accepted_pmf(nodes: Sequence[Node], ranks: Ranks) -> Array:
    """P(exactly d draft tokens are kept), d = 0 ... depth of the tree."""
    alive = np.array([1.0, *at_least(nodes, ranks), 0.0])
    pmf: Array = alive[:-1] - alive[1:]
    return pmf


def smoothed(ranks: Ranks) -> list[list[float]]:
    """The nearest probabilities that fall with the rank (isotonic regression, by pooling neighbours).

    Each depth keeps its sum.
    """
    result = []
    for row in ranks:
        pools: list[tuple[float, int]] = []
        for value in row:
            total, size = value, 1
            while pools and pools[-1][0] * size < total * pools[-1][1]:
                before, number = pools.pop()
                total, size = total + before, size + number
            pools.append((total, size))
        result.append([total / size for total, size in pools for _ in range(size)])
    return result


def greedy_within(ranks: Ranks, num_nodes: int, widths: Sequence[int]) -> list[Node]:
    """`greedy` where `widths` limits the nodes of each depth.

    The subtrees below a depth are scaled copies, and no case is known where this is not
    optimal then, but where weights depend on more than depth and rank it is not (`examples.programs.drafts`).
    """
    room = list(widths)
    chosen: list[Node] = []
    frontier: list[tuple[float, Node]] = []

    def offer(node: Node, above: float) -> None:
        """`above` is the weight of the parent."""
        if len(node) <= len(ranks) and node[-1] <= len(ranks[len(node) - 1]):
            heapq.heappush(frontier, (-above * ranks[len(node) - 1][node[-1] - 1], node))

    above: dict[Node, float] = {(): 1.0}
    offer((1,), 1.0)
    while frontier and len(chosen) < num_nodes:
        negative, node = heapq.heappop(frontier)
        if room[len(node) - 1] == 0:
            continue
        room[len(node) - 1] -= 1
        chosen.append(node)
        above[node] = -negative
        offer((*node, 1), -negative)
        offer((*node[:-1], node[-1] + 1), above[node[:-1]])
    return chosen


class Sized(NamedTuple):
    """A tree with what a round of it takes and yields."""

    nodes: list[Node]
    generated: float
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.generated


def hardware_aware(ranks: Ranks, draft_s: float, verify_s: Mapping[int, float]) -> Sized:
    """The tree with the least time per token where each level takes draft_s to draft and a verification of n
    tokens, the root included, verify_s[n] (Sequoia, arXiv 2402.12374).

    All measured sizes and depths are tried.
    """
    best: Sized | None = None
    for depth in range(len(ranks) + 1):
        trees = best_trees(ranks[:depth], max(verify_s) - 1)
        for size, seconds in verify_s.items():
            if size > len(trees) or depth_of(trees[size - 1]) < depth:
                continue
            nodes = trees[size - 1]
            tree = Sized(nodes, 1 + expected_accepted(nodes, ranks), depth * draft_s + seconds)
            if best is None or tree.seconds_per_token < best.seconds_per_token * (1 - 1e-12):
                best = tree
    assert best is not None, "verify_s must tell the time of one token"
    return best


def share_budget(
    requests: Sequence[Ranks], num_nodes: int, minima: Sequence[float] | None = None
) -> list[list[Node]] | None:
    """The best trees for all requests of a batch under one budget of draft tokens (TETRIS, arXiv 2502.15197, for
    chains; AdaServe, arXiv 2501.12162).

    Each request has a greedy order of its own, and its gains fall along it: merging the orders is exact, for
    falling ranks. `minima` are expected accepted tokens promised to each request; they are served first, by the
    shortest prefix that is enough. None if the budget cannot keep the promises.
    """
    orders = [greedy(ranks, num_nodes) for ranks in requests]
    gains = [[weight(node, ranks) for node in order] for ranks, order in zip(requests, orders, strict=True)]
    taken = [0] * len(requests)
    for i, least in enumerate(minima or ()):
        sums = [0.0, *accumulate(gains[i])]
        enough = next((n for n, total in enumerate(sums) if total >= least - 1e-12), None)
        if enough is None:
            return None
        taken[i] = enough
    left = num_nodes - sum(taken)
    if left < 0:
        return None
    further = heapq.merge(*([(-g, i) for g in gains[i][taken[i] :]] for i in range(len(requests))))
    for _, i in islice(further, left):
        taken[i] += 1
    return [order[:n] for order, n in zip(orders, taken, strict=True)]


class Throughput(NamedTuple):
    tokens_per_s: float
    depth: int
    num_nodes: int


def best_throughput(requests: Sequence[Ranks], draft_s: float, verify_s: Sequence[float]) -> Throughput:
    """Depth and number of draft tokens with the most tokens per second of the whole batch.

        (B + sum of the weights) / (depth x draft_s + verify_s[B + N])

    For a depth and a number the time is fixed, so the heaviest nodes are best: every depth is sorted once and all
    numbers are swept. `verify_s[m]` is the time for m tokens; N goes as far as it tells.
    """
    batch = len(requests)
    best = Throughput(batch / verify_s[batch], 0, 0)
    most = len(verify_s) - 1 - batch
    for depth in range(1, max(map(len, requests)) + 1):
        heaviest = heapq.merge(
            *([-weight(n, ranks) for n in greedy(ranks[:depth], most)] for ranks in requests)
        )  # each order falls already
        for number, total in enumerate(accumulate(-w for w in islice(heaviest, most)), start=1):
            rate = (batch + total) / (depth * draft_s + verify_s[batch + number])
            if rate > best.tokens_per_s * (1 + 1e-12):
                best = Throughput(rate, depth, number)
    return best
