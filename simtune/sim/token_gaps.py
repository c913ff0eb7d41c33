"""Times between tokens of requests that wait for their next token while other steps run.

A request usually decodes in every step, so the length of a step is the time between two of its tokens. It is longer if
steps without its tokens lie between: of prompts that an engine runs first, of parts of the layers, or after the request
was preempted and until its tokens are computed again. Then the time runs from its last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from simtune.engine import Request, Step

if TYPE_CHECKING:
    from simtune.sim.recorder import Recorder
    from simtune.sim.step_timing import JumpTime


class Joined(NamedTuple):
    """Requests that joined those that decode, with their first token or with one that was computed again."""

    at: int
    """Tick from which on steps decode them."""
    last_token: int
    numbers: set[int]


class TokenGaps:
    """Requests of a core that wait for their next token, and since when; empty nearly always."""

    __slots__ = ("_cut_at", "_joined", "_lost", "_paused", "_since", "waiting")

    def __init__(self) -> None:
        self.waiting = False
        """True if steps have run since the last tokens of some requests that decode."""
        self._since: int | None = None
        """Tick of the last tokens of all requests that wait, but for those below."""
        self._joined: list[Joined] = []
        """Requests whose last tokens came at other ticks, in the order in which they joined."""
        self._cut_at = 0
        """Start of the latest step that is given out in parts of its layers."""
        self._lost: dict[int, int] = {}
        """Tick of the last token of each request that was preempted, by its number."""
        self._paused: dict[int, int] = {}
        """The same of each request that decodes, but was not in the latest step in which others did."""

    def note_preempted(self, requests: Iterable[Request], ended: int) -> None:
        """Remember when requests that are preempted got their last token; the latest step ended at `ended`, perhaps
        before the core was idle."""
        for request in requests:
            # A request may be preempted again before its tokens are computed again.
            if request.emitted and request.id not in self._lost:
                self._lost[request.id] = self._last_token(request.id, ended)

    def note_joining(
        self, now: int, arrived: Iterable[Request], aborted: Iterable[Request], recorder: Recorder
    ) -> None:
        """Note requests that join at `now` with their KV caches, and those whose clients have given up. The second
        token of a request whose first one was delivered elsewhere follows that one."""
        for request in aborted:
            self._last_token(request.id, now)
        for request in arrived:
            first_token = recorder.first_token[request.id]
            # Of a request that was lost with more tokens, nothing here knows when the last one came.
            if request.emitted == 1 and first_token >= 0:
                self.waiting = True
                self._joined.append(Joined(now, first_token, {request.id}))

    def _last_token(self, number: int, now: int) -> int:
        """Return the tick of the last token of a request, which no longer waits for its next one."""
        if number in self._paused:
            return self._paused.pop(number)
        for joined in self._joined:
            if number in joined.numbers:
                joined.numbers.discard(number)
                return joined.last_token
        return now if self._since is None else self._since

    def note_step(self, step: Step, time: JumpTime, started: int, ended: int, decodes: int, recorder: Recorder) -> None:
        """Record the times between the tokens of a step; `decodes` requests get one in each repetition. To be called
        before the scheduler completes it."""
        cut = step.part[1] > 1 and not step.decodes_whole
        if cut and self._is_halted(step, started):
            return
        if self._lost or self._paused or step.paused:
            self._note_returning(step, started)
        if not self.waiting:
            recorder.note_intervals(time, decodes)
        elif step.num_decodes > step.discarded:
            self._resume(time, started, decodes, recorder, before=self._cut_at if cut else started)
        # Chunks beside decodes change nothing here unless requests were preempted: most steps with chunks.
        if step.chunks and (self._lost or step.num_decodes <= step.discarded) and step.is_last_part:
            self._note_chunks(step, started, ended, recorder)

    def _note_chunks(self, step: Step, started: int, ended: int, recorder: Recorder) -> None:
        """Note the requests whose prompts a step completes, and those that wait because it has prompts only."""
        sampled = [chunk.request for chunk in step.chunks if chunk.completes]
        self._note_sampled(sampled, ended, recorder)
        if step.num_decodes <= step.discarded:
            self.wait(started)
            going_on = {request.id for request in sampled if request.emitted + 1 < request.output_tokens}
            # A core that only prefills never decodes: the list would grow with each of its steps.
            if going_on:
                self._joined.append(Joined(ended, ended, going_on))

    def _note_returning(self, step: Step, started: int) -> None:
        """Note requests that decode in this step, and did not in the last one, or the other way round."""
        if self._lost and step.admitted:
            self._note_swapped_in(step)
        # Also if all that decode in the step get their first tokens: the others pause.
        if step.num_decodes > step.discarded:
            self._note_paused([request.id for request in step.paused if request.emitted], started)

    def _note_swapped_in(self, step: Step) -> None:
        """Note preempted requests that decode again at once, because none of their tokens are computed again."""
        computed = {chunk.request.id for chunk in step.chunks}
        for number in [request.id for request in step.admitted if request.id not in computed]:
            if number in self._lost:
                tick = self._lost.pop(number)
                self._joined.append(Joined(tick, tick, {number}))
                self.waiting = True

    def _note_paused(self, numbers: Sequence[int], started: int) -> None:
        """Note the requests that are not in a step in which others decode; those that were not in the last such step
        either, and are now, are in it with their own last tokens."""
        paused = {number: self._last_token(number, started) for number in numbers}
        self._joined += [Joined(tick, tick, {number}) for number, tick in self._paused.items()]
        self._paused, self.waiting = paused, bool(self.waiting or paused or self._joined)

    def _is_halted(self, step: Step, started: int) -> bool:
        """Return True if a part of a step delivers nothing, because others follow; its requests wait from then on."""
        if not step.part[0]:
            self._cut_at = started
        if step.is_last_part:
            return False
        self.wait(started)
        return True

    def _note_sampled(self, requests: Iterable[Request], ended: int, recorder: Recorder) -> None:
        """Record the times between tokens of requests whose tokens were computed again, up to the next one."""
        for request in requests if self._lost else ():
            if request.id in self._lost:
                recorder.note_gap(ended - self._lost.pop(request.id), 1)

    def clear(self) -> None:
        """Forget all requests: the instance has failed."""
        self.waiting, self._since, self._joined, self._lost, self._paused = False, None, [], {}, {}

    def note_idle(self, now: int, running: int) -> None:
        """Let requests that run wait, because nothing can be scheduled: memory is short."""
        if running:
            self.wait(now)

    def wait(self, since: int) -> None:
        """Let all requests that decode wait from a tick on, unless they wait already."""
        self.waiting = True
        if self._since is None:
            self._since = since

    def _resume(self, time: JumpTime, started: int, decodes: int, recorder: Recorder, *, before: int) -> None:
        """Record the first repetition by the last tokens of its requests, and the others as usual. Requests that joined
        after `before` are not in the step."""
        first = time.first if time.ends is None else time.ends[0]
        end, waiting_requests = started + first, decodes
        later: list[Joined] = []
        for joined in reversed(self._joined):
            if joined.at > before:
                later.insert(0, joined)
                continue
            some = min(waiting_requests, len(joined.numbers))
            recorder.note_gap(end - joined.last_token, some)
            waiting_requests -= some
        recorder.note_gap(end - (started if self._since is None else self._since), waiting_requests)
        self._since, self._joined, self.waiting = None, later, bool(later or self._paused)
        if time.repetitions > 1:
            recorder.note_rest(time, decodes)
