"""How far a simulation is, told while it runs."""

from __future__ import annotations

from collections.abc import Callable

from simtune.costs.ticks import TICKS_PER_SECOND

Watch = Callable[[int, int, float], None]
"""Called now and then with the requests that are answered, how many there are, and the simulated time in seconds."""
EVERY = 256
"""Answers between two calls."""

StopWhen = Callable[[int, int, int, int], bool]
"""See `simtune.sim.world.World`."""


def watched(watch: Watch | None, total: int, stop_when: StopWhen | None = None) -> StopWhen | None:
    """What is asked at every finished request, if anything."""
    return stop_when if watch is None else Watched(watch, total, stop_when)


class Watched:
    """Asked at every finished request whether to stop, as another is; counts them, and tells of every `EVERY`-th."""

    def __init__(self, watch: Watch, total: int, stop_when: StopWhen | None = None) -> None:
        self._watch, self._total, self._stop_when = watch, total, stop_when
        self._answered = 0

    def __call__(self, request: int, arrival: int, first_token: int, finish: int) -> bool:
        """What the other answers; False where there is none."""
        self._answered += 1
        if self._answered % EVERY == 0 or self._answered == self._total:
            self._watch(self._answered, self._total, finish / TICKS_PER_SECOND)
        return self._stop_when is not None and self._stop_when(request, arrival, first_token, finish)
