"""Families of requests: how a request graph or a session turns each arrival into requests that follow one another.

A family is the requests of all nodes of a graph (`simtune.specs.workload.GraphNode`), or the turns of a session, each a
node (`simtune.workload.sessions`). The members of a node are sent together once all nodes that it waits for are over; a
node is over when `first` of its requests are answered, or all. Then the others are aborted: between two steps they
leave their engine, and what they delivered stays delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from simtune.engine import Request
from simtune.errors import UsageError
from simtune.sim.agenda import ARRIVAL, Agenda
from simtune.sim.core import EngineCore
from simtune.sim.recorder import Recorder, empty_column
from simtune.sim.source import Hints, RequestSource
from simtune.specs.plan import Plan
from simtune.workload.graphs import FamilyShape
from simtune.workload.requests import RequestStream


@dataclass(slots=True)
class Family:
    """State of one family, by node."""

    shape: FamilyShape
    first: int
    """Number of its first request."""
    begin: int
    """The tick at which the family arrives."""
    waits_for: list[int]
    """Nodes that must be over before the node is sent."""
    wanted: list[int]
    """Answers that the node still needs to be over."""
    left: list[int]
    """Requests of the node that are neither answered nor refused yet."""
    over: int = 0
    """Number of nodes that are over."""


class FamilySource(RequestSource):
    """Source of requests that follow one another as their graph states; it aborts requests that are no longer
    needed."""

    def __init__(
        self,
        stream: RequestStream,
        agenda: Agenda,
        *,
        cores: Sequence[EngineCore],
        recorder: Recorder,
        **hints: Unpack[Hints],
    ) -> None:
        super().__init__(stream, agenda, **hints)
        assert stream.families is not None
        self._all, self._cores, self._recorder = stream.families, cores, recorder
        self._families: dict[int, Family] = {}
        recorder.family_begin = empty_column(len(self._all), -1)
        recorder.family_end = empty_column(len(self._all), -1)
        self._here: dict[int, Request] = {}  # those that have arrived and are not over
        self._aborted: dict[int, Request] = {}
        first = self._all.begin[:-1]
        self._first = first.tolist()
        self._family_of = np.repeat(np.arange(len(first)), self._all.sizes).tolist()
        self._begins = [self.arrival[number] for number in self._first]
        self._earliest = -1
        """In an open load, the request with whose arrival the next family is announced."""
        for number in range(len(self.arrival)):
            self.arrival[number] = -1

    @property
    def follows(self) -> bool:
        """Always True: requests depend on the answers before them."""
        return True

    def begin(self) -> None:
        """Announce the first family; in a closed loop, one family of each user."""
        for _ in range(1 if self._open else min(self._users, len(self._begins))):
            self._begin_next(0)

    def arrive(self, number: int) -> Request:
        """Return the request that arrives now; with the earliest one of a family, announce the next family."""
        if number == self._earliest:
            self._begin_next(0)
        request = self._here[number] = self.made(number)
        return request

    def answered(self, now: int, number: int = -1) -> None:
        """Record an answer: send the nodes that waited for it, and abort the requests that it makes needless."""
        if self._here.pop(number, None) is None:
            # The request finished in the very step in which it was aborted.
            self._aborted.pop(number, None)
            return
        family, node = self._place_of(number)
        family.left[node] -= 1
        family.wanted[node] -= 1
        if not (family.wanted[node] and family.left[node]):
            self._is_over(now, self._family_of[number], node)

    def gave_up(self, number: int) -> bool:
        """True if a request was aborted before any core had it."""
        return number in self._aborted

    def refused(self, now: int, number: int) -> None:
        """Record that no core accepts a request; its node is over if no other request of it is left."""
        del self._here[number]
        family, node = self._place_of(number)
        family.left[node] -= 1
        if family.left[node] == 0:
            self._is_over(now, self._family_of[number], node)

    def stopped(self) -> dict[int, int]:
        """Return the number of tokens delivered of each aborted request."""
        return {number: request.emitted for number, request in self._aborted.items()}

    def _place_of(self, number: int) -> tuple[Family, int]:
        """Return the family of a request, and its node."""
        family = self._families[self._family_of[number]]
        return family, family.shape.node_of[number - family.first]

    def _begin_next(self, tick: int) -> None:
        if self._next == len(self._begins):
            return
        number = self._next
        self._next += 1
        shape, first = self._all.shape(number), self._first[number]
        at = self._begins[number] if self._open else tick
        if self._open:
            self._earliest = first + shape.earliest
        self._recorder.family_begin[number] = at
        self._families[number] = Family(shape, first, at, list(shape.waits_for), list(shape.first), list(shape.counts))
        for node, before in enumerate(shape.waits_for):
            if not before:
                self._send(at, number, node)

    def _send(self, now: int, number: int, node: int) -> None:
        """Let the requests of a node arrive, after the node's delay."""
        family = self._families[number]
        shape = family.shape
        tick = max(now + shape.delay[node], family.begin + shape.since[node])
        begin = family.first + shape.begin[node]
        for member in range(begin, begin + shape.counts[node]):
            self.arrival[member] = tick
            self._agenda.post((tick, ARRIVAL, member, 0))

    def _is_over(self, now: int, number: int, node: int) -> None:
        """Abort the remaining requests of a node, and send the nodes that waited for it; the last node ends the
        family."""
        family = self._families[number]
        shape = family.shape
        if family.left[node]:
            begin = family.first + shape.begin[node]
            for member in range(begin, begin + shape.counts[node]):
                self._abort(now, member)
        for follower in shape.followers[node]:
            family.waits_for[follower] -= 1
            if family.waits_for[follower] == 0:
                self._send(now, number, follower)
        family.over += 1
        if family.over == len(shape.counts):
            del self._families[number]
            self._recorder.family_end[number] = now
            if not self._open:
                self._begin_next(now + self._think)

    def _abort(self, now: int, number: int) -> None:
        request = self._here.pop(number, None)
        if request is not None:
            self._aborted[number] = request
            if self._recorder.core[number] < 0:
                # The request is still in the front end; `gave_up` stops it there.
                return
            core = self._cores[self._recorder.core[number]]
            if core.admission is not None:
                core.admission.over(number)
            core.inbox.aborted.append(request)
            core.notify(now)


def check_graph_runs(plan: Plan) -> None:
    """Raise UsageError for a plan under which requests of a request graph could not be found to be aborted."""
    if plan.events:
        raise UsageError(f"plan {plan.name}: events and a request graph are mutually exclusive; remove the events")
    if plan.autoscales:
        raise UsageError(
            f"plan {plan.name}: autoscaling and a request graph are mutually exclusive; remove the autoscaling"
        )
    if any(pool.role != "mixed" for pool in plan.pools):
        raise UsageError(f"plan {plan.name}: a request graph needs pools of role mixed; set role: mixed")
