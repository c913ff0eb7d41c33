"""Windows of time: the work of all requests that must be done within one has to fit into it, whatever the policy.

Request i may be worked at from a_i + lead_i and is late after a_i + slack_i. If
the requests that have both times in a window do not fit into it, those with the largest works are removed until the
rest fits: at least as many requests miss a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints

GRID = 16
"""Points between which windows lie at a given load."""
SPANS = 4
"""Cuts of the arrivals between which windows lie at any rate."""
SLACKS = 6
"""Cuts of the slack, for the same."""
CUTS = 12
"""Requests of a core for which the work before them is added up."""
ROUNDING = 1e-9
"""Largest error of rounding to ticks and of adding floating point numbers: relative, and in seconds."""


@dataclass(frozen=True)
class WindowJobs:
    """Requests that compete for one resource, in order of arrival."""

    arrival_s: Array
    lead_s: Array
    slack_s: Array
    works: Sequence[Array]
    """Lower bounds, one array each, on what the requests take of the resource, in seconds of one server."""
    speed: float
    """Number of servers."""

    def must_miss(self) -> int:
        """Return the least number of late requests: the best family of disjoint windows between points of a grid.

        A window must drop its largest works until the rest fits; disjoint windows drop different requests.
        """
        if not len(self.arrival_s):
            return 0
        release, due = self.arrival_s + self.lead_s, self.arrival_s + self.slack_s
        last = float(due[np.isfinite(due)].max(initial=-np.inf))
        if not np.isfinite(last):
            return 0
        points = np.linspace(float(release.min()), last, GRID)
        return max(_best_family(release, due, work, self.speed, points) for work in self.works)

    def highest_rate(self, allowed: int, below: float = float("inf")) -> float:
        """Return the factor by which arrivals may come faster, or slower, until more than `allowed` are late in some
        window; infinite if it is not below `below`, another factor that is known.

        Windows reach from the arrival of one request to the limit of another one. The requests in a window stay in it
        at any rate, and its time shrinks as the rate grows, so every window gives exactly the rate from which it is too
        short.
        """
        n = len(self.arrival_s)
        if n <= allowed or n < 2:
            return float("inf")
        factor, works = below, np.array(self.works)
        finite = bool(np.isfinite(works).all())
        for inside, span_s, slack_s in self._nested():
            work_s = float((works @ inside).max()) / self.speed if finite else float("inf")
            if work_s <= slack_s or span_s / (work_s - slack_s) > factor * (1 + ROUNDING):
                # The window cannot lower the factor, even before its largest works are removed.
                continue
            least_s = without_largest(works[:, inside], allowed).max() / self.speed * (1 - ROUNDING) - ROUNDING
            if least_s > slack_s:
                factor = min(factor, span_s / (least_s - slack_s))
        return factor if factor < below else float("inf")

    def _nested(self) -> Iterator[tuple[NDArray[np.bool_], float, float]]:
        """Yield windows: the requests inside, seconds between its first and last arrival, seconds that it is longer
        than that."""
        n, finite = len(self.arrival_s), np.isfinite(self.slack_s)
        if not finite.any():
            return
        cuts = np.unique(np.linspace(0, n - 1, SPANS + 1).astype(int))
        slacks = np.unique(np.quantile(self.slack_s[finite], np.linspace(0, 1, SLACKS + 1)[1:], method="higher"))
        order = np.arange(n)
        for slack in slacks:
            short = self.slack_s <= slack
            for i, first in enumerate(cuts[:-1]):
                for last in cuts[i + 1 :]:
                    inside = short & (order >= first) & (order <= last)
                    if inside.any():
                        lead = float(self.lead_s[inside].min())
                        yield inside, float(self.arrival_s[last] - self.arrival_s[first]), float(slack) - lead


def without_largest(works: Array, number: int) -> Array:
    """Return the sum of each row without its `number` largest entries."""
    n = works.shape[1]
    if number >= n:
        return np.zeros(len(works))
    if not number:
        total: Array = works.sum(axis=1)
        return total
    if not np.isfinite(works).all():
        smallest: Array = np.sort(works, axis=1)[:, : n - number].sum(axis=1)
        return smallest
    smallest_sum: Array = np.partition(works, n - number - 1, axis=1)[:, : n - number].sum(axis=1)
    return smallest_sum


def _best_family(release: Array, due: Array, work: Array, speed: float, points: Array) -> int:
    """Return the most requests that a family of disjoint windows proves late, extended from the left point by point."""
    best = [0] * len(points)
    for b in range(1, len(points)):
        best[b] = best[b - 1]
        in_time = due <= points[b]
        for a in range(b):
            inside = work[in_time & (release >= points[a])]
            excess = inside.sum() * (1 - ROUNDING) - speed * (points[b] - points[a]) - ROUNDING
            if excess > 0:
                removed = np.cumsum(np.sort(inside)[::-1])
                dropped = int(np.searchsorted(removed, excess)) + 1
                best[b] = max(best[b], best[a] + min(dropped, len(inside)))
    return best[-1]


def of_each(core: NDArray[np.integer]) -> list[Ints]:
    """Return the requests of each core, in their order."""
    order = np.argsort(core, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(core[order])) + 1)


def first_come(arrival_s: Array, works: Array, cores: Sequence[Ints]) -> Array:
    """Return the earliest time at which each prompt can be done, if each core computes its prompts in order of arrival.

    For any k <= i on a core the prompts k ... i are computed in steps that begin at a_k or later and are over when i is
    done: C_i = max(C_(i-1), a_i) + w_i, unrolled to a running maximum.
    """
    done_s = np.empty(len(arrival_s))
    for of_core in cores:
        total = np.cumsum(works[of_core])
        start = np.maximum.accumulate(arrival_s[of_core] - total + works[of_core])
        done_s[of_core] = start + total
    return done_s


def first_come_seated(works: Sequence[Array], cores: Sequence[Ints], seats: Array) -> Array:
    """Return the earliest time (seconds after the first arrival) at which each prompt can be done, if at most `seats`
    requests of a core are neither new nor finished.

    When i has its first token, all before it on its core are finished but those in the seats: their works, less the
    largest, lie between. First tokens come in order, so a bound for one request also holds for those after it.
    """
    least = np.zeros(len(seats))
    stacked = np.array(works)
    for of_core in cores:
        unfinished = int(seats[of_core[0]])
        ends = (
            np.unique(np.linspace(unfinished, len(of_core) - 1, CUTS).astype(int)) if len(of_core) > unfinished else ()
        )
        for end in ends:
            seated_s = float(without_largest(stacked[:, of_core[:end]], unfinished).max())
            least[of_core[end:]] = seated_s
    return least
