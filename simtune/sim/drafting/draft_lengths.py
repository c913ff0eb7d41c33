"""Draft lengths of each request, for schemes that choose them by acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from simtune.engine import Request
from simtune.sim.drafting.survival import Survival


class StopLengths:
    """Number of drafts after which a drafter that knows the acceptance stops, the same in all rounds of a request."""

    def __init__(self, survival: Survival, stops_below: float) -> None:
        self._survival, self._stops_below = survival, stops_below

    def __call__(self, request: Request) -> int:
        """Return the number of drafts of one request."""
        return self._lengths[request.id]

    @cached_property
    def _lengths(self) -> list[int]:
        requests = np.arange(len(self._survival.class_of))
        lengths: list[int] = self._survival.drafts_above(self._stops_below, requests).tolist()
        return lengths


class SharedBudget:
    """Draft tokens of a batch, given to the drafts that are most likely to be accepted (TETRIS, arXiv 2502.15197).

    Among equals they go to the shortest drafts, then to the requests that came first.
    """

    def __init__(self, survival: Survival, tokens: int) -> None:
        self._survival, self._tokens = survival, tokens

    def __call__(self, requests: Sequence[Request]) -> list[int]:
        """Return the draft tokens of each request of a step."""
        if not requests:
            return []
        columns = self._survival.columns(np.array([request.id for request in requests]))
        best = np.argsort(-columns.T.ravel(), kind="stable")[: self._tokens]
        counts: list[int] = np.bincount(best % len(requests), minlength=len(requests)).tolist()
        return counts
