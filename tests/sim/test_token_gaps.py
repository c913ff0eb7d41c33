"""Times between tokens: what cores remember of them."""

from __future__ import annotations

import numpy as np

from simtune.sim.wiring import wire
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from tests.sim.test_audit import deployment


def test_a_core_that_only_prefills_remembers_no_steps() -> None:
    deployed = deployment()
    stream = stream_of(np.arange(40) * 0.01, np.full(40, 300), np.full(40, 20))
    wiring = wire(deployed.plan, deployed.model, deployed.pools, stream, Slo(), 0, None)
    outcome = wiring.world(stream).run()
    assert outcome.steps > 40
    assert [core.gaps._joined for core in wiring.cores if core.pool == "p"] == [[]]
