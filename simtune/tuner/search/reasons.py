"""Sentences that explain why a plan was chosen, and why the others were not."""

from __future__ import annotations

from collections.abc import Mapping

from simtune.errors import Infeasible, plural
from simtune.specs.plan_words import in_words
from simtune.tuner.question import Question
from simtune.tuner.trial import Trial


def praise(row: Trial, question: Question, value: float) -> str:
    """Return why the chosen plan was chosen."""
    confidence = question.study.slo.confidence
    return _praise(row, question, value) + ("" if confidence is None else f", in {confidence:.0%} of the worlds")


def _praise(row: Trial, question: Question, value: float) -> str:
    objective = question.objective
    if objective.searches_rate:
        return f"meets the SLO up to {row.rate_rps:.4g} requests/s, {value:.4g} {objective.unit}"
    if objective.name == "e2el":
        return f"meets the SLO with a mean end-to-end latency of {value:.4g} s"
    if objective.name == "family":
        return f"meets the SLO with a mean latency of a family of {value:.4g} s"
    if objective.name == "family_active":
        return f"meets the SLO with a mean latency of a family without pauses of {value:.4g} s"
    if objective.searches_users:
        return f"meets the SLO with up to {row.judged.users or 0:,} users, {value:.4g} {objective.unit}"
    if objective.name == "makespan":
        return f"meets the SLO and is done after {value:.4g} s"
    if objective.name == "gpus":
        return f"meets the SLO on {plural(row.candidate.num_gpus, 'GPU')}"
    return f"meets the SLO at {value:.4g} {objective.unit}"


def no_better(question: Question, row: Trial, best: float, leader: Trial | None, value: float) -> str:
    """Return why a plan was not simulated: the best it could reach, beside the leader and its value."""
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
    """Return why a class of plans was not opened: the best that any allocation of it could reach, beside the leader."""
    objective = question.objective
    reached = "no plan met the SLO" if leader is None else f"{leader.candidate.name} comes to {value:.4g}"
    return f"no allocation of {name} is better than {best or 0.0:.4g} {objective.unit}; {reached}"


def ranked(rows: list[Trial], best: Trial, question: Question, values: Mapping[int, float]) -> list[Trial]:
    """Return the chosen row first, then the other rows that meet the SLO, the best first, then the remaining rows by
    bound.

    `values` are those of rows that meet the SLO, by their identity. The reasons of these rows are written.
    """
    sign = question.objective.sign
    feasible = [row for row in rows if row.status == "feasible" and row is not best]
    feasible.sort(key=lambda row: (-sign * values[id(row)], row.statistic("e2el", "mean") or 0.0))
    for row in feasible:
        row.reason = _beaten(row, best, question, values)
    other_rows = [row for row in rows if row.status != "feasible" and row is not best]
    other_rows.sort(
        key=lambda row: (row.status != "infeasible", row.status == "does_not_fit", -(row.rate_bound_rps or 0))
    )
    return [best, *feasible, *other_rows]


def _beaten(row: Trial, best: Trial, question: Question, values: Mapping[int, float]) -> str:
    objective, value, chosen = question.objective, values[id(row)], values[id(best)]
    if row.drawn and best.drawn and row.drawn != best.drawn:
        value, chosen = (sum(by_draw) / len(by_draw) for by_draw in (row.drawn, best.drawn))
        return (
            f"{value:.4g} {objective.unit} on the mean of {len(row.drawn)} fresh draws, "
            f"{abs(value / chosen - 1):.1%} {'less' if objective.sign > 0 else 'more'} than the chosen plan"
        )
    if objective.name == "gpus":
        more = row.candidate.num_gpus - best.candidate.num_gpus
        return f"needs {plural(more, 'GPU')} more" if more else "as many GPUs, and found later"
    if objective.sign > 0:
        return f"{value:.4g} {objective.unit}, {1 - value / chosen:.1%} less than the chosen plan"
    if objective.name == "e2el":
        return f"mean end-to-end latency {value:.4g} s, {value / chosen - 1:.1%} more than the chosen plan"
    if objective.name == "family_active":
        return f"meets the SLO with a mean latency of a family without pauses of {value:.4g} s"
    if objective.searches_users:
        return f"meets the SLO with up to {row.judged.users or 0:,} users, {value:.4g} {objective.unit}"
    if objective.name == "makespan":
        return f"is done after {value:.4g} s, {value / chosen - 1:.1%} more than the chosen plan"
    return f"{value:.4g} {objective.unit}, {value / chosen - 1:.1%} more than the chosen plan"


class NoPlan(Infeasible):
    """No plan of a study fits, or none meets its SLO. `nearest` is the plan that the message names."""

    def __init__(self, message: str, nearest: Trial) -> None:
        super().__init__(message)
        self.nearest = nearest


def no_plan(question: Question, rows: list[Trial]) -> NoPlan:
    """Return the error for a study that no plan meets: no plan fits, or how the nearest plan misses the SLO."""
    name, fit = question.study.name, [row for row in rows if row.status != "does_not_fit"]
    if not fit:
        widest = min(rows, key=lambda row: (-row.candidate.gpus_per_instance, row.candidate.key))
        return NoPlan(f"{name}: no plan fits the hardware. The widest one, {_named(widest)}: {widest.reason}", widest)
    nearest = max(fit, key=_nearness)
    return NoPlan(
        f"{name}: {len(fit)} plans fit, none meets the SLO. The nearest, {_named(nearest)}, {nearest.reason}. "
        "Relax the SLO, lower the load, or allow more or faster devices",
        nearest,
    )


def out_of_time(question: Question, simulations: int) -> str:
    """Return why a search whose time is up has no plan."""
    return (
        f"{question.study.name}: no plan met the SLO before the time was up, after "
        f"{plural(simulations, 'simulation')}; allow more time, search fewer plans, or relax the SLO"
    )


def _named(row: Trial) -> str:
    name = row.candidate.name
    return f"{in_words(name)} ({name})"


def _nearness(row: Trial) -> tuple[bool, float, float]:
    """Return a sorting key: larger for a candidate that came nearer to the SLO."""
    attainment = None if row.summary is None else row.summary.slo_attainment
    return row.summary is not None, attainment or 0.0, row.rate_bound_rps or 0.0
