"""Spread of the highest rate within an SLO from one draw of the requests to another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CHANCE = 2.0
"""Standard deviation of the logarithm of the highest rate between draws, times the square root of the requests.

On llama-3.1-8b and llama-3.2-1b the deviation was 7 to 15 % at 400 requests, 3 to 6 % at 1,000 and 1 to 3 % at 8,000.
"""
DEVIATIONS = 2.0
"""Standard deviations by which a plan may be better than the rate at which it missed the SLO on one draw."""


def spread(requests: int) -> float:
    """Return the standard deviation of the logarithm of the highest rate that is found with this number of requests."""
    return CHANCE / math.sqrt(requests)


def allowance(requests: int) -> float:
    """Return the factor by which the highest rate may lie above one that missed the SLO on a draw of `requests`
    requests."""
    return math.exp(DEVIATIONS * spread(requests))


def spread_of_values(values: Sequence[float], requests: int, fewer: int) -> float:
    """Return the standard deviation of the logarithm of a value from draw to draw of `fewer` requests, given its values
    on draws of `requests` requests; 0 if a value is not positive and finite."""
    if not all(0 < value < math.inf for value in values):
        return 0.0
    return float(np.std(np.log(values), ddof=1)) * math.sqrt(max(1.0, requests / fewer))


def interval_of_draws(values: Sequence[float], level: float) -> tuple[float, float] | None:
    """Return the interval that holds the value on one more draw in a share `level` of cases; None if fewer than two
    draws are known, or a value is not finite."""
    from scipy.special import stdtrit

    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    mean, deviation, n = float(np.mean(values)), float(np.std(values, ddof=1)), len(values)
    off = float(stdtrit(n - 1, (1 + level) / 2)) * deviation * math.sqrt(1 + 1 / n)
    return max(0.0, mean - off), mean + off
