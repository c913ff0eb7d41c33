"""The simulated clock: engine instances, arrivals, and what happens first when two things happen at once.

Time is an integer number of ticks (2**-40 s), so a jump over many decode steps and a walk through them agree to the
last bit. At one instant the order is fixed, and it is the order of a real engine's loop:

1. steps end (in order of cores), requests finish or are handed over, closed-loop users begin to think;
2. transfers begin (in order of requests) and end (in order of links);
3. instances start, fail, recover and change roles (as listed in the plan);
4. requests arrive, in order of their number, and are routed;
5. idle cores schedule their next step (in order of cores), seeing all of the above.

An *engine core*, core for short, is one scheduler with one batch under way: an instance without pipeline parallelism,
or one of the pp virtual engines of an instance with it. With data-parallel attention an instance is a group of cores (a
DP group) that step together, each step as long as that of the core that takes longest. A core runs a step as often as
the scheduler says nothing can change and the cost model says its time is affine, in one event. Whatever the scheduler
would notice, an arrival or a KV cache, cuts such a jump at the end of the step in which it falls. The cores of a
pipeline or DP group jump only while the others are idle.

The event queue is a plain heap: one entry per jump and per arrival, ordered by (tick, phase, subject), so that the
order above is the key itself. The same events on simpy take about seven times as long: benchmarks/sim/.

Prefill and decode apart: a prompt that is done on a prefill core is handed to a decode core at once, but its KV cache
stays where it is until the decode core has reserved a seat and blocks for it, first come first served; then it is sent,
and freed when the last byte has gone. So a full decode pool fills the prefill pool. The first token is delivered when
the prompt is done.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.costs.protocol import RoundCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import PrefixCache, Request, Step, Tally
from simtune.errors import UsageError
from simtune.sim.core import EngineCore, Handoff
from simtune.sim.link import Link
from simtune.sim.requests import RequestStream
from simtune.sim.router import RoundRobin, Router

_ROWS = 1 << 10  # of intervals, kept as tuples at most

_END, _SEND, _SENT, _CHANGE, _ARRIVE, _WAKE = range(6)

LONGEST_S = 2.0**62 / TICKS_PER_SECOND
"""Half of what 64-bit ticks can count: arrivals beyond it are refused, so that their answers still fit."""

Ticks = NDArray[np.int64]


class StepRecord(NamedTuple):
    """One jump of one core, for timelines: `steps` equal steps from start to end."""

    core: int
    start: int
    end: int
    steps: int
    num_decodes: int
    prefill_tokens: int
    running: int
    waiting: int
    free_blocks: int


class EngineCoreUse(NamedTuple):
    """What became of a core."""

    pool: str
    instance: int
    virtual_engine: int
    blocks: int
    """Size of its KV cache."""
    busy: int
    """Ticks spent in steps."""
    drafting: Tally = Tally()
    """What its verifications came to, where it drafts."""
    queried_tokens: int = 0
    """Prompt tokens looked for in its prefix cache."""
    hit_tokens: int = 0
    """How many of them were there."""


class Change(NamedTuple):
    """Something happens to some cores at a tick: `up` tells whether they come or go, `lost` whether with all they have.

    Cores that go without being lost finish what they have; `then` are cores that come in their place, `delay` ticks
    after that.
    """

    tick: int
    cores: Sequence[EngineCore]
    up: bool
    lost: bool = False
    then: Sequence[EngineCore] = ()
    delay: int = 0


@dataclass(slots=True)
class Outcome:
    """What happened to every request, as columns in order of request number; times in ticks, -1 where it never came."""

    arrival: Ticks
    scheduled: Ticks
    first_token: Ticks
    finish: Ticks
    core: Ticks
    """Where it was answered; with prefill and decode apart, where it was decoded."""
    preemptions: Ticks
    waiting_at_arrival: Ticks
    """Requests waiting in the whole deployment when this one arrived, itself not counted."""
    transferred: Ticks
    """When its KV cache had come to the decode instance; -1 where nothing was sent."""
    resent: Ticks
    """How often it was sent again because an instance failed; those that waited at one that left are not counted."""
    refused: int
    """Requests that no instance takes, for they are too long."""
    aborted: bool
    events: int
    steps: int
    transferred_bytes: int
    cores: list[EngineCoreUse]
    intervals: Ticks
    """Times between tokens, without a value per token, for a jump's are an arithmetic progression. A row (first, slope,
    steps, decodes) stands for `steps` steps of `decodes` tokens, the k-th taking first + k * slope ticks."""
    records: list[StepRecord] = field(default_factory=list)


class World:
    """A deployment under one stream of requests. Runs once."""

    def __init__(
        self,
        cores: Sequence[EngineCore],
        stream: RequestStream,
        *,
        router: Router | None = None,
        decode_router: Router | None = None,
        changes: Sequence[Change] = (),
        predicted_tokens: Sequence[int] | None = None,
        deadlines: Sequence[float] | None = None,
        single_steps: bool = False,
        record: bool = False,
        stop_when: Callable[[int, int, int, int], bool] | None = None,
    ) -> None:
        """`cores` are all cores of the deployment. `router` chooses among those that take new requests (all of them,
        one after the other, unless given), `decode_router` among those that take over from cores with a `connector`.

        `single_steps` takes every step as an event of its own: slow, and the oracle for jumps.

        `stop_when(request, arrival, first_token, finish)` is asked at every finished request; once it answers True the
        run ends there and the outcome is marked `aborted`.
        """
        self._cores = list(cores)
        receiving = set() if decode_router is None else set(decode_router.cores)
        for number, core in enumerate(self._cores):
            core.number = number
            core.receives = core in receiving
            special = core.receives or core.pipeline or core.uneven
            core.jumps_freely = not (special or single_steps or record)
        self._router = RoundRobin(self._cores) if router is None else router
        self._decode_router = decode_router
        if decode_router is not None:
            self._longest = min(core.scheduler.max_model_len for core in decode_router.cores)
        self._changes = list(changes)
        self._single_steps = single_steps
        self._stop_when = stop_when
        self._records: list[StepRecord] | None = [] if record else None
        self._stream = stream
        n = len(stream)
        self._prompt = _compact(stream.prompt_tokens)
        self._output = _compact(stream.output_tokens)
        self._priority = _compact(stream.priority)
        self._blocks = stream.hash_ids
        self._predicted = predicted_tokens
        self._deadlines = deadlines
        self._arrival = _unset(n)
        if stream.arrival_s is not None:
            if n and float(stream.arrival_s[-1]) > LONGEST_S:
                raise UsageError(
                    f"the last request would arrive after {stream.arrival_s[-1] / 86400:,.0f} days; the simulated "
                    f"clock counts to {LONGEST_S / 86400:.0f}. Simulate fewer requests, or a higher rate"
                )
            self._arrival = _compact(np.rint(stream.arrival_s * TICKS_PER_SECOND))
        self._open = stream.arrival_s is not None
        self._think = round(stream.think_s * TICKS_PER_SECOND)
        self._scheduled, self._first, self._finish = _unset(n), _unset(n), _unset(n)
        self._core_of, self._transferred = _unset(n), _unset(n)
        self._preemptions, self._waiting_at, self._resent = _zeros(n), _zeros(n), _zeros(n)
        self._waiting = 0
        self._heap: list[tuple[int, int, int, int]] = []  # (tick, phase, subject, version)
        self._handoffs: dict[int, Handoff] = {}  # by request
        self._links = {
            core.connector.link.number: core.connector.link for core in self._cores if core.connector is not None
        }
        self._serial = 0
        self._parked: deque[Request] = deque()  # new requests for which no core is up
        self._stranded: list[Handoff] = []  # handed over, and no decode core is up
        self._leaving: dict[int, Change] = {}  # cores that finish what they have, by number
        self._end_apart: tuple[int, int, int, int] | None = None  # one core's end that need not go through the heap
        self._next_request = 0
        self._aborted = False
        self._refused = 0
        self._events = 0
        self._steps = 0
        self._bytes = 0
        self._rows: list[tuple[int, int, int, int]] = []  # of intervals, not yet in the array
        self._intervals = array("q")
        self._round_ends, self._round_jumps = array("q"), array("q")

    def run(self) -> Outcome:
        """Run until every request is finished or refused, no core is up to serve it, or `stop_when` says so."""
        for i, change in enumerate(self._changes):
            heappush(self._heap, (change.tick, _CHANGE, i, 0))
        if not self._open:
            for _ in range(min(self._stream.users or 1, len(self._prompt))):
                self._send_next(0)
        elif self._prompt:
            heappush(self._heap, (self._arrival[0], _ARRIVE, 0, 0))
        collects = gc.isenabled()
        gc.disable()  # requests come and go by the million, and none of them refers to itself
        try:
            self._go()
        finally:
            if collects:
                gc.enable()
        self._pack()
        return Outcome(
            arrival=_column(self._arrival),
            scheduled=_column(self._scheduled),
            first_token=_column(self._first),
            finish=_column(self._finish),
            core=_column(self._core_of),
            preemptions=_column(self._preemptions),
            waiting_at_arrival=_column(self._waiting_at),
            transferred=_column(self._transferred),
            resent=_column(self._resent),
            refused=self._refused,
            aborted=self._aborted,
            events=self._events,
            steps=self._steps,
            transferred_bytes=self._bytes,
            cores=[_use(core) for core in self._cores],
            intervals=np.concatenate([_column(self._intervals).reshape(-1, 4), self._round_intervals()]),
            records=self._records or [],
        )

    def _go(self) -> None:
        heap, cores, pop = self._heap, self._cores, heappop
        while not self._aborted:
            event = self._end_apart
            if event is not None and not (heap and heap[0] < event):
                self._end_apart = None
            elif heap:
                event = pop(heap)
            else:
                break
            now, phase, subject, version = event
            self._events += 1
            if phase == _END:
                core = cores[subject]
                if core.version == version and core.step is not None:
                    self._end(now, core)
            elif phase == _ARRIVE:
                self._arrive(now, subject)
            elif phase == _WAKE:
                core = cores[subject]
                core.woken = False
                if core.step is None:
                    self._start(now, core)
            elif phase == _SEND:
                self._send(now, subject, version)
            elif phase == _SENT:
                self._sent(now, subject, version)
            else:
                self._change(now, self._changes[subject])

    def _pack(self) -> None:
        """Put the latest intervals where they take less memory."""
        self._intervals.extend(chain.from_iterable(self._rows))
        self._rows.clear()

    def _round_intervals(self) -> Ticks:
        """Of jumps whose rounds are told one by one: a row for each round."""
        ends, (rounds, decodes) = _column(self._round_ends), _column(self._round_jumps).reshape(-1, 2).T
        rows = np.ones((len(ends), 4), dtype=np.int64)
        rows[:, 0] = np.diff(ends, prepend=0)
        begins = (rounds.cumsum() - rounds)[rounds > 0]
        rows[begins, 0] = ends[begins]
        rows[:, 1], rows[:, 3] = 0, np.repeat(decodes, rounds)
        return rows

    # --- arrivals -----------------------------------------------------------------------------------------

    def _send_next(self, tick: int) -> None:
        """Let the next request of a closed loop arrive at `tick`."""
        number = self._next_request
        if number < len(self._prompt):
            self._next_request += 1
            self._arrival[number] = tick
            heappush(self._heap, (tick, _ARRIVE, number, 0))

    def _arrive(self, now: int, number: int) -> None:
        if self._open:
            after = number + 1
            if after < len(self._prompt):
                heappush(self._heap, (self._arrival[after], _ARRIVE, after, 0))
        self._waiting_at[number] = self._waiting
        request = Request(number, self._prompt[number], self._output[number], priority=self._priority[number])
        if self._blocks is not None:
            request.blocks = self._blocks[number]
        if self._predicted is not None:
            request.predicted_tokens = self._predicted[number]
        if self._deadlines is not None:
            request.deadline = self._deadlines[number]
        self._route(now, request)

    def _route(self, now: int, request: Request) -> None:
        """Send a request to a core, or keep it until one is up."""
        asked = request if self._decode_router is None else self._prompt_only(request)
        core = self._router.choose(asked, now)
        if core is None:
            self._parked.append(request)
            return
        number, scheduler = request.id, core.scheduler
        self._core_of[number] = core.number
        notices = core.step is not None and core.repetitions > 1 and scheduler.would_notice()
        if not (asked is request or self._fits(number)) or not scheduler.add(asked):
            self._router.over(asked, core, now)
            self._refused += 1
            if not self._open:  # its user goes on thinking
                self._send_next(now + self._think)
            return
        self._waiting += 1
        core.waiting += 1
        if core.step is None:
            self._wake(now, core)
        elif notices:
            self._cut(now, core)

    def _count_waiting(self, core: EngineCore) -> None:
        waiting = core.scheduler.num_waiting
        self._waiting += waiting - core.waiting
        core.waiting = waiting

    def _prompt_only(self, request: Request) -> Request:
        """What a prefill instance is asked for: all that is known of the request, and one token more."""
        prompt = Request(request.id, request.known_tokens, 1, priority=request.priority, hold=True)
        prompt.blocks, prompt.deadline = request.blocks, request.deadline
        return prompt

    def _fits(self, number: int) -> bool:
        """Whether every decode instance, where they are apart, can hold the whole request."""
        return self._prompt[number] + self._output[number] <= self._longest

    # --- steps --------------------------------------------------------------------------------------------

    def _wake(self, now: int, core: EngineCore) -> None:
        """Let an idle core schedule at this instant, after everything else that happens at it."""
        if not core.woken:
            core.woken = True
            heappush(self._heap, (now, _WAKE, core.number, 0))
            if core.pipeline is not None:
                self._end_jumps(now, core)
            elif core.dp_group is not None:
                for other in core.dp_group:
                    if other.step is not None and other.jumping:
                        self._cut(now, other)

    def _end_jumps(self, now: int, core: EngineCore) -> None:
        """Another core needs the pipeline too: from its next step on each one goes step by step."""
        assert core.pipeline is not None
        for other in core.pipeline.cores:
            if other is not core and other.step is not None and other.jumping:
                self._cut(now, other)
                other.jumping = False
                last = other.repetitions - 1
                began, took = other.started + other.elapsed(last), other.elapsed(last + 1) - other.elapsed(last)
                core.pipeline.free = [0] * core.pipeline.stages
                core.pipeline.pass_through(began, took)

    def _start(self, now: int, core: EngineCore) -> None:
        """Let a core that runs nothing schedule its next step, if it has one."""
        if core.dp_group is not None:
            self._start_dp_group(now, core.dp_group)
        elif self._plan(now, core):
            self._expect(self._launched(now, core))

    def _start_dp_group(self, now: int, dp_group: Sequence[EngineCore]) -> None:
        """Start all cores of a DP group, unless a step of theirs is under way: they step together.

        Each step takes as long as the longest of them. Only a core that is alone jumps.
        """
        if any(core.step is not None for core in dp_group):
            return
        planned = [core for core in dp_group if self._plan(now, core)]
        if len(planned) > 1:
            longest = max(core.first for core in planned)
            for core in planned:
                core.first, core.slope, core.repetitions, core.ends = longest, 0, 1, None
        for core in planned:
            core.jumping = core.repetitions > 1
            self._expect(self._launched(now, core))

    def _plan(self, now: int, core: EngineCore) -> bool:
        """Schedule a core's next step and find its ticks; False when nothing can run."""
        scheduler = core.scheduler
        if core.receives:
            for request in core.dropped:
                scheduler.release(request)
            core.dropped.clear()
            for request in core.arrived:
                scheduler.receive(request)
            core.arrived.clear()
            self._make_room(now, core)
        step = scheduler.schedule()
        if step is None:
            self._idle(now, core)
            return False
        self._time(now, core, step)
        core.step, core.started = step, now
        core.version += 1
        return True

    def _idle(self, now: int, core: EngineCore) -> None:
        """A core has nothing to run."""
        if core.inbox:
            self._make_room(now, core)  # with asynchronous scheduling the last ones have left only now
        if core.number in self._leaving:
            self._left(now, core)

    def _time(self, now: int, core: EngineCore, step: Step) -> None:
        """Find how long the repetitions of a step take, and how many are run at once."""
        scheduler, chunks = core.scheduler, step.chunks
        if chunks or step.preempted:
            for request in step.preempted:
                self._preemptions[request.id] += 1
            self._count_waiting(core)
        core.repetitions, core.slope, core.ends = 1, 0, None
        if chunks:
            samples, parts, scheduled = step.num_decodes, [], self._scheduled
            for chunk in chunks:
                request, past, tokens = chunk.request, chunk.past, chunk.tokens
                parts.append((past, tokens))
                samples += past + tokens - chunk.padding == request.prompt_tokens + request.emitted  # it `completes`
                if scheduled[request.id] < 0:
                    scheduled[request.id] = now
            if core.rounds is None:
                core.first = core.costs.mixed(step.num_decodes, step.context_tokens, parts, samples)
            else:
                self._time_round(core.rounds, core, step, parts, samples - step.num_decodes)
        else:
            alone = core.pipeline is None or self._alone(core)
            jumps = alone and not self._single_steps and not (core.inbox and (scheduler.unsettled or step.preempted))
            if core.rounds is None:
                core.first, core.slope, span = core.costs.decode(step.num_decodes, step.context_tokens)
                if jumps:
                    core.repetitions = min(step.repeat, span)
            elif jumps and step.contexts is not None:
                core.ends = self._round_by_round(core.rounds, step)
                core.first, core.repetitions = core.ends[0], len(core.ends)
            else:
                self._time_round(core.rounds, core, step)
        if core.uneven is not None:
            core.first += core.uneven(step.num_decodes, step.context_tokens, step.longest_context, bool(chunks))
        if step.part != (0, 1):
            i, n = step.part
            core.first = core.first // n + (i < core.first % n)
        if step.swapped_out_blocks or step.swapped_in_blocks:
            core.first += core.swap * (step.swapped_out_blocks + step.swapped_in_blocks)
            core.repetitions = 1  # those that follow do not wait for it

    @staticmethod
    def _time_round(
        costs: RoundCosts, core: EngineCore, step: Step, chunks: Sequence[tuple[int, int]] = (), completing: int = 0
    ) -> None:
        core.first = costs.round(
            step.num_decodes, step.verify_tokens, step.draft_levels, step.context_tokens, chunks, completing
        )

    @staticmethod
    def _round_by_round(costs: RoundCosts, step: Step) -> Sequence[int]:
        """After how many ticks each repetition of a step with drafts ends, whose contexts grow as they are accepted."""
        decodes, levels, computed = step.num_decodes, step.draft_levels, step.contexts
        tokens = decodes + step.draft_tokens
        assert computed is not None
        if not step.discarded:
            return costs.rounds(decodes, tokens, levels, computed)
        first = costs.round(decodes, tokens, levels, step.context_tokens)
        rest = costs.rounds(decodes - step.discarded, tokens - step.discarded_tokens, levels, computed[1:])
        return [first, *[first + end for end in rest]]

    def _launched(self, now: int, core: EngineCore) -> tuple[int, int, int, int]:
        """Run the planned step; the event of its end."""
        if core.pipeline is None:
            end = now + core.elapsed(core.repetitions)
        else:
            end = core.pipeline.pass_through(now, core.first)
            core.jumping = core.repetitions > 1
            if core.jumping:
                end = now + core.elapsed(core.repetitions)
            else:
                core.first = end - now  # what it waited for the others included
        return end, _END, core.number, core.version

    def _expect(self, event: tuple[int, int, int, int]) -> None:
        """Remember the end of a step."""
        if self._end_apart is None:
            self._end_apart = event
        else:
            heappush(self._heap, event)

    @staticmethod
    def _alone(core: EngineCore) -> bool:
        assert core.pipeline is not None
        return all(other is core or (other.step is None and not other.woken) for other in core.pipeline.cores)

    def _cut(self, now: int, core: EngineCore) -> None:
        """Shorten a jump so that it ends with the step in which `now` falls."""
        repetitions, elapsed = core.reaching(now - core.started)
        if repetitions < core.repetitions:
            core.repetitions = repetitions
            core.version += 1
            event = core.started + elapsed, _END, core.number, core.version
            if self._end_apart is not None and self._end_apart[2] == core.number:
                self._end_apart = event
            else:
                heappush(self._heap, event)

    def _end(self, now: int, core: EngineCore) -> None:
        """A step ends, and the next one begins; so do those after it, as long as nothing else comes before they end."""
        heap, firsts, informed, free = self._heap, self._first, self._router.informed, core.jumps_freely
        complete, schedule, decode = core.scheduler.complete, core.scheduler.schedule, core.costs.decode
        note, rounds, round_ends, round_jumps = self._rows.append, core.rounds, self._round_ends, self._round_jumps
        while True:
            repetitions, step = core.repetitions, core.step
            if free and step is not None:  # `_account` comes to the same
                self._steps += repetitions
                core.busy += now - core.started
                if rounds is None:
                    if step.num_decodes:
                        note((core.first, core.slope, repetitions, step.num_decodes))
                elif core.ends is None:
                    if decodes := step.num_decodes - step.discarded:
                        note((core.first, 0, 1, decodes))
                else:
                    round_ends.extend(core.ends[:repetitions])
                    round_jumps.extend((repetitions, step.num_decodes - step.discarded))
            else:
                self._account(now, core)
            progress = complete(repetitions)
            core.step = None
            for request in progress.first_token:
                if firsts[request.id] < 0:
                    firsts[request.id] = now
            for request in progress.finished:
                if informed:
                    self._over(request, core, now)
                if core.connector is not None and self._hand_over(now, core, request):
                    continue
                self._finished(now, request.id)
            apart = self._end_apart
            if (heap and heap[0][0] == now) or (apart is not None and apart[0] == now):
                self._wake(now, core)  # something else happens at this instant, and comes first
                return
            if core.dp_group is not None:
                self._start_dp_group(now, core.dp_group)
                return
            if free:  # `_plan` and `_launched` come to the same, in more time
                step = schedule()
                if step is None:
                    self._idle(now, core)
                    return
                core.step, core.started = step, now
                core.version = version = core.version + 1
                if step.chunks or step.preempted or (rounds is not None and step.contexts is None):
                    self._time(now, core, step)
                    now += core.elapsed(core.repetitions)
                elif rounds is not None:
                    core.ends = ends = self._round_by_round(rounds, step)
                    core.repetitions = len(ends)
                    now += ends[-1]
                else:
                    core.first, core.slope, repetitions = decode(step.num_decodes, step.context_tokens)
                    if step.repeat < repetitions:
                        repetitions = step.repeat
                    core.repetitions = repetitions
                    now += repetitions * core.first + core.slope * (repetitions * (repetitions - 1) // 2)
                event = now, _END, core.number, version
            elif self._plan(now, core):
                event = self._launched(now, core)
                now = event[0]
            else:
                return
            if self._aborted or (heap and heap[0] < event) or (apart is not None and apart < event):
                self._expect(event)
                return
            self._events += 1

    def _account(self, end: int, core: EngineCore) -> None:
        """Write the running step's repetitions down; the last of them ends at `end`."""
        step = core.step
        assert step is not None
        self._steps += core.repetitions
        core.busy += end - core.started
        decodes = step.num_decodes - step.discarded
        if core.ends is not None:
            self._round_ends.extend(core.ends[: core.repetitions])
            self._round_jumps.extend((core.repetitions, decodes))
        elif decodes:
            self._rows.append((core.first, core.slope, core.repetitions, decodes))
        if self._records is not None:
            self._records.append(
                StepRecord(
                    core.number,
                    core.started,
                    end,
                    core.repetitions,
                    step.num_decodes,
                    sum(chunk.tokens for chunk in step.chunks),
                    step.num_decodes + len(step.chunks),
                    core.scheduler.num_waiting + len(core.inbox),
                    core.scheduler.kv.free,
                )
            )

    def _finished(self, now: int, number: int) -> None:
        self._finish[number] = now
        if len(self._rows) > _ROWS:
            self._pack()
        if not self._open:
            self._send_next(now + self._think)
        if self._stop_when is not None and self._stop_when(number, self._arrival[number], self._first[number], now):
            self._aborted = True

    def _over(self, request: Request, core: EngineCore, now: int) -> None:
        """Tell the router that sent a request to a core that it is not there any more."""
        router = self._decode_router if self._decode_router is not None and core.connector is None else self._router
        router.over(request, core, now)

    # --- prefill and decode apart -------------------------------------------------------------------------

    def _hand_over(self, now: int, core: EngineCore, held: Request) -> bool:
        """Send a request whose prompt is done on to a decode core; False when it is complete as it is."""
        number = held.id
        prompt, output = self._prompt[number], self._output[number]
        emitted = held.prompt_tokens - prompt + 1
        if emitted >= output:
            core.scheduler.release(held)
            return False
        request = Request(number, prompt, output, computed=held.prompt_tokens, emitted=emitted, priority=held.priority)
        self._serial += 1
        handoff = Handoff(request, core, held, now, self._serial)
        self._handoffs[number] = handoff
        core.holding += 1
        self._waiting += 1
        self._offer(now, handoff)
        return True

    def _offer(self, now: int, handoff: Handoff) -> None:
        """Queue a handed-over request at a decode core, or keep it until one is up."""
        assert self._decode_router is not None
        target = self._decode_router.choose(handoff.request, now)
        handoff.target = target
        if target is None:
            self._stranded.append(handoff)
            return
        self._core_of[handoff.request.id] = target.number
        target.inbox.append(handoff)
        if target.step is None:
            self._wake(now, target)
        elif target.repetitions > 1 and len(target.inbox) == 1:  # others before it: there was no room, and is none now
            self._cut(now, target)

    def _make_room(self, now: int, core: EngineCore) -> None:
        """Reserve seats and blocks for requests handed over, oldest first, and let their KV caches come."""
        while core.inbox and core.scheduler.expect(core.inbox[0].request):
            handoff = core.inbox.popleft()
            self._waiting -= 1
            handoff.sending = True
            connector = handoff.source.connector
            assert connector is not None
            begin = now + connector.setup + self._blocks_of(handoff) * connector.descriptors
            heappush(self._heap, (begin, _SEND, handoff.request.id, handoff.serial))

    @staticmethod
    def _blocks_of(handoff: Handoff) -> int:
        return handoff.source.scheduler.kv.blocks_for(handoff.held.prompt_tokens)

    def _send(self, now: int, number: int, serial: int) -> None:
        handoff = self._handoffs.get(number)
        if handoff is None or handoff.serial != serial:
            return  # called off
        connector = handoff.source.connector
        assert connector is not None
        connector.link.join(
            now, number, connector.left_to_send(self._blocks_of(handoff), handoff.ready - self._scheduled[number])
        )
        self._announce(connector.link)

    def _announce(self, link: Link) -> None:
        end = link.next_end()
        if end is not None:
            heappush(self._heap, (end, _SENT, link.number, link.version))

    def _sent(self, now: int, number: int, version: int) -> None:
        link = self._links[number]
        if link.version != version:
            return  # others came or went since
        for request in link.ended(now):
            handoff = self._handoffs.pop(request)
            source, target = handoff.source, handoff.target
            assert source.connector is not None
            assert target is not None
            self._bytes += self._blocks_of(handoff) * source.connector.block_bytes
            self._transferred[request] = now
            source.scheduler.release(handoff.held)
            source.holding -= 1
            self._stir(now, source)
            target.arrived.append(handoff.request)
            self._stir(now, target)
        self._announce(link)

    def _stir(self, now: int, core: EngineCore) -> None:
        """Something changed for a core: let it schedule, after the step it is in."""
        if core.step is None:
            self._wake(now, core)
        elif core.repetitions > 1:
            self._cut(now, core)

    # --- instances come and go ----------------------------------------------------------------------------

    def _change(self, now: int, change: Change) -> None:
        if change.up:
            for core in change.cores:
                core.up = True
            again, self._parked = self._parked, deque()
            for request in again:
                self._route(now, request)
            stranded, self._stranded = self._stranded, []
            for handoff in stranded:
                self._offer(now, handoff)
            return
        for core in change.cores:
            core.up = False
        if change.lost:
            self._lose(now, change.cores)
            return
        for core in change.cores:
            self._leaving[core.number] = change
        for core in change.cores:
            self._withdraw(now, core)
            if core.step is None:
                self._left(now, core)

    def _withdraw(self, now: int, core: EngineCore) -> None:
        """Send what waits at a core elsewhere."""
        inbox, core.inbox = core.inbox, deque()
        for handoff in inbox:
            self._over(handoff.request, core, now)
            self._offer(now, handoff)
        withdrawn = core.scheduler.withdraw()
        self._count_waiting(core)
        for request in withdrawn:
            self._over(request, core, now)
            self._route(now, self._again(request))

    def _left(self, now: int, core: EngineCore) -> None:
        """A leaving core has run out of work; once all of its instance have, others take their place."""
        if core.has_work or core.holding:
            return
        change = self._leaving.pop(core.number)
        if change.then and not any(other.number in self._leaving for other in change.cores):
            self._changes.append(Change(now + change.delay, change.then, up=True))
            heappush(self._heap, (now + change.delay, _CHANGE, len(self._changes) - 1, 0))

    def _lose(self, now: int, cores: Sequence[EngineCore]) -> None:
        """The cores fail with all they have: their requests are sent again, those furthest along first."""
        again: list[Request] = []
        offer: list[Handoff] = []
        for core in cores:
            if core.step is not None:
                self._break_off(now, core)
            going = [h for h in self._handoffs.values() if h.source is core]
            for handoff in going:
                self._call_off(now, handoff)
                again.append(self._again(handoff.request))
            coming = [h for h in self._handoffs.values() if h.target is core]
            core.inbox.clear()
            for handoff in coming:
                self._over(handoff.request, core, now)
                self._recall(now, handoff)
                offer.append(handoff)
            kept = {handoff.request.id for handoff in (*going, *coming)}
            core.arrived.clear()
            lost = core.scheduler.abandon()
            self._count_waiting(core)
            for request in lost:
                if request.id not in kept:
                    self._over(request, core, now)
                    again.append(self._again(request))
            core.holding = 0
        for handoff in offer:
            self._offer(now, handoff)
        for request in again:
            self._resent[request.id] += 1
            self._route(now, request)
        for core in cores:
            if core.number in self._leaving:
                self._left(now, core)

    def _break_off(self, now: int, core: EngineCore) -> None:
        """End a step that fails: repetitions that are over have delivered their tokens, the one under way is lost."""
        done = core.repetitions_within(now - core.started) if core.repetitions > 1 else 0
        if done:
            core.repetitions = done
            self._account(core.started + core.elapsed(done), core)
            core.scheduler.complete(done)
        core.step = None
        core.version += 1
        if core.pipeline is not None:
            core.pipeline.free = [0] * core.pipeline.stages

    def _call_off(self, now: int, handoff: Handoff) -> None:
        """The source is lost: whoever waits for the KV cache need not any more."""
        del self._handoffs[handoff.request.id]
        target = handoff.target
        if target is None:
            self._stranded.remove(handoff)
            self._waiting -= 1
            return
        self._over(handoff.request, target, now)
        if handoff.sending:
            self._recall(now, handoff)
            target.dropped.append(handoff.request)
            self._stir(now, target)
        else:
            target.inbox.remove(handoff)
            self._waiting -= 1

    def _recall(self, now: int, handoff: Handoff) -> None:
        """Take a KV cache off the link; its transfer may begin anew."""
        if not handoff.sending:
            return
        handoff.sending = False
        self._serial += 1
        handoff.serial = self._serial
        assert handoff.source.connector is not None
        link = handoff.source.connector.link
        if handoff.request.id in link:
            link.cancel(now, handoff.request.id)
            self._announce(link)
        if handoff.request.id in self._handoffs:
            self._waiting += 1

    def _again(self, request: Request) -> Request:
        """A request to be computed anew; the tokens that were delivered stay delivered."""
        number = request.id
        emitted = request.known_tokens - self._prompt[number]
        fresh = Request(number, self._prompt[number], self._output[number], emitted=emitted, priority=request.priority)
        fresh.blocks, fresh.deadline = request.blocks, request.deadline
        fresh.predicted_tokens = request.predicted_tokens
        return fresh


def _use(core: EngineCore) -> EngineCoreUse:
    kv = core.scheduler.kv
    looked = (kv.queried_tokens, kv.hit_tokens) if isinstance(kv, PrefixCache) else ()
    which = (core.pipeline.cores if core.pipeline is not None else core.dp_group or [core]).index(core)
    return EngineCoreUse(core.pool, core.instance, which, kv.total, core.busy, core.tally, *looked)


def _compact(values: NDArray[np.int64] | NDArray[np.float64]) -> array[int]:
    return array("q", values.astype(np.int64).tobytes())


def _unset(n: int) -> array[int]:
    return array("q", [-1]) * n


def _zeros(n: int) -> array[int]:
    return array("q", [0]) * n


def _column(values: array[int]) -> Ticks:
    return np.frombuffer(values, dtype=np.int64).copy() if len(values) else np.zeros(0, dtype=np.int64)
