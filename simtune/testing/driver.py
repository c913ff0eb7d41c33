"""Driver that calls a scheduler as a simulator would, without a clock, and checks all laws on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from simtune.engine import Progress, Request, Scheduler, Step
from simtune.engine.policies.listed import ListScheduler
from simtune.testing.sealed import Sealed

TOO_LONG = 50_000
"""Number of steps after which a request counts as waiting forever."""


@dataclass(frozen=True)
class Arrival:
    """Request, and the step before which it comes."""

    at: int
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    predicted_tokens: int = 1
    deadline: float = 1.0

    def request(self, number: int) -> Sealed:
        """Return the request as a policy sees it."""
        return Sealed(
            number,
            self.prompt_tokens,
            self.output_tokens,
            priority=self.priority,
            predicted_tokens=self.predicted_tokens,
            deadline=self.deadline,
        )


@dataclass(frozen=True)
class SmallWorld:
    """Settings of a scheduler, and its load."""

    blocks: int
    block_size: int
    seqs: int
    budget: int
    longest: int
    chunked: bool
    load: Sequence[Arrival]


@st.composite
def small_worlds(draw: st.DrawFn) -> SmallWorld:
    """Draw few blocks and seats, so that requests wait and are preempted."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    blocks = draw(st.integers(4, 40))
    longest = max(2, blocks * block_size // draw(st.integers(1, 3)))
    at, load = 0, []
    for _ in range(draw(st.integers(1, 20))):
        at += draw(st.sampled_from([0, 0, 0, 1, 3, 20]))
        prompt = draw(st.integers(1, max(1, longest // 2)))
        output = draw(st.integers(1, max(1, longest // 2)))
        hints = draw(st.tuples(st.integers(0, 2), st.integers(1, 30), st.sampled_from([1.0, 2.0, 9.0])))
        load.append(Arrival(at, prompt, output, *hints))
    chunked = draw(st.booleans())
    return SmallWorld(blocks, block_size, draw(st.integers(1, 8)), draw(st.integers(1, 64)), longest, chunked, load)


@dataclass
class DriverLog:
    """All events, by number of the step."""

    scheduled: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    context: dict[int, int] = field(default_factory=dict)
    longest: dict[int, int] = field(default_factory=dict)
    part: dict[int, tuple[int, int]] = field(default_factory=dict)
    preempted: dict[int, list[int]] = field(default_factory=dict)
    admitted: dict[int, list[int]] = field(default_factory=dict)
    first: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, list[int]] = field(default_factory=dict)
    free: dict[int, int] = field(default_factory=dict)

    def note_step(self, now: int, repeat: int, step: Step, plan: dict[Request, int], *, with_longest: bool) -> None:
        """Record a step that is run `repeat` times from step `now` on."""
        for i in range(repeat):
            self.scheduled[now + i] = [(request.id, tokens) for request, tokens in plan.items()]
            self.context[now + i] = step.context_tokens + i * step.num_decodes
            if with_longest and step.num_decodes:
                self.longest[now + i] = step.longest_context + i
        self.part[now] = step.part
        if step.preempted:
            self.preempted[now] = [request.id for request in step.preempted]
        if step.admitted:
            self.admitted[now] = [request.id for request in step.admitted]

    def note_progress(self, now: int, progress: Progress, free: int) -> None:
        """Record the progress of a step, and the number of free blocks."""
        if progress.first_token:
            self.first[now] = [request.id for request in progress.first_token]
        if progress.finished:
            self.finished[now] = [request.id for request in progress.finished]
        self.free[now] = free

    def finish_of(self, number: int) -> int:
        """Return the step after which a request was finished."""
        return next(step for step, numbers in self.finished.items() if number in numbers)

    def begin_of(self, number: int) -> int:
        """Return the first step that had tokens of a request."""
        return next(step for step, plan in sorted(self.scheduled.items()) if any(i == number for i, _ in plan))


@dataclass
class Driver:
    """Drives one scheduler through one world."""

    scheduler: Scheduler
    world: SmallWorld
    pads: bool = False
    """True if chunks count padding."""
    idle_seats: Callable[[Scheduler, int], bool] | None = None
    """Rule that a request may wait beside a step, given its number of requests; None if work need not be conserved."""
    log: DriverLog = field(default_factory=DriverLog)

    def run(self, *, single: bool) -> DriverLog:
        """Run until all requests are done, in single steps or as many at once as the scheduler allows."""
        scheduler, now = self.scheduler, 0
        self._coming = [(arrival.at, arrival.request(i)) for i, arrival in enumerate(self.world.load)]
        self._accepted: list[Sealed] = []
        self._done: list[Request] = []
        while self._coming or scheduler.has_work:
            if not scheduler.has_work:
                now = max(now, self._coming[0][0])
            self._arrive(now)
            if scheduler.has_work:
                now = self._step(now, single)
        self._check_everybody_was_served()
        return self.log

    def _arrive(self, until: int) -> None:
        while self._coming and self._coming[0][0] <= until:
            request = self._coming.pop(0)[1]
            if self.scheduler.add(request):
                self._accepted.append(request)

    def _step(self, now: int, single: bool) -> int:
        """Run one step and its repetitions; return the number of the step that follows."""
        scheduler, log = self.scheduler, self.log
        assert now < TOO_LONG, "a request waits forever"
        residents = set(scheduler.residents) if isinstance(scheduler, ListScheduler) else None
        step = scheduler.schedule()
        name = type(scheduler).__name__
        assert step is not None, f"{name}.schedule() returned None with {scheduler.num_waiting} requests waiting"
        plan = scheduler.composition()
        self._check_step(step, plan, residents)
        repeat = 1 if single else step.repeat
        if self._coming and self._coming[0][0] < now + repeat:
            if scheduler.would_notice():
                repeat = self._coming[0][0] - now
            else:
                self._arrive(now + repeat - 1)
        log.note_step(now, repeat, step, plan, with_longest=residents is not None)
        progress = scheduler.complete(repeat)
        now += repeat
        log.note_progress(now, progress, scheduler.kv.free)
        self._done += progress.finished
        self._check_conserved()
        return now

    def _check_step(self, step: Step, plan: dict[Request, int], residents: set[Request] | None) -> None:
        """Check the laws of every step, whatever the policy."""
        scheduler = self.scheduler
        assert plan, "a step without requests"
        assert all(tokens > 0 for tokens in plan.values()), "a request without tokens in the step"
        assert sum(plan.values()) <= scheduler.max_num_batched_tokens, "more tokens than max_num_batched_tokens"
        assert len(plan) <= scheduler.max_num_seqs, "more requests than max_num_seqs"
        assert len(step.chunks) + step.num_decodes == len(plan), "chunks and decodes differ from the step's requests"
        assert step.repeat == 1 or not step.chunks, "a step with chunks cannot be repeated"
        self._check_chunks(step, plan)
        if residents is not None:
            self._check_residents(step, plan, residents)
        if self.idle_seats is not None and self.world.chunked and not step.preempted:
            self._check_work_conserved(plan)

    def _check_residents(self, step: Step, plan: dict[Request, int], residents: set[Request]) -> None:
        assert set(step.admitted) == set(plan) - residents, "step.admitted differs from the new requests of the step"
        if not self.pads:
            chunks = {chunk.request for chunk in step.chunks}
            contexts = [request.computed + 1 for request in plan if request not in chunks]
            counted = step.context_tokens, step.longest_context
            assert counted == (sum(contexts), max(contexts, default=0)), "contexts miscounted"

    def _check_chunks(self, step: Step, plan: dict[Request, int]) -> None:
        chunks = {chunk.request: chunk.tokens for chunk in step.chunks}
        assert chunks.items() <= plan.items(), "a chunk with other tokens than the step gives it"
        assert set(step.admitted) <= set(chunks), "admitted without a chunk"
        assert all(chunk.past == chunk.request.computed for chunk in step.chunks), "a chunk that begins elsewhere"
        for chunk in () if self.pads else step.chunks:
            assert chunk.past + chunk.tokens <= chunk.request.known_tokens, "a chunk beyond the end of the prompt"
            assert self.world.chunked or chunk.completes, "a prompt was cut, and chunked_prefill is off"

    def _check_work_conserved(self, plan: dict[Request, int]) -> None:
        scheduler = self.scheduler
        if scheduler.waiting:
            assert self.idle_seats is not None
            full = sum(plan.values()) == scheduler.max_num_batched_tokens or len(plan) == scheduler.max_num_seqs
            short = scheduler.kv.blocks_for(scheduler.waiting[0].known_tokens) > scheduler.kv.free
            assert full or short or self.idle_seats(scheduler, len(plan)), "a waiting request could have been admitted"

    def _check_conserved(self) -> None:
        scheduler = self.scheduler
        present = scheduler.num_running + scheduler.num_waiting
        assert len(self._done) + present == len(self._accepted), "requests are lost or doubled"
        assert len(set(scheduler.waiting)) == len(scheduler.waiting), "a request waits twice"
        assert 0 <= scheduler.kv.free <= scheduler.kv.total, "more blocks than there are"
        if isinstance(scheduler, ListScheduler):
            held_blocks = sum(scheduler.kv.held_by(request) for request in scheduler.residents)
            assert scheduler.kv.free + held_blocks == scheduler.kv.total, "blocks are lost or doubled"
            assert not set(scheduler.residents) & set(scheduler.waiting), "a request both waits and has a seat"
            assert all(scheduler.kv.held_by(r) == 0 for r in scheduler.waiting), "a waiting request has blocks"

    def _check_everybody_was_served(self) -> None:
        scheduler, log, accepted = self.scheduler, self.log, self._accepted
        assert Counter(self._done) == Counter(accepted), "everyone finishes once"
        assert scheduler.kv.free == scheduler.kv.total, "blocks are still taken after all requests have ended"
        assert all(request.emitted == request.true_tokens for request in accepted), "an answer of another length"
        first = {number: step for step, numbers in log.first.items() for number in numbers}
        assert Counter(n for numbers in log.first.values() for n in numbers) == Counter(r.id for r in accepted)
        for request in accepted:
            number = request.id
            begin = log.begin_of(number)
            assert self.world.load[number].at <= begin < first[number] <= log.finish_of(number), "out of order"


def to_the_end(scheduler: Scheduler) -> list[int]:
    """Run until nothing runs any more; return the requests in the order in which they finished."""
    finished: list[int] = []
    while (step := scheduler.schedule()) is not None:
        finished += [request.id for request in scheduler.complete(step.repeat).finished]
    return finished
