"""Base of schedulers whose waiting requests may load blocks from host memory before they are admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from simtune.engine.batched import BatchScheduler, BatchSettings
from simtune.engine.offloading import Offloading
from simtune.engine.request import Request
from simtune.engine.step import Chunk


class OffloadingScheduler(BatchScheduler):
    """Scheduler whose prefix cache host memory may extend: requests that load blocks wait, and hold blocks."""

    loads_ahead = True

    def __init__(self, **settings: Unpack[BatchSettings]) -> None:
        super().__init__(**settings)
        self.scheduler_reserve_full_isl = True
        self.offloading: Offloading | None = None

    def offload(self, offloading: Offloading) -> None:
        """Let this host memory extend the prefix cache, which there must be."""
        self.offloading = self.kv.tiers = offloading

    def _write(self, chunks: Sequence[Chunk], preempting: bool) -> bool:
        """Write to host memory what the coming step, with these chunks, fills. Return True if the engine would do
        something else if it scheduled again at once: it is `preempting`, or writes begin or end."""
        return (self.offloading is not None and self.offloading.write(self, chunks)) or preempting

    def _repeats(self, preempting: bool) -> bool:
        """True if a step may be repeated: it preempts no request, and none can find something else in host memory."""
        if self.offloading is None:
            return not preempting
        return not (preempting or self.offloading or (self.waiting and self._has_seat()))

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine's view; see `BatchScheduler.num_waiting`."""
        return super().num_waiting + len(self._holding())

    def withdraw(self) -> list[Request]:
        """See `Scheduler.withdraw`; what requests have loaded is lost."""
        if self.offloading is None:
            return super().withdraw()
        requests = self._holding()
        for request in (*requests, *self.waiting):
            self.offloading.forget(request, self.kv)
        return [*requests, *super().withdraw()]

    def _expel(self, request: Request) -> bool:
        if request not in self._holding():
            return super()._expel(request)
        assert self.offloading is not None
        self.offloading.forget(request, self.kv)
        return True

    def _holding(self) -> list[Request]:
        """Return the waiting requests with blocks that they have loaded, or are loading."""
        return [] if self.offloading is None else [*self.offloading.holding]

    @property
    def has_work(self) -> bool:
        """True if any request waits or has a seat."""
        return super().has_work or bool(self._holding())

    def _lose_residents(self) -> list[Request]:
        return [*super()._lose_residents(), *self._holding()]
