"""Draws of the requests of a study, of any number of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
