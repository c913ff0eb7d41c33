"""A batch that knows its members' rounds to come decides as one that goes through its members step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import Batch, Chunk, DraftingBatch, DraftingTerms, Request, VllmFcfs, VllmPriority
from simtune.engine.drafting.asynchronous import AsyncRoundPlanner
from simtune.engine.drafting.needs import DraftNeeds
from simtune.engine.drafting.rounds import Course, joined
from tests.engine.plain_batch import PlainBatch

many = settings(max_examples=150, deadline=None)


@dataclass(frozen=True)
class AcceptanceSampler:
    """Some number of accepted drafts, at most `most`, by request and round."""

    most: int

    def __call__(self, request: Request, number: int, drafts: int) -> int:
        return min(self._of(request.id, number), drafts)

    def tokens_after(self, request: Request, first: int, count: int, drafts: int, tokens: int) -> np.ndarray:
        return tokens + np.cumsum([1 + self(request, first + i, drafts) for i in range(count)])

    def _of(self, request: int, number: int) -> int:
        return (request * 7 + number * 5 + number * number // 3) % (self.most + 1)


@dataclass(frozen=True)
class Stopped(AcceptanceSampler):
    """Told at once for a drafter that stops by itself."""

    stops: Callable[[Request, int, int], np.ndarray]

    def tokens_after(self, request: Request, first: int, count: int, drafts: int, tokens: int) -> np.ndarray:
        made = np.minimum(self.stops(request, first, count), drafts)
        return tokens + np.cumsum([1 + self(request, first + i, int(made[i])) for i in range(count)])


def stops(request: Request, first: int, count: int) -> np.ndarray:
    return np.array([(request.id + 3 * (first + i)) % 5 for i in range(count)])


def waits(request: Request, first: int, count: int) -> np.ndarray:
    """In two rounds of three, more or less, there is no verdict."""
    return np.array([(-1, -1, 2, 0, -1, 4, -1)[(request.id + first + i) % 7] for i in range(count)])


def shared(requests: Sequence[Request]) -> list[int]:
    return [(7 + request.id % 3) // len(requests) for request in requests]


def at_once(sampler: AcceptanceSampler) -> dict[str, object]:
    """Accepted drafts told of many rounds at once."""
    return {"accepted": sampler, "tokens_after": sampler.tokens_after}


SCHEMES: dict[str, Callable[[int, random.Random], dict[str, object]]] = {
    "chain": lambda k, rng: at_once(AcceptanceSampler(k)),
    "chain, told one by one": lambda k, rng: {"accepted": AcceptanceSampler(k)},
    "tree": lambda k, rng: {**at_once(AcceptanceSampler(2)), "depth": 2},
    "by batch": lambda k, rng: {**at_once(AcceptanceSampler(k)), "drafts": lambda n: (k, 0, 1, k - 1)[n % 4]},
    "by stopping": lambda k, rng: {**at_once(Stopped(k, stops)), "stops": stops},
    "by stopping, as deep whatever stops": lambda k, rng: {
        **at_once(Stopped(k, stops)),
        "stops": stops,
        "depth": k + 1,
    },
    "by waiting": lambda k, rng: {**at_once(Stopped(k, waits)), "stops": waits, "depth": k + 1},
    "by request": lambda k, rng: {**at_once(AcceptanceSampler(k)), "lengths": lambda r: r.id % (k + 1)},
    "by budget": lambda k, rng: {**at_once(AcceptanceSampler(k)), "shares": shared},
}


@dataclass(frozen=True)
class World:
    seed: int
    scheme: str
    ahead: bool = False
    """Whether scheduling is asynchronous."""

    def scheduler(self, plain: bool) -> tuple[VllmFcfs, list[tuple[int, Request]]]:
        rng = random.Random(self.seed)
        block_size, blocks = rng.choice([1, 2, 4, 8]), rng.choice([5, 8, 12, 20, 60, 300])
        longest = min(blocks * block_size, rng.choice([30, 1 << 20]))
        longest = max(longest, 4)
        blocks = max(blocks, -(-longest // block_size))
        drafts = rng.randint(2, 5)
        speculation = DraftingTerms(
            max_drafts=drafts,
            lookahead=rng.choice([0, drafts]),
            extra_slots=rng.choice([0, 0, 1]),
            **SCHEMES[self.scheme](drafts, rng),  # type: ignore[arg-type]
        )
        seqs = rng.randint(1, 10)
        base = rng.choice([VllmFcfs, VllmPriority])
        batch = PlainBatch if plain else DraftingBatch

        class Engine(base):  # type: ignore[misc, valid-type]
            def _new_batch(self, speculation: DraftingTerms | None) -> Batch:
                if self.async_scheduling:
                    ahead: Batch = super()._new_batch(speculation)
                    return ahead
                assert speculation is not None
                return batch(self.kv.block_size, speculation, self.max_model_len)

        engine = Engine(
            num_blocks=blocks,
            block_size=block_size,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(seqs, 2, rng.choice([6, 12, 30, 64])),
            max_model_len=longest,
            preemption=rng.choice(["recompute", "swap"]),
            async_scheduling=self.ahead,
            speculation=speculation,
        )
        load, at = [], 0
        for number in range(rng.randint(1, 20)):
            at += rng.choice([0, 0, 0, 1, 3, 20])
            prompt = rng.randint(1, longest // 2)
            output = rng.randint(1, min(60, longest - prompt))
            load.append((at, Request(number, prompt, output, rng.randint(0, 2))))
        return engine, load


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_step_is_that_of_the_plain_batch(scheme: str) -> None:
    @given(st.integers(0, 2**32))
    @many
    def check(seed: int) -> None:
        (ours, load), (plain, their_load) = World(seed, scheme).scheduler(False), World(seed, scheme).scheduler(True)
        step = done = sent = 0
        while done < len(load):
            while sent < len(load) and (load[sent][0] <= step or sent == done):
                ours.add(load[sent][1])
                plain.add(their_load[sent][1])
                sent += 1
            a, b = ours.schedule(), plain.schedule()
            assert a is not None
            assert b is not None
            compositions = [[(r.id, n) for r, n in e.composition().items()] for e in (ours, plain)]
            assert compositions[0] == compositions[1]
            facts = [(x.num_decodes, x.context_tokens, x.draft_tokens, x.draft_depth, x.part) for x in (a, b)]
            assert facts[0] == facts[1]
            assert [r.id for r in a.preempted] == [r.id for r in b.preempted]
            assert (ours.kv.free, ours.num_running) == (plain.kv.free, plain.num_running)
            p, q = ours.complete(), plain.complete()
            assert [r.id for r in p.finished] == [r.id for r in q.finished]
            assert [r.id for r in p.first_token] == [r.id for r in q.first_token]
            assert [ours.emitted(r) for r in ours.decoding] == [plain.emitted(r) for r in plain.decoding]
            assert [ours.decoding.held_by(r) for r in ours.decoding] == [
                plain.decoding.held_by(r) for r in plain.decoding
            ]
            assert ours.decoding.tally == plain.decoding.tally
            done += len(p.finished)
            step += 1
        assert ours.kv.free == ours.kv.total

    check()


AHEAD = [scheme for scheme in SCHEMES if scheme.startswith(("chain", "tree", "by batch", "by request"))]


@pytest.mark.parametrize(("scheme", "ahead"), [(s, False) for s in SCHEMES] + [(s, True) for s in AHEAD])
def test_a_jump_is_as_many_single_steps(scheme: str, ahead: bool) -> None:
    def run(world: World, jumps: bool) -> tuple[list[tuple[object, ...]], int]:
        engine, load = world.scheduler(False)
        log: list[tuple[object, ...]] = []
        step = done = sent = events = 0
        while done < len(load):
            while sent < len(load) and (load[sent][0] <= step or sent == done):
                engine.add(load[sent][1])
                sent += 1
            given = engine.schedule()
            assert given is not None
            times = given.repeat if jumps else 1
            while sent < len(load) and load[sent][0] < step + times:
                if engine.would_notice():
                    times = max(1, load[sent][0] - step)
                    break
                engine.add(load[sent][1])
                sent += 1
            decodes, tokens = given.num_decodes, given.verify_tokens
            log.append((step, decodes, given.context_tokens, tokens, given.draft_depth))
            decodes, tokens = decodes - given.discarded, tokens - given.discarded_tokens
            contexts = given.contexts if times > 1 else ()
            assert contexts is not None
            if times > 1:
                assert given.discarded or contexts[0] + tokens == given.context_tokens
                saved_in_vain.append(given.discarded)
            for i, computed in enumerate(contexts[1:times], start=1):
                log.append((step + i, decodes, computed + tokens, tokens, given.draft_depth))
            log += [(step, "chunk", c.request.id, c.tokens) for c in given.chunks]
            progress = engine.complete(times)
            step += times
            log += [(step, "finished", r.id) for r in progress.finished]
            if progress.finished:
                log.append((step, engine.kv.free))
            done += len(progress.finished)
            events += 1
        return log, events

    saved = 0
    saved_in_vain: list[int] = []

    @given(st.integers(0, 2**32))
    @many
    def check(seed: int) -> None:
        nonlocal saved
        (jumped, few), (stepped, more) = (run(World(seed, scheme, ahead), jumps) for jumps in (True, False))
        assert jumped == stepped
        saved += more - few

    check()
    assert (saved > 0) == (scheme != "by stopping")
    assert any(saved_in_vain) == (ahead and scheme != "by batch")


def test_a_round_told_one_by_one_is_that_told_at_once() -> None:
    """Two faces of the same sampler make the same plans."""
    for seed in range(80):
        found = []
        for scheme in ("chain", "chain, told one by one"):
            engine, load = World(seed, scheme, ahead=seed % 2 == 1).scheduler(False)
            for _, request in load:
                engine.add(request)
            log = []
            while (step := engine.schedule()) is not None:
                log.append((step.num_decodes, step.context_tokens, step.repeat, engine.kv.free))
                engine.complete(step.repeat)
            found.append((log, engine.decoding.tally))
        assert found[0] == found[1]


@pytest.mark.parametrize("at_once", [True, False])
def test_near_the_limit_a_step_may_verify_fewer_drafts_than_were_just_rejected(at_once: bool) -> None:
    """Five drafts beside another request, none of which is kept, then one draft at a time. The request has computed 7
    tokens when its third step is scheduled, 12 as far as the scheduler knows: of 13 that leaves room for one."""

    def accepted(request: Request, number: int, drafts: int) -> int:
        return 0

    def tokens_after(request: Request, first: int, count: int, drafts: int, tokens: int) -> np.ndarray:
        return tokens + np.arange(1, count + 1)

    terms = DraftingTerms(5, accepted, lambda requests: 1 if requests == 1 else 5)
    engine = VllmFcfs(
        num_blocks=40,
        block_size=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=14,
        async_scheduling=True,
        speculation=replace(terms, tokens_after=tokens_after if at_once else None),
    )
    engine.add(Request(0, 6, 6))
    engine.add(Request(1, 5, 1))
    widths = []
    while engine.schedule() is not None:
        widths.append([tokens for _, tokens in engine.composition().items()])
        engine.complete()
    assert widths == [[6, 5], [6], [1], [2], [2], [2]]


def test_a_calendar_counts_members_with_uneven_rounds_while_they_are_there() -> None:
    """max_model_len leaves the last rounds of two members no room for both drafts, and those of a third one all."""
    sampler = AcceptanceSampler(0)
    batch = DraftingBatch(4, DraftingTerms(2, sampler, tokens_after=sampler.tokens_after), 20)
    members = [Request(number, 8, output, computed=8, emitted=1) for number, output in ((0, 12), (1, 3), (2, 12))]
    counts = []
    for member in members:
        batch.join(member)
        counts.append(batch._calendar.ragged)
    batch.leave(members[2])
    counts.append(batch._calendar.ragged)
    while batch.count:
        batch.advance(batch.steps_to_completion())
    assert [*counts, batch._calendar.ragged] == [1, 1, 2, 1, 0]


def test_courses_are_joined_end_to_end() -> None:
    first, second = Course(np.array([5, 7]), 3, 9), Course(np.array([9]), np.array([2]), 11)
    assert joined([second]) is second
    both = joined([first, second], 99)
    assert (both.before.tolist(), np.asarray(both.widths).tolist(), both.final) == ([5, 7, 9], [3, 3, 2], 11)
    nothing = joined([], 4)
    assert (nothing.before.tolist(), np.asarray(nothing.widths).tolist(), nothing.final) == ([], [], 4)


@pytest.mark.parametrize("at_once", [True, False])
def test_rounds_ahead_are_planned_as_they_come_one_by_one(at_once: bool) -> None:
    """Each round verifies a token and as many drafts as max_model_len leaves room for, if all of the round before were
    accepted; a round without drafts draws nothing, one without any token delivers nothing."""
    rng = random.Random(3)
    for _ in range(300):
        sampler, drafts, longest = AcceptanceSampler(rng.randint(0, 5)), rng.randint(1, 6), rng.randint(8, 60)
        prompt = rng.randint(1, longest - 2)
        request = Request(rng.randint(0, 99), prompt, longest - prompt, computed=prompt, emitted=1)
        request.verifications = rng.randint(0, 5)
        end, behind = longest - 1 - rng.choice([0, 0, 1, 3]) % (longest - 1 - prompt), rng.choice([0, 0, 1])
        terms = DraftingTerms(drafts, sampler, tokens_after=sampler.tokens_after if at_once else None)
        planner = AsyncRoundPlanner(terms, 4, longest)
        plan = planner.planned(request, end, drafts, behind=behind)
        computed, verified = prompt, 0
        for age in range(plan.rounds):
            width = max(0, min(1 + drafts, longest - 1 - computed - behind))
            assert (plan.computed(age), plan.width(age)) == (computed, width)
            assert planner.verifications(plan, age) == verified
            accepted = sampler(request, request.verifications + verified, width - 1) if width > 1 else 0
            verified += width > 1
            behind = width - 1 - accepted if width else 0
            computed += 1 + accepted if width else 0
        assert computed == plan.computed(plan.rounds) >= end
        assert plan.rounds == 0 or plan.computed(plan.rounds - 1) < end


def test_calendars_reach_as_far_as_the_longest_answer() -> None:
    """Ten thousand steps ahead, after a long time: the calendars move along and grow."""
    sampler = AcceptanceSampler(2)
    batch = DraftingBatch(16, DraftingTerms(2, sampler, tokens_after=sampler.tokens_after), 1 << 20)
    short = Request(0, 5, 4000, computed=5, emitted=1)
    batch.join(short)
    while not batch.advance(batch.steps_to_completion()):
        pass
    batch.advance(3)  # nobody is here
    long = Request(1, 5, 30_000, computed=5, emitted=1)
    batch.join(long)
    rounds = batch.steps_to_completion()
    assert sum(1 + sampler(long, i, 2) for i in range(rounds)) >= 29_999
    assert sum(1 + sampler(long, i, 2) for i in range(rounds - 1)) < 29_999
    assert batch.advance(rounds) == [long]
    assert (batch.count, *batch.totals()) == (0, 0, 0, 0)


def test_who_rejoins_is_the_last_of_the_members_and_of_those_that_are_complete_together() -> None:
    batch = DraftingBatch(4, DraftingTerms(2, lambda r, n, d: 0), 100)
    members = [Request(number, 4, output, computed=4, emitted=1) for number, output in ((0, 6), (1, 7), (2, 7))]
    for member in members:
        batch.join(member)
    batch.leave(members[0])
    batch.advance(1)
    batch.rejoin(members[0])
    assert list(batch) == [members[1], members[2], members[0]]
    assert batch.newest() is members[0]
    assert batch.advance(batch.steps_to_completion()) == [members[1], members[2], members[0]]


def test_a_padded_chunk_completes_its_prompt_and_is_sampled_from_once() -> None:
    """All but the last token of the second prompt is found, and three drafts that nobody made follow that one."""
    scheduler = VllmFcfs(
        num_blocks=20,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=40,
        prefix_caching=True,
        speculation=DraftingTerms(3, AcceptanceSampler(0)),
    )
    chunks: list[Chunk] = []
    for number in range(2):
        assert scheduler.add(Request(number, 9, 1, blocks=("a", "b")))
        step = scheduler.schedule()
        assert step is not None
        chunks += step.chunks
        scheduler.complete()
    _, chunk = chunks
    assert (chunk.past, chunk.tokens, chunk.padding) == (8, 4, 3)
    assert replace(chunk, request=Request(2, 9, 1)).completes
    assert not replace(chunk, request=Request(2, 10, 1)).completes


def test_a_newcomer_is_padded_where_all_draft_alike_and_there_is_room() -> None:
    """With 3 drafts and 2 slots besides a request takes 1 + 3 + 2 tokens of a step."""
    terms = DraftingTerms(3, AcceptanceSampler(3), extra_slots=2)
    needs = DraftNeeds.of(terms, 6, 20)
    assert [needs.padding_after(past) for past in (0, 15, 16)] == [3, 3, 0]  # and one token to come
    assert DraftNeeds.of(terms, 5, 20).padding == 0
    assert DraftNeeds.of(replace(terms, drafts=lambda requests: 1), 6, 20).padding == 0
    with pytest.raises(ValueError, match="must exceed the drafter's extra slots"):
        DraftNeeds.of(terms, 2, 20)
