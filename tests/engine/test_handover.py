"""Requests that move between instances, and instances that are lost: nothing is leaked, nothing is delivered twice."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import DraftingTerms, Request, Scheduler, VllmFcfs, VllmPriority


def engine(policy: type[VllmFcfs] = VllmFcfs, **changes: Any) -> VllmFcfs:
    sizes: dict[str, Any] = {
        "num_blocks": 10,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
    }
    return policy(**(sizes | changes))


def used_blocks(scheduler: VllmFcfs) -> int:
    """Blocks of everyone who should hold some, counted request by request; shared ones once."""
    batch, kv = scheduler.decoding, scheduler.kv
    holders = [*scheduler.prefilling, *scheduler._held, *scheduler._settling.ended]
    held = {r: kv.held_by(r) for r in holders}
    held |= {r: kv.blocks_for(r.known_tokens) for r in scheduler._reserved}
    for r in batch:
        held[r] = batch.held_by(r)
    runs = {run for r in held for run in r.runs or ()}
    return sum(blocks - (r.shared if r.runs else 0) for r, blocks in held.items()) + sum(run.size for run in runs)


def finish(scheduler: Scheduler) -> list[Request]:
    finished: list[Request] = []
    while (step := scheduler.schedule()) is not None:
        finished += scheduler.complete(step.repeat).finished
    return finished


def test_a_held_request_gives_its_seat_but_keeps_its_blocks() -> None:
    prefill = engine(max_num_seqs=1)
    asked = Request(0, 10, 1, hold=True)
    prefill.add(asked)
    assert finish(prefill) == [asked]
    assert (prefill.num_running, prefill.has_work, prefill.kv.free) == (0, False, 10 - 3)
    prefill.release(asked)
    assert prefill.kv.free == 10


def test_an_expected_request_has_a_seat_and_blocks_and_decodes_when_it_is_received() -> None:
    decode = engine()
    coming = Request(0, 8, 5, emitted=1)
    assert decode.expect(coming)
    assert (decode.num_running, decode.kv.free) == (1, 10 - 3)  # the token it brings needs a third block
    assert decode.schedule() is None
    decode.receive(coming)
    step = decode.schedule()
    assert step is not None
    assert (step.num_decodes, step.context_tokens, step.chunks) == (1, 9, ())
    assert decode.composition() == {coming: 1}
    assert decode.kv.free == 10 - 3
    assert step.repeat == 4
    assert decode.complete(4).finished == [coming]
    assert (coming.emitted, decode.kv.free) == (5, 10)


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        ({"max_num_seqs": 1}, False),
        ({}, True),
        ({"watermark_blocks": 1}, True),
        ({"num_blocks": 12, "watermark_blocks": 7}, False),
    ],
)
def test_without_room_nothing_is_reserved(changes: dict[str, Any], room: bool) -> None:
    decode = engine(**changes)
    assert decode.expect(Request(0, 8, 5, emitted=1))
    free = decode.kv.free
    assert decode.expect(Request(1, 20, 5, emitted=1)) is room
    assert decode.kv.free == free - (6 if room else 0)
    assert decode.num_running == 1 + room


def test_an_expected_request_is_not_preempted_but_may_be_given_up() -> None:
    """The one who decodes goes without: it finds no block until the other's are given back."""
    decode = engine()
    coming, here = Request(1, 30, 5, emitted=1), Request(0, 4, 20)
    decode.add(here)
    decode.schedule()
    decode.complete()
    assert decode.expect(coming)  # 8 of the 9 free blocks
    while (step := decode.schedule()) is not None:
        assert step.num_decodes == 1
        decode.complete()
    assert (here.preemptions, here.computed, here.emitted) == (1, 0, 5)
    assert (decode.num_running, decode.num_waiting, decode.kv.free) == (1, 1, 2)
    decode.release(coming)
    step = decode.schedule()
    assert step is not None
    assert (step.preempted, step.admitted) == ([here], [here])
    decode.complete()
    assert finish(decode) == [here]
    assert decode.kv.free == 10


def test_what_a_lost_instance_gives_back() -> None:
    lost = engine(num_blocks=20, max_num_seqs=5, prefix_caching=True, async_scheduling=True)
    held = Request(0, 3, 1, hold=True, blocks=("a",))
    lost.add(held)
    finish(lost)
    decoding, prompt, waiting = Request(1, 5, 9, blocks=("a",)), Request(2, 30, 4), Request(3, 8, 4)
    coming, come = Request(4, 7, 3, emitted=1), Request(5, 7, 3, emitted=1)
    for request in (decoding, prompt, waiting):
        lost.add(request)
    lost.schedule()
    lost.complete()
    for request in (coming, come):
        assert lost.expect(request)
    lost.receive(come)
    assert lost.schedule() is not None
    assert lost.abandon() == [decoding, come, prompt, coming, held, waiting]
    assert (decoding.computed, decoding.emitted, come.emitted, prompt.computed) == (0, 1, 1, 0)
    assert (lost.kv.free, lost.num_running, lost.num_waiting, lost.has_work) == (20, 0, 0, False)
    lost.add(Request(6, 9, 2, blocks=("a",)))
    step = lost.schedule()
    assert step is not None
    assert step.chunks[0].past == 0  # the prefix cache is lost too
    lost.complete()
    finish(lost)
    assert lost.kv.free == 20


@pytest.mark.parametrize(("policy", "order"), [(VllmFcfs, [1, 2, 3]), (VllmPriority, [3, 1, 2])])
def test_waiting_requests_can_be_taken_back(policy: type[VllmFcfs], order: list[int]) -> None:
    scheduler = engine(policy, max_num_seqs=1)
    scheduler.add(Request(0, 4, 4))
    scheduler.schedule()
    scheduler.complete()
    for number, priority in ((1, 1), (2, 2), (3, 0)):
        scheduler.add(Request(number, 4, 4, priority))
    assert [r.id for r in scheduler.withdraw()] == order
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert [r.id for r in finish(scheduler)] == [0]


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True},
    "caching": {"prefix_caching": True},
    "caching, larger hash blocks, async": {"prefix_caching": True, "hash_block_tokens": 12, "async_scheduling": True},
    "swap": {"preemption": "swap"},
    "drafts": {"speculation": DraftingTerms(3, lambda r, n, d: (r.id + n) % (d + 1), lookahead=3, extra_slots=1)},
}
FEATURES["drafts, async"] = FEATURES["drafts"] | {"async_scheduling": True}
FEATURES["drafts, async, caching"] = FEATURES["drafts, async"] | {"prefix_caching": True}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("policy", [VllmFcfs, VllmPriority])
def test_nothing_is_leaked_whatever_happens(policy: type[VllmFcfs], features: str) -> None:
    """Two instances, one hands over to the other; transfers take their time, fail, and instances are lost."""

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=60, deadline=None)
    def check(seed: int) -> None:
        rng = random.Random(seed)
        prefill, decode = (engine(policy, num_blocks=rng.choice([10, 16, 30]), **FEATURES[features]) for _ in "pd")
        todo = [
            Request(
                i, rng.randint(1, 20), rng.randint(2, 18), rng.randint(0, 2), blocks=(rng.randint(0, 1), 2, 3, 4, 5)
            )
            for i in range(rng.randint(1, 15))
        ]
        answers = {r.id: r for r in todo}
        transfers: dict[int, tuple[Request, Request, bool]] = {}
        done: list[int] = []

        def send(request: Request) -> None:
            known = request.prompt_tokens + request.emitted
            prefill.add(Request(request.id, known, 1, request.priority, blocks=request.blocks, hold=True))

        def lose_prefill() -> None:
            for _, request, reserved in transfers.values():
                if reserved:
                    decode.release(request)
            transfers.clear()
            for lost in prefill.abandon():
                send(answers[lost.id])

        def lose_decode() -> None:
            for lost in decode.abandon():
                if lost.id in transfers:
                    transfers[lost.id] = *transfers[lost.id][:2], False
                else:
                    send(lost)

        while len(done) < len(answers):
            what = rng.random()
            if todo and what < 0.3:
                send(todo.pop())
            elif what < 0.6 and (step := prefill.schedule()) is not None:
                for held in prefill.complete().finished:
                    request = answers[held.id]
                    request.emitted += 1
                    if request.emitted == request.output_tokens:
                        prefill.release(held)
                        done.append(request.id)
                    else:
                        transfers[held.id] = held, request, False
            elif what < 0.9 and (step := decode.schedule()) is not None:
                done += [r.id for r in decode.complete(rng.randint(1, step.repeat)).finished]
            elif transfers and what < 0.97:
                number = rng.choice(list(transfers))
                held, request, reserved = transfers[number]
                if not reserved:
                    transfers[number] = held, request, decode.expect(request)
                elif rng.random() < 0.2:
                    decode.release(request)
                    transfers[number] = held, request, False
                else:
                    decode.receive(request)
                    prefill.release(held)
                    del transfers[number]
            elif what > 0.99:
                rng.choice([lose_prefill, lose_decode])()
            for scheduler in (prefill, decode):
                assert scheduler.kv.total - scheduler.kv.free == used_blocks(scheduler)
                assert scheduler.num_running <= scheduler.max_num_seqs
        assert sorted(done) == sorted(answers)
        assert all(r.emitted == r.output_tokens for r in answers.values())

    check()
