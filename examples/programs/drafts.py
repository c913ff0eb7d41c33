"""The best trees of a batch that shares one budget of draft tokens, as an integer programme, for problems that greedy
choices do not solve exactly.

These are widths per depth if weights depend on more than depth and rank, draft tokens that cost more in one request
than in another, and minima beside either. For all other problems the greedy orders of `simtune.tuner.drafting.tree` are
exact and a thousand times faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from simtune.errors import Infeasible
from simtune.specs.trees import Node, Ranks, weight
from simtune.tuner.space.integer_programs import Unsolvable, add_variable, solve

if TYPE_CHECKING:
    import pulp

Weights = Mapping[Node, float]
"""Candidate nodes of one request, with their weights."""


def every_node(ranks: Ranks) -> dict[Node, float]:
    """Return all nodes down to the depth of `ranks`: a few hundred at depth 4 with 4 ranks."""
    nodes = [
        node for depth in range(1, len(ranks) + 1) for node in product(*(range(1, len(r) + 1) for r in ranks[:depth]))
    ]
    return {node: weight(node, ranks) for node in nodes}


def select(
    requests: Sequence[Weights],
    budget: float,
    *,
    widths: Sequence[int] | None = None,
    minima: Sequence[float] | None = None,
    costs: Sequence[float] | None = None,
    in_rank_order: bool = True,
) -> list[list[Node]]:
    """Return the trees with the largest sum of weights; a node needs its parent and the siblings before it.

    Siblings are tried in rank order, and under sampling the chance of a later one counts on that; greedy decoding
    may skip some (`in_rank_order=False`). `costs` is what a node of each request takes of the budget, 1 unless
    given; `widths` the most nodes of one request at each depth; `minima` the least sum of weights of each request.
    The solution is proved optimal, however long that takes. Raise Infeasible if no choice satisfies the limits.
    """
    import pulp

    problem, take = _trees(requests, in_rank_order)
    node_costs = costs or [1.0] * len(requests)
    problem += pulp.lpSum(node_costs[i] * x for (i, _), x in take.items()) <= budget
    for i, least in enumerate(minima or ()):
        problem += pulp.lpSum(w * take[i, node] for node, w in requests[i].items()) >= least
    for i, (depth, width) in product(range(len(requests)), enumerate(widths or (), start=1)):
        problem += pulp.lpSum(take[i, node] for node in requests[i] if len(node) == depth) <= width
    try:
        solve(problem)
    except Unsolvable:
        raise Infeasible(
            f"no trees of {budget:g} draft tokens satisfy the minima and widths; raise the budget or the widths, or "
            "lower the minima"
        ) from None
    return [[node for node in weights if take[i, node].value() > 0.5] for i, weights in enumerate(requests)]


def _trees(requests: Sequence[Weights], in_rank_order: bool) -> tuple[pulp.LpProblem, dict[tuple[int, Node], Any]]:
    """Return the programme without a limit, and its variables by request and node: 1 if the node is taken."""
    import pulp

    problem = pulp.LpProblem("trees", pulp.LpMaximize)
    take = {
        (i, node): add_variable(problem, f"x_{i}_{'_'.join(map(str, node))}", binary=True)
        for i, weights in enumerate(requests)
        for node in weights
    }
    problem += pulp.lpSum(requests[i][node] * x for (i, node), x in take.items())
    for above, below in _precedences(take, in_rank_order):
        problem += below <= above
    return problem, take


def _precedences(take: Mapping[tuple[int, Node], Any], in_rank_order: bool) -> Iterator[tuple[Any, Any]]:
    """Yield (node that is taken first, node that may be taken then): parents, and the siblings before."""
    for (i, node), x in take.items():
        if len(node) > 1:
            yield take[i, node[:-1]], x
        if in_rank_order and node[-1] > 1:
            yield take[i, (*node[:-1], node[-1] - 1)], x
