"""Percentiles of any number of values in the memory of a few thousand."""

from __future__ import annotations

import math

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.summary import Distribution

ERROR = 0.001
"""Percentiles are off by at most this share of their value."""
_LOG_GAMMA = math.log((1 + ERROR) / (1 - ERROR))
_BINS = 2 + math.ceil(62 * math.log(2) / _LOG_GAMMA)
"""Number of bins: for values from 1 to 2^62 ticks, and one for smaller values."""


class Sketch:
    """Counts values in bins whose bounds grow by a fixed factor (DDSketch; Masson, Rim and Lee 2019).

    A percentile is within ERROR of `numpy.percentile` over all values; count, mean, deviation and extremes are
    exact but for rounding. Values are ticks, and not negative.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, dtype=np.int64)
        self.count = 0
        self._least, self._most = math.inf, 0.0
        self._mean, self._squares = 0.0, 0.0  # of deviations

    def add(self, values: Array | Ints, weights: Ints | None = None) -> None:
        """Count values, each `weights` times (once unless given)."""
        if not len(values):
            return
        x = np.asarray(values, dtype=np.float64)
        w = np.ones(len(x), dtype=np.int64) if weights is None else weights
        bins = np.ceil(np.log(np.maximum(x, 1.0)) / _LOG_GAMMA).astype(np.int64) + 1
        bins[x < 1.0] = 0
        self._counts += np.bincount(bins, w, _BINS).astype(np.int64)
        self._least, self._most = min(self._least, float(x.min())), max(self._most, float(x.max()))
        count = int(w.sum())
        mean = float(np.average(x, weights=w))
        apart, total = mean - self._mean, self.count + count
        # Merging means and squared deviations of two sets (Chan, Golub and LeVeque 1979) loses no digits to a common
        # offset.
        self._squares += float((w * (x - mean) ** 2).sum()) + apart**2 * self.count * count / total
        self._mean += apart * count / total
        self.count = total

    @property
    def mean_s(self) -> float:
        """Mean in seconds; needs at least one value."""
        return self._mean / TICKS_PER_SECOND

    def percentile_s(self, percent: float) -> float:
        """Return a percentile in seconds, interpolated between order statistics as `numpy.percentile` does; needs at
        least one value."""
        rank = (self.count - 1) * percent / 100
        low, high = self._nth(math.floor(rank)), self._nth(math.ceil(rank))
        return (low + (high - low) * (rank - math.floor(rank))) / TICKS_PER_SECOND

    def quantile_s(self, share: float) -> float:
        """Return in seconds the smallest value that at least `share` of the values do not exceed; needs at least one
        value."""
        return self._nth(max(1, math.ceil(share * self.count)) - 1) / TICKS_PER_SECOND

    def statistic_s(self, statistic: str) -> float:
        """Return `mean` or a percentile such as `p99`, in seconds; needs at least one value."""
        return self.mean_s if statistic == "mean" else self.percentile_s(float(statistic[1:]))

    def distribution(self) -> Distribution:
        """Return the statistics of the values, without confidence intervals, because the order of the values is not
        kept."""
        if not self.count:
            return Distribution(unit="s", count=0)
        p50, p90, p95, p99 = (self.percentile_s(p) for p in (50, 90, 95, 99))
        return Distribution(
            unit="s",
            count=self.count,
            mean=self.mean_s,
            std=math.sqrt(self._squares / self.count) / TICKS_PER_SECOND,
            min=self._least / TICKS_PER_SECOND,
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            max=self._most / TICKS_PER_SECOND,
        )

    def _nth(self, number: int) -> float:
        """Return the value at rank `number` in ascending order, from 0."""
        at = int(self._counts.cumsum().searchsorted(number, side="right"))
        middle = 0.0 if at == 0 else 2 * math.exp((at - 1) * _LOG_GAMMA) / (1 + math.exp(_LOG_GAMMA))
        return min(max(middle, self._least), self._most)
