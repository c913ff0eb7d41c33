"""TensorRT-LLM's block reuse: what is found and evicted, and how it changes who is started and what a step computes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from simtune.engine import Request, Step, TensorRtLlmScheduler
from simtune.engine.block_reuse import ReusedBlocks


def engine(**changes: Any) -> TensorRtLlmScheduler:
    sizes: dict[str, Any] = {
        "num_blocks": 20,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "max_model_len": 40,
        "max_new_tokens": 8,
        "chunked_prefill": False,
        "prefix_caching": True,
        "hash_block_tokens": 4,
    }
    return TensorRtLlmScheduler(**(sizes | changes))


def steps(scheduler: TensorRtLlmScheduler, *requests: Request) -> list[Step]:
    """The steps in which these requests are served, with chunks alone."""
    for request in requests:
        assert scheduler.add(request)
    done = []
    while (step := scheduler.schedule()) is not None:
        if step.chunks:
            done.append(step)
        scheduler.complete(step.repeat)
    assert scheduler.kv.free == scheduler.kv.total
    return done


def chunks(step: Step) -> list[tuple[int, int, int]]:
    """(request, past, tokens) of each chunk."""
    return [(chunk.request.id, chunk.past, chunk.tokens) for chunk in step.chunks]


def test_whole_blocks_are_found_and_the_last_token_is_computed() -> None:
    scheduler = engine()
    found = [
        steps(scheduler, Request(number, prompt, 2, blocks=tuple("abc")))[0].chunks[0].past
        for number, prompt in enumerate((12, 12, 13, 9))
    ]
    assert found == [0, 8, 12, 8], "the third finds the block that the first filled with its answer"


def test_a_newcomer_waits_for_a_prompt_that_stores_the_block_it_lacks_and_another_overtakes_it() -> None:
    like, alike, other = (
        Request(0, 12, 4, blocks=tuple("abc")),
        Request(1, 12, 4, blocks=tuple("abx")),
        Request(2, 9, 4),
    )
    first, second = steps(engine(), like, alike, other)
    assert chunks(first) == [(0, 0, 12), (2, 0, 9)]
    assert chunks(second) == [(1, 8, 4)]


def test_the_budget_is_asked_for_whole_prompts_and_found_tokens_leave_it_unused() -> None:
    scheduler = engine()
    steps(scheduler, Request(0, 24, 2, blocks=tuple("abcdef")))
    pair = Request(1, 24, 2, blocks=tuple("abcdef")), Request(2, 24, 2, blocks=tuple("abcdef"))
    assert [chunks(step) for step in steps(scheduler, *pair)] == [[(1, 20, 4)], [(2, 20, 4)]]


def test_a_first_chunk_ends_at_a_block_whatever_was_found() -> None:
    scheduler = engine(chunked_prefill=True, max_num_batched_tokens=10)
    steps(scheduler, Request(0, 9, 2, blocks=tuple("ab")))
    found = steps(scheduler, Request(1, 30, 2, blocks=tuple("abcdefg")))
    assert [chunks(step) for step in found] == [[(1, 8, 8)], [(1, 16, 8)], [(1, 24, 6)]]


def test_the_beginning_of_a_block_is_copied() -> None:
    scheduler = engine(hash_block_tokens=2)
    steps(scheduler, Request(0, 9, 2, blocks=tuple("abcd")))
    assert chunks(steps(scheduler, Request(1, 9, 2, blocks=tuple("abcx")))[0]) == [(1, 6, 3)]
    assert chunks(steps(scheduler, Request(2, 7, 2, blocks=tuple("abc")))[0]) == [(2, 6, 1)]
    assert chunks(steps(scheduler, Request(3, 6, 2, blocks=tuple("abc")))[0]) == [(3, 4, 2)]
    assert (scheduler.kv.hit_tokens, scheduler.kv.queried_tokens) == (16, 31)


def test_what_an_answer_may_need_is_promised_and_evicts_nothing() -> None:
    scheduler = engine(num_blocks=10)
    steps(scheduler, Request(0, 16, 1, blocks=tuple("abcd")))
    assert scheduler.add(Request(1, 17, 1, max_tokens=8))  # five blocks of six blank ones, and two more if it is long
    scheduler.schedule()
    assert not scheduler.add(Request(2, 41, 1))
    late = Request(3, 9, 1, max_tokens=8)
    assert scheduler.add(late)
    scheduler.complete()
    assert chunks(steps(scheduler)[0]) == [(3, 0, 9)]
    assert steps(scheduler, Request(4, 17, 1, blocks=tuple("abcd")))[0].chunks[0].past == 12, "one block was evicted"


class PlainBlocks:
    """Blocks by the tokens they end, in a queue of free ones, the next to be evicted first."""

    def __init__(self, total: int, size: int) -> None:
        self.size = size
        self.queue: list[int] = list(range(total))
        self.holders = [0] * total
        self.stored: dict[tuple[int, ...], int] = {}
        self.blocks: dict[int, list[int]] = {}

    def find(self, text: tuple[int, ...]) -> list[int]:
        """The stored blocks with which a text begins."""
        found = []
        for end in range(self.size, len(text) + 1, self.size):
            if text[:end] not in self.stored:
                break
            found.append(self.stored[text[:end]])
        return found

    def start(self, number: int, found: list[int], blocks: int) -> None:
        """Give a request what was found for it, and new blocks."""
        for block in found:
            if not self.holders[block]:
                self.queue.remove(block)
        new = [self.queue.pop(0) for _ in range(blocks - len(found))]
        self.stored = {text: block for text, block in self.stored.items() if block not in new}
        self.blocks[number] = found + new
        for block in self.blocks[number]:
            self.holders[block] += 1

    def store(self, number: int, text: tuple[int, ...]) -> None:
        """Store whole blocks, unless their text is stored."""
        for index in range(len(text) // self.size):
            self.stored.setdefault(text[: (index + 1) * self.size], self.blocks[number][index])

    def end(self, number: int, text: tuple[int, ...]) -> None:
        """Store what a request has computed, and free its blocks, the last first; an unfilled one is as good as new."""
        self.store(number, text)
        for index, block in reversed(list(enumerate(self.blocks.pop(number)))):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.queue.insert(len(self.queue) if index < len(text) // self.size else 0, block)


def follow(seed: int) -> int:
    """Serve random requests from both; return the blocks found."""
    draw, hits = Random(seed), 0
    total, size = draw.choice([8, 14, 30]), draw.choice([2, 3])
    ours, plain = ReusedBlocks(total, size, size), PlainBlocks(total, size)
    live: list[tuple[Request, tuple[int, ...]]] = []
    names: dict[tuple[int, ...], int] = {}
    for number in range(120):
        if live and draw.random() < 0.5:
            request, text = live.pop(draw.randrange(len(live)))
            ours.release(request)
            plain.end(number=request.id, text=text[: request.computed])
        path: tuple[int, ...] = ()
        blocks = []
        for _ in range(draw.randrange(6)):
            path = (*path, draw.randrange(2))
            blocks.append(names.setdefault(path, len(names)))
        request = Request(number, draw.randrange(2, 14), 1, blocks=tuple(blocks))
        own = [10**6 + number * 100 + i for i in range(14)]
        text = tuple(([name * 10 + i for name in blocks for i in range(size)] + own)[: request.prompt_tokens])
        hit, found = ours.find(request), plain.find(text[:-1])
        assert hit.blocks == len(found)
        if ours.blocks_for(len(text)) - hit.blocks + hit.idle <= ours.free:
            ours.hold(request, hit)
            ours.take(ours.blocks_for(len(text)) - hit.blocks)
            plain.start(number, found, ours.blocks_for(len(text)))
            request.computed = len(text)
            ours.name(request, len(text) - 1)
            plain.store(number, text[:-1])
            live.append((request, text))
            hits += hit.blocks
        assert ours.free == len(plain.queue)
    return hits


def test_random_worlds_beside_a_plain_queue_of_blocks() -> None:
    assert sum(map(follow, range(20))) > 500


@pytest.mark.slow
def test_many_random_worlds_beside_a_plain_queue_of_blocks() -> None:
    assert sum(map(follow, range(100, 700))) > 10_000
