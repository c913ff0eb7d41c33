"""What a pool may say besides: a part of the KV cache kept, communication hidden, another runtime's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simpy

import simtune
from simtune.costs.compiled import compile_costs
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.memory import kv_capacity
from simtune.costs.step_calls import COMMUNICATION, exposed
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.emit import ENGINES
from simtune.emit.emitter import unsupported_settings
from simtune.errors import UsageError
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.research import IN_RESEARCH, KvPolicy, Research
from simtune.specs.workload import Workload

DECODES = StepWork(32, 32 * 2000, (), 32)
MIXED = StepWork(8, 8 * 1500, ((512, 1024),), 8)
STEPS = [DECODES, MIXED, StepWork(0, 0, ((0, 2048),), 1), StepWork(1, 900, (), 1)]


def pool(**more: Any) -> Pool:
    """On one H100 unless said otherwise."""
    whole = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
        "max_model_len": 8192,
        **more,
    }
    return Pool.model_validate(whole, strict=False)


def kept(**policy: Any) -> Pool:
    """A pool with a policy for its KV cache."""
    return pool(research={"kv_policy": policy})


def step_model(its: Pool, model: str = "llama-3.1-8b") -> StepModel:
    return StepModel(load_model(model), load_hardware(its.hardware), its)


class TestKvPolicy:
    @pytest.mark.parametrize("step", STEPS)
    def test_one_that_keeps_all_is_none(self, step: StepWork) -> None:
        plain, all_kept = (
            compile_costs(load_model("llama-3.1-8b"), load_hardware("h100-sxm"), its, 4096)
            for its in (pool(), kept(kept=1.0, bits=16))
        )
        asked = (step.num_decodes, step.context_tokens, step.chunks, step.num_samples)
        assert plain.mixed(*asked) == all_kept.mixed(*asked)

    @pytest.mark.parametrize(("share", "bits", "held"), [(0.5, None, 0.5), (0.125, 8, 0.0625), (1.0, 3, 3 / 16)])
    def test_so_many_more_tokens_fit(self, share: float, bits: float | None, held: float) -> None:
        model, device = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
        plain, less = kv_capacity(model, device, pool()), kv_capacity(model, device, kept(kept=share, bits=bits))
        assert less.num_blocks / plain.num_blocks == pytest.approx(1 / held, rel=1e-3)
        assert less.weights_bytes == plain.weights_bytes

    def test_decodes_read_what_is_kept_and_not_left_out(self) -> None:
        plain, less = step_model(pool()), step_model(kept(kept=0.5, decode_sparsity=0.5))
        contexts = np.array([400.0, 4000.0, 8000.0])
        assert less.decode(16, contexts).tolist() == plain.decode(16, contexts / 4).tolist()
        assert less.attention.prefill(contexts).tolist() == plain.attention.prefill(contexts).tolist()

    def test_prompts_leave_out_a_share_of_their_attention_and_of_nothing_else(self) -> None:
        step = StepWork(0, 0, ((0, 8000),), 1)
        plain, sparse = (step_model(its).breakdown(step) for its in (pool(), kept(prefill_sparsity=0.75)))
        overhead = step_model(pool()).attention.prefill_call_s
        left = sparse["prefill_attention"] - overhead
        assert left == pytest.approx((plain["prefill_attention"] - overhead) / 4)
        assert {kind: s for kind, s in plain.items() if kind != "prefill_attention"} == {
            kind: s for kind, s in sparse.items() if kind != "prefill_attention"
        }

    def test_less_kept_is_never_slower(self) -> None:
        seconds = [step_model(kept(kept=share)).seconds(DECODES) for share in (1.0, 0.5, 0.25, 0.1)]
        assert seconds == sorted(seconds, reverse=True)

    def test_bits_are_of_the_dtype_of_the_cache(self) -> None:
        assert KvPolicy(bits=4.0).held("bf16") == 0.25
        assert KvPolicy(bits=4.0).held("fp8") == 0.5
        assert KvPolicy(kept=0.5, decode_sparsity=0.5).read("bf16") == 0.25


class TestOverlap:
    @pytest.mark.parametrize("overlap", ["two_batches", "split_sequence", "ladder"])
    def test_without_communication_it_changes_nothing(self, overlap: str) -> None:
        alone, overlapped = step_model(pool()), step_model(pool(overlap=overlap))
        for step in STEPS:
            assert overlapped.breakdown(step) == alone.breakdown(step)

    @pytest.mark.parametrize("step", STEPS)
    def test_a_ladder_lies_between_the_longer_of_the_two_and_their_sum(self, step: StepWork) -> None:
        plain, ladder = (
            step_model(pool(parallelism={"tp": 4}, **more), "llama-3.1-70b") for more in ({}, {"overlap": "ladder"})
        )
        parts = plain.breakdown(step)
        communication = sum(s for kind, s in parts.items() if kind in COMMUNICATION)
        computation = sum(parts.values()) - communication
        assert max(communication, computation) <= ladder.gpu_s(step) * (1 + 1e-12)
        assert ladder.gpu_s(step) < computation + communication

    def test_experts_hide_their_traffic_behind_all_products(self) -> None:
        wide = {"parallelism": {"expert_parallel": True, "attention_dp": 32}}
        step = StepWork(128, 128 * 4096, (), 128)
        small = StepWork(31, 31 * 4096, (), 31), StepWork(0, 0, ((0, 511),), 1)
        plain, overlapped = (
            step_model(pool(**wide, **more), "deepseek-v3") for more in ({}, {"overlap": "two_batches"})
        )
        assert overlapped.gpu_s(step) < plain.gpu_s(step)
        before, after = plain.breakdown(step), overlapped.breakdown(step)
        assert after["moe_dispatch"] < before["moe_dispatch"]
        for few in small:  # below vLLM's thresholds nothing is split
            assert overlapped.breakdown(few) == plain.breakdown(few)
        # What is worked on in halves reads its weights twice.
        assert after["moe"] >= before["moe"]

    def test_thresholds_are_those_of_the_pool(self) -> None:
        """Split from as many tokens on as the plan states; the same to the tick below."""
        wide = {"parallelism": {"expert_parallel": True, "attention_dp": 32}}
        split = {**wide, "overlap": "two_batches"}
        late = {**split, "overlap_thresholds": {"decode_tokens": 65, "prefill_tokens": 4097}}
        plain, usual, later = (step_model(pool(**more), "deepseek-v3") for more in (wide, split, late))
        for step in (StepWork(64, 64 * 4096, (), 64), StepWork(0, 0, ((0, 4096),), 1)):
            assert usual.breakdown(step) != plain.breakdown(step) == later.breakdown(step)
        for step in (StepWork(65, 65 * 4096, (), 65), StepWork(0, 0, ((0, 4097),), 1)):
            assert later.breakdown(step) == usual.breakdown(step)
        stated = {**split, "overlap_thresholds": {"decode_tokens": 32, "prefill_tokens": 512}}
        for step in STEPS:
            assert step_model(pool(**stated), "deepseek-v3").breakdown(step) == usual.breakdown(step)

    def test_two_batches_hide_no_all_reduce(self) -> None:
        plain, overlapped = (
            step_model(pool(parallelism={"tp": 4}, **more), "llama-3.1-70b")
            for more in ({}, {"overlap": "two_batches"})
        )
        for step in STEPS:
            assert overlapped.breakdown(step) == plain.breakdown(step)

    def test_a_split_sequence_hides_communication_of_steps_with_prompts_only(self) -> None:
        plain, overlapped = (
            step_model(pool(parallelism={"tp": 4}, **more), "llama-3.1-70b")
            for more in ({}, {"overlap": "split_sequence"})
        )
        prompt = StepWork(0, 0, ((0, 4096),), 1)
        assert overlapped.breakdown(DECODES) == plain.breakdown(DECODES)
        assert overlapped.gpu_s(prompt) < plain.gpu_s(prompt)

    @pytest.mark.parametrize("overlap", ["split_sequence", "ladder"])
    def test_tables_are_those_of_the_model(self, overlap: str) -> None:
        its = pool(parallelism={"tp": 4}, overlap=overlap)
        model = step_model(its, "llama-3.1-70b")
        costs = compile_costs(load_model("llama-3.1-70b"), load_hardware("h100-sxm"), its, 4096)
        for step in STEPS:
            ticks = costs.mixed(step.num_decodes, step.context_tokens, step.chunks, step.num_samples)
            assert ticks / TICKS_PER_SECOND == pytest.approx(model.seconds(step), rel=0.01)

    @pytest.mark.parametrize(("compute", "send"), [(3.0, 2.0), (2.0, 5.0), (4.0, 4.0), (1.0, 0.0)])
    def test_two_batches_are_two_streams_on_two_resources(self, compute: float, send: float) -> None:
        """An independent oracle: each half computes a layer, then sends; processors and links serve one at a time. The
        formula leaves out how the pipeline fills, once a step."""
        layers, env = 40, simpy.Environment()
        processors, link = simpy.Resource(env), simpy.Resource(env)

        def half() -> Any:
            for _ in range(layers):
                for resource, seconds in ((processors, compute), (link, send)):
                    with resource.request() as turn:
                        yield turn
                        yield env.timeout(seconds)

        for _ in range(2):
            env.process(half())
        env.run()
        parts = {"gemm": np.array([2 * layers * compute]), "all_reduce": np.array([2 * layers * send])}
        hidden, room = exposed(parts)
        formula = sum(float(seconds[0]) for seconds in hidden.values())
        assert formula <= env.now <= formula + compute + send
        assert float(room[0]) == max(0.0, 2 * layers * (compute - send))


class TestRuntime:
    RUNTIME = {"kernels_per_layer": 40, "kernel_floor_s": 5e-6, "launch_s": 1e-5}  # noqa: RUF012

    def test_kernels_have_a_floor_and_launches_another(self) -> None:
        """T = max(GPU + n floor, n launch), n kernels of 32 layers."""
        step, kernels = StepWork(1, 500, (), 1), 40 * 32
        plain = step_model(pool()).gpu_s(step)
        graphs = step_model(pool(research={"runtime": self.RUNTIME})).gpu_s(step)
        eager = step_model(pool(research={"runtime": self.RUNTIME}, cuda_graphs=False)).gpu_s(step)
        assert graphs == pytest.approx(plain + kernels * 5e-6)
        assert eager == pytest.approx(max(plain + kernels * 5e-6, kernels * 1e-5))
        large = StepWork(0, 0, ((0, 8000),), 1)
        assert step_model(pool(research={"runtime": self.RUNTIME}, cuda_graphs=False)).gpu_s(large) > kernels * 1e-5

    def test_what_is_fitted_on_one_card_predicts_another(self) -> None:
        """Published of batch 1 at 2,048 tokens (Qwen2.5-7B): CUDA graphs gain 1.259x on H100 and 1.028x on L4. The two
        numbers of the runtime follow from H100 (27 % of the memory floor in eager mode); L4 is told apart by them."""
        runtime = {"kernels_per_layer": 40, "kernel_floor_s": 6.3e-6, "launch_s": 1.5e-5}
        step, gains = StepWork(1, 2048, (), 1), {}
        for card in ("h100-sxm", "l4"):
            eager, graphs = (
                step_model(pool(hardware=card, research={"runtime": runtime}, cuda_graphs=on), "qwen2.5-7b").seconds(
                    step
                )
                for on in (False, True)
            )
            gains[card] = eager / graphs
        assert gains["h100-sxm"] == pytest.approx(1.259, rel=0.1)
        assert 1.0 <= gains["l4"] <= 1.06


class TestSharedPrefix:
    def test_a_prefix_that_all_share_hardly_costs_by_its_length(self) -> None:
        """Hydragen (arXiv 2402.05099): 1,024 sequences, prefix 1k to 16k: -15 % where it is read once, -90 % else."""
        its = pool(
            hardware="a100-sxm-80g",
            parallelism={"tp": 8},
            batching={"max_num_seqs": 1024, "max_num_batched_tokens": 8192},
            max_model_len=4096,
        )
        model = step_model(its, "vicuna-13b")

        def seconds(prefix: int, shared: bool) -> float:
            work = StepWork(1024, 1024 * (prefix + 64), (), 1024, shared_tokens=prefix if shared else 0)
            return model.seconds(work)

        assert 1 - seconds(1024, True) / seconds(16384, True) == pytest.approx(0.15, abs=0.05)
        assert 1 - seconds(1024, False) / seconds(16384, False) == pytest.approx(0.90, abs=0.05)
        assert seconds(0, True) == seconds(0, False)


class TestParallelDecoder:
    WORKLOAD = Workload.model_validate(
        {
            "name": "w",
            "requests": 4,
            "arrivals": {"kind": "closed_loop", "users": 1},
            "prompt": {"kind": "fixed", "tokens": 100},
            "output": {"kind": "fixed", "tokens": 401},
        },
        strict=False,
    )

    def tpot(self, tmp_path: Any, tokens: int, rate: float) -> tuple[float, float]:
        """(seconds per token, tokens per pass)."""
        rates = tmp_path / "rates.yaml"
        rates.write_text(
            "schema: simtune/acceptance@1\nname: rates\norigin: assumed\nsource: a test\n"
            f"rates: {{kind: per_position, conditional: [{', '.join([str(rate)] * tokens)}]}}\n"
        )
        drafting = {
            "drafter": {"kind": "self"},
            "scheme": {"kind": "chain", "tokens": tokens},
            "acceptance": str(rates),
        }
        plan = Plan(name="p", model="llama-3.1-8b", pools=(pool(speculation=drafting),))
        result = simtune.simulate(self.WORKLOAD, plan=plan)
        return float(result.values("tpot").mean()), result.drafted.tokens / result.drafted.rounds

    def test_a_pass_that_keeps_all_takes_one_step_of_its_width(self, tmp_path: Any) -> None:
        seconds, kept_each = self.tpot(tmp_path, 7, 1.0)
        model = step_model(pool())
        tokens = np.array([8])
        one_pass = sum(float(s[0]) for s in (model.linear(tokens) | model.head(tokens)).values())
        one_pass += float(model.decode(1, np.array([300.0]), 8)[0])
        assert kept_each == 8
        assert seconds * 8 == pytest.approx(one_pass, rel=0.01)

    def test_a_pass_that_keeps_one_is_plain_decoding_at_its_width(self, tmp_path: Any) -> None:
        seconds, kept_each = self.tpot(tmp_path, 1, 0.0)
        plan = Plan(name="p", model="llama-3.1-8b", pools=(pool(),))
        plain = float(simtune.simulate(self.WORKLOAD, plan=plan).values("tpot").mean())
        assert kept_each == 1
        assert plain <= seconds <= 1.1 * plain


def test_no_engine_is_told_what_it_does_not_have() -> None:
    """A plan with any of these can be simulated, and its settings are not written as if they were not there."""
    for more, key in (
        ({"overlap": "ladder"}, "overlap"),
        ({"research": {"runtime": TestRuntime.RUNTIME}}, "research.runtime"),
        ({"research": {"kv_policy": {"kept": 0.5}}}, "research.kv_policy"),
    ):
        assert [line.split(":")[0] for line in unsupported_settings(pool(**more))] == [key]
        plan = Plan(name="p", model="llama-3.1-8b", pools=(pool(**more),))
        with pytest.raises(UsageError, match=f"{key}: is simulated only; remove it"):
            ENGINES["vllm"].files(plan, load_model("llama-3.1-8b"))
    assert list(unsupported_settings(pool())) == []


@pytest.mark.parametrize(("path", "key"), IN_RESEARCH.items())
def test_settings_of_published_systems_are_refused_outside_their_block(path: tuple[str, ...], key: str) -> None:
    value: Any = {"kept": 0.5}
    for part in reversed(path):
        value = {part: value}
    with pytest.raises(ValueError, match=rf"write it as research: \{{{key}: \.\.\.\}}"):
        pool(**value)


def test_pool_without_the_block_has_none_of_these_settings() -> None:
    assert pool().research is None
    assert pool().studied == Research()
    assert pool().model_devices == pool().parallelism.devices
