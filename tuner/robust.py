"""The choice of a finished search in redrawn worlds: how sure it is, and which plan is best where things go badly."""

from __future__ import annotations

from dataclasses import replace

from simtune.tuner.confidence import Confidence, Contender, confidence
from simtune.tuner.search import RATE_OBJECTIVES, SAMPLED_CORES, Trial, Tuned

WORLDS = 40
"""Enough for probabilities within some per cent, and for a line through them."""
RIVALS = 4
"""Runners-up that the chosen plan is compared with."""


def of_search(tuned: Tuned, *, worlds: int, rivals: int = RIVALS, jobs: int | None = None) -> Confidence:
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


def _contender(tuned: Tuned, trial: Trial) -> Contender:
    question, gpus = tuned.question, trial.candidate.shape.num_gpus
    objective = question.study.objective
    deployment = question.deploy(trial.candidate, tuned.deployment.max_model_len)
    contender = Contender(
        trial.candidate.name, deployment, question.stream_for(deployment, None), None, gpus, cores=SAMPLED_CORES
    )
    if objective in RATE_OBJECTIVES:
        weight = gpus if objective == "goodput_per_gpu" else 1
        return replace(contender, rate_rps=trial.rate_rps, weight=weight)
    return replace(contender, worth="weight" if objective == "gpus" else "e2el")


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
    rate = trial.rate_rps if question.searches_rate else None
    result = deployment.simulate(question.stream_for(deployment, rate), question.study.slo, record=True)
    trial.take(result, rate)
    trial.simulations += 1
    trial.status, before.status = "chosen", "feasible"
    trial.reason = f"worth most at the {level:.0%} quantile of {sure.worlds} redrawn worlds"
    before.reason = f"worth more as predicted, but less at the {level:.0%} quantile of {sure.worlds} redrawn worlds"
    rows = [trial, *(row for row in tuned.rows if row is not trial)]
    return replace(tuned, rows=rows, deployment=deployment, result=result)
