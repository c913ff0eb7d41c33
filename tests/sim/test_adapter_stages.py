"""LoRA adapters in a pipeline of stages: its virtual engines share the slots of the instance."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts, compile_costs
from simtune.engine.adapters import SharedSlots
from simtune.engine.request import Request
from simtune.errors import Infeasible
from simtune.results.outcome import Outcome
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream
from tests.sim.test_adapters import HARDWARE, MODEL, STEP_S, asking, loads, plan_of, use_of

STAGES = 2


def staged(lora: dict[str, Any] | None, costs: Any = None, stages: int = STAGES, **pool: Any) -> Deployment:
    pool.setdefault("batching", {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "chunk_pipeline": "one"})
    plan = plan_of(lora, parallelism={"pp": stages}, **pool)
    return deploy(plan, MODEL, HARDWARE, costs or LinearCosts(STEP_S))


def load_ticks(deployment: Deployment) -> int:
    costs = deployment.pools[0].adapters
    assert costs is not None
    return costs.load_ticks(1, 0)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_request_alone_pays_what_it_pays_on_one_stage(stages: int) -> None:
    """A load of all layers before its prompt, and the products of all layers in each step."""
    plan = plan_of({"slots": 1}, parallelism={"pp": stages})
    deployment = staged({"slots": 1}, compile_costs(MODEL, HARDWARE, plan.pools[0], 4096), stages)
    costs = deployment.pools[0].adapters
    assert costs is not None
    stream = [asking(stream_of([0.0], [50], [20]), [number]) for number in (-1, 0)]
    base, adapted = (deployment.simulate(of).outcome for of in stream)
    first, last = (getattr(adapted, name)[0] - getattr(base, name)[0] for name in ("first_token", "finish"))
    assert first == load_ticks(deployment) + costs.ticks(50, 1)
    assert last - first == 19 * costs.ticks(1, 1)


def test_adapters_of_all_virtual_engines_count() -> None:
    """Two requests that two virtual engines have: with one slot the second waits until the first is finished, and is
    woken then; with two slots, or the adapter of the first, it does not."""
    for slots, adapter, waits in ((1, [0, 1], True), (2, [0, 1], False), (1, [0, 0], False), (1, [0, -1], False)):
        stream = asking(stream_of([0.0, 0.001], [20, 20], [40, 5]), adapter)
        outcome = staged({"slots": slots, "host_slots": 2}).simulate(stream).outcome
        assert outcome.core.tolist() == [0, 1]
        assert (outcome.scheduled[1] >= outcome.finish[0]) == waits
        if waits:
            assert outcome.scheduled[1] == outcome.finish[0]


def test_an_adapter_in_a_slot_is_there_for_all_virtual_engines() -> None:
    stream = asking(stream_of([0.0, 0.001, 5.0, 5.001], [20] * 4, [10] * 4), [0, 0, 0, 1])
    deployment = staged({"slots": 2})
    result = deployment.simulate(stream)
    use = use_of(result)
    assert set(result.outcome.core.tolist()) == {0, 1}
    assert (use.requests, use.hits, use.loads_from_host) == (4, 2, 2)


@pytest.mark.parametrize("policy", ["vllm-fcfs", "vllm-priority"])
def test_a_load_without_adapters_takes_the_same_time_to_the_tick(policy: str) -> None:
    rng = np.random.default_rng(1)
    stream = stream_of(np.cumsum(rng.exponential(0.01, 60)), rng.integers(1, 900, 60), rng.integers(1, 60, 60))
    batching = {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    plain, slots = (staged(lora, batching=batching).simulate(stream).outcome for lora in (None, {"slots": 4}))
    for name in ("scheduled", "first_token", "finish"):
        assert np.array_equal(getattr(plain, name), getattr(slots, name)), name


def loads_of(outcome: Outcome, adapter: list[int], slots: int) -> int:
    """Return the loads of adapters that requests take from `scheduled` to `finish`, by a rule written anew: of those
    for which no request runs, the one whose last request ended first makes room."""
    changes: dict[tuple[int, int, int], list[int]] = {}
    for at, number in enumerate(adapter):
        if number >= 0:
            changes.setdefault((int(outcome.finish[at]), 0, int(outcome.core[at])), []).append(number)
            changes.setdefault((int(outcome.scheduled[at]), 1, int(outcome.core[at])), []).append(number)
    running: list[int] = []
    place: OrderedDict[int, None] = OrderedDict()
    loaded = 0
    for (_, begins, _), numbers in sorted(changes.items()):
        if begins:
            running += numbers
            absent = sorted(set(numbers) - place.keys())
            loaded += len(absent)
            place.update(dict.fromkeys(absent))
            idle = [number for number in place if number not in running]
            for number in idle[: max(0, len(place) - slots)]:
                del place[number]
            assert len(place) <= slots
        else:
            for number in numbers:
                running.remove(number)
            for number in sorted(set(numbers) - set(running)):
                place.move_to_end(number)
    return loaded


@given(loads(), st.integers(1, 4), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_loads_are_those_of_an_oracle(stream: RequestStream, slots: int, stages: int) -> None:
    result = staged({"slots": slots, "host_slots": 6}, stages=stages).simulate(stream)
    assert stream.adapter is not None
    assert result.completed.all()
    assert use_of(result).loads_from_host == loads_of(result.outcome, stream.adapter.tolist(), slots)


@given(
    loads(),
    st.integers(1, 3),
    st.sampled_from(["vllm-fcfs", "vllm-priority"]),
    st.booleans(),
    st.booleans(),
    st.integers(24, 80),
    st.sampled_from([8, 64]),
)
@settings(max_examples=80, deadline=None)
def test_requests_are_kept_and_the_instance_runs_no_more_adapters_than_it_has_slots(
    stream: RequestStream, slots: int, policy: str, later: bool, caches: bool, blocks: int, budget: int
) -> None:
    """Also with preemptions, and with chunks that follow one another; jumps are single steps to the tick."""
    pool: dict[str, Any] = {
        "batching": {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": budget},
        "kv_cache": {"num_blocks": blocks, "block_size": 4, "prefix_caching": caches},
        "max_model_len": 40,
        "async_scheduling": later,
    }
    deployment = staged({"slots": slots, "host_slots": max(slots, 2), "storage_bytes_per_s": 1e9}, **pool)
    jumped, stepped = (deployment.simulate(stream, single_steps=single) for single in (False, True))
    for name in ("scheduled", "first_token", "finish", "preemptions"):
        assert np.array_equal(getattr(jumped.outcome, name), getattr(stepped.outcome, name)), name
    assert jumped.completed.all()
    assert use_of(jumped) == use_of(stepped)
    _check_slots(stream, jumped, slots)


def _check_slots(stream: RequestStream, result: Result, slots: int) -> None:
    adapter, outcome = stream.adapter, result.outcome
    assert adapter is not None
    if not outcome.preemptions.any():
        for at in outcome.scheduled[adapter >= 0].tolist():
            running = (adapter >= 0) & (outcome.scheduled <= at) & (at < outcome.finish)
            assert len(set(adapter[running].tolist())) <= slots


def test_slots_that_an_instance_loses_are_empty_for_all_its_cores() -> None:
    first = SharedSlots(list[Request], 2, 2)
    second = SharedSlots(list[Request], 2, 2, beside=first)
    assert first.use(frozenset({0, 1})) == (0, 2)
    assert second.use(frozenset({1})) == (0, 0)
    for slots in (first, second):
        slots.clear()
    assert second.use(frozenset({1})) == (0, 1)


@pytest.mark.parametrize("policy", ["sglang", "tensorrt-llm"])
def test_other_engines_are_refused(policy: str) -> None:
    batching = {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    with pytest.raises(
        Infeasible, match=r"adapters in pipelines \(pp\) are modelled as in vLLM alone, and the policy is"
    ):
        staged({"slots": 2}, batching=batching)


def test_a_slot_that_the_engine_learns_of_later_is_free_then() -> None:
    """Under asynchronous scheduling an engine learns one step late that the first request has ended. Another one of its
    virtual engine decodes on beside it, for the second virtual engine the slot is free then."""
    stream = asking(stream_of([0.0, 0.001, 0.002], [20] * 3, [6, 5, 60]), [0, 1, -1])
    deployment = staged({"slots": 1, "host_slots": 2}, async_scheduling=True)
    jumped, stepped = (deployment.simulate(stream, single_steps=single).outcome for single in (False, True))
    assert jumped.core.tolist() == [0, 1, 0]
    assert jumped.scheduled.tolist() == stepped.scheduled.tolist()
    assert jumped.finish[0] < jumped.scheduled[1] < jumped.finish[2]
