"""Choice of GPU types to rent for a load: slices of it, each served by one type (Mélange, arXiv 2404.14527).

min sum price_t n_t    over    sum_t x_{s,t} = 1,    sum_s load_{s,t} x_{s,t} <= n_t,    x binary, n whole
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from simtune.errors import Infeasible
from simtune.tuner.space.allocation import TIME_LIMIT_S
from simtune.tuner.space.integer_programs import TOLERANCE, Unsolvable, add_variable, solve

if TYPE_CHECKING:
    import pulp


class Slices(NamedTuple):
    """GPUs to rent for a load: `types` is the type of each slice, `gpus` the number of GPUs of each type."""

    price: float
    lp_bound: float
    """Price below which no choice is possible."""
    gpus: tuple[int, ...]
    types: tuple[int, ...]
    proven: bool


def cheapest_types(
    load: Sequence[Sequence[float]],
    price: Sequence[float],
    *,
    available: Sequence[int] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Slices:
    """Return the cheapest mixture of GPU types.

    `load[slice][type]` is the share of a GPU that a slice of the load takes, infinite if the type cannot serve it
    within the SLO. Raise Infeasible if a slice has no type, or if not enough GPUs are `available`.
    """
    import pulp

    for s, row in enumerate(load):
        if not any(map(math.isfinite, row)):
            raise Infeasible(f"slice {s} of the load can be served by no type of GPU within the SLO")
    problem, gpus, on = _programme(load, price, available)
    try:
        solve(problem, whole=False, time_limit_s=time_limit_s)
        bound = float(pulp.value(problem.objective)) * (1 - TOLERANCE)
        proven = solve(problem, time_limit_s=time_limit_s)
    except Unsolvable:
        raise Infeasible(f"the load takes more GPUs than are available ({available})") from None
    num_rented = tuple(round(count.value() or 0.0) for count in gpus)
    types = tuple(next(t for t, x in choices.items() if x.value() > 0.5) for choices in on)
    return Slices(sum(p * n for p, n in zip(price, num_rented, strict=True)), bound, num_rented, types, proven)


def _programme(
    load: Sequence[Sequence[float]], price: Sequence[float], available: Sequence[int] | None
) -> tuple[pulp.LpProblem, list[Any], list[dict[int, Any]]]:
    """Return the problem, the GPUs of each type, and the 0-1 variables of each slice by the types that can serve it."""
    import pulp

    problem = pulp.LpProblem("slices", pulp.LpMinimize)
    most: Sequence[int | None] = available or [None] * len(price)
    gpus = [add_variable(problem, f"gpus{t}", 0, most[t], whole=True) for t in range(len(price))]
    problem += pulp.lpDot(price, gpus)
    on = [
        {t: add_variable(problem, f"x{s}_{t}", binary=True) for t, share in enumerate(row) if math.isfinite(share)}
        for s, row in enumerate(load)
    ]
    for choices in on:
        problem += pulp.lpSum(choices.values()) == 1
    for t, count in enumerate(gpus):
        problem += pulp.lpSum(row[t] * x[t] for row, x in zip(load, on, strict=True) if t in x) <= count
    return problem, gpus, on
