"""What a study may ask for: one small class each, that says what a plan is worth and what it could be worth at best."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from simtune.specs.study import StudyLimits
from simtune.tuner.bounds.relaxation import Aim
from simtune.tuner.doubt.draw_spread import allowance


@dataclass(frozen=True)
class PlanFacts:
    """What is known of a plan before it is simulated."""

    num_gpus: int
    usd_per_hour: float | None
    """None where a hardware profile names no price; nothing that asks for it is judged then."""
    output_tokens: float
    """Mean of the requests."""
    idle_j_per_token: float | None = None
    """What its GPUs would draw from the first arrival to the last if nothing ran, at one request per second; None where
    a hardware profile names no power."""


@dataclass(frozen=True)
class Judged:
    """What a simulation of a plan showed."""

    rate_rps: float | None
    """At which it met the SLO; None for a closed loop without one."""
    output_tokens_per_s: float | None
    e2el_s: float | None
    """Mean."""
    tokens_per_s_per_user: float | None = None
    joules_per_token: float | None = None


class Miss(NamedTuple):
    """A simulation in which a plan missed the SLO."""

    rate_rps: float
    requests: int
    """That were simulated."""


class Objective(ABC):
    """Values as users read them, in `unit`; `sign` says whether more (1) or less (-1) is better."""

    name: ClassVar[str]
    unit: ClassVar[str]
    sign: ClassVar[int] = 1
    searches_rate: ClassVar[bool] = False
    """Whether the highest rate that meets the SLO is looked for; else the load is the workload's."""
    needs_slo: ClassVar[bool] = False
    needs_prices: ClassVar[bool] = False
    needs_power: ClassVar[bool] = False
    aim: ClassVar[Aim | None] = None
    """What it asks of an allocation of GPUs to instances (`simtune.tuner.bounds.relaxation`); None where rates and
    costs of instances do not say."""

    @abstractmethod
    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Of a plan that met its SLO."""

    @abstractmethod
    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """No worse than anything the plan can reach: it serves at most so many requests per second, and its mean
        end-to-end latency is at least so long."""

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """The objective where `aim` comes to so much; so many output tokens are offered in a second."""
        return amount

    def better(self, a: float, b: float, tolerance: float = 0.0) -> bool:
        """Whether one value is better than another by more than a relative tolerance."""
        return a > b * (1 + tolerance) if self.sign > 0 else a * (1 + tolerance) < b


class RateObjective(Objective):
    """The highest request rate within the SLO, times what a request per second is worth on the plan."""

    searches_rate = needs_slo = True

    @abstractmethod
    def worth(self, plan: PlanFacts) -> float:
        """Of one request per second."""

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Of a plan that met its SLO at a rate."""
        assert judged.rate_rps is not None
        return judged.rate_rps * self.worth(plan)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """At the highest rate it could serve."""
        return rate_bound_rps * self.worth(plan)

    def reaches(self, plan: PlanFacts, missed: Miss, capacity_rps: float) -> float:
        """At most, where a plan missed the SLO on a draw: of rates that draws may tell apart the highest, and no more
        than its capacity."""
        return min(missed.rate_rps * allowance(missed.requests), capacity_rps) * self.worth(plan)

    def rate_for(self, plan: PlanFacts, value: float) -> float:
        """The request rate at which a plan has that value."""
        return value / self.worth(plan)


class Goodput(RateObjective):
    """Requests per second."""

    name, unit, aim = "goodput", "requests/s", "most"

    def worth(self, plan: PlanFacts) -> float:
        """One."""
        return 1.0


class GoodputPerGpu(RateObjective):
    """Requests per second and GPU."""

    name, unit, aim = "goodput_per_gpu", "requests/s/GPU", "per cost"

    def worth(self, plan: PlanFacts) -> float:
        """Shared by all GPUs."""
        return 1 / plan.num_gpus


class GoodputPerDollar(RateObjective):
    """Requests per dollar of the hardware's price."""

    name, unit, needs_prices, aim = "goodput_per_dollar", "requests/USD", True, "per cost"

    def worth(self, plan: PlanFacts) -> float:
        """Requests of an hour over the price of an hour."""
        assert plan.usd_per_hour is not None
        return 3600 / plan.usd_per_hour

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """Costs are those of an hour."""
        return amount * 3600


class Gpus(Objective):
    """The fewest devices on which the workload's own load meets the SLO."""

    name, unit, sign, aim = "gpus", "GPUs", -1, "least cost"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """As many as it has."""
        return float(plan.num_gpus)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """The same."""
        return float(plan.num_gpus)

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """Of whole GPUs."""
        return float(math.ceil(amount * (1 - 1e-6)))


class UsdPerHour(Objective):
    """What the devices cost; for limits."""

    name, unit, sign, needs_prices = "usd_per_hour", "USD/h", -1, True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """By the profiles' prices."""
        assert plan.usd_per_hour is not None
        return plan.usd_per_hour

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """The same."""
        assert plan.usd_per_hour is not None
        return plan.usd_per_hour


class UsdPerMillionTokens(Objective):
    """What a million output tokens cost at the load they are served at."""

    name, unit, sign, needs_prices, aim = "usd_per_million_tokens", "USD/1M output tokens", -1, True, "least cost"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Price of a second over the output tokens of a second: those offered, or in a closed loop those served."""
        assert plan.usd_per_hour is not None
        offered = None if judged.rate_rps is None else judged.rate_rps * plan.output_tokens
        return _usd_per_million(plan.usd_per_hour, offered or judged.output_tokens_per_s or 0.0)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """At the highest rate it could serve."""
        assert plan.usd_per_hour is not None
        return _usd_per_million(plan.usd_per_hour, rate_bound_rps * plan.output_tokens)

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """Of the price of an hour."""
        return _usd_per_million(amount, tokens_per_s)


class MeanLatency(Objective):
    """The lowest mean end-to-end latency at the workload's own load."""

    name, unit, sign = "e2el", "s", -1

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """The simulated mean."""
        return float("inf") if judged.e2el_s is None else judged.e2el_s

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """That of requests that are alone."""
        return floor_e2el_s


class JoulesPerToken(Objective):
    """The energy of an output token at the load it is served at (`simtune.results.energy`)."""

    name, unit, sign, needs_power = "joules_per_token", "J/output token", -1, True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """As simulated."""
        return float("inf") if judged.joules_per_token is None else judged.joules_per_token

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """Of GPUs that draw no more than idle ones until the last request has come."""
        assert plan.idle_j_per_token is not None
        return plan.idle_j_per_token / rate_bound_rps if rate_bound_rps > 0 else 0.0


class Pareto(Objective):
    """The front of tokens/s/user against tokens/s/GPU (`simtune.tuner.search.front`), of which the point of the
    greatest power is chosen: throughput over delay (Kleinrock, ICC 1979)."""

    name, unit, searches_rate = "pareto", "tokens/s/user x tokens/s/GPU", True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """The power of a plan at a rate that it keeps up with."""
        assert judged.rate_rps is not None
        return judged.rate_rps * plan.output_tokens / plan.num_gpus * (judged.tokens_per_s_per_user or 0.0)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_e2el_s: float) -> float:
        """Points are held against each other at their load; of a plan as a whole nothing is said."""
        return float("inf")


def _usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    return usd_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else float("inf")


OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        GoodputPerGpu(),
        Goodput(),
        GoodputPerDollar(),
        Gpus(),
        UsdPerHour(),
        UsdPerMillionTokens(),
        MeanLatency(),
        JoulesPerToken(),
        Pareto(),
    )
}
"""By name; those of `simtune.specs.study.Objective` may be asked for, those of `StudyLimits` may bound what is."""


@dataclass(frozen=True)
class Limit:
    """A bound on one objective while another is asked for."""

    objective: Objective
    limit: float

    @classmethod
    def of(cls, limits: StudyLimits) -> Iterator[Limit]:
        """All that a study sets."""
        for name, limit in limits.given().items():
            yield cls(OBJECTIVES[name], limit)

    def violated(self, value: float) -> str:
        """What is wrong with a value; nothing where it is within the limit."""
        if not self.objective.better(self.limit, value):
            return ""
        sense = "at least" if self.objective.sign > 0 else "at most"
        return f"{self.objective.name} {value:.4g} {self.objective.unit} (limit: {sense} {self.limit:.4g})"
