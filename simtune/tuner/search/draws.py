"""Draws of the requests of a study, of any number of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simtune.sim.deployment import shortest_and_longest
from simtune.specs.towers import NO_TOWERS, Towers
from simtune.specs.traces import Trace
from simtune.specs.workload import Workload
from simtune.workload.requests import RequestStream, build_stream

MOST_REQUESTS = 32_000
"""Largest number of requests that one simulation is extended to."""


@dataclass(frozen=True)
class LoadDraws:
    """Draws of the requests of a workload, of any number of requests."""

    workload: Workload
    trace: Trace | None
    seed: int
    towers: Towers = NO_TOWERS

    def stream(self, requests: int, draw: int = 0) -> RequestStream:
        """Return the first `requests` of a draw; draw 0 is that of the study's own seed."""
        seed = self.seed if draw == 0 else int(np.random.SeedSequence((self.seed, draw)).generate_state(1)[0])
        return build_stream(self.workload, self.trace, requests=requests, seed=seed, towers=self.towers)


class DrawnLengths:
    """Lengths of all draws of a load. Several parts of a search need them, and each draw takes longer than a simulation
    of few requests, so each is drawn once."""

    def __init__(self, draws: LoadDraws, count: int) -> None:
        self._draws, self._count = draws, count
        self._lengths: dict[int, list[tuple[int, int]]] = {}

    def of(self, requests: int) -> list[tuple[int, int]]:
        """Return the tokens of the shortest and the longest of the first `requests` of each draw."""
        if requests not in self._lengths:
            streams = (self._draws.stream(requests, draw) for draw in range(self._count))
            self._lengths[requests] = [shortest_and_longest(stream) for stream in streams]
        return self._lengths[requests]
