"""A link whose bandwidth is shared equally by the transfers on it, in whole ticks.

Processor sharing in virtual time: the link counts the bytes that every transfer on it has been served since the link
was made. A transfer that joins at count v with s bytes is done at v + s, whoever comes and goes meanwhile; joining,
leaving and the next end cost O(log transfers). Counts are integers, so nothing depends on the order of summation.
"""

from __future__ import annotations

import heapq

from simtune.costs.ticks import TICKS_PER_SECOND

_SCALE = 1 << 20  # counts are kept in 2**-20 bytes


class TransferLink:
    """Transfers in progress on one link, by a number that the caller chooses."""

    __slots__ = ("_count", "_ends", "_joined", "_latest", "_present", "_rate", "number", "version")

    def __init__(self, bytes_per_s: float, number: int = 0) -> None:
        self.number = number
        self.version = 0
        """Number that changes whenever the next end may have changed; an end announced for an older version is void."""
        self._rate = max(1, round(bytes_per_s * _SCALE))
        self._count = 0
        self._latest = 0
        self._ends: list[tuple[int, int, int]] = []  # heap of (count at the end, order of joining, transfer)
        self._present: dict[int, int] = {}  # transfer -> order of joining
        self._joined = 0

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._present

    def bytes_within(self, ticks: int) -> int:
        """Return the bytes that one transfer can send in `ticks` if it has the link to itself."""
        return ticks * self._rate // (_SCALE * TICKS_PER_SECOND)

    def join(self, now: int, transfer: int, size: int) -> None:
        """Start sending `size` bytes."""
        self._serve(now)
        self._joined += 1
        self._present[transfer] = self._joined
        heapq.heappush(self._ends, (self._count + size * _SCALE, self._joined, transfer))
        self.version += 1

    def cancel(self, now: int, transfer: int) -> None:
        """Cancel a transfer."""
        self._serve(now)
        del self._present[transfer]
        self.version += 1

    def next_end(self) -> int | None:
        """Return the tick at which the next transfer ends if none joins before; None if there is no transfer."""
        ends = self._ends
        while ends and self._present.get(ends[0][2]) != ends[0][1]:
            heapq.heappop(ends)
        if not ends:
            return None
        remaining = (ends[0][0] - self._count) * len(self._present) * TICKS_PER_SECOND
        return self._latest + max(0, -(-remaining // self._rate))

    def ended(self, now: int) -> list[int]:
        """Remove and return the transfers that are done at `now`, in order of their end."""
        self._serve(now)
        finished = []
        while self._ends and self._ends[0][0] <= self._count:
            _, joined, transfer = heapq.heappop(self._ends)
            # A cancelled transfer may have joined anew, with an entry of its own.
            if self._present.get(transfer) == joined:
                del self._present[transfer]
                finished.append(transfer)
        self.version += bool(finished)
        return finished

    def _serve(self, now: int) -> None:
        if self._present:
            self._count += (now - self._latest) * self._rate // (len(self._present) * TICKS_PER_SECOND)
        self._latest = now
