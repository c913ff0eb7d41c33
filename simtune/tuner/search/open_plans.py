"""Plans that are not decided yet, in the order of their bounds."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from simtune.tuner.search.candidate_filter import BoundedCandidate

Known = Literal["as it came", "as one of its kind", "all there is"]
"""Precision of the bound of a plan: by capacity, by the SLO at the most favourable limits of its kind, or by the SLO at
its own limits."""


@dataclass(order=True)
class OpenKind:
    """A kind of plans, or one of its plans, that is not decided yet."""

    order: tuple[float, ...]
    """Sorting key: the best bound first, then the simplest cut and the smallest budgets."""
    number: int
    plans: Sequence[BoundedCandidate] = field(compare=False)
    best: float = field(compare=False)
    """Bound on the objective."""
    known: Known = field(compare=False)


class OpenPlans:
    """Open kinds of plans and plans, the best bound first."""

    def __init__(self) -> None:
        self._heap: list[OpenKind] = []
        self._pushed = 0

    def __iter__(self) -> Iterator[OpenKind]:
        return iter(self._heap)

    @property
    def best(self) -> float | None:
        """Best bound of all; None if nothing is open."""
        return self._heap[0].best if self._heap else None

    def push(self, plans: Sequence[BoundedCandidate], known: Known) -> None:
        """Open a kind of plans, or a plan, with the bound of its best member."""
        first = min(plans, key=BoundedCandidate.order)
        self._pushed += 1
        # The running number keeps equal bounds in the order in which they came, whatever their plans are.
        heapq.heappush(self._heap, OpenKind(first.order(), self._pushed, plans, first.best, known))

    def pop(self) -> OpenKind:
        """Remove and return the item with the best bound."""
        return heapq.heappop(self._heap)

    def nearest(self, count: int) -> list[OpenKind]:
        """Return the first `count` items."""
        return heapq.nsmallest(count, self._heap)

    def clear(self) -> None:
        """Remove all items."""
        self._heap.clear()
