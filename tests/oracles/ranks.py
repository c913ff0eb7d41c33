"""Ranks of a draft beyond those that were counted, continued as a power law."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from simtune.arrays import Array
from simtune.workload.acceptance_estimate import standard_errors


def from_few_ranks(taken: Sequence[float], missed: float) -> tuple[float, float, tuple[float, float]]:
    """(p_1, s, their standard errors) of p_r = p_1 r^-s, from how often the first ranks were taken and how often
    none of them was: multinomial maximum likelihood, to continue a short list of ranks.
    """
    from scipy.optimize import minimize

    counts = np.array(taken, dtype=np.float64)
    if (counts < 0).any() or missed < 0 or counts.sum() == 0:
        raise ValueError("counts cannot be negative, and some candidate must have been taken")
    ranks = np.arange(1, len(counts) + 1)

    def loss(x: Array) -> float:
        p = ranks ** -np.exp(x[1]) / (1 + np.exp(-x[0]))
        rest = 1 - p.sum()
        if rest <= 1e-9:
            return 1e12
        return -float((counts * np.log(p)).sum() + missed * np.log(rest))

    found = minimize(loss, [-1.0, math.log(2.0)], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-8})
    p1, s = float(1 / (1 + np.exp(-found.x[0]))), float(np.exp(found.x[1]))
    error = standard_errors(loss, found.x)
    return p1, s, (float(p1 * (1 - p1) * error[0]), float(s * error[1]))
