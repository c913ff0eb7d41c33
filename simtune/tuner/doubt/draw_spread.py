"""Spread of the highest rate within an SLO from one draw of the requests to another."""

from __future__ import annotations

import math

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
