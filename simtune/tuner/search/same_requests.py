"""Comparison of plans on the draw of the search, on which all of them are simulated.

Fresh draws mostly take something off the rate of the plan that they confirm, and would take as much off the rate of any
other that the same limit of the SLO ends: on busy draws both meet less. So other plans are held against what a
confirmed plan reaches on the draw of the search, and need not be looked at again when its rate falls. A plan whose rate
another limit ends is looked at again if it may be better than the confirmed rate by more than a step of the tolerance;
and so are all plans if draws took more off a plan than they differ by (`simtune.tuner.doubt.draw_spread`),
which says that the plan did too well on the draw of the search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from simtune.tuner.doubt.same_draw import (
    Beginning,
    ChosenOnDraw,
    Gaps,
    JudgedRun,
    Lengths,
    PlanOnDraw,
    RulingRun,
    decisive,
    rates_met,
    ruling,
)
from simtune.tuner.objectives import RateObjective
from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.confirm import ConfirmedPlan
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.search.short_runs import short_lengths
from simtune.tuner.trial import Attempt, Trial

LESS = (0, 1, 2, 4, 8)
"""Steps below the highest rate of the chosen plan at which short runs of it are made until one meets the SLO."""


def value_on_draw(question: Question, best: BoundedCandidate) -> float:
    """Return the value that other plans have to exceed on the draw of the search: that of the best plan there, or what
    fresh draws leave of it if they took more than draws differ by."""
    objective, rate_rps = question.objective, best.row.rate_rps
    if not isinstance(objective, RateObjective) or best.met_rps is None or rate_rps is None:
        return objective.value(best.facts, best.row.judged)
    common = best.met_rps <= rate_rps * question.draw_spread.allowance(question.requests)
    return (best.met_rps if common else rate_rps) * objective.worth(best.facts)


def ended_otherwise(
    question: Question, leader: BoundedCandidate | None, plans: Iterable[BoundedCandidate]
) -> list[tuple[BoundedCandidate, float]]:
    """Return the plans that were simulated, whose rate another limit ends than that of the confirmed plan `leader`, and
    that may be better than it by more than two steps of the tolerance, each with the rate at which it would be."""
    objective, step = question.objective, 1 + question.study.search.rate_tolerance
    if leader is None or not isinstance(objective, RateObjective):
        return []
    enough = objective.value(leader.facts, leader.row.judged) * step**2
    return [
        (plan, objective.rate_for(plan.facts, enough))
        for plan in plans
        if plan.row.status == "infeasible"
        and not plan.given_up
        and plan.tightest not in ("", leader.tightest)
        and plan.row.best is not None
        and objective.better(plan.row.best, enough)
    ]


def show_on_draw(
    question: Question, judge: PlanJudge, confirmed: ConfirmedPlan, plans: Sequence[BoundedCandidate]
) -> None:
    """Simulate the chosen plan on the first requests of the draw on which short runs ruled other plans out that might
    be better by what they reach on any, and write into its row at what rates it meets the SLO there."""
    objective, chosen, step = question.objective, confirmed.plan, 1 + question.study.search.rate_tolerance
    if not isinstance(objective, RateObjective):
        return
    lengths, by_name = lengths_of(question, chosen), {plan.candidate.name: plan for plan in plans}
    enough = objective.value(chosen.facts, chosen.row.judged) * step
    open_plans = (plan for plan in plans if plan is not chosen and plan.reaches is not None and plan.reaches > enough)
    runs = [_ruled_out(question, plan, by_name) for plan in open_plans]
    beginnings = {run.on for run in runs if run is not None} - {*rates_met(chosen.row.tried, lengths)}
    for beginning in sorted(beginnings):
        chosen.row.tried += _met_shorter(question, judge, confirmed, beginning)


def gaps(
    question: Question, chosen: BoundedCandidate, plans: Sequence[BoundedCandidate], rows: Iterable[Trial]
) -> Gaps | None:
    """Return by how much another plan is better at most than the chosen one; None unless rates are searched.

    `plans` were bounded one by one; of `rows` those count besides whose class was not opened.
    """
    objective = question.objective
    if not isinstance(objective, RateObjective):
        return None
    by_name = {plan.candidate.name: plan for plan in plans}
    rivals = [
        plan_on_draw(objective, plan, plan.row.best, _ruled_out(question, plan, by_name))
        for plan in plans
        if plan is not chosen and plan.row.best is not None
    ]
    rivals += [PlanOnDraw(row.best) for row in rows if row.allocation and row.best is not None]
    value = objective.value(chosen.facts, chosen.row.judged)
    return chosen_on_draw(question, objective, chosen, value, chosen.row.tried).gaps(rivals, question.draw_spread)


def chosen_on_draw(
    question: Question, objective: RateObjective, plan: BoundedCandidate, value: float, runs: Iterable[JudgedRun]
) -> ChosenOnDraw:
    """Return what is known of the chosen plan by its runs."""
    lengths = lengths_of(question, plan)
    return ChosenOnDraw(value, objective.worth(plan.facts), rates_met(runs, lengths), lengths.full)


def lengths_of(question: Question, plan: BoundedCandidate) -> Lengths:
    """Return the requests of a full run of a plan."""
    return Lengths(question.requests, question.num_requests(plan.candidate))


def _ruled_out(question: Question, plan: BoundedCandidate, by_name: Mapping[str, BoundedCandidate]) -> RulingRun | None:
    """Return the simulation that decides the bound of a plan; None if there is none."""
    source = by_name.get(plan.row.same_as)
    if source is None:
        lengths = lengths_of(question, plan)
        return ruling(decisive(plan.row.tried, lengths, question.draw_spread), lengths)
    implied = (run for run in source.row.tried if _implies(run, plan))
    return ruling(next(implied, None), lengths_of(question, source))


def _implies(run: Attempt, plan: BoundedCandidate) -> bool:
    """True if a run of another plan is the one from which follows that a plan misses the SLO."""
    return plan.missed is not None and not run.met and not run.draw and run.rate_rps == plan.missed.rate_rps


def plan_on_draw(
    objective: RateObjective, plan: BoundedCandidate, reaches: float, missed: RulingRun | None
) -> PlanOnDraw:
    """Return what is known of a plan."""
    return PlanOnDraw(reaches, objective.worth(plan.facts), missed)


def _met_shorter(
    question: Question, judge: PlanJudge, confirmed: ConfirmedPlan, beginning: Beginning
) -> Iterator[Attempt]:
    """Yield a simulation in which a plan meets the SLO on the first requests of the draw of the search: on all cores
    for plans of which all are simulated."""
    plan, requests = confirmed.plan, beginning.requests
    simulated = {question.num_requests(plan.candidate, n): n for n in short_lengths(question, plan.candidate)}
    same_share = simulated.get(requests) == beginning.simulated
    all_cores = not same_share and beginning.simulated == requests < question.requests
    if beginning.draw or plan.met_rps is None or not (same_share or all_cores):
        return
    deployment = confirmed.deployment if question.study.slo.confidence is None else plan.deployment
    step = 1 + question.study.search.rate_tolerance
    for steps in LESS:
        rate_rps = plan.met_rps / step**steps
        if same_share:
            finding = judge.simulated_shorter(plan, rate_rps, beginning.simulated)
        else:
            finding = judge.simulated_on_all_cores(plan, deployment, rate_rps, requests)
        if finding.met:
            yield Attempt(rate_rps, True, all_cores=all_cores, requests=requests)
            return
