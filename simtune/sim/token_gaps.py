"""Times between tokens of requests that wait for their next token while other steps run.

A request usually decodes in every step, so the length of a step is the time between two of its tokens. It is longer if
steps without its tokens lie between: of prompts that an engine runs first, of parts of the layers, or after the request
was preempted and until its tokens are computed again. Then the time runs from its last token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from simtune.engine import Request, Step

if TYPE_CHECKING:
    from simtune.sim.recorder import Recorder
    from simtune.sim.step_timing import JumpTime


class TokenGaps:
    """Requests of a core that wait for their next token, and since when; empty nearly always."""

    __slots__ = ("_cut_at", "_joined", "_lost", "_since", "waiting")

    def __init__(self) -> None:
        self.waiting = False
        """True if steps have run since the last tokens of some requests that decode."""
        self._since: int | None = None
        """Tick of the last tokens of all requests that wait, but for those below."""
        self._joined: list[tuple[int, set[int]]] = []
        """Ticks since then at which requests got their first token, or theirs again, and the numbers of these."""
        self._cut_at = 0
        """Start of the latest step that is given out in parts of its layers."""
        self._lost: dict[int, int] = {}
        """Tick of the last token of each request that was preempted, by its number."""

    def note_preempted(self, requests: Iterable[Request], now: int) -> None:
        """Remember when requests that are preempted at `now` got their last token."""
        for request in requests:
            if request.emitted:
                self._lost[request.id] = self._last_token(request.id, now)

    def note_joining(self, arrived: Iterable[Request], aborted: Iterable[Request], recorder: Recorder) -> None:
        """Note requests that join with their KV caches, and those whose clients have given up."""

    def _last_token(self, number: int, now: int) -> int:
        for tick, numbers in self._joined:
            if number in numbers:
                numbers.discard(number)
                return tick
        return now if self._since is None else self._since

    def note_step(self, step: Step, time: JumpTime, started: int, ended: int, decodes: int, recorder: Recorder) -> None:
        """Record the times between the tokens of a step; `decodes` requests get one in each repetition. To be called
        before the scheduler completes it."""
        cut = step.part[1] > 1 and not step.decodes_whole
        if cut and self._is_halted(step, started):
            return
        if not self.waiting:
            recorder.note_intervals(time, decodes)
        elif decodes:
            self._resume(time, started, decodes, recorder, before=self._cut_at if cut else started)
        if step.chunks and step.is_last_part:
            sampled = [chunk.request for chunk in step.chunks if chunk.completes]
            self._note_sampled(sampled, ended, recorder)
            if not decodes:
                self._wait(started)
                self._joined.append((ended, {r.id for r in sampled if r.emitted + 1 < r.output_tokens}))

    def _is_halted(self, step: Step, started: int) -> bool:
        """Return True if a part of a step delivers nothing, because others follow; its requests wait from then on."""
        if not step.part[0]:
            self._cut_at = started
        if step.is_last_part:
            return False
        self._wait(started)
        return True

    def _note_sampled(self, requests: Iterable[Request], ended: int, recorder: Recorder) -> None:
        """Record the times between tokens of requests whose tokens were computed again, up to the next one."""
        for request in requests if self._lost else ():
            if request.id in self._lost:
                recorder.note_gap(ended - self._lost.pop(request.id), 1)

    def clear(self) -> None:
        """Forget all requests: the instance has failed."""
        self.waiting, self._since, self._joined, self._lost = False, None, [], {}

    def _wait(self, started: int) -> None:
        """Let all requests that decode wait from the start of a step, unless they wait already."""
        self.waiting = True
        if self._since is None:
            self._since = started

    def _resume(self, time: JumpTime, started: int, decodes: int, recorder: Recorder, *, before: int) -> None:
        """Record the first repetition by the last tokens of its requests, and the others as usual. Requests that joined
        after `before` are not in the step."""
        first = time.first if time.ends is None else time.ends[0]
        end, waiting_requests = started + first, decodes
        later: list[tuple[int, set[int]]] = []
        for tick, numbers in reversed(self._joined):
            if tick > before:
                later.insert(0, (tick, numbers))
                continue
            some = min(waiting_requests, len(numbers))
            recorder.note_gap(end - tick, some)
            waiting_requests -= some
        recorder.note_gap(end - (started if self._since is None else self._since), waiting_requests)
        self._since, self._joined, self.waiting = None, later, bool(later)
        if time.repetitions > 1:
            recorder.note_rest(time, decodes)
