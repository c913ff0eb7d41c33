"""Trees of drafts: the tokens that a tree yields, and the best tree of a given size, exactly.

A node is the ranks along its path, from 1; its weight is the product of P[d][r], the probability that the
candidate of rank r at depth d is what the target takes, its parent having been taken. The candidates of a node
exclude one another, so

    E[accepted] = sum of the weights of the nodes,    E[generated] = 1 + E[accepted]

If P falls with the rank, no node outweighs its parent or the sibling before it: the N heaviest nodes are a tree, and
taking them one by one is optimal for every N and every depth. Otherwise `best_trees` is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array
from simtune.specs.trees import Node, Ranks, weight


def expected_accepted(nodes: Sequence[Node], ranks: Ranks) -> float:
    """Return the mean draft tokens kept: the sum of the weights of the nodes."""
    return sum(weight(node, ranks) for node in nodes)


def falling(ranks: Ranks) -> bool:
    """True if no rank is likelier than the one before it: the condition for greedy choices to be exact."""
    return all(a >= b for row in ranks for a, b in pairwise(row))


def greedy(ranks: Ranks, num_nodes: int) -> list[Node]:
    """Return up to num_nodes nodes, the heaviest first: every prefix is the best tree of its size if `falling(ranks)`.

    The frontier is a heap: taking a node adds its first child and its next sibling, O(N log N).
    """
    chosen: list[Node] = []
    frontier: list[tuple[float, Node]] = []

    def offer(node: Node, above: float) -> None:
        """Add a node to the frontier; `above` is the weight of its parent."""
        if len(node) <= len(ranks) and node[-1] <= len(ranks[len(node) - 1]):
            heapq.heappush(frontier, (-above * ranks[len(node) - 1][node[-1] - 1], node))

    above: dict[Node, float] = {(): 1.0}
    offer((1,), 1.0)
    while frontier and len(chosen) < num_nodes:
        negative, node = heapq.heappop(frontier)
        chosen.append(node)
        above[node] = -negative
        offer((*node, 1), -negative)
        offer((*node[:-1], node[-1] + 1), above[node[:-1]])
    return chosen


def best_trees(ranks: Ranks, num_nodes: int) -> list[list[Node]]:
    """Return the best tree with exactly n nodes for n = 0 ... num_nodes, whatever the order of the ranks.

    The dynamic programme of Sequoia (arXiv 2402.12374), by depth: with F_d(n) the best value of a subtree of n
    nodes whose root is at depth d, F_d(n) = 1 + max of sum over children j, in rank order, of P[d][j] F_(d+1)(n_j).
    Sizes that the depth and the ranks cannot fill are left out at the end. O(depth x ranks x N^2).
    """
    value = np.full(num_nodes + 2, -np.inf)
    value[1] = 1.0
    shares: list[list[NDArray[np.int64]]] = []
    for row in reversed(ranks):
        value, chosen = _with_children(value, row)
        shares.append(chosen)
    shares.reverse()
    return [_spelled(shares, n + 1, 0, ()) for n in range(num_nodes + 1) if np.isfinite(value[n + 1])]


def _with_children(below: Array, row: Sequence[float]) -> tuple[Array, list[NDArray[np.int64]]]:
    """Return the value by size of a subtree whose children have values `below`, and the nodes of child j by the nodes
    that remain for j and the children after it."""
    size = len(below)
    later = np.full(size, -np.inf)
    later[0] = 0.0
    chosen = []
    for p in reversed(row):
        # Child j takes y >= 1 nodes and leaves m - y to those after it; or it and all after it are left out.
        best, sizes = np.full(size, -np.inf), np.zeros(size, dtype=np.int64)
        best[0] = 0.0
        for y in range(1, size):
            if not np.isfinite(below[y]):
                continue
            with_y = p * below[y] + later[: size - y]
            better = with_y > best[y:]
            best[y:][better], sizes[y:][better] = with_y[better], y
        later = best
        chosen.append(sizes)
    value = np.full(size, -np.inf)
    value[1:] = 1.0 + later[:-1]
    return value, chosen[::-1]


def _spelled(shares: Sequence[Sequence[NDArray[np.int64]]], size: int, depth: int, root: Node) -> list[Node]:
    """Return the nodes below `root` in the best subtree of `size` nodes, including root."""
    nodes: list[Node] = []
    available = size - 1
    if depth < len(shares):
        for rank, sizes in enumerate(shares[depth], start=1):
            if available == 0:
                break
            child, nodes_of_child = (*root, rank), int(sizes[available])
            nodes += [child, *_spelled(shares, nodes_of_child, depth + 1, child)]
            available -= nodes_of_child
    return nodes
