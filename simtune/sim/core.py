"""Engine core: one scheduler with one running batch, its steps in time, and the KV caches that enter and leave it.

The term is vLLM's: an instance without pipeline parallelism, one of the pp virtual engines of an instance with it, or
with data-parallel attention one group of ranks. A core repeats a step in one event, a *jump*, for as long as the
scheduler reports that nothing can change and the cost model knows the times. An event that the scheduler would notice,
such as an arrival or a KV cache, cuts a jump at the end of the step in which the event falls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from simtune.costs.protocol import StepCosts
from simtune.engine import Progress, Request, Scheduler, Step
from simtune.sim.admission import AdmissionLimits
from simtune.sim.agenda import DRAINED, STEP_END, TRANSFER_START, WAKE, Agenda
from simtune.sim.link import TransferLink
from simtune.sim.recorder import Recorder
from simtune.sim.sampling import StepSampler
from simtune.sim.step_timing import JumpTime, StepTimer, timer_for
from simtune.sim.tier_links import HostLoads, TierFetches
from simtune.sim.token_gaps import TokenGaps


class Connector(Protocol):
    """The connection from a prefill instance to decode instances; its terms may depend on the decode instance."""

    @property
    def links(self) -> Sequence[TransferLink]:
        """All links that the instance sends KV caches over."""

    def towards(self, target: EngineCore) -> KvConnector:
        """Return the connector for KV caches that are sent to a decode core."""


@dataclass(slots=True, frozen=True)
class KvConnector:
    """Connector that sends KV caches of whole blocks on the same terms to every decode instance."""

    link: TransferLink
    block_bytes: int
    """Bytes of one KV block, summed over all GPUs of the instance."""
    setup: int
    """Ticks before the first byte."""
    descriptors: int
    """Ticks per block besides its bytes."""
    layers: int = 1
    """Model layers; with more than one, all but the last are sent during prefill, as far as the link's rate allows."""

    @property
    def links(self) -> Sequence[TransferLink]:
        """The only link of this connector."""
        return (self.link,)

    def towards(self, target: EngineCore) -> KvConnector:
        """Return this connector for every target."""
        return self

    def left_to_send(self, blocks: int, computing: int) -> int:
        """Return the bytes left to send after the prompt is done, if computing it took `computing` ticks."""
        size = blocks * self.block_bytes
        # Sent as a whole, nothing leaves before the prompt is done.
        if self.layers == 1:
            return size
        # The last layer is computed last, so at least its share is left to send.
        return max(-(-size // self.layers), size - self.link.bytes_within(computing))


@dataclass(slots=True, eq=False)
class KvTransfer:
    """A request on its way from a prefill to a decode instance, its KV cache with it."""

    request: Request
    """The request for the decode instance: prompt computed, first token delivered."""
    source: EngineCore
    held: Request
    """The request on the prefill instance: finished, its blocks still allocated."""
    ready: int
    """The tick at which its prompt was done."""
    serial: int
    """Number of the attempt; distinguishes it from an earlier attempt that was cancelled."""
    target: EngineCore | None = None
    sending: bool = False
    """True once the target has reserved room for the request and the transfer has begun."""

    @property
    def connector(self) -> KvConnector:
        """The connector from the source to the target."""
        assert self.source.connector is not None
        assert self.target is not None
        return self.source.connector.towards(self.target)

    @property
    def blocks(self) -> int:
        """KV blocks to send."""
        return self.source.scheduler.kv.blocks_for(self.held.prompt_tokens)


@dataclass(slots=True)
class Inbox:
    """Requests whose KV cache is computed elsewhere, as seen by the core that will decode them."""

    waiting: deque[KvTransfer] = field(default_factory=deque)
    """Transfers that still wait for room, oldest first."""
    polled: int = 0
    """Number of these, the oldest ones, that the engine has seen: some engines look for requests every few steps."""
    arrived: list[Request] = field(default_factory=list)
    """Requests whose KV cache has arrived; they join the batch before the next step."""
    dropped: list[Request] = field(default_factory=list)
    """Requests whose KV cache will never arrive; their reservation ends before the next step."""
    aborted: list[Request] = field(default_factory=list)
    """Requests that were aborted; they leave before the next step."""

    def __bool__(self) -> bool:
        return bool(self.waiting or self.arrived or self.dropped or self.aborted)

    unheard: list[Request] = field(default_factory=list)
    """Requests that have joined and whose first token is delivered by the core's next step."""

    def settle(self, scheduler: Scheduler) -> bool:
        """Between two steps, let requests join whose KV cache has arrived and release the reservations of dropped ones.
        Return True if any request was aborted, because an aborted request may have been counted as waiting."""
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
        """Return the progress of a step, with the first tokens of requests whose prompt was computed elsewhere."""
        first = [request for request in self.unheard if scheduler.emitted(request)]
        self.unheard = [request for request in self.unheard if not scheduler.emitted(request)]
        return Progress([*progress.first_token, *first], progress.finished)

    def most_repetitions(self, step: Step, scheduler: Scheduler) -> int:
        """Return how often a step may be repeated before the engine sees a request that waits."""
        if scheduler.polls is None or len(self.waiting) <= self.polled:
            return step.repeat
        return min(step.repeat, scheduler.polls.steps_left)

    def make_room(
        self, now: int, scheduler: Scheduler, agenda: Agenda, recorder: Recorder, *, idle: bool = False
    ) -> None:
        """Reserve seats and blocks for requests handed over, oldest first, and start the transfers of their KV
        caches. An `idle` engine polls."""
        if idle or scheduler.polls is None or scheduler.polls.is_next:
            self.polled = len(self.waiting)
        while (transfer := self._first_with_room(scheduler)) is not None:
            self.polled -= 1
            transfer.sending = True
            # The request has its seat from now on, though its KV cache is still to come.
            recorder.waiting -= 1
            begin = now + transfer.connector.setup + transfer.blocks * transfer.connector.descriptors
            agenda.post((begin, TRANSFER_START, transfer.request.id, transfer.serial))

    def _first_with_room(self, scheduler: Scheduler) -> KvTransfer | None:
        """Take the oldest transfer that the engine has seen, reserve room for its request, and return it; None if there
        is none, or no room. Requests whose adapters find no slot are passed over, as new requests are."""
        places = scheduler.adapter_places()
        for at in range(min(self.polled, len(self.waiting))):
            transfer = self.waiting[at]
            if places is not None and not places.admit(transfer.request):
                continue
            if not scheduler.expect(transfer.request):
                return None
            del self.waiting[at]
            return transfer
        return None

    def release_dropped(self, scheduler: Scheduler) -> None:
        """Give up the reservations of requests whose KV cache will never come."""
        for request in self.dropped:
            scheduler.release(request)
        self.dropped.clear()


Deliver = Callable[[int, "EngineCore", Progress], None]
"""Called with the tick, the core and the progress of the core's step."""


class Stepping:
    """Sharing of an instance's GPUs among the steps of its cores. This base class serves an instance with a single
    core."""

    shared = False
    """True if a core's steps depend on those of other cores."""
    stepwise = False
    _agenda: Agenda

    def join(self, core: EngineCore) -> int:
        """Add a core to the instance and return the core's number within it."""
        return 0

    def wire(self, agenda: Agenda, *, stepwise: bool) -> None:
        """Attach the instance to a world. If `stepwise`, cores that share their GPUs run one step at a time, without
        jumps."""
        self._agenda, self.stepwise = agenda, stepwise

    def may_jump(self, core: EngineCore) -> bool:
        """True if a step that `core` begins now may be repeated in one event."""
        return True

    def start(self, now: int, core: EngineCore) -> None:
        """Let a core that runs nothing begin its next step, if it has one."""
        if core.plan(now):
            core.launch(now + core.time.total)

    def end(self, now: int, core: EngineCore, deliver: Deliver) -> None:
        """End the step of a core and begin its next one, unless something else happens at this instant first."""
        core.conclude(now, deliver)
        if self._agenda.has_more_at(now):
            core.wake(now)
        else:
            self.start(now, core)

    def wakes(self, now: int, core: EngineCore) -> None:
        """Called when an idle core is about to schedule."""

    def cut(self, now: int, core: EngineCore, repetitions: int) -> None:
        """Let the jump of a core end after `repetitions` repetitions, at `now` or later."""
        core.shorten(repetitions)

    def reset(self) -> None:
        """Called when the instance has failed."""


@dataclass(slots=True, eq=False)
class EngineCore:
    """An engine core: one scheduler, its cost model, and the step it is running."""

    scheduler: Scheduler
    costs: StepCosts
    instance: int = 0
    pool: str = "mixed"
    connector: Connector | None = None
    """The connection out of a prefill instance: its requests are handed over when their prompt is done."""
    stepping: Stepping = field(default_factory=Stepping)
    """The sharing of GPUs, one object for all cores of the instance."""
    swap: int = 0  # ticks to move one KV block to or from host memory; steps wait for it
    fetches: TierFetches | None = None  # from tiers below its prefix cache; steps wait for them
    loads: HostLoads | None = None  # from host memory; requests wait for them
    admission: AdmissionLimits | None = None  # of its instance's server; all requests are admitted unless given
    up: bool = True  # accepts new requests
    number: int = 0  # of the core within the deployment
    virtual_engine: int = field(init=False)  # number of the core within its instance
    step: Step | None = field(default=None, init=False)
    time: JumpTime = field(default_factory=JumpTime, init=False)
    started: int = field(default=0, init=False)
    version: int = field(default=0, init=False)
    """Version of the event that ends the running step; an older event is void."""
    woken: bool = field(default=False, init=False)  # idle, and about to schedule
    draining: bool = field(default=False, init=False)
    """True if the core accepts no new requests and a role change waits for it to finish those it has."""
    waiting: int = field(default=0, init=False)  # requests waiting in the scheduler, at the last count
    holding: int = field(default=0, init=False)
    """Requests handed over whose KV cache still occupies blocks of this core."""
    busy: int = field(default=0, init=False)  # ticks spent in steps so far
    most_tokens: int = field(default=0, init=False)  # of a step with chunks, so far
    sampler: StepSampler = field(default_factory=StepSampler, init=False)
    inbox: Inbox = field(default_factory=Inbox, init=False)
    gaps: TokenGaps = field(default_factory=TokenGaps, init=False)
    runs_ahead: bool = field(default=False, init=False)
    """True if the core's steps end in `run_ahead` instead of `end`."""
    _single_steps: bool = field(default=False, init=False)
    ended: int = field(default=-1, init=False)  # tick at which the latest step ended
    timer: StepTimer = field(init=False)
    agenda: Agenda = field(init=False)
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.timer = timer_for(self.costs, self.scheduler.drafting)
        # Finding the longest context costs a look at all members, and most cost models need none.
        self.scheduler.tells_longest = self.timer.asks_longest
        self.virtual_engine = self.stepping.join(self)

    def wire(self, agenda: Agenda, recorder: Recorder, *, single_steps: bool, runs_ahead: bool) -> None:
        """Attach the core to a world. With `single_steps` no step is repeated; with `runs_ahead` steps without other
        events between them bypass the agenda, unless the core shares its GPUs; not for cores that take requests over.
        """
        self.agenda, self.recorder = agenda, recorder
        self._single_steps = single_steps or (self.fetches is not None and self.fetches.one_by_one)
        self.stepping.wire(agenda, stepwise=self._single_steps or recorder.jumps is not None)
        self.runs_ahead = runs_ahead and not (self._single_steps or self.stepping.shared or self.loads)

    @property
    def has_work(self) -> bool:
        """True if the core has requests, or KV caches on their way to it."""
        return bool(self.inbox) or self.scheduler.has_work

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, now: int, request: Request) -> bool:
        """Queue a new request; return False if the scheduler refuses it."""
        scheduler, time, notices, repetition = self.scheduler, self.time, False, 0
        if self.step is not None:
            late, repetition = scheduler.async_scheduling, 1
            if time.repetitions > 1:
                notices, repetition = scheduler.would_notice(), time.reaching(now - self.started)[0]
        else:
            # With asynchronous scheduling the next step is dispatched already, so it does not see the request.
            late = scheduler.async_scheduling and self.ended == now
        if not (scheduler.add_late(request, repetition) if late else scheduler.add(request)):
            return False
        self.recorder.waiting += 1
        self.waiting += 1
        if not repetition:
            self.wake(now)
        # If late, one more repetition of this step is dispatched already.
        elif notices:
            self.stepping.cut(now, self, repetition + (late and not self.stepping.shared))
        return True

    def offer(self, now: int, transfer: KvTransfer) -> None:
        """Queue a request that was handed over until there is room for its KV cache."""
        waiting = self.inbox.waiting
        waiting.append(transfer)
        if self.step is None:
            self.wake(now)
        # If the inbox was not empty there is no room until the jump ends, but for adapters that have a slot.
        elif self.time.repetitions > 1 and (len(waiting) == 1 or self.scheduler.adapters is not None):
            self.cut(now)

    def count_waiting(self) -> None:
        """Update the number of waiting requests after the scheduler's queue has changed."""
        waiting = self.scheduler.num_waiting
        self.recorder.waiting += waiting - self.waiting
        self.waiting = waiting

    # --- steps --------------------------------------------------------------------------------------------------

    def wake(self, now: int) -> None:
        """Let the idle core schedule at this instant, after all other events of the instant."""
        if not self.woken:
            self.woken = True
            self.agenda.post((now, WAKE, self.number, 0))
            self.stepping.wakes(now, self)

    def notify(self, now: int) -> None:
        """Let the core schedule after the step it is in, because something has changed."""
        if self.step is None:
            self.wake(now)
        elif self.time.repetitions > 1:
            self.cut(now)

    def start(self, now: int) -> None:
        """Begin the next step, if there is one and no step is running."""
        self.woken = False
        if self.step is None:
            self.stepping.start(now, self)

    def plan(self, now: int) -> bool:
        """Schedule the next step and compute its time; return False if nothing can run. `launch` must follow."""
        inbox = self.inbox
        if inbox.waiting or inbox.arrived or inbox.dropped or inbox.aborted:
            self.gaps.note_joining(now, inbox.arrived, inbox.aborted, self.recorder)
            if self.inbox.settle(self.scheduler):
                self.count_waiting()
            self.inbox.make_room(now, self.scheduler, self.agenda, self.recorder)
        if self.loads is not None:
            self.loads.arrive(now)
        self.step = step = self.scheduler.schedule()
        if self.loads is not None:
            self.loads.begin(now, self.agenda, self.number)
        if step is None:
            self.idle(now)
            return False
        self.find_time(now, step)
        self.started = now
        self.version += 1
        return True

    def launch(self, end: int) -> None:
        """Run the planned step, which ends at tick `end`; this is most likely the next event."""
        self.agenda.hold((end, STEP_END, self.number, self.version))

    def cut(self, now: int) -> None:
        """End the jump with the step in which `now` falls, because something has changed."""
        self.stepping.cut(now, self, self.time.reaching(now - self.started)[0])

    def shorten(self, repetitions: int) -> None:
        """Let a jump end after `repetitions` repetitions, if no other core takes part in it."""
        if repetitions < self.time.repetitions:
            self.time.repetitions = repetitions
            self.version += 1
            self.agenda.replace((self.started + self.time.total, STEP_END, self.number, self.version))

    def end(self, now: int, deliver: Deliver) -> None:
        """End the running step and begin the next one."""
        self.stepping.end(now, self, deliver)

    def conclude(self, now: int, deliver: Deliver) -> None:
        """Complete the repetitions of the running step and deliver their progress."""
        self._account(now)
        progress = self.scheduler.complete(self.time.repetitions)
        self.step, self.ended = None, now
        if self.inbox.unheard:
            # Their prompt was computed elsewhere, so the scheduler does not count their first token as one.
            progress = self.inbox.heard(progress, self.scheduler)
        if progress.first_token or progress.finished:
            deliver(now, self, progress)

    def fail(self, now: int) -> None:
        """End a step on an instance that fails: finished repetitions have delivered their tokens, the current one is
        lost."""
        self.inbox.unheard.clear()
        if self.step is None:
            self.gaps.clear()
            return
        # Tokens of finished repetitions have left the engine: clients have them, whatever happens to the instance.
        self.stop(self.time.over_after(now - self.started) if self.time.repetitions > 1 else 0)
        self.gaps.clear()
        self.stepping.reset()

    def stop(self, over: int) -> None:
        """End the running step after `over` repetitions; one that is under way is lost."""
        if over:
            self.time.repetitions = over
            self._account(self.started + self.time.total)
            self.scheduler.complete(over)
        self.step, self.version = None, self.version + 1

    def idle(self, now: int) -> None:
        """Make room for waiting transfers when nothing can run: late requests of asynchronous scheduling leave now."""
        self.gaps.note_idle(now, self.scheduler.num_running)
        if self.inbox.waiting:
            self.inbox.make_room(now, self.scheduler, self.agenda, self.recorder, idle=True)
        if self.draining:
            self.agenda.post((now, DRAINED, self.number, 0))

    def find_time(self, now: int, step: Step) -> None:
        """Compute the duration of a step's repetitions, and how many of them are run in one event."""
        time = self.time
        of_step, recorder = step.chunks, self.recorder
        if of_step or step.preempted:
            recorder.note_preempted(step.preempted)
            self.gaps.note_preempted(step.preempted, self.ended)
            self.count_waiting()
        if of_step:
            chunks, completing, chunk_tokens = recorder.note_chunks(now, of_step)
            self.most_tokens = max(self.most_tokens, step.num_decodes + chunk_tokens)
            ticks = self.timer.mixed(step, chunks, completing)
            time.first = ticks if self.fetches is None else self.fetches.around(now, ticks)
            time.slope, time.repetitions, time.ends = 0, 1, None
        else:
            most = self.inbox.most_repetitions(step, self.scheduler)
            self.timer.decode(step, most if most == 1 or self.may_jump(step) else 1, time)
        if self.inbox.unheard:
            # It ends with the first tokens of requests that have joined.
            time.repetitions = 1
        if step.part != (0, 1):
            time.first = self.timer.of_part(step, time.first)
        if self.swap and (moved := step.swapped_out_blocks + step.swapped_in_blocks):
            time.first += self.swap * moved
            # Repetitions would not wait for the swapped blocks.
            time.repetitions = 1

    def may_jump(self, step: Step) -> bool:
        """True if repetitions of a step may be run in one event."""
        if self._single_steps or not self.stepping.may_jump(self):
            return False
        # Where a request leaves the core must stop: for those that wait in its inbox, or for what other cores may find.
        awaited = self.inbox.waiting or (self.fetches is not None and self.fetches.shares_writes)
        return not (awaited and (self.scheduler.unsettled or step.preempted))

    def _account(self, end: int) -> None:
        """Record the running step's repetitions, the last of which ends at tick `end`."""
        step, time, recorder = self.step, self.time, self.recorder
        assert step is not None
        recorder.steps += time.repetitions
        self.busy += end - self.started
        if self.busy >= self.sampler.due:
            self.sampler.take(self.busy, step, time, end - self.started)
        note_tokens(self, end)
        if recorder.jumps is not None:
            waiting = self.scheduler.num_waiting + len(self.inbox.waiting)
            span, free = (self.started, end), self.scheduler.kv.free
            recorder.jumps.add(step, self.number, span, time.repetitions, waiting, free)


def note_tokens(core: EngineCore, end: int) -> None:
    """Record the times between the tokens of a core's running step, the last repetition of which ends at tick `end`."""
    step = core.step
    assert step is not None
    decodes = step.num_decodes - step.discarded
    if core.inbox.unheard:
        # The first token of a request that has just joined follows no other token, so it ends no interval.
        decodes -= sum(request.decoding and request not in step.paused for request in core.inbox.unheard)
    core.gaps.note_step(step, core.time, core.started, end, decodes if decodes > 0 else 0, core.recorder)
