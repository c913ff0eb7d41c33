"""Judge from one run whether a deployment keeps up with its load: stable, saturated, or too short to tell.

Judged are the requests in the system (waiting and running) that each arrival of the second half finds; the first half
is the warm-up and is cut. By Little's law the mean number in the system is the mean rate times the mean lifetime, so
N arrivals that find X requests on average are N / X lifetimes.

*Saturated*: engines are full, and the queue before them grows. The queue is cut into BATCHES increments, whose sum is
more than GROWTH standard errors above zero (batch means); running requests grow by less than half as much; and the
second half is at least SETTLED lifetimes of running requests long, so that the first fill of the seats is over.

*Stable*: the run is at least LIFETIMES lifetimes long, neither the queue nor the number in the system grows by more
than DRIFT standard errors, and that number has forgotten its past often enough. If nothing pulls it back it is a
random walk: over n arrivals, each of which changes it by c (root mean square), it spreads by 0.41 c sqrt(n). It must
have spread by less than SPREAD c sqrt(n), which a free walk does about once in a thousand runs (the lower tail of
the distribution of Cramer and von Mises).

Anything else is too short to tell: near the capacity, and if a run is short compared with the time a request takes. Of
1,000 random loads between 0.3 and 3 times the capacity, each judged at nine lengths from 50 to 20,000 requests, one
turns from stable to saturated (`tests/sim/test_steady.py` has such loads).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from simtune.arrays import Array, Ints

Steadiness = Literal["stable", "saturated", "too short to tell"]

LEAST = 40
"""Least number of requests; a run with fewer is too short to tell."""
LIFETIMES = 10
SETTLED = 2
BATCHES = 20
GROWTH = 4.5
DRIFT = 2.5
SPREAD = 0.13
SAMPLES = 2000
"""Most arrivals that are sampled: every k-th one."""
BEYOND = 10
"""Values that must lie beyond a percentile before it is reliable: p99 of 1,000."""


def stride(requests: int) -> int:
    """Return k such that every k-th arrival is sampled."""
    return max(1, requests // SAMPLES)


def in_system(arrival: Ints, finish: Ints, waiting: Ints) -> tuple[Ints, Ints]:
    """Return (requests in the system, requests waiting) as every `stride`-th arrival finds them.

    Times are in ticks. Requests that never finish count as gone at once: they were refused.
    """
    came = np.flatnonzero(arrival >= 0)
    order = came[np.argsort(arrival[came], kind="stable")]
    at = arrival[order]
    # Sorted apart from arrivals: only how many had gone by then counts, not which.
    gone = np.sort(np.where(finish[order] >= 0, finish[order], at))
    present = np.maximum(np.arange(len(at)) - np.searchsorted(gone, at, side="right"), 0)
    every = stride(len(at))
    return present[::every], waiting[order][::every]


def steadiness(present: Ints, waiting: Ints, requests: int) -> Steadiness:
    """Judge a run of `requests` arrivals by what every `stride`-th of them found."""
    half = len(present) // 2
    if requests < LEAST or half < BATCHES:
        return "too short to tell"
    present_counts, queue = present[half:].astype(np.float64), waiting[half:].astype(np.float64)
    running = present_counts - queue
    growth = _growth(queue)
    settled = len(present_counts) * stride(requests) >= SETTLED * max(1.0, float(running.mean()))
    # A batch that is still filling up grows as well; a queue that grows faster than it does not end with it.
    if settled and growth > GROWTH and _rise(queue) > 2 * max(_rise(running), 0.0):
        return "saturated"
    long_enough = requests >= LIFETIMES * float(present_counts.mean())
    forgets = wander(present_counts) <= SPREAD**2
    return "stable" if long_enough and max(growth, _growth(present_counts)) < DRIFT and forgets else "too short to tell"


def wander(present_counts: Array) -> float:
    """Return the variance of a number of requests over n c^2: of a free random walk 1/6 on average, and near 0 of a
    number that comes back to its mean many times."""
    change = len(present_counts) * float(np.mean(np.diff(present_counts) ** 2))
    variance = float(present_counts.var())
    return variance / change if change > 0 else 0.0 if variance == 0 else math.inf


def _growth(queue: Array) -> float:
    """Return the mean increment of BATCHES equal parts, in its standard errors."""
    size = len(queue) // BATCHES
    ends = queue[: BATCHES * size : size]
    steps = np.diff(np.append(ends, queue[-1]))
    mean, error = float(steps.mean()), float(steps.std(ddof=1)) / math.sqrt(BATCHES)
    if error > 0:
        return mean / error
    return math.inf if mean > 0 else 0.0


def _rise(values: Array) -> float:
    """Return the rise of the mean from the first quarter to the last."""
    quarter = len(values) // 4
    return float(values[-quarter:].mean() - values[:quarter].mean())


def needed_for(statistic: str) -> int:
    """Return the number of values that a statistic needs: enough for BEYOND of them beyond a percentile; one for a
    mean."""
    if statistic == "mean":
        return 1
    return math.ceil(BEYOND / (1 - float(statistic[1:]) / 100) - 1e-6)
