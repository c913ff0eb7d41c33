"""Prefix caching: what is found again, what is evicted, and how much that is on a published trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import PrefixCache, Request, VllmFcfs, VllmPriority, hit_rate


def engine(**changes: Any) -> VllmFcfs:
    sizes: dict[str, Any] = {
        "num_blocks": 10,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 40,
        "prefix_caching": True,
    }
    return VllmFcfs(**(sizes | changes))


def serve(scheduler: VllmFcfs, *requests: Request) -> list[int]:
    """Tokens found cached for each, served together."""
    for request in requests:
        assert scheduler.add(request)
    past: dict[Request, int] = {}
    while (step := scheduler.schedule()) is not None:
        past |= {chunk.request: chunk.past for chunk in step.chunks if chunk.request in step.admitted}
        scheduler.complete(step.repeat)
    assert not any(request.reserved_tokens for request in requests), "nothing is reserved for those that are answered"
    assert scheduler.kv.free == scheduler.kv.total
    return [past[request] for request in requests]


def test_only_whole_blocks_are_found_and_one_token_is_always_computed() -> None:
    scheduler = engine()
    assert serve(scheduler, Request(0, 12, 1, blocks=("a", "b", "c"))) == [0]
    assert serve(scheduler, Request(1, 12, 1, blocks=("a", "b", "c"))) == [8]
    assert serve(scheduler, Request(2, 13, 1, blocks=("a", "b", "c"))) == [12]
    assert serve(scheduler, Request(3, 11, 1, blocks=("a", "b"))) == [8]
    assert serve(scheduler, Request(4, 13, 1, blocks=("x", "b", "c"))) == [0]
    cache = scheduler.kv
    assert (cache.hit_tokens, cache.queried_tokens) == (28, 61)


def test_a_block_is_found_in_the_step_that_computes_it_and_held_by_both() -> None:
    scheduler = engine()
    assert serve(scheduler, Request(0, 9, 9, blocks=("a", "b")), Request(1, 11, 9, blocks=("a", "b"))) == [0, 8]
    assert scheduler.kv.free == 10


def test_the_least_recently_used_tail_goes_first() -> None:
    scheduler = engine(num_blocks=7, max_model_len=28)
    serve(scheduler, Request(0, 12, 1, blocks=("a", "b", "c")))
    serve(scheduler, Request(1, 12, 1, blocks=("x", "y", "z")))
    serve(scheduler, Request(2, 9, 1, blocks=("a", "b")))  # used again; it took the blank block
    serve(scheduler, Request(3, 8, 1))  # evicts c, then z
    assert serve(scheduler, Request(4, 13, 1, blocks=("a", "b", "c"))) == [8]
    assert serve(scheduler, Request(5, 13, 1, blocks=("x", "y", "z"))) == [4]  # two more were needed: y is gone


def test_an_answer_is_found_by_the_next_turn_and_a_preempted_request_finds_its_own() -> None:
    scheduler = engine()
    serve(scheduler, Request(0, 6, 7, blocks=("a", "b", "c")))  # 12 tokens of prompt and answer are computed
    assert serve(scheduler, Request(1, 18, 1, blocks=("a", "b", "c", "d"))) == [12]
    scheduler = engine()
    both = Request(0, 16, 8), Request(1, 16, 8)
    for request in both:
        scheduler.add(request)
    found = []
    while (step := scheduler.schedule()) is not None:
        found += [chunk.past for chunk in step.chunks]
        scheduler.complete()
    # Ten blocks for 4 + 4 of the prompts, and one more each; the second lacks the sixth, and four of its five survive.
    assert (both[1].preemptions, found) == (1, [0, 0, 16])


@pytest.mark.parametrize("ahead", [False, True])
def test_who_is_preempted_with_its_tokens_given_finds_the_block_that_its_last_one_filled(ahead: bool) -> None:
    """Both have filled two blocks and need a third; there is one. The first is given it, then loses all to the second,
    which is more urgent: only the third block contains nothing."""
    scheduler = VllmPriority(
        num_blocks=5,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=20,
        prefix_caching=True,
        async_scheduling=ahead,
    )
    patient, urgent = Request(0, 6, 7, priority=1), Request(1, 7, 3)
    coming, found = [urgent], []
    assert scheduler.add(patient)
    while (step := scheduler.schedule()) is not None:
        found += [(chunk.request.id, chunk.past) for chunk in step.chunks]
        scheduler.complete()
        if coming:
            assert scheduler.add(coming.pop())
    assert patient.preemptions == 1
    assert found == [(0, 0), (1, 0), (0, 8)]


def test_who_comes_back_finds_of_shared_blocks_what_a_newcomer_finds() -> None:
    """The last of them is dropped from either hit; another request holds them all, so that none is idle."""
    cache = PrefixCache(8, 4, 4, drops_last_hit=True)
    both = [Request(number, 13, 4, blocks=("a", "b")) for number in range(2)]
    for request in both:
        hit = cache.find(request)
        cache.hold(request, hit)
        cache.take(2 - hit.blocks)
        request.computed = 8
        cache.name(request, 8)
    cache.release(both[1], 8, returns=True)
    both[1].computed, both[1].preemptions = 0, 1
    back, new = cache.find(both[1]), cache.find(Request(2, 13, 4, blocks=("a", "b")))
    assert back == new
    assert (len(back.runs), back.private, back.blocks, back.idle) == (1, None, 1, 0)


def test_a_large_hash_block_loses_its_tail_block_by_block() -> None:
    scheduler = engine(hash_block_tokens=16)
    serve(scheduler, Request(0, 36, 1, blocks=("a", "b")))  # nine blocks, eight of them named
    serve(scheduler, Request(1, 16, 1))  # takes the blank one, the private one, and the last two of b
    assert serve(scheduler, Request(2, 37, 1, blocks=("a", "b"))) == [24]
    assert serve(scheduler, Request(3, 37, 1, blocks=("a", "b"))) == [32]  # whole again


names = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=30)


@given(prompts=names, capacity=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_a_larger_cache_never_finds_less(prompts: list[list[int]], capacity: int) -> None:
    chains = [tuple(tuple(prompt[: i + 1]) for i in range(len(prompt))) for prompt in prompts]
    rates = [hit_rate(chains, capacity), hit_rate(chains, capacity + 1), hit_rate(chains)]
    assert rates == sorted(rates)


@pytest.fixture
def conversations(data_dir: Path) -> list[dict[str, Any]]:
    with gzip.open(data_dir / "traces" / "mooncake_conversation.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_hit_rates_of_a_published_trace(conversations: list[dict[str, Any]]) -> None:
    prompts = [line["hash_ids"] for line in conversations]
    seen: set[int] = set()
    found = 0
    for prompt in prompts:  # counted without any cache
        found += next((i for i, name in enumerate(prompt) if name not in seen), len(prompt))
        seen.update(prompt)
    assert hit_rate(prompts) == found / sum(map(len, prompts)) == pytest.approx(0.3468, abs=5e-5)
    rates = [hit_rate(prompts, capacity) for capacity in (100, 1000, 10_000, 100_000)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_the_scheduler_finds_what_an_unbounded_cache_contains(conversations: list[dict[str, Any]]) -> None:
    """One request after the other, against a set of all the KV blocks ever computed."""
    scheduler = engine(
        num_blocks=2_000_000,
        block_size=16,
        hash_block_tokens=512,
        max_num_batched_tokens=8192,
        max_model_len=200_000,
    )
    seen: set[tuple[int, int]] = set()
    for number, line in enumerate(conversations[:1500]):
        prompt, output, ids = line["input_length"], line["output_length"], line["hash_ids"]
        blocks = [(ids[i // 32], i) for i in range(min((prompt + output - 1) // 16, 32 * len(ids)))]
        expected = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        request = Request(number, prompt, output, blocks=tuple(ids))
        assert serve(scheduler, request) == [16 * min(expected, (prompt - 1) // 16)]
        seen.update(blocks)


def test_a_prompt_asked_for_again_and_again_stays_and_the_queue_stays_short() -> None:
    """Its first two blocks are found each time; the third, computed anew, takes the block used least lately."""
    scheduler = VllmFcfs(
        num_blocks=8, block_size=1, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, prefix_caching=True
    )
    cache = scheduler.kv
    assert isinstance(cache, PrefixCache)

    def ask(number: int, name: str) -> int:
        before = cache.hit_tokens
        assert scheduler.add(Request(number, 3, 1, blocks=tuple((name, i) for i in range(3))))
        while scheduler.has_work:
            assert scheduler.schedule() is not None
            scheduler.complete()
        return cache.hit_tokens - before

    assert ask(0, "old") == 0
    assert ask(1, "new") == 0
    assert [ask(number, "new") for number in range(2, 200)] == [2] * 198
    assert len(cache._idle) <= 4 * cache.total
    assert ask(200, "old") == 0, "its blocks were the ones used least lately"
