"""Base of policies that keep their residents in a plain list.

A resident has a seat and KV blocks, from its admission until it is finished or preempted. A policy is one method,
`choose`: it returns the tokens of each request in the next step, with the blocks for them taken. The consequences of
the choice are the same for all and implemented once here: the step, its repetitions, tokens delivered, blocks freed. A
step costs O(residents).

With drafts, if a policy offers them, a request that decodes verifies several tokens in a step (`width`) and keeps some;
such steps are not repeated, because their contexts grow unevenly.

With prefix caching, if a policy offers it, a newcomer holds the cached beginning of its text, which counts as computed
(`lookup`, `seat`); others find what it has computed when the step is over (`remember`).

With swap, if a policy offers it, a preempted request keeps its keys and values in host memory. It comes back as a
prompt of which all but the rest is computed: for one that was decoding, a chunk of one token.

With asynchronous scheduling, if a policy offers it, the step after the running one is dispatched before a newcomer
is seen. That the end of an answer is also known one step late is not modelled.

`StallFree` is the form of most policies: all requests that decode run in each step, and prompts share the rest.

Policies override `choose`, `key`, `steady_steps`, with prefix caching `new_cache` and `remember`, and of `StallFree`
also `decode_all`, `serve_prompts`, `admit` and `reservation`; they call `allocate`, `decode_each`, `lookup`,
`seat`, `preempt` and `room`.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right, insort_left, insort_right
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Literal, Unpack

from simtune.engine.batch import Tally
from simtune.engine.drafting.round_by_round import RoundByRound
from simtune.engine.drafting.terms import DraftingTerms
from simtune.engine.kv import NO_HIT, Hit, KvBlocks
from simtune.engine.policy_traits import Settings
from simtune.engine.prefix import PrefixCache
from simtune.engine.request import Request
from simtune.engine.scheduler import Scheduler
from simtune.engine.step import Chunk, Progress, Step

ScheduledTokens = dict[Request, int]
"""Tokens of each request in a step, in the order in which they were given."""


def missing_blocks(kv: KvBlocks, requests: Iterable[Request], tokens: int) -> int:
    """Return the blocks that residents need, beyond those they have, for `tokens` tokens more each."""
    size, blocks = kv.block_size, 0
    for request in requests:
        more = request.computed + tokens - request.reserved_tokens
        if more > 0:
            blocks += -(-more // size)
    return blocks


def take_blocks(kv: KvBlocks, requests: Iterable[Request], tokens: int) -> None:
    """Take blocks for `tokens` tokens more of each of these residents; they must be free."""
    size, blocks = kv.block_size, 0
    for request in requests:
        more = request.computed + tokens - request.reserved_tokens
        if more > 0:
            new_blocks = -(-more // size)
            request.reserved_tokens += new_blocks * size
            blocks += new_blocks
    if blocks:
        kv.take(blocks)


class ListScheduler(Scheduler):
    """Keeps residents in order of admission; `computed` and `emitted` are current, `reserved_tokens` whole blocks."""

    waiting: deque[Request]

    def __init__(
        self,
        *,
        async_scheduling: bool = False,
        prefix_caching: bool = False,
        hash_block_tokens: int | None = None,
        speculation: DraftingTerms | None = None,
        preemption: Literal["recompute", "swap"] = "recompute",
        **settings: Unpack[Settings],
    ) -> None:
        """`hash_block_tokens` is the size of the blocks that requests name for prefix caching: block_size unless given.

        Raises ValueError for drafts whose number differs between rounds, and for swap beside prefix caching.
        """
        super().__init__(**settings)
        self._swaps = preemption == "swap"
        if self._swaps and prefix_caching:
            raise ValueError("swap and prefix_caching are mutually exclusive")
        self._moved_out = self._moved_in = 0  # KV blocks to and from host memory, before the coming step
        if prefix_caching:
            self.kv = self.new_cache(hash_block_tokens or self.kv.block_size)
        self.async_scheduling = async_scheduling
        self.drafts = None if speculation is None else RoundByRound(speculation, self.max_model_len)
        """Drafts of the residents; None without drafts."""
        self.drafting = self.drafts is not None
        self.residents: dict[Request, None] = {}
        self._scheduled: ScheduledTokens = {}
        self._preempted: list[Request] = []  # since the latest step

    def new_cache(self, hash_block_tokens: int) -> KvBlocks:
        """Return an empty prefix cache, as the policy's engine has it."""
        return PrefixCache(self.kv.total, self.kv.block_size, hash_block_tokens)

    @abstractmethod
    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return the tokens to run next, the blocks for them taken; add requests that lost their blocks to `preempted`.

        Empty only if blocks are short that no resident holds.
        """

    def width(self, request: Request) -> int:
        """Return the tokens that the next step computes for a request that decodes: one, and its drafts."""
        return 1 if self.drafts is None else self.drafts.width(request)

    @property
    def tally(self) -> Tally:
        """Totals of verifications of drafts so far."""
        return super().tally if self.drafts is None else self.drafts.tally

    def key(self, request: Request) -> Any:
        """Sort key: the smallest waits first, equals by arrival; the largest, of equals the newest, is preempted."""
        return 0

    @property
    def num_running(self) -> int:
        """Requests that have a seat: residents, and those that are expected."""
        return len(self.residents) + len(self._reserved)

    def composition(self) -> ScheduledTokens:
        """Return the tokens of each request in the step returned last, in the order in which they were given."""
        assert self._under_way is not None, "no step is under way"
        return dict(self._scheduled)

    def _queue(self, request: Request) -> None:
        insort_right(self.waiting, request, key=self.key)

    def would_notice(self) -> bool:
        """True while a seat is free: a newcomer may be put before those that wait, and fit where they do not."""
        return self.num_running < self.max_num_seqs

    def schedule(self) -> Step | None:
        """Return the step that `choose` makes, repeated as long as `choose` would return the same."""
        self._begin()
        if not (self.residents or self.waiting):
            # No step was dispatched before they came.
            self._late.move_all(self._queue)
        if not (self.residents or self.waiting):
            return None
        before = set(self.residents)
        self._scheduled = scheduled = self.choose(self._preempted)
        if not scheduled:
            return None
        step = self._under_way = self._step(self._preempted)
        step.admitted = [request for request in scheduled if request not in before]
        self._preempted = []
        return step

    def _step(self, preempted: list[Request]) -> Step:
        scheduled = self._scheduled
        decoding = [request for request in scheduled if request.decoding]
        contexts = [request.computed for request in decoding]
        tokens = len(decoding) if self.drafts is None else sum([scheduled[request] for request in decoding])
        chunks = []
        if len(decoding) < len(scheduled):
            chunks = [Chunk(r, r.computed, tokens) for r, tokens in scheduled.items() if not r.decoding]
        step = Step(len(decoding), sum(contexts) + tokens, chunks, preempted)
        step.paused = self._paused(decoding)
        step.longest_context = max(contexts, default=-1) + 1
        if self._swaps:
            step.swapped_out_blocks, step.swapped_in_blocks = self._moved_out, self._moved_in
            self._moved_out = self._moved_in = 0
        if self.drafts is not None:
            step.draft_tokens, step.draft_depth = tokens - len(decoding), self.drafts.depth
        # Late newcomers are admitted after this step.
        elif not chunks and not preempted and not self._late:
            step.repeat = self._repetitions(decoding)
        return step

    def _repetitions(self, decoding: list[Request]) -> int:
        """Return the number of times that a step of these decodes is made before another follows."""
        to_come = [request.output_tokens - request.emitted for request in decoding]
        limit = min([self.steady_steps(decoding), *to_come])
        return self._steps_that_fit(decoding, limit) if limit > 1 else 1

    def _paused(self, decoding: list[Request]) -> list[Request]:
        """Return the residents that decode, but not with these."""
        all_run = not decoding or len(self._scheduled) == len(self.residents)
        return [] if all_run else [r for r in self.residents if r.decoding and r not in self._scheduled]

    def steady_steps(self, decoding: list[Request]) -> int:
        """Number of decode-only steps for which the choice stays, if no request finishes and blocks suffice."""
        return self.max_model_len if len(decoding) == len(self.residents) else 1

    @staticmethod
    def remaining(request: Request) -> int:
        """Output tokens still to come: how an engine notices the end. Read after the fact, never to decide."""
        return request.output_tokens - request.emitted

    def _steps_that_fit(self, decoding: list[Request], limit: int) -> int:
        """Return the largest number of steps, at most `limit`, for which free blocks suffice; the first has blocks."""
        return self._steps_within(self.kv.free, decoding, limit)

    def _steps_within(self, blocks: int, decoding: list[Request], limit: int) -> int:
        """Return the largest number of steps, at least 1 and at most `limit`, that need at most `blocks` blocks."""
        if missing_blocks(self.kv, decoding, limit) <= blocks:
            return limit
        return max(1, bisect_right(range(1, limit), blocks, key=lambda steps: missing_blocks(self.kv, decoding, steps)))

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver tokens: the first one when a prompt is complete, one a repetition to requests that decode."""
        step, self._under_way = self._under_way, None
        assert step is not None
        assert 1 <= repetitions <= step.repeat
        first_token: list[Request] = []
        finished: list[Request] = []
        if repetitions > 1 and self.kv.caches:
            # All blocks are taken before the end of a request frees some: which cached ones are evicted depends on it.
            take_blocks(self.kv, self._scheduled, repetitions)
        for request, tokens in self._scheduled.items():
            if request.decoding:
                gained = repetitions if self.drafts is None else self.drafts.kept(request, tokens)
                request.computed = computed = request.computed + gained
                if computed > request.reserved_tokens:
                    self.allocate(request, computed)
                request.emitted = emitted = request.emitted + gained
                if emitted >= request.output_tokens:
                    request.emitted = request.output_tokens
                    self._leave(request)
                    self._finish(request, finished)
                continue
            request.computed += tokens * repetitions
            if self.kv.caches:
                self.remember(request)
            if request.computed == request.known_tokens:
                request.decoding = True
                request.emitted += 1
                if request.emitted == 1:
                    first_token.append(request)
            else:
                continue
            if not self.remaining(request):
                self._leave(request)
                self._finish(request, finished)
        if self._late:
            self._late.move(self._queue, repetitions)
        return Progress(first_token, finished)

    def decode_each(self, decoding: list[Request]) -> ScheduledTokens:
        """Return one token of each of these requests, for which it takes blocks; they must be free."""
        take_blocks(self.kv, decoding, 1)
        return dict.fromkeys(decoding, 1)

    def allocate(self, request: Request, tokens: int) -> bool:
        """Ensure that a request has blocks for `tokens` tokens; False, and nothing taken, if they are not free."""
        if tokens <= request.reserved_tokens:
            return True
        blocks = -(-(tokens - request.reserved_tokens) // self.kv.block_size)
        if blocks > self.kv.free:
            return False
        self.kv.take(blocks)
        request.reserved_tokens += blocks * self.kv.block_size
        return True

    def lookup(self, request: Request) -> Hit:
        """Return the cached beginning of a waiting request, to be passed to `seat`."""
        return self.kv.find(request) if self.kv.caches else NO_HIT

    def seat(self, request: Request, tokens: int, hit: Hit) -> None:
        """Give a newcomer a seat, the blocks that were found, and others for `tokens` tokens together."""
        if self.kv.caches:
            self.kv.hold(request, hit)
            request.reserved_tokens = hit.blocks * self.kv.block_size
        elif request.computed:
            self._moved_in += self.kv.blocks_for(request.computed)
        self.allocate(request, tokens)
        self.residents[request] = None

    def remember(self, request: Request) -> None:
        """Let others find the tokens of a prompt that a step has computed."""
        self.kv.name(request, request.computed)

    def _leave(self, request: Request) -> None:
        del self.residents[request]
        request.decoding = False

    def preempt(self, victim: Request) -> None:
        """Take all blocks from a resident; it waits, before its equals, to be computed again or swapped in."""
        self._leave(victim)
        self.kv.release(victim, returns=True)
        victim.computed = victim.computed if self._swaps else 0
        self._moved_out += self.kv.blocks_for(victim.computed)
        victim.preemptions += 1
        insort_left(self.waiting, victim, key=self.key)

    def _enter(self, request: Request) -> None:
        self.residents[request] = None
        request.decoding = True
        request.reserved_tokens = self.kv.blocks_for(request.computed) * self.kv.block_size

    def _expel(self, request: Request) -> bool:
        if request not in self.residents:
            return False
        self._leave(request)
        self.kv.release(request)
        return True

    def _lose_residents(self) -> list[Request]:
        lost = sorted(self.residents, key=attrgetter("decoding"), reverse=True)
        for request in lost:
            self._leave(request)
        self._scheduled, self._preempted = {}, []
        self._moved_out = self._moved_in = 0
        return lost


class StallFree(ListScheduler):
    """All requests that decode run in each step; prompts share the rest of the token budget, in the order of `key`.

    A prompt is admitted when a seat and the blocks for all of its known tokens are free, and takes them at once, so
    that a prompt in prefill never lacks memory. When a decode finds no block, the resident that comes last by `key`
    loses all of its blocks, to be computed again or swapped in; such a step admits no request. Drafts come before
    prompts; if the budget is short, the last requests to be admitted verify fewer.
    """

    offers = frozenset({"prefix_caching", "speculation", "swap", "watermark"})

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return decodes first, then prompts; no newcomers if a request was preempted."""
        scheduled = self.decode_all(preempted)
        tokens = len(scheduled) if self.drafts is None else sum(scheduled.values())
        self.serve_prompts(scheduled, self.max_num_batched_tokens - tokens, not preempted)
        return scheduled

    def decode_all(self, preempted: list[Request]) -> ScheduledTokens:
        """Return the tokens of each request that decodes, preempting until all of them have their blocks."""
        if self.drafts is not None:
            return self._draft_all(preempted)
        while missing_blocks(self.kv, decoding := [r for r in self.residents if r.decoding], 1) > self.kv.free:
            self._preempt_last(preempted)
        return self.decode_each(decoding)

    def _preempt_last(self, preempted: list[Request]) -> None:
        # reversed: of equal keys `max` returns the first, here the newest
        victim = max(reversed(self.residents), key=self.key)
        self.preempt(victim)
        preempted.append(victim)

    def _draft_all(self, preempted: list[Request]) -> ScheduledTokens:
        """Do the same if requests verify drafts."""
        while self._missing(widths := self._widths()) > self.kv.free:
            self._preempt_last(preempted)
        for request, width in widths.items():
            self.allocate(request, request.computed + width)
        return widths

    def _widths(self) -> ScheduledTokens:
        """Return the tokens that the budget allows each request that decodes, its drafts included."""
        widths = dict.fromkeys([request for request in self.residents if request.decoding], 1)
        spare = self.max_num_batched_tokens - len(widths)
        for request in widths:
            drafts = min(self.width(request) - 1, spare)
            widths[request] += drafts
            spare -= drafts
        return widths

    def _missing(self, widths: ScheduledTokens) -> int:
        """Return the blocks that requests need for these tokens beyond those they have."""
        return sum(missing_blocks(self.kv, [request], width) for request, width in widths.items())

    def serve_prompts(self, scheduled: ScheduledTokens, budget: int, admitting: bool) -> None:
        """Share `budget` among prompts in prefill and, if there is a seat and memory, those that wait."""
        key, waiting = self.key, self.waiting
        under_way = deque(sorted((r for r in self.residents if not r.decoding), key=key))
        while budget:
            if admitting and waiting and not (under_way and key(under_way[0]) <= key(waiting[0])):
                request = waiting[0]
                admitting = self.admit(request, budget)
                if not admitting:
                    continue
                waiting.popleft()
            elif under_way:
                request = under_way.popleft()
            else:
                break
            scheduled[request] = min(request.known_tokens - request.computed, budget)
            budget -= scheduled[request]

    def admit(self, request: Request, budget: int) -> bool:
        """Give a waiting request a seat and its blocks, if it can be admitted now; True if so."""
        if self.num_running >= self.max_num_seqs:
            return False
        hit = self.lookup(request)
        cached_tokens = hit.blocks * self.kv.block_size + hit.copied_tokens
        if not self.chunked_prefill and request.known_tokens - request.computed - cached_tokens > budget:
            return False
        tokens = self.reservation(request)
        # blocks that other requests hold need no free block, idle ones do
        if self.kv.blocks_for(tokens) - hit.blocks + hit.idle > self.room:
            return False
        self.seat(request, tokens, hit)
        return True

    def reservation(self, request: Request) -> int:
        """Tokens for which a request takes blocks when it is admitted."""
        return request.known_tokens
