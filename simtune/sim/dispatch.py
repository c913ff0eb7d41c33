"""Dispatch of new requests, and of requests to be recomputed, to the cores that accept them."""

from __future__ import annotations

from collections import deque

from simtune.engine import Request
from simtune.sim.agenda import ARRIVAL, Agenda
from simtune.sim.core import EngineCore
from simtune.sim.front_end import FrontEnd
from simtune.sim.handover import Handover, Routers
from simtune.sim.local_prefill import LocalPrefills
from simtune.sim.recorder import Recorder
from simtune.sim.source import RequestSource


class Dispatcher:
    """Sends each request, once it has passed the front end, to the core that the router chooses, or keeps it until one
    is up."""

    def __init__(
        self,
        agenda: Agenda,
        recorder: Recorder,
        source: RequestSource,
        routers: Routers,
        handover: Handover,
        front_end: FrontEnd | None,
        local: LocalPrefills | None = None,
    ) -> None:
        self._agenda, self._front_end, self._local = agenda, front_end, local
        self._recorder, self._source, self._routers, self._handover = recorder, source, routers, handover
        self._passing: dict[int, Request] = {}  # in the front end
        self._apart = bool(routers.back.cores)
        self._parked: deque[Request] = deque()  # no core is up

    def arrive(self, now: int, number: int, version: int) -> None:
        """Accept a new request, or with version 1 one that has passed the front end."""
        if version:
            request = self._passing.pop(number)
            self._recorder.routed[number] = now
            if not self._source.gave_up(number):
                self.route(now, request)
            return
        # Requests in the front end wait as well, though no engine knows them yet.
        self._recorder.waiting_at_arrival[number] = self._recorder.waiting + len(self._passing)
        request = self._source.arrive(number)
        if self._front_end is None:
            self.route(now, request)
        else:
            self._passing[number] = request
            self._agenda.post((self._front_end.passed(now, request.prompt_tokens), ARRIVAL, number, 1))

    def route(self, now: int, request: Request) -> None:
        """Send a request to a core, which may refuse it; if decode cores are separate, send only its prompt, unless a
        decode core is to compute it."""
        if self._local is not None and (decode_core := self._local.core_for(now, request)) is not None:
            self._give(now, request, decode_core)
            return
        sent = self._source.prompt_only(request) if self._apart else request
        core = self._routers.front.choose(sent, now)
        if core is None:
            self._parked.append(request)
            return
        # A prompt whose answer no decode core could hold would compute its cache in vain.
        self._give(now, sent, core, fits=not self._apart or self._handover.fits(request.id))

    def _give(self, now: int, request: Request, core: EngineCore, *, fits: bool = True) -> None:
        """Give a request to a core; it is rejected if the core's server has too many, and refused if it does not
        fit."""
        self._recorder.core[request.id] = core.number
        if core.admission is not None and not core.admission.admit(request, core.scheduler.num_waiting):
            self._routers.over(now, request, core)
            self._recorder.reject(request.id)
            self._source.refused(now, request.id)
        elif not fits or not core.add(now, request):
            self._routers.over(now, request, core)
            self._recorder.refuse(request.id)
            self._source.refused(now, request.id)

    def route_parked(self, now: int) -> None:
        """Route requests that waited for a core, after cores have come up."""
        # A fresh queue: routing may park requests again.
        parked, self._parked = self._parked, deque()
        for request in parked:
            self.route(now, request)

    def resubmit(self, now: int, request: Request) -> None:
        """Route a request that a core had, to be recomputed."""
        # A token that was computed with the prompt and never delivered is lost with the core that held it.
        delivered = self._recorder.first_token[request.id] >= 0
        self.route(now, self._source.resubmitted(request, delivered=delivered))
