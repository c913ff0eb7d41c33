"""Very short runs of a plan of each cut of the GPUs, to begin a search with a plan that is likely to be good.

They decide nothing. Without them a search begins with the plan of the highest bound; where bounds are loose, as of
engines whose ranks wait for each other, it spends minutes to find out how bad that plan is. A good first plan rules the
others out by runs that are given up early.

On many GPUs 100 requests arrive at once, and no prompt stalls their decodes. So a run has as many requests as arrive in
a LIFETIME, or as a short run has (`simtune.tuner.search.short_runs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from simtune.tuner.bounds.best_case import least_s
from simtune.tuner.objectives import RateObjective
from simtune.tuner.question import SAMPLED_CORES
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import Climb
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.search.short_runs import LIFETIME, as_shown, short_lengths

REQUESTS = 100
"""Fewest requests of a run."""
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
        lengths = short_lengths(judge.question, plan.candidate)
        if not lengths:
            return None
        low = objective.rate_for(plan.facts, value) * STEP if value else None
        if low is None or low < plan.ceiling_rps:
            rate = _highest(judge, plan, low, lengths[-1])
            if rate is not None:
                best, value = plan, rate * objective.worth(plan.facts)
    return best


def _highest(judge: PlanJudge, plan: BoundedCandidate, low: float | None, most: int) -> float | None:
    """Return about the highest rate of a plan, by runs of at most `most` requests; None if it is not above `low`, or
    hardly above nothing."""
    climb, stream = Climb(plan.ceiling_rps, STEP, low), judge.plan_cache.stream(plan.candidate)
    least_e2el_s = least_s("e2el", plan.deployment, stream, SAMPLED_CORES)
    while (rate := climb.rate_rps) is not None:
        # Beside others requests take longer than alone, about twice as long near a limit.
        requests = max(REQUESTS, min(most, math.ceil(2 * LIFETIME * least_e2el_s * rate)))
        climb = climb.after(rate, as_shown(judge.simulated_shorter(plan, rate, requests)))
    return None if climb.met is None else climb.met.rate_rps
