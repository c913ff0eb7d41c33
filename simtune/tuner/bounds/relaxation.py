"""Bounds on every allocation of GPUs to instances, and the numbers that prove them without a solver.

n_k instances of a kind k (a role, g_k GPUs of one type, a cost c_k) serve at most r_k requests per second each. A
request goes through a mixed instance, or through a prefill and a decode instance; so with weights w of the roles,
w_prefill + w_decode = w_mixed = 1, what is served is at most sum w_k r_k n_k. Hence, for whatever weights, whatever
worth b of a unit of cost and whatever worth x of a request per second, none of them below 0,

    most         rate       <=  sum over types max { sum (w_k r_k - b c_k) n_k } + b budget
    per cost     rate/cost  <=  max w_k r_k / c_k
    least cost   cost       >=  x demand - sum over types max { sum (x w_k r_k - c_k) n_k }

each maximum over whole numbers of instances on the GPUs of a type, sum g_k n_k <= GPUs: a knapsack. If there must be
an instance of each role on each type, and all of them are worth less than nothing, the best of them is taken off. That
is the Lagrangian dual of the programme of `simtune.tuner.space.allocation`; the dual values of its linear relaxation
are the best weights and worths, or near them. Others are no less true, so that no solver need be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from simtune.errors import SimtuneError
from simtune.specs.pool import Role
from simtune.tuner.space.allocation import Fleet, InstanceRate, Nodes, shadow_prices

Aim = Literal["most", "per cost", "least cost"]
"""`most`: requests per second within a budget; `per cost`: requests per second over their cost; `least cost`: the cost
of serving a demand."""
ROUNDING = 1e-9
"""Relative amount by which bounds are widened."""
PLENTY = 1_000_000
"""Nodes of each type when the aim is `per cost`: more than one unit of cost can buy."""
NEVER = 1e100
"""Cost of a request per second in a role that no instance serves."""
PAIR: tuple[Role, ...] = ("prefill", "decode")


class Worths(NamedTuple):
    """Worths that prove a bound; the docstring of the module lists which of them each aim needs."""

    roles: Mapping[Role, float]
    """Weights w of prefill and decode, in any scale: they are divided by their sum. The weight of mixed instances is
    1."""
    of_cost: float = 0.0
    """Worth b of a unit of cost."""
    of_demand: float = 0.0
    """Worth x of a request per second of the demand."""


@dataclass(frozen=True)
class Relaxation:
    """An allocation programme that is only bounded, not solved."""

    fleet: Fleet
    """Nodes and their prices; the prices are the costs."""
    rates: tuple[InstanceRate, ...]
    aim: Aim
    demand_rps: float = 0.0
    one_of_each: bool = False
    """True if an allocation has an instance of each role on each type that is among the rates."""

    def bound(self, worths: Worths) -> float:
        """Return a rate that no allocation exceeds, or a cost that none stays below.

        If the worths prove nothing, return the value that rules no allocation out: 0 for costs, infinity for rates.
        """
        nothing = 0.0 if self.aim == "least cost" else math.inf
        weights = self._weights(worths.roles)
        if weights is None or not all(0 <= worth < math.inf for worth in (worths.of_cost, worths.of_demand)):
            return nothing
        # A role of weight 0 limits nothing, even if its rate is infinite (0 x inf would not be a number).
        weighed = [(k, weights[k.role] * k.rate_rps if weights[k.role] else 0.0) for k in self.rates]
        bound = self._by_weighed(weighed, worths)
        return nothing if math.isnan(bound) else bound

    def _by_weighed(self, weighed: Sequence[tuple[InstanceRate, float]], worths: Worths) -> float:
        """Return the bound of the aim, given each kind with its rate times its weight; not a number if a product
        overflows."""
        if self.aim == "per cost":
            return max((rps / self._cost(k) for k, rps in weighed), default=0.0) * (1 + ROUNDING)
        if self.aim == "most":
            budget, b = self.fleet.budget_per_hour, worths.of_cost
            spent = b * budget if b else 0.0
            gain = self._packed((k, rps - b * self._cost(k)) for k, rps in weighed)
            # Widen by both terms: for large worths of cost they cancel out, and their rounding errors remain.
            return gain + spent + ROUNDING * (abs(gain) + spent)
        x = worths.of_demand
        saved = self._packed((k, x * rps - self._cost(k)) for k, rps in weighed)
        return max(0.0, x * self.demand_rps - saved - ROUNDING * (x * self.demand_rps + abs(saved)))

    def counts(self, worths: Worths) -> bool:
        """True if the bound depends on all worths that are not zero: cost counts only within a budget, demand only for
        `least cost`."""
        of_cost, of_demand = self.aim == "most", self.aim == "least cost"
        return (of_cost or not worths.of_cost) and (of_demand or not worths.of_demand)

    def serves(self) -> float:
        """Return the requests per second that no allocation exceeds, at any cost."""
        unbounded = replace(self, aim="most", one_of_each=False, fleet=replace(self.fleet, budget_per_hour=math.inf))
        return min(unbounded.bound(worths) for worths in unbounded.balanced())

    def solved(self) -> Worths:
        """Return the dual values of the linear relaxation.

        Raise Infeasible if the demand is out of reach, and SimtuneError if the solver gives none.
        """
        if self.aim == "per cost":
            nodes = tuple(replace(nodes, nodes=PLENTY) for nodes in self.fleet.nodes)
            dual = shadow_prices(replace(self.fleet, nodes=nodes, budget_per_hour=1.0), self.rates)
        else:
            dual = shadow_prices(
                self.fleet, self.rates, demand_rps=self.demand_rps if self.aim == "least cost" else None
            )
        roles = {role: dual.get(role, 0.0) for role in self._pair}
        return Worths(
            roles,
            of_cost=dual.get("budget", 0.0) if self.aim == "most" else 0.0,
            of_demand=dual.get("demand", 0.0) if self.aim == "least cost" else 0.0,
        )

    def balanced(self) -> Iterator[Worths]:
        """Yield worths that need no solver.

        These are the worths by one role alone, and those at which the kinds with the least cost per request are worth
        as much for their cost in either role; if there is one kind of each role, no other worths prove more.
        """
        needs = self._least_cost_of_a_request()
        ways = [[needs[role] for role in way] for way in (("mixed",), PAIR) if needs.keys() >= set(way)]
        x = min(map(sum, ways), default=0.0) if self.aim == "least cost" else 0.0
        yield Worths({role: needs[role] for role in self._pair}, of_demand=x)
        for alone in self._pair:
            yield Worths({role: float(role == alone) for role in self._pair}, of_demand=x)
        if self.aim == "least cost" and self.one_of_each:
            # One instance of each role may be all that is needed, so that no demand is worth anything.
            yield Worths(dict.fromkeys(self._pair, 1.0))

    def best(self, *, solver: bool) -> Worths:
        """Return the worths that prove the tightest bound: of those without a solver and, if `solver`, those of the
        solver."""
        candidates = [*self.balanced()]
        if solver:
            # The worths that need no solver prove a bound as well.
            with suppress(SimtuneError):
                candidates.append(self.solved())
        sign = -1 if self.aim == "least cost" else 1
        return min(candidates, key=lambda worths: sign * self.bound(worths))

    @property
    def _pair(self) -> tuple[Role, ...]:
        """Return prefill and decode; empty if all instances are mixed."""
        return PAIR if any(k.role != "mixed" for k in self.rates) else ()

    def _weights(self, roles: Mapping[Role, float]) -> Mapping[Role, float] | None:
        """Return the weight of each role, scaled so that prefill and decode add up to 1; None if the worths are no
        valid weights."""
        if any(not 0 <= weight < math.inf for weight in roles.values()):
            return None
        pair = sum(roles.get(role, 0.0) for role in PAIR)
        if self._pair and not 0 < pair < math.inf:
            return None
        return {"mixed": 1.0, **{role: roles.get(role, 0.0) / (pair or 1.0) for role in PAIR}}

    def _least_cost_of_a_request(self) -> dict[Role, float]:
        """Return the least cost of a request per second, by role."""
        needs: dict[Role, float] = dict.fromkeys(self._pair, NEVER)
        for k in self.rates:
            cost = self._cost(k) / k.rate_rps if k.rate_rps > 0 else NEVER
            needs[k.role] = min(needs.get(k.role, NEVER), cost)
        return needs

    def _cost(self, kind: InstanceRate) -> float:
        return kind.gpus * self._prices[kind.gpu]

    @property
    def _prices(self) -> dict[str, float]:
        return {nodes.gpu: nodes.price_per_gpu_hour for nodes in self.fleet.nodes}

    def _packed(self, worth: Iterable[tuple[InstanceRate, float]]) -> float:
        """Return the largest worth of whole instances that fit on the GPUs, given the worth of each kind of
        instance."""
        of_type: dict[str, dict[int, float]] = {}
        best_of_kind: dict[tuple[Role, str], float] = {}
        for kind, value in worth:
            sizes = of_type.setdefault(kind.gpu, {})
            sizes[kind.gpus] = max(sizes.get(kind.gpus, 0.0), value)
            best_of_kind[kind.role, kind.gpu] = max(best_of_kind.get((kind.role, kind.gpu), -math.inf), value)
        packed = sum(_knapsack(sizes, self._gpus(gpu)) for gpu, sizes in of_type.items())
        return packed + (sum(min(0.0, best) for best in best_of_kind.values()) if self.one_of_each else 0.0)

    def _gpus(self, gpu: str) -> int:
        return sum(nodes.nodes * nodes.gpus_per_node for nodes in self.fleet.nodes if nodes.gpu == gpu)


def _knapsack(worth: Mapping[int, float], room: int) -> float:
    """Return the largest worth of items of these sizes in `room`, each item used any number of times."""
    best = [0.0] * (room + 1)
    things = [(size, value) for size, value in worth.items() if value > 0 and size <= room]
    for filled in range(1, room + 1):
        best[filled] = max(
            best[filled - 1], *(best[filled - size] + value for size, value in things if size <= filled), 0.0
        )
    return best[room]


def nodes_of(gpu: str, gpus: int, per_node: int, price: float) -> list[Nodes]:
    """Return a number of GPUs as whole nodes, and the remaining GPUs as a node that is partly filled."""
    full_nodes, remaining_gpus = divmod(gpus, per_node)
    nodes = [Nodes(gpu, full_nodes, per_node, price)] if full_nodes else []
    return [*nodes, *([Nodes(gpu, 1, remaining_gpus, price)] if remaining_gpus else [])]
