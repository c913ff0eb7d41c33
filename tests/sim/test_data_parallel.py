"""Data-parallel attention: the cores of an instance step together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simtune.costs.bounds import CostBounds
from simtune.costs.compiled import CompiledCosts, LinearCosts, compile_costs
from simtune.costs.iteration import StepModel
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import DraftingTerms, Step, VllmFcfs
from simtune.results.outcome import Outcome
from simtune.sim.core import EngineCore
from simtune.sim.stepping import DpGroup
from simtune.sim.world import World
from simtune.testing.clusters import stream_of
from tests.costs.made_up import hardware, model, moe, pool
from tests.sim.worlds import Setting, settings


def run(world: Setting, *, single_steps: bool = False, record: bool = True) -> tuple[Outcome, list[EngineCore]]:
    cores = world.make_cores(DpGroup())
    return World(cores, world.stream, single_steps=single_steps, record=record).run(), cores


def columns(outcome: Outcome) -> list[list[int]]:
    return [c.tolist() for c in (outcome.scheduled, outcome.first_token, outcome.finish, outcome.preemptions)]


@given(settings() | settings(closed=True))
@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_steps_of_a_dp_group_begin_and_end_together_and_jumps_are_exact(world: Setting) -> None:
    world = replace(world, cores=world.cores + 1)
    (jumped, cores), (stepped, _) = run(world), run(world, single_steps=True)
    assert columns(jumped) == columns(stepped)
    spans = sorted({(r.start, r.end) for r in jumped.records})
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(core.scheduler.kv.free == core.scheduler.kv.total for core in cores)
    fits = world.stream.prompt_tokens + world.stream.output_tokens <= world.blocks * world.block_size
    assert ((jumped.finish >= 0) == fits).all()


@given(settings() | settings(closed=True))
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_cores_that_fly_beside_one_another_are_exact(world: Setting) -> None:
    """Recorded runs step one by one, others fly: every time and the number of steps are the same."""
    world = replace(world, cores=world.cores + 1)
    (flown, cores), (stepped, _) = run(world, record=False), run(world)
    assert columns(flown) == columns(stepped)
    assert flown.steps == stepped.steps
    assert sorted(gaps_of(flown)) == sorted(gaps_of(stepped))
    assert all(core.scheduler.kv.free == core.scheduler.kv.total for core in cores)


@given(world=settings() | settings(closed=True), ahead=st.booleans())
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_ranks_with_drafts_fly_beside_one_another_exactly(world: Setting, ahead: bool) -> None:
    """Sampled steps too, for which the step with discarded tokens of an engine that runs ahead is not repeated."""
    speculation = DraftingTerms(2, lambda request, number, drafts: (request.id + 5 * number) % (drafts + 1))
    costs = LinearCosts(step_s=0.01, per_token_s=1e-3, per_context_s=1e-6, per_depth_s=1e-4)
    world = replace(world, cores=world.cores + 1, budget=max(world.budget, 4), costs=costs)

    def outcome(record: bool) -> Outcome:
        group = DpGroup()
        schedulers = [
            VllmFcfs(
                num_blocks=world.blocks,
                block_size=world.block_size,
                max_num_seqs=world.seqs,
                max_num_batched_tokens=world.budget,
                max_model_len=world.blocks * world.block_size,
                speculation=speculation,
                async_scheduling=ahead,
            )
            for _ in range(world.cores)
        ]
        cores = [EngineCore(scheduler, costs, stepping=group) for scheduler in schedulers]
        return World(cores, world.stream, record=record).run()

    flown, stepped = outcome(record=False), outcome(record=True)
    assert columns(flown) == columns(stepped)
    assert flown.steps == stepped.steps
    assert sorted(gaps_of(flown)) == sorted(gaps_of(stepped))
    assert [core.sampled for core in flown.cores] == [core.sampled for core in stepped.cores]


def gaps_of(outcome: Outcome) -> list[int]:
    """Return all times between tokens."""
    return [
        int(first + k * slope)
        for first, slope, n, decodes in outcome.intervals
        for k in range(n)
        for _ in range(decodes)
    ]


def test_a_core_is_scheduled_anew_only_when_its_own_batch_changes() -> None:
    """Answers of 400 and 100 tokens on two ranks: the first one's scheduler is called at its beginning and its end."""
    stream = stream_of([0.0, 0.0], [1, 1], [400, 100])
    cores = Setting(100, 10, 4, 64, 2, LinearCosts(step_s=1.0, per_token_s=1.0), stream).make_cores(DpGroup())
    calls = [0 for _ in cores]
    for core in cores:
        count_calls(core, calls)
    outcome = World(cores, stream).run()
    assert outcome.steps == 500
    assert 0 < min(calls) <= max(calls) < 12


def count_calls(core: EngineCore, calls: list[int]) -> None:
    """Count the calls of a core's scheduler."""
    schedule = core.scheduler.schedule

    def counted() -> Step | None:
        calls[core.virtual_engine] += 1
        return schedule()

    core.scheduler.schedule = counted  # type: ignore[method-assign]


def test_a_long_prompt_on_one_rank_makes_the_others_wait() -> None:
    """Steps cost 1 s and 1 s per token. A decodes alone from 2 s on; the prompt of B, 5 tokens, arrives at 2.5 s: it
    waits for the end of A's step, and the step with it takes 6 s for both."""
    stream = stream_of([0.0, 2.5], [1, 5], [4, 1])
    outcome, _ = run(Setting(100, 1, 4, 8, 2, LinearCosts(step_s=1.0, per_token_s=1.0), stream))
    assert (outcome.first_token / TICKS_PER_SECOND).tolist() == [2, 10]
    assert np.allclose(outcome.finish / TICKS_PER_SECOND, [12, 10])


# --- experts that all groups share ------------------------------------------------------------------------

EXPERTS = model(feed_forward=moe())


def compiled(dp: int = 2, host_step_s: float = 0.0) -> CompiledCosts:
    return compile_costs(
        EXPERTS, hardware(host_step_s=host_step_s), pool(attention_dp=dp, expert_parallel=True, budget=64), 256
    )


def test_experts_compute_the_tokens_of_all_groups_and_no_padding() -> None:
    """Two groups with 40 and 8 tokens: attention of the larger, and experts as if both had 24."""
    costs = compiled()
    step = StepModel(EXPERTS, hardware(), pool(attention_dp=2, expert_parallel=True, budget=64))
    large = costs.decode(40, 4000)[0]
    both = costs.together(large, 40, 40, 48, False)
    moe_s = step.routed(np.array([40.0, 24.0]))["moe"]
    assert (large - both) / TICKS_PER_SECOND == pytest.approx(moe_s[0] - moe_s[1], rel=1e-3)
    assert costs.together(large, 40, 40, 80, False) == large, "groups that are alike"
    assert costs.together(large, 40, 40, 40, False) < both, "the other is idle"


def test_bounds_hold_for_a_group_whose_others_are_idle() -> None:
    costs = compiled(dp=4)
    lines = CostBounds(costs.tables).linear_minorants()
    for tokens in (1, 7, 40, 64):
        alone = costs.together(costs.decode(tokens, 100 * tokens)[0], tokens, tokens, tokens, False)
        attention = costs.tables.alone.ticks(tokens, 100 * tokens) + costs.tables.pure.head[tokens]
        least = max(c0 + c1 * tokens for c0, c1 in lines) * TICKS_PER_SECOND
        assert least <= (alone - attention) * (1 + 1e-9)
        assert least > 0


def test_what_waits_for_the_host_waits_for_it() -> None:
    costs = compiled(host_step_s=1.0)
    ticks = costs.decode(40, 4000)[0]
    assert ticks == TICKS_PER_SECOND
    assert costs.together(ticks, 40, 40, 41, False) == ticks


@pytest.mark.parametrize("host_step_s", [0.0, 3e-3, 1.0])
@pytest.mark.parametrize("lengths", [[9, 30], [200, 3], [60, 60]])
def test_jumps_of_groups_with_experts_are_exact(lengths: list[int], host_step_s: float) -> None:
    stream = stream_of([0.0, 0.002], [20, 50], lengths)
    world = Setting(64, 4, 8, 64, 2, compiled(host_step_s=host_step_s), stream)
    (jumped, _), (stepped, _) = run(world), run(world, single_steps=True)
    assert columns(jumped) == columns(stepped)


def test_a_lone_group_s_steps_wait_for_the_host_until_their_context_is_long() -> None:
    """Two sequences decode beside an idle group, whose share of the experts makes their steps as long as the host at a
    context of 340 tokens: until then every step takes the host's time, from then on more and more."""
    costs = compiled()
    host = costs.together(costs.decode(2, 340)[0], 2, 2, 2, False)
    waiting = compiled(host_step_s=host / TICKS_PER_SECOND)
    world = Setting(800, 1, 8, 64, 2, waiting, stream_of([0.0] * 4, [20] * 4, [300, 1, 300, 1]))
    (jumped, _), (stepped, _) = run(world), run(world, single_steps=True)
    assert columns(jumped) == columns(stepped)
    assert len(jumped.records) < len(stepped.records) == 301
    took = np.array([r.end - r.start for r in stepped.records if not r.prefill_tokens])
    long = np.arange(42, 42 + 2 * len(took), 2) > 340
    assert (took[~long] == host).all()
    assert (np.diff(took[long], prepend=host) > 0).all()
