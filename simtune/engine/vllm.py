"""vLLM V1's schedulers (release 0.32): first come first served, and priorities.

Resident requests come first, in order of admission, prompt or decode alike: each gets its next tokens while the token
budget lasts. When a resident finds too few free KV blocks, residents are preempted until it does: the newest one, or
with priorities the least urgent one, even if it has its tokens of this step already. If that is the one in need itself,
those behind it go without in this step. The preempted wait again, first in the queue or where their priority puts them,
and lose what they computed, unless it is swapped to host memory; such a step admits nobody.

Otherwise waiting requests are admitted in order while seats, budget and memory last: a request is admitted only if all
its known tokens would fit the free blocks (`scheduler_reserve_full_isl`) and leave the watermark, but takes blocks only
for the tokens computed now; the last one admitted may be cut. Because a cut prompt exhausts the budget, at most one
prompt is under way between steps, and it is the newest resident.

With drafts a resident that decodes takes its next token and its drafts, as many as budget and max_model_len leave it;
each request in a step also takes the drafter's extra slots of the budget, and its blocks must have room for the
drafter's lookahead. Blocks taken for drafts that are rejected stay taken. A newcomer with one token to compute, be it
that the rest is cached or has come from a prefill instance, is padded with drafts nobody made to be like the others,
unless lengths go by batch or a prompt is under way; where the budget has no room for them, nobody more is admitted.

With asynchronous scheduling a step is scheduled before the engine knows what came of the one before. Whoever ended in
that keeps seat and blocks for one step more, and if the blocks run short, it is preempted like any other. Every answer
ends by its length here, so without drafts no token is discarded (after a stop token one would be). With drafts
(`AsyncDraftingBatch`) all those under way count as accepted: blocks are taken and max_model_len is kept accordingly,
and an answer completed by accepted drafts is in the next step all the same, whose tokens for it are discarded. What a
preempted request had under way is delivered.

Checked step by step against logs of the real engine: tests/engine/test_steplogs.py. One thing is not exact: where
scheduling is asynchronous, a request that goes without in one step and is preempted right after the next may find one
block fewer of its answer in the prefix cache than it would.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import attrgetter
from typing import ClassVar, Literal, Unpack

from simtune.engine.batch import Batch
from simtune.engine.drafting import AsyncDraftingBatch, DraftingBatch, DraftingTerms
from simtune.engine.prefix import PrefixCache
from simtune.engine.request import Request
from simtune.engine.scheduler import Chunk, Progress, Scheduler, Settings, Step


class VllmSettings(Settings, total=False):
    """The settings of vLLM's schedulers; see `VllmFcfs`."""

    prefix_caching: bool
    hash_block_tokens: int | None
    async_scheduling: bool
    preemption: Literal["recompute", "swap"]
    speculation: DraftingTerms | None


class VllmFcfs(Scheduler):
    """First come, first served. See the module's text for the rule."""

    offers = frozenset({"async_scheduling", "prefix_caching", "speculation", "swap", "watermark"})
    _newest_goes: ClassVar[bool] = True
    """Whether the newest resident is the one to preempt."""

    def __init__(
        self,
        *,
        prefix_caching: bool = False,
        hash_block_tokens: int | None = None,
        async_scheduling: bool = False,
        preemption: Literal["recompute", "swap"] = "recompute",
        speculation: DraftingTerms | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """`hash_block_tokens` is the size of the blocks that requests name for prefix caching: block_size unless given.

        Raises ValueError, also for features that do not go together.
        """
        self._speculation = speculation
        self.async_scheduling = async_scheduling
        super().__init__(**settings)
        if prefix_caching and preemption == "swap":
            raise ValueError("preemption by swap does not go with prefix caching")
        if async_scheduling and speculation is not None and (speculation.stops or speculation.shares):
            raise ValueError("async_scheduling does not go with drafts whose number is known only when they are made")
        self._extra_slots = speculation.extra_slots if speculation is not None else 0
        self._lookahead = speculation.lookahead if speculation is not None else 0
        self._padding = speculation.max_drafts if speculation is not None and speculation.pads else 0
        if 1 + self._padding + self._extra_slots > self.max_num_batched_tokens:
            self._padding = 0  # vLLM would wait for ever
        if self.max_num_batched_tokens <= self._extra_slots:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must exceed the drafter's extra slots "
                f"({self._extra_slots})"
            )
        self.preemption = preemption
        self.prefix_cache: PrefixCache | None = None
        if prefix_caching:
            block_size = self.kv.block_size
            self.kv = self.prefix_cache = PrefixCache(
                self.kv.total,
                block_size,
                hash_block_tokens or block_size,
                drops_last_hit=speculation is not None and speculation.drops_last_hit,
            )
        self._ahead = self.decoding if isinstance(self.decoding, AsyncDraftingBatch) else None
        self._ending: list[Request] = []  # finished in the latest step, the engine does not know yet
        self._stale: list[Request] = []  # the same, but preempted: the engine thinks that they wait
        self._paused: list[Request] = []  # members of the batch that the step leaves out
        self._preempted: list[Request] = []  # since the latest step
        self._swapped_out = 0

    def _new_batch(self) -> Batch:
        if self._speculation is None:
            return super()._new_batch()
        kind = AsyncDraftingBatch if self.async_scheduling else DraftingBatch
        return kind(self.kv.block_size, self._speculation, self.max_model_len)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._stale)

    @property
    def num_running(self) -> int:
        here = self.decoding.count + len(self.prefilling) + len(self._reserved)
        return here + len(self._ending) + len(self._paused)

    @property
    def unsettled(self) -> bool:
        return bool(self._ending or (self._ahead is not None and self._ahead.discarded))

    def would_notice(self) -> bool:
        if self.waiting:
            return False
        here = self.decoding.count + len(self.prefilling) + len(self._reserved) + len(self._paused)
        if self._ahead is not None:
            here -= len(self._ahead.discarded)  # their seats are free from the second repetition on
        return here < self.max_num_seqs

    def release(self, request: Request) -> None:
        if request in self._ending or (self._ahead is not None and request in self._ahead.discarded):
            request.hold = False
        else:
            super().release(request)

    def schedule(self) -> Step | None:
        if self._received or self._under_way is not None:
            self._begin()
        if self.decoding.count and not (self.waiting or self.prefilling or self._paused or self._preempted):
            step = self._decode_on()
            if step is not None:
                return step
        while True:
            chunks, budget, short = self._go_on()
            past = len(chunks)
            if self.waiting and not short:
                self._admit(chunks, budget)
            if self.decoding.count or chunks:
                return self._give(chunks, past, short)
            if not (short or self._ending or self._paused):
                return None
            self._rejoin()  # nothing runs: the engine comes straight back, and knows by then who has ended
            self._part()

    def _decode_on(self) -> Step | None:
        """The step in which the batch does nothing but decode, as most are; None where budget or blocks are short.

        `schedule` would come to the same, in more time.
        """
        batch, kv, count = self.decoding, self.kv, self.decoding.count
        budget = self.max_num_batched_tokens - self._extra_slots * count
        if batch.drafting:
            found = batch.next_steps(kv.free, budget)
            if found is None:
                return None
            tokens, context, blocks, repeat, contexts, discarded = found
            step = Step(count, context + tokens, [], [], repeat, (), tokens - count, batch.depth)
            if repeat > 1:
                step.contexts = contexts
            if discarded:
                assert self._ahead is not None
                step.discarded, step.discarded_tokens = len(self._ahead.discarded), discarded
        else:
            _, context, blocks = batch.totals()
            if blocks > kv.free or count > budget:
                return None
            step = Step(count, context + count, [], [])
            limit = batch.steps_to_completion()
            if self.tells_longest:
                step.longest_context = batch.longest_context
            roomy = kv.free // count * kv.block_size >= limit
            step.repeat = limit if roomy else batch.steps_that_fit(kv.free, limit)
        if blocks:
            kv.take(blocks)
        self._under_way = step
        return step

    def complete(self, repetitions: int = 1) -> Progress:
        step, self._under_way = self._under_way, None
        assert step is not None
        assert 1 <= repetitions <= step.repeat
        progress = Progress()
        batch, discarded = self.decoding, []
        if step.discarded:
            assert self._ahead is not None
            discarded = self._ahead.end_discarded()
        elif self._ending or self._stale:
            self._part()
        more = batch.blocks_for(repetitions - 1, 1) if repetitions > 1 else 0
        finished = batch.advance(repetitions)
        if discarded:
            self._ending = sorted([*self._ending, *discarded], key=attrgetter("admission"))
            self._part()
        if more:
            self.kv.take(more)
        for request in finished:
            self._finish(request, progress)
        for chunk in step.chunks:
            request = chunk.request
            request.computed += chunk.tokens - chunk.padding
            if request.computed < request.prompt_tokens + request.emitted:
                continue
            self.prefilling.remove(request)
            request.emitted += 1
            if request.emitted == 1:
                progress.first_token.append(request)
            if chunk.padding and self._ahead is not None:
                self._ahead.join(request, rejected=chunk.padding)
            else:
                batch.join(request)
            if request.emitted == request.output_tokens:
                batch.leave(request)
                self._finish(request, progress)
        if self._paused:
            self._rejoin()
        if self._speculation is not None:
            for request in batch.draft(step.num_decodes + len(step.chunks)):
                self._ending.remove(request)
        return progress

    def _give(self, chunks: list[Chunk], past: int, short: bool) -> Step:
        """The step that consists of the batch and these chunks; those from number `past` on are of newcomers."""
        batch, count = self.decoding, self.decoding.count
        tokens, context, blocks = batch.totals()
        step = Step(count, context + tokens, chunks, self._preempted)
        if batch.drafting:
            step.draft_levels = batch.depth
            if self._ahead is not None and self._ahead.discarded:
                step.discarded = len(self._ahead.discarded)
        elif count and self.tells_longest:
            step.longest_context = batch.longest_context
        if self._preempted:
            self._preempted = []
            step.swapped_out_blocks, self._swapped_out = self._swapped_out, 0
        step.draft_tokens = tokens - count
        if chunks:
            step.admitted = [chunk.request for chunk in chunks[past:]]
            if self.preemption == "swap":
                step.swapped_in_blocks = sum(self.kv.blocks_for(chunk.past) for chunk in chunks[past:])
        elif not (short or self._paused or step.discarded or (self._ending and self.waiting)):
            # The first repetition's blocks are taken already.
            step.repeat = batch.steps_that_fit(self.kv.free + blocks, batch.steps_to_completion())
            if step.repeat > 1 and batch.drafting:
                step.contexts = batch.contexts(step.repeat)
        self._under_way = step
        return step

    def _go_on(self) -> tuple[list[Chunk], int, bool]:
        """Give the residents their tokens: chunks, the token budget left, and whether blocks ran short."""
        batch, kv, extra = self.decoding, self.kv, self._extra_slots
        short = False
        while True:
            count, (verified, _, blocks) = batch.count, batch.totals()
            budget = self.max_num_batched_tokens - verified - extra * count
            more = tokens = 0
            if self.prefilling and budget > extra:
                (request,) = self.prefilling
                tokens = min(request.known_tokens - request.computed, budget - extra)
                more = self._more_blocks(request, tokens)
            if budget >= 0 and blocks + more <= kv.free and (self._ahead is None or not self._ahead.rests):
                break
            if self._ending or not self._newest_goes or batch.drafting:
                return self._go_on_one_by_one()
            # The one in need is the newest itself, or comes before it: nobody's place matters.
            self._preempt(self.prefilling[0] if self.prefilling else batch.newest())
            short = True
        if blocks:
            kv.take(blocks)
        if not tokens:
            return [], budget, short
        return [self._compute(request, tokens, more)], budget - tokens - extra, short

    def _go_on_one_by_one(self) -> tuple[list[Chunk], int, bool]:
        """The same where blocks or budget may run short: one resident after the other, in order of admission."""
        batch, extra = self.decoding, self._extra_slots
        running = sorted([*batch, *self._ending], key=attrgetter("admission")) + self.prefilling
        taken: dict[Request, tuple[int, int]] = {}  # tokens and new blocks
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        resting: list[Request] = []
        short = False
        i = 0
        while i < len(running) and budget > extra:
            request = running[i]
            if request in self._ending:
                i += 1
                continue
            decodes = request.decoding
            wanted = batch.width_of(request) if decodes else request.known_tokens - request.computed
            if not wanted and self._ahead is not None:
                resting.append(request)
                i += 1
                continue
            tokens = min(wanted, budget - extra)
            if decodes and tokens < wanted:
                batch.cut(request, tokens)
            more = batch.blocks_of(request) if decodes else self._more_blocks(request, tokens)
            while more > self.kv.free and request in running:
                short = True
                victim = self._victim(running)
                i -= running.index(victim) < i
                running.remove(victim)
                here = victim in taken
                spent, blocks = taken.pop(victim, (-extra, 0))
                budget += spent + extra
                self.kv.give(blocks)
                self._preempt(victim, here)
            if i == len(running) or running[i] is not request:
                break
            if decodes:
                self.kv.take(more)
            else:
                chunks.append(self._compute(request, tokens, more))
            taken[request] = tokens, more
            budget -= tokens + extra
            i += 1
        for request in [*resting, *running[i:]]:
            if request.decoding:
                away = self._ending if self._ahead is not None and request in self._ahead.discarded else self._paused
                batch.leave(request)
                away.append(request)
        return chunks, budget, short

    def _victim(self, running: list[Request]) -> Request:
        """Whom to preempt of the residents, in order of admission."""
        return running[-1]

    def _preempt(self, victim: Request, here: bool = False) -> None:
        discarded = self._ahead is not None and victim in self._ahead.discarded
        if discarded or victim in self._ending:  # the engine only thinks that it will go on
            if discarded:
                self.decoding.leave(victim)
            else:
                self._ending.remove(victim)
            if victim.hold:
                self._held[victim] = None
            else:
                self._lose(victim, False, here)
            self._preempted.append(victim)
            self._stale.append(victim)
            return
        if victim.decoding:
            self.decoding.leave(victim)
        else:
            self.prefilling.remove(victim)
        if self.preemption == "swap":
            self._swapped_out += self.kv.held_by(victim)
        self._lose(victim, True, here)
        if self.preemption == "recompute":
            victim.computed = 0
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        self._preempted.append(victim)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        kv, cache, extra = self.kv, self.prefix_cache, self._extra_slots
        running = self.num_running
        padding = 0 if chunks else self._padding
        while self.waiting and budget > extra and running < self.max_num_seqs:
            request = self.waiting[0]
            known, past, found, idle = request.known_tokens, request.computed, 0, 0
            if cache is not None:
                hit = cache.find(request)
                found, idle = hit.blocks, hit.idle
                past = found * kv.block_size
            tokens, whole, padded = known - past, -(-known // kv.block_size), 0
            if tokens == 1 and padding and (past or self.decoding.count) and past + padding + 2 <= self.max_model_len:
                padded, tokens = padding, 1 + padding
                if tokens > budget - extra:
                    break
            elif tokens > budget - extra:
                if not self.chunked_prefill:
                    break
                tokens = budget - extra
            blocks = kv.blocks_for(self._reach(past, tokens)) if self._lookahead or tokens != known - past else whole
            needed = (blocks if blocks > whole else whole) - found + idle
            if needed > kv.free - (self.watermark_blocks if running else 0):
                break
            self.waiting.popleft()
            self.prefilling.append(request)
            if cache is not None:
                cache.hold(request, hit)
            chunks.append(self._compute(request, tokens, blocks - found, padded))
            budget -= tokens + extra
            running += 1

    def _more_blocks(self, request: Request, tokens: int) -> int:
        """New blocks that a prompt under way needs for its next tokens."""
        return max(0, self.kv.blocks_for(self._reach(request.computed, tokens)) - self.kv.held_by(request))

    def _reach(self, past: int, tokens: int) -> int:
        """For how many tokens a prompt under way must hold blocks to compute `tokens` after `past` ones."""
        return min(past + tokens + self._lookahead, self.max_model_len)

    def _compute(self, request: Request, tokens: int, more_blocks: int, padding: int = 0) -> Chunk:
        if more_blocks:
            self.kv.take(more_blocks)
        if self._lookahead or padding:
            request.reserved_tokens = max(request.reserved_tokens, self._reach(request.computed, tokens))
        if self.prefix_cache is not None:
            self.prefix_cache.name(request, request.computed + tokens - padding)
        return Chunk(request, request.computed, tokens, padding)

    def _finish(self, request: Request, progress: Progress) -> None:
        progress.finished.append(request)
        if self.async_scheduling:
            self._ending.append(request)
        else:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if request.hold:
            self._held[request] = None
            return
        if self.prefix_cache is None:
            self.kv.release(request)
            return
        known = request.computed
        if self.async_scheduling:
            known = min(known, request.prompt_tokens + request.output_tokens - 1)
        elif (past := self.decoding.past_of(request)) >= 0:
            known = past + 1
        self.prefix_cache.release(request, known=known)

    def _lose(self, victim: Request, again: bool, here: bool) -> None:
        """Free the blocks of a preempted request, perhaps one that has its tokens of this step already."""
        if self.prefix_cache is None:
            self.kv.release(victim, again)
            return
        known = victim.computed
        past = self.decoding.past_of(victim)
        if past >= 0:
            known = past + here if self.async_scheduling else max(past, known * here) + 1
        elif here and not self.async_scheduling:
            known += 1
        self.prefix_cache.release(victim, again, known)

    def _part(self) -> None:
        """The engine learns who has ended in the step before the latest."""
        for request in self._ending:
            self._let_go(request)
        self._ending.clear()
        self._stale.clear()

    def _rejoin(self) -> None:
        """Those left out of a step are in the batch again."""
        for request in self._paused:
            self.decoding.rejoin(request)
        self._paused.clear()

    def _enter(self, request: Request) -> None:
        super()._enter(request)
        if self.decoding.drafting:  # nobody has made drafts for it yet
            if self._padding and request.computed + self._padding + 2 <= self.max_model_len:
                self.decoding.pad(request)
            else:
                self.decoding.cut(request, 1)
        if self.prefix_cache is not None:
            self.prefix_cache.name(request, request.computed)

    def _lose_residents(self) -> list[Request]:
        self._rejoin()
        if self._ahead is not None:
            for request in list(self._ahead.discarded):
                self._ahead.leave(request)
                self._ending.append(request)
        self._held.update((request, None) for request in self._ending if request.hold)
        self._ending.clear()
        self._stale.clear()
        self._preempted = []
        self._swapped_out = 0
        return super()._lose_residents()


class VllmPriority(VllmFcfs):
    """The most urgent first: by `Request.priority`, the smallest first, and among equals by arrival."""

    _newest_goes = False

    def __init__(self, **settings: Unpack[VllmSettings]) -> None:
        super().__init__(**settings)
        self.waiting = PriorityQueue()

    def would_notice(self) -> bool:
        return self.num_running - len(self._ending) < self.max_num_seqs

    def _victim(self, running: list[Request]) -> Request:
        return max(running, key=urgency)


urgency = attrgetter("priority", "id")


class PriorityQueue:
    """Waiting requests, the most urgent first, whoever came back from preemption."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))

    def __getitem__(self, index: int) -> Request:
        """The first; there is no way to others but to take it out."""
        assert index == 0
        return self._heap[0][-1]

    def append(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.id, request))

    appendleft = append

    def popleft(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def clear(self) -> None:
        self._heap.clear()
