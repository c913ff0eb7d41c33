"""LoRA adapters of prefill and decode pools: each pool has slots and loads of its own, and a request takes its adapter
in both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts, compile_costs
from simtune.costs.ticks import to_ticks
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream
from tests.sim.test_adapters import HARDWARE, MODEL, STEP_S, asking, loads, plan_of

POLICIES = ("vllm-fcfs", "vllm-priority", "sglang", "tensorrt-llm")
MANY: dict[str, Any] = {"slots": 6}
LINK = {"path": "inter_node", "first_token": "prefill"}


def apart(
    prefill: dict[str, Any] | None,
    decode: dict[str, Any] | None,
    costs: Any = None,
    plan: dict[str, Any] | None = None,
    **pool: Any,
) -> Deployment:
    pools = [
        plan_of(lora, **pool).pools[0].model_dump(mode="json", exclude_none=True) | {"name": role[0], "role": role}
        for lora, role in ((prefill, "prefill"), (decode, "decode"))
    ]
    block = {"name": "p", "model": MODEL.name, "pools": pools, "link": LINK, **(plan or {})}
    return deploy(Plan.model_validate(block, strict=False), MODEL, HARDWARE, costs or LinearCosts(STEP_S))


def uses(result: Result) -> dict[str, Any]:
    return {use.pool: use for use in result.summary(noise=False).adapters}


def one_by_one(adapter: list[int], output: int = 5) -> RequestStream:
    n = len(adapter)
    return asking(stream_of(None, [50] * n, [output] * n, users=1), adapter)


def load_ticks(deployment: Deployment, pool: int) -> int:
    costs = deployment.pools[pool].adapters
    assert costs is not None
    return costs.load_ticks(1, 0)


def test_a_request_waits_for_its_adapter_in_both_pools() -> None:
    """Two adapters in turn: one slot for prefill loads in each request, two for decode once for each adapter."""
    deployment = apart({"slots": 1, "host_slots": 2}, {"slots": 2})
    base, adapted = (deployment.simulate(one_by_one(adapter)) for adapter in ([-1] * 6, [0, 1] * 3))
    load = load_ticks(deployment, 0)
    assert load == load_ticks(deployment, 1)
    plain, waited = base.outcome, adapted.outcome
    first = waited.first_token - waited.arrival - (plain.first_token - plain.arrival)
    assert first.tolist() == [load] * 6
    end = waited.finish - waited.first_token - (plain.finish - plain.first_token)
    assert end.tolist() == [load, load, 0, 0, 0, 0]
    of_pools = uses(adapted)
    assert [(use.requests, use.hits, use.loads_from_host) for use in of_pools.values()] == [(6, 0, 6), (6, 4, 2)]
    assert list(of_pools) == ["p", "d"]


def test_each_pool_runs_the_products_of_its_steps() -> None:
    """A prompt of 50 tokens in one, and 4 steps of one token in the other."""
    costs = compile_costs(MODEL, HARDWARE, plan_of(MANY).pools[0], 4096)
    deployment = apart(MANY, MANY, costs)
    base, adapted = (deployment.simulate(one_by_one([number] * 3)) for number in (-1, 0))
    of_products = deployment.pools[0].adapters
    assert of_products is not None
    took = [outcome.finish - outcome.first_token for outcome in (base.outcome, adapted.outcome)]
    assert (took[1] - took[0])[1:].tolist() == [4 * of_products.ticks(1, 1)] * 2
    products = [core.adapters.products for core in adapted.outcome.cores if core.adapters is not None]
    assert products == [3 * of_products.ticks(50, 1), 3 * 4 * of_products.ticks(1, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_load_without_adapters_takes_the_same_time_to_the_tick(policy: str) -> None:
    rng = np.random.default_rng(1)
    stream = stream_of(np.cumsum(rng.exponential(0.01, 60)), rng.integers(1, 900, 60), rng.integers(1, 60, 60))
    batching = {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    plain, slots = (apart(lora, lora, batching=batching).simulate(stream).outcome for lora in (None, MANY))
    for name in ("scheduled", "first_token", "transferred", "finish"):
        assert np.array_equal(getattr(plain, name), getattr(slots, name)), name


def test_a_request_without_a_slot_for_its_decodes_is_passed_by_those_behind_it() -> None:
    """The second waits for the end of the first; the third has its adapter, the fourth none."""
    stream = asking(stream_of([0.0, 0.001, 0.002, 0.003], [20] * 4, [60, 5, 5, 5]), [0, 1, 0, -1])
    outcome = apart(MANY, {"slots": 1, "host_slots": 2}).simulate(stream).outcome
    assert (outcome.finish[[2, 3]] < outcome.finish[0]).all()
    assert outcome.transferred[1] > outcome.finish[0]


@given(loads(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(POLICIES), st.booleans(), st.integers(16, 40))
@settings(max_examples=60, deadline=None)
def test_requests_are_kept_and_no_pool_runs_more_adapters_than_it_has_slots(
    stream: RequestStream, first: int, second: int, policy: str, later: bool, blocks: int
) -> None:
    pool: dict[str, Any] = {
        "batching": {"policy": policy, "max_num_seqs": 5, "max_num_batched_tokens": 64},
        "kv_cache": {"num_blocks": blocks, "block_size": 4},
        "max_model_len": 40,
        "async_scheduling": later,
    }
    slots = [{"slots": n, "host_slots": max(2, n), "storage_bytes_per_s": 1e9} for n in (first, second)]
    deployment = apart(*slots, **pool)
    jumped, stepped = (deployment.simulate(stream, single_steps=single) for single in (False, True))
    for name in ("scheduled", "first_token", "transferred", "finish", "preemptions"):
        assert np.array_equal(getattr(jumped.outcome, name), getattr(stepped.outcome, name)), name
    assert jumped.completed.all()
    assert uses(jumped) == uses(stepped)
    adapter, outcome = stream.adapter, jumped.outcome
    assert adapter is not None
    sent = (stream.output_tokens > 1) & ((adapter >= 0) | (policy == "sglang"))
    if not outcome.preemptions.any():
        for at in outcome.transferred[sent].tolist():
            running = sent & (outcome.transferred <= at) & (at < outcome.finish)
            assert len(set(adapter[running].tolist())) <= second


def test_both_pools_need_slots() -> None:
    for prefill, decode, name in ((None, MANY, "p"), (MANY, None, "d")):
        with pytest.raises(UsageError, match=f"pool {name}: requests ask for LoRA adapters, and the pool has no slots"):
            apart(prefill, decode).simulate(one_by_one([0]))


def test_a_prompt_that_a_decode_instance_computes_itself_takes_a_slot_there_alone() -> None:
    deployment = apart(MANY, {"slots": 2}, plan={"local_prefill": {"below_tokens": 100}})
    result = deployment.simulate(one_by_one([0, 1, 0]))
    assert [(use.pool, use.requests, use.hits) for use in result.summary(noise=False).adapters if use.requests] == [
        ("d", 3, 1)
    ]
    assert result.outcome.finish[2] - result.outcome.arrival[2] == 5 * to_ticks(STEP_S)
