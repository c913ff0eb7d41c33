"""Interface of batching policies to their driver, simulated or real: `Scheduler`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from simtune.engine.adapters import SlotHolder
from simtune.engine.batch import Tally
from simtune.engine.kv import KvBlocks
from simtune.engine.policy_traits import PolicyTraits
from simtune.engine.polls import Polls
from simtune.engine.prompt_balance import PromptBalance
from simtune.engine.request import Request
from simtune.engine.reservations import Reservations
from simtune.engine.step import Progress, Step
from simtune.engine.waiting import LateArrivals, WaitingQueue, drop


class Scheduler(PolicyTraits, SlotHolder, ABC):
    """A batching policy with its waiting queue, its resident requests and its KV blocks.

    A driver calls it in this order, repeatedly:

    1. Between steps, any of these, any number of times: `add` for a request that arrives; `expect`, and later
       `receive`, for one whose prompt is computed elsewhere; `release` for one whose blocks were held. `add` may
       also be called while a step runs.
    2. `schedule` returns the step to run next and takes its blocks, or returns None if nothing can run.
    3. `complete(n)`, when that step has run n times, returns who got a first token and who is finished.

    A request waits from `add` on, is admitted to a seat and to blocks by a step, computes its prompt in one chunk or
    several, and decodes until it is finished; a preempted one loses its blocks and waits again. One with `hold` keeps
    its blocks when it is finished, until `release`. `withdraw` takes back those that wait; `abandon` takes back
    all requests, at any time, and leaves the scheduler as new.

    A step states how often it may be `repeat`ed before the policy could decide otherwise: while no request finishes,
    none can be admitted and the KV blocks suffice, the next steps are this one with every context one token longer. A
    real executor runs it once and schedules again; the simulator takes all repetitions in one jump, but one at a time
    if policy `would_notice` an arrival meanwhile. There is one scheduler for both.

    A policy sees prompts, delivered tokens and free blocks, never `Request.output_tokens`. It implements the abstract
    methods; `ListScheduler` and `BatchScheduler` implement most of them. Features that a plan may ask for are stated on
    the class. The constructor takes every setting below by name, those of its features (`SETTINGS_OF`), and options.
    """

    tells_longest = True
    """True if steps state their longest context; a driver that does not read it may switch it off."""
    polls: Polls | None = None  # of an engine that looks for new requests every few steps only
    prompt_balance: PromptBalance | None = None  # with ranks that hold prompts back for one another

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunked_prefill: bool = True,
        watermark_blocks: int = 0,
    ) -> None:
        """Make an empty scheduler; `watermark_blocks` must stay free when a request joins others.

        Raises ValueError for settings with which an admitted request could wait forever.
        """
        self.kv = KvBlocks(num_blocks, block_size)
        self.check(self.kv, max_num_seqs, max_num_batched_tokens, max_model_len, chunked_prefill)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len = max_model_len
        self.longest_answer = max_model_len  # tokens that are reserved for an answer, if the policy reserves any
        self.chunked_prefill = chunked_prefill
        self.watermark_blocks = watermark_blocks
        self.async_scheduling = False
        """True if a step is scheduled before the engine knows the result of the one before."""
        self.drafting = False
        """True if requests that decode may compute more than one token in a step: their drafts."""
        self.waiting: WaitingQueue = deque()
        self._late = LateArrivals()
        self._reserved = Reservations()
        self._held: dict[Request, None] = {}
        self._under_way: Step | None = None

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, request: Request) -> bool:
        """Queue a request; False if it is refused, see `outgrows`."""
        if self.outgrows(request):
            return False
        self._queue(request)
        return True

    def _queue(self, request: Request) -> None:
        """Put a request into the waiting queue, at its place in the policy's order."""
        self.waiting.append(request)

    def add_late(self, request: Request, repetition: int) -> bool:
        """Queue a request that comes during this repetition (from 1) of the running step, or at the instant when a step
        ends; False if it is refused.

        An engine that schedules asynchronously dispatched the next step when the running one began: the request is seen
        by the step after that.
        """
        if not self.async_scheduling or self.outgrows(request):
            return self.add(request)
        self._late.append((repetition, request))
        return True

    def outgrows(self, request: Request) -> bool:
        """True if a request could become longer than max_model_len, or no step has room for its prompt."""
        # Where prompts are neither cut nor computed again, one step must hold the whole prompt.
        uncut = not (self.chunked_prefill or self.recomputes)
        most = min(self.max_model_len, request.prompt_tokens + self.longest_answer) if uncut else self.max_model_len
        beyond = request.prompt_tokens + request.output_tokens > most
        return beyond or (uncut and request.known_tokens > self.max_num_batched_tokens)

    def expect(self, request: Request) -> bool:
        """Reserve a seat, and blocks for all known tokens, for a request whose KV cache is computed elsewhere.

        Returns False, and changes nothing, if there is no room now. To be called between steps. The request cannot be
        preempted until it is received; `release` gives it up.
        """
        assert self._under_way is None, "a step is under way"
        blocks = self.kv.blocks_for(request.known_tokens)
        if self.num_running >= self.max_num_seqs or blocks > self.room:
            return False
        self.kv.take(blocks)
        self._reserved[request] = None
        return True

    def receive(self, request: Request) -> None:
        """Let an expected request, whose KV cache has come, decode from the next step on.

        The step computes its newest known token: for a request that has emitted nothing the last of its prompt, which
        samples the first token.
        """
        assert request in self._reserved, "it was not expected"
        self._reserved.received.append(request)

    def release(self, request: Request) -> None:
        """Free the blocks of a request that is finished and held, or that was expected and will not come."""
        if request in self._reserved:
            self._reserved.give_up(request, self.kv)
        else:
            del self._held[request]
            self.kv.release(request)

    def abort(self, request: Request) -> bool:
        """Remove a request that its client has given up, wherever it is; delivered tokens stay delivered. Returns
        False, and changes nothing, if it is not here. To be called between steps."""
        assert self._under_way is None, "a step is under way"
        if self._late.take_out(request):
            return True
        if request not in self.waiting:
            return self._expel(request)
        drop(self.waiting, request)
        return True

    def withdraw(self) -> list[Request]:
        """Take back all waiting requests, in order of the queue. The residents stay."""
        self._late.move_all(self._queue)
        requests = list(self.waiting)
        self.waiting.clear()
        for request in requests:
            # Swapped-out blocks are lost.
            request.computed = request.shared = 0
        return requests

    def abandon(self) -> list[Request]:
        """Reset the scheduler, since the instance is lost, perhaps in the middle of a step.

        Returns every request whose KV cache is lost or was still to come, in this order: those that decode and those
        in prefill, in order of admission; expected ones; finished ones that were held; waiting ones. None of their
        tokens is computed, and tokens emitted in completed steps were delivered.
        """
        self._late.move_all(self._queue)
        lost = [*self._lose_residents(), *self._reserved, *self._held, *self.waiting]
        for part in (self.kv, self.adapters, self._reserved, self._held, self.waiting):
            if part is not None:
                part.clear()
        self._under_way = None
        for request in lost:
            request.lose_cache()
        return lost

    # --- what is here -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that have a seat: residents, and those that are expected."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat, including those that the engine does not see yet."""
        return len(self.waiting) + len(self._late)

    @property
    def unsettled(self) -> bool:
        """True if seats or blocks will come free with the running step, though no request finishes in it."""
        return False

    @property
    def tally(self) -> Tally:
        """Totals of verifications of drafts so far."""
        return Tally()

    @property
    def has_work(self) -> bool:
        """True if any request waits or has a seat."""
        return bool(self.waiting or self._late) or self.num_running > 0

    @property
    def room(self) -> int:
        """Blocks that a newcomer may take."""
        return self.kv.free - (self.watermark_blocks if self.num_running else 0)

    # --- steps ------------------------------------------------------------------------------------------------

    @abstractmethod
    def schedule(self) -> Step | None:
        """Return the next step, its blocks taken; None if nothing can run: no request is here, or all of them wait for
        others to `release` blocks or to be received. `complete` must follow."""

    @abstractmethod
    def complete(self, repetitions: int = 1) -> Progress:
        """End the step returned last, which has run `repetitions` times, at most its `repeat`."""

    @abstractmethod
    def would_notice(self) -> bool:
        """True if one more waiting request could change the schedule before the present step's repetitions are over."""

    def emitted(self, request: Request) -> int:
        """Output tokens that a request in the scheduler has delivered so far."""
        return request.emitted

    @abstractmethod
    def composition(self) -> dict[Request, int]:
        """Return the tokens of each request in the step returned last, in the engine's order. Costs O(residents)."""

    def _begin(self) -> None:
        """Let requests that were received join the batch; `schedule` calls this first."""
        assert self._under_way is None, "the step given last was not completed"
        for request in self._reserved.joining(self.kv):
            self._enter(request)

    @abstractmethod
    def _enter(self, request: Request) -> None:
        """Make a request a resident whose prompt was computed elsewhere and which has its blocks."""

    @abstractmethod
    def _expel(self, request: Request) -> bool:
        """Remove a resident and free its blocks; False if it is not a resident."""

    @abstractmethod
    def _lose_residents(self) -> list[Request]:
        """Remove all residents and return them, in order of admission; the caller clears their blocks."""

    def _finish(self, request: Request, finished: list[Request]) -> None:
        """Record a request that is complete and no longer a resident; its blocks are freed, unless it is held."""
        finished.append(request)
        self._free_request(request)

    def _free_request(self, request: Request, named_tokens: int | None = None) -> None:
        """Free the blocks of a request that is complete, unless it is held; see `KvBlocks.release`."""
        if request.hold:
            self._held[request] = None
        else:
            self.kv.release(request, named_tokens)
