"""An engine to be driven whose steps take what a formula says: no torch, no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simtune.costs.calibration import TimedStep
from simtune.costs.compiled import LinearCosts
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model
from simtune.validation.servers.driven_engines import (
    Driven,
    DrivenRequest,
    DrivenTimes,
    DriverClock,
    EngineSize,
    deployment_of,
    stream_of,
)
from simtune.validation.servers.executed_scheduler import EngineLoop
from tests.validation.served_steps import PretendedClock, PretendedExecutor

COSTS = LinearCosts(2e-3, 3e-5, 4e-7, 2e-9)
SIZE = EngineSize(4, 64, 256, 16)


def tiny() -> Model:
    group = LayerGroup(
        count=2,
        attention=FullAttention(heads=4, kv_heads=2, head_dim=32),
        feed_forward=DenseFeedForward(intermediate_size=256),
    )
    return Model(name="tiny", hidden_size=128, vocab_size=512, max_position=2048, layers=(group,))


class StepCount(PretendedClock):
    """Counts steps as ticks of a clock, while the executor's own clock counts time."""

    def __init__(self, executor: PretendedExecutor) -> None:
        super().__init__()
        self._executor, self._at = executor, 0.0

    def now(self) -> float:
        return self._at

    def wait_until(self, at_s: float) -> None:
        self._at = max(self._at, at_s)

    def run(self, shares: Any) -> None:
        self._executor.run(shares)
        self._at += 1

    def release(self, request: Any) -> None:
        self._executor.release(request)


class PretendedDriver:
    """Steps take COSTS, times `slower`, give or take a percent."""

    def __init__(self, size: EngineSize = SIZE, *, slower: float = 1.0) -> None:
        self.size, self.slower = size, slower
        self.sessions = 0
        self.closed = False

    def facts(self) -> dict[str, Any]:
        return {"engine": "pretended", "version": "1", "reference_s": 0.5, "num_blocks": 65}

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "steps", seed: int = 0) -> Driven:
        self.sessions += 1
        rng = np.random.default_rng(self.sessions)
        time = PretendedClock()
        executor = PretendedExecutor(COSTS, time)
        counting = StepCount(executor)
        (core,) = deployment_of(tiny(), self.size).pools[0].cores(1, None)
        load = stream_of(requests)
        if clock == "steps":
            served = EngineLoop(core.scheduler, counting, counting, load).run()
        else:
            served = EngineLoop(core.scheduler, executor, time, load).run()
        o = served.outcome
        rows = (np.stack([o.arrival, o.first_token, o.finish], axis=-1) / 2.0**40).tolist()
        steps = []
        for step in served.steps:
            w = step.work
            ticks = COSTS.mixed(w.num_decodes, w.context_tokens, w.chunks, w.num_samples)
            steps.append(TimedStep(w, self.slower * ticks / 2.0**40 * (1 + 0.01 * rng.uniform(-1, 1))))
        return Driven(steps, [DrivenTimes(*row) for row in rows])

    def close(self) -> None:
        self.closed = True
