"""The clocks by which an engine that really runs is timed.

On a machine that others use, the wall clock times them too. Processor time of the one thread that does the work does
not: as the engine's own clock it stands still while somebody else runs, and jumps over the time in which nobody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


def processor_s() -> float:
    """Seconds for which this thread has run."""
    return time.thread_time()


def wall_s() -> float:
    """Seconds on a clock that never goes back."""
    return time.perf_counter()


class EngineClock(Protocol):
    """What time it is for an engine, from 0 on, and how an idle one waits."""

    def now(self) -> float:
        """Seconds since it was made."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Return when it is so late, or at once where it is later."""
        ...

    def gauge(self, tokens: int) -> float:
        """To be called before every step, of so many tokens: how many times as long as usual it would take now."""
        ...


class WallClock:
    """Time as everybody has it."""

    def __init__(self) -> None:
        self._start = wall_s()

    def now(self) -> float:
        """See `EngineClock`."""
        return wall_s() - self._start

    def wait_until(self, at_s: float) -> None:
        """Sleeps."""
        while (left := at_s - self.now()) > 0:
            time.sleep(left)

    def gauge(self, tokens: int) -> float:
        """Seconds are seconds."""
        return 1.0


class ProcessorClock:
    """Processor time of the thread that reads it; waiting takes none and moves the clock."""

    def __init__(self, slowness: Callable[[int], float] | None = None) -> None:
        """With `slowness` (a `Gauge`) what it says is divided out, and looking takes no time."""
        self._at, self._since, self._slow = 0.0, processor_s(), 1.0
        self._slowness = slowness

    def now(self) -> float:
        """See `EngineClock`."""
        return self._at + (processor_s() - self._since) / self._slow

    def wait_until(self, at_s: float) -> None:
        """Skips to that time."""
        self._at += max(0.0, at_s - self.now())

    def gauge(self, tokens: int) -> float:
        """See `EngineClock`."""
        if self._slowness is not None:
            self._at = self.now()
            self._slow = self._slowness(tokens)
            self._since = processor_s()
        return self._slow


CLOCKS: dict[str, type[WallClock] | type[ProcessorClock]] = {"wall": WallClock, "cpu": ProcessorClock}
