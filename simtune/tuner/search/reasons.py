"""Why a plan was chosen, and why the others were not; in words."""

from __future__ import annotations

from collections.abc import Mapping

from simtune.errors import plural
from simtune.tuner.question import Question
from simtune.tuner.trial import Trial


def praise(row: Trial, question: Question, value: float) -> str:
    """Of the chosen plan."""
    objective = question.objective
    if objective.searches_rate:
        return f"meets the SLO up to {row.rate_rps:.4g} requests/s, {value:.4g} {objective.unit}"
    if objective.name == "e2el":
        return f"meets the SLO with a mean end-to-end latency of {value:.4g} s"
    if objective.name == "gpus":
        return f"meets the SLO on {plural(row.candidate.num_gpus, 'GPU')}"
    return f"meets the SLO at {value:.4g} {objective.unit}"


def no_better(question: Question, row: Trial, best: float, leader: Trial | None, value: float) -> str:
    """Of a plan that was not simulated because of the best it could reach, beside the leader and its value."""
    objective = question.objective
    if not objective.searches_rate:
        reached = "no plan met the SLO" if leader is None else f"{leader.candidate.name} comes to {value:.4g}"
        return f"no better than {best:.4g} {objective.unit}; {reached}"
    reached = "no plan met the SLO"
    if leader is not None:
        gpus = plural(leader.candidate.num_gpus, "GPU")
        reached = f"{leader.candidate.name} reached {leader.rate_rps:.4g} requests/s on {gpus}"
    return f"cannot exceed {row.rate_bound_rps:.4g} requests/s ({row.bounded_by}); {reached}"


def no_allocation(question: Question, name: str, best: float | None, leader: Trial | None, value: float) -> str:
    """Of the plans of a class that was not opened because of the best that any allocation of it could reach."""
    objective = question.objective
    reached = "no plan met the SLO" if leader is None else f"{leader.candidate.name} comes to {value:.4g}"
    return f"no allocation of {name} is better than {best or 0.0:.4g} {objective.unit}; {reached}"


def ranked(rows: list[Trial], best: Trial, question: Question, values: Mapping[int, float]) -> list[Trial]:
    """The chosen row first, then the others that meet the SLO, the best first, then the rest by their bound.

    `values` are those of rows that meet the SLO, by their identity. The reasons of these are written.
    """
    sign = question.objective.sign
    feasible = [row for row in rows if row.status == "feasible" and row is not best]
    feasible.sort(key=lambda row: (-sign * values[id(row)], row.statistic("e2el", "mean") or 0.0))
    for row in feasible:
        row.reason = _beaten(row, best, question, values)
    rest = [row for row in rows if row.status != "feasible" and row is not best]
    rest.sort(key=lambda row: (row.status != "infeasible", row.status == "does_not_fit", -(row.rate_bound_rps or 0)))
    return [best, *feasible, *rest]


def _beaten(row: Trial, best: Trial, question: Question, values: Mapping[int, float]) -> str:
    objective, own, chosen = question.objective, values[id(row)], values[id(best)]
    if objective.name == "gpus":
        more = row.candidate.num_gpus - best.candidate.num_gpus
        return f"needs {plural(more, 'GPU')} more" if more else "as many GPUs, and found later"
    if objective.sign > 0:
        return f"{own:.4g} {objective.unit}, {1 - own / chosen:.1%} less than the chosen plan"
    if objective.name == "e2el":
        return f"mean end-to-end latency {own:.4g} s, {own / chosen - 1:.1%} more than the chosen plan"
    return f"{own:.4g} {objective.unit}, {own / chosen - 1:.1%} more than the chosen plan"


def why_none(question: Question, rows: list[Trial]) -> str:
    """What stood in the way of every plan."""
    name, fit = question.study.name, [row for row in rows if row.status != "does_not_fit"]
    if not fit:
        widest = min(rows, key=lambda row: (-row.candidate.gpus_per_instance, row.candidate.key))
        return f"{name}: no plan fits the hardware. The widest one, {widest.candidate.name}: {widest.reason}"
    nearest = max(fit, key=_nearness)
    return (
        f"{name}: {len(fit)} plans fit, none meets the SLO. The nearest, {nearest.candidate.name}, {nearest.reason}. "
        "Relax the SLO, lower the load, or allow more or faster devices"
    )


def _nearness(row: Trial) -> tuple[bool, float, float]:
    """How near a candidate that missed the SLO came to it."""
    attainment = None if row.summary is None else row.summary.slo_attainment
    return row.summary is not None, attainment or 0.0, row.rate_bound_rps or 0.0
