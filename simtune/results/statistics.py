"""Long-run statistics from one run: warm-up, intervals of means and percentiles, times between tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array
from simtune.costs.ticks import TICKS_PER_SECOND

HALVINGS = 4
"""Halvings of an interval of times after which rows outside of it are left out."""
BATCHES = 20
T_QUANTILE = 2.093024054408
"""97.5 % quantile of Student's t with BATCHES - 1 degrees of freedom; importing scipy.special would take longer."""


def warm_up(values: Array) -> int:
    """Return the number of leading values that belong to the warm-up, by MSER-5 (White, Cobb and Spratt 2000).

    Values are averaged in fives; the cut is where the variance of what remains over the square of its number is
    least. A cut in the second half means that no steady state was reached: then it is the half.
    """
    groups = len(values) // 5
    if groups < 4:
        return 0
    y = values[: 5 * groups].reshape(groups, 5).mean(axis=1)
    # Cumulative sums of squares would lose digits to a common offset.
    y -= y.mean()
    remaining = np.arange(groups, 0, -1.0)
    sums = np.cumsum(y[::-1])[::-1]
    squares = np.cumsum(y[::-1] ** 2)[::-1]
    score = (squares - sums**2 / remaining) / remaining**2
    half = groups // 2
    cut = int(np.argmin(score[: half + 1]))
    return 5 * cut


def batch_means(values: Array, statistic: str) -> tuple[float, float] | None:
    """Return a 95 % interval of the mean or of a percentile (`p99`) in the long run, from one run's values in order.

    The values are cut into BATCHES equal batches after the warm-up; the statistic of each batch counts as one
    independent observation. The interval is that of Student's t about their mean, which for a percentile of a finite
    batch is a little biased. None if the batches would have fewer values than the statistic needs: 10 for a mean,
    10 beyond the percentile.
    """
    # The empty system at the start is no part of the long run.
    values = values[warm_up(values) :]
    size = len(values) // BATCHES
    beyond = 1.0 if statistic == "mean" else 1 - float(statistic[1:]) / 100
    if size * beyond < 10 - 1e-9:
        return None
    batches = values[: size * BATCHES].reshape(BATCHES, size)
    if statistic == "mean":
        of_batches = batches.mean(axis=1)
    else:
        of_batches = np.percentile(batches, float(statistic[1:]), axis=1)
    centre = float(of_batches.mean())
    half = T_QUANTILE * float(of_batches.std(ddof=1)) / math.sqrt(BATCHES)
    return centre - half, centre + half


class TokenIntervals:
    """Distribution of the times between tokens (ITL): every token counts once, none is stored. The tokens of one round
    of speculation come together and count as one, as for a client that times what is streamed to it.

    A token's time is that of the step that made it. Further waits of a request, after a preemption or for its KV
    cache to come, are not in it.
    """

    def __init__(self, intervals: NDArray[np.int64]) -> None:
        """Sort `intervals`, those of `simtune.results.outcome.Outcome`, at least one row."""
        self._first, self._slope, self._steps, self._decodes = intervals.T
        even = (self._slope == 0) | (self._steps == 1)
        order = self._first[even].argsort()
        tokens = (self._steps * self._decodes)[even][order]
        self._even = self._first[even][order]  # times that all tokens of a row have, ascending
        self._up_to = np.concatenate([[0], tokens.cumsum()])  # tokens of the rows before each position
        self._rising = intervals[~even].T

    @property
    def count(self) -> int:
        """Tokens."""
        return int((self._steps * self._decodes).sum())

    def mean_s(self) -> float:
        """Return the mean over all tokens, in seconds."""
        n = self._steps.astype(np.float64)
        total = self._decodes * (n * self._first + self._slope * (n * (n - 1) / 2))
        return float(total.sum()) / self.count / TICKS_PER_SECOND

    def max_s(self) -> float:
        """Return the longest time of a token, in seconds."""
        return int((self._first + (self._steps - 1) * self._slope).max()) / TICKS_PER_SECOND

    def quantile_s(self, share: float) -> float:
        """Return the smallest time that at least `share` of the tokens do not exceed, to the tick."""
        num_tokens = max(1, math.ceil(share * self.count))
        if not self._rising.size:
            return int(self._even[self._up_to.searchsorted(num_tokens) - 1]) / TICKS_PER_SECOND
        # Bisected over whole ticks: the tokens of rising rows are never written out.
        low, high = int(self._first.min()), int((self._first + (self._steps - 1) * self._slope).max())
        rising, before, halvings = self._rising, 0, 0
        while low < high:
            middle = (low + high) // 2
            if before + self._at_most(middle, rising) >= num_tokens:
                high = middle
            else:
                low = middle + 1
            halvings += 1
            if not halvings % HALVINGS:
                rising, below = _between(rising, low, high)
                before += below
        return low / TICKS_PER_SECOND

    def _at_most(self, ticks: int, rising: NDArray[np.int64]) -> int:
        """Return the number of tokens of even rows and of these rising ones whose time is at most `ticks`."""
        first, slope, steps, decodes = rising
        within = np.minimum(np.maximum((ticks - first) // slope + 1, 0), steps)  # np.clip takes longer
        return int(self._up_to[self._even.searchsorted(ticks, "right")] + (within * decodes).sum())


def _between(rising: NDArray[np.int64], low: int, high: int) -> tuple[NDArray[np.int64], int]:
    """Return the rising rows some of whose tokens take longer than `low` and less than `high` ticks, and the tokens of
    the rows that are left out because all of theirs take no longer than `low`."""
    first, slope, steps, decodes = rising
    below = first + (steps - 1) * slope <= low
    apart = below | (first >= high)
    return rising[:, ~apart], int((steps * decodes)[below].sum())
