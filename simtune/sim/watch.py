"""Progress reports of a running simulation."""

from __future__ import annotations

from collections.abc import Callable

from simtune.costs.ticks import TICKS_PER_SECOND

Watch = Callable[[int, int, float], None]
"""Called at intervals with the number of answered requests, the number of all requests, and the simulated time in
seconds."""
EVERY = 256
"""Answers between two calls."""

StopWhen = Callable[[int, int, int, int], bool]
"""Stop condition; see `simtune.sim.world.World`."""


def watched(watch: Watch | None, total: int, stop_when: StopWhen | None = None) -> StopWhen | None:
    """Return the function that is called at every finished request; None if there is nothing to do."""
    return stop_when if watch is None else Watched(watch, total, stop_when)


class Watched:
    """Stop condition that counts finished requests, reports every `EVERY`-th, and otherwise decides as another one
    does."""

    def __init__(self, watch: Watch, total: int, stop_when: StopWhen | None = None) -> None:
        self._watch, self._total, self._stop_when = watch, total, stop_when
        self._answered = 0

    def __call__(self, request: int, arrival: int, first_token: int, finish: int) -> bool:
        """Count the request and return the decision of the other condition; False if there is none."""
        self._answered += 1
        if self._answered % EVERY == 0 or self._answered == self._total:
            self._watch(self._answered, self._total, finish / TICKS_PER_SECOND)
        return self._stop_when is not None and self._stop_when(request, arrival, first_token, finish)
