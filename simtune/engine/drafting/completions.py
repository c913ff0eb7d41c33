"""Steps in which members of a batch will be complete, in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from simtune.engine.drafting.rounds import PlannedRounds
from simtune.engine.request import Request


class Completions:
    """Ends of the planned rounds of members, the earliest first."""

    def __init__(self, members: Mapping[Request, PlannedRounds]) -> None:
        """Create the order of `members`, the present ones with their rounds, which the batch keeps up to date."""
        self._members = members
        # Entries are (step, admission, request). One is void if the request has left or was planned anew, which is
        # found when it comes first: taking it out of the middle of a heap would cost more.
        self._heap: list[tuple[int, int, Request]] = []

    def add(self, end: int, request: Request) -> None:
        """Note that a member is complete after the step before step `end`."""
        heapq.heappush(self._heap, (end, request.admission, request))

    def first(self) -> int:
        """Return the step before which the first member is complete. There must be a member."""
        heap = self._heap
        while not self._holds(heap[0]):
            heapq.heappop(heap)
        return heap[0][0]

    def until(self, now: int) -> Iterator[Request]:
        """Yield the members that are complete before step `now`, in order of joining."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            entry = heapq.heappop(heap)
            if self._holds(entry):
                assert entry[0] == now, "a batch must not be advanced past a completion"
                yield entry[2]

    def _holds(self, entry: tuple[int, int, Request]) -> bool:
        """True if the request of an entry is a member whose rounds end as the entry states."""
        end, admission, request = entry
        plan = self._members.get(request)
        return plan is not None and request.admission == admission and plan.begin + plan.rounds == end
