"""Objectives compare values and bound them without a simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simtune.tuner.doubt.draw_spread import CAPACITY
from simtune.tuner.objectives import OBJECTIVES, Judged, Limit, Miss, PlanFacts, PoolHours, RateObjective, RunHours
from simtune.tuner.search.draws import MOST_REQUESTS


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


PLAN = PlanFacts(num_gpus=4, usd_per_hour=12.0, output_tokens=100.0, idle_j_per_token=60.0)
JUDGED = Judged(
    rate_rps=8.0,
    output_tokens_per_s=750.0,
    e2el_s=2.5,
    tokens_per_s_per_user=40.0,
    joules_per_token=7.0,
    makespan_s=90.0,
    family_s=11.0,
    family_active_s=6.0,
    users=30,
)


VALUES = {
    # Served at 8 requests/s, and at 10 at most; latencies are 2 s at least.
    "goodput": (8.0, 10.0),
    "goodput_per_gpu": (8 / 4, 10 / 4),
    "goodput_per_dollar": (8 * 3600 / 12, 10 * 3600 / 12),
    "gpus": (4.0, 4.0),
    "usd_per_hour": (12.0, 12.0),
    # 1/300 USD a second, for 800 or 1,000 tokens.
    "usd_per_million_tokens": (1e6 / 300 / 800, 1e6 / 300 / 1000),
    # 4 GPUs, for as many tokens a second.
    "gpu_hours_per_million_tokens": (1e6 * 4 / 3600 / 800, 1e6 * 4 / 3600 / 1000),
    "e2el": (2.5, 2.0),
    "makespan": (90.0, 2.0),
    "family": (11.0, 2.0),
    "family_active": (6.0, 2.0),
    "users": (30.0, MOST_REQUESTS),
    "users_per_gpu": (30 / 4, MOST_REQUESTS / 4),
    "joules_per_token": (7.0, 60 / 10),
    # 8 x 100 / 4 tokens/s/GPU at 40 tokens/s/user.
    "pareto": (200.0 * 40, math.inf),
}
"""Value of PLAN as it was judged, and the best that is possible, by the name of the objective."""


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_of_a_plan(name: str) -> None:
    objective, (value, best) = OBJECTIVES[name], VALUES[name]
    assert objective.value(PLAN, JUDGED) == pytest.approx(value)
    assert objective.best(PLAN, 10.0, 2.0) == pytest.approx(best)
    assert not objective.better(objective.value(PLAN, JUDGED), objective.best(PLAN, 10.0, 2.0))
    if isinstance(objective, RateObjective):
        assert objective.worth(PLAN) == pytest.approx(value / 8)
        assert objective.rate_for(PLAN, value) == pytest.approx(8.0)
        # Another draw of 400 requests may allow a higher rate than the 9 at which one missed; the capacity may not.
        allowed = 9 * CAPACITY.allowance(400)
        assert objective.reaches(PLAN, Miss(9.0, 400), CAPACITY, 1e9) == pytest.approx(allowed * value / 8)
        assert objective.reaches(PLAN, Miss(9.0, 400), CAPACITY, 9.5) == pytest.approx(9.5 * value / 8)


def test_costs_of_a_run_are_of_the_gpu_hours_that_pools_held() -> None:
    """A pool of 8 GPUs that held them for 6 of 16 GPU-hours, beside one of 2 that is always there."""
    pools = (PoolHours("scaled", 8, 3.0, True, 4.5), PoolHours("fixed", 2, 1.0, False, 4.0))
    plan = replace(PLAN, run=RunHours(pools, 2e6))
    run = replace(JUDGED, run_hours=2.0, pool_gpu_hours={"scaled": 6.0}, output_tokens=2e6)
    usd, hours = OBJECTIVES["usd_per_million_tokens"], OBJECTIVES["gpu_hours_per_million_tokens"]
    assert usd.value(plan, run) == pytest.approx((6 * 3 + 4 * 1) / 2)
    assert hours.value(plan, run) == pytest.approx((6 + 4) / 2)
    assert usd.best(plan, 1.0, 0.0) == pytest.approx((4.5 * 3 + 4 * 1) / 2)
    assert hours.best(plan, 1.0, 0.0) == pytest.approx((4.5 + 4) / 2)
    assert hours.value(plan, replace(run, output_tokens=0.0)) == math.inf


def test_prices_are_of_tokens_that_were_served_where_more_may_be_offered() -> None:
    price = OBJECTIVES["usd_per_million_tokens"]
    served = 1e6 / 300 / 750
    assert price.value(replace(PLAN, served_only=True), JUDGED) == pytest.approx(served)
    assert price.value(PLAN, replace(JUDGED, rate_rps=None)) == pytest.approx(served), "a closed loop"
    assert price.value(PLAN, replace(JUDGED, rate_rps=None, output_tokens_per_s=None)) == math.inf
    assert price.of_allocation(12.0, 800.0) == pytest.approx(1e6 / 300 / 800)
    assert OBJECTIVES["goodput_per_dollar"].of_allocation(0.5, 800.0) == 1800.0
    assert OBJECTIVES["goodput"].of_allocation(0.5, 800.0) == 0.5
    assert [OBJECTIVES["gpus"].of_allocation(amount, 800.0) for amount in (3.0, 3.0000001, 3.1)] == [3.0, 3.0, 4.0]


@pytest.mark.parametrize("name", ["e2el", "makespan", "family", "family_active", "joules_per_token"])
def test_without_a_latency_nothing_is_worse(name: str) -> None:
    assert OBJECTIVES[name].value(PLAN, Judged(None, None, None)) == math.inf


def test_a_limit_says_how_a_value_breaks_it() -> None:
    dear, slow = Limit(OBJECTIVES["usd_per_hour"], 10.0), Limit(OBJECTIVES["goodput"], 9.0)
    assert "usd_per_hour ≤ 10 USD/h" in dear.violated(12.0)
    assert "12 USD/h" in dear.violated(12.0)
    assert "goodput ≥ 9 requests/s" in slow.violated(8.0, "at best")
    assert "at best 8 requests/s" in slow.violated(8.0, "at best")
    assert (dear.violated(10.0), slow.violated(9.0)) == ("", "")
