"""Jumps, single steps and the plain oracle tell the same story to the last tick, and the story is possible."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import VllmFcfs
from simtune.errors import UsageError
from simtune.results.outcome import Outcome
from simtune.sim.agenda import Agenda
from simtune.sim.core import EngineCore
from simtune.sim.recorder import Recorder
from simtune.sim.source import RequestSource
from simtune.sim.world import World
from simtune.specs.base import LONGEST_S
from simtune.testing.clusters import stream_of
from tests.sim.worlds import Setting, settings

COLUMNS = ("scheduled", "first_token", "finish", "preemptions")

many = hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def columns(outcome: Outcome) -> dict[str, list[int]]:
    return {name: getattr(outcome, name).tolist() for name in COLUMNS}


@given(settings())
@many
def test_jumps_equal_steps_equal_the_plain_engine(world: Setting) -> None:
    jumped, stepped, plain = world.run(), world.run(single_steps=True), world.run_plainly()
    assert columns(jumped) == columns(stepped) == plain
    assert jumped.steps == stepped.steps
    assert jumped.events <= stepped.events
    event(f"preemptions: {min(3, int(jumped.preemptions.sum()))}+")
    event(f"events saved: {10 * (stepped.events - jumped.events) // stepped.events}0 %")


@given(settings(closed=True))
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_closed_loops_too(world: Setting) -> None:
    jumped, stepped = world.run(), world.run(single_steps=True)
    assert columns(jumped) == columns(stepped)
    assert jumped.arrival.tolist() == stepped.arrival.tolist()
    # Never more requests under way than users.
    users, done = world.stream.users, jumped.finish >= 0
    assert users is not None
    for t in jumped.arrival[done]:
        under_way = done & (jumped.arrival <= t) & (jumped.finish > t)
        assert under_way.sum() <= users


@given(settings() | settings(closed=True))
@many
def test_invariants(world: Setting) -> None:
    outcome = world.run(record=True)
    fits = world.stream.prompt_tokens + world.stream.output_tokens <= world.blocks * world.block_size
    # Conserved: every request that fits is finished, every other one refused.
    assert ((outcome.finish >= 0) == fits).all()
    done = outcome.finish >= 0
    assert (outcome.arrival[done] <= outcome.scheduled[done]).all()
    assert (outcome.scheduled[done] < outcome.first_token[done]).all()
    one = world.stream.output_tokens == 1
    assert (outcome.first_token[done & ~one] < outcome.finish[done & ~one]).all()
    assert (outcome.first_token[done & one] == outcome.finish[done & one]).all()
    ends: dict[int, int] = {}
    for r in outcome.records:
        assert ends.get(r.core, 0) <= r.start < r.end, "a core does one thing at a time, and time goes on"
        ends[r.core] = r.end
        assert r.num_decodes + r.prefill_tokens <= world.budget
        assert r.running <= world.seqs
        assert 0 <= r.free_blocks <= world.blocks
    for number, core in enumerate(outcome.cores):
        with_chunks = [r for r in outcome.records if r.core == number and r.prefill_tokens]
        assert core.most_tokens == max((r.num_decodes + r.prefill_tokens for r in with_chunks), default=0)
    # First-come-first-served on every core, as far as nobody was preempted.
    for number in range(world.cores):
        here = done & (outcome.core == number) & (outcome.preemptions == 0)
        assert (np.diff(outcome.scheduled[here]) >= 0).all()


@given(settings())
@hypothesis_settings(max_examples=50, deadline=None)
def test_round_robin_cores_do_not_disturb_each_other(world: Setting) -> None:
    together = world.run()
    for core in range(world.cores):
        numbers = np.arange(core, len(world.stream), world.cores)
        if len(numbers) == 0:
            continue
        arrival = world.stream.arrival_s
        assert arrival is not None
        own = stream_of(arrival[numbers], world.stream.prompt_tokens[numbers], world.stream.output_tokens[numbers])
        alone = Setting(world.blocks, world.block_size, world.seqs, world.budget, 1, world.costs, own).run()
        assert alone.finish.tolist() == together.finish[numbers].tolist()


def test_a_tiny_world_by_hand() -> None:
    """Steps of 1 s whatever they do. Budget 4: the second prompt is cut, the third waits for a seat."""
    stream = stream_of([0.0, 0.0, 0.5], [3, 4, 1], [3, 1, 2])
    world = Setting(100, 1, 2, 4, 1, LinearCosts(step_s=1.0), stream)
    outcome = world.run(record=True)

    def seconds(ticks: np.ndarray) -> list[float]:
        found: list[float] = (ticks / TICKS_PER_SECOND).tolist()
        return found

    # t=0: 3 tokens of A, 1 of B.  t=1: A decodes, 3 of B: B is done at 2.  t=2: A decodes, C's prompt: A done at 3.
    # t=3: C decodes and is done at 4.
    assert seconds(outcome.scheduled) == [0, 0, 2]
    assert seconds(outcome.first_token) == [1, 2, 3]
    assert seconds(outcome.finish) == [3, 2, 4]
    assert [(r.num_decodes, r.prefill_tokens, r.waiting) for r in outcome.records] == [
        (0, 4, 1), (1, 3, 1), (1, 1, 0), (1, 0, 0),
    ]  # fmt: skip


def test_what_never_came_is_at_no_time() -> None:
    """Of two requests the first is longer than the cache: -1 wherever something would have happened to it."""
    stream = stream_of([0.0, 1.0], [9, 3], [2, 2])
    outcome = Setting(10, 1, 2, 16, 1, LinearCosts(step_s=1.0), stream).run()
    assert outcome.refused == 1
    times = (outcome.scheduled, outcome.first_token, outcome.finish)
    assert [(column / TICKS_PER_SECOND).tolist()[1:] for column in times] == [[1.0], [2.0], [3.0]]
    assert [int(column[0]) for column in (*times, outcome.transferred)] == [-1] * 4
    assert outcome.arrival[0] == 0


def test_at_one_instant_steps_end_before_arrivals_and_arrivals_before_scheduling() -> None:
    """B arrives exactly when a step of A's jump ends: B is in the very next step."""
    stream = stream_of([0.0, 3.0], [1, 1], [10, 1])
    outcome = Setting(100, 1, 4, 4, 1, LinearCosts(step_s=1.0), stream).run(record=True)
    assert outcome.scheduled.tolist()[1] == 3 * TICKS_PER_SECOND
    assert [(r.steps, r.num_decodes, r.prefill_tokens) for r in outcome.records] == [
        (1, 0, 1), (2, 1, 0), (1, 1, 1), (6, 1, 0),
    ]  # fmt: skip


def test_a_request_that_is_handed_over_keeps_what_policies_order_by() -> None:
    source = RequestSource(stream_of([0.0], [8], [5]), Agenda(), predicted_tokens=[7], deadlines=[3.5])
    prompt = source.arrive(0)
    rest = source.rest_of(prompt)
    assert rest is not None
    assert (rest.predicted_tokens, rest.deadline, rest.priority) == (7, 3.5, prompt.priority)
    assert rest.emitted == 1


def test_requests_may_come_as_long_as_the_clock_counts() -> None:
    source = RequestSource(stream_of([LONGEST_S], [1], [1]), Agenda())
    assert source.arrival.tolist() == [LONGEST_S * TICKS_PER_SECOND]
    with pytest.raises(UsageError, match="would arrive after 97 days; the simulated clock counts to 49"):
        RequestSource(stream_of([2 * LONGEST_S], [1], [1]), Agenda())


@pytest.mark.parametrize(("at_s", "scheduled_s"), [(2.5, 4), (3.0, 4), (0.5, 2), (20.0, 20)])
def test_a_newcomer_waits_for_the_step_that_was_dispatched_before_it_came(at_s: float, scheduled_s: float) -> None:
    """Asynchronously; all steps take a second. B comes in the step from 2 to 3: the one from 3 to 4 is scheduled."""

    def run(**how: Any) -> list[int]:
        scheduler = VllmFcfs(
            num_blocks=100, block_size=1, max_num_seqs=4, max_num_batched_tokens=4, max_model_len=100,
            async_scheduling=True,
        )  # fmt: skip
        stream = stream_of([0.0, at_s], [1, 1], [10, 1])
        outcome = World([EngineCore(scheduler, LinearCosts(step_s=1.0))], stream, **how).run()
        scheduled: list[int] = outcome.scheduled.tolist()
        return scheduled

    assert run() == run(single_steps=True) == run(record=True) == [0, scheduled_s * TICKS_PER_SECOND]


def test_requests_leave_no_garbage_that_only_a_collector_would_find() -> None:
    """None is collected while a world runs, preemptions and all; and whoever collected before does so again."""

    def garbage(requests: int) -> int:
        stream = stream_of([0.5 * i for i in range(requests)], [8] * requests, [12] * requests)
        world = Setting(8, 4, 4, 8, 1, LinearCosts(step_s=0.1), stream)
        gc.collect()
        gc.disable()
        try:
            outcome = world.run()
            assert not gc.isenabled(), "it was off before"
            assert outcome.preemptions.any()
            return gc.collect()
        finally:
            gc.enable()

    assert garbage(200) == garbage(20)
    Setting(8, 4, 4, 8, 1, LinearCosts(step_s=0.1), stream_of([0.0], [8], [12])).run()
    assert gc.isenabled()


def test_intervals_are_packed_whenever_there_are_many_and_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each of 60 answers of two tokens."""
    world = Setting(10, 1, 2, 16, 1, LinearCosts(step_s=1.0), stream_of([*map(float, range(60))], [3] * 60, [2] * 60))
    whole, packed, pack = world.run(), list[int](), Recorder.pack

    def counting(recorder: Recorder) -> None:
        packed.append(len(recorder.rows))
        pack(recorder)

    monkeypatch.setattr(Recorder, "pack", counting)
    monkeypatch.setattr("simtune.sim.world.MOST_ROWS", 8)
    assert world.run().intervals.tolist() == whole.intervals.tolist()
    assert packed == [9] * 6 + [6], "as soon as there are more than 8, and what is left at the end"


def test_steps_after_a_swap_do_not_wait_for_it_again() -> None:
    """Five blocks of 4; 1 s a step and 10 s a block. Each of two prompts of 8 fills two, and then needs a third."""
    scheduler = VllmFcfs(
        num_blocks=5, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16, preemption="swap"
    )
    core = EngineCore(scheduler, LinearCosts(step_s=1.0), swap=10 * TICKS_PER_SECOND)
    outcome = World([core], stream_of([0.0, 0.0], [8, 8], [8, 8])).run()
    # The second goes out before the step that begins at 1 and ends at 22; the first is done six steps later, at 28.
    # Then the second comes back, which takes 20 s more of one of its seven steps.
    assert (outcome.finish / TICKS_PER_SECOND).tolist() == [28.0, 28.0 + 7 + 20]
