"""Choose between plans at a given load on the mean over fresh draws, as the search ranks plans on one draw.

The best of many plans on one draw is partly the luckiest. Plans whose value on the draw of the search lies within the
spread of the confirmed plan's values are simulated on its fresh draws, of as many requests, so that differences between
plans are not those of requests (common random numbers); the plan with the best mean is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from simtune.tuner.doubt.draw_spread import DEVIATIONS, spread_of_values
from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.confirm import ConfirmedPlan, Confirmer

MOST_RIVALS = 3
"""Plans that are compared with the confirmed plan: those with the best values on the draw of the search."""


def best_on_draws(
    question: Question, confirmer: Confirmer, confirmed: ConfirmedPlan, feasible: Sequence[BoundedCandidate]
) -> ConfirmedPlan:
    """Return the plan with the best mean over the fresh draws of a confirmed plan; this plan itself if rates are
    searched, or if fewer than two draws differ."""
    if confirmed.draws is None or len(confirmed.draws.values) < 2:
        return confirmed
    means = {id(confirmed.plan): _mean(confirmed.draws.values)}
    compared = [confirmed.plan]
    for rival in _rivals(question, confirmed, feasible):
        values = confirmer.values_on_draws(rival, confirmed.draws.requests)
        if values:
            means[id(rival)] = _mean(values)
            compared.append(rival)
    sign = question.objective.sign
    for plan in sorted(compared, key=lambda plan: -sign * means[id(plan)]):
        # The sort is stable, so of equal means the plan that was confirmed stays.
        if plan is confirmed.plan:
            return confirmed
        if (chosen := confirmer.on_all_cores(plan)) is not None:
            return chosen
    return confirmed


def _rivals(
    question: Question, confirmed: ConfirmedPlan, feasible: Sequence[BoundedCandidate]
) -> list[BoundedCandidate]:
    """Return the plans whose values lie within the spread of the confirmed plan's, the best first. Plans that must do
    the same as another one are left out."""
    objective, row = question.objective, confirmed.plan.row
    assert confirmed.draws is not None
    assert row.summary is not None
    value = objective.value(confirmed.plan.facts, row.judged)
    spread = spread_of_values(confirmed.draws.values, confirmed.draws.requests, row.summary.requests)
    if spread == 0 or not 0 < value < math.inf:
        return []
    near: list[tuple[float, BoundedCandidate]] = []
    for plan in feasible:
        if plan is not confirmed.plan and not plan.row.same_as:
            rival = objective.value(plan.facts, plan.row.judged)
            if 0 < rival < math.inf and abs(math.log(rival / value)) <= DEVIATIONS * spread:
                near.append((rival, plan))
    near.sort(key=lambda pair: (-objective.sign * pair[0], pair[1].order()))
    return [plan for _, plan in near[:MOST_RIVALS]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
