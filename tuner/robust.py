"""The choice of a finished search in redrawn worlds: how sure it is, and which plan is best where things go badly."""

from __future__ import annotations

from dataclasses import replace

from simtune.parallel import Jobs
from simtune.tuner.confidence import Confidence, RivalPlan, confidence
from simtune.tuner.objectives import MeanLatency, RateObjective
from simtune.tuner.question import SAMPLED_CORES
from simtune.tuner.trial import Trial, Tuned

WORLDS = 40
"""Enough for probabilities within some per cent, and for a line through them."""
RIVALS = 4
"""Runners-up that the chosen plan is compared with."""


def of_search(tuned: Tuned, *, worlds: int, rivals: int = RIVALS, jobs: Jobs = None) -> Confidence:
    """The chosen plan against the best others that met the SLO. See `simtune.tuner.confidence`."""
    study = tuned.question.study
    trials = [tuned.chosen, *tuned.runners_up(rivals)]
    return confidence(
        [_contender(tuned, trial) for trial in trials],
        study.slo,
        worlds=worlds,
        seed=study.seed,
        tolerance=study.search.rate_tolerance,
        jobs=jobs,
    )


def _contender(tuned: Tuned, trial: Trial) -> RivalPlan:
    question, candidate = tuned.question, trial.candidate
    deployment, stream = question.deploy(candidate, tuned.deployment.max_model_len), question.stream(candidate)
    facts, objective = question.facts(candidate, stream), question.objective
    contender = RivalPlan(candidate.name, deployment, stream, None, cores=SAMPLED_CORES)
    if isinstance(objective, RateObjective):
        return replace(contender, rate_rps=trial.rate_rps, weight=1 / objective.worth(facts))
    if isinstance(objective, MeanLatency):
        return replace(contender, worth="e2el")
    return replace(contender, weight=objective.value(facts, trial.judged), worth="weight")


def robust(tuned: Tuned, sure: Confidence, level: float) -> Tuned:
    """The same search with the plan chosen that is worth most at a quantile of the worlds, by `sure`.

    Where that is not the chosen one, it is simulated on its whole deployment, and takes its place.
    """
    name = sure.robust(level)
    if name == tuned.chosen.candidate.name:
        return tuned
    question, before = tuned.question, tuned.chosen
    trial = next(row for row in tuned.rows if row.candidate.name == name)
    deployment = question.deploy(trial.candidate, tuned.deployment.max_model_len)
    stream = question.stream(trial.candidate, trial.rate_rps if question.searches_rate else None)
    result = deployment.simulate(stream, question.study.slo, record=True)
    trial.take(result.summary(), trial.rate_rps if question.searches_rate else None)
    trial.simulations += 1
    trial.status, before.status = "chosen", "feasible"
    trial.reason = f"worth most at the {level:.0%} quantile of {sure.worlds} redrawn worlds"
    before.reason = f"worth more as predicted, but less at the {level:.0%} quantile of {sure.worlds} redrawn worlds"
    rows = [trial, *(row for row in tuned.rows if row is not trial)]
    value = question.objective.value(question.facts(trial.candidate, stream), trial.judged)
    return replace(tuned, rows=rows, deployment=deployment, result=result, value=value)
