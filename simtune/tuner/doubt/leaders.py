"""Leading plans of a finished search in drawn worlds: the highest rate of each, and its latencies under any load.

Nothing is simulated world by world. A world in which everything takes e^u times as long is the predicted one played
more slowly (`simtune.tuner.doubt.slo_probability`), so a few simulations of faster requests give a latency in every
world. Errors of operators are the same for all plans of a world, so that the difference between two plans has an
interval of its own. What these errors do not cover may differ from plan to plan: each plan has one more error, drawn
for itself, of its values and of all its latencies (`PlanErrors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simtune.arrays import Array
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drawn_worlds import Blueprint, DrawnWorlds, PerturbedWorld, widest
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.run_basis import pool_bases
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.tuner.doubt.robust import nearest
from simtune.tuner.doubt.slo_probability import ONE_INSTANCE, StretchCurve, Stretched, stretches
from simtune.tuner.objectives import RateObjective
from simtune.tuner.question import Question
from simtune.tuner.trial import Trial
from simtune.workload.requests import RequestStream

METRICS = ("ttft", "tpot")
"""Latencies whose means are compared with measurements: means repeat better than percentiles."""
AROUND = (0.75, 0.9, 1.1, 1.3)
"""Rates beside a plan's own at which its limited latencies are simulated, as factors."""
RIVALS = 2
"""Plans that are compared with the chosen one."""
CONSIDERED = 3
"""Plans that meet the SLO, and plans by their bounds, among which the nearest rivals are looked for."""
_PURPOSE = 7  # key of the random streams of `simtune.sim.drawn_worlds`, continued
FARTHEST = math.log(1e3)
"""Largest logarithm of a rate over the plan's own; a run this far off has no limit that it reaches."""


@dataclass(frozen=True)
class PlanErrors:
    """Errors of the worlds: those of operators, and one for each plan."""

    worlds: DrawnWorlds
    seed: int
    log_sd: float
    """Standard deviation of the error of a plan, as the logarithm of a factor on all its times."""

    def of_plan(self, number: int) -> Array:
        """Return the error of the plan of a number in each world."""
        stream = np.random.SeedSequence((self.seed, _PURPOSE, number))
        generator = np.random.Generator(np.random.Philox(stream))
        return self.log_sd * generator.standard_normal(len(self.worlds.acceptance))


@dataclass(frozen=True)
class Leader:
    """A leading plan: the part of it that is measured, and its value in each world."""

    name: str
    server: Deployment
    """Instance alone if instances do not disturb each other, else the deployment as it is."""
    servers: int
    """Number of such parts in the deployment."""
    rate_rps: float
    """Rate of the deployment at which the search left the plan."""
    value: float | None
    """Value at that rate; None if the plan missed the SLO there."""
    log_values: Array
    """Logarithm of the plan's value in each world."""
    own_errors: Array
    """Error of the plan itself in each world."""
    log_sd: Mapping[str, float]
    """Standard deviation of the log error of each kind of operator in its steps."""

    def latencies(self, stream: RequestStream, worlds: DrawnWorlds, seed: int) -> dict[str, Array]:
        """Return the logarithms of mean latencies under these very requests in each world (`drawn_latencies`)."""
        return drawn_latencies(self.server, stream, worlds, self.own_errors, self.log_sd, seed)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the part that is measured."""
        return self.server.plan.num_devices


def leaders(
    question: Question, rows: Sequence[Trial], errors: PlanErrors, most_rivals: int = RIVALS
) -> tuple[Leader, ...]:
    """Return the chosen plan, the first of `rows`, and its nearest rivals.

    Raise UsageError if the objective is no rate within an SLO, if requests follow one another, or if a pool has step
    costs of its own.
    """
    objective = question.objective
    if not isinstance(objective, RateObjective):
        raise UsageError(
            f"objective {objective.name}: plans are told apart by the highest rate that each serves within the SLO; "
            "search with objective goodput, goodput_per_gpu or goodput_per_dollar"
        )
    if question.sends_families or question.workload.batch:
        raise UsageError(
            "requests of this workload follow one another or are one batch, which no load generator sends alike; "
            "search with a workload that has a request rate"
        )
    if question.study.slo.attainment is not None:
        raise UsageError(
            "slo.attainment: how a share of requests within all limits changes with step times is not known without "
            "simulating every world; search with percentiles alone, or use `simtune optimize --worlds`"
        )
    length = question.length_limit([row.candidate for row in rows])
    entries = [
        _LeadingEntry(question, row, length, errors, number) for number, row in enumerate(_worth_a_look(question, rows))
    ]
    chosen, *rivals = entries
    slack, predicted = chosen.slack()
    plans = []
    for entry in rivals:
        of_rival, at = entry.slack()
        # Short runs of one instance reach limits at other rates than the search saw: a plan that met the SLO there is
        # shifted by its own difference, another one by that of the chosen plan.
        plans.append(entry.leader(of_rival - (at if entry.row.status == "feasible" else predicted)))
    plans.sort(key=lambda plan: -float(np.median(plan.log_values)))
    return (chosen.leader(slack - predicted), *plans[:most_rivals])


def _worth_a_look(question: Question, rows: Sequence[Trial]) -> list[Trial]:
    """Return the chosen plan and those that may be its nearest rivals: some that meet the SLO, in the order of the
    search, and some of the best bounds."""
    feasible = [row for row in rows[1:] if row.status == "feasible" and not row.same_as][:CONSIDERED]
    bounded = [row for row in nearest(question, rows) if row not in feasible][:CONSIDERED]
    return [rows[0], *feasible, *bounded]


class _LeadingEntry:
    """A plan while its value is computed."""

    def __init__(self, question: Question, row: Trial, max_model_len: int, errors: PlanErrors, number: int) -> None:
        self.question, self.row = question, row
        self.worlds, self.own_errors = errors.worlds, errors.of_plan(number)
        self.log_sd: Mapping[str, float] = {}
        self.deployment = question.deploy(row.candidate, max_model_len)
        refuse_brought(self.deployment)
        facts, objective = question.facts(row.candidate, question.stream(row.candidate)), question.objective
        assert isinstance(objective, RateObjective)
        rate = row.rate_rps if row.best is None or row.rate_rps is not None else objective.rate_for(facts, row.best)
        assert rate is not None
        self.rate_rps, self.value = rate, rate * objective.worth(facts)

    def slack(self) -> tuple[Array, float]:
        """Return the logarithm of the highest rate over the plan's own in each world, and as predicted."""
        result = self._run(0.0)
        limits = result.limits
        # The plan itself is a knot, so that the value of a world without errors is that of the search.
        knots = {0.0: _limited(result, 0.0)} | {(u := math.log(factor)): _limited(self._run(u), u) for factor in AROUND}
        capacity = math.log(sustained_rps(self.deployment, self._long()) / self.rate_rps)
        # Above its capacity requests pile up, even if a short run ends before that is felt.
        if capacity > 0:
            knots[capacity] = [math.inf] * len(limits)
        curves = [StretchCurve.of({u: knots[u][i] for u in knots}) for i in range(len(limits))]
        self.log_sd = widest(pool_bases(self.deployment, result))
        stretch = stretches(self.deployment, result, self.log_sd, [limit.metric for limit in limits], self.worlds)
        fewer = fewer_kept(self.deployment)
        if fewer is not None:
            logs = np.log(_limited(self._run(0.0, fewer), 0.0))
            longer = [float(np.clip(c.reached(at), 0.0, c.stretch[-1])) for c, at in zip(curves, logs, strict=True)]
            stretch = stretch - np.outer(longer, self.worlds.acceptance)
        predicted = Stretched(limits, curves, np.zeros((len(limits), 1)), 0.0).slack()
        return Stretched(limits, curves, stretch + self.own_errors, 0.0).slack(), float(predicted[0])

    def leader(self, slack: Array) -> Leader:
        """Return the plan with its value in each world."""
        server = one_server(self.deployment, self._stream())
        servers = self.deployment.plan.pools[0].instances // server.plan.pools[0].instances
        log_values = math.log(self.value) + np.clip(slack, -FARTHEST, FARTHEST)
        name, rate = self.row.candidate.name, self.rate_rps
        value = self.value if self.row.status in ("chosen", "feasible") else None
        return Leader(name, server, servers, rate, value, log_values, self.own_errors, self.log_sd)

    def _run(self, u: float, deployment: Deployment | None = None) -> Result:
        """Simulate one instance at e^u times the rate of the plan."""
        stream = self._stream().at_rate(self.rate_rps * math.exp(u))
        study = self.question.study
        return (deployment or self.deployment).simulate(stream, study.slo, cores=ONE_INSTANCE, seed=study.seed)

    def _stream(self) -> RequestStream:
        return self.question.stream(self.row.candidate)

    def _long(self) -> RequestStream:
        return self.question.capacity_stream(self.row.candidate)


def refuse_brought(deployment: Deployment) -> None:
    """Raise UsageError if a pool has step costs of its own: how far off they are is not known."""
    names = [pool.spec.name for pool in deployment.pools if isinstance(pool.costs, OwnCosts)]
    if names:
        raise UsageError(
            f"pool {names[0]}: has step costs of its own, whose errors are not known; measure plans whose costs are "
            "those of a hardware profile"
        )


def one_server(deployment: Deployment, stream: RequestStream) -> Deployment:
    """Return the deployment with one instance, if instances do not disturb each other; else the deployment itself."""
    if deployment.enough_instances(stream, ONE_INSTANCE) is None:
        return deployment
    (pool,) = deployment.plan.pools
    plan = deployment.plan.model_copy(update={"pools": (pool.model_copy(update={"instances": 1, "spare": 0}),)})
    costs = {pool.name: deployment.pools[0].costs}
    return deploy(plan, deployment.model, deployment.profiles, costs, drafting=deployment.drafting)


def fewer_kept(deployment: Deployment) -> Deployment | None:
    """Return the deployment with drafts kept less often by a standard error; None if no such error is known."""
    drafting = deployment.drafting.values()
    if all(item.acceptance.shifted(-1.0) == item.acceptance for item in drafting):
        return None
    return Blueprint.of(deployment).deploy(PerturbedWorld(acceptance_errors=-1.0))


def drawn_latencies(
    deployment: Deployment,
    stream: RequestStream,
    worlds: DrawnWorlds,
    own_errors: Array,
    log_sd: Mapping[str, float],
    seed: int = 0,
) -> dict[str, Array]:
    """Return the logarithm of the mean of METRICS in each world, under these very requests; a metric that no request
    has is left out. `own_errors` are those of the plan, `log_sd` those of operators."""
    result = deployment.simulate(stream, seed=seed)
    predicted = _means(result)
    names = [name for name in METRICS if name in predicted]
    stretch = own_errors + stretches(deployment, result, log_sd, names, worlds)
    knots = {0.0: predicted}
    # Users who never pause are slowed down by the engine alone: latencies change in proportion.
    if stream.users is None or stream.think_s or stream.due_s is not None:
        for u in (float(np.quantile(stretch, level)) for level in (0.05, 0.95)):
            slowed = _means(deployment.simulate(faster(stream, u), seed=seed))
            knots[u] = {name: math.exp(u) * slowed[name] for name in names}
    curves = {name: StretchCurve.of({u: means[name] for u, means in knots.items()}) for name in names}
    logs = {name: curves[name].at(u) for name, u in zip(names, stretch, strict=True)}
    fewer = fewer_kept(deployment)
    if fewer is not None:
        less = _means(fewer.simulate(stream, seed=seed))
        logs = {name: at - math.log(less[name] / predicted[name]) * worlds.acceptance for name, at in logs.items()}
    return logs


def faster(stream: RequestStream, u: float) -> RequestStream:
    """Return the requests with all times of their clients divided by e^u."""
    shorter = math.exp(-u)
    return replace(
        stream,
        arrival_s=None if stream.arrival_s is None else stream.arrival_s * shorter,
        due_s=None if stream.due_s is None else stream.due_s * shorter,
        think_s=stream.think_s * shorter,
    )


def _means(result: Result) -> dict[str, float]:
    """Return the means of METRICS in seconds; a metric without a value is left out."""
    values = {name: result.statistic(name, "mean") for name in METRICS}
    return {name: value for name, value in values.items() if value}


def _limited(result: Result, u: float) -> list[float]:
    """Return the limited latencies times e^u; infinite if requests pile up."""
    return [math.inf if limit.value_s is None else math.exp(u) * limit.value_s for limit in result.limits]
