"""Confidence in the choice of a finished search in redrawn worlds, and the plan that is best at a low quantile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.results.summary import Uncertainty
from simtune.sim.deployment import Deployment
from simtune.sim.parallel import Jobs
from simtune.sim.uncertainty import uncertainty
from simtune.tuner.doubt.confidence import Confidence, RivalPlan, confidence
from simtune.tuner.objectives import (
    ActiveFamilyLatency,
    FamilyLatency,
    JoulesPerToken,
    Makespan,
    MeanLatency,
    RateObjective,
)
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search.climb import LOWEST
from simtune.tuner.trial import Trial, Tuned

WORLDS = 40
"""Number of worlds: enough for probabilities within some per cent, and for a line through them."""
RIVALS = 4
"""Number of runners-up that the chosen plan is compared with."""


def of_search(
    tuned: Tuned,
    *,
    worlds: int,
    rivals: int = RIVALS,
    jobs: Jobs = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Confidence:
    """Compare the chosen plan with its nearest rivals (`contenders`). See `simtune.tuner.doubt.confidence`."""
    study = tuned.question.study
    return confidence(
        contenders(tuned, rivals),
        study.slo,
        worlds=worlds,
        seed=study.seed,
        tolerance=study.search.rate_tolerance,
        jobs=jobs,
        progress=progress,
    )


def simulate_chosen(tuned: Tuned) -> None:
    """Simulate the chosen plan once, as it is judged in every world: the unit of what worlds cost."""
    chosen = contenders(tuned, 0)[0]
    stream = chosen.stream if chosen.rate_rps is None else chosen.stream.at_rate(chosen.rate_rps)
    chosen.deployment.simulate(stream, tuned.question.study.slo, cores=chosen.cores)


def contenders(tuned: Tuned, rivals: int = RIVALS) -> list[RivalPlan]:
    """Return the chosen plan and its nearest rivals, ready to be judged in other worlds.

    A rival need not have been simulated: a plan that bounds rule out as predicted may win if operators are off. Plans
    that must do the same as another plan are left out, and so are classes that were ruled out without simulation.
    """
    return [_contender(tuned, trial) for trial in (tuned.chosen, *nearest(tuned.question, tuned.rows)[:rivals])]


def nearest(question: Question, rows: Sequence[Trial]) -> list[Trial]:
    """Return the rivals of the first of `rows`, the best bound first. At a given load simulated plans come before the
    others, in the order of the search."""
    objective = question.objective
    candidates = [row for row in rows[1:] if not row.same_as and not row.allocation]
    bounded = [row for row in candidates if row.best is not None and math.isfinite(row.best)]
    if isinstance(objective, RateObjective):
        return sorted(bounded, key=lambda row: -_reaches(question, row))
    simulated = [row for row in candidates if row.summary is not None]
    # The bound is the power of idle GPUs, which says little about busy ones.
    if objective.needs_power:
        return simulated
    unseen = [row for row in bounded if row.summary is None]
    return simulated + sorted(unseen, key=lambda row: -objective.sign * (row.best or 0.0))


def _reaches(question: Question, row: Trial) -> float:
    """Return the value of a plan within the SLO, or else its bound."""
    if row.status != "feasible":
        return row.best or 0.0
    return question.objective.value(question.facts(row.candidate, question.stream(row.candidate)), row.judged)


def of_chosen(tuned: Tuned, *, worlds: int, jobs: Jobs = None) -> Uncertainty:
    """Simulate the chosen plan on its whole deployment, under the requests of its result, in `worlds` redrawn
    worlds."""
    study = tuned.question.study
    return uncertainty(tuned.deployment, tuned.result.stream, study.slo, count=worlds, seed=study.seed, jobs=jobs)


def _contender(tuned: Tuned, trial: Trial) -> RivalPlan:
    question, candidate = tuned.question, trial.candidate
    deployment = question.deploy(candidate, tuned.deployment.max_model_len)
    # As many requests as the chosen plan was reported on: a shorter load ends before an overload is felt.
    stream = question.draws.stream(max(question.num_requests(candidate), tuned.result.stream.arrivals), 0)
    facts, objective = question.facts(candidate, stream), question.objective
    long_stream = question.capacity_stream(candidate)
    contender = RivalPlan(candidate.name, deployment, stream, None, cores=SAMPLED_CORES, long_stream=long_stream)
    if isinstance(objective, RateObjective):
        return replace(contender, rate_rps=_near_rps(question, trial), weight=1 / objective.worth(facts))
    if objective.searches_users:
        raise UsageError("worlds are not drawn for a number of users; ask for objective family or e2el at one number")
    if isinstance(objective, MeanLatency):
        return replace(contender, worth="e2el")
    if isinstance(objective, FamilyLatency):
        return replace(contender, worth="family")
    if isinstance(objective, ActiveFamilyLatency):
        return replace(contender, worth="family_active")
    if isinstance(objective, Makespan):
        return replace(contender, worth="makespan")
    if isinstance(objective, JoulesPerToken):
        return replace(contender, worth="joules_per_token")
    weight = trial.best if trial.summary is None else objective.value(facts, trial.judged)
    assert weight is not None
    return replace(contender, weight=weight, worth="weight")


def _near_rps(question: Question, trial: Trial) -> float | None:
    """Return a rate near the highest one of a plan: the last that was simulated, or its bound; None if the load is
    given."""
    objective = question.objective
    if not isinstance(objective, RateObjective):
        return None
    if trial.rate_rps is not None:
        return trial.rate_rps
    assert trial.best is not None
    return objective.rate_for(question.facts(trial.candidate, question.stream(trial.candidate)), trial.best)


def robust(tuned: Tuned, sure: Confidence, level: float) -> Tuned:
    """Return the same search with the plan chosen that is worth most at a quantile of the worlds, by `sure`.

    If that plan is not the chosen one, it is simulated on its whole deployment, at the highest rate within the SLO if
    rates are searched, and replaces it; unless it never meets the SLO as predicted.
    """
    name = sure.robust(level)
    if name == tuned.chosen.candidate.name:
        return tuned
    question, before = tuned.question, tuned.chosen
    trial = next(row for row in tuned.rows if row.candidate.name == name)
    deployment = question.deploy(trial.candidate, tuned.deployment.max_model_len)
    within = _within_slo(question, trial, deployment)
    if within is None:
        return tuned
    rate, result = within
    trial.take(result.summary(), rate)
    trial.status, before.status = "chosen", "feasible"
    trial.reason = f"worth most at the {level:.0%} quantile of {sure.worlds} redrawn worlds"
    before.reason = f"worth more as predicted, but less at the {level:.0%} quantile of {sure.worlds} redrawn worlds"
    rows = [trial, *(row for row in tuned.rows if row is not trial)]
    stream = question.stream(trial.candidate, rate)
    value = question.objective.value(question.facts(trial.candidate, stream), trial.judged)
    return replace(tuned, rows=rows, deployment=deployment, result=result, value=value)


def _within_slo(question: Question, trial: Trial, deployment: Deployment) -> tuple[float | None, Result] | None:
    """Return the rate at which a plan meets its SLO, and its result there; None if it meets the SLO at no rate.

    The search steps down from the rate of the last simulation or from the bound: most plans were simulated only at the
    rate at which they would have to beat the best plan, and missed it.
    """
    rate = _near_rps(question, trial)
    lowest = 0.0 if rate is None else rate * LOWEST
    while rate is None or rate > lowest:
        trial.simulations += 1
        result = deployment.simulate(question.stream(trial.candidate, rate), question.study.slo, record=True)
        if result.meets_slo:
            return rate, result
        if rate is None:
            return None
        rate /= 1 + question.study.search.rate_tolerance
    return None
