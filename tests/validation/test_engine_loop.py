"""One scheduler, two clocks: the loop of a real engine, on a clock that steps move as the cost model says, does at
every instant what the simulator says it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.compiled import LinearCosts
from simtune.engine import TransformersFifo, VllmFcfs
from simtune.engine.scheduler import Scheduler
from simtune.results.outcome import Outcome
from simtune.sim.core import EngineCore
from simtune.sim.world import World
from simtune.validation.servers.engine_clocks import CLOCKS
from simtune.validation.servers.executed_scheduler import EngineLoop, Served
from simtune.workload.requests import RequestStream
from tests.validation.served_steps import PretendedClock, PretendedExecutor

COSTS = LinearCosts(1e-3, 1e-5, 1e-7, 1e-8)
COLUMNS = ("arrival", "scheduled", "first_token", "finish", "preemptions")


def stream(count: int, gap_s: float | None, seed: int = 0) -> RequestStream:
    rng, zero = np.random.default_rng(seed), np.zeros(count, dtype=np.int64)
    arrival_s = None if gap_s is None else np.cumsum(rng.exponential(gap_s, count))
    return RequestStream(
        arrival_s=arrival_s,
        prompt_tokens=rng.integers(1, 200, count),
        output_tokens=rng.integers(1, 60, count),
        class_index=zero,
        priority=zero,
        class_names=("default",),
        slos=(None,),
        users=5 if gap_s is None else None,
        think_s=0.003,
    )


def scheduler(kind: type[Scheduler], blocks: int) -> Scheduler:
    return kind(num_blocks=blocks, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


def served(kind: type[Scheduler], blocks: int, requests: RequestStream) -> Served:
    clock = PretendedClock()
    executor = PretendedExecutor(COSTS, clock)
    result = EngineLoop(scheduler(kind, blocks), executor, clock, requests).run()
    assert not executor.cached, "everybody's keys and values are released"
    return result


def simulated(kind: type[Scheduler], blocks: int, requests: RequestStream) -> Outcome:
    return World([EngineCore(scheduler(kind, blocks), COSTS)], requests, single_steps=True, record=True).run()


@pytest.mark.parametrize("kind", [VllmFcfs, TransformersFifo])
@pytest.mark.parametrize("blocks", [400, 24])
@pytest.mark.parametrize("gap_s", [0.0, 0.004, 0.1, None])
def test_the_loop_does_what_the_simulator_says(kind: type[Scheduler], blocks: int, gap_s: float | None) -> None:
    requests = stream(40, gap_s)
    real, world = served(kind, blocks, requests), simulated(kind, blocks, requests)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(real.outcome, column), getattr(world, column), err_msg=column)
    batches = [(r.num_decodes, r.prefill_tokens, r.free_blocks) for r in world.records]
    mine = [(s.work.num_decodes, sum(new for _, new in s.work.chunks), s.free_blocks) for s in real.steps]
    assert mine == batches
    assert real.outcome.steps == world.steps
    if blocks == 24 and gap_s == 0.0:
        assert real.outcome.preemptions.sum() > 0


def test_intervals_between_tokens_are_those_of_the_simulator() -> None:
    requests = stream(30, 0.004)
    real, world = served(VllmFcfs, 400, requests), simulated(VllmFcfs, 400, requests)
    single = [0, 2, 3]  # without the slope, which says what a step would take longer that does not come
    np.testing.assert_array_equal(real.outcome.intervals[:, single], world.intervals[:, single])


def test_requests_that_outgrow_the_engine_are_refused() -> None:
    requests = stream(6, 0.01)
    requests.prompt_tokens[2] = 250
    requests.output_tokens[2] = 50
    real = served(VllmFcfs, 400, requests)
    assert real.outcome.refused == 1
    assert (real.outcome.finish >= 0).sum() == 5


def test_steps_say_what_they_computed() -> None:
    requests = stream(20, 0.0)
    steps = served(VllmFcfs, 400, requests).steps
    assert sum(new for s in steps for _, new in s.work.chunks) == requests.prompt_tokens.sum()
    assert sum(s.work.num_samples for s in steps) == requests.output_tokens.sum()
    assert all(s.timed("cpu").seconds >= 0 and s.timed("wall").seconds >= 0 for s in steps)


def test_a_scheduler_that_runs_ahead_is_refused() -> None:
    settings: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    ahead = VllmFcfs(**settings, max_model_len=256, async_scheduling=True)
    with pytest.raises(ValueError, match="asynchronously"):
        EngineLoop(ahead, PretendedExecutor(COSTS, PretendedClock()), PretendedClock(), stream(3, 0.0))


@pytest.mark.parametrize("name", list(CLOCKS))
def test_clocks_wait_and_never_go_back(name: str) -> None:
    clock = CLOCKS[name]()
    begin = clock.now()
    clock.wait_until(begin + 0.01)
    assert clock.now() >= begin + 0.01
    before = clock.now()
    clock.wait_until(0.0)
    assert clock.now() >= before
