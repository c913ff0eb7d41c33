"""Service stages as processes and resources of simpy: what `simtune.sim.stations` must come to."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import simpy

from simtune.arrays import Array, Ints
from simtune.specs.stages import Stage

Process = Generator[simpy.Event, Any, None]


def serve(stages: Sequence[Stage], arrival_s: Array, prompt_tokens: Ints) -> dict[str, Array]:
    """Return the seconds at which each request leaves each stage."""
    env = simpy.Environment()
    servers = {stage.name: simpy.Resource(env, capacity=stage.instances) for stage in stages}
    ends = {stage.name: np.zeros(len(arrival_s)) for stage in stages}

    def part(number: int, stage: Stage, given: Sequence[simpy.Event], done: simpy.Event, seconds: float) -> Process:
        yield env.all_of(given)
        with servers[stage.name].request() as turn:
            yield turn
            yield env.timeout(seconds)
        ends[stage.name][number] = env.now
        done.succeed()

    def arrivals() -> Process:
        for number, (at, tokens) in enumerate(zip(arrival_s.tolist(), prompt_tokens.tolist(), strict=True)):
            if at > env.now:
                yield env.timeout(at - env.now)
            part_events: dict[str, list[simpy.Event]] = {}
            for stage in stages:
                part_events[stage.name] = [env.event() for _ in range(stage.parts)]
                seconds = (stage.seconds + stage.seconds_per_token * tokens) / stage.parts
                for p, event in enumerate(part_events[stage.name]):
                    env.process(part(number, stage, list(_given(stage, part_events, p)), event, seconds))

    env.process(arrivals())
    env.run()
    return ends


def _given(stage: Stage, done: Mapping[str, Sequence[simpy.Event]], part: int) -> Iterator[simpy.Event]:
    """Yield the events that a part of a stage waits for: the same part of the stages before it."""
    for name in stage.after:
        yield done[name][part]
