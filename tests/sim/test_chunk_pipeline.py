"""Chunks of one prompt that follow one another through the stages of a pipeline, against closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Request
from simtune.errors import Infeasible
from simtune.results.outcome import Outcome
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.stepping import Pipeline
from simtune.sim.world import World
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of
from tests.sim.worlds import Setting

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
SQUARE = LinearCosts(0.0, 1e-6, per_pair_s=1e-10)
"""The part of a prompt's time that grows by its square reaches the other one at 20,000 tokens."""


def deployed(pp: int, costs: LinearCosts = SQUARE, **batching: Any) -> Deployment:
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "parallelism": {"pp": pp},
        "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 1024, **batching},
    }
    plan = Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [pool]}, strict=False)
    return deploy(plan, MODEL, HARDWARE, costs)


def alone(deployment: Deployment, prompt: int) -> Result:
    return deployment.simulate(stream_of([0.0], [prompt], [2]))


@pytest.mark.parametrize("single_steps", [True, False])
@pytest.mark.parametrize("chunks", [1, 2, 5, 40])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_equal_chunks_take_a_stage_each_and_the_last_one_all(stages: int, chunks: int, single_steps: bool) -> None:
    """n chunks over p stages take (n + p - 1) / (n p) of what one stage takes for all layers, to the tick."""
    ticks = 12 * 7
    setting = Setting(2000, 1, 4, 8, stages, LinearCosts(ticks / TICKS_PER_SECOND), stream_of([0.0], [8 * chunks], [3]))
    for follow, first in ((False, chunks * ticks), (True, (chunks + stages - 1) * ticks // stages)):
        cores = setting.make_cores(Pipeline(stages, chunks_follow=follow))
        outcome = World(cores, setting.stream, single_steps=single_steps).run()
        assert (outcome.first_token.tolist(), outcome.finish.tolist()) == ([first], [first + 2 * ticks])


@pytest.mark.parametrize("policy", ["vllm-fcfs", "vllm-priority", "sglang"])
def test_engines_that_pipeline_chunks_do_so_unless_a_plan_keeps_them_from_it(policy: str) -> None:
    costs = LinearCosts(0.012)
    first, one = (alone(deployed(4, costs, policy=policy, **more), 102_400).ttft_s[0] for more in ({}, ONE))
    assert (first, one) == (pytest.approx((100 + 3) / 4 * 0.012), pytest.approx(100 * 0.012))


ONE = {"chunk_pipeline": "one"}


@pytest.mark.parametrize("policy", ["tensorrt-llm", "sarathi"])
def test_other_policies_have_a_chunk_in_the_pipeline_unless_asked(policy: str) -> None:
    costs = LinearCosts(0.012)
    one, first = (
        alone(deployed(4, costs, policy=policy, **more), 10_240).ttft_s[0] for more in ({}, {"chunk_pipeline": "fixed"})
    )
    assert (first, one) == (pytest.approx((10 + 3) / 4 * 0.012), pytest.approx(10 * 0.012))


def test_one_stage_is_as_it_was() -> None:
    results = [alone(deployed(1, chunk_pipeline=key), 50_000).ttft_s[0] for key in (None, "one", "fixed")]
    assert len(set(results)) == 1


def chunk_times_s(smooth_factor: float) -> list[float]:
    """Return the times of the chunks that the pool's scheduler cuts of a prompt of 30,000 tokens, but for the last."""
    options = {"smooth_factor": smooth_factor}
    deployment = deployed(4, max_num_batched_tokens=8192, policy="sglang", chunk_pipeline="dynamic", options=options)
    scheduler = deployment.pools[0].cores(1, None)[0].scheduler
    scheduler.add(Request(0, 30_000, 1))
    times: list[float] = []
    while (step := scheduler.schedule()) is not None:
        (chunk,) = step.chunks
        if not chunk.completes:
            times.append(SQUARE.mixed(0, 0, [(chunk.past, chunk.tokens)], 0) / TICKS_PER_SECOND)
        scheduler.complete()
    return times


def test_dynamic_chunks_take_as_long_as_the_first() -> None:
    """Within the pieces of 64 tokens at which they are cut; half smoothed they grow, and unsmoothed they are fixed."""
    strict, half, fixed = (chunk_times_s(factor) for factor in (1.0, 0.5, 0.0))
    assert len(strict) > len(half) > len(fixed) == 30_000 // 8192
    # A piece is 0.8 % of the first chunk; where a cut falls depends on how a Python sums.
    assert max(strict) < 1.01 * strict[0]
    assert min(strict) > 0.97 * strict[0]
    assert strict[-1] < half[-1] < fixed[-1]


def test_dynamic_chunks_shorten_the_pipeline() -> None:
    fixed, dynamic = (
        alone(deployed(4, max_num_batched_tokens=8192, policy="sglang", chunk_pipeline=way), 30_000).ttft_s[0]
        for way in ("fixed", "dynamic")
    )
    assert dynamic < 0.9 * fixed


def test_only_sglang_has_dynamic_chunks() -> None:
    with pytest.raises(
        Infeasible, match=r"policy vllm-fcfs has no chunk_pipeline: dynamic; leave it out, or choose sglang"
    ):
        deployed(2, chunk_pipeline="dynamic")


def beside_one_decode(stages: int, *, follow: bool, single_steps: bool, prompt: int = 32, answer: int = 10) -> Outcome:
    """Return the run of two requests on one virtual engine whose steps take 12 ticks and 8 tokens: one with a prompt of
    4 tokens that decodes, and half a step later one with a longer prompt."""
    ticks = 12
    stream = stream_of([0.0, 6 / TICKS_PER_SECOND], [4, prompt], [answer, 3])
    setting = Setting(2000, 1, 4, 8, 1, LinearCosts(ticks / TICKS_PER_SECOND), stream)
    cores = setting.make_cores(Pipeline(stages, chunks_follow=follow))
    return World(cores, setting.stream, single_steps=single_steps).run()


@pytest.mark.parametrize("single_steps", [True, False])
def test_chunks_follow_steps_with_a_decode_as_drawn_by_hand(single_steps: bool) -> None:
    """Two stages of 6 ticks. The prompt has 7 tokens beside the decode in the step at 12, 8 alone in the one at 18 when
    the first stage is free, 7 beside the decode again at 24 when its token is known, 8 at 30, and the last 2 at 36.

        stage 1   [d 4 ][    ][d+7 ][ 8  ][d+7 ][ 8  ][d+2 ][    ][d+e ]
        stage 2         [d 4 ][    ][d+7 ][ 8  ][d+7 ][ 8  ][d+2 ][    ][d+e ]
                  0     6     12    18    24    30    36    42    48
    """
    followed = beside_one_decode(2, follow=True, single_steps=single_steps)
    assert followed.first_token.tolist() == [12, 48]
    # The decode has a token every 12 ticks, whatever follows it.
    assert followed.finish.tolist() == [12 * 10, 48 + 2 * 12]
    alone = beside_one_decode(2, follow=False, single_steps=single_steps)
    assert alone.first_token.tolist() == [12, 72]
    assert alone.finish.tolist() == [12 * 10, 72 + 2 * 12]


@pytest.mark.parametrize("single_steps", [True, False])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_prompt_beside_a_decode_takes_a_stage_for_each_chunk(stages: int, single_steps: bool) -> None:
    """Every p-th chunk has 7 tokens, the others 8; the last one takes all stages."""
    chunks, tokens = 0, 0
    while tokens < 400:
        tokens += 7 if chunks % stages == 0 else 8
        chunks += 1
    outcome = beside_one_decode(stages, follow=True, single_steps=single_steps, prompt=400, answer=60)
    assert outcome.first_token.tolist() == [12, 12 + (chunks + stages - 1) * 12 // stages]


def test_a_step_in_which_a_request_ends_is_not_followed() -> None:
    """The decode has its last token with the step at 24, so that the next chunk waits until 36."""
    ends, goes_on = (beside_one_decode(2, follow=True, single_steps=False, answer=answer) for answer in (3, 10))
    assert ends.finish[0] == 36
    # 7 + 8 tokens until 24, 7 until 36, 8 until 42 and the last 2 leave at 54
    assert (ends.first_token[1], goes_on.first_token[1]) == (54, 48)


@pytest.mark.parametrize("policy", ["vllm-fcfs", "vllm-priority"])
def test_times_between_tokens_are_those_of_their_steps(policy: str) -> None:
    """Tokens of a decode beside a prompt whose chunks follow one another come when its steps leave the last stage."""
    deployment = deployed(2, LinearCosts(0.012), policy=policy)
    # The second request keeps the other virtual engine from getting the prompt.
    stream = stream_of([0.0, 0.0, 0.018], [4, 4, 20_000], [200, 1, 2])
    result = deployment.simulate(stream)
    intervals, spans_s = result.itl, result.finish_s - result.first_token_s
    assert intervals is not None
    assert intervals.count == 199 + 1
    assert intervals.count * intervals.mean_s() == pytest.approx(float(spans_s.sum()), rel=1e-9)
    assert result.ttft_s[2] < 0.6 * deployed(2, LinearCosts(0.012), policy=policy, **ONE).simulate(stream).ttft_s[2]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(2, 4),
    st.integers(3, 16),
    st.sampled_from([14, 20, 400]),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_stages_compute_one_step_at_a_time(
    drawn: list[tuple[int, int, int]], stages: int, budget: int, blocks: int, cores: int
) -> None:
    """Steps and jumps agree, every token is delivered, and no stage computes more than it has time for."""
    arrivals, prompts, answers = zip(*sorted(drawn), strict=True)
    ticks = 12
    stream = stream_of([12 * tick / TICKS_PER_SECOND for tick in arrivals], list(prompts), list(answers))
    setting = Setting(blocks, 4, 3, budget, cores, LinearCosts(ticks / TICKS_PER_SECOND), stream)
    jumps, steps = (
        World(setting.make_cores(Pipeline(stages, chunks_follow=True)), stream, single_steps=single).run()
        for single in (False, True)
    )
    assert jumps.finish.tolist() == steps.finish.tolist()
    assert jumps.first_token.tolist() == steps.first_token.tolist()
    assert (jumps.finish >= jumps.first_token).all()
    for outcome in (jumps, steps):
        first, slope, repeats, decodes = outcome.intervals.T
        times = decodes * (repeats * first + slope * (repeats * (repeats - 1) // 2))
        assert int(times.sum()) == int((outcome.finish - outcome.first_token).sum())
    assert jumps.steps == steps.steps
    span = int(np.max(jumps.finish)) - 12 * arrivals[0]
    assert jumps.steps * ticks // stages + (stages - 1) * ticks // stages <= span
