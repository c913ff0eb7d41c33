"""Cascade attention under load: what steps take that attend once to a shared beginning, and when they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.bounds import CostBounds
from simtune.costs.compiled import CompiledCosts, LinearCosts, compile_costs
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.shared_prefix import SharedPrefixCosts
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result
from simtune.sim.cascade import CascadeRule
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
BLOCK, LONGEST = 16, 8192


def plan_of(**pool: Any) -> Plan:
    usual = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 8192},
        "kv_cache": {"num_blocks": 20_000, "block_size": BLOCK, "prefix_caching": True},
        "max_model_len": LONGEST,
        "async_scheduling": False,
    }
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [usual | pool]}, strict=False)


@pytest.fixture(scope="module")
def costs() -> CompiledCosts:
    return compile_costs(MODEL, HARDWARE, plan_of(cascade_attention=True).pools[0], LONGEST)


def deployed(costs: Any, **pool: Any) -> Deployment:
    return deploy(plan_of(**pool), MODEL, HARDWARE, costs)


def sharing(requests: int, shared: int, own: int, output: int, seed: int = 0, gap_s: float = 0.0) -> RequestStream:
    """Return a first request that computes the prefix, and others a second later that find it."""
    rng = np.random.default_rng(seed)
    arrivals = np.concatenate([[0.0], 1.0 + np.cumsum(rng.exponential(gap_s, requests))]) if gap_s else (
        np.concatenate([[0.0], np.ones(requests)])
    )  # fmt: skip
    n = requests + 1
    stream = stream_of(arrivals, np.full(n, shared + own), np.array([2000, *[output] * requests]))
    names = tuple(range(shared // BLOCK))
    stream = RequestStream(**{
        **{name: getattr(stream, name) for name in stream.__dataclass_fields__},
        "hash_ids": (names,) * n, "block_tokens": BLOCK,
    })  # fmt: skip
    return stream


@pytest.mark.parametrize(("decodes", "own", "shared"), [(8, 100, 256), (32, 1000, 2048), (64, 37, 7000)])
def test_a_step_is_that_of_its_operators(costs: CompiledCosts, decodes: int, own: int, shared: int) -> None:
    """Beside a direct call of the step model; and to the tick the suffixes' step and the call for what is shared."""
    model = costs.tables.model
    context = decodes * (own + shared)
    work = StepWork(decodes, context, (), decodes, shared_tokens=shared)
    ticks, slope, span = SharedPrefixCosts(costs, shared).decode(decodes, context)
    assert ticks / TICKS_PER_SECOND == pytest.approx(model.seconds(work), rel=0.005)
    assert ticks == costs.decode(decodes, decodes * own)[0] + to_ticks(model.attention.shared_s(shared, decodes))
    assert SharedPrefixCosts(costs, shared).decode(decodes, context + decodes)[0] == ticks + slope
    assert span >= 1
    assert SharedPrefixCosts(costs, shared).mixed(decodes, context, (), decodes) == ticks


def test_a_step_with_prompts_is_that_of_its_operators(costs: CompiledCosts) -> None:
    decodes, own, shared, chunks = 32, 500, 2048, ((2048, 200), (2048, 64))
    context = decodes * (own + shared)
    ticks = SharedPrefixCosts(costs, shared).mixed(decodes, context, chunks, decodes + 2)
    work = StepWork(decodes, context, chunks, decodes + 2, shared_tokens=shared)
    assert ticks / TICKS_PER_SECOND == pytest.approx(costs.tables.model.seconds(work), rel=0.01)


def test_nothing_shared_is_the_plain_step_and_a_call_for_nothing(costs: CompiledCosts) -> None:
    nothing = SharedPrefixCosts(costs, 0)
    for decodes, context in ((8, 900), (64, 100_000)):
        ticks, *growth = costs.decode(decodes, context)
        call = to_ticks(costs.tables.model.attention.prefill_call_s + 0.0)
        assert nothing.decode(decodes, context)[0] >= ticks + call
        assert nothing.decode(decodes, context)[0] - nothing.shared_ticks(decodes, mixed=False) == ticks
        assert [*nothing.decode(decodes, context)[1:]] == growth


def test_the_engine_compares_waves_of_thread_blocks() -> None:
    """32 heads share 8 of keys on 132 processors. One batch of 64 queries: a wave of 32 tiles, beside 64 x 8 x 32 / 132
    waves; 8 queries against 2 tiles: 2 beside 1. Heads that share no keys have no such choice."""
    rule = CascadeRule(32, 8, 132)
    assert rule._has_fewer_waves(64, 4096)
    assert not rule._has_fewer_waves(8, 256)


def tokens_alike(one: Result, other: Result) -> bool:
    return all(
        np.array_equal(getattr(one.outcome, name), getattr(other.outcome, name)) for name in ("first_token", "finish")
    )


def test_requests_that_share_nothing_or_little_are_timed_the_same_to_the_tick(costs: CompiledCosts) -> None:
    for stream in (sharing(20, 0, 600, 40), sharing(20, 240, 300, 40), sharing(6, 2048, 300, 40)):
        plain, cascade = (deployed(costs, cascade_attention=on).simulate(stream) for on in (None, True))
        assert tokens_alike(plain, cascade)


def test_requests_that_share_much_decode_faster_as_the_operators_state(costs: CompiledCosts) -> None:
    """Steps of 41 requests: as many tokens in the same steps, each as long as the call for its batch."""
    stream = sharing(40, 4096, 64, 60)
    plain, cascade = (deployed(costs, cascade_attention=on).simulate(stream) for on in (None, True))
    assert np.nanmean(cascade.tpot_s[1:]) < 0.8 * np.nanmean(plain.tpot_s[1:])
    together = np.flatnonzero(cascade.outcome.intervals[:, 3] == 41)
    first, slope, steps, _ = cascade.outcome.intervals[together[-1]].tolist()
    shared = SharedPrefixCosts(costs, 4096)
    lengths = {shared.decode(41, context)[0] for context in range(41 * 4096, 41 * 6500)}
    assert first in lengths
    assert steps >= 1
    assert slope >= 0


@given(st.integers(0, 20), st.sampled_from([0.0, 0.004]), st.sampled_from([256, 1024]))
@settings(max_examples=6, deadline=None)
def test_jumps_are_single_steps(costs: CompiledCosts, seed: int, gap_s: float, shared: int) -> None:
    stream = sharing(24, shared, 48, 25, seed, gap_s)
    for later in (False, True):
        deployment = deployed(costs, cascade_attention=True, async_scheduling=later)
        assert tokens_alike(deployment.simulate(stream), deployment.simulate(stream, single_steps=True))


def test_bounds_count_no_attention_of_decodes(costs: CompiledCosts) -> None:
    plain = compile_costs(MODEL, HARDWARE, plan_of().pools[0], LONGEST)
    assert CostBounds(plain.tables).context_cost_s() > 0
    assert CostBounds(costs.tables).context_cost_s() == CostBounds(costs.tables).least_attention_s() == 0


@pytest.mark.parametrize(("model", "pool", "message"), [
    ("llama-3.1-8b", {"kv_cache": {}}, "set kv_cache.prefix_caching, or leave it out"),
    ("gemma-3-27b", {}, "needs full attention in all layers, and gemma-3-27b has other kinds"),
    ("llama-3.1-8b", {"research": {"kv_policy": {"kept": 0.5}}}, "and research.kv_policy do not go together"),
    ("llama-3.1-8b", {"batching": {"policy": "sarathi", "max_num_seqs": 4, "max_num_batched_tokens": 8192}},
     "policy sarathi has no cascade_attention; leave it out, or choose vllm-fcfs or vllm-priority"),
])  # fmt: skip
def test_what_it_does_not_go_with_is_refused(model: str, pool: dict[str, Any], message: str) -> None:
    plan = plan_of(cascade_attention=True, **pool)
    with pytest.raises(Infeasible, match=message):
        deploy(plan, load_model(model), HARDWARE)


def test_costs_of_a_formula_have_no_attention_to_share() -> None:
    with pytest.raises(UsageError, match="needs step costs by operators"):
        deployed(LinearCosts(0.01), cascade_attention=True).simulate(sharing(3, 256, 10, 5))


def test_the_step_model_of_a_pool_takes_no_notice() -> None:
    """Operators are the same; the core decides."""
    work = StepWork(16, 16 * 4000, (), 16)
    pools: list[Pool] = [plan_of(cascade_attention=on).pools[0] for on in (None, True)]
    first, second = (StepModel(MODEL, HARDWARE, pool).seconds(work) for pool in pools)
    assert first == second
