"""What no allocation of GPUs to instances exceeds, and the numbers that prove it to somebody with no solver.

n_k instances of a kind k (a role, g_k GPUs of one type, a cost c_k) serve at most r_k requests per second each. A
request goes through a mixed instance, or through a prefill and a decode instance; so with weights w of the roles,
w_prefill + w_decode = w_mixed = 1, what is served is at most sum w_k r_k n_k. Hence, for whatever weights, whatever
worth b of a unit of cost and whatever worth x of a request per second, none of them below 0,

    most         rate       <=  sum over types max { sum (w_k r_k - b c_k) n_k } + b budget
    per cost     rate/cost  <=  max w_k r_k / c_k
    least cost   cost       >=  x demand - sum over types max { sum (x w_k r_k - c_k) n_k }

each maximum over whole numbers of instances on the GPUs of a type, sum g_k n_k <= GPUs: a knapsack. Where there must be
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
"""Requests per second within a budget; the same by what they cost; the cost of a demand."""
ROUNDING = 1e-9
"""Relative, by which bounds are widened."""
PLENTY = 1_000_000
"""Nodes, where only what one unit of cost buys is asked."""
NEVER = 1e100
"""What a request costs that nothing serves."""
PAIR: tuple[Role, ...] = ("prefill", "decode")


class Worths(NamedTuple):
    """What proves a bound; which of them an aim asks for, the module says."""

    roles: Mapping[Role, float]
    """w of prefill and decode in any scale, for they are divided by their sum; that of mixed instances is 1."""
    of_cost: float = 0.0
    """b."""
    of_demand: float = 0.0
    """x."""


@dataclass(frozen=True)
class Relaxation:
    """An allocation programme, of which only bounds are asked."""

    fleet: Fleet
    """Its prices are the costs."""
    rates: tuple[InstanceRate, ...]
    aim: Aim
    demand_rps: float = 0.0
    one_of_each: bool = False
    """Whether an allocation has an instance of each role on each type that is among the rates."""

    def bound(self, worths: Worths) -> float:
        """No allocation serves more, or costs less. Infinite in favour of the allocations where nothing follows."""
        nothing = 0.0 if self.aim == "least cost" else math.inf
        weights = self._weights(worths.roles)
        if weights is None or not all(0 <= worth < math.inf for worth in (worths.of_cost, worths.of_demand)):
            return nothing
        # What weighs nothing limits nothing, not even where it serves whatever comes.
        weighed = [(k, weights[k.role] * k.rate_rps if weights[k.role] else 0.0) for k in self.rates]
        bound = self._by_weighed(weighed, worths)
        return nothing if math.isnan(bound) else bound

    def _by_weighed(self, weighed: Sequence[tuple[InstanceRate, float]], worths: Worths) -> float:
        """The inequality of the aim, with what each kind serves times its weight; not a number where one overflows."""
        if self.aim == "per cost":
            return max((rps / self._cost(k) for k, rps in weighed), default=0.0) * (1 + ROUNDING)
        if self.aim == "most":
            budget, b = self.fleet.budget_per_hour, worths.of_cost
            spent = b * budget if b else 0.0
            gain = self._packed((k, rps - b * self._cost(k)) for k, rps in weighed)
            return gain + spent + ROUNDING * (abs(gain) + spent)  # large worths of cost cancel out
        x = worths.of_demand
        saved = self._packed((k, x * rps - self._cost(k)) for k, rps in weighed)
        return max(0.0, x * self.demand_rps - saved - ROUNDING * (x * self.demand_rps + abs(saved)))

    def counts(self, worths: Worths) -> bool:
        """Whether the bound depends on all worths that are not zero: cost counts within a budget, demand where it is to
        be met."""
        of_cost, of_demand = self.aim == "most", self.aim == "least cost"
        return (of_cost or not worths.of_cost) and (of_demand or not worths.of_demand)

    def serves(self) -> float:
        """Requests per second that no allocation exceeds, whatever it costs."""
        whole = replace(self, aim="most", one_of_each=False, fleet=replace(self.fleet, budget_per_hour=math.inf))
        return min(whole.bound(worths) for worths in whole.balanced())

    def solved(self) -> Worths:
        """The dual values of the linear relaxation. Raises Infeasible where the demand is out of reach, and
        SimtuneError where the solver gives none."""
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
        """Worths without a solver: by one role alone, and those at which the kinds that serve most for their cost are
        worth as much for it in either role, which no others beat where there is one kind of each."""
        needs = self._least_cost_of_a_request()
        ways = [[needs[role] for role in way] for way in (("mixed",), PAIR) if needs.keys() >= set(way)]
        x = min(map(sum, ways), default=0.0) if self.aim == "least cost" else 0.0
        yield Worths({role: needs[role] for role in self._pair}, of_demand=x)
        for alone in self._pair:
            yield Worths({role: float(role == alone) for role in self._pair}, of_demand=x)
        if self.aim == "least cost" and self.one_of_each:
            yield Worths(dict.fromkeys(self._pair, 1.0))  # one of each is all that need be

    def best(self, *, solver: bool) -> Worths:
        """The worths that prove most, of those that need no solver and, if it is asked, of one's."""
        known = [*self.balanced()]
        if solver:
            with suppress(SimtuneError):  # what needs no solver is as true
                known.append(self.solved())
        sign = -1 if self.aim == "least cost" else 1
        return min(known, key=lambda worths: sign * self.bound(worths))

    @property
    def _pair(self) -> tuple[Role, ...]:
        """Prefill and decode, where there are such."""
        return PAIR if any(k.role != "mixed" for k in self.rates) else ()

    def _weights(self, roles: Mapping[Role, float]) -> Mapping[Role, float] | None:
        """As they are used; None where there are none to use."""
        if any(not 0 <= weight < math.inf for weight in roles.values()):
            return None
        pair = sum(roles.get(role, 0.0) for role in PAIR)
        if self._pair and not 0 < pair < math.inf:
            return None
        return {"mixed": 1.0, **{role: roles.get(role, 0.0) / (pair or 1.0) for role in PAIR}}

    def _least_cost_of_a_request(self) -> dict[Role, float]:
        """By role, of a request per second."""
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
        """The most that whole instances on the GPUs there are come to, each kind worth so much."""
        of_type: dict[str, dict[int, float]] = {}
        needed: dict[tuple[Role, str], float] = {}
        for kind, each in worth:
            sizes = of_type.setdefault(kind.gpu, {})
            sizes[kind.gpus] = max(sizes.get(kind.gpus, 0.0), each)
            needed[kind.role, kind.gpu] = max(needed.get((kind.role, kind.gpu), -math.inf), each)
        packed = sum(_knapsack(sizes, self._gpus(gpu)) for gpu, sizes in of_type.items())
        return packed + (sum(min(0.0, best) for best in needed.values()) if self.one_of_each else 0.0)

    def _gpus(self, gpu: str) -> int:
        return sum(nodes.nodes * nodes.gpus_per_node for nodes in self.fleet.nodes if nodes.gpu == gpu)


def _knapsack(worth: Mapping[int, float], room: int) -> float:
    """The most that things of these sizes come to, as many of each as there is room for."""
    best = [0.0] * (room + 1)
    things = [(size, each) for size, each in worth.items() if each > 0 and size <= room]
    for used in range(1, room + 1):
        best[used] = max(best[used - 1], *(best[used - size] + each for size, each in things if size <= used), 0.0)
    return best[room]


def nodes_of(gpu: str, gpus: int, per_node: int, price: float) -> list[Nodes]:
    """So many GPUs as whole nodes, and what is left of one."""
    whole, rest = divmod(gpus, per_node)
    nodes = [Nodes(gpu, whole, per_node, price)] if whole else []
    return [*nodes, *([Nodes(gpu, 1, rest, price)] if rest else [])]
