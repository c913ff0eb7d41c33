"""The choice of a finished search in redrawn worlds: how sure it is, and which plan is best where things go badly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from simtune.results.result import Result
from simtune.results.summary import Uncertainty
from simtune.sim.deployment import Deployment
from simtune.sim.parallel import Jobs
from simtune.sim.uncertainty import uncertainty
from simtune.tuner.doubt.confidence import Confidence, RivalPlan, confidence
from simtune.tuner.objectives import MeanLatency, RateObjective
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search.climb import LOWEST
from simtune.tuner.trial import Trial, Tuned

WORLDS = 40
"""Enough for probabilities within some per cent, and for a line through them."""
RIVALS = 4
"""Runners-up that the chosen plan is compared with."""


def of_search(
    tuned: Tuned,
    *,
    worlds: int,
    rivals: int = RIVALS,
    jobs: Jobs = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Confidence:
    """The chosen plan against those that could come nearest (`contenders`). See `simtune.tuner.doubt.confidence`."""
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
    """The chosen plan and its nearest rivals, ready to be judged in other worlds.

    A rival need not have been simulated: what bounds rule out as predicted may win where operators are off. Left out
    are plans that must do what another one does, and classes that were ruled out unseen.
    """
    return [_contender(tuned, trial) for trial in (tuned.chosen, *_nearest(tuned)[:rivals])]


def _nearest(tuned: Tuned) -> list[Trial]:
    """Rivals, those that reach most first. At a given load those that were simulated come before, in the order of the
    search."""
    question, objective = tuned.question, tuned.question.objective
    candidates = [row for row in tuned.rows[1:] if not row.same_as and not row.allocation]
    bounded = [row for row in candidates if row.best is not None and math.isfinite(row.best)]
    if isinstance(objective, RateObjective):
        return sorted(bounded, key=lambda row: -_reaches(question, row))
    simulated = [row for row in candidates if row.summary is not None]
    if objective.needs_power:  # what idle GPUs draw says little of what busy ones do
        return simulated
    unseen = [row for row in bounded if row.summary is None]
    return simulated + sorted(unseen, key=lambda row: -objective.sign * (row.best or 0.0))


def _reaches(question: Question, row: Trial) -> float:
    """What a plan came to within the SLO, or else at most comes to."""
    if row.status != "feasible":
        return row.best or 0.0
    return question.objective.value(question.facts(row.candidate, question.stream(row.candidate)), row.judged)


def of_chosen(tuned: Tuned, *, worlds: int, jobs: Jobs = None) -> Uncertainty:
    """The chosen plan on its whole deployment, under the very requests of its result, in so many redrawn worlds."""
    study = tuned.question.study
    return uncertainty(tuned.deployment, tuned.result.stream, study.slo, count=worlds, seed=study.seed, jobs=jobs)


def _contender(tuned: Tuned, trial: Trial) -> RivalPlan:
    question, candidate = tuned.question, trial.candidate
    deployment = question.deploy(candidate, tuned.deployment.max_model_len)
    # As many requests as the chosen plan was reported on: a shorter load ends before an overload is felt.
    stream = question.draws.stream(max(question.num_requests(candidate), len(tuned.result.stream)), 0)
    facts, objective = question.facts(candidate, stream), question.objective
    contender = RivalPlan(candidate.name, deployment, stream, None, cores=SAMPLED_CORES)
    if isinstance(objective, RateObjective):
        return replace(contender, rate_rps=_near_rps(question, trial), weight=1 / objective.worth(facts))
    if isinstance(objective, MeanLatency):
        return replace(contender, worth="e2el")
    weight = trial.best if trial.summary is None else objective.value(facts, trial.judged)
    assert weight is not None
    return replace(contender, weight=weight, worth="weight")


def _near_rps(question: Question, trial: Trial) -> float | None:
    """Of the highest rate of a plan: the last that was simulated, or its bound; None where the load is given."""
    objective = question.objective
    if not isinstance(objective, RateObjective):
        return None
    if trial.rate_rps is not None:
        return trial.rate_rps
    assert trial.best is not None
    return objective.rate_for(question.facts(trial.candidate, question.stream(trial.candidate)), trial.best)


def robust(tuned: Tuned, sure: Confidence, level: float) -> Tuned:
    """The same search with the plan chosen that is worth most at a quantile of the worlds, by `sure`.

    Where that is not the chosen one, it is simulated on its whole deployment, at the highest rate within the SLO where
    rates are searched, and takes its place; it does not where it never meets the SLO as predicted.
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
    """The rate at which a plan meets its SLO, from that of its last simulation or its bound down, and what it does
    there. A search stops at the rate where a plan would have to beat the best one, which most of them miss."""
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
