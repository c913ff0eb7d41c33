"""transformers' schedulers on random small worlds, with block sharing and without: against a plain copy of the rule."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import Request, TransformersFifo, TransformersPrefillFirst
from tests.engine.plain_transformers import PlainRequest, PlainTransformers


@dataclass(frozen=True)
class World:
    blocks: int
    block_size: int
    seqs: int
    budget: int
    margin: float
    load: tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...]  # step, prompt, output, names


def made(seed: int) -> World:
    """Memory is tight, so that requests are starved, and many begin alike."""
    rng = random.Random(seed)
    block_size, blocks, seqs = rng.choice([1, 2, 4]), rng.choice([6, 10, 16, 40]), rng.randint(1, 8)
    longest = blocks * block_size
    load, step = [], 0
    for _ in range(rng.randint(1, 20)):
        step += rng.choice([0, 0, 0, 1, 4, 15])
        prompt = rng.randint(1, max(1, longest // 2))
        output = rng.randint(1, max(1, (longest - prompt) // 2))
        shared = min(rng.randint(0, 8), prompt // block_size)
        group = rng.randint(0, 2)
        load.append((step, prompt, output, tuple((group, i) for i in range(shared))))
    return World(blocks, block_size, seqs, max(seqs, rng.choice([3, 8, 20])), rng.choice([0.0, 0.15, 0.5]), tuple(load))


def engine(world: World, kind: type[TransformersFifo], sharing: bool) -> TransformersFifo:
    return kind(
        num_blocks=world.blocks,
        block_size=world.block_size,
        max_num_seqs=world.seqs,
        max_num_batched_tokens=world.budget,
        max_model_len=world.blocks * world.block_size,
        safety_margin=world.margin,
        prefix_caching=sharing,
    )


def follow(world: World, kind: type[TransformersFifo], sharing: bool) -> None:
    ours = engine(world, kind, sharing)
    plain = PlainTransformers(
        world.blocks,
        world.block_size,
        world.seqs,
        world.budget,
        first=kind.PREFILL_FIRST,
        margin=world.margin,
        sharing=sharing,
    )
    sent = step = done = 0
    while done < len(world.load):
        while sent < len(world.load) and (world.load[sent][0] <= step or sent == done):
            _, prompt, output, names = world.load[sent]
            assert ours.add(Request(sent, prompt, output, blocks=names))
            plain.add(PlainRequest(sent, prompt, output, names))
            sent += 1
        expected = plain.step()
        given_step = ours.schedule()
        assert given_step is not None
        composition = ours.composition()
        assert [(r.id, n) for r, n in composition.items()] == list(expected.scheduled.items())
        assert {r.id: r.computed for r in composition} == expected.read
        assert [r.id for r in given_step.preempted] == expected.reset
        assert ours.kv.free == expected.free
        assert [r.id for r in ours.complete().finished] == expected.finished
        assert ours.kv.free == plain.free
        done += len(expected.finished)
        step += 1
    assert ours.kv.free == ours.kv.total


@pytest.mark.parametrize("kind", [TransformersFifo, TransformersPrefillFirst])
@pytest.mark.parametrize("sharing", [False, True])
def test_every_step_is_that_of_the_plain_engine(kind: type[TransformersFifo], sharing: bool) -> None:
    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=200, deadline=None)
    def check(seed: int) -> None:
        follow(made(seed), kind, sharing)

    check()


@pytest.mark.parametrize("kind", [TransformersFifo, TransformersPrefillFirst])
def test_a_jump_is_as_many_single_steps_where_blocks_are_shared(kind: type[TransformersFifo]) -> None:
    def run(world: World, jumps: bool) -> list[tuple[int, dict[int, int], list[int], list[int]]]:
        scheduler, sent, step, done = engine(world, kind, True), 0, 0, 0
        log = []
        while done < len(world.load):
            while sent < len(world.load) and (world.load[sent][0] <= step or sent == done):
                _, prompt, output, names = world.load[sent]
                scheduler.add(Request(sent, prompt, output, blocks=names))
                sent += 1
            given_step = scheduler.schedule()
            assert given_step is not None
            times = given_step.repeat if jumps else 1
            while sent < len(world.load) and world.load[sent][0] < step + times:
                if scheduler.would_notice():
                    times = max(1, world.load[sent][0] - step)
                    break
                _, prompt, output, names = world.load[sent]
                scheduler.add(Request(sent, prompt, output, blocks=names))
                sent += 1
            scheduled = {request.id: tokens for request, tokens in scheduler.composition().items()}
            preempted = [request.id for request in given_step.preempted]
            finished = sorted(request.id for request in scheduler.complete(times).finished)
            for k in range(times):
                log.append((step + k, scheduled, preempted if k == 0 else [], finished if k == times - 1 else []))
            step += times
            done += len(finished)
        return log

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=200, deadline=None)
    def check(seed: int) -> None:
        assert run(made(seed), jumps=True) == run(made(seed), jumps=False)

    check()


def test_prompts_that_begin_alike_hold_the_same_blocks() -> None:
    """Four blocks in common: computed once, held by both, found by a third when they have gone."""
    scheduler = TransformersFifo(
        num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=80, prefix_caching=True
    )
    names = tuple(("system prompt", i) for i in range(4))
    first, second, third = (Request(i, 18, 2, blocks=names) for i in range(3))
    scheduler.add(first)
    scheduler.schedule()
    scheduler.complete()
    scheduler.add(second)
    step = scheduler.schedule()
    assert step is not None
    assert [(chunk.past, chunk.tokens) for chunk in step.chunks] == [(16, 2)]
    assert scheduler.kv.free == 20 - 4 - 2
    while scheduler.has_work:
        scheduler.complete()
        scheduler.schedule()
    assert scheduler.kv.free == 20
    scheduler.add(third)
    assert scheduler.schedule() is not None
    assert third.computed == 16
    assert (scheduler.kv.queried_tokens, scheduler.kv.hit_tokens) == (54, 32)
