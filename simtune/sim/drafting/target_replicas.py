"""Number of replicas of a target that are worth using: one more brings verdicts more often, and each of them later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simtune.sim.drafting.drawn_rounds import overlapped
from simtune.specs.acceptance import Rates
from simtune.specs.schemes import Scheme

ROUNDS = 4096
"""Rounds drawn to estimate the tokens per tick, to within 2 % or so."""


def useful_replicas(scheme: Scheme, rates: Rates, tick: Callable[[int], int]) -> int:
    """Return the number of replicas of a scheme that brings the most tokens per second; `tick` gives the ticks of a
    round by the number of replicas.

    In lockstep a verdict comes as many ticks later as there are replicas. Once the drafter limits the tick, a further
    replica shortens no tick and delays every verdict: it is left idle. So more replicas are never slower.
    """
    survival = np.array(scheme.survival(rates))
    accepted_drafts = (np.random.default_rng(0).random((ROUNDS, 1)) < survival).sum(axis=1).astype(np.uint8)

    def speed(replicas: int) -> float:
        accepted, _ = overlapped(accepted_drafts, [0, ROUNDS], scheme.shape.depth, replicas)
        return float((accepted + 1).sum()) / ROUNDS / tick(replicas)

    return max(range(1, scheme.shape.replicas + 1), key=speed)
