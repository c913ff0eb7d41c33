"""The engine's promises that no log can show: laws for any load, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import DecodeBatch, DraftingTerms, Request, VllmFcfs, VllmPriority
from simtune.engine.kv import KvBlocks
from simtune.engine.policies.layer_preemption import PriorityLayers
from simtune.engine.preemption import Recompute, Swap
from simtune.engine.step import Chunk

requests = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=25)


FEATURES: dict[str, tuple[type[VllmFcfs], dict[str, Any]]] = {
    "fcfs": (VllmFcfs, {}),
    "priority": (VllmPriority, {}),
    "caching": (VllmFcfs, {"prefix_caching": True}),
    "async": (VllmFcfs, {"async_scheduling": True}),
    "swap": (VllmFcfs, {"preemption": "swap"}),
    "drafts": (VllmFcfs, {"speculation": DraftingTerms(2, lambda r, n, d: (r.id + n) % (d + 1), lookahead=2)}),
    "drafts, async": (
        VllmFcfs,
        {
            "speculation": DraftingTerms(2, lambda r, n, d: (r.id + n) % (d + 1), lookahead=2),
            "async_scheduling": True,
        },
    ),
}


def engine(blocks: int, block_size: int, seqs: int, budget: int, features: str = "fcfs") -> VllmFcfs:
    policy, settings = FEATURES[features]
    return policy(
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(budget, seqs),
        max_model_len=blocks * block_size,
        **settings,
    )


@given(
    load=requests,
    blocks=st.integers(4, 40),
    block_size=st.sampled_from([1, 4, 16]),
    seqs=st.integers(1, 8),
    budget=st.integers(1, 64),
    repeat=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_budgets_hold_and_nothing_is_lost(
    load: list[tuple[int, int]], blocks: int, block_size: int, seqs: int, budget: int, repeat: bool
) -> None:
    scheduler = engine(blocks, block_size, seqs, budget)
    asked = [Request(i, p, o) for i, (p, o) in enumerate(load)]
    accepted = [r for r in asked if scheduler.add(r)]
    assert all(r.prompt_tokens + r.output_tokens > blocks * block_size for r in asked if r not in accepted)
    done: list[Request] = []
    first: list[Request] = []
    while (step := scheduler.schedule()) is not None:
        tokens = step.num_decodes + sum(c.tokens for c in step.chunks)
        assert 0 < tokens <= scheduler.max_num_batched_tokens
        assert step.num_decodes + len(step.chunks) <= seqs
        assert all(c.tokens > 0 and c.past + c.tokens <= c.request.known_tokens for c in step.chunks)
        residents = list(scheduler.decoding)
        assert step.num_decodes == len(residents)
        contexts = [r.computed + scheduler.emitted(r) - r.emitted + 1 for r in residents]
        assert step.context_tokens == sum(contexts)
        progress = scheduler.complete(step.repeat if repeat else 1)
        first += progress.first_token
        done += progress.finished
        holding = [r.computed + scheduler.emitted(r) - r.emitted for r in scheduler.decoding]
        holding += [r.computed for r in scheduler.prefilling]
        assert scheduler.kv.free == blocks - sum(scheduler.kv.blocks_for(h) for h in holding)
        assert len(done) + scheduler.num_running + len(scheduler.waiting) == len(accepted)
    assert sorted(r.id for r in done) == [r.id for r in accepted]
    assert sorted(r.id for r in first) == [r.id for r in accepted]
    assert all(r.emitted == r.output_tokens for r in done)


@given(
    load=requests,
    longer=st.integers(1, 30),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 48),
    features=st.sampled_from(list(FEATURES)),
)
@settings(max_examples=200, deadline=None)
def test_the_policy_never_reads_the_output_length(
    load: list[tuple[int, int]], longer: int, seqs: int, budget: int, features: str
) -> None:
    """Two worlds that differ only in how long answers will be schedule alike until the first answer ends."""

    def schedules(extra: int) -> list[tuple[int, tuple[tuple[int, int], ...], bool]]:
        scheduler = engine(30, 4, seqs, budget, features)
        for i, (prompt, output) in enumerate(load):
            scheduler.add(Request(i, min(prompt, 40), min(output, 40) + extra, i % 3, blocks=(i % 2, 2, 3)))
        log = []
        while (step := scheduler.schedule()) is not None:
            finished = bool(scheduler.complete().finished)
            log.append((step.num_decodes, tuple((c.request.id, c.tokens) for c in step.chunks), finished))
            if finished:
                break
        return log

    short, long = schedules(0), schedules(longer)
    assert [s[:2] for s in short] == [s[:2] for s in long][: len(short)]


@given(
    contexts=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    block_size=st.integers(1, 9),
    before=st.integers(0, 20),
    free=st.integers(0, 60),
    limit=st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_block_demand_of_coming_steps(contexts: list[int], block_size: int, before: int, free: int, limit: int) -> None:
    """The residue count against counting blocks request by request."""
    batch = DecodeBatch(block_size)
    for i, context in enumerate(contexts):
        batch.join(Request(i, context, 1000, computed=context, emitted=1))
    batch.advance(before)
    now = [c + before for c in contexts]

    def needed(steps: int) -> int:
        return sum(-(-(c + steps) // block_size) - -(-c // block_size) for c in now)

    assert [batch.blocks_for(n) for n in range(30)] == [needed(n) for n in range(30)]
    fits = batch.steps_that_fit(free, limit)
    assert fits == max(n for n in range(limit + 1) if needed(n) <= free)


def test_a_batch_remembers_the_order_of_joining_and_forgets_who_left() -> None:
    batch = DecodeBatch(16)
    members = [Request(i, 10 * i + 1, 50, computed=10 * i + 1, emitted=1) for i in range(4)]
    for member in members:
        batch.join(member)
    batch.advance(3)
    batch.leave(members[1])
    assert (members[1].computed, members[1].emitted) == (14, 4)
    batch.join(members[1])  # preempted and back: now the newest
    assert [r.id for r in batch] == [0, 2, 3, 1]
    assert batch.newest() is members[1]
    assert batch.context_tokens == sum((1 + 3, 21 + 3, 31 + 3, 14))
    assert batch.steps_to_completion() == 46
    assert [r.id for r in batch.advance(46)] == [0, 2, 3, 1]
    assert batch.count == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 161}, "one request of max_model_len"),
        ({"max_num_batched_tokens": 3}, "must be at least max_num_seqs"),
        ({"chunked_prefill": False}, "without chunked prefill"),
        (
            {"speculation": DraftingTerms(64, lambda r, n, d: 0, extra_slots=64)},
            "must exceed the drafter's extra slots",
        ),
        ({"prefix_caching": True, "hash_block_tokens": 24}, "must be a multiple of block_size"),
        ({"prefix_caching": True, "preemption": "swap"}, "prefix_caching are mutually exclusive"),
        (
            {
                "async_scheduling": True,
                "speculation": DraftingTerms(1, lambda r, n, d: 0, shares=lambda requests: [1] * len(requests)),
            },
            "requires a number of drafts known in advance",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "num_blocks": 10,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 160,
    }
    VllmFcfs(**good)
    with pytest.raises(ValueError, match=message):
        VllmFcfs(**{**good, **change})


def test_a_request_that_could_outgrow_the_limit_is_refused() -> None:
    scheduler = engine(10, 16, 4, 64)
    assert not scheduler.add(Request(0, 100, 61))
    assert scheduler.add(Request(1, 100, 60))


def test_a_swapped_request_brings_its_blocks_back_and_computes_nothing_again() -> None:
    scheduler = engine(5, 4, 2, 16, "swap")
    for number in (0, 1):
        scheduler.add(Request(number, 8, 8))
    computed, swapped = 0, []
    while (step := scheduler.schedule()) is not None:
        computed += step.num_decodes + sum(chunk.tokens for chunk in step.chunks)
        if step.swapped_out_blocks or step.swapped_in_blocks:
            swapped.append((step.swapped_out_blocks, step.swapped_in_blocks, [r.id for r in step.admitted]))
        scheduler.complete()
    # Both prompts fill 2 blocks, their first answer tokens need one each: the second is out until the first is done.
    assert swapped == [(2, 0, []), (0, 2, [1])]
    assert computed == 2 * (8 + 8 - 1)


def test_what_is_computed_again_is_not_swapped() -> None:
    scheduler = engine(5, 4, 2, 16)
    for number in (0, 1):
        scheduler.add(Request(number, 8, 8))
    preempted = 0
    while (step := scheduler.schedule()) is not None:
        preempted += len(step.preempted)
        assert (step.swapped_out_blocks, step.swapped_in_blocks) == (0, 0)
        scheduler.complete()
    assert preempted == 1


def test_the_watermark_keeps_a_newcomer_out_but_not_the_only_one() -> None:
    def running(watermark: int) -> list[int]:
        scheduler = VllmFcfs(
            num_blocks=10,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=40,
            watermark_blocks=watermark,
        )
        for number in range(3):
            scheduler.add(Request(number, 12, 4))
        scheduler.schedule()
        return [r.id for r in scheduler.prefilling]

    assert running(0) == running(1) == [0, 1, 2]
    assert running(2) == [0, 1]
    assert running(9) == [0]


def test_drafts_depend_on_the_step_before_and_end_with_the_model_s_length() -> None:
    """One draft each after a step of two requests, three after a step of one; all are accepted."""
    scheduler = VllmFcfs(
        num_blocks=20,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=20,
        speculation=DraftingTerms(3, lambda r, n, d: d, lambda requests: 1 if requests == 2 else 3),
    )
    for number, output in ((0, 3), (1, 16)):
        scheduler.add(Request(number, 4, output))
    widths = []
    while scheduler.schedule() is not None:
        widths.append([(r.id, tokens) for r, tokens in scheduler.composition().items()])
        scheduler.complete()
    # 4 + 2 + 2 + 4 + 4 tokens are computed then; the last position is never computed, so that 3 of 4 fit.
    assert widths == [[(0, 4), (1, 4)], [(0, 2), (1, 2)], [(1, 2)], [(1, 4)], [(1, 4)], [(1, 3)]]


def test_the_rest_of_a_halted_step_is_run_once_when_its_prompts_are_aborted() -> None:
    scheduler = PriorityLayers(
        num_blocks=40, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=40, chunked_prefill=True
    )
    first, prompt, newcomer = Request(0, 4, 9), Request(1, 8, 2), Request(2, 4, 1)
    scheduler.add(first)
    for _ in range(PriorityLayers.PARTS):
        assert scheduler.schedule() is not None
        scheduler.complete()
    scheduler.add(prompt)
    halted = scheduler.schedule()
    assert halted is not None
    assert (halted.num_decodes, halted.part, [chunk.request for chunk in halted.chunks]) == (1, (0, 8), [prompt])
    scheduler.complete()
    scheduler.abort(prompt)
    scheduler.add(newcomer)
    rest = []
    for _ in range(PriorityLayers.PARTS - 1):
        step = scheduler.schedule()
        assert step is not None
        rest.append((step.num_decodes, step.part, step.repeat, len(step.chunks)))
        scheduler.complete()
    assert rest == [(1, (part, 8), 1, 0) for part in range(1, 8)]
    assert first.emitted == 2
    admitting = scheduler.schedule()
    assert admitting is not None
    assert [chunk.request for chunk in admitting.chunks] == [newcomer]


def test_no_block_comes_back_for_tokens_that_were_computed_again() -> None:
    chunk = Chunk(Request(0, 8, 4), 4, 4)
    assert Recompute().swap_in([chunk], KvBlocks(4, 2)) == 0
    assert Swap().swap_in([chunk], KvBlocks(4, 2)) == 2
