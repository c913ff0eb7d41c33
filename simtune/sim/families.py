"""Families of requests: how a request graph turns each arrival into requests that follow one another.

A family is the requests of all nodes of a graph (`simtune.specs.workload.GraphNode`). The members of a node are sent
together once all nodes that it waits for are over; a node is over when `first` of its requests are answered, or all.
Then the others are aborted: between two steps they leave their engine, and what they delivered stays delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from simtune.engine import Request
from simtune.errors import UsageError
from simtune.sim.agenda import ARRIVAL, Agenda
from simtune.sim.core import EngineCore
from simtune.sim.recorder import Recorder, empty_column
from simtune.sim.source import Hints, RequestSource
from simtune.specs.plan import Plan
from simtune.workload.requests import RequestStream


@dataclass(slots=True)
class Family:
    """State of one family, by node."""

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
        assert stream.graph is not None
        self._graph, self._cores, self._recorder = stream.graph, cores, recorder
        self._families: dict[int, Family] = {}
        recorder.family_begin = empty_column(len(self.arrival) // self._graph.size, -1)
        recorder.family_end = empty_column(len(recorder.family_begin), -1)
        self._here: dict[int, Request] = {}  # those that have arrived and are not over
        self._aborted: dict[int, Request] = {}
        self._size, self._node_of = self._graph.size, self._graph.node_of.tolist()
        self._earliest = self._graph.earliest
        self._begins = self.arrival[:: self._size]
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
        if self._open and number % self._size == self._earliest:
            self._begin_next(0)
        request = self._here[number] = self.made(number)
        return request

    def answered(self, now: int, number: int = -1) -> None:
        """Record an answer: send the nodes that waited for it, and abort the requests that it makes needless."""
        if self._here.pop(number, None) is None:
            # The request finished in the very step in which it was aborted.
            self._aborted.pop(number, None)
            return
        family, node = self._family_of(number)
        family.left[node] -= 1
        family.wanted[node] -= 1
        if not (family.wanted[node] and family.left[node]):
            self._is_over(now, number // self._size, node)

    def gave_up(self, number: int) -> bool:
        """True if a request was aborted before any core had it."""
        return number in self._aborted

    def refused(self, now: int, number: int) -> None:
        """Record that no core accepts a request; its node is over if no other request of it is left."""
        del self._here[number]
        family, node = self._family_of(number)
        family.left[node] -= 1
        if family.left[node] == 0:
            self._is_over(now, number // self._size, node)

    def stopped(self) -> dict[int, int]:
        """Return the number of tokens delivered of each aborted request."""
        return {number: request.emitted for number, request in self._aborted.items()}

    def _family_of(self, number: int) -> tuple[Family, int]:
        family, member = divmod(number, self._size)
        return self._families[family], self._node_of[member]

    def _begin_next(self, tick: int) -> None:
        if self._next == len(self._begins):
            return
        graph, number = self._graph, self._next
        self._next += 1
        at = self._begins[number] if self._open else tick
        waits_for = [len(after) for after in graph.after]
        self._recorder.family_begin[number] = at
        self._families[number] = Family(at, waits_for, list(graph.first), list(graph.count))
        for node, after in enumerate(graph.after):
            if not after:
                self._send(at, number, node)

    def _send(self, now: int, family: int, node: int) -> None:
        """Let the requests of a node arrive, after the node's delay."""
        graph = self._graph
        tick = max(now + graph.delay[node], self._families[family].begin + graph.since[node])
        for member in range(graph.begin[node], graph.begin[node] + graph.count[node]):
            number = family * self._size + member
            self.arrival[number] = tick
            self._agenda.post((tick, ARRIVAL, number, 0))

    def _is_over(self, now: int, number: int, node: int) -> None:
        """Abort the remaining requests of a node, and send the nodes that waited for it; the last node ends the
        family."""
        graph, family = self._graph, self._families[number]
        if family.left[node]:
            first = number * self._size + graph.begin[node]
            for member in range(first, first + graph.count[node]):
                self._abort(now, member)
        for follower, after in enumerate(graph.after):
            if node in after:
                family.waits_for[follower] -= 1
                if family.waits_for[follower] == 0:
                    self._send(now, number, follower)
        family.over += 1
        if family.over == len(graph.after):
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
            core.inbox.aborted.append(request)
            core.notify(now)


def check_graph_runs(plan: Plan) -> None:
    """Raise UsageError for a plan under which requests of a family could not be found to be aborted."""
    if plan.events:
        raise UsageError(f"plan {plan.name}: events and a request graph are mutually exclusive; remove the events")
    if any(pool.role != "mixed" for pool in plan.pools):
        raise UsageError(f"plan {plan.name}: a request graph needs pools of role mixed; set role: mixed")
