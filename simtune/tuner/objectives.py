"""Objectives of a study: one small class each, with the value of a plan and the best value that it could reach."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from simtune.results.summary import limit_sentence
from simtune.specs.study import StudyLimits
from simtune.tuner.bounds.floors import Floor
from simtune.tuner.bounds.relaxation import Aim
from simtune.tuner.doubt.draw_spread import DrawSpread
from simtune.tuner.search.draws import MOST_REQUESTS


class PoolHours(NamedTuple):
    """GPUs of a pool over a run."""

    pool: str
    gpus: int
    """Most GPUs of the pool."""
    usd_per_gpu_hour: float | None
    """None if its hardware profile has no price."""
    scales: bool
    """True if its instances come and go with the load."""
    least_gpu_hours: float
    """Lower bound on the GPU-hours that the pool holds while the requests are served."""


@dataclass(frozen=True)
class RunHours:
    """GPU-hours of a plan over the whole run of its requests, by its pools."""

    pools: tuple[PoolHours, ...]
    output_tokens: float
    """Output tokens of all requests."""

    def least(self, price: GpuPrice) -> float:
        """Return a lower bound on the sum of the GPU-hours of a run, each at its price."""
        return sum(pool.least_gpu_hours * price(pool) for pool in self.pools)

    def held(self, judged: Judged, price: GpuPrice) -> float:
        """Return the sum of the GPU-hours that the pools held in a simulation, each at its price.

        A plan that is not autoscaled holds its GPUs from the first arrival to the last finish; an autoscaled one from
        the beginning of the run to the end of its last step.
        """
        total = 0.0
        for pool in self.pools:
            hours = judged.pool_gpu_hours.get(pool.pool) if pool.scales else pool.gpus * judged.run_hours
            total += (pool.gpus * judged.run_hours if hours is None else hours) * price(pool)
        return total


GpuPrice = Callable[[PoolHours], float]
"""Price of a GPU-hour of a pool."""


@dataclass(frozen=True)
class PlanFacts:
    """Facts about a plan that need no simulation."""

    num_gpus: int
    usd_per_hour: float | None
    """None if a hardware profile has no price; objectives that need prices are refused then."""
    output_tokens: float
    """Mean output tokens per arrival, of a request or of a family."""
    served_only: bool = False
    """True if more tokens may be offered per second than are served: by a batch, and by a load whose requests may be
    aborted. Then prices are of the tokens that were served."""
    idle_j_per_token: float | None = None
    """Joules that its GPUs would draw from the first arrival to the last if nothing ran, per output token, at one
    request per second; None if a hardware profile has no power."""
    run: RunHours | None = None
    """GPU-hours of the run; None unless the study has autoscaled plans, whose cost follows from their run."""


@dataclass(frozen=True)
class Judged:
    """Results of the last simulation of a plan."""

    rate_rps: float | None
    """Rate at which the plan met the SLO; None for a closed loop without a rate."""
    output_tokens_per_s: float | None
    e2el_s: float | None
    """Mean end-to-end latency in seconds."""
    tokens_per_s_per_user: float | None = None
    joules_per_token: float | None = None
    makespan_s: float | None = None
    """Seconds from the first arrival to the last finish."""
    family_s: float | None = None
    """Mean seconds from the arrival of a family until its last node is over."""
    family_active_s: float | None = None
    """Mean of its part in which at least one request of the family was under way."""
    users: int | None = None
    """Users of a closed loop."""
    run_hours: float = 0.0
    """Hours of the run, from the beginning to the last step if pools are autoscaled, or else from the first arrival to
    the last finish."""
    pool_gpu_hours: Mapping[str, float] = field(default_factory=dict)
    """GPU-hours that autoscaled pools held in the run, by the name of the pool."""
    output_tokens: float = 0.0
    """Output tokens that were served in the run."""


class Miss(NamedTuple):
    """A simulation in which a plan missed the SLO."""

    rate_rps: float
    requests: int
    """Number of requests that were simulated."""


class Objective(ABC):
    """An objective. Values are in `unit`, as users read them; `sign` is 1 if more is better, and -1 if less is."""

    name: ClassVar[str]
    unit: ClassVar[str]
    sign: ClassVar[int] = 1
    searches_rate: ClassVar[bool] = False
    """True if the search looks for the highest rate that meets the SLO; otherwise the load is the workload's."""
    searches_users: ClassVar[bool] = False
    """True if the search looks for the most users of a closed loop that meet the SLO."""
    needs_slo: ClassVar[bool] = False
    needs_prices: ClassVar[bool] = False
    needs_power: ClassVar[bool] = False
    needs_batch: ClassVar[bool] = False
    needs_families: ClassVar[bool] = False
    of_run: ClassVar[bool] = False
    """True if the objective is a cost of the whole run if pools are autoscaled."""
    floor: ClassVar[Floor | None] = None
    """Latency that bounds the objective from below, which `best` takes."""
    aim: ClassVar[Aim | None] = None
    """Aim of the allocation of GPUs to instances that bounds the objective (`simtune.tuner.bounds.relaxation`).

    None if rates and costs of instances do not bound it.
    """

    @abstractmethod
    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the value of a plan that met its SLO."""

    @abstractmethod
    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return a value that is no worse than anything the plan can reach.

        The plan serves at most `rate_bound_rps` requests per second, and the latency that `floor` names is at least
        `floor_s` seconds.
        """

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """Return the objective if `aim` comes to `amount`, with `tokens_per_s` output tokens offered per second."""
        return amount

    def better(self, a: float, b: float, tolerance: float = 0.0) -> bool:
        """Return True if one value is better than another by more than a relative tolerance."""
        return a > b * (1 + tolerance) if self.sign > 0 else a * (1 + tolerance) < b


class RateObjective(Objective):
    """The highest request rate within the SLO, times what a request per second is worth on the plan."""

    searches_rate = needs_slo = True

    @abstractmethod
    def worth(self, plan: PlanFacts) -> float:
        """Return the value of one request per second on the plan."""

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the value of a plan that met its SLO at a rate."""
        assert judged.rate_rps is not None
        return judged.rate_rps * self.worth(plan)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the value at the highest rate that the plan could serve."""
        return rate_bound_rps * self.worth(plan)

    def reaches(self, plan: PlanFacts, missed: Miss, spread: DrawSpread, capacity_rps: float) -> float:
        """Return a bound on the value of a plan that missed the SLO on one draw of the requests.

        The bound is the highest rate that another draw may still allow by the `spread` of draws, and no more than the
        capacity.
        """
        return min(missed.rate_rps * spread.allowance(missed.requests), capacity_rps) * self.worth(plan)

    def rate_for(self, plan: PlanFacts, value: float) -> float:
        """Return the request rate at which a plan has that value."""
        return value / self.worth(plan)


class Goodput(RateObjective):
    """Requests per second."""

    name, unit, aim = "goodput", "requests/s", "most"

    def worth(self, plan: PlanFacts) -> float:
        """Return 1: the objective is the rate itself."""
        return 1.0


class GoodputPerGpu(RateObjective):
    """Requests per second and GPU."""

    name, unit, aim = "goodput_per_gpu", "requests/s/GPU", "per cost"

    def worth(self, plan: PlanFacts) -> float:
        """Return the share of one GPU: the rate is divided by all GPUs."""
        return 1 / plan.num_gpus


class GoodputPerDollar(RateObjective):
    """Requests per dollar of the hardware's price."""

    name, unit, needs_prices, aim = "goodput_per_dollar", "requests/USD", True, "per cost"

    def worth(self, plan: PlanFacts) -> float:
        """Return the requests of an hour over the price of an hour."""
        assert plan.usd_per_hour is not None
        return 3600 / plan.usd_per_hour

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """Return the requests per dollar: `amount` is per second, and the costs are those of an hour."""
        return amount * 3600


class Gpus(Objective):
    """The fewest devices on which the workload's own load meets the SLO."""

    name, unit, sign, aim = "gpus", "GPUs", -1, "least cost"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the number of GPUs of the plan."""
        return float(plan.num_gpus)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the number of GPUs of the plan."""
        return float(plan.num_gpus)

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """Return `amount` rounded up to whole GPUs."""
        return float(math.ceil(amount * (1 - 1e-6)))


class UsdPerHour(Objective):
    """Price of the devices per hour; used as a limit."""

    name, unit, sign, needs_prices = "usd_per_hour", "USD/h", -1, True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the price per hour by the prices of the hardware profiles."""
        assert plan.usd_per_hour is not None
        return plan.usd_per_hour

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the price per hour by the prices of the hardware profiles."""
        assert plan.usd_per_hour is not None
        return plan.usd_per_hour


class UsdPerMillionTokens(Objective):
    """Price of a million output tokens at the load at which they are served."""

    name, unit, sign, needs_prices, aim = "usd_per_million_tokens", "USD/1M output tokens", -1, True, "least cost"
    of_run = True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the price of a second over the output tokens of a second: offered ones, or served ones in a closed
        loop and if `served_only`. If pools of the study are autoscaled, that of the GPU-hours of the run."""
        assert plan.usd_per_hour is not None
        if plan.run is not None:
            return _per_million(plan.run.held(judged, _usd), judged.output_tokens)
        offered = None if judged.rate_rps is None or plan.served_only else judged.rate_rps * plan.output_tokens
        return _usd_per_million(plan.usd_per_hour, offered or judged.output_tokens_per_s or 0.0)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the price at the highest rate that the plan could serve, or of the fewest GPU-hours of the run."""
        assert plan.usd_per_hour is not None
        if plan.run is not None:
            return _per_million(plan.run.least(_usd), plan.run.output_tokens)
        return _usd_per_million(plan.usd_per_hour, rate_bound_rps * plan.output_tokens)

    def of_allocation(self, amount: float, tokens_per_s: float) -> float:
        """Return the price of a million output tokens, given the price of an hour."""
        return _usd_per_million(amount, tokens_per_s)


class GpuHoursPerMillionTokens(Objective):
    """GPU-hours of a million output tokens at the load at which they are served: of autoscaled pools those that their
    instances hold."""

    name, unit, sign, of_run = "gpu_hours_per_million_tokens", "GPU-hours/1M output tokens", -1, True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the GPU-hours over the output tokens: of the run if pools of the study are autoscaled, else of an hour
        at the rate that is offered, or served in a closed loop and if `served_only`."""
        if plan.run is not None:
            return _per_million(plan.run.held(judged, _one), judged.output_tokens)
        offered = None if judged.rate_rps is None or plan.served_only else judged.rate_rps * plan.output_tokens
        return _per_million(plan.num_gpus, 3600 * (offered or judged.output_tokens_per_s or 0.0))

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the GPU-hours at the highest rate that the plan could serve, or the fewest of the run."""
        if plan.run is not None:
            return _per_million(plan.run.least(_one), plan.run.output_tokens)
        return _per_million(plan.num_gpus, 3600 * rate_bound_rps * plan.output_tokens)


class MeanLatency(Objective):
    """The lowest mean end-to-end latency at the workload's own load."""

    name, unit, sign, floor = "e2el", "s", -1, "e2el"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the simulated mean."""
        return float("inf") if judged.e2el_s is None else judged.e2el_s

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the mean latency of requests that are alone."""
        return floor_s


class Makespan(Objective):
    """The least time in which a batch is done."""

    name, unit, sign, needs_batch, floor = "makespan", "s", -1, True, "makespan"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the simulated seconds from the first arrival to the last finish."""
        return float("inf") if judged.makespan_s is None else judged.makespan_s

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the time that the work of the batch takes at least (`simtune.tuner.bounds.makespan`)."""
        return floor_s


class FamilyLatency(Objective):
    """The lowest mean latency of a family, from its arrival until its last node is over, at the workload's own load."""

    name, unit, sign, needs_families, floor = "family", "s", -1, True, "family"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the simulated mean."""
        return float("inf") if judged.family_s is None else judged.family_s

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the mean of the longest ways through families whose requests are alone."""
        return floor_s


class ActiveFamilyLatency(Objective):
    """The lowest mean latency of a family without its pauses, at the workload's own load: the time in which at least
    one of its requests is under way."""

    name, unit, sign, needs_families, floor = "family_active", "s", -1, True, "family_active"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the simulated mean."""
        return float("inf") if judged.family_active_s is None else judged.family_active_s

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the mean of the longest ways through families whose requests are alone, without pauses."""
        return floor_s


class Users(Objective):
    """The most users of a closed loop, at each of which one request, family or session is under way, within the SLO.

    Users that think or wait for tools cost nothing, so nothing but the largest number that is simulated bounds the
    users of a plan: every plan is simulated.
    """

    name, unit, searches_users, needs_slo = "users", "users", True, True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the users of the simulation."""
        return float(judged.users or 0)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the largest number that is simulated: each user sends a request."""
        return float(MOST_REQUESTS)


class UsersPerGpu(Users):
    """Users within the SLO for each GPU."""

    name, unit = "users_per_gpu", "users/GPU"

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the users of the simulation over the GPUs of the plan."""
        return super().value(plan, judged) / plan.num_gpus

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the largest number that is simulated over the GPUs of the plan."""
        return super().best(plan, rate_bound_rps, floor_s) / plan.num_gpus


class JoulesPerToken(Objective):
    """Energy of an output token at the load at which it is served (`simtune.results.energy`)."""

    name, unit, sign, needs_power = "joules_per_token", "J/output token", -1, True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the simulated energy per output token."""
        return float("inf") if judged.joules_per_token is None else judged.joules_per_token

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return the energy if the GPUs draw no more than idle ones until the last request has arrived."""
        assert plan.idle_j_per_token is not None
        return plan.idle_j_per_token / rate_bound_rps if rate_bound_rps > 0 else 0.0


class Pareto(Objective):
    """The front of tokens/s/user against tokens/s/GPU (`simtune.tuner.search.front`), of which the point of the
    greatest power is chosen: throughput over delay (Kleinrock, ICC 1979)."""

    name, unit, searches_rate = "pareto", "tokens/s/user x tokens/s/GPU", True

    def value(self, plan: PlanFacts, judged: Judged) -> float:
        """Return the power of a plan at a rate that it keeps up with."""
        assert judged.rate_rps is not None
        return judged.rate_rps * plan.output_tokens / plan.num_gpus * (judged.tokens_per_s_per_user or 0.0)

    def best(self, plan: PlanFacts, rate_bound_rps: float, floor_s: float) -> float:
        """Return infinity: points are compared at their load, so a plan as a whole has no bound."""
        return float("inf")


def _usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    return usd_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else float("inf")


def _per_million(cost: float, tokens: float) -> float:
    return cost / tokens * 1e6 if tokens > 0 else float("inf")


def _usd(pool: PoolHours) -> float:
    assert pool.usd_per_gpu_hour is not None
    return pool.usd_per_gpu_hour


def _one(pool: PoolHours) -> float:
    return 1.0


OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        GoodputPerGpu(),
        Goodput(),
        GoodputPerDollar(),
        Gpus(),
        UsdPerHour(),
        UsdPerMillionTokens(),
        GpuHoursPerMillionTokens(),
        MeanLatency(),
        Makespan(),
        FamilyLatency(),
        ActiveFamilyLatency(),
        Users(),
        UsersPerGpu(),
        JoulesPerToken(),
        Pareto(),
    )
}
"""Objectives by name. A study may ask for those of `simtune.specs.study.ObjectiveName`, and limit those of
`StudyLimits`."""


@dataclass(frozen=True)
class Limit:
    """A bound on one objective while a study asks for another."""

    objective: Objective
    limit: float

    @classmethod
    def of(cls, limits: StudyLimits) -> Iterator[Limit]:
        """Yield all limits that a study sets."""
        for name, limit in limits.given().items():
            yield cls(OBJECTIVES[name], limit)

    def violated(self, value: float, how: str = "") -> str:
        """Return how a value breaks the limit, in words; empty if it is within the limit. `how` is put before the
        value, such as "at best"."""
        if not self.objective.better(self.limit, value):
            return ""
        name, unit, relation = self.objective.name, self.objective.unit, "≥" if self.objective.sign > 0 else "≤"
        return limit_sentence(f"{name} {relation} {self.limit:.4g} {unit}", f"{how} {value:.4g} {unit}".strip())
