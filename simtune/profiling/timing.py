"""Timing of one call: timers that repeat calls, and the loop that takes samples until they agree.

A `Timer` runs calls back to back over rotating operands. The loop around it is the same for every timer: warm up by
time, make samples long enough for the timer, stop if their spread is small or the time is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple, Protocol

import numpy as np

Call = Callable[[], object]


def now() -> float:
    """Return seconds on a clock that never goes back."""
    return time.monotonic()


class Sample(NamedTuple):
    """Mean seconds of the calls in a sample; `clean` if no disturbance is known."""

    seconds: float
    clean: bool


class Timer(Protocol):
    """Timer of calls. `sample(calls, first, count)` runs `count` of them, calls[first], calls[first + 1], ...
    cyclically, and returns the seconds of one.
    """

    name: str
    shortest_s: float
    """Seconds that a sample should take at least for the timer to be precise."""
    warm_up_s: float
    """Seconds of calls at the start that are discarded."""

    def sample(self, calls: Sequence[Call], first: int, count: int) -> Sample:
        """Run `count` calls from calls[first] on and return the mean seconds of one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a call: the lower median over its clean samples, or over the shortest quarter if none was clean."""

    seconds: float
    mad: float
    p10: float
    p90: float
    n: int
    clean: float
    """Share of the samples without disturbance."""
    timer: str
    eager: float | None = None
    """Seconds with every kernel launched separately, if `seconds` is that of a captured graph."""
    kernel: str | None = None
    even_s: float | None = None
    """Seconds with contexts of one length, if `seconds` is that of a batch of unequal contexts."""


WARM_UP = 2
WARM_UP_S = 0.003
FEWEST, MOST = 5, 15
# Of the median: samples spread less than this need no further ones.
AGREED = 0.01
ALLOWANCE_S = 0.12  # per point, once there are samples enough
_FEWEST_CLEAN = 3


class AmongOthers:
    """Timer of a processor for calls as in a model: another call, which is not timed, runs before each.

    In a separate loop a short call finds its code and all operands in the caches. In a model a matrix product runs
    before it and leaves only weights and its output there: a norm of one row takes ten times as long.
    """

    shortest_s = 0.0
    warm_up_s = 0.0

    def __init__(self, timer: Timer, beside: Sequence[Call], renew: Callable[[Call], object] = id) -> None:
        """`beside` are run in turns, one before every call that `timer` times; then `renew` reads those operands of the
        call that were written just before."""
        self.name, self._timer, self._beside, self._renew = timer.name, timer, cycle(beside), renew

    def sample(self, calls: Sequence[Call], first: int, count: int) -> Sample:
        """See `Timer`."""
        samples = []
        for i in range(first, first + count):
            next(self._beside)()
            self._renew(calls[i % len(calls)])
            samples.append(self._timer.sample(calls, i, 1))
        return Sample(sum(s.seconds for s in samples) / count, all(s.clean for s in samples))


def measure(timer: Timer, calls: Sequence[Call], allowance_s: float = ALLOWANCE_S) -> Measured:
    """Median time of one of these calls, which differ in their operands only.

    The first calls are discarded, unless a single one takes longer than the whole allowance: then its time is the
    first sample, and one more is taken.
    """
    first = timer.sample(calls, 0, 1)
    samples = [first] if first.seconds > allowance_s else []
    at, spent = 1, first.seconds
    while not samples and (at < WARM_UP or spent < timer.warm_up_s):
        once = timer.sample(calls, at, 1)
        at, spent = at + 1, spent + once.seconds
    # as many calls as the shortest sample that the timer measures precisely
    count = max(1, round(timer.shortest_s * at / max(spent, 1e-9)))
    spent = 0.0 if not samples else first.seconds
    while not _enough(samples, spent, allowance_s):
        samples.append(timer.sample(calls, at, count))
        at, spent = at + count, spent + count * samples[-1].seconds
    return summary(samples, timer.name)


def _enough(samples: list[Sample], spent: float, allowance_s: float) -> bool:
    if len(samples) >= MOST or spent >= 2 * allowance_s:
        return len(samples) > 1
    if len(samples) < FEWEST:
        return False
    seconds = np.array([s.seconds for s in samples if s.clean])
    if len(seconds) < _FEWEST_CLEAN:
        return spent >= allowance_s
    median = np.median(seconds)
    return spent >= allowance_s or bool(np.median(np.abs(seconds - median)) < AGREED * median)


def summary(samples: list[Sample], timer: str) -> Measured:
    """Return the statistics of samples of one call."""
    every = np.sort([s.seconds for s in samples])
    clean = np.array([s.seconds for s in samples if s.clean])
    chosen = clean if len(clean) >= min(_FEWEST_CLEAN, len(every)) else every[: max(1, len(every) // 4)]
    # of two the shorter: disturbances only lengthen times
    median = float(np.sort(chosen)[(len(chosen) - 1) // 2])
    p10, p90 = np.quantile(chosen, (0.1, 0.9)).tolist()
    mad = float(np.median(np.abs(chosen - median)))
    return Measured(median, mad, p10, p90, len(every), len(clean) / len(every), timer)


class CpuWall:
    """Wall clock of the processor. A sample is clean if the thread waited for a core for less than 1 % of it."""

    name = "wall"
    shortest_s = 3e-4
    warm_up_s = WARM_UP_S

    def sample(self, calls: Sequence[Call], first: int, count: int) -> Sample:
        """See `Timer`."""
        waited = _waited_s()
        start = time.perf_counter()
        _repeat(calls, first, count)
        spent = time.perf_counter() - start
        return Sample(spent / count, _waited_s() - waited < 0.01 * spent + 2e-6)


class CpuThread:
    """Processor time of this thread alone, which other processes on the core do not lengthen."""

    name = "thread"
    shortest_s = 3e-4
    warm_up_s = WARM_UP_S

    def sample(self, calls: Sequence[Call], first: int, count: int) -> Sample:
        """See `Timer`; always clean."""
        start = time.thread_time()
        _repeat(calls, first, count)
        return Sample((time.thread_time() - start) / count, True)


def _repeat(calls: Sequence[Call], first: int, count: int) -> None:
    for i in range(first, first + count):
        calls[i % len(calls)]()


def _waited_s() -> float:
    """Seconds this thread was ready to run and waited for a core; zero if the system does not report them."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


BUSY = 0.9
"""Share of clean samples below which the machine is busy; then processor time is used instead of wall time."""


def cpu_timer(call: Call, samples: int = 40) -> tuple[Timer, float]:
    """Return the timer for a processor, wall time unless the machine is busy; and the share of clean wall samples."""
    wall = CpuWall()
    wall.sample([call], 0, 2)
    count = max(1, round(0.005 / max(wall.sample([call], 0, 3).seconds, 1e-9)))
    clean = float(np.mean([wall.sample([call], 0, count).clean for _ in range(samples)]))
    return (wall if clean >= BUSY else CpuThread()), clean
