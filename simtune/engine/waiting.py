"""Queues of waiting requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Protocol

from simtune.engine.request import Request


class WaitingQueue(Protocol):
    """What a policy needs of its waiting requests. A deque is one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def __getitem__(self, index: int, /) -> Request: ...
    def append(self, request: Request, /) -> None:
        """Add one that has come."""

    def appendleft(self, request: Request, /) -> None:
        """Add one that was preempted."""

    def popleft(self) -> Request:
        """Take out the first."""

    def clear(self) -> None:
        """Take out all."""


urgency = attrgetter("priority", "id")
"""By `Request.priority`, the smallest first, and among equals by arrival."""


class PriorityQueue:
    """Waiting requests, the most urgent first, whether they have come or were preempted."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))

    def __getitem__(self, index: int) -> Request:
        """The first, at index 0; the others can only be taken out one after the other."""
        assert index == 0
        return self._heap[0][-1]

    def append(self, request: Request) -> None:
        """Put a request where its urgency belongs. Costs O(log length)."""
        heapq.heappush(self._heap, (*urgency(request), request))

    appendleft = append

    def popleft(self) -> Request:
        """Take out the most urgent one."""
        return heapq.heappop(self._heap)[-1]

    def clear(self) -> None:
        """Take out all."""
        self._heap.clear()


class LateArrivals(list[tuple[int, Request]]):
    """Newcomers that an engine which schedules asynchronously does not see yet: the step after the one under way was
    dispatched before they came.

    Of each the repetition, from 1, of the step under way in which it came; 0 for one that came before that step began,
    when it was scheduled already.
    """

    def move(self, queue: Callable[[Request], None], repetitions: int) -> None:
        """The step is over, run so often: whoever came before the next was dispatched waits like any other."""
        for at, request in self:
            if at < repetitions:
                queue(request)
        if self[-1][0] < repetitions:  # the last to come, as most often nobody else did
            self.clear()
        else:
            self[:] = [(0, request) for at, request in self if at >= repetitions]

    def move_all(self, queue: Callable[[Request], None]) -> None:
        """All of them wait like any other."""
        for _, request in self:
            queue(request)
        self.clear()

    def take_out(self, request: Request) -> bool:
        """Forget one that is not wanted any more; False where it is not here."""
        before = len(self)
        self[:] = [entry for entry in self if entry[1] is not request]
        return len(self) < before
