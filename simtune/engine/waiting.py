"""Queues of waiting requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Protocol

from simtune.engine.request import Request


class WaitingQueue(Protocol):
    """Operations of a policy on its waiting requests. A deque has them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def __getitem__(self, index: int, /) -> Request: ...
    def append(self, request: Request, /) -> None:
        """Add a newcomer."""

    def appendleft(self, request: Request, /) -> None:
        """Add a preempted request."""

    def popleft(self) -> Request:
        """Remove and return the first."""

    def clear(self) -> None:
        """Remove all."""


def drop(queue: WaitingQueue, request: Request) -> None:
    """Remove a request from a queue, wherever it is; the others keep their order."""
    remaining = [queued for queued in queue if queued is not request]
    queue.clear()
    for queued in remaining:
        queue.append(queued)


urgency = attrgetter("priority", "id")
"""Sort key: `Request.priority`, the smallest first, and among equals the order of arrival."""


class PriorityQueue:
    """Waiting requests, the most urgent first, whether they are newcomers or were preempted."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))

    def __getitem__(self, index: int) -> Request:
        """Return the first, at index 0; the others can only be removed one by one."""
        assert index == 0
        return self._heap[0][-1]

    def append(self, request: Request) -> None:
        """Put a request at the place of its urgency. Costs O(log length)."""
        heapq.heappush(self._heap, (*urgency(request), request))

    appendleft = append

    def popleft(self) -> Request:
        """Remove and return the most urgent request."""
        return heapq.heappop(self._heap)[-1]

    def clear(self) -> None:
        """Remove all."""
        self._heap.clear()


class LateArrivals(list[tuple[int, Request]]):
    """Newcomers that an engine which schedules asynchronously does not see yet: the step after the running one was
    dispatched before they came.

    Each entry has the repetition, from 1, of the running step in which the request came; 0 for a request that came
    before that step began, when the step was already scheduled.
    """

    def move(self, queue: Callable[[Request], None], repetitions: int) -> None:
        """Queue requests that came before the next step was dispatched; the step over ran `repetitions` times."""
        for at, request in self:
            if at < repetitions:
                queue(request)
        # entries are in order of arrival: if the last one is due, all are
        if self[-1][0] < repetitions:
            self.clear()
        else:
            self[:] = [(0, request) for at, request in self if at >= repetitions]

    def move_all(self, queue: Callable[[Request], None]) -> None:
        """Queue all of them."""
        for _, request in self:
            queue(request)
        self.clear()

    def take_out(self, request: Request) -> bool:
        """Forget a request that was aborted; False if it is not here."""
        before = len(self)
        self[:] = [entry for entry in self if entry[1] is not request]
        return len(self) < before
