"""SGLang's radix cache: what is found, what is evicted, and what requests share, beside a plain tree of tokens."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from simtune.engine import Request, SglangScheduler
from simtune.engine.radix import RadixCache
from tests.engine.plain_radix import PlainRadix, Text


class World:
    """Requests in both caches at once; all that can be asked of either must be the same."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Random(seed)
        self.page, self.hash_tokens = draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 3, 4, 5, 8])
        total = draw.choice([20, 40, 80])
        self.cache = RadixCache(total, self.page, self.hash_tokens)
        self.plain = PlainRadix(total, self.page)
        self.names: dict[Text, int] = {}
        self.texts: dict[Request, Text] = {}
        self.live: list[Request] = []
        self.waiting: list[Request] = []
        self.hits = 0

    def newcomer(self) -> Request:
        """A request whose text begins like others, and goes on as no other does."""
        draw, blocks = self.draw, []
        path: Text = ()
        number, prompt, output = len(self.texts), draw.randrange(2, 30), draw.randrange(1, 8)
        for _ in range(draw.randrange(8)):
            path = (*path, draw.randrange(2))
            blocks.append(self.names.setdefault(path, len(self.names)))
        request = Request(number, prompt, output, blocks=tuple(blocks))
        named = [name * 10 + i for name in blocks for i in range(self.hash_tokens)]
        own = [10**6 + number * 100 + i for i in range(80)]
        self.texts[request] = tuple((named + own)[: prompt + output])
        return request

    def admit(self) -> None:
        """Look a request up, and let it in if there is room."""
        cache, plain, page = self.cache, self.plain, self.page
        request = self.waiting.pop() if self.waiting and self.draw.random() < 0.5 else self.newcomer()
        known = request.known_tokens
        hit = cache.find(request)
        assert hit.blocks * page == plain.find(self.texts[request][: known - 1])
        blocks = cache.blocks_for(known)
        if blocks > cache.total or blocks - hit.blocks + hit.idle > cache.free:
            return
        cache.hold(request, hit)
        plain.hold(request.id, self.texts[request], request.computed)
        cache.take(blocks - hit.blocks)
        plain.take(blocks - hit.blocks)
        request.reserved_tokens = blocks * page
        self.live.append(request)
        self.hits += hit.blocks

    def go_on(self) -> None:
        """Let a resident compute a chunk or a token, end, or lose its blocks."""
        cache, plain, draw = self.cache, self.plain, self.draw
        request = draw.choice(self.live)
        text, prompt = self.texts[request], request.prompt_tokens
        if not request.decoding:
            request.computed += min(draw.randrange(1, 12), request.known_tokens - request.computed)
            cache.name(request, request.computed)
            plain.enter(request.id, text[: request.computed], prompt)
            if request.computed == request.known_tokens:
                request.decoding, request.emitted = True, request.emitted + 1
            return
        blocks = max(0, cache.blocks_for(request.computed + 1) - request.reserved_tokens // self.page)
        ends = request.emitted >= request.output_tokens
        if not ends and blocks <= cache.free:
            cache.take(blocks)
            plain.take(blocks)
            request.reserved_tokens += blocks * self.page
            request.computed, request.emitted = request.computed + 1, request.emitted + 1
            return
        self.live.remove(request)
        pages = cache.held_by(request)
        cache.release(request, returns=not ends)
        if ends:
            plain.enter(request.id, text[: request.computed], prompt)
        plain.leave(request.id, pages)
        if not ends:
            request.computed, request.decoding, request.preemptions = 0, False, request.preemptions + 1
            self.waiting.append(request)

    def run(self, steps: int) -> int:
        """Take some steps; return the pages found."""
        for _ in range(steps):
            if self.live and self.draw.random() < 0.55:
                self.go_on()
            else:
                self.admit()
            assert (self.cache.free, self.cache._blank) == (self.plain.free, self.plain.blank)
        return self.hits


def test_random_worlds_beside_a_plain_tree_of_tokens() -> None:
    assert sum(World(seed).run(80) for seed in range(40)) > 1000


@pytest.mark.slow
def test_many_random_worlds_beside_a_plain_tree_of_tokens() -> None:
    assert sum(World(seed).run(200) for seed in range(100, 400)) > 10_000


def engine(**changes: Any) -> SglangScheduler:
    sizes: dict[str, Any] = {
        "num_blocks": 60,
        "block_size": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 50,
        "prefix_caching": True,
        "hash_block_tokens": 4,
    }
    return SglangScheduler(**(sizes | changes))


def serve(scheduler: SglangScheduler, *requests: Request) -> list[int]:
    """Tokens found for each, served together."""
    for request in requests:
        assert scheduler.add(request)
    past: dict[Request, int] = {}
    while (step := scheduler.schedule()) is not None:
        past |= {chunk.request: chunk.past for chunk in step.chunks if chunk.request in step.admitted}
        scheduler.complete(step.repeat)
    assert scheduler.kv.free == scheduler.kv.total
    return [past[request] for request in requests]


def test_all_tokens_but_the_last_are_found_whatever_the_blocks_of_their_names() -> None:
    scheduler = engine()
    assert serve(scheduler, Request(0, 8, 3, blocks=("a", "b"))) == [0]
    assert serve(scheduler, Request(1, 8, 3, blocks=("a", "b"))) == [7]
    assert serve(scheduler, Request(2, 11, 3, blocks=("a", "b"))) == [8]
    assert serve(scheduler, Request(3, 9, 3, blocks=("a", "x"))) == [4]
    assert (scheduler.kv.hit_tokens, scheduler.kv.queried_tokens) == (19, 36)


def test_prompts_of_one_step_do_not_find_each_other_and_share_pages_from_then_on() -> None:
    scheduler = engine()
    both = [Request(number, 8, 4, max_tokens=4, blocks=("a", "b")) for number in range(2)]
    for request in both:
        scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    assert [chunk.past for chunk in step.chunks] == [0, 0]
    assert scheduler.kv.free == 60 - 16
    scheduler.complete()
    assert scheduler.kv.free == 60 - 8, "pages of equal text came free"


def test_a_chunk_is_found_while_the_rest_of_the_prompt_is_still_to_come() -> None:
    scheduler = engine(enable_mixed_chunk=True)
    scheduler.add(Request(0, 24, 2, max_tokens=2, blocks=tuple("abcdef")))
    assert scheduler.schedule() is not None
    scheduler.complete()
    late = Request(1, 20, 2, max_tokens=2, blocks=tuple("abcdx"))
    scheduler.add(late)
    step = scheduler.schedule()
    assert step is not None
    assert [(chunk.request.id, chunk.past, chunk.tokens) for chunk in step.chunks] == [(0, 16, 8), (1, 16, 4)]


def test_an_answer_is_found_by_the_next_turn_and_evicted_before_its_prompt() -> None:
    scheduler = engine()
    serve(scheduler, Request(0, 8, 5, blocks=("a", "b", "c")))  # 12 tokens are computed
    assert serve(scheduler, Request(1, 20, 2, blocks=tuple("abcde"))) == [12]
    scheduler = engine(num_blocks=50)
    serve(scheduler, Request(0, 8, 5, blocks=("a", "b", "c")))
    serve(scheduler, Request(1, 40, 2))  # 41 pages are computed: four of twelve would be enough
    assert serve(scheduler, Request(2, 20, 2, blocks=tuple("abcde"))) == [8]


def test_a_retracted_request_finds_its_prompt() -> None:
    scheduler = engine(num_blocks=30, max_model_len=30, schedule_conservativeness=0.01)
    both = [Request(number, 9, 9, max_tokens=19 - 8 * number) for number in range(2)]
    coming, found = [both[1]], []
    scheduler.add(both[0])
    while (step := scheduler.schedule()) is not None:
        found += [(chunk.request.id, chunk.past) for chunk in step.chunks if chunk.request in step.admitted]
        scheduler.complete()
        if coming:
            scheduler.add(coming.pop())
    (victim,) = [request for request in both if request.preemptions]
    assert found[-1] == (victim.id, 9)
    assert (scheduler.kv.hit_tokens, scheduler.kv.free) == (0, 30)
