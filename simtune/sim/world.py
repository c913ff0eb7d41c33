"""World: a deployment under a stream of requests, wired together and run.

The `Agenda` orders the events. Requests come from a `RequestSource`, the `Dispatcher` sends them to an
`EngineCore`, which runs its steps in time; `Handover` moves them between prefill and decode cores, `Availability` lets
instances come and go, and the `Recorder` records what happens.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Mapping, Sequence

from simtune.engine import Progress, Request
from simtune.engine.batched import BatchScheduler
from simtune.results.outcome import EngineCoreUse, Outcome
from simtune.sim.adapters import AdapterTimer
from simtune.sim.agenda import (
    ARRIVAL,
    CHANGE,
    DRAINED,
    LOADED,
    LOOK,
    STEP_END,
    TRANSFER_END,
    TRANSFER_START,
    WAKE,
    Agenda,
    Handler,
)
from simtune.sim.availability import Availability, Change
from simtune.sim.core import EngineCore
from simtune.sim.dispatch import Dispatcher
from simtune.sim.encoding import encoder_use
from simtune.sim.families import FamilySource
from simtune.sim.front_end import FrontEnd
from simtune.sim.handover import Handover, Routers
from simtune.sim.local_prefill import LocalPrefills
from simtune.sim.recorder import MOST_ROWS, Recorder, unchecked
from simtune.sim.role_controller import Controller
from simtune.sim.router import RoundRobin, Router
from simtune.sim.run_ahead import run_ahead
from simtune.sim.source import Hints, RequestSource
from simtune.sim.stalls import Stalls
from simtune.specs.plan import FirstToken, LocalPrefill
from simtune.workload.requests import RequestStream


class World:
    """A deployment under one stream of requests. Runs once."""

    def __init__(  # noqa: PLR0913 - most of them switches
        self,
        cores: Sequence[EngineCore],
        stream: RequestStream,
        *,
        router: Router | None = None,
        decode_router: Router | None = None,
        front_end: FrontEnd | None = None,
        changes: Sequence[Change] = (),
        control: Controller | None = None,
        first_token: FirstToken = "prefill",
        local_prefill: LocalPrefill | None = None,
        predicted_tokens: Sequence[int] | None = None,
        deadlines: Sequence[float] | None = None,
        single_steps: bool = False,
        record: bool = False,
        stop_when: Callable[[int, int, int, int], bool] | None = None,
    ) -> None:
        """Wire a world of `cores`, all of the deployment. `router` chooses among those that accept new requests (all,
        in turn, unless given), `decode_router` among those that take over from cores with a `connector`.
        `first_token` is its source in that case, and `local_prefill` the rule for prompts that the latter compute
        themselves. `control` decides which instances are up; requests pass
        `front_end` before they are routed.

        `single_steps` makes every step an event of its own: slow, and the oracle for jumps. `record` keeps every
        jump for timelines. `stop_when(request, arrival, first_token, finish)` is called for every finished request;
        once it returns True the run ends there and the outcome is marked `aborted`.
        """
        self._cores, self._control, self._stop_when = list(cores), control, stop_when
        for number, core in enumerate(self._cores):
            core.number = number
        self._routers = Routers(
            front=RoundRobin(self._cores) if router is None else router,
            back=RoundRobin([]) if decode_router is None else decode_router,
        )
        if control is not None:
            self._routers = control.counted(self._routers)
        self._agenda = Agenda()
        self._recorder, self._source = self._books(stream, record, predicted_tokens, deadlines)
        self._handover, self._dispatcher = self._senders(front_end, first_token, local_prefill)
        self._availability = Availability(
            self._agenda, self._recorder, self._routers, self._dispatcher, self._handover, changes
        )
        self._informed, self._followed = self._routers.informed, self._source.follows
        self._unheard = not (self._informed or self._followed) and self._stop_when is None
        receiving = set(self._routers.back.cores)
        aborts = stream.families is not None and stream.families.may_abort
        for core in self._cores:
            runs_ahead = not (single_steps or record or core in receiving or aborts)
            core.wire(self._agenda, self._recorder, single_steps=single_steps, runs_ahead=runs_ahead)

    def _books(
        self,
        stream: RequestStream,
        record: bool,
        predicted_tokens: Sequence[int] | None,
        deadlines: Sequence[float] | None,
    ) -> tuple[Recorder, RequestSource]:
        """Return the recorder and the source of the requests."""
        recorder = Recorder(len(stream), record)
        recorder.rejected = array("q") if self._routers.limited else None
        hints: Hints = {"predicted_tokens": predicted_tokens, "deadlines": deadlines}
        if stream.families is None:
            return recorder, RequestSource(stream, self._agenda, **hints)
        return recorder, FamilySource(stream, self._agenda, cores=self._cores, recorder=recorder, **hints)

    def _senders(
        self, front_end: FrontEnd | None, first_token: FirstToken, local_prefill: LocalPrefill | None
    ) -> tuple[Handover, Dispatcher]:
        """Return what sends requests from core to core, and to the first core."""
        local = None if local_prefill is None else LocalPrefills(local_prefill, *self._routers)
        names_blocks = local_prefill is not None and local_prefill.keeps_any
        agenda, recorder, source, routers = self._agenda, self._recorder, self._source, self._routers
        handover = Handover(agenda, recorder, source, routers, self._cores, first_token, names_blocks)
        return handover, Dispatcher(agenda, recorder, source, routers, handover, front_end, local)

    def run(self) -> Outcome:
        """Run until every request is finished or refused, no core is up to serve the rest, or `stop_when` returns
        True. Raise UsageError if steps would go on for ever without any progress."""
        self._source.begin()
        handlers = self._handlers()
        collects = gc.isenabled()
        # Requests are created by the million and none of them refers to itself, so the cyclic collector would only cost
        # time.
        gc.disable()
        self._recorder.often_preempted = Stalls(self._agenda, self._cores, self._handover).check
        try:
            self._agenda.run(handlers)
        finally:
            # The check refers to the cores, and these to the recorder: a circle would keep all of them.
            self._recorder.often_preempted = unchecked
            if collects:
                gc.enable()
        outcome = self._recorder.outcome(
            self._source.arrival,
            stopped=self._source.stopped(),
            aborted=self._agenda.stopped,
            events=self._agenda.handled,
            cores=[_use(core) for core in self._cores],
        )
        if self._control is not None:
            self._control.close(outcome, max(core.ended for core in self._cores))
        return outcome

    def _handlers(self) -> Mapping[int, Handler]:
        """Return the handlers by the phase of an event."""
        handlers = {
            STEP_END: self._end_step,
            TRANSFER_START: self._handover.start,
            TRANSFER_END: self._handover.end,
            CHANGE: self._availability.change,
            DRAINED: self._availability.drained,
            ARRIVAL: self._dispatcher.arrive,
            WAKE: self._start_step,
        }
        if self._control is not None:
            self._control.begin(self._agenda, self._availability)
            # A controller looks now and then; without one the agenda has no such events.
            handlers[LOOK] = self._control.look
        return handlers

    def _start_step(self, now: int, number: int, version: int) -> None:
        if version == LOADED:
            self._cores[number].notify(now)
        else:
            self._cores[number].start(now)

    def _end_step(self, now: int, number: int, version: int) -> None:
        core = self._cores[number]
        if core.version != version:
            # The step was cut or has failed.
            return
        if core.runs_ahead:
            run_ahead(core, now, self._deliver)
        else:
            core.end(now, self._deliver)

    def _deliver(self, now: int, core: EngineCore, progress: Progress) -> None:
        """Record the progress of a step: first tokens, and requests that are answered or handed over."""
        recorder, first_token = self._recorder, self._recorder.first_token
        # The handover or a decode core delivers the first token then.
        late = core.connector is not None and self._handover.first_token != "prefill"
        for request in () if late else progress.first_token:
            if first_token[request.id] < 0:
                first_token[request.id] = now
        if core.admission is not None:
            core.admission.note(progress)
        if self._unheard and core.connector is None:
            for request in progress.finished:
                recorder.finish[request.id] = now
        else:
            for request in progress.finished:
                self._finish(now, core, request)
        if len(recorder.rows) > MOST_ROWS:
            recorder.pack()

    def _finish(self, now: int, core: EngineCore, request: Request) -> None:
        """Record that a core is done with a request, and inform the routers and the source that depend on it."""
        if self._informed:
            self._routers.over(now, request, core)
        if core.connector is not None and self._handover.take(now, core, request):
            return
        number, recorder = request.id, self._recorder
        recorder.finish[number] = now
        if self._followed:
            self._source.answered(now, number)
        arrival = self._source.arrival[number]
        if self._stop_when is not None and self._stop_when(number, arrival, recorder.first_token[number], now):
            self._agenda.stop()


def _use(core: EngineCore) -> EngineCoreUse:
    kv, tally = core.scheduler.kv, core.scheduler.tally
    tiers = () if kv.tiers is None else tuple((tier.name, tier.hit_tokens) for tier in kv.tiers.tiers)
    hits = (kv.queried_tokens, kv.hit_tokens, tiers) if kv.counts_hits else ()
    use = EngineCoreUse(core.pool, core.instance, core.virtual_engine, kv.total, core.busy, tally, *hits)
    if isinstance(core.timer, AdapterTimer):
        core.timer.account()
    slots = core.scheduler.adapters
    if slots is not None:
        use = use._replace(adapters=slots.tally)
    return use._replace(
        sampled=core.sampler.steps(),
        most_tokens=core.most_tokens,
        encoder=encoder_use(core.scheduler, core.timer),
        most_blocks=_most_blocks(core),
    )


def _most_blocks(core: EngineCore) -> int | None:
    """Return the most KV blocks of a core that were not free at one time; None if its policy takes those of repeated
    steps when some of them are free again."""
    scheduler, repetitions = core.scheduler, core.time.repetitions
    if not isinstance(scheduler, BatchScheduler):
        return None
    # The blocks of a jump are taken at its end, which a run that is given up may not reach.
    coming = scheduler.decoding.blocks_for(repetitions - 1, 1) if core.step is not None and repetitions > 1 else 0
    return scheduler.kv.total - min(scheduler.kv.least_free, scheduler.kv.free - coming)
