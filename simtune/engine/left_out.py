"""Residents that have no part in the step under way, though they keep their seats and blocks."""

from __future__ import annotations

from collections.abc import Iterable

from simtune.engine.batch import Batch
from simtune.engine.request import Request
from simtune.engine.settling import Settling


class LeftOut(list[Request]):
    """Members of a batch that decode, and are left out of the step under way."""

    def __init__(self) -> None:
        super().__init__()
        self._past: list[int] = []  # tokens computed before the last step that each request was in

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
                    self._past.append(batch.past_of(request))

    def rejoin(self, batch: Batch, settling: Settling) -> None:
        """Return the requests to the batch, as the step is over."""
        for request, past in zip(self, settling.rested(self, self._past), strict=True):
            batch.rejoin(request, past)
        self.clear()
        self._past.clear()
