"""Data-parallel attention: the cores of an instance step together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.sim.core import EngineCore
from simtune.sim.outcome import Outcome
from simtune.sim.stepping import DpGroup
from simtune.sim.world import World
from simtune.testing.clusters import stream_of
from tests.sim.worlds import Setting, settings


def run(world: Setting, *, single_steps: bool = False) -> tuple[Outcome, list[EngineCore]]:
    cores = world.make_cores(DpGroup())
    return World(cores, world.stream, single_steps=single_steps, record=True).run(), cores


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


def test_a_long_prompt_on_one_rank_makes_the_others_wait() -> None:
    """Steps cost 1 s and 1 s per token. A decodes alone from 2 s on; the prompt of B, 5 tokens, arrives at 2.5 s: it
    waits for the end of A's step, and the step with it takes 6 s for both."""
    stream = stream_of([0.0, 2.5], [1, 5], [4, 1])
    outcome, _ = run(Setting(100, 1, 4, 8, 2, LinearCosts(step_s=1.0, per_token_s=1.0), stream))
    assert (outcome.first_token / TICKS_PER_SECOND).tolist() == [2, 10]
    assert np.allclose(outcome.finish / TICKS_PER_SECOND, [12, 10])
