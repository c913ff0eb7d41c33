"""vLLM V0, TensorRT-LLM and SGLang on random small worlds, step by step: against plain copies of their rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import POLICIES, Request
from simtune.engine.policies.tensorrt_llm import TensorRtLlmScheduler
from tests.engine.plain_engines import One, PlainEngine, PlainSglang, PlainTensorRt, PlainV0

Made = tuple[PlainEngine, dict[str, Any]]


def v0(rng: random.Random, settings_: tuple[int, ...]) -> Made:
    swap, watermark = rng.random() < 0.5, rng.choice([0, 0, 1, 3])
    told = {"preemption": "swap" if swap else "recompute", "watermark_blocks": watermark}
    return PlainV0(*settings_, swap=swap, watermark=watermark), told


def tensorrt(rng: random.Random, settings_: tuple[int, ...]) -> Made:
    evicts, in_turn, chunked = (rng.random() < 0.5 for _ in range(3))
    most = rng.choice([3, 10, settings_[-1]])
    told = {
        "capacity_scheduler_policy": "MAX_UTILIZATION" if evicts else "GUARANTEED_NO_EVICT",
        "context_chunking_policy": "EQUAL_PROGRESS" if in_turn else "FIRST_COME_FIRST_SERVED",
        "chunked_prefill": chunked,
        "max_new_tokens": most,
    }
    return PlainTensorRt(*settings_, evicts=evicts, in_turn=in_turn, chunked=chunked, most=most), told


def sglang(rng: random.Random, settings_: tuple[int, ...]) -> Made:
    chunked, most, conservative = rng.random() < 0.7, rng.choice([2, 8, 30]), rng.choice([0.1, 0.5, 1.0, 2.0])
    told = {"chunked_prefill": chunked, "max_new_tokens": most, "schedule_conservativeness": conservative}
    return PlainSglang(*settings_, chunked=chunked, most=most, conservative=conservative), told


ENGINES: dict[str, Callable[[random.Random, tuple[int, ...]], Made]] = {
    "vllm-v0": v0,
    "tensorrt-llm": tensorrt,
    "sglang": sglang,
}


def follow(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    block_size, blocks, seqs = rng.choice([1, 2, 4]), rng.choice([6, 12, 20, 60]), rng.randint(1, 8)
    longest = block_size * blocks
    budget = max(seqs, rng.choice([3, 9, 24]), longest if policy == "vllm-v0" else 0)
    plain, told = ENGINES[policy](rng, (blocks, block_size, seqs, budget, longest))
    if not told.get("chunked_prefill", True):
        budget = plain.budget = max(budget, longest)
    ours = POLICIES[policy](
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        **told,
    )
    load, at = [], 0
    for number in range(rng.randint(1, 20)):
        at += rng.choice([0, 0, 0, 1, 4, 15])
        prompt = rng.randint(1, max(1, longest // 2))
        most = min(told.get("max_new_tokens", longest), longest - prompt)
        load.append((at, number, prompt, rng.randint(1, most)))
    sent = step = done = 0
    repeats, repeated = 0, dict[int, int]()
    while done < len(load):
        while sent < len(load) and (load[sent][0] <= step or sent == done):
            assert ours.add(Request(*load[sent][1:]))
            plain.waiting.append(One(*load[sent][1:]))
            sent += 1
            repeats = 0
        scheduled, preempted, finished = plain.step()
        given_step = ours.schedule()
        assert given_step is not None
        assert {r.id: n for r, n in ours.composition().items()} == scheduled
        assert [r.id for r in given_step.preempted] == preempted
        if repeats:
            assert (scheduled, preempted) == (repeated, []), "a repetition is the same step again"
        repeats, repeated = max(repeats, given_step.repeat) - 1, scheduled
        assert sorted(r.id for r in ours.complete().finished) == sorted(finished)
        promised = ours.promised() if isinstance(ours, TensorRtLlmScheduler) else 0
        assert ours.kv.free - promised == plain.free
        done += len(finished)
        step += 1


@pytest.mark.parametrize("policy", ENGINES)
def test_every_step_is_that_of_the_plain_engine(policy: str) -> None:
    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=250, deadline=None)
    def check(seed: int) -> None:
        follow(policy, seed)

    check()


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("tensorrt-llm", {"capacity_scheduler_policy": "STATIC_BATCH"}),
        ("tensorrt-llm", {"context_chunking_policy": "FORCE_CHUNK"}),
        ("sglang", {"schedule_conservativeness": 0.0}),
    ],
)
def test_what_is_not_modelled_is_refused(policy: str, options: dict[str, Any]) -> None:
    usual: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 32,
    }
    with pytest.raises(ValueError, match="must"):
        POLICIES[policy](**usual, **options)
