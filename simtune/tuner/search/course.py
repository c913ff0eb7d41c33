"""Progress of a search, as it is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from simtune.tuner.trial import CoursePoint, Trial

REPORTS = 1000
"""Reports of plans that bounds or other simulations decide: one after each such share of all plans."""


class SearchCourse(NamedTuple):
    """Progress of a search."""

    done: int
    """Plans that are decided."""
    total: int
    best: Trial | None
    value: float | None
    """Objective of the best plan, in its unit."""
    bound: float | None
    """Value that no plan of the space exceeds."""
    open: int
    """Plans that could still be better."""
    simulations: int


SearchProgress = Callable[[SearchCourse], None]


class CourseLog:
    """Records the state of a search whenever its best plan or its bound changes, and passes every state on."""

    def __init__(self, listener: SearchProgress | None = None) -> None:
        self.points: list[CoursePoint] = []
        self._listener = listener

    def __call__(self, now: SearchCourse) -> None:
        """Record the state after a plan was decided."""
        plan = "" if now.best is None else now.best.candidate.name
        point = CoursePoint(now.simulations, now.done, plan, now.value, now.bound)
        if len(self.points) > 1 and all((p.value, p.bound) == (point.value, point.bound) for p in self.points[-2:]):
            # Two points are enough for a period without changes: its first and its last.
            self.points.pop()
        self.points.append(point)
        if self._listener is not None:
            self._listener(now)


class ReportsDue:
    """Tells when a search is to report: after every simulation, and now and then while plans are decided without any.

    A report looks at all open plans, of which there may be tens of thousands.
    """

    def __init__(self, total: int) -> None:
        """Create it for a search of `total` plans."""
        self._apart, self._decisions, self._simulations = max(1, total // REPORTS), 0, 0

    def after_decision(self, simulations: int) -> bool:
        """Count a decision; return True if there is to be a report. `simulations` have been made so far."""
        self._decisions += 1
        if simulations == self._simulations and self._decisions < self._apart:
            return False
        self._decisions, self._simulations = 0, simulations
        return True
