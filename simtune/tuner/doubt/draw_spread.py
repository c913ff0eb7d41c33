"""Spread of the highest rate within an SLO from one draw of the requests to another.

The farther in the tail a percentile lies, the fewer requests decide it: a share 1 - q of n. So the spread grows with
one over the root of that share, unless the rate is that of the capacity, which all requests decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from simtune.specs.workload import Slo

CHANCE = 2.0
"""Standard deviation of the logarithm of the highest rate between draws, times the square root of the requests, where a
mean or a percentile up to p90 ends it, or the capacity.

On llama-3.1-8b and llama-3.2-1b the deviation was 7 to 15 % at 400 requests, 3 to 6 % at 1,000 and 1 to 3 % at 8,000.
"""
TAIL = 0.5
"""The same for a percentile q in the tail, times the square root of 1 - q: 5 for a p99.

Of random studies (`benchmarks/tuner/test_paired_draws.py`) nine in ten deviations were below 1.6 for means, 2.1 for p90
and 4.9 for p99.
"""
TOGETHER = 0.7
"""Standard deviation of the ratio of the rates of two plans on the same requests, over that of a single rate: busy
draws are busy for both.

Nine in ten pairs that differed by at most 5 % were below 1.0 for means, 1.5 for p90 and 3.2 for p99.
"""
DEVIATIONS = 2.0
"""Standard deviations by which a plan may be better than the rate at which it missed the SLO on one draw."""


class DrawSpread(NamedTuple):
    """Standard deviations of the logarithms of rates between draws, each times the square root of the requests."""

    alone: float
    """Deviation of the highest rate of a plan."""

    @classmethod
    def of(cls, objectives: Iterable[Slo]) -> DrawSpread:
        """Return the spread of the rates that these SLOs end."""
        tails = [tail for slo in objectives for tail in _tails(slo)]
        return cls(max([CHANCE, *(TAIL / math.sqrt(tail) for tail in tails if tail > 0)]))

    def spread(self, requests: int) -> float:
        """Return the standard deviation of the logarithm of the highest rate that is found with this number of
        requests."""
        return self.alone / math.sqrt(requests)

    def allowance(self, requests: int) -> float:
        """Return the factor by which the highest rate may lie above one that missed the SLO on a draw of `requests`
        requests."""
        return math.exp(DEVIATIONS * self.spread(requests))

    def of_ratio(self, requests: int) -> float:
        """Return the factor by which the ratio of the highest rates of two plans on any draw may lie above that on the
        same `requests` requests."""
        return math.exp(DEVIATIONS * TOGETHER * self.spread(requests))

    def slack(self, requests: int, fewer: int) -> float:
        """Return the factor by which a run of `fewer` requests must miss the SLO at a lower rate than one of `requests`
        requests to prove as much, of plans that are compared on the same requests; 1 if they are no fewer."""
        return max(1.0, self.of_ratio(fewer) / self.of_ratio(requests))


def _tails(slo: Slo) -> list[float]:
    """Return the shares of requests that may be beyond the limits of an SLO that are percentiles."""
    if slo.attainment is not None:
        return [1 - slo.attainment]
    return [1 - float(statistic[1:]) / 100 for _, statistic, _ in slo.limits() if statistic != "mean"]


CAPACITY = DrawSpread(CHANCE)
"""Spread of rates near the capacity, whatever statistic of the SLO ends them."""


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
