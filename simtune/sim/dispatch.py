"""New requests, and those to be computed anew, go to the cores that take them."""

from __future__ import annotations

from collections import deque

from simtune.engine import Request
from simtune.sim.handover import Handover, Routers
from simtune.sim.recorder import Recorder
from simtune.sim.source import RequestSource


class Dispatcher:
    """Sends each request where the router says, or keeps it until a core is up."""

    def __init__(self, recorder: Recorder, source: RequestSource, routers: Routers, handover: Handover) -> None:
        self._recorder, self._source, self._routers, self._handover = recorder, source, routers, handover
        self._apart = bool(routers.back.cores)
        self._parked: deque[Request] = deque()  # no core is up

    def arrive(self, now: int, number: int, version: int) -> None:
        """A new request is here."""
        self._recorder.waiting_at_arrival[number] = self._recorder.waiting
        self.route(now, self._source.arrive(number))

    def route(self, now: int, request: Request) -> None:
        """Send a request to a core, which may refuse it; where decode cores are apart, its prompt only."""
        asked = self._source.prompt_only(request) if self._apart else request
        core = self._routers.front.choose(asked, now)
        if core is None:
            self._parked.append(request)
            return
        self._recorder.core[request.id] = core.number
        if (self._apart and not self._handover.fits(request.id)) or not core.add(now, asked):
            self._routers.over(now, asked, core)
            self._recorder.refuse(request.id)
            self._source.refused(now, request.id)

    def route_parked(self, now: int) -> None:
        """Cores have come up."""
        parked, self._parked = self._parked, deque()
        for request in parked:
            self.route(now, request)

    def resubmit(self, now: int, request: Request) -> None:
        """Route a request that a core had, to be computed anew."""
        self.route(now, self._source.resubmitted(request))
