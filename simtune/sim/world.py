"""The simulated clock: engine instances, arrivals, and what happens first when two things happen at once.

Time is an integer number of ticks (2**-40 s), so a jump over many decode steps and a walk through them agree to the
last bit. At one instant the order is fixed, and it is the order of a real engine's loop:

1. steps end (in the order in which they were started), requests finish, closed-loop users begin to think;
2. requests arrive, in order of their number, and are routed;
3. idle lanes schedule their next step (in the order in which they became idle), seeing all of the above.

A *lane* is one scheduler with one batch under way: an instance without pipeline parallelism, or one of the pp virtual
engines of an instance with it. A lane runs a step as often as the scheduler says nothing can change and the cost model
says its time is affine, in one event. An arrival that the scheduler would notice cuts such a jump at the end of the
step in which it falls.

The event queue is a plain heap: one entry per jump and per arrival, ordered by (tick, phase, number), so that the order
above is the key itself. The same events on simpy take about seven times as long: benchmarks/sim/.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.costs.protocol import StepCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Progress, Request, Scheduler, Step
from simtune.errors import UsageError
from simtune.sim.requests import RequestStream

_END, _ARRIVE, _WAKE = 0, 1, 2

LONGEST_S = 2.0**62 / TICKS_PER_SECOND
"""Half of what 64-bit ticks can count: arrivals beyond it are refused, so that their answers still fit."""

Ticks = NDArray[np.int64]


class StepRecord(NamedTuple):
    """One jump of one lane, for timelines: `steps` equal steps from start to end."""

    lane: int
    start: int
    end: int
    steps: int
    num_decodes: int
    prefill_tokens: int
    running: int
    waiting: int
    free_blocks: int


@dataclass(slots=True, eq=False)
class Lane:
    """One scheduler, its cost model, and the step it is running."""

    scheduler: Scheduler
    costs: StepCosts
    number: int = 0
    step: Step | None = None
    started: int = 0
    first: int = 0  # ticks of the first repetition of the running step
    slope: int = 0  # ticks that each further repetition takes longer
    repetitions: int = 0
    event: int = 0  # number of the event that ends the running step; an older one is void
    woken: bool = False


@dataclass(slots=True)
class Outcome:
    """What happened to every request, as columns in order of request number; times in ticks, -1 where it never came."""

    arrival: Ticks
    scheduled: Ticks
    first_token: Ticks
    finish: Ticks
    lane: Ticks
    preemptions: Ticks
    waiting_at_arrival: Ticks
    """Requests waiting in the whole deployment when this one arrived, itself not counted."""
    aborted: bool
    events: int
    steps: int
    records: list[StepRecord] = field(default_factory=list)


class World:
    """A deployment under one stream of requests. Runs once."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        stream: RequestStream,
        *,
        single_steps: bool = False,
        record: bool = False,
        stop_when: Callable[[int, int, int, int], bool] | None = None,
    ) -> None:
        """`single_steps` takes every step as an event of its own: slow, and the oracle for jumps.

        `stop_when(request, arrival, first_token, finish)` is asked at every finished request; once it answers True the
        run ends there and the outcome is marked `aborted`.
        """
        self._lanes = list(lanes)
        for number, lane in enumerate(self._lanes):
            lane.number = number
        self._single_steps = single_steps
        self._stop_when = stop_when
        self._records: list[StepRecord] | None = [] if record else None
        self._stream = stream
        n = len(stream)
        self._prompt = stream.prompt_tokens.tolist()
        self._output = stream.output_tokens.tolist()
        self._arrival: list[int] = [-1] * n
        if stream.arrival_s is not None:
            if n and float(stream.arrival_s[-1]) > LONGEST_S:
                raise UsageError(
                    f"the last request would arrive after {stream.arrival_s[-1] / 86400:,.0f} days; the simulated "
                    f"clock counts to {LONGEST_S / 86400:.0f}. Simulate fewer requests, or a higher rate"
                )
            self._arrival = np.rint(stream.arrival_s * TICKS_PER_SECOND).astype(np.int64).tolist()
        self._think = round(stream.think_s * TICKS_PER_SECOND)
        self._scheduled = [-1] * n
        self._first = [-1] * n
        self._finish = [-1] * n
        self._lane_of = [-1] * n
        self._preemptions = [0] * n
        self._waiting_at = [0] * n
        self._waiting = 0
        self._heap: list[tuple[int, int, int, int]] = []  # (tick, phase, number, lane or request)
        self._numbers = 0
        self._next_request = 0
        self._aborted = False
        self._events = 0
        self._steps = 0

    def run(self) -> Outcome:
        """Run until every request is finished or refused, or `stop_when` says so."""
        if self._stream.arrival_s is None:
            for _ in range(min(self._stream.users or 1, len(self._prompt))):
                self._send_next(0)
        elif self._prompt:
            self._send_next(self._arrival[0])
        heap = self._heap
        while heap and not self._aborted:
            now, phase, number, subject = heapq.heappop(heap)
            self._events += 1
            if phase == _ARRIVE:
                self._arrive(now, subject)
            elif phase == _END:
                lane = self._lanes[subject]
                if lane.event == number:
                    self._end(now, lane)
            else:
                lane = self._lanes[subject]
                lane.woken = False
                if lane.step is None:
                    self._start(now, lane)
        return Outcome(
            arrival=_column(self._arrival),
            scheduled=_column(self._scheduled),
            first_token=_column(self._first),
            finish=_column(self._finish),
            lane=_column(self._lane_of),
            preemptions=_column(self._preemptions),
            waiting_at_arrival=_column(self._waiting_at),
            aborted=self._aborted,
            events=self._events,
            steps=self._steps,
            records=self._records or [],
        )

    def _push(self, tick: int, phase: int, subject: int) -> int:
        self._numbers += 1
        heapq.heappush(self._heap, (tick, phase, self._numbers, subject))
        return self._numbers

    def _send_next(self, tick: int) -> None:
        """Let the next request of the stream arrive at `tick`."""
        number = self._next_request
        if number < len(self._prompt):
            self._next_request += 1
            self._arrival[number] = tick
            heapq.heappush(self._heap, (tick, _ARRIVE, number, number))

    def _arrive(self, now: int, number: int) -> None:
        if self._stream.arrival_s is not None and self._next_request < len(self._prompt):
            self._send_next(self._arrival[self._next_request])
        lane = self._lanes[number % len(self._lanes)]
        self._lane_of[number] = lane.number
        self._waiting_at[number] = self._waiting
        notices = lane.step is not None and lane.repetitions > 1 and lane.scheduler.would_notice()
        if not lane.scheduler.add(Request(number, self._prompt[number], self._output[number])):
            if self._stream.arrival_s is None:  # refused: its user goes on thinking
                self._send_next(now + self._think)
            return
        self._waiting += 1
        if lane.step is None:
            self._wake(now, lane)
        elif notices:
            self._cut(now, lane)

    def _wake(self, now: int, lane: Lane) -> None:
        if not lane.woken:
            lane.woken = True
            self._push(now, _WAKE, lane.number)

    def _start(self, now: int, lane: Lane) -> None:
        scheduler = lane.scheduler
        step = scheduler.schedule()
        if step is None:
            return
        self._waiting += len(step.preempted)
        chunks = step.chunks
        lane.repetitions, lane.slope = 1, 0
        if chunks:
            for chunk in chunks:
                if chunk.past == 0:
                    self._waiting -= 1
                    if self._scheduled[chunk.request.id] < 0:
                        self._scheduled[chunk.request.id] = now
            samples = step.num_decodes + sum(chunk.completes for chunk in chunks)
            lane.first = lane.costs.mixed(
                step.num_decodes,
                step.context_tokens,
                [(chunk.past, chunk.tokens) for chunk in chunks],
                samples,
            )
        else:
            lane.first, lane.slope, span = lane.costs.decode(step.num_decodes, step.context_tokens)
            if not self._single_steps:
                lane.repetitions = min(step.repeat, span)
        for request in step.preempted:
            self._preemptions[request.id] += 1
        lane.step, lane.started = step, now
        lane.event = self._push(now + _elapsed(lane, lane.repetitions), _END, lane.number)

    def _cut(self, now: int, lane: Lane) -> None:
        """Shorten a jump so that it ends with the step in which `now` falls."""
        repetitions = _repetitions_reaching(lane, now - lane.started)
        if repetitions < lane.repetitions:
            lane.repetitions = repetitions
            lane.event = self._push(lane.started + _elapsed(lane, repetitions), _END, lane.number)

    def _end(self, now: int, lane: Lane) -> None:
        self._steps += lane.repetitions
        if self._records is not None:
            self._record(now, lane)
        progress: Progress = lane.scheduler.complete(lane.repetitions)
        lane.step = None
        for request in progress.first_token:
            self._first[request.id] = now
        for request in progress.finished:
            number = request.id
            self._finish[number] = now
            if self._stream.arrival_s is None:
                self._send_next(now + self._think)
            if self._stop_when is not None and self._stop_when(number, self._arrival[number], self._first[number], now):
                self._aborted = True
        if lane.scheduler.has_work:
            if self._heap and self._heap[0][0] == now:
                self._wake(now, lane)  # something else happens at this instant, and comes first
            else:
                self._start(now, lane)

    def _record(self, now: int, lane: Lane) -> None:
        assert self._records is not None
        assert lane.step is not None
        step, scheduler = lane.step, lane.scheduler
        self._records.append(
            StepRecord(
                lane.number,
                lane.started,
                now,
                lane.repetitions,
                step.num_decodes,
                sum(chunk.tokens for chunk in step.chunks),
                step.num_decodes + len(step.chunks),
                len(scheduler.waiting),
                scheduler.kv.free,
            )
        )


def _column(values: list[int]) -> Ticks:
    return np.array(values, dtype=np.int64)


def _elapsed(lane: Lane, repetitions: int) -> int:
    """Ticks of the first `repetitions` repetitions: an arithmetic series."""
    return repetitions * lane.first + lane.slope * (repetitions * (repetitions - 1) // 2)


def _repetitions_reaching(lane: Lane, elapsed: int) -> int:
    """The smallest number of repetitions, at least 1, that take `elapsed` ticks or longer.

    Solves first*n + slope*n(n-1)/2 >= elapsed for n; the root is exact or one too small, so it is stepped up.
    """
    first, slope = lane.first, lane.slope
    if slope == 0:
        return max(1, -(-elapsed // first))
    b = 2 * first - slope
    n = max(1, (math.isqrt(b * b + 8 * slope * elapsed) - b) // (2 * slope))
    while _elapsed(lane, n) < elapsed:
        n += 1
    return n
