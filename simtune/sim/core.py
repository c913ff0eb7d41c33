"""An engine core: one scheduler with one batch under way, its steps in time, and the way in and out of it.

What vLLM calls an engine core: an instance without pipeline parallelism, one of the pp virtual engines of an instance
with it, or with data-parallel attention one group of ranks. A core runs a step as often as the scheduler says nothing
can change and the cost model says its time is known, in one event: a *jump*. Whatever the scheduler would notice, an
arrival or a KV cache, cuts such a jump at the end of the step in which it falls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from simtune.costs.protocol import StepCosts
from simtune.engine import NO_PROGRESS, Progress, Request, Scheduler, Step
from simtune.sim.agenda import DRAINED, STEP_END, TRANSFER_START, WAKE, Agenda
from simtune.sim.link import TransferLink
from simtune.sim.recorder import Recorder
from simtune.sim.sampling import StepSampler
from simtune.sim.step_timing import JumpTime, StepTimer, timer_for


class Connector(Protocol):
    """The way out of a prefill instance, which may depend on where it leads."""

    @property
    def links(self) -> Sequence[TransferLink]:
        """All that it sends over."""

    def towards(self, target: EngineCore) -> KvConnector:
        """How it sends a KV cache to a decode core."""


@dataclass(slots=True, frozen=True)
class KvConnector:
    """How a prefill instance sends a KV cache of whole blocks, wherever it goes."""

    link: TransferLink
    block_bytes: int
    """Of all GPUs of the instance together."""
    setup: int
    """Ticks before the first byte."""
    descriptors: int
    """Ticks per block besides its bytes."""
    layers: int = 1
    """With more than one, all but the last layer are sent while the prompt is computed, as far as the link can."""

    @property
    def links(self) -> Sequence[TransferLink]:
        """Its one link."""
        return (self.link,)

    def towards(self, target: EngineCore) -> KvConnector:
        """Itself."""
        return self

    def left_to_send(self, blocks: int, computing: int) -> int:
        """Bytes to send after the prompt is done, when computing it took so many ticks."""
        size = blocks * self.block_bytes
        if self.layers == 1:
            return size
        return max(-(-size // self.layers), size - self.link.bytes_within(computing))


@dataclass(slots=True, eq=False)
class KvTransfer:
    """A request on its way from a prefill to a decode instance, its KV cache with it."""

    request: Request
    """As the decode instance will know it: its prompt computed, its first token delivered."""
    source: EngineCore
    held: Request
    """As the prefill instance knows it: finished, its blocks still taken."""
    ready: int
    """The tick at which its prompt was done."""
    serial: int
    """Tells this attempt to send it from an earlier one that was cancelled."""
    target: EngineCore | None = None
    sending: bool = False
    """Whether the target has room for it and the transfer is under way."""

    @property
    def connector(self) -> KvConnector:
        """The way it is sent to its target."""
        assert self.source.connector is not None
        assert self.target is not None
        return self.source.connector.towards(self.target)

    @property
    def blocks(self) -> int:
        """KV blocks to send."""
        return self.source.scheduler.kv.blocks_for(self.held.prompt_tokens)


@dataclass(slots=True)
class Inbox:
    """Requests whose KV cache is computed elsewhere, as the core that is to decode them sees them."""

    waiting: deque[KvTransfer] = field(default_factory=deque)
    """Those for which there was no room yet, oldest first."""
    arrived: list[Request] = field(default_factory=list)
    """Those whose KV cache has come; they join before the next step."""
    dropped: list[Request] = field(default_factory=list)
    """Those whose KV cache will never come; their reservation ends before the next step."""
    aborted: list[Request] = field(default_factory=list)
    """Those that nobody waits for any more; they leave before the next step."""

    def __bool__(self) -> bool:
        return bool(self.waiting or self.arrived or self.dropped or self.aborted)

    unheard: list[Request] = field(default_factory=list)
    """Those that have joined, and whose first token the core's next step is to deliver."""

    def settle(self, scheduler: Scheduler) -> bool:
        """Between two steps: let requests join whose KV cache has come, and give up the reservations of others. Whether
        any were aborted, who may have waited."""
        self.unheard += [request for request in self.arrived if not request.emitted]
        self.release_dropped(scheduler)
        for request in self.arrived:
            scheduler.receive(request)
        self.arrived.clear()
        aborted, self.aborted = self.aborted, []
        for request in aborted:
            scheduler.abort(request)
        return bool(aborted)

    def heard(self, progress: Progress, scheduler: Scheduler) -> Progress:
        """What came out of a step, with the first tokens of requests whose prompt was computed elsewhere."""
        first = [request for request in self.unheard if scheduler.emitted(request)]
        self.unheard = [request for request in self.unheard if not scheduler.emitted(request)]
        return Progress([*progress.first_token, *first], progress.finished)

    def make_room(self, now: int, scheduler: Scheduler, agenda: Agenda, recorder: Recorder) -> None:
        """Reserve seats and blocks for requests handed over, oldest first, and let their KV caches come."""
        while self.waiting and scheduler.expect(self.waiting[0].request):
            transfer = self.waiting.popleft()
            transfer.sending = True
            recorder.waiting -= 1
            begin = now + transfer.connector.setup + transfer.blocks * transfer.connector.descriptors
            agenda.post((begin, TRANSFER_START, transfer.request.id, transfer.serial))

    def release_dropped(self, scheduler: Scheduler) -> None:
        """Give up the reservations of requests whose KV cache will never come."""
        for request in self.dropped:
            scheduler.release(request)
        self.dropped.clear()


Deliver = Callable[[int, "EngineCore", Progress], None]
"""Is told what came out of a core's step, and when."""


class Stepping:
    """How the steps of an instance's cores share its GPUs. This one is of a core that has them to itself."""

    shared = False
    """Whether a core's steps depend on those of others."""
    stepwise = False
    _agenda: Agenda

    def join(self, core: EngineCore) -> int:
        """Add a core to the instance; its number there."""
        return 0

    def wire(self, agenda: Agenda, *, stepwise: bool) -> None:
        """Bring it into a world; `stepwise` where cores that share their GPUs are to take one step after the other."""
        self._agenda, self.stepwise = agenda, stepwise

    def may_jump(self, core: EngineCore) -> bool:
        """Whether a step that `core` begins now may be repeated in one event."""
        return True

    def start(self, now: int, core: EngineCore) -> None:
        """Let a core that runs nothing begin its next step, if it has one."""
        if core.plan(now):
            core.launch(now + core.time.total)

    def end(self, now: int, core: EngineCore, deliver: Deliver) -> None:
        """The step of a core ends, and its next one begins, unless something else happens at this instant first."""
        core.conclude(now, deliver)
        if self._agenda.has_more_at(now):
            core.wake(now)
        else:
            self.start(now, core)

    def wakes(self, now: int, core: EngineCore) -> None:
        """An idle core is about to schedule."""

    def cut(self, now: int, core: EngineCore, repetitions: int) -> None:
        """Let the jump of a core end after so many repetitions, at `now` or later."""
        core.shorten(repetitions)

    def reset(self) -> None:
        """The instance has failed."""


@dataclass(slots=True, eq=False)
class EngineCore:
    """One scheduler, its cost model, and the step it is running."""

    scheduler: Scheduler
    costs: StepCosts
    instance: int = 0
    pool: str = "mixed"
    connector: Connector | None = None
    """The way out of a prefill instance: its requests are handed over when their prompt is done."""
    stepping: Stepping = field(default_factory=Stepping)
    """Shared with the other cores of the instance."""
    swap: int = 0
    """Ticks to move one KV block to or from host memory; steps wait for it."""
    up: bool = True
    """Whether it takes new requests."""
    number: int = 0
    """Among the cores of the deployment."""
    virtual_engine: int = field(init=False)
    """Among the cores of its instance."""
    step: Step | None = field(default=None, init=False)
    """The step under way."""
    time: JumpTime = field(default_factory=JumpTime, init=False)
    """How long it takes."""
    started: int = field(default=0, init=False)
    version: int = field(default=0, init=False)
    """Of the event that ends the running step; an older one is void."""
    woken: bool = field(default=False, init=False)  # idle, and about to schedule
    draining: bool = field(default=False, init=False)
    """Whether it takes nothing new, and somebody waits for it to finish what it has."""
    waiting: int = field(default=0, init=False)
    """Requests that wait in the scheduler, as last counted."""
    holding: int = field(default=0, init=False)
    """Requests handed over whose KV cache is still here."""
    busy: int = field(default=0, init=False)  # ticks spent in steps so far
    most_tokens: int = field(default=0, init=False)  # of a step with chunks, so far
    sampler: StepSampler = field(default_factory=StepSampler, init=False)
    """Keeps some of its steps."""
    inbox: Inbox = field(default_factory=Inbox, init=False)
    runs_ahead: bool = field(default=False, init=False)
    """Whether its steps end by `run_ahead`, not by `end`."""
    _single_steps: bool = field(default=False, init=False)
    _ended: int = field(default=-1, init=False)  # the tick at which the latest step did
    _timer: StepTimer = field(init=False)
    _agenda: Agenda = field(init=False)
    _recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self._timer = timer_for(self.costs, self.scheduler.drafting)
        self.scheduler.tells_longest = self._timer.asks_longest
        self.virtual_engine = self.stepping.join(self)

    def wire(self, agenda: Agenda, recorder: Recorder, *, single_steps: bool, runs_ahead: bool) -> None:
        """Bring the core into a world.

        With `single_steps` no step is repeated. With `runs_ahead` steps that nothing comes between are run without
        asking the agenda, unless the core shares its GPUs; not for cores that take requests over.
        """
        self._agenda, self._recorder = agenda, recorder
        self.stepping.wire(agenda, stepwise=single_steps or recorder.jumps is not None)
        self._single_steps, self.runs_ahead = single_steps, runs_ahead and not self.stepping.shared

    @property
    def has_work(self) -> bool:
        """Whether any request is here or on its way."""
        return bool(self.inbox) or self.scheduler.has_work

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, now: int, request: Request) -> bool:
        """Queue a new request; False when the scheduler refuses it."""
        scheduler, time, notices, repetition = self.scheduler, self.time, False, 0
        if self.step is not None:
            late, repetition = scheduler.async_scheduling, 1
            if time.repetitions > 1:
                notices, repetition = scheduler.would_notice(), time.reaching(now - self.started)[0]
        else:  # at the instant when a step ends, the step that follows is dispatched already
            late = scheduler.async_scheduling and self._ended == now
        if not (scheduler.add_late(request, repetition) if late else scheduler.add(request)):
            return False
        self._recorder.waiting += 1
        self.waiting += 1
        if not repetition:
            self.wake(now)
        elif notices:  # if late, after the step that was dispatched, which is this one once more
            self.stepping.cut(now, self, repetition + (late and not self.stepping.shared))
        return True

    def offer(self, now: int, transfer: KvTransfer) -> None:
        """Queue a request handed over, until there is room for its KV cache."""
        waiting = self.inbox.waiting
        waiting.append(transfer)
        if self.step is None:
            self.wake(now)
        elif self.time.repetitions > 1 and len(waiting) == 1:  # else there was no room, and is none until the end
            self.cut(now)

    def count_waiting(self) -> None:
        """The scheduler's queue has changed."""
        waiting = self.scheduler.num_waiting
        self._recorder.waiting += waiting - self.waiting
        self.waiting = waiting

    # --- steps --------------------------------------------------------------------------------------------------

    def wake(self, now: int) -> None:
        """Let the idle core schedule at this instant, after everything else that happens at it."""
        if not self.woken:
            self.woken = True
            self._agenda.post((now, WAKE, self.number, 0))
            self.stepping.wakes(now, self)

    def notify(self, now: int) -> None:
        """Something has changed: let the core schedule, after the step it is in."""
        if self.step is None:
            self.wake(now)
        elif self.time.repetitions > 1:
            self.cut(now)

    def start(self, now: int) -> None:
        """Begin the next step, if there is one and none is under way."""
        self.woken = False
        if self.step is None:
            self.stepping.start(now, self)

    def plan(self, now: int) -> bool:
        """Schedule the next step and find its time; False when nothing can run. `launch` must follow."""
        inbox = self.inbox
        if inbox.waiting or inbox.arrived or inbox.dropped or inbox.aborted:
            if self.inbox.settle(self.scheduler):
                self.count_waiting()
            self.inbox.make_room(now, self.scheduler, self._agenda, self._recorder)
        self.step = step = self.scheduler.schedule()
        if step is None:
            self._idle(now)
            return False
        self._find_time(now, step)
        self.started = now
        self.version += 1
        return True

    def launch(self, end: int) -> None:
        """Run the planned step, which ends at a tick; most likely that is the next event."""
        self._agenda.hold((end, STEP_END, self.number, self.version))

    def cut(self, now: int) -> None:
        """Something has changed: the jump ends with the step in which `now` falls."""
        self.stepping.cut(now, self, self.time.reaching(now - self.started)[0])

    def shorten(self, repetitions: int) -> None:
        """Let a jump that no other core has a part in end after so many repetitions."""
        if repetitions < self.time.repetitions:
            self.time.repetitions = repetitions
            self.version += 1
            self._agenda.replace((self.started + self.time.total, STEP_END, self.number, self.version))

    def end(self, now: int, deliver: Deliver) -> None:
        """The running step ends, and the next one begins."""
        self.stepping.end(now, self, deliver)

    def conclude(self, now: int, deliver: Deliver) -> None:
        """The repetitions of the running step are over: say what came out."""
        self._account(now)
        progress = self.scheduler.complete(self.time.repetitions)
        self.step, self._ended = None, now
        if self.inbox.unheard:
            progress = self.inbox.heard(progress, self.scheduler)
        if progress.first_token or progress.finished:
            deliver(now, self, progress)

    def run_ahead(self, now: int, deliver: Deliver) -> None:
        """What `end` comes to, over and over, as long as nothing else comes before the next step ends.

        Inlined for speed, and compared with `end` by tests/sim/test_run_ahead.py.
        """
        agenda, recorder, sampler, time, timer = self._agenda, self._recorder, self.sampler, self.time, self._timer
        heap, note, decode = agenda.heap, recorder.rows.append, timer.affine
        complete, schedule, step = self.scheduler.complete, self.scheduler.schedule, self.step
        agenda.hold(None)  # from here on the heap alone says what comes first
        while step is not None:
            repetitions = time.repetitions
            recorder.steps += repetitions
            self.busy += now - self.started
            if self.busy >= sampler.due:
                sampler.take(self.busy, step, time, now - self.started)
            if time.ends is not None:
                recorder.note_listed(time.ends[:repetitions], step.num_decodes - step.discarded)
            elif decodes := step.num_decodes - step.discarded:
                note((time.first, time.slope, repetitions, decodes))
            progress = complete(repetitions)
            self.step, self._ended = None, now
            if progress is not NO_PROGRESS:
                deliver(now, self, progress)
            if heap[0][0] == now:
                self.wake(now)
                return
            self.step = step = schedule()
            if step is None:
                self._idle(now)
                return
            self.started = now
            self.version = version = self.version + 1
            if not step.only_decodes:
                self._find_time(now, step)
                now += time.first if time.repetitions == 1 else time.total
            elif decode is None:
                timer.decode(step, step.repeat, time)
                now += time.total
            else:
                time.first, time.slope, repetitions = decode(step.num_decodes, step.context_tokens)
                if step.repeat < repetitions:
                    repetitions = step.repeat
                time.repetitions = repetitions
                now += repetitions * time.first + time.slope * (repetitions * (repetitions - 1) // 2)
            event = now, STEP_END, self.number, version
            if heap[0] < event:  # or the run was stopped
                agenda.held = event
                return
            agenda.handled += 1

    def fail(self, now: int) -> None:
        """End a step that fails: repetitions that are over have delivered their tokens, the one under way is lost."""
        self.inbox.unheard.clear()
        if self.step is None:
            return
        time = self.time
        over = time.over_after(now - self.started) if time.repetitions > 1 else 0
        if over:
            time.repetitions = over
            self._account(self.started + time.total)
            self.scheduler.complete(over)
        self.step = None
        self.version += 1
        self.stepping.reset()

    def _idle(self, now: int) -> None:
        """Nothing can run; with asynchronous scheduling the last ones have left only now."""
        if self.inbox.waiting:
            self.inbox.make_room(now, self.scheduler, self._agenda, self._recorder)
        if self.draining:
            self._agenda.post((now, DRAINED, self.number, 0))

    def _find_time(self, now: int, step: Step) -> None:
        """Find how long the repetitions of a step take, and how many are run at once."""
        time = self.time
        of_step, recorder = step.chunks, self._recorder
        if of_step or step.preempted:
            for request in step.preempted:
                recorder.preemptions[request.id] += 1
            self.count_waiting()
        if of_step:
            scheduled, chunks, completing, step_tokens = recorder.scheduled, [], 0, step.num_decodes
            for chunk in of_step:
                request, past, tokens = chunk.request, chunk.past, chunk.tokens
                chunks.append((past, tokens))
                step_tokens += tokens
                completing += past + tokens - chunk.padding == request.prompt_tokens + request.emitted  # it `completes`
                if scheduled[request.id] < 0:
                    scheduled[request.id] = now
            if step_tokens > self.most_tokens:
                self.most_tokens = step_tokens
            time.first = self._timer.mixed(step, chunks, completing)
            time.slope, time.repetitions, time.ends = 0, 1, None
        else:
            most = step.repeat
            self._timer.decode(step, most if most == 1 or self._may_jump(step) else 1, time)
        if self.inbox.unheard:
            time.repetitions = 1  # its end is that of the first tokens
        if step.part != (0, 1):
            time.first = self._timer.of_part(step, time.first)
        if self.swap and (moved := step.swapped_out_blocks + step.swapped_in_blocks):
            time.first += self.swap * moved
            time.repetitions = 1  # those that follow do not wait for it

    def _may_jump(self, step: Step) -> bool:
        """Whether repetitions of a step may be taken in one event."""
        if self._single_steps or not self.stepping.may_jump(self):
            return False
        # Seats that are about to come free are for those that wait in the inbox.
        return not (self.inbox.waiting and (self.scheduler.unsettled or step.preempted))

    def _account(self, end: int) -> None:
        """Write the running step's repetitions down; the last of them ends at `end`."""
        step, time, recorder = self.step, self.time, self._recorder
        assert step is not None
        recorder.steps += time.repetitions
        self.busy += end - self.started
        if self.busy >= self.sampler.due:
            self.sampler.take(self.busy, step, time, end - self.started)
        decodes = max(0, step.num_decodes - step.discarded - len(self.inbox.unheard))  # a first token follows none
        if time.ends is not None:
            recorder.note_listed(time.ends[: time.repetitions], decodes)
        elif decodes:
            recorder.rows.append((time.first, time.slope, time.repetitions, decodes))
        if recorder.jumps is not None:
            waiting = self.scheduler.num_waiting + len(self.inbox.waiting)
            span, free = (self.started, end), self.scheduler.kv.free
            recorder.jumps.add(step, self.number, span, time.repetitions, waiting, free)
