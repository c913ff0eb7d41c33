"""Drafts of a list policy: SGLang's scheduler verifies them round by round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simtune.engine import POLICIES, DraftingTerms, Request, Scheduler

DRAFTS = 3


def terms(share: float, drafts: int = DRAFTS, **more: Any) -> DraftingTerms:
    """Terms by which each draft after an accepted one is accepted with this probability."""

    def accepted(request: Request, number: int, drafts: int, /) -> int:
        draws = np.random.default_rng((request.id, number)).random(drafts)
        return int((draws < share).cumprod().sum())

    return DraftingTerms(max_drafts=drafts, accepted=accepted, **more)


def made(speculation: DraftingTerms | None, **change: Any) -> Scheduler:
    usual = {
        "num_blocks": 60,
        "block_size": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
    }
    return POLICIES["sglang"](**{**usual, "speculation": speculation, **change})


def run(scheduler: Scheduler, load: list[Request]) -> list[tuple[int, int, int]]:
    """Run requests to their end; return (decodes, tokens that they verify, prompts) of every step."""
    for request in load:
        assert scheduler.add(request)
    steps = []
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None, "deadlock"
        assert step.repeat == 1 or not scheduler.drafting
        assert 0 <= scheduler.kv.free <= scheduler.kv.total
        steps += [(step.num_decodes, step.verify_tokens, len(step.chunks))] * step.repeat
        scheduler.complete(step.repeat)
    assert scheduler.kv.free == scheduler.kv.total
    return steps


def requests(seed: int) -> list[Request]:
    lengths = np.random.default_rng(seed).integers(1, 17, (8, 2)).tolist()
    return [Request(number, prompt, output) for number, (prompt, output) in enumerate(lengths)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_every_answer_is_delivered_and_every_block_comes_back(seed: int, share: float) -> None:
    scheduler, load = made(terms(share)), requests(seed)
    run(scheduler, load)
    assert [request.emitted for request in load] == [request.output_tokens for request in load]
    tally = scheduler.tally
    assert tally.tokens == sum(request.output_tokens - 1 - request.preemptions for request in load)
    assert tally.accepted <= tally.drafts <= DRAFTS * tally.rounds


@pytest.mark.parametrize(("share", "rounds"), [(0.0, 12), (1.0, math.ceil(12 / (1 + DRAFTS)))])
def test_none_or_all_kept_take_as_many_rounds_as_by_hand(share: float, rounds: int) -> None:
    steps = run(made(terms(share)), [Request(0, 5, 13)])
    assert steps == [(0, 0, 1), *[(1, 1 + DRAFTS, 0)] * rounds]


def test_without_drafts_nothing_changes() -> None:
    for seed in range(12):
        assert run(made(None), requests(seed)) == [
            (decodes, decodes, prompts) for decodes, _, prompts in run(made(terms(0.0)), requests(seed))
        ] or any(request.preemptions for request in requests(seed))


def test_no_draft_goes_beyond_max_model_len() -> None:
    steps = run(made(terms(0.0), max_model_len=12), [Request(0, 5, 7)])
    assert [tokens for _, tokens, _ in steps] == [0, 4, 4, 4, 3, 2, 1]


def test_drafts_of_a_tree_count_all_their_nodes_and_its_depth() -> None:
    scheduler = made(terms(1.0, drafts=5, depth=2))
    assert scheduler.add(Request(0, 5, 2))
    assert scheduler.schedule() is not None
    scheduler.complete()
    step = scheduler.schedule()
    assert step is not None
    assert (step.draft_tokens, step.draft_depth, step.context_tokens) == (5, 2, 5 + 6)


def test_drafts_that_vary_between_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="as many in every round"):
        made(terms(0.5, drafts=3, shares=lambda members: [1] * len(members)))
