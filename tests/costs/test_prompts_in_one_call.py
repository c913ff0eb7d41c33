"""Several prompts of a step in one call: as long as the device needs for all, and no less than the longest alone."""

from __future__ import annotations

import numpy as np
import pytest

from simtune.costs.bounds import CostBounds
from simtune.costs.compiled import compile_costs
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.predict import Profile
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import LinearAttention, Model
from simtune.specs.pool import Batching, Parallelism, Pool
from tests.costs.made_up import hardware, model, operator, pool

DELTA = LinearAttention(heads=4, key_heads=2, key_dim=16, value_dim=32, conv_width=4)


def delta_net() -> Model:
    tiny = model()
    return tiny.model_copy(update={"layers": (tiny.layers[0].model_copy(update={"attention": DELTA}),)})


def on_an_h100(tp: int) -> Pool:
    return Pool(
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(tp=tp),
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=16384),
    )


def test_prompts_of_a_few_heads_take_as_long_as_their_waves() -> None:
    """Eight processors and four heads: two prompts are one wave, as one is, and of four prompts each has half a one."""
    measured = {
        f"{kind}.bf16.kv-fp32": operator(kind, kv_dtype="fp32", block_s=1e-5, bytes_per_s=1e15, flops_per_s=1e18)
        for kind in ("delta_prefill", "delta_decode")
    }
    device = hardware()
    device = device.model_copy(update={"operators": device.operators | measured})
    attention = StepModel(delta_net(), device, pool()).attention

    def prompts_s(*tokens: int) -> float:
        past, new = np.zeros(len(tokens)), np.array(tokens, dtype=np.float64)
        return float(attention.chunks_s(past, new, np.zeros(len(tokens), dtype=np.int64), 1)[0])

    def beyond_the_shortest(blocks: int) -> float:
        return prompts_s(1) + 2 * (blocks - 1) * 1e-5

    assert prompts_s(640) == pytest.approx(beyond_the_shortest(10), rel=1e-3)
    assert prompts_s(640, 640) == pytest.approx(beyond_the_shortest(10), rel=0.06)
    each = prompts_s(1) + 4 * 2 * (20 - 1) * 1e-5 / 4
    assert prompts_s(640, 640, 640, 640) == pytest.approx(each, rel=1e-3)
    assert prompts_s(640, 64) == pytest.approx(prompts_s(640)), "the longest bounds the step"


@pytest.mark.parametrize("number", [2, 4, 8, 16])
@pytest.mark.parametrize("tokens", [128, 256, 512])
def test_short_prompts_of_eight_heads_take_what_was_measured_of_so_many(number: int, tokens: int) -> None:
    step = StepModel(load_model("llama-3.1-70b"), load_hardware("h100-sxm"), on_an_h100(8))
    operator = Profile(load_hardware("h100-sxm")).predictor("prefill_attention", "bf16", kv_dtype="bf16")
    shape = {"tokens": tokens, "context": tokens, "window": tokens, "heads": 8, "kv_heads": 1, "head_dim": 128}
    measured = 80 * float(operator.seconds(batch=number, **shape))
    found, alone = (step.breakdown(StepWork(chunks=((0, tokens),) * n))["prefill_attention"] for n in (number, 1))
    assert found == pytest.approx(measured, rel=0.15)
    assert alone == pytest.approx(80 * float(operator.seconds(batch=1, **shape)))
    assert alone * (1 - 1e-9) <= found < 0.8 * number * alone


@pytest.mark.parametrize("tp", [1, 8])
def test_tables_have_the_times_of_the_model(tp: int) -> None:
    llama, device = load_model("llama-3.1-70b").without_feed_forward(), load_hardware("h100-sxm")
    costs = compile_costs(llama, device, on_an_h100(tp), 8192)
    least = CostBounds(costs.tables).prefill_cost_s(np.array([200, 512, 3000]))
    for chunks in (((0, 200),), ((0, 200),) * 20, ((0, 200), (0, 3000)), ((1000, 24), (0, 512)), ((0, 4096),) * 3):
        work = StepWork(chunks=chunks, num_samples=len(chunks))
        attention_s = costs.tables.prompts(chunks) / TICKS_PER_SECOND
        assert attention_s == pytest.approx(costs.tables.model.breakdown(work)["prefill_attention"], rel=0.03)
        tokens, mixed = sum(new for _, new in chunks), costs.tables.mixed
        on_gpu = costs.tables.prompts(chunks) + mixed.linear[tokens] + mixed.head[len(chunks)]
        step = max(on_gpu, costs.tables.floor(tokens, len(chunks), True)) + mixed.after[len(chunks)]
        assert costs.mixed(0, 0, chunks, len(chunks)) == step
    for number in (1, 2, 5):
        for tokens, bound_s in zip((200, 512, 3000), least, strict=True):
            in_one_step = costs.tables.prompts(((0, tokens),) * number) / TICKS_PER_SECOND
            assert in_one_step >= number * bound_s * (1 - 1e-9)
