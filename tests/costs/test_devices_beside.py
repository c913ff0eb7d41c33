"""Several devices for one sequence: ranks that share it, a host beside its GPU, feed-forward blocks apart."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

import simtune
from simtune.costs.afd import BatchPart
from simtune.costs.compiled import compile_costs
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.memory import GIB, kv_capacity, weights_bytes
from simtune.costs.offload import HostWork
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.emit.emitter import unsupported_settings
from simtune.errors import Infeasible, SpecError
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Parallelism, Pool
from simtune.specs.workload import Workload

DENSE, EXPERTS = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")
PROMPT = StepWork(0, 0, ((0, 32768),), 1)
DECODES = StepWork(16, 16 * 4000, (), 16)


def pool(hardware: str = "h100-sxm", **more: Any) -> Pool:
    whole = {
        "hardware": hardware,
        "instances": 1,
        "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
        "max_model_len": 8192,
        **more,
    }
    return Pool.model_validate(whole, strict=False)


def step_model(its: Pool, model: Model = DENSE) -> StepModel:
    return StepModel(model, load_hardware(its.hardware), its)


def capacity(its: Pool, model: Model = DENSE) -> int:
    return kv_capacity(model, load_hardware(its.hardware), its).num_blocks


class TestContextParallelism:
    def test_ranks_share_the_pairs_of_a_prompt(self) -> None:
        alone, shared = step_model(pool()), step_model(pool(parallelism={"cp": 4}))
        attention = alone.breakdown(PROMPT)["prefill_attention"] - alone.attention.prefill_call_s
        of_rank = shared.breakdown(PROMPT)["prefill_attention"] - shared.attention.prefill_call_s
        assert of_rank == pytest.approx(attention / 4, rel=1e-9)
        assert shared.breakdown(PROMPT)["gemm"] == pytest.approx(
            alone.breakdown(StepWork(0, 0, ((0, 8192),), 1))["gemm"], rel=1e-9
        )

    def test_a_slow_ring_is_waited_for_and_half_as_long_both_ways(self) -> None:
        """Two cards on PCIe with a short prompt: sending keys and values outlasts attending to them."""
        llama = load_model("llama-2-7b")
        one, both = (
            step_model(pool("a10", parallelism={"cp": 4}, research={"cp_ring": ring}), llama)
            for ring in ("one_way", "both_ways")
        )
        tokens = np.array([512.0])
        sends = load_hardware("a10").links["intra_node"]
        assert one.attention.prefill(tokens) > step_model(pool("a10"), llama).attention.prefill(tokens) / 4
        row_bytes = 2 * 32 * 128 * 2
        least_s = 32 * 3 * 128 * row_bytes / sends.bytes_per_s
        assert one.attention.prefill(tokens) > least_s
        assert 0.4 * one.attention.prefill(tokens) < both.attention.prefill(tokens) < one.attention.prefill(tokens)

    def test_ranks_on_two_nodes_send_over_the_link_between_them(self) -> None:
        """Eight ranks of tensor parallelism fill a node of eight, so that the second rank of a context is elsewhere."""
        plan, device = pool(parallelism={"tp": 8, "cp": 2}), load_hardware("h100-sxm")
        wide = device.model_copy(update={"device": device.device.model_copy(update={"devices_per_node": 16})})
        tokens = np.array([256.0])
        apart, together = (StepModel(DENSE, each, plan).attention.prefill(tokens) for each in (device, wide))
        assert apart > together

    @settings(max_examples=25)
    @given(compute=st.floats(0.1, 5), send=st.floats(0.1, 5), ranks=st.integers(2, 8))
    def test_a_ring_takes_its_longer_side_and_a_block_at_most(self, compute: float, send: float, ranks: int) -> None:
        """Every rank attends to the block that it has while that goes on to the next rank."""
        env = simpy.Environment()
        arrived = [[env.event() for _ in range(ranks)] for _ in range(ranks)]

        def link(rank: int) -> Generator[simpy.Event]:
            for turn in range(ranks - 1):
                yield arrived[rank][turn]
                yield env.timeout(send)
                arrived[(rank + 1) % ranks][turn + 1].succeed()

        def attend(rank: int) -> Generator[simpy.Event]:
            for turn in range(ranks):
                yield arrived[rank][turn]
                yield env.timeout(compute)

        for rank in range(ranks):
            arrived[rank][0].succeed()
            env.process(link(rank))
            env.process(attend(rank))
        env.run()
        formula = max(ranks * compute, (ranks - 1) * send)
        assert formula - 1e-9 <= env.now <= formula + compute + 1e-9

    def test_without_ranks_that_share_there_is_no_ring(self) -> None:
        with pytest.raises(ValueError, match="set cp above 1, or remove cp_ring"):
            pool(research={"cp_ring": "both_ways"})

    def test_each_rank_has_its_part_of_the_cache(self) -> None:
        """And no activations but its own."""
        assert capacity(pool(parallelism={"cp": 4})) >= 4 * capacity(pool())
        assert pool(parallelism={"tp": 2, "cp": 4}).devices == 8

    def test_decodes_read_less_and_collect_what_they_read(self) -> None:
        alone, shared = (step_model(pool(parallelism={"cp": cp})) for cp in (1, 8))
        quarter = float(alone.decode(16, np.array([500.0]))[0])
        whole = float(alone.decode(16, np.array([4000.0]))[0])
        assert quarter < float(shared.decode(16, np.array([4000.0]))[0]) < whole

    @pytest.mark.parametrize(
        ("name", "why"), [("qwen3-30b-a3b", "dense models only"), ("gemma-3-27b", "full attention")]
    )
    def test_what_is_not_modelled_is_refused(self, name: str, why: str) -> None:
        with pytest.raises(Infeasible, match=why):
            step_model(pool(parallelism={"cp": 2}), load_model(name))


def offloading(**offload: Any) -> Pool:
    return pool("a10", research={"offload": offload}, kv_cache={"block_size": 16})


class TestOffload:
    def test_a_step_waits_for_the_weights_that_are_sent(self) -> None:
        its = offloading(weights=0.5)
        held = 0.5 * weights_bytes(DENSE, Parallelism(), 0)
        sent_s = held / load_hardware("a10").links["host"].bytes_per_s
        assert step_model(its).gpu_s(StepWork(1, 100, (), 1)) == pytest.approx(sent_s)
        computed = offloading(weights=0.5, computed=0.75, bytes_per_s=9.6e10)
        assert step_model(computed).gpu_s(StepWork(1, 100, (), 1)) == pytest.approx(0.75 * held / 9.6e10)

    def test_streamed_layers_take_what_the_formula_says(self) -> None:
        """The link brings layer after layer while the device computes those that have come; of many steps."""
        layers, compute, send, steps = 12, 1.0, 2.5, 40
        env = simpy.Environment()
        here = simpy.Store(env, capacity=2)

        def link() -> Generator[simpy.Event]:
            for _ in range(layers * steps):
                yield env.timeout(send)
                yield here.put(None)

        def device() -> Generator[simpy.Event]:
            for _ in range(layers * steps):
                yield here.get()
                yield env.timeout(compute)

        env.process(link())
        env.process(device())
        env.run()
        assert env.now / steps == pytest.approx(max(layers * compute, layers * send), rel=0.01)

    @pytest.mark.parametrize(("context", "decodes", "share"), [(4000, 32, 0.8), (4000, 32, 0.1), (700, 3, 0.5)])
    def test_a_step_of_decodes_is_as_long_as_its_slower_device(self, context: int, decodes: int, share: float) -> None:
        its = offloading(kv_cache=share, bytes_per_s=4e10, memory_gib=64)
        step = StepWork(decodes, decodes * context, (), decodes)
        alone = step_model(pool("a10"))
        rest = sum(seconds for kind, seconds in alone.breakdown(step).items() if kind != "decode_attention")
        device_s = rest + float(alone.decode(decodes, np.array([(1 - share) * context]))[0])
        host_s = share * decodes * context * 2 * 8 * 128 * 32 * 2 / 4e10
        assert step_model(its).gpu_s(step) == pytest.approx(max(device_s, host_s), rel=1e-9)

    def test_the_cache_grows_by_what_the_host_holds(self) -> None:
        plain, half = capacity(offloading()), capacity(offloading(kv_cache=0.5, bytes_per_s=4e10, memory_gib=640))
        assert half == pytest.approx(2 * plain, abs=3)
        block_bytes = 16 * 2 * 8 * 128 * 32 * 2
        assert capacity(offloading(kv_cache=0.5, bytes_per_s=4e10, memory_gib=1)) == 2 * GIB // block_bytes

    def test_one_processor_attends_for_all_groups_of_ranks(self) -> None:
        """Each group decodes as many sequences as the one that a step is asked of."""
        offload = {"kv_cache": 0.5, "bytes_per_s": 4e10, "memory_gib": 64}
        one, four = (
            HostWork.of(
                EXPERTS,
                load_hardware("h100-sxm"),
                pool(research={"offload": offload}, parallelism={"attention_dp": groups}),
            )
            for groups in (1, 4)
        )
        assert one is not None
        assert four is not None
        assert four.per_context_s == pytest.approx(4 * one.per_context_s)

    @pytest.mark.parametrize(
        ("offload", "message"),
        [
            ({"kv_cache": 0.5, "memory_gib": 1}, "how fast it reads"),
            ({"kv_cache": 0.5, "bytes_per_s": 1e10}, "how much it has"),
            ({"computed": 0.5, "bytes_per_s": 1e10}, "requires weights in"),
            ({"weights": 0.5, "bytes_per_s": 1e10}, "the processor reads nothing; give computed or kv_cache a share"),
            (
                {"weights": 0.5, "memory_gib": 64},
                "has no effect without keys and values there; give kv_cache a share, or remove it",
            ),
        ],
    )
    def test_what_the_host_must_have_is_asked_for(self, offload: dict[str, Any], message: str) -> None:
        fields = {"schema": Plan.schema_id(), "name": "x", "pools": [_fields(research={"offload": offload})]}
        from simtune.specs.yamlfile import Document

        with pytest.raises(SpecError, match=message):
            Plan.from_document(Document("x", fields, None))


def _fields(**more: Any) -> dict[str, Any]:
    return {
        "hardware": "a10",
        "instances": 1,
        "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 2048},
        "max_model_len": 2048,
        **more,
    }


class TestAfd:
    @settings(max_examples=20)
    @given(
        times=st.lists(st.integers(1, 30), min_size=4, max_size=4),
        parts=st.integers(1, 5),
    )
    def test_parts_go_round_as_the_formula_says(self, times: list[int], parts: int) -> None:
        """Four stations in a circle of many layers, each with one part at a time, in the order they come."""
        rounds = 30
        env = simpy.Environment()
        stations = [simpy.Resource(env) for _ in times]

        def part() -> Generator[simpy.Event]:
            for _ in range(rounds):
                for station, seconds in zip(stations, times, strict=True):
                    with station.request() as turn:
                        yield turn
                        yield env.timeout(seconds)

        for _ in range(parts):
            env.process(part())
        env.run()
        one = BatchPart(*(np.array([float(t)]) for t in times))
        assert env.now / rounds == pytest.approx(float(one.step_s(parts)[0]), rel=0.1)

    def test_with_one_part_the_sides_take_turns(self) -> None:
        its = step_model(
            pool(parallelism={"attention_dp": 8}, research={"afd": {"ffn_devices": 8, "batches": 1}}), EXPERTS
        )
        step, apart = its.breakdown(DECODES), its._apart
        assert apart is not None
        attention = sum(step[kind] for kind in ("gemm", "elementwise", "decode_attention"))
        part = apart.part(np.array([attention]), np.array([16.0]))
        whole = sum(step[kind] for kind in ("moe", "send")) + attention
        assert whole == pytest.approx(float(part.step_s(1)[0]), rel=1e-9)

    def test_a_token_goes_once_to_each_node_with_an_expert_of_it(self) -> None:
        """Sixteen devices are two nodes; one attention device has the same rows to send either way."""

        def there_s(model: Model, devices: int) -> float:
            groups: dict[str, Any] = {
                "parallelism": {"attention_dp": 8},
                "research": {"afd": {"ffn_devices": devices, "batches": 1}},
            }
            apart = step_model(pool(**groups), model)._apart
            assert apart is not None
            return float(apart.part(np.array([1e-3]), np.array([4096.0])).there[0])

        assert there_s(EXPERTS, 16) > 1.5 * there_s(EXPERTS, 8)
        assert there_s(DENSE, 16) == there_s(DENSE, 8)

    def test_feed_forward_blocks_leave_room_for_the_cache(self) -> None:
        together = pool(parallelism={"attention_dp": 8, "expert_parallel": True})
        apart = pool(parallelism={"attention_dp": 8}, research={"afd": {"ffn_devices": 8}})
        assert capacity(apart, EXPERTS) > capacity(together, EXPERTS)
        assert apart.devices == 16

    @pytest.mark.parametrize("more", [{"overlap": "ladder"}, {"research": {"offload": {"weights": 0.5}}}])
    def test_it_goes_with_no_other_second_device(self, more: dict[str, Any]) -> None:
        apart = {"afd": {"ffn_devices": 8}, **more.get("research", {})}
        with pytest.raises(ValueError, match="afd, which overlaps its own parts"):
            pool(parallelism={"attention_dp": 8}, **(more | {"research": apart}))

    @pytest.mark.parametrize(("replicas", "locality"), [(1, None), (None, 1.0)])
    def test_experts_are_not_placed_otherwise(self, replicas: int | None, locality: float | None) -> None:
        with pytest.raises(ValueError, match="whose devices have equal shares of the experts"):
            pool(
                parallelism={"expert_parallel": True, "expert_replicas": replicas},
                research={"afd": {"ffn_devices": 8}, "expert_locality": locality},
            )

    def test_too_few_devices_are_told(self) -> None:
        with pytest.raises(Infeasible, match="ffn_devices need an expert each; set at most 128"):
            step_model(pool(parallelism={"attention_dp": 8}, research={"afd": {"ffn_devices": 256}}), EXPERTS)
        with pytest.raises(Infeasible, match=r"give afd\.ffn_devices more"):
            step_model(
                pool(parallelism={"attention_dp": 8}, research={"afd": {"ffn_devices": 1}}), load_model("deepseek-v3")
            )


SETTINGS = [
    ({"parallelism": {"cp": 2}}, DENSE, "h100-sxm"),
    ({"research": {"offload": {"weights": 0.2}}}, DENSE, "a10"),
    ({"research": {"offload": {"kv_cache": 0.3, "bytes_per_s": 5e10, "memory_gib": 64}}}, DENSE, "a10"),
    ({"parallelism": {"attention_dp": 2}, "research": {"afd": {"ffn_devices": 2}}}, EXPERTS, "h100-sxm"),
]


@pytest.mark.parametrize(("its_own", "model", "hardware"), SETTINGS, ids=["cp", "weights", "kv", "afd"])
class TestEach:
    def test_tables_say_what_the_step_model_says(self, its_own: Any, model: Model, hardware: str) -> None:
        its = pool(hardware, **its_own)
        costs, steps = compile_costs(model, load_hardware(hardware), its, 4096), step_model(its, model)
        for decodes, context in ((1, 100), (7, 900), (33, 2000), (64, 3500)):
            ticks = costs.decode(decodes, decodes * context)[0]
            seconds = steps.gpu_s(StepWork(decodes, decodes * context, (), decodes))
            assert ticks / TICKS_PER_SECOND == pytest.approx(seconds, rel=0.03)

    def test_a_jump_is_its_steps(self, its_own: Any, model: Model, hardware: str) -> None:
        costs = compile_costs(model, load_hardware(hardware), pool(hardware, **its_own), 4096)
        for decodes, context in ((3, 500), (20, 1500)):
            first, slope, span = costs.decode(decodes, decodes * context)
            for k in range(1, min(span, 40)):
                assert costs.decode(decodes, decodes * (context + k))[0] == first + k * slope

    def test_it_is_simulated_and_no_engine_is_told(self, its_own: Any, model: Model, hardware: str) -> None:
        fields = {"name": "one", "model": model.name, "pools": [pool(hardware, **its_own).model_dump()]}
        plan = Plan.model_validate(fields, strict=False)
        load = {
            "name": "load",
            "arrivals": {"kind": "closed_loop", "users": 4},
            "requests": 8,
            "prompt": {"kind": "fixed", "tokens": 300},
            "output": {"kind": "fixed", "tokens": 20},
        }
        result = simtune.simulate(Workload.model_validate(load, strict=False), plan=plan, model=model)
        assert result.completed.all()
        assert result.num_gpus == plan.pools[0].devices
        assert list(unsupported_settings(plan.pools[0]))
