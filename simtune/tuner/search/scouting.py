"""Very short runs of a plan of each cut of the GPUs, to begin a search with a plan that is likely to be good.

They decide nothing. Without them a search begins with the plan of the highest bound; where bounds are loose, as of
engines whose ranks wait for each other, it spends minutes to find out how bad that plan is. A good first plan rules the
others out by runs that are given up early.
"""

from __future__ import annotations

from collections.abc import Iterable

from simtune.tuner.objectives import RateObjective
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import Climb
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.search.short_runs import short_lengths

REQUESTS = 100
"""Requests of a run."""
STEP = 1.25
"""Ratio of rates that count as equal."""


def favourite(judge: PlanJudge, plans: Iterable[BoundedCandidate]) -> BoundedCandidate | None:
    """Return the plan that serves most in very short runs, of the most promising plan of each cut of the GPUs.

    Return None if there is only one cut, or if short runs do not resemble full ones.
    """
    objective, of_cuts = judge.question.objective, dict[object, BoundedCandidate]()
    for plan in sorted(plans, key=BoundedCandidate.order):
        of_cuts.setdefault(plan.candidate.cut, plan)
    if not isinstance(objective, RateObjective) or len(of_cuts) < 2:
        return None
    best, value = None, 0.0
    for plan in of_cuts.values():
        if not short_lengths(judge.question, plan.candidate):
            return None
        low = objective.rate_for(plan.facts, value) * STEP if value else None
        if low is None or low < plan.ceiling_rps:
            rate = _highest(judge, plan, low)
            if rate is not None:
                best, value = plan, rate * objective.worth(plan.facts)
    return best


def _highest(judge: PlanJudge, plan: BoundedCandidate, low: float | None) -> float | None:
    """Return about the highest rate of a plan; None if it is not above `low`, or hardly above nothing."""
    climb = Climb(plan.ceiling_rps, STEP, low)
    while (rate := climb.rate_rps) is not None:
        climb = climb.after(rate, judge.simulated_shorter(plan, rate, REQUESTS))
    return None if climb.met is None else climb.met.rate_rps
