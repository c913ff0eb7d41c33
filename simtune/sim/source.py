"""Source of requests: each request as engines see it, and when it arrives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Request
from simtune.engine.media import MediaItem
from simtune.errors import UsageError
from simtune.sim.agenda import ARRIVAL, Agenda
from simtune.workload.media import RequestMedia
from simtune.workload.requests import RequestStream

LONGEST_S = 2.0**62 / TICKS_PER_SECOND
"""Latest arrival in seconds: half of what 64-bit ticks can count, so that answers still fit; later ones are refused."""


class Hints(TypedDict):
    """Data about every request that policies may use."""

    predicted_tokens: Sequence[int] | None
    deadlines: Sequence[float] | None


class RequestSource:
    """Source of requests that arrive at their time, or in a closed loop when a user has thought about the previous
    answer; a client that holds requests back is a closed loop of as many users, who also wait until a request is due.
    """

    def __init__(
        self,
        stream: RequestStream,
        agenda: Agenda,
        *,
        predicted_tokens: Sequence[int] | None = None,
        deadlines: Sequence[float] | None = None,
    ) -> None:
        """Raise UsageError for a request that would arrive after LONGEST_S."""
        self._agenda = agenda
        self._prompt = _compact(stream.prompt_tokens)
        self._output = _compact(stream.output_tokens)
        self._priority = _compact(stream.priority)
        self._blocks, self._predicted, self._deadlines = stream.hash_ids, predicted_tokens, deadlines
        self._media = stream.media
        self._adapter: Sequence[int] | None = None if stream.adapter is None else _compact(stream.adapter)
        hints = stream.hash_ids, predicted_tokens, deadlines, stream.adapter, stream.media
        self._plain = all(values is None for values in hints)
        self._max_tokens = stream.max_tokens or 0
        self._think = round(stream.think_s * TICKS_PER_SECOND)
        self._users = stream.users or 1
        self._open = stream.arrival_s is not None
        self._count = len(stream)
        self._next = 0  # in a closed loop, the request that arrives next
        self._due = None if stream.due_s is None else _compact(np.rint(stream.due_s * TICKS_PER_SECOND))
        self.arrival = array("q", [-1]) * len(stream)
        """Tick at which each request arrives; -1 if that is not known yet."""
        if stream.arrival_s is not None:
            if len(stream) and float(stream.arrival_s[-1]) > LONGEST_S:
                raise UsageError(
                    f"the last request would arrive after {stream.arrival_s[-1] / 86400:,.0f} days; the simulated "
                    f"clock counts to {LONGEST_S / 86400:.0f}. Simulate fewer requests, or a higher rate"
                )
            self.arrival = _compact(np.rint(stream.arrival_s * TICKS_PER_SECOND))

    def begin(self) -> None:
        """Announce the first request; in a closed loop, the first request of each user."""
        if not self._open:
            for _ in range(min(self._users, self._count)):
                self._send_next(0)
        elif self.arrival:
            self._agenda.post((self.arrival[0], ARRIVAL, 0, 0))

    @property
    def follows(self) -> bool:
        """True if the source must be informed of answers, because later requests depend on them."""
        return not self._open

    def arrive(self, number: int) -> Request:
        """Return the request that arrives now, and announce the next one."""
        after = number + 1
        if self._open and after < len(self.arrival):
            self._agenda.post((self.arrival[after], ARRIVAL, after, 0))
        # Requests without blocks, adapters, predictions and deadlines have no further fields, so `made` is not called.
        if self._plain:
            output = self._output[number]
            return Request(
                number, self._prompt[number], output, self._priority[number], max_tokens=max(output, self._max_tokens)
            )
        return self.made(number)

    def made(self, number: int) -> Request:
        """Return a request as an engine sees it."""
        request = Request(number, self._prompt[number], self._output[number], self._priority[number])
        request.max_tokens = self._allowed(number)
        if self._blocks is not None:
            request.blocks = self._blocks[number]
        if self._predicted is not None:
            request.predicted_tokens = self._predicted[number]
        if self._deadlines is not None:
            request.deadline = self._deadlines[number]
        request.media = self._media_of(number)
        if self._adapter is not None:
            request.adapter = self._adapter[number]
        return request

    def answered(self, now: int, number: int = -1) -> None:
        """Record an answer: in a closed loop the user begins to think, whichever request it was."""
        if not self._open:
            self._send_next(now + self._think)

    def gave_up(self, number: int) -> bool:
        """True if a request was aborted before any core had it; never here, because no request is aborted."""
        return False

    def refused(self, now: int, number: int) -> None:
        """Record that no core accepts a request: its user continues as after an answer."""
        self.answered(now, number)

    def stopped(self) -> dict[int, int]:
        """Return the number of tokens delivered of each aborted request; empty here, because no request is aborted."""
        return {}

    def tokens_of(self, number: int) -> int:
        """Return prompt and output tokens of a request."""
        return self._prompt[number] + self._output[number]

    def _media_of(self, number: int) -> tuple[MediaItem, ...]:
        """Return the media of a request as engines see them."""
        return () if self._media is None else media_items(self._media, number)

    def _allowed(self, number: int) -> int:
        """Return the output tokens that the client of a request allows: its output unless the load states more."""
        return max(self._output[number], self._max_tokens)

    def prompt_only(self, request: Request) -> Request:
        """Return the request for a prefill instance: all known tokens, and one token to generate."""
        prompt = Request(request.id, request.known_tokens, 1, priority=request.priority, hold=True, max_tokens=1)
        prompt.blocks, prompt.deadline = request.blocks, request.deadline
        prompt.media, prompt.adapter = request.media, request.adapter
        return prompt

    def rest_of(self, prompt: Request, resampled: bool = False) -> Request | None:
        """Return the request for a decode instance when the prompt is done; None if the answer is complete already.

        With `resampled` the token that came with the prompt is left to the decode instance.
        """
        number = prompt.id
        emitted = prompt.prompt_tokens - self._prompt[number] + (0 if resampled else 1)
        if emitted >= self._output[number]:
            return None
        return Request(
            number,
            self._prompt[number],
            self._output[number],
            computed=prompt.prompt_tokens,
            emitted=emitted,
            priority=prompt.priority,
            predicted_tokens=prompt.predicted_tokens,
            max_tokens=self._allowed(number),
            deadline=prompt.deadline,
            media=prompt.media,
            adapter=prompt.adapter,
        )

    def resubmitted(self, request: Request, *, delivered: bool) -> Request:
        """Return a request to be recomputed; delivered tokens stay delivered. It has none unless `delivered`."""
        number = request.id
        emitted = request.known_tokens - self._prompt[number] if delivered else 0
        fresh = Request(number, self._prompt[number], self._output[number], emitted=emitted, priority=request.priority)
        fresh.blocks, fresh.deadline = request.blocks, request.deadline
        fresh.media, fresh.adapter = request.media, request.adapter
        fresh.predicted_tokens, fresh.max_tokens = request.predicted_tokens, self._allowed(number)
        return fresh

    def _send_next(self, tick: int) -> None:
        number = self._next
        if number < self._count:
            self._next += 1
            if self._due is not None and self._due[number] > tick:
                tick = self._due[number]
            self.arrival[number] = tick
            self._agenda.post((tick, ARRIVAL, number, 0))


def media_items(media: RequestMedia, number: int) -> tuple[MediaItem, ...]:
    """Return the items of a request as engines see them; `number` counts the requests of `media`."""
    return tuple(
        MediaItem(start, tokens, shape.vectors, name, (shape.sequences, shape.patches), kind, runs)
        for start, name, shape, kind, tokens, runs in media.of(number)
    )


def _compact(values: NDArray[np.int64] | NDArray[np.float64]) -> array[int]:
    return array("q", values.astype(np.int64).tobytes())
