"""Clocks that time a real engine.

On a shared machine the wall clock includes the time of other processes. Processor time of the one thread that does the
work does not: as the engine's own clock it stops while other processes run, and skips idle time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from simtune.errors import UsageError


def processor_s() -> float:
    """Return the seconds for which this thread has run."""
    return time.thread_time()


def wall_s() -> float:
    """Return seconds of a monotonic clock."""
    return time.perf_counter()


class EngineClock(Protocol):
    """Time of an engine, from 0 on, and the way in which an idle engine waits."""

    def now(self) -> float:
        """Return the seconds since the clock was made."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Return at the given time, or at once if it is past."""
        ...

    def gauge(self, tokens: int) -> float:
        """Return the current slowness: the factor on the usual time of a step of `tokens` tokens. Call it before every
        step."""
        ...


class WallClock:
    """Clock of wall time."""

    def __init__(self) -> None:
        self._start = wall_s()

    def now(self) -> float:
        """See `EngineClock`."""
        return wall_s() - self._start

    def wait_until(self, at_s: float) -> None:
        """Sleep until the given time."""
        while (remaining_s := at_s - self.now()) > 0:
            time.sleep(remaining_s)

    def gauge(self, tokens: int) -> float:
        """Return 1: wall time is not scaled."""
        return 1.0


class ProcessorClock:
    """Clock of processor time of the thread that reads it; waiting takes none and moves the clock."""

    def __init__(self, slowness: Callable[[int], float] | None = None) -> None:
        """`slowness` (a `Gauge`), if given, divides processor time by its value; its own time does not count.

        Raise UsageError on Windows, whose processor time is counted in ticks of a clock interrupt.
        """
        if sys.platform == "win32":
            raise UsageError(
                "--clock cpu: Windows counts processor time in ticks of about 16 ms, longer than a step; measure on "
                "Linux or macOS, or give --clock wall"
            )
        self._at, self._since, self._slow = 0.0, processor_s(), 1.0
        self._slowness = slowness

    def now(self) -> float:
        """See `EngineClock`."""
        return self._at + (processor_s() - self._since) / self._slow

    def wait_until(self, at_s: float) -> None:
        """Skip to the given time."""
        self._at += max(0.0, at_s - self.now())

    def gauge(self, tokens: int) -> float:
        """See `EngineClock`."""
        if self._slowness is not None:
            self._at = self.now()
            self._slow = self._slowness(tokens)
            self._since = processor_s()
        return self._slow


CLOCKS: dict[str, type[WallClock] | type[ProcessorClock]] = {"wall": WallClock, "cpu": ProcessorClock}
