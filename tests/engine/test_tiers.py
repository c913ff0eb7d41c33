"""Tiers below a prefix cache: what they find is what a larger cache would find."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.engine import POLICIES, Request, Scheduler, hit_rate
from simtune.engine.tiers import Tier, TierStack, TierStore

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=40)


def engine(policy: str, blocks: int, *tiers: Tier, **changes: Any) -> Scheduler:
    """An engine that serves one request of at most seven blocks of four tokens at a time."""
    sizes: dict[str, Any] = {
        "num_blocks": blocks * (4 if policy == "sglang" else 1),
        "block_size": 1 if policy == "sglang" else 4,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
        "max_model_len": 28,
        "prefix_caching": True,
        "hash_block_tokens": 4,
    }
    scheduler = POLICIES[policy](**(sizes | changes))
    if tiers:
        scheduler.kv.tiers = TierStack(tiers)
    return scheduler


def serve(scheduler: Scheduler, paths: list[list[int]]) -> list[int]:
    """Serve prompts of whole named blocks and one token more, in turn; return the tokens found for each."""
    found = []
    for number, path in enumerate(paths):
        names = tuple(tuple(path[: end + 1]) for end in range(len(path)))
        scheduler.add(request := Request(number, 4 * len(path) + 1, 1, blocks=names))
        while (step := scheduler.schedule()) is not None:
            found += [chunk.past for chunk in step.chunks if chunk.request in step.admitted]
            scheduler.complete(step.repeat)
        assert request.reserved_tokens == 0
    assert scheduler.kv.free == scheduler.kv.total
    return found


def share(found: list[int], paths: list[list[int]]) -> float:
    return sum(found) / 4 / sum(map(len, paths))


def named(paths: list[list[int]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(path[: end + 1]) for end in range(len(path))] for path in paths]


@given(PROMPTS, st.integers(0, 30))
def test_hits_are_those_of_a_cache_of_the_size_of_the_tier(paths: list[list[int]], blocks: int) -> None:
    """What is computed is written to a tier of the least recently used: its hits follow from stack distances."""
    tier = Tier("host", TierStore(4 * (7 + blocks)))
    scheduler = engine("vllm-fcfs", 7, tier)
    found = serve(scheduler, paths)
    assert share(found, paths) == pytest.approx(hit_rate(named(paths), 7 + blocks), abs=1e-12)
    device = serve(engine("vllm-fcfs", 7), paths)
    assert tier.hit_tokens == sum(found) - sum(device)


@pytest.mark.parametrize("policy", ["vllm-fcfs", "sglang", "tensorrt-llm", "sarathi"])
@pytest.mark.parametrize("written", ["computed", "evicted"])
@given(paths=PROMPTS)
def test_an_unlimited_tier_finds_what_an_unlimited_cache_finds(
    policy: str, written: Any, paths: list[list[int]]
) -> None:
    tiers = Tier("host", TierStore(None), written)
    assert serve(engine(policy, 7, tiers), paths) == serve(engine(policy, 400), paths)


@pytest.mark.parametrize("policy", ["vllm-fcfs", "sglang", "tensorrt-llm"])
@given(paths=PROMPTS)
def test_a_tier_of_size_0_finds_nothing(policy: str, paths: list[list[int]]) -> None:
    tier = Tier("host", TierStore(0))
    assert serve(engine(policy, 7, tier), paths) == serve(engine(policy, 7), paths)
    assert tier.hit_tokens == 0


@pytest.mark.parametrize("policy", ["vllm-fcfs", "sglang"])
@given(paths=PROMPTS)
def test_a_second_tier_takes_what_the_first_one_evicts(policy: str, paths: list[list[int]]) -> None:
    tiers = Tier("host", TierStore(12), "evicted"), Tier("disk", TierStore(None), "evicted")
    assert serve(engine(policy, 7, *tiers), paths) == serve(engine(policy, 400), paths)


def test_a_shared_tier_outlives_an_instance() -> None:
    store = TierStore(None)
    own, shared = Tier("host", TierStore(None)), Tier("store", store, shared=True)
    scheduler = engine("vllm-fcfs", 7, own, shared)
    serve(scheduler, [[0, 0, 0]])
    scheduler.abandon()
    assert serve(scheduler, [[0, 0, 0]]) == [12]
    assert (own.hit_tokens, shared.hit_tokens) == (0, 12)
    assert serve(engine("sglang", 7, Tier("store", store, shared=True)), [[0, 0, 1]]) == [8]


def test_a_block_that_grows_takes_the_room_of_its_new_tokens() -> None:
    store = TierStore(8)
    assert store.put(["a"], 4, 1) == []
    assert store.put(["a"], 4, 3) == []
    assert store.used == 3
    assert store.put(["b", "c"], 4, 4) == [("a", 3)]
    assert store.used == 8
