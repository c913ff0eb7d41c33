"""vLLM's cadence of prompts beside decodes, and its limit of running requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.costs.compiled import LinearCosts
from simtune.engine import Request, VllmFcfs
from simtune.errors import Infeasible
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream
from tests.tuner.test_bounds import poisson

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
STEP_S = 0.01


def simulated(stream: RequestStream, costs: LinearCosts | None = None, **batching: Any) -> Result:
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 64, **batching},
        "kv_cache": {"num_blocks": 400},
        "max_model_len": 1024,
        "async_scheduling": False,
    }
    plan = Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [pool]}, strict=False)
    return deploy(plan, MODEL, HARDWARE, costs or LinearCosts(STEP_S)).simulate(stream)


@given(st.integers(0, 30))
@settings(max_examples=10, deadline=None)
def test_an_interval_of_one_is_none(seed: int) -> None:
    stream = poisson(60, 40.0, 100, 15, seed)
    plain, one = simulated(stream), simulated(stream, prefill_schedule_interval=1)
    assert np.array_equal(plain.outcome.finish, one.outcome.finish)
    assert np.array_equal(plain.outcome.first_token, one.outcome.first_token)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_chunks_beside_decodes_come_every_so_many_steps(interval: int) -> None:
    """The first request decodes from its first step on; the other's prompt, of three chunks, comes during step 2."""
    result = simulated(stream_of([0.0, 1.5 * STEP_S], [8, 150], [60, 2]), prefill_schedule_interval=interval)
    first_chunk = -(-2 // interval) * interval
    assert result.first_token_s[1] == pytest.approx((first_chunk + 2 * interval + 1) * STEP_S)
    assert result.finish_s[0] == pytest.approx(60 * STEP_S)


def test_the_interval_is_counted_from_the_last_step_with_a_prompt() -> None:
    """The second prompt comes when the interval is over, and is computed at once; the third waits for five steps."""
    arrivals = [0.0, 7.5 * STEP_S, 9.5 * STEP_S]
    result = simulated(stream_of(arrivals, [8, 8, 8], [60, 20, 2]), prefill_schedule_interval=5)
    assert result.first_token_s == pytest.approx([STEP_S, 9 * STEP_S, 14 * STEP_S])


@pytest.mark.parametrize(("aligned", "steps"), [(False, [0, 3, 6]), (True, [0, 4, 8])])
def test_ranks_that_count_together_have_prompts_in_steps_of_certain_numbers(aligned: bool, steps: list[int]) -> None:
    """Requests of two tokens that come before the steps 0, 2 and 5."""
    scheduler = VllmFcfs(
        num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128,
        prefill_schedule_interval=3 if not aligned else 4, prefill_steps_aligned=aligned,
    )  # fmt: skip
    coming, joined = {0: 0, 2: 1, 5: 2}, []
    for number in range(10):
        if number in coming:
            scheduler.add(Request(coming[number], 20, 40))
        step = scheduler.schedule()
        assert step is not None
        joined += [number for _ in step.admitted]
        scheduler.complete()
    assert joined == steps


def test_a_step_without_prompts_admits_a_request_that_computes_one_token() -> None:
    """It decodes as the others do: here its prompt has one token."""
    result = simulated(stream_of([0.0, 1.5 * STEP_S], [8, 1], [60, 2]), prefill_schedule_interval=10)
    assert result.first_token_s[1] == pytest.approx(3 * STEP_S)


def test_a_backlog_lifts_the_cadence() -> None:
    """More prompts than one step holds: while some still wait, every step has prompts."""
    arrivals = [0.0, *[1.5 * STEP_S] * 6]
    result = simulated(stream_of(arrivals, [8, *[60] * 6], [200, *[2] * 6]), prefill_schedule_interval=10)
    # The first of them at step 10, the last but one at step 14; the last one's rest waits for the cadence.
    assert result.first_token_s[1:6] == pytest.approx([(11 + i) * STEP_S for i in range(5)], abs=1.5 * STEP_S)


def test_fewer_prompts_beside_decodes_make_times_between_tokens_shorter() -> None:
    costs = LinearCosts(5e-3, 1e-4)
    stream = poisson(200, 12.0, 100, 40)
    every, fourth = (simulated(stream, costs, prefill_schedule_interval=n) for n in (1, 4))
    assert fourth.tpot_s.mean() < every.tpot_s.mean()
    assert fourth.ttft_s.mean() > every.ttft_s.mean()


def test_fewer_requests_run_than_there_are_seats() -> None:
    stream = stream_of([0.0] * 8, [8] * 8, [20] * 8)
    limited, fewer = simulated(stream, max_num_active_seqs=3), simulated(stream, max_num_seqs=3)
    assert np.array_equal(limited.outcome.finish, fewer.outcome.finish)
    assert not np.array_equal(limited.outcome.finish, simulated(stream).outcome.finish)


@pytest.mark.parametrize(
    ("batching", "error", "words"),
    [
        ({"max_num_active_seqs": 9}, ValidationError, r"9 exceeds max_num_seqs \(8\); lower or remove it"),
        ({"long_prefill_token_threshold_adaptive": True}, ValidationError, "requires a threshold"),
        ({"policy": "sglang", "prefill_schedule_interval": 2}, Infeasible, "sglang has no prefill_schedule_interval"),
        ({"policy": "sarathi", "max_num_active_seqs": 2}, Infeasible, "sarathi has no max_num_active_seqs"),
    ],
)
def test_what_does_not_fit_is_refused(batching: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        simulated(stream_of([0.0], [8], [2]), **batching)
