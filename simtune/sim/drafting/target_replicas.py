"""How many replicas of a target are worth using: one more brings verdicts oftener, and each of them later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simtune.sim.drafting.drawn_rounds import overlapped
from simtune.specs.acceptance import Rates
from simtune.specs.schemes import Scheme

ROUNDS = 4096
"""Drawn to tell how many tokens a tick brings: within 2 % or so."""


def useful_replicas(scheme: Scheme, rates: Rates, tick: Callable[[int], int]) -> int:
    """Of the replicas that a scheme has, how many bring the most tokens a second; `tick` is that of so many.

    In lockstep a verdict comes as many ticks later as there are replicas. Once the drafter is what a tick waits for, a
    further replica makes none shorter and every verdict later: it is left idle. So more replicas are never slower.
    """
    survival = np.array(scheme.survival(rates))
    kept = (np.random.default_rng(0).random((ROUNDS, 1)) < survival).sum(axis=1).astype(np.uint8)

    def speed(replicas: int) -> float:
        accepted, _ = overlapped(kept, [0, ROUNDS], scheme.shape.depth, replicas)
        return float((accepted + 1).sum()) / ROUNDS / tick(replicas)

    return max(range(1, scheme.shape.replicas + 1), key=speed)
