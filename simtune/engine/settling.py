"""When an engine learns what came of a step: before it schedules the next one, or one step later.

A step that is scheduled while the one before it runs cannot know who ends in that. Whoever does keeps seat and blocks
for one step more; with drafts it may even be in that step, and what it computes there is discarded. If blocks run short
meanwhile, it is preempted like any other, though it will never run again.

What others can find in the prefix cache depends on it too: tokens are named when the engine knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from simtune.engine.batch import Batch
from simtune.engine.request import Request

FreeRequest = Callable[[Request, int], None]
"""Gives back the blocks of a request that has left, of which so many tokens can be found again."""


class Settling(Protocol):
    """Requests whose answer is complete, between their last step and the moment when the engine knows it."""

    ended: list[Request]
    """They hold seats and blocks, and are in no batch. Those that are in the next step all the same are not among them:
    `Batch.discarded`."""
    num_preempted: int
    """Requests that were preempted after they ended: for the engine they wait."""
    pending: bool
    """Whether anybody has ended since the engine settled."""

    @property
    def num_ended(self) -> int:
        """Requests whose seats come free with the step under way or the next, though they do not finish in it."""

    def has_ended(self, request: Request) -> bool:
        """Whether a resident is complete and the engine does not know it."""

    def finish(self, requests: Sequence[Request]) -> None:
        """Requests that have left the batch are complete."""

    def settle(self, discarded: Sequence[Request] = ()) -> None:
        """The engine learns what came of the step before the latest; for these the latest was discarded."""

    def preempt(self, victim: Request, scheduled: bool) -> None:
        """One that has ended loses its blocks; `scheduled` if it has tokens in the coming step."""

    def named_tokens(self, victim: Request, scheduled: bool) -> int:
        """Tokens of a request that has just left which the engine had named: others find the blocks they fill."""

    def abandon(self) -> list[Request]:
        """Forget all who have ended; returns them."""


class Synchronous:
    """The engine knows what came of a step before it schedules the next: nobody has ended without its knowing."""

    def __init__(self, batch: Batch, free_request: FreeRequest) -> None:
        self.ended: list[Request] = []
        self.num_preempted = self.num_ended = 0
        self.pending = False
        self._batch = batch
        self._free_request = free_request

    def has_ended(self, request: Request) -> bool:
        """Nobody."""
        return False

    def finish(self, requests: Sequence[Request]) -> None:
        """Their blocks are given back at once."""
        for request in requests:
            past = self._batch.past_of(request)
            self._free_request(request, past + 1 if past >= 0 else request.computed)

    def settle(self, discarded: Sequence[Request] = ()) -> None:
        """Nothing is left to learn."""

    def preempt(self, victim: Request, scheduled: bool) -> None:
        """Never asked for."""
        raise AssertionError("nobody has ended")

    def named_tokens(self, victim: Request, scheduled: bool) -> int:
        """Those known when it was scheduled last: drafts are not named before the step after their verification."""
        past = self._batch.past_of(victim)
        if past < 0:
            return victim.computed + scheduled
        return (max(past, victim.computed) if scheduled else past) + 1

    def abandon(self) -> list[Request]:
        """Nobody."""
        return []


class OneStepLate:
    """Asynchronous scheduling: the engine schedules a step before it knows what came of the one before."""

    def __init__(self, batch: Batch, free_request: FreeRequest) -> None:
        self.ended: list[Request] = []
        self.num_preempted = 0
        self.pending = False
        self._batch = batch
        self._free_request = free_request

    @property
    def num_ended(self) -> int:
        """Those in no batch, and those in the next step all the same."""
        return len(self.ended) + len(self._batch.discarded)

    def has_ended(self, request: Request) -> bool:
        """Whether it finished in the latest step, or is discarded in the next."""
        return request in self.ended or request in self._batch.discarded

    def finish(self, requests: Sequence[Request]) -> None:
        """They keep seats and blocks until the engine settles."""
        self.ended += requests
        self.pending = True

    def settle(self, discarded: Sequence[Request] = ()) -> None:
        """Free all who have ended. By now the whole answer is named."""
        if discarded:
            self.ended = sorted([*self.ended, *discarded], key=attrgetter("admission"))
        for request in self.ended:
            answered = request.prompt_tokens + request.emitted - 1
            self._free_request(request, answered if answered < request.computed else request.computed)
        self.ended.clear()
        self.num_preempted = 0
        self.pending = False

    def preempt(self, victim: Request, scheduled: bool) -> None:
        """Free it now; the engine counts it among those that wait until it settles."""
        if victim in self.ended:
            self.ended.remove(victim)
        else:
            self._batch.leave(victim)
        self._free_request(victim, self.named_tokens(victim, scheduled))
        self.num_preempted += 1

    def named_tokens(self, victim: Request, scheduled: bool) -> int:
        """What came of its latest step is not known, but that it is scheduled names the token before."""
        past = self._batch.past_of(victim)
        return victim.computed if past < 0 else past + scheduled

    def abandon(self) -> list[Request]:
        """Those in no batch, and those that would have been in the next step, who leave it."""
        for request in list(self._batch.discarded):
            self._batch.leave(request)
            self.ended.append(request)
        ended, self.ended = self.ended, []
        self.num_preempted, self.pending = 0, False
        return ended
