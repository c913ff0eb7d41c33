"""Times between the messages in which an engine sends tokens to a client, if it sends several at a time.

The first token of an answer is sent at once, then every `interval` tokens, and whatever is left with the last one
(vLLM's OutputProcessor, SGLang's output_streamer.py). A request that decodes gets a token in every step that decodes,
so its messages are known ahead as numbers of such steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simtune.engine import Request, Step
from simtune.sim.token_gaps import TokenGaps

if TYPE_CHECKING:
    from simtune.sim.recorder import Recorder
    from simtune.sim.step_timing import JumpTime


@dataclass(slots=True)
class SentAnswer:
    """Messages of one answer so far."""

    sent: int = 0
    """Tokens sent."""
    at: int = 0
    """Tick of the last message."""
    order: int = 0
    """Number of the only entry of the heap that counts for it."""


class MessageGaps(TokenGaps):
    """Requests of a core whose answers are sent in messages of `interval` tokens; for steps without drafts."""

    __slots__ = ("_answers", "_due", "_order", "_paused_requests", "_steps", "interval")

    def __init__(self, interval: int) -> None:
        super().__init__()
        self.waiting = True  # so that all steps are noted
        self.interval = interval
        self._steps = 0  # steps so far in which requests decoded
        self._order = 0
        # (step that ends with a message, order of entry, request, its tokens by then)
        self._due: list[tuple[int, int, Request, int]] = []
        self._answers: dict[Request, SentAnswer] = {}
        self._paused_requests: Sequence[Request] = ()
        """Requests that decode, but were not in the latest step in which others did."""

    def note_preempted(self, requests: Iterable[Request], ended: int) -> None:
        """Let no message be due until the tokens of these requests were computed again."""
        for request in requests:
            if request in self._answers:
                self._answers[request].order = 0

    def note_joining(
        self, now: int, arrived: Iterable[Request], aborted: Iterable[Request], recorder: Recorder
    ) -> None:
        """Note requests that join with their KV caches, perhaps after their first token; forget those that were
        aborted."""
        for request in aborted:
            self._answers.pop(request, None)
        for request in arrived:
            answer = self._answers[request] = SentAnswer()
            if request.emitted > 1:
                # It has lost an instance: what it had by then is sent, and the wait since is no time between messages.
                answer.sent, answer.at = request.emitted, now
            elif (first_token := recorder.first_token[request.id]) >= 0:
                answer.sent, answer.at = 1, first_token
            self._expect(request, answer, self._steps, request.emitted)

    def note_step(self, step: Step, time: JumpTime, started: int, ended: int, decodes: int, recorder: Recorder) -> None:
        """Record the times between messages that end with a step. To be called before the scheduler completes it."""
        # `decodes` leaves out requests that get their first token; their messages begin with it
        if step.num_decodes > step.discarded and (step.is_last_part or step.decodes_whole):
            returning = [*self._paused_requests, *(() if step.chunks else step.admitted)]  # the latter are swapped in
            if step.paused or returning:
                self._pause(step.paused, returning)
            before, self._steps = self._steps, self._steps + time.repetitions
            due = self._due
            while due and due[0][0] <= self._steps:
                number, order, request, tokens = heapq.heappop(due)
                answer = self._answers.get(request)
                if answer is not None and answer.order == order:
                    self._send(answer, tokens, started + time.elapsed(number - before), recorder)
                    self._expect(request, answer, number, tokens)
        if step.chunks and step.is_last_part:
            for chunk in step.chunks:
                if chunk.completes:
                    self._note_computed(chunk.request, ended, recorder)

    def _pause(self, requests: Sequence[Request], returning: Sequence[Request]) -> None:
        """Let no message be due of requests that are not in this step; those that return to it go on from their tokens
        so far."""
        for request in returning:
            if request in self._answers and request.decoding and request not in requests:
                self._expect(request, self._answers[request], self._steps, request.emitted)
        for request in requests:
            if request in self._answers:
                self._answers[request].order = 0
        self._paused_requests = requests

    def _note_computed(self, request: Request, ended: int, recorder: Recorder) -> None:
        """Note the token of a request whose tokens so far were computed, for the first time or again, by tick
        `ended`."""
        answer, tokens = self._answers.setdefault(request, SentAnswer()), request.emitted + 1
        if not answer.sent or tokens in (answer.sent + self.interval, request.output_tokens):
            self._send(answer, tokens, ended, recorder)
        self._expect(request, answer, self._steps, tokens)

    def _send(self, answer: SentAnswer, tokens: int, at: int, recorder: Recorder) -> None:
        """Send the tokens of an answer that are not sent yet."""
        if answer.sent:
            recorder.note_gap(at - answer.at, 1)
        answer.sent, answer.at = tokens, at

    def _expect(self, request: Request, answer: SentAnswer, step: int, tokens: int) -> None:
        """Let the next message be due, after step `step` with which a request has `tokens` tokens."""
        if tokens >= request.output_tokens:
            del self._answers[request]
            return
        then = min(answer.sent + self.interval, request.output_tokens) if answer.sent else 1
        self._order += 1
        answer.order = self._order
        heapq.heappush(self._due, (step + then - tokens, self._order, request, then))

    def clear(self) -> None:
        """Forget all requests: the instance has failed."""
        self._due.clear()
        self._answers.clear()
        self._paused_requests = ()
