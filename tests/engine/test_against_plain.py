"""Every feature of vLLM's schedulers on random small worlds: against a plain engine, and jumps against steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import DraftingTerms, Request, Step, VllmFcfs, VllmPriority
from tests.engine.plain import PlainEngine, PlainRequest

many = settings(max_examples=100, deadline=None)


@dataclass(frozen=True)
class Load:
    """Requests with the step before which each of them comes."""

    at_step: int
    prompt: int
    output: int
    priority: int
    group: int
    shared: int

    def names(self, prompt: int, block_size: int) -> tuple[tuple[int, int], ...]:
        """Its leading blocks that its group has in common."""
        return tuple((self.group, i) for i in range(min(self.shared, prompt // block_size)))


@dataclass(frozen=True)
class World:
    blocks: int
    block_size: int
    seqs: int
    budget: int
    load: tuple[Load, ...]
    features: dict[str, Any]

    @property
    def longest(self) -> int:
        return self.blocks * self.block_size

    def lengths(self, one: Load) -> tuple[int, int]:
        prompt = min(one.prompt, self.longest - 1)
        return prompt, min(one.output, self.longest - prompt)

    def engine(self) -> VllmFcfs:
        features = dict(self.features)
        drafts = features.pop("drafts", 0)
        if drafts:
            features["speculation"] = DraftingTerms(
                drafts,
                lambda r, n, d: draw(r.id, n, d),
                lookahead=features.pop("lookahead"),
                extra_slots=features.pop("extra"),
                drops_last_hit=features.pop("drops"),
                hashes_next=features.pop("hashes_next", False),
                names_verified=features.pop("names_verified", False),
            )
        return (VllmPriority if features.pop("priority", False) else VllmFcfs)(
            num_blocks=self.blocks,
            block_size=self.block_size,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.longest,
            **features,
        )

    def plain(self) -> PlainEngine:
        f = self.features
        return PlainEngine(
            self.blocks,
            self.block_size,
            self.seqs,
            self.budget,
            max_model_len=self.longest,
            priority=f.get("priority", False),
            caching=f.get("prefix_caching", False),
            asynchronous=f.get("async_scheduling", False),
            swap=f.get("preemption") == "swap",
            watermark=f.get("watermark_blocks", 0),
            drafts=f.get("drafts", 0),
            accepted=draw,
            lookahead=f.get("lookahead", 0),
            extra_slots=f.get("extra", 0),
            drops_last_hit=f.get("drops", False),
            hashes_next=f.get("hashes_next", False),
            names_verified=f.get("names_verified", False),
            threshold=f.get("long_prefill_token_threshold", 0),
            reserve_full_isl=f.get("scheduler_reserve_full_isl", True),
            interval=f.get("prefill_schedule_interval", 1),
            aligned=f.get("prefill_steps_aligned", False),
            self_preemption_ends=f.get("self_preemption_ends_step", True),
            adaptive=f.get("long_prefill_token_threshold_adaptive", False),
        )

    def request(self, number: int) -> Request:
        one = self.load[number]
        prompt, output = self.lengths(one)
        return Request(number, prompt, output, one.priority, blocks=one.names(prompt, self.block_size))


def draw(request: int, number: int, drafts: int) -> int:
    """Some number of accepted drafts."""
    return (request * 7 + number * 5 + number * number) % (drafts + 1)


FEATURES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "fcfs": lambda rng: {},
    "priority": lambda rng: {"priority": True},
    "caching": lambda rng: {"prefix_caching": True},
    "async": lambda rng: {"async_scheduling": True},
    "swap": lambda rng: {"preemption": "swap"},
    "watermark": lambda rng: {"watermark_blocks": rng.randint(1, 5)},
    "caching, async": lambda rng: {"prefix_caching": True, "async_scheduling": True},
    "priority, caching, async": lambda rng: {"priority": True, "prefix_caching": True, "async_scheduling": True},
    "threshold": lambda rng: threshold(rng),
    "threshold, async": lambda rng: {"async_scheduling": True} | threshold(rng),
    "adaptive threshold": lambda rng: {"long_prefill_token_threshold_adaptive": True} | threshold(rng),
    "priority of 0.33": lambda rng: {"priority": True, "self_preemption_ends_step": False},
    "priority of 0.33, caching, async": lambda rng: {
        "priority": True,
        "prefix_caching": True,
        "async_scheduling": True,
        "self_preemption_ends_step": False,
    },
    "priority of 0.33, threshold": lambda rng: threshold(rng) | {"priority": True, "self_preemption_ends_step": False},
    "interval": lambda rng: interval(rng),
    "interval, caching": lambda rng: {"prefix_caching": True} | interval(rng),
    "interval, async": lambda rng: {"async_scheduling": True} | interval(rng),
    "interval, threshold": lambda rng: interval(rng) | threshold(rng),
    "interval, drafts": lambda rng: {"async_scheduling": rng.random() < 0.5} | interval(rng) | drafting(rng),
    "first chunk": lambda rng: {"scheduler_reserve_full_isl": False, "prefix_caching": rng.random() < 0.5},
    "first chunk, threshold": lambda rng: {"scheduler_reserve_full_isl": False} | threshold(rng),
    "first chunk, async": lambda rng: {"scheduler_reserve_full_isl": False, "async_scheduling": True},
    "threshold, drafts": lambda rng: {"async_scheduling": rng.random() < 0.5} | drafting(rng) | threshold(rng, 5),
    "drafts": lambda rng: drafting(rng),
    "drafts, async": lambda rng: {"async_scheduling": True} | drafting(rng),
    "drafts of 0.33": lambda rng: drafting_of_0_33(rng),
    "drafts of 0.33, async": lambda rng: {"async_scheduling": True} | drafting_of_0_33(rng),
}


def interval(rng: random.Random) -> dict[str, Any]:
    return {
        "prefill_schedule_interval": rng.choice([2, 3, 7]),
        "prefill_steps_aligned": rng.random() < 0.5,
        "priority": rng.random() < 0.5,
    }


def threshold(rng: random.Random, least: int = 1) -> dict[str, Any]:
    return {
        "long_prefill_token_threshold": rng.choice([least, least + 1, 5, 12]),
        "priority": rng.random() < 0.5,
        "prefix_caching": rng.random() < 0.5,
        "watermark_blocks": rng.choice([0, 0, 2]),
    }


def drafting(rng: random.Random) -> dict[str, Any]:
    return {
        "drafts": rng.randint(1, 4),
        "lookahead": rng.randint(0, 4),
        "extra": rng.randint(0, 2),
        "drops": rng.random() < 0.5,
        "priority": rng.random() < 0.5,
        "prefix_caching": rng.random() < 0.5,
    }


def drafting_of_0_33(rng: random.Random) -> dict[str, Any]:
    return drafting(rng) | {
        "drops": False,
        "prefix_caching": True,
        "hashes_next": rng.random() < 0.7,
        "names_verified": True,
    }


def worlds(features: str) -> st.SearchStrategy[World]:
    """Memory is tight, so that preemptions happen, and often arrivals come together."""

    def made(seed: int) -> World:
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 8])
        blocks = rng.choice([5, 8, 12, 20, 60])
        seqs = rng.randint(1, 10)
        chosen = FEATURES[features](rng)
        budget = max(seqs, chosen.get("extra", 0) + 1, rng.choice([1, 6, 20, 64]))
        longest = blocks * block_size
        load, step = [], 0
        for _ in range(rng.randint(1, 25)):
            step += rng.choice([0, 0, 0, 1, 3, 20])
            prompt, output = rng.randint(1, max(1, longest // 3)), rng.randint(1, max(1, longest // 2))
            if rng.random() < 0.3:  # whole blocks, so that whole prompts are found again
                prompt = min(6 * block_size, longest // 2)
            load.append(Load(step, prompt, output, rng.randint(0, 2), rng.randint(0, 2), rng.randint(0, 6)))
        return World(blocks, block_size, seqs, budget, tuple(load), chosen)

    return st.integers(0, 2**32).map(made)


def follow(world: World) -> None:
    """Step by step beside the plain engine."""
    ours, plain, sent, step, done = world.engine(), world.plain(), 0, 0, 0
    while done < len(world.load):
        while sent < len(world.load) and (world.load[sent].at_step <= step or sent == done):
            request = world.request(sent)
            one = world.load[sent]
            assert ours.add(request)
            plain.add(PlainRequest(sent, request.prompt_tokens, request.output_tokens, one.priority, request.blocks))
            sent += 1
        expected = plain.step()
        given = ours.schedule()
        assert given is not None
        past = {chunk.request: chunk.past for chunk in given.chunks}
        assert {r.id: n for r, n in ours.composition().items()} == expected.scheduled
        assert [r.id for r in ours.composition()] == list(expected.scheduled)
        assert {r.id: past[r] for r in given.admitted} == expected.admitted
        assert [r.id for r in given.preempted] == expected.preempted
        context = sum(expected.past[i] + expected.scheduled[i] for i in expected.decodes)
        assert (given.num_decodes, given.context_tokens) == (len(expected.decodes), context)
        state = ours.kv.free, ours.num_running, ours.num_waiting
        assert state == (expected.free, expected.running, expected.waiting)
        progress = ours.complete()
        assert [r.id for r in progress.first_token] == expected.first
        assert sorted(r.id for r in progress.finished) == sorted(expected.finished)
        done += len(expected.finished)
        step += 1
    while (given := ours.schedule()) is not None:  # to be discarded
        assert [(r.id, n) for r, n in ours.composition().items()] == list(plain.step().scheduled.items())
        assert not ours.complete().finished
    assert ours.kv.free == ours.kv.total == world.blocks


@pytest.mark.parametrize("features", FEATURES)
def test_every_step_is_that_of_the_plain_engine(features: str) -> None:
    @given(world=worlds(features))
    @many
    def check(world: World) -> None:
        follow(world)

    check()


def test_what_two_preempted_in_one_step_find_again() -> None:
    """The first gives one block, which is not enough; the second is the one in need itself, and keeps what it gives."""
    load = Load(0, 3, 1, 0, 0, 3), Load(0, 2, 4, 0, 0, 2), Load(0, 2, 5, 0, 0, 2)
    follow(World(8, 1, 3, 20, load, {"prefix_caching": True, "async_scheduling": True}))


@pytest.mark.parametrize("features", [name for name in FEATURES if "drafts" not in name])
def test_a_jump_is_as_many_single_steps(features: str) -> None:
    """Requests that nobody would notice are added in the middle of a jump; others end it."""

    def run(world: World, jumps: bool) -> tuple[list[tuple[int, str, int]], tuple[int, int]]:
        engine, sent, step, done = world.engine(), 0, 0, 0
        log: list[tuple[int, str, int]] = []
        tokens = 0
        while done < len(world.load):
            while sent < len(world.load) and (world.load[sent].at_step <= step or sent == done):
                engine.add(world.request(sent))
                sent += 1
            given = engine.schedule()
            assert given is not None
            times = given.repeat if jumps else 1
            while sent < len(world.load) and world.load[sent].at_step < step + times:
                if engine.would_notice():
                    times = max(1, world.load[sent].at_step - step)
                    break
                engine.add(world.request(sent))
                sent += 1
            log += [(step, "preempted", r.id) for r in given.preempted]
            log += [(step, "chunk", c.request.id) for c in given.chunks]
            tokens += given.context_tokens * times + given.num_decodes * (times * (times - 1) // 2)
            progress = engine.complete(times)
            step += times
            log += [(step, "first", r.id) for r in progress.first_token]
            log += [(step, "finished", r.id) for r in progress.finished]
            done += len(progress.finished)
        assert engine.schedule() is None
        return log, (tokens, engine.kv.hit_tokens)

    @given(world=worlds(features))
    @many
    def check(world: World) -> None:
        assert run(world, jumps=True) == run(world, jumps=False)

    check()


SAME_DECODES = {
    *("threshold, async", "adaptive threshold", "interval, caching", "interval, threshold", "first chunk, threshold"),
    *("first chunk, async", "priority of 0.33, caching, async", "priority of 0.33, threshold"),
}
"""Features that come alone or in another pair too, and of which steps without prompts know no more than that."""


@pytest.mark.parametrize(
    "features", [pytest.param(name, marks=[pytest.mark.slow] * (name in SAME_DECODES)) for name in FEATURES]
)
def test_the_pure_decode_step_is_that_of_the_whole_rule(features: str) -> None:
    """It is written out for speed; the one without it takes the way of all other steps."""

    def facts(engine: VllmFcfs, step: Step) -> tuple[Any, ...]:
        now = step.num_decodes, step.context_tokens, step.draft_tokens, step.draft_depth, step.longest_context
        discarding = step.discarded > 0  # then the whole rule gives single steps
        coming = None if discarding else (step.repeat, step.contexts is not None and [*map(int, step.contexts)])
        composition = [(r.id, n) for r, n in engine.composition().items()]
        state = engine.kv.free, engine.num_running, engine.num_waiting, engine.unsettled
        return composition, [r.id for r in step.preempted], step.discarded, now, coming, state

    def run(world: World, decode_step: bool) -> list[Any]:
        engine, sent, step, done = world.engine(), 0, 0, 0
        if not decode_step:
            engine._decode_step = lambda: None  # type: ignore[method-assign]
        log: list[Any] = []
        while done < len(world.load):
            while sent < len(world.load) and (world.load[sent].at_step <= step or sent == done):
                engine.add(world.request(sent))
                sent += 1
            given = engine.schedule()
            assert given is not None
            log.append(facts(engine, given))
            progress = engine.complete()
            log.append(([r.id for r in progress.first_token], [r.id for r in progress.finished], engine.kv.free))
            done += len(progress.finished)
            step += 1
        return log

    @given(world=worlds(features))
    @many
    def check(world: World) -> None:
        assert run(world, decode_step=True) == run(world, decode_step=False)

    check()
