"""Decisions: the plans around one, their order and what choosing wrongly costs."""

import numpy as np
import pytest

from simtune.errors import UsageError
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Pool
from simtune.specs.schemes import Chain
from simtune.validation.judge.decision import PlanOutcome, around, decide, kendall

PLAN = Plan(
    name="p",
    model="llama-3.1-8b",
    pools=(Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=64, max_num_batched_tokens=512)),),
)


def outcomes(predicted: list[float], measured: list[tuple[float, ...]]) -> list[PlanOutcome]:
    pairs = zip(predicted, measured, strict=True)
    return [PlanOutcome(plan=f"p{i}", predicted_s=p, measured_s=m) for i, (p, m) in enumerate(pairs)]


def test_neighbours_differ_by_one_setting_then_by_two() -> None:
    plans = around(PLAN, 12)
    assert len({plan.name for plan in plans}) == 12
    assert len({plan.pools[0].model_dump_json() for plan in plans}) == 12
    assert plans[0].pools == PLAN.pools
    names = [plan.name.removeprefix("p.") for plan in plans]
    assert names[:7] == ["chosen", "seats32", "budget256", "no-chunked", "prefix", "seats128", "budget1024"]
    by_name = dict(zip(names, plans, strict=True))
    assert by_name["seats32"].pools[0].batching.max_num_seqs == 32
    assert by_name["seats32-budget256"].pools[0].batching.max_num_batched_tokens == 256
    switched = by_name["no-chunked"].pools[0]
    assert switched.batching.chunked_prefill is False
    with pytest.raises(UsageError, match="there are only"):
        around(PLAN, 1000)


CHAIN = {"drafter": {"kind": "draft_model", "model": "d"}, "scheme": {"kind": "chain", "tokens": 2}}


def drafting(tokens: int) -> Plan:
    chain = {**CHAIN, "scheme": {"kind": "chain", "tokens": tokens}, "acceptance": "a"}
    pool = PLAN.pools[0].model_copy(update={"max_model_len": 2048})
    return PLAN.model_copy(update={"pools": (pool.model_validate({**pool.model_dump(), "speculation": chain}),)})


def test_of_every_knob_of_the_plan_there_is_one_among_the_first() -> None:
    plans = {plan.name.removeprefix("p."): plan.pools[0] for plan in around(drafting(2), 6)}
    assert list(plans) == ["chosen", "seats32", "budget256", "draft1", "no-chunked", "prefix"]
    assert plans["draft1"].speculation is not None
    assert plans["draft1"].speculation.scheme == Chain(tokens=1)
    assert plans["prefix"].kv_cache.prefix_caching is True
    whole = plans["no-chunked"].batching
    assert (whole.chunked_prefill, whole.max_num_batched_tokens) == (False, 2048), "room for the longest prompt"


def test_one_draft_less_than_one_is_none() -> None:
    plans = {plan.name.removeprefix("p."): plan.pools[0] for plan in around(drafting(1), 9)}
    assert plans["no-draft"].speculation is None
    assert plans["draft2"].speculation is not None


def test_what_the_engine_refuses_is_left_out() -> None:
    def check(plan: Plan) -> None:
        if plan.pools[0].kv_cache.prefix_caching or not plan.pools[0].batching.chunked_prefill:
            raise UsageError("has it not")

    names = [plan.name.removeprefix("p.") for plan in around(drafting(2), 6, check)]
    assert names == ["chosen", "seats32", "budget256", "draft1", "seats128", "budget1024"]


def test_no_plan_is_there_twice() -> None:
    plans = around(drafting(2), 24)
    assert len({plan.pools[0].model_dump_json() for plan in plans}) == 24


def test_tau_is_that_of_scipy() -> None:
    from scipy import stats  # slow to import

    generator = np.random.default_rng(0)
    for _ in range(20):
        x, y = generator.integers(0, 6, (2, 9)).astype(float)
        assert kendall(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)
    assert kendall(np.ones(4), np.arange(4.0)) is None


def test_the_right_order_has_no_regret() -> None:
    decision = decide(outcomes([3.0, 1.0, 2.0], [(3.1, 3.2), (1.0, 1.1), (2.0, 2.2)]), 4.0)
    assert [p.plan for p in decision.plans] == ["p1", "p2", "p0"]
    assert (decision.best, decision.tau, decision.regret) == ("p1", 1.0, 0.0)
    assert (decision.tau_low, decision.tau_high, decision.regret_high) == (1.0, 1.0, 0.0)


def test_a_wrong_choice_costs_what_the_best_would_have_saved() -> None:
    decision = decide(outcomes([1.0, 2.0], [(3.0,), (2.0,)]), None)
    assert decision.chosen.plan == "p0"
    assert (decision.best, decision.tau) == ("p1", -1.0)
    assert decision.regret == decision.regret_low == decision.regret_high == pytest.approx(0.5)


def test_noise_of_the_repeats_is_in_the_intervals() -> None:
    decision = decide(outcomes([1.0, 1.1], [(1.0, 1.6, 1.2), (1.1, 1.3, 1.5)]), None, seed=1)
    assert decision.tau == 1.0
    assert decision.tau_low == -1.0
    assert decision.regret_low == 0.0
    assert decision.regret_high > 0.1
    assert decision == decide(outcomes([1.0, 1.1], [(1.0, 1.6, 1.2), (1.1, 1.3, 1.5)]), None, seed=1)
