"""Residents that have no part in the step under way, though they keep their seats and blocks."""

from __future__ import annotations

from collections.abc import Iterable

from simtune.engine.batch import Batch
from simtune.engine.request import Request
from simtune.engine.settling import Settling


class LeftOut(list[Request]):
    """Members of a batch that decode, and are left out of the step under way."""

    def add(self, residents: Iterable[Request], batch: Batch, settling: Settling) -> None:
        """Leave these residents out of the coming step: those that decode leave the batch for its duration."""
        for request in residents:
            if request.decoding:
                ended = settling.has_ended(request)
                batch.leave(request)
                if ended:
                    settling.finish([request])
                else:
                    self.append(request)

    def rejoin(self, batch: Batch) -> None:
        """Return the requests to the batch, as the step is over."""
        for request in self:
            batch.rejoin(request)
        self.clear()
