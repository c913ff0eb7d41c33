"""The requests of a study, as many as are asked for and as often as they are drawn anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simtune.specs.traces import Trace
from simtune.specs.workload import Workload
from simtune.workload.requests import RequestStream, build_stream

MOST_REQUESTS = 32_000
"""That are simulated at once, where a run is made longer."""


@dataclass(frozen=True)
class LoadDraws:
    """The requests of a workload, as many as are asked for and as often as they are drawn anew."""

    workload: Workload
    trace: Trace | None
    seed: int

    def stream(self, requests: int, draw: int = 0) -> RequestStream:
        """The first `requests` of a draw; draw 0 is that of the study's own seed."""
        seed = self.seed if draw == 0 else int(np.random.SeedSequence((self.seed, draw)).generate_state(1)[0])
        return build_stream(self.workload, self.trace, requests=requests, seed=seed)
