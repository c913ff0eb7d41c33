"""Objectives compare values and bound them without a simulation."""

from __future__ import annotations

import pytest

from simtune.tuner.objectives import OBJECTIVES, PlanFacts


@pytest.mark.parametrize(("objective", "best", "worst"), [("goodput", 111.0, 100.0), ("gpus", 100.0, 111.0)])
def test_a_value_is_better_by_more_than_a_tolerance(objective: str, best: float, worst: float) -> None:
    better = OBJECTIVES[objective].better
    assert better(best, worst)
    assert better(best, worst, 0.1)
    assert not better(best, worst, 0.12)
    assert not better(worst, best, 0.12)
    assert not better(best, best)


def test_no_plan_takes_less_energy_than_its_idle_gpus_at_the_highest_rate() -> None:
    energy, facts = OBJECTIVES["joules_per_token"], PlanFacts(2, None, 100.0, idle_j_per_token=6.0)
    assert energy.best(facts, 3.0, 0.0) == 2.0
    assert energy.best(facts, 0.0, 0.0) == 0.0, "nothing is known of a plan that serves nothing"
