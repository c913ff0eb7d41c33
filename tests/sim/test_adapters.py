"""LoRA adapters under load: admission by slots, loads, and what steps take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.adapted_products import adapted_products
from simtune.costs.adapted_steps import AdaptedSteps
from simtune.costs.adapters import ADAPTERS, AdapterCosts
from simtune.costs.compiled import CompiledCosts, LinearCosts, compile_costs
from simtune.costs.predict import DATA_SHEET_LOG_SD
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.engine.adapters import AdapterSlots
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.sim.drawn_worlds import spreads
from simtune.sim.run_basis import cost_basis, timed_steps
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
STEP_S = 0.01
STORAGE = 1e9


def plan_of(lora: dict[str, Any] | None, **pool: Any) -> Plan:
    usual = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 4096},
        "kv_cache": {"num_blocks": 20_000, "block_size": 16},
        "max_model_len": 4096,
        "async_scheduling": False,
    }
    pools = [usual | pool | ({} if lora is None else {"lora": {"rank": 16} | lora})]
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": pools}, strict=False)


def asking(stream: RequestStream, adapter: Any) -> RequestStream:
    return replace(stream, adapter=np.array(adapter, dtype=np.int64))


def run(stream: RequestStream, lora: dict[str, Any] | None, *, single: bool = False, **pool: Any) -> Result:
    return deploy(plan_of(lora, **pool), MODEL, HARDWARE, LinearCosts(STEP_S)).simulate(stream, single_steps=single)


def one_by_one(adapter: Any, output: int = 3) -> RequestStream:
    """Requests of one user, who sends the next when the last is answered."""
    n = len(adapter)
    return asking(stream_of(None, [50] * n, [output] * n, users=1), adapter)


def use_of(result: Result) -> Any:
    (use,) = result.summary(noise=False).adapters
    return use


def test_an_adapter_has_the_parameters_that_published_ones_have() -> None:
    """Llama-3.1-8B with rank 16 in all linear layers has 41,943,040 trainable parameters (peft)."""
    pool = plan_of({"slots": 1}).pools[0]
    assert sum(n * product.weights(16) for product, n in adapted_products(MODEL, pool).items()) == 41_943_040
    attention = plan_of({"slots": 1, "targets": "attention"}).pools[0]
    # q and o: 2 x (4096 + 4096); k and v: 2 x (4096 + 1024), in 32 layers
    parameters = sum(n * product.weights(16) for product, n in adapted_products(MODEL, attention).items())
    assert parameters == 16 * 32 * (2 * 8192 + 2 * 5120)


def test_slots_take_memory_of_each_rank() -> None:
    """Without the shares that every rank has as a whole: rows of A where outputs are divided, columns of B else."""
    for tp in (1, 2):
        parts = {"parallelism": {"tp": tp}, "kv_cache": {}}
        plain, with_slots = (
            deploy(plan_of(lora, **parts), MODEL, HARDWARE, LinearCosts(STEP_S)).memory
            for lora in (None, {"slots": 8, "targets": "attention"})
        )
        of_rank = 6144 / tp + 3 * 4096 + 4096 + 4096 / tp
        taken = 8 * 16 * 32 * of_rank * 2
        assert with_slots.weights_bytes - plain.weights_bytes == pytest.approx(taken)
        block_bytes = with_slots.block_size * with_slots.kv_bytes_per_token
        assert plain.num_blocks - with_slots.num_blocks == pytest.approx(taken / block_bytes, abs=1)


def test_as_many_slots_as_adapters_load_each_of_them_once() -> None:
    adapter = [0, 1, 2, 0, 1, 2, 2, 1, 0]
    use = use_of(run(one_by_one(adapter), {"slots": 3}))
    assert (use.requests, use.hits, use.loads_from_host, use.loads_from_storage) == (9, 6, 3, 0)
    assert use.hit_rate == 6 / 9


def test_with_one_slot_each_of_two_in_turn_waits_for_its_load() -> None:
    adapter = [0, 1] * 5
    plain, swapped = run(one_by_one([-1] * 10), None), run(one_by_one(adapter), {"slots": 1, "host_slots": 2})
    deployment = deploy(plan_of({"slots": 1, "host_slots": 2}), MODEL, HARDWARE, LinearCosts(STEP_S))
    costs = deployment.pools[0].adapters
    assert costs is not None
    load = costs.load_ticks(1, 0)
    assert load == round(41_943_040 * 2 / HARDWARE.links["host"].bytes_per_s * TICKS_PER_SECOND)
    waits = swapped.outcome.first_token - swapped.outcome.arrival
    assert (waits == plain.outcome.first_token - plain.outcome.arrival + load).all()
    use = use_of(swapped)
    assert (use.hits, use.loads_from_host) == (0, 10)
    assert use.waited_s == pytest.approx(10 * load / TICKS_PER_SECOND)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_hits_are_those_of_stack_distances(adapter: list[int], slots: int, more: int) -> None:
    """An adapter is found if fewer others than there is room for were asked for since: Mattson's stack distance."""
    use = use_of(run(one_by_one(adapter), {"slots": slots, "host_slots": slots + more, "storage_bytes_per_s": STORAGE}))
    hits = from_host = 0
    for at, number in enumerate(adapter):
        before = adapter[:at]
        if number not in before:
            continue
        last = at - 1 - before[::-1].index(number)
        distance = len(set(adapter[last + 1 : at]))
        hits += distance < slots
        from_host += slots <= distance < slots + more
    assert (use.hits, use.loads_from_host) == (hits, from_host)
    assert use.loads_from_storage == len(adapter) - hits - from_host


def reference(stream: RequestStream, slots: int, seats: int, load: int, step: int) -> list[tuple[int, int]]:
    """Return (first token, finish) of each request by vLLM's rule, written anew: no memory limit, whole prompts, equal
    steps, all adapters in host memory."""
    assert stream.arrival_s is not None
    assert stream.adapter is not None
    arrival = np.rint(stream.arrival_s * TICKS_PER_SECOND).astype(int).tolist()
    to_come = list(range(len(arrival)))
    waiting: list[int] = []
    running: list[int] = []
    emitted, adapter = [0] * len(arrival), stream.adapter.tolist()
    recent: list[int] = []  # least recently used first
    times = [(0, 0)] * len(arrival)
    now = 0
    while to_come or waiting or running:
        if not (waiting or running):
            now = max(now, arrival[to_come[0]])
        while to_come and arrival[to_come[0]] <= now:
            waiting.append(to_come.pop(0))
        in_use = {adapter[r] for r in running if adapter[r] >= 0}
        for r in list(waiting):
            if len(running) == seats:
                break
            if adapter[r] >= 0 and len(in_use | {adapter[r]}) > slots:
                continue
            waiting.remove(r)
            running.append(r)
            in_use |= {adapter[r]} - {-1}
        loads = len(in_use - set(recent[-slots:]))
        recent = [x for x in recent if x not in in_use] + sorted(in_use)
        now += step + loads * load
        for r in list(running):
            emitted[r] += 1
            first = now if emitted[r] == 1 else times[r][0]
            times[r] = first, now
            if emitted[r] == stream.output_tokens[r]:
                running.remove(r)
    return times


@st.composite
def loads(draw: st.DrawFn) -> RequestStream:
    n = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.003, 0.011, 0.05]), min_size=n, max_size=n))
    output = draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    adapter = draw(st.lists(st.integers(-1, 5), min_size=n, max_size=n))
    return asking(stream_of(np.cumsum(gaps), [20] * n, output), adapter)


@given(loads(), st.integers(1, 4), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_the_rule_is_that_of_an_oracle_to_the_tick(stream: RequestStream, slots: int, seats: int) -> None:
    batching = {"max_num_seqs": seats, "max_num_batched_tokens": 4096}
    lora = {"slots": slots, "host_slots": 6}
    outcome = run(stream, lora, batching=batching).outcome
    costs = deploy(plan_of(lora), MODEL, HARDWARE, LinearCosts(STEP_S)).pools[0].adapters
    assert costs is not None
    expected = reference(stream, slots, seats, costs.load_ticks(1, 0), to_ticks(STEP_S))
    assert list(zip(outcome.first_token.tolist(), outcome.finish.tolist(), strict=True)) == expected


POLICIES = ("vllm-fcfs", "vllm-priority", "sglang", "tensorrt-llm")


@given(loads(), st.integers(1, 3), st.sampled_from(POLICIES), st.booleans(), st.booleans(), st.integers(12, 40))
@settings(max_examples=60, deadline=None)
def test_requests_are_kept_and_no_step_has_more_adapters_than_slots(
    stream: RequestStream, slots: int, policy: str, later: bool, caches: bool, blocks: int
) -> None:
    """Also with preemptions; jumps are single steps to the tick."""
    batching: dict[str, Any] = {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    pool = {
        "batching": batching,
        "kv_cache": {"num_blocks": blocks, "block_size": 4, "prefix_caching": caches},
        "max_model_len": 40,
        "async_scheduling": later,
    }
    if policy == "tensorrt-llm":
        batching["options"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    lora = {"slots": slots, "host_slots": max(slots, 2), "storage_bytes_per_s": STORAGE}
    result, single = (run(stream, lora, single=single, **pool) for single in (False, True))
    for name in ("scheduled", "first_token", "finish", "preemptions"):
        assert np.array_equal(getattr(result.outcome, name), getattr(single.outcome, name)), name
    assert result.completed.all()
    assert use_of(result) == use_of(single)
    adapter, outcome = stream.adapter, result.outcome
    assert adapter is not None
    counted = (adapter >= 0) | (policy == "sglang")
    if not outcome.preemptions.any():
        for at in outcome.scheduled[counted].tolist():
            running = counted & (outcome.scheduled <= at) & (at < outcome.finish)
            assert len(set(adapter[running].tolist())) <= slots


def test_a_request_without_a_slot_is_passed_by_those_behind_it_and_keeps_its_place() -> None:
    """The second waits for the first, and the third and fourth do not: one has the adapter of the first, one none."""
    stream = asking(stream_of([0.0, 0.001, 0.002, 0.003, 0.004], [20] * 5, [20, 5, 5, 5, 5]), [0, 1, 0, -1, 2])
    outcome = run(stream, {"slots": 1, "host_slots": 3}).outcome
    assert (outcome.scheduled[[2, 3]] < outcome.finish[0]).all()
    assert outcome.finish[0] <= outcome.scheduled[1] <= outcome.finish[1] <= outcome.scheduled[4]


def test_a_slot_is_free_when_the_engine_knows_that_its_request_has_ended() -> None:
    """Under asynchronous scheduling one step later: the next step is scheduled before the result of the last is known.
    The request beside them keeps the engine running."""
    stream = asking(stream_of([0.0, 0.0, 0.001], [20] * 3, [5, 40, 5]), [0, -1, 1])
    for later in (False, True):
        outcome = run(stream, {"slots": 1, "host_slots": 2}, async_scheduling=later).outcome
        waited = outcome.scheduled[2] - outcome.finish[0]
        assert waited == (to_ticks(STEP_S) if later else 0)


def test_the_base_model_takes_a_slot_in_sglang_only() -> None:
    """With one slot requests for the base model and for an adapter take turns there, and run together in vLLM."""
    stream = asking(stream_of([0.0, 0.001], [20, 20], [20, 5]), [-1, 0])
    for policy in POLICIES:
        batching = {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
        result = run(stream, {"slots": 1}, batching=batching)
        waits = result.outcome.scheduled[1] >= result.outcome.finish[0]
        assert waits == (policy == "sglang")
        use = use_of(result)
        assert (use.requests, use.hits, use.loads_from_host) == (1, 0, 1)


def test_the_base_model_is_evicted_last_and_is_not_in_host_memory() -> None:
    slots = AdapterSlots(2, 2, counts_base=True)
    steps = [{-1, 0}, {0}, {1}, {-1}, {0, 1}, {1}]
    # Adapter 0 makes room for 1, though the base model was used before it; both then take its slot together.
    assert [slots.use(frozenset(step)) for step in steps] == [(0, 1), (0, 0), (0, 1), (0, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_load_without_adapters_takes_the_same_time_to_the_tick(policy: str) -> None:
    rng = np.random.default_rng(1)
    stream = stream_of(np.cumsum(rng.exponential(0.01, 60)), rng.integers(1, 900, 60), rng.integers(1, 60, 60))
    costs = compile_costs(MODEL, HARDWARE, plan_of({"slots": 4}).pools[0], 4096)
    batching = {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    plain, with_slots = (
        deploy(plan_of(lora, batching=batching), MODEL, HARDWARE, costs).simulate(stream).outcome
        for lora in (None, {"slots": 4})
    )
    for name in ("scheduled", "first_token", "finish"):
        assert np.array_equal(getattr(plain, name), getattr(with_slots, name)), name


# --- products ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step_costs() -> CompiledCosts:
    return compile_costs(MODEL, HARDWARE, plan_of(None).pools[0], 4096)


def test_products_are_a_roofline_of_the_data_sheet() -> None:
    """One adapter and one token: the adapter is read once at 70 % of the memory's rate, in 256 kernels of 4 us each."""
    costs = AdapterCosts.of(MODEL, plan_of({"slots": 4}).pools[0], HARDWARE)
    assert costs is not None
    rate = 0.7 * HARDWARE.device.memory_bytes_per_s
    of_one, of_four = costs.ticks(1, 1) / TICKS_PER_SECOND, costs.ticks(4, 4) / TICKS_PER_SECOND
    assert of_one == pytest.approx(32 * 8 * 4e-6 + 41_943_040 * 2 / rate, rel=0.02)
    # Three more tokens are read as inputs, added to outputs, and written and read in between as float32.
    inputs, outputs, between = 3 * 4096 + 14336, 6144 + 4096 + 28672 + 4096, 16 * (3 + 1 + 2 + 1)
    of_token = 32 * (2 * inputs + 2 * 2 * outputs + 2 * 4 * between)
    assert of_four - of_one == pytest.approx(3 * (41_943_040 * 2 + of_token) / rate, rel=0.001)
    # 40,000 tokens of one adapter compute, or move activations: at least as long as either alone.
    many = costs.ticks(40_000, 1) / TICKS_PER_SECOND
    flops_s = 2 * 40_000 * 41_943_040 / (0.7 * HARDWARE.device.flops_per_s["bf16"])
    assert many > flops_s
    assert costs.ticks(0, 0) == 0


@given(st.integers(0, 40_000_000), st.integers(1, 7), st.integers(1, 400), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_extra_ticks_hide_behind_the_host_as_others_do(
    step_costs: CompiledCosts, extra: int, decodes: int, mean: int, chunk: int
) -> None:
    adapted, tables = AdaptedSteps(step_costs), step_costs.tables
    adapted.extra = extra
    context = decodes * mean
    ticks, slope, span = adapted.decode(decodes, context)
    of_gpu = tables.alone.ticks(decodes, context) + tables.pure.linear[decodes] + tables.pure.head[decodes] + extra
    assert ticks == max(of_gpu, tables.floor(decodes, decodes, False)) + tables.pure.after[decodes]
    assert adapted.decode(decodes, context + decodes)[0] == ticks + slope or span == 1
    plain, work = step_costs.mixed(decodes, context, [(0, chunk)], decodes + 1), (decodes, context, [(0, chunk)])
    longer = adapted.mixed(*work, decodes + 1)
    assert plain <= longer <= plain + extra
    floor = tables.floor(decodes + chunk, decodes + 1, True) + tables.mixed.after[decodes + 1]
    assert longer == plain + extra or plain == floor
    assert step_costs.mixed(decodes, context, [(0, chunk)], decodes + 1) == plain


def test_requests_with_adapters_take_longer_by_their_products(step_costs: CompiledCosts) -> None:
    plan = plan_of({"slots": 2})
    costs = deploy(plan, MODEL, HARDWARE, step_costs).pools[0].adapters
    assert costs is not None
    base, adapted = (
        deploy(plan, MODEL, HARDWARE, step_costs).simulate(one_by_one([number] * 3, 40)).outcome for number in (-1, 0)
    )
    per_token = (adapted.finish - adapted.first_token - base.finish + base.first_token) / 39
    assert (per_token == costs.ticks(1, 1)).all()


def test_intervals_and_what_the_step_time_rests_on_name_the_products(step_costs: CompiledCosts) -> None:
    """Their share is that of the ticks beside a run of the base model; a world in which they are off is off by them."""
    deployment = deploy(plan_of({"slots": 2}), MODEL, HARDWARE, step_costs)
    base, adapted = (deployment.simulate(one_by_one([number] * 4, 200)) for number in (-1, 0))
    busy, more = (sum(core.busy for core in result.outcome.cores) for result in (base, adapted))
    (use,) = adapted.outcome.cores
    assert use.adapters is not None
    assert more == busy + use.adapters.products + use.adapters.waited
    basis = cost_basis(deployment, adapted)
    assert basis is not None
    (of_products,) = [x for x in basis.operators if x.operator == ADAPTERS]
    assert of_products.share == pytest.approx(use.adapters.products / more, abs=1e-4)
    assert of_products.basis.data_sheet == pytest.approx(1)
    assert sum(x.share for x in basis.operators) == pytest.approx(1, abs=1e-4)
    for _, by_kind, total in timed_steps(deployment, adapted):
        assert by_kind[ADAPTERS] / total == pytest.approx(of_products.share, abs=1e-4)
        assert sum(by_kind.values()) == pytest.approx(total)
    assert all(ADAPTERS not in by_kind for _, by_kind, _ in timed_steps(deployment, base))
    assert spreads(deployment, adapted)[ADAPTERS] == pytest.approx(DATA_SHEET_LOG_SD)
    assert ADAPTERS not in spreads(deployment, base)
    slow = deploy(plan_of({"slots": 2}), MODEL, HARDWARE, factors={ADAPTERS: 2.0}).pools[0].adapters
    assert slow is not None
    assert deployment.pools[0].adapters is not None
    assert slow.ticks(3, 2) == pytest.approx(2 * deployment.pools[0].adapters.ticks(3, 2), abs=1)


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "pool", "message"), [
    ("llama-3.1-8b", {"parallelism": {"cp": 2}}, "lora and parallelism.cp do not go together"),
    ("llama-3.1-8b", {"batching": {"policy": "sarathi", "max_num_seqs": 4, "max_num_batched_tokens": 8192}},
     "sarathi has no lora; leave it out, or choose vllm-fcfs or vllm-priority or sglang or tensorrt-llm"),
    ("qwen3-next-80b-a3b", {}, "qwen3-next-80b-a3b has other kinds: set targets to attention, or leave lora out"),
])  # fmt: skip
def test_what_adapters_do_not_go_with_is_refused(model: str, pool: dict[str, Any], message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        deploy(plan_of({"slots": 2}, **pool).model_copy(update={"model": model}), load_model(model), HARDWARE)


def test_adapters_of_a_load_need_slots_and_a_place_they_come_from() -> None:
    with pytest.raises(UsageError, match="pool mixed: requests ask for LoRA adapters, and the pool has no slots"):
        run(one_by_one([0]), None)
    with pytest.raises(
        UsageError, match=r"lora.host_slots \(2\) is less than the 3 adapters of the load.*raise host_s"
    ):
        run(one_by_one([0, 2]), {"slots": 2})
    assert use_of(run(one_by_one([0, 2]), {"slots": 2, "storage_bytes_per_s": 1e9})).loads_from_storage == 2


def test_slots_that_an_instance_loses_are_empty() -> None:
    slots = AdapterSlots(2, 2)
    assert slots.use(frozenset({0, 1})) == (0, 2)
    assert slots.use(frozenset({1})) == (0, 0)
    slots.clear()
    assert slots.use(frozenset({1})) == (0, 1)
    with pytest.raises(ValueError, match="host_slots"):
        AdapterSlots(4, 2)
