"""The best trees of a batch as an integer programme, for what greedy choices do not solve exactly.

Those are widths per depth where weights depend on more than depth and rank, draft tokens that cost more in one
request than in another, and minima beside either. For the rest the greedy orders of
`simtune.tuner.drafting.tree` are exact and a thousand times faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from simtune.errors import Infeasible
from simtune.specs.trees import Node, Ranks, weight

Weights = Mapping[Node, float]
"""The candidate nodes of one request, with their weights."""


def every_node(ranks: Ranks) -> dict[Node, float]:
    """All nodes down to the depth of `ranks`: few hundreds at depth 4 with 4 ranks."""
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
    """Trees with the largest sum of weights: every node with its parent and the siblings before it.

    Siblings are tried in rank order, and under sampling the chance of a later one counts on that; greedy decoding
    may skip some (`in_rank_order=False`). `costs` is what a node of each request takes of the budget, 1 unless
    given; `widths` the most nodes of one request at each depth; `minima` the least sum of weights of each request.
    Proved optimal by CBC, which comes with pulp. Raises Infeasible where no choice keeps to the limits.
    """
    import pulp
    from pulp.apis.coin_api import pulp_cbc_path

    problem = pulp.LpProblem("trees", pulp.LpMaximize)
    take = {
        (i, node): problem.add_variable(f"x_{i}_{'_'.join(map(str, node))}", cat=pulp.LpBinary)
        for i, weights in enumerate(requests)
        for node in weights
    }
    problem += pulp.lpSum(requests[i][node] * x for (i, node), x in take.items())
    for (i, node), x in take.items():
        if len(node) > 1:
            problem += x <= take[i, node[:-1]]
        if in_rank_order and node[-1] > 1:
            problem += x <= take[i, (*node[:-1], node[-1] - 1)]
    problem += pulp.lpSum((costs[i] if costs else 1) * x for (i, _), x in take.items()) <= budget
    for i, weights in enumerate(requests):
        for depth, width in enumerate(widths or (), start=1):
            problem += pulp.lpSum(take[i, node] for node in weights if len(node) == depth) <= width
        if minima:
            problem += pulp.lpSum(w * take[i, node] for node, w in weights.items()) >= minima[i]
    problem.solve(pulp.COIN_CMD(path=pulp_cbc_path, msg=False, gapRel=0))
    # `status` alone says Optimal at a time limit too.
    if problem.sol_status != pulp.LpSolutionOptimal:
        raise Infeasible(f"no trees of {budget:g} draft tokens keep to the minima and widths asked for")
    return [[node for node in weights if take[i, node].value() > 0.5] for i, weights in enumerate(requests)]
