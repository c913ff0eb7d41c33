"""Moment when an engine learns the result of a step: before it schedules the next one, or one step later.

A step that is scheduled while the one before it runs cannot know which requests end in that one. A request that ends
keeps seat and blocks for one step more; with drafts it may even be in that step, and its tokens there are discarded. If
blocks run short meanwhile, it is preempted like any other, though it will never run again.

The content that others can find in the prefix cache depends on it too: tokens are named when the engine knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from simtune.engine.batch import Batch
from simtune.engine.request import Request

FreeRequest = Callable[[Request, int], None]
"""Frees the blocks of a request that has left, given the number of its tokens that others can find."""


class Settling(Protocol):
    """Requests whose answer is complete, between their last step and the moment when the engine knows it."""

    ended: list[Request]
    """Requests that have seats and blocks, and are in no batch. Requests in the next step are not among them:
    `Batch.discarded`."""
    num_preempted: int
    """Requests that were preempted after they ended: for the engine they wait."""
    pending: bool
    """True if any request has ended since the engine settled."""

    @property
    def num_ended(self) -> int:
        """Requests whose seats come free with the running step or the next, though they do not finish in it."""

    def has_ended(self, request: Request) -> bool:
        """True if a resident is complete and the engine does not know it."""

    def finish(self, requests: Sequence[Request]) -> None:
        """Record that requests which have left the batch are complete."""

    def settle(self, discarded: Sequence[Request] = ()) -> None:
        """Let the engine learn the result of the step before the latest, which was `discarded` for these requests."""

    def preempt(self, victim: Request, scheduled: bool) -> None:
        """Free the blocks of a request that has ended; `scheduled` if it has tokens in the coming step."""

    def named_tokens(self, victim: Request, scheduled: bool) -> int:
        """Return the tokens of a request that has just left which the engine had named: others find their blocks."""

    def rested(self, requests: Sequence[Request], past: Sequence[int]) -> Sequence[int]:
        """Return the tokens with which requests that had no part in the latest step rejoin the batch, for
        `Batch.past_of`; `past` are those computed before the last step that each was in."""

    def abandon(self) -> list[Request]:
        """Forget all requests that have ended, and return them."""


class Synchronous:
    """Synchronous scheduling: the engine knows the result of a step before it schedules the next."""

    def __init__(self, batch: Batch, free_request: FreeRequest) -> None:
        self.ended: list[Request] = []
        self.num_preempted = self.num_ended = 0
        self.pending = False
        self._batch = batch
        self._free_request = free_request

    def has_ended(self, request: Request) -> bool:
        """Return False: the engine knows every end."""
        return False

    def finish(self, requests: Sequence[Request]) -> None:
        """Free the blocks at once."""
        for request in requests:
            past = self._batch.past_of(request)
            # The engine names tokens as it schedules them, and never schedules the last one.
            self._free_request(request, past + 1 if past >= 0 else request.computed)

    def settle(self, discarded: Sequence[Request] = ()) -> None:
        """Do nothing: all results are known."""

    def preempt(self, victim: Request, scheduled: bool) -> None:
        """Raise AssertionError: no request has ended unknown to the engine."""
        raise AssertionError("no request has ended")

    def named_tokens(self, victim: Request, scheduled: bool) -> int:
        """Return the tokens known when it was scheduled last: drafts are named in the step after their verification."""
        past = self._batch.past_of(victim)
        if past < 0:
            return victim.computed + scheduled
        return (max(past, victim.computed) if scheduled else past) + 1

    def rested(self, requests: Sequence[Request], past: Sequence[int]) -> Sequence[int]:
        """Return `past`: tokens are named when a request is scheduled."""
        return past

    def abandon(self) -> list[Request]:
        """Return none: no request has ended unknown to the engine."""
        return []


class NamedWhenVerified(Synchronous):
    """Synchronous scheduling of an engine that names accepted tokens as soon as it knows them."""

    def finish(self, requests: Sequence[Request]) -> None:
        """Free the blocks at once: all tokens but the last one of the answer are named."""
        for request in requests:
            answered = request.prompt_tokens + request.emitted - 1
            self._free_request(request, min(answered, request.computed))

    def named_tokens(self, victim: Request, scheduled: bool) -> int:
        """Return the tokens that are computed, and the certain one if it is scheduled."""
        return victim.computed + scheduled


class OneStepLate:
    """Asynchronous scheduling: the engine schedules a step before it knows the result of the one before."""

    def __init__(self, batch: Batch, free_request: FreeRequest, hashes_next: bool = False) -> None:
        self.ended: list[Request] = []
        self.num_preempted = 0
        self.pending = False
        self._batch = batch
        self._free_request = free_request
        self._unhashed = int(hashes_next)  # known tokens at the end of a text that no hash can cover
        self._rested: dict[Request, int] = {}  # steps of the batch after that in which each had no part

    @property
    def num_ended(self) -> int:
        """Requests in no batch, and those that are discarded in the next step."""
        return len(self.ended) + len(self._batch.discarded)

    def has_ended(self, request: Request) -> bool:
        """True if the request finished in the latest step, or is discarded in the next."""
        return request in self.ended or request in self._batch.discarded

    def finish(self, requests: Sequence[Request]) -> None:
        """Keep seats and blocks of these requests until the engine settles."""
        self.ended += requests
        self.pending = True

    def settle(self, discarded: Sequence[Request] = ()) -> None:
        """Free all requests that have ended. By now the whole answer is named."""
        if discarded:
            # Blocks are freed in order of admission, which decides what is evicted first.
            self.ended = sorted([*self.ended, *discarded], key=attrgetter("admission"))
        for request in self.ended:
            answered = request.prompt_tokens + request.emitted - 1
            self._free_request(request, answered if answered < request.computed else request.computed)
        self.ended.clear()
        self.num_preempted = 0
        self.pending = False

    def preempt(self, victim: Request, scheduled: bool) -> None:
        """Free the victim now; the engine counts it among the waiting requests until it settles."""
        if victim in self.ended:
            self.ended.remove(victim)
        else:
            self._batch.leave(victim)
        self._free_request(victim, self.named_tokens(victim, scheduled))
        self.num_preempted += 1

    def named_tokens(self, victim: Request, scheduled: bool) -> int:
        """Return the named tokens: the latest step's result is unknown, but scheduling it named the token before."""
        past = self._batch.past_of(victim)
        if past < 0:
            return victim.computed - self._unhashed
        # Scheduling the latest step named one more if the engine knew all of the request by then.
        names_newest = scheduled or self._rested.get(victim) == self._batch.steps - 1
        return past + (names_newest and not self._unhashed)

    def rested(self, requests: Sequence[Request], past: Sequence[int]) -> Sequence[int]:
        """Return all computed tokens: the engine knows them by now."""
        self._rested = dict.fromkeys(requests, self._batch.steps)
        return [request.computed for request in requests]

    def abandon(self) -> list[Request]:
        """Forget requests in no batch and those discarded in the next step, which they leave; return them all."""
        for request in list(self._batch.discarded):
            self._batch.leave(request)
            self.ended.append(request)
        ended, self.ended = self.ended, []
        self.num_preempted, self.pending = 0, False
        return ended
