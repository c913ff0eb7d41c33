"""A simulator's scheduler with a real executor: it decides under a real clock, and an executor computes its decisions.

The loop is that of an engine: requests that are due are added, `schedule` returns the next step, the executor runs it,
`complete` returns the finished requests. The result has the columns of a simulation, so that both are judged by the
same statistics, and a list of steps, each with its batch and its duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop
from typing import NamedTuple, Protocol

from simtune.costs.calibration import TimedStep
from simtune.costs.iteration import StepWork
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.engine import Progress, Request, Scheduler, Step
from simtune.results.outcome import EngineCoreUse, Outcome
from simtune.sim.agenda import NEVER, Agenda
from simtune.sim.recorder import Recorder
from simtune.sim.source import RequestSource
from simtune.validation.servers.engine_clocks import EngineClock, processor_s, wall_s
from simtune.workload.requests import RequestStream


class TokenShare(NamedTuple):
    """Tokens of one request that a step computes, after the `past` ones in the cache."""

    request: Request
    past: int
    tokens: int
    samples: bool
    """True if the request gets a token."""


class Executor(Protocol):
    """Computes steps."""

    def run(self, shares: Sequence[TokenShare]) -> None:
        """Compute a step; return when its tokens are available."""
        ...

    def release(self, request: Request) -> None:
        """Release the keys and values of a request that is finished or preempted."""
        ...


class MeasuredStep(NamedTuple):
    """A step that was run: its batch, the free blocks and waiting requests when it was scheduled, and its seconds by
    both clocks."""

    begin_s: float
    work: StepWork
    waiting: int
    free_blocks: int
    cpu_s: float
    """Processor time of scheduling, running and completing the step, divided by the slowness of the clock's gauge."""
    wall_s: float
    execute_cpu_s: float
    """Processor time of the executor alone; the rest is the engine's own."""

    def timed(self, clock: str = "cpu") -> TimedStep:
        """Return the step as an entry of a log of steps, by one of the clocks."""
        return TimedStep(self.work, self.cpu_s if clock == "cpu" else self.wall_s)


class QueueLength(NamedTuple):
    """Number of running and waiting requests, from a time on."""

    at_s: float
    running: int
    waiting: int


@dataclass(frozen=True)
class Served:
    """Result of a stream of requests."""

    outcome: Outcome
    steps: list[MeasuredStep]
    queues: list[QueueLength]


class EngineLoop:
    """Loop of one scheduler and one executor under one stream of requests. Runs once."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: EngineClock, stream: RequestStream) -> None:
        """Raise ValueError for a scheduler that schedules asynchronously, or drafts."""
        if scheduler.async_scheduling or scheduler.drafting:
            raise ValueError("the loop runs one step after the other: neither scheduled asynchronously nor with drafts")
        self._scheduler, self._executor, self._clock = scheduler, executor, clock
        self._agenda, self._recorder = Agenda(), Recorder(len(stream))
        self._source = RequestSource(stream, self._agenda)
        self._steps: list[MeasuredStep] = []
        self._queues: list[QueueLength] = []
        self._busy = 0

    def run(self) -> Served:
        """Run until every request is answered or refused."""
        self._source.begin()
        while True:
            now = self._now()
            self._arrive(now)
            if not self._step(now):
                upcoming = self._agenda.heap[0]
                self._note_queues(now)
                if upcoming == NEVER:
                    return Served(self._outcome(), self._steps, self._queues)
                self._clock.wait_until(upcoming[0] / TICKS_PER_SECOND)

    def _now(self) -> int:
        return to_ticks(self._clock.now())

    def _note_queues(self, now: int) -> None:
        scheduler = self._scheduler
        self._queues.append(QueueLength(now / TICKS_PER_SECOND, scheduler.num_running, scheduler.num_waiting))

    def _arrive(self, now: int) -> None:
        """Add the requests that are due."""
        heap, scheduler, recorder = self._agenda.heap, self._scheduler, self._recorder
        while heap[0][0] <= now:
            at, _, number, _ = heappop(heap)
            request = self._source.arrive(number)
            recorder.waiting_at_arrival[number] = scheduler.num_waiting
            recorder.core[number] = 0
            if not scheduler.add(request):
                recorder.refused += 1
                # Without a step.
                self._source.answered(at)

    def _step(self, now: int) -> bool:
        """Run one step. Return False if there is nothing to run."""
        scheduler = self._scheduler
        cpu, wall = processor_s(), wall_s()
        step = scheduler.schedule()
        if step is None:
            return False
        shares = _shares(scheduler, step)
        # The time of the gauge does not count.
        cpu, wall = cpu - processor_s(), wall - wall_s()
        slow = self._clock.gauge(sum(share.tokens for share in shares))
        cpu, wall = cpu + processor_s(), wall + wall_s()
        for request in step.preempted:
            self._recorder.preemptions[request.id] += 1
            self._executor.release(request)
        work, waiting, free = _work(step, shares), scheduler.num_waiting, scheduler.kv.free
        self._note_queues(now)
        execute = processor_s()
        self._executor.run(shares)
        execute = processor_s() - execute
        end = self._now()
        # Requests that arrived while the step ran.
        self._arrive(end)
        self._account(now, end, step, scheduler.complete())
        times = (processor_s() - cpu) / slow, wall_s() - wall, execute / slow
        self._steps.append(MeasuredStep(now / TICKS_PER_SECOND, work, waiting, free, *times))
        return True

    def _account(self, begin: int, end: int, step: Step, progress: Progress) -> None:
        """Record the results of a step."""
        recorder = self._recorder
        recorder.steps += 1
        self._busy += end - begin
        for chunk in step.chunks:
            if recorder.scheduled[chunk.request.id] < 0:
                recorder.scheduled[chunk.request.id] = begin
        if step.num_decodes:
            recorder.rows.append((end - begin, 0, 1, step.num_decodes))
        for request in progress.first_token:
            if recorder.first_token[request.id] < 0:
                recorder.first_token[request.id] = end
        for request in progress.finished:
            recorder.finish[request.id] = end
            self._executor.release(request)
            self._source.answered(end)

    def _outcome(self) -> Outcome:
        use = EngineCoreUse("mixed", 0, 0, self._scheduler.kv.total, self._busy, self._scheduler.tally)
        return self._recorder.outcome(self._source.arrival, aborted=False, events=len(self._steps), cores=[use])


def _shares(scheduler: Scheduler, step: Step) -> list[TokenShare]:
    """Return the share of each request in the latest step, in the engine's order."""
    chunks = {chunk.request: chunk for chunk in step.chunks}
    shares = []
    for request, tokens in scheduler.composition().items():
        chunk = chunks.get(request)
        if chunk is None:
            past = request.prompt_tokens + scheduler.emitted(request) - 1
            shares.append(TokenShare(request, past, tokens, samples=True))
        else:
            shares.append(TokenShare(request, chunk.past, chunk.tokens, samples=chunk.completes))
    return shares


def _work(step: Step, shares: Sequence[TokenShare]) -> StepWork:
    chunks = tuple((chunk.past, chunk.tokens) for chunk in step.chunks)
    longest = max((s.past + s.tokens for s in shares if s.tokens == 1), default=0) if step.num_decodes else 0
    return StepWork(step.num_decodes, step.context_tokens, chunks, sum(s.samples for s in shares), longest)
