"""How long jumps take, and which timer a core gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.compiled import LinearCosts
from simtune.costs.protocol import ImbalanceCosts, RoundCosts, StepCosts
from simtune.engine import DraftingTerms, Step, VllmFcfs
from simtune.sim.core import EngineCore
from simtune.sim.step_timing import DraftTimer, ImbalanceTimer, JumpTime, PlainTimer, timer_for
from simtune.testing.clusters import ImbalancedCosts, stream_of
from tests.sim.worlds import Kinked, Setting


def test_parts_of_a_prompt_take_as_long_together_but_for_the_decodes_of_each() -> None:
    """(1 - 1/n) decode + mixed / n in each of n steps, to the tick."""

    class Ticks:
        def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
            return 7 * num_decodes, 0, 1

        def mixed(self, num_decodes: int, context: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
            return 7 * num_decodes + sum(11 * new for _, new in chunks)

    timer = PlainTimer(Ticks())
    for num_decodes, n in ((0, 3), (5, 1), (5, 4)):
        step = Step(num_decodes, 10 * num_decodes, [], [], decodes_whole=True)
        whole = timer.mixed(step, [(0, 13)], 1)
        taken = 0
        for i in range(n):
            step.part = (i, n)
            taken += timer.of_part(step, whole)
        assert taken == 11 * 13 + n * 7 * num_decodes


class TwoMethods:
    """The least that a cost model can be; it derives from nothing."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        return 1000 + context_tokens, num_decodes, 1 << 40

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        return 1000 + context_tokens + sum(new for _, new in chunks)


@given(st.integers(0, 2**30), st.integers(0, 2**20), st.integers(1, 2**50))
def test_cutting_a_jump_finds_the_step_in_which_the_arrival_falls(first: int, slope: int, elapsed: int) -> None:
    time = JumpTime(first=first + 1, slope=slope)
    n, reached = time.reaching(elapsed)
    assert reached == time.elapsed(n) >= elapsed
    assert n == 1 or time.elapsed(n - 1) < elapsed
    over = time.over_after(elapsed)
    assert time.elapsed(over) <= elapsed < time.elapsed(over + 1)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.data())
def test_listed_ends_are_cut_as_a_series_is(ticks: list[int], data: st.DataObject) -> None:
    ends = list(accumulate(ticks))
    time = JumpTime(first=ticks[0], repetitions=len(ticks), ends=ends)
    assert time.total == time.elapsed(len(ticks)) == sum(ticks)
    at = data.draw(st.integers(0, ends[-1]))
    n, reached = time.reaching(at)
    assert reached == sum(ticks[:n]) >= at
    assert n == 1 or sum(ticks[: n - 1]) < at
    assert sum(ticks[: time.over_after(at)]) <= at
    time.take(5)
    assert (time.total, time.elapsed(0), time.over_after(4), time.over_after(5)) == (5, 0, 0, 1)


def test_protocols_are_declared() -> None:
    """What a core asks of its costs is read off their methods: nobody need derive from anything."""
    linear = LinearCosts(step_s=1e-3)
    assert isinstance(linear, RoundCosts)
    assert not isinstance(linear, ImbalanceCosts)
    assert isinstance(ImbalancedCosts(step_s=1e-3), ImbalanceCosts)
    assert not isinstance(TwoMethods(), RoundCosts | ImbalanceCosts)


@pytest.mark.parametrize(
    ("costs", "drafts", "timer", "asks_longest"),
    [
        (LinearCosts(step_s=1e-3), False, PlainTimer, False),
        (LinearCosts(step_s=1e-3), True, DraftTimer, False),
        (ImbalancedCosts(step_s=1e-3), False, ImbalanceTimer, True),
        (ImbalancedCosts(step_s=1e-3), True, DraftTimer, False),
        (TwoMethods(), False, PlainTimer, False),
        (Kinked(LinearCosts(step_s=1e-3), 7), False, PlainTimer, False),
    ],
)
def test_a_core_gets_the_timer_its_costs_call_for(
    costs: StepCosts, drafts: bool, timer: type, asks_longest: bool
) -> None:
    chosen = timer_for(costs, drafts)
    assert type(chosen) is timer
    assert chosen.asks_longest is asks_longest


def test_imbalance_comes_on_top_with_chunks_or_without() -> None:
    timer, plain, time = (*(timer_for(kind(1e-3), False) for kind in (ImbalancedCosts, LinearCosts)), JumpTime())
    step = Step(2, 100, [], [], repeat=7)
    step.longest_context = 60
    timer.decode(step, 7, time)
    base = JumpTime()
    plain.decode(step, 7, base)
    assert (time.first - base.first, time.repetitions) == (2 * 10**6 * (2 * 60 - 100), 7)
    assert timer.mixed(step, [(0, 5)], 1) - plain.mixed(step, [(0, 5)], 1) == 3 * 10**6 * (2 * 60 - 100)


def test_costs_balanced_by_their_own_word_are_not_asked() -> None:
    class Balanced(ImbalancedCosts):
        balanced = True

    assert type(timer_for(Balanced(1e-3), False)) is PlainTimer


def test_a_scheduler_that_drafts_needs_costs_that_know_rounds() -> None:
    def scheduler() -> VllmFcfs:
        return VllmFcfs(
            num_blocks=9,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=9,
            max_model_len=36,
            speculation=DraftingTerms(2, lambda request, number, drafts: 0),
        )

    assert EngineCore(scheduler(), LinearCosts(1e-3)).scheduler.drafting
    with pytest.raises(TypeError, match=r"the scheduler drafts, and TwoMethods has no `round` and `rounds`"):
        EngineCore(scheduler(), TwoMethods())


def test_two_methods_are_enough_for_a_world() -> None:
    world = Setting(60, 4, 3, 16, 2, TwoMethods(), stream_of([0.0, 1e-9, 2e-9, 1.0], [5, 9, 3, 8], [9, 1, 30, 4]))
    jumped, stepped, plain = world.run(), world.run(single_steps=True), world.run_plainly()
    assert jumped.finish.tolist() == stepped.finish.tolist() == plain["finish"]
    assert jumped.events < stepped.events
