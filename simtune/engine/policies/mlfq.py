"""Skip-join multi-level feedback queue (FastServe, arXiv 2305.05920)."""

from __future__ import annotations

from bisect import insort_right
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Unpack

from simtune.engine.kv import NO_HIT
from simtune.engine.policies.listed import ListScheduler, ScheduledTokens, missing_blocks
from simtune.engine.policy_traits import Settings
from simtune.engine.request import Request
from simtune.engine.step import Progress


@dataclass(slots=True)
class _Place:
    """Place of a request in the queues."""

    level: int
    turn: int
    """Position in the queue of the level."""
    left: int
    """Iterations until the request is demoted."""
    served: int
    """Number of the iteration that served it last, or of its arrival."""


class SkipJoinMlfq(ListScheduler):
    """Multi-level queue: each iteration serves the requests of the highest levels that find seats; the others pause.

    Level i has a quantum of 2**i iterations, the last one has no end. A request joins at the first level whose quantum
    covers its prompt, skipping those above, and is demoted when its quantum is used up and its prompt is done. A
    request that was not served for PATIENCE iterations is promoted to the top. Since there is no clock here, time is
    counted in iterations, and PROMPT_TOKENS_PER_ITERATION prompt tokens count as one.

    A paused request keeps its KV blocks until a more urgent one needs them; then the least urgent loses all of its own
    and is computed again, or, as in FastServe, swapped in.
    """

    offers = frozenset({"prefix_caching", "speculation", "swap", "watermark"})

    LEVELS = 8
    PATIENCE = 1024
    PROMPT_TOKENS_PER_ITERATION = 512

    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(**settings)
        self._iteration = 0
        self._turns = 0
        self._places: dict[Request, _Place] = {}  # in order of latest service
        self._arrived: list[_Place] = []  # since the latest choice: the iteration is unknown during a jump

    def key(self, request: Request) -> tuple[int, int]:
        """Return the level of a request, and its turn there."""
        place = self._places[request]
        return place.level, place.turn

    def add(self, request: Request) -> bool:
        """Queue a request at the level that its prompt requires."""
        self._join(request, self._iterations_of(request.known_tokens))
        if super().add(request):
            self._arrived.append(self._places[request])
            return True
        del self._places[request]
        return False

    def would_notice(self) -> bool:
        """True: a newcomer may be more urgent than any resident."""
        return True

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return the most urgent requests, whether they wait or pause, as many as there are seats."""
        for place in self._arrived:
            place.served = self._iteration
        self._arrived.clear()
        self._promote()
        residents, waiting, key = self.residents, self.waiting, self.key
        by_urgency = sorted(residents, key=key)
        seats = self.max_num_seqs - len(self._reserved)
        budget, admitting = self.max_num_batched_tokens, True
        scheduled: ScheduledTokens = {}
        # copies: `_claim` removes victims from `by_urgency`, and preemption puts them into `waiting`
        for request in merge(by_urgency[:], list(islice(waiting, seats)), key=key):
            if not budget or len(scheduled) == seats:
                break
            new = request not in residents
            if request in preempted or (new and not admitting):
                continue
            tokens = self.width(request) if request.decoding else self._to_compute(request)
            fits = self.chunked_prefill or tokens <= budget
            if not (fits and self._claim(request, tokens, by_urgency, preempted)):
                admitting &= not new
                continue
            if new:
                waiting.remove(request)
            scheduled[request] = min(tokens, budget)
            budget -= scheduled[request]
        return scheduled

    def _claim(self, request: Request, tokens: int, by_urgency: list[Request], preempted: list[Request]) -> bool:
        """Take blocks for `tokens` more, preempting less urgent residents; False if that is not enough."""
        key, kv = self.key, self.kv
        if request.computed + tokens <= request.reserved_tokens:
            return True
        missing_blocks = self._missing(request, tokens)
        if missing_blocks > kv.free:
            less_urgent = [resident for resident in by_urgency if key(resident) > key(request)]
            if missing_blocks > kv.free + sum(map(kv.held_by, less_urgent)):
                return False
        # Preemption leaves blocks of the request's own text without a holder, and blocks that others hold.
        while self._missing(request, tokens) > kv.free:
            if not (by_urgency and key(by_urgency[-1]) > key(request)):
                return False
            victim = by_urgency.pop()
            self.preempt(victim)
            preempted.append(victim)
        if request in self.residents:
            return self.allocate(request, request.computed + tokens)
        self.seat(request, request.known_tokens, self.lookup(request))
        return True

    def _to_compute(self, request: Request) -> int:
        """Return the tokens of a prompt that are neither computed nor cached."""
        hit = NO_HIT if request in self.residents else self.lookup(request)
        return request.known_tokens - request.computed - hit.blocks * self.kv.block_size - hit.copied_tokens

    def _missing(self, request: Request, tokens: int) -> int:
        """Return the blocks that a request needs for `tokens` tokens; a newcomer, beside those kept free."""
        kv = self.kv
        if request in self.residents:
            return missing_blocks(self.kv, [request], tokens)
        hit = self.lookup(request)
        return kv.blocks_for(request.known_tokens) - hit.blocks + hit.idle + kv.free - self.room

    def steady_steps(self, decoding: list[Request]) -> int:
        """Limit the steps to the next demotion or promotion."""
        places, last = self._places, self.LEVELS - 1
        steps = min((places[r].left for r in decoding if places[r].level < last), default=self.max_model_len)
        paused = next((request for request in places if request not in self._scheduled), None)
        if paused is not None:
            steps = min(steps, places[paused].served + self.PATIENCE - self._iteration)
        return steps

    def complete(self, repetitions: int = 1) -> Progress:
        """Count the iterations of the step against the quanta of its requests, and demote those that have used
        theirs."""
        scheduled = self._scheduled
        progress = super().complete(repetitions)
        self._iteration += repetitions
        for request, tokens in scheduled.items():
            place = self._places.pop(request)
            if request not in self.residents:
                continue
            self._places[request] = place
            place.served = self._iteration
            place.left -= repetitions * self._iterations_of(tokens)
            if request.decoding and place.left <= 0 and place.level < self.LEVELS - 1:
                while place.left <= 0 and place.level < self.LEVELS - 1:
                    place.level += 1
                    place.left += 2**place.level
                place.turn = self._next_turn()
        return progress

    def withdraw(self) -> list[Request]:
        """Take back all waiting requests, and their places in the queues."""
        requests = super().withdraw()
        for request in requests:
            del self._places[request]
        return requests

    def abort(self, request: Request) -> bool:
        """See `Scheduler.abort`: a request that has left has no place any more."""
        gone = super().abort(request)
        if gone:
            del self._places[request]
        return gone

    def abandon(self) -> list[Request]:
        """Clear all places, since the instance is lost."""
        self._places.clear()
        return super().abandon()

    def _enter(self, request: Request) -> None:
        self._join(request, 1)
        super()._enter(request)

    def _join(self, request: Request, iterations: int) -> None:
        """Place a request at the first level whose quantum is at least `iterations`."""
        level = min((iterations - 1).bit_length(), self.LEVELS - 1)
        self._places[request] = _Place(level, self._next_turn(), 2**level, self._iteration)

    def _promote(self) -> None:
        while self._places:
            request, place = next(iter(self._places.items()))
            if self._iteration - place.served < self.PATIENCE:
                break
            waits = request not in self.residents
            if waits:
                self.waiting.remove(request)
            del self._places[request]
            self._join(request, 1)
            if waits:
                insort_right(self.waiting, request, key=self.key)

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns

    def _iterations_of(self, tokens: int) -> int:
        return -(-tokens // self.PROMPT_TOKENS_PER_ITERATION)
