"""vLLM V1's schedulers (releases 0.32 and 0.33): first come first served, and priorities.

Residents come first, in order of admission, prompt or decode alike: each gets its next tokens while the token budget
lasts. If one finds too few free KV blocks, residents are preempted until it has enough: the newest, or with priorities
the least urgent, even if that one already has its tokens of this step. If the victim is the one in need itself, those
behind it get no tokens in this step, unless `self_preemption_ends_step` is off, as in release 0.33 with priorities. A
step that preempts admits no request.

Otherwise waiting requests are admitted in order while seats, budget and memory last: one is admitted only if all its
known tokens would fit the free blocks (`scheduler_reserve_full_isl`) and leave the watermark, but takes blocks only for
the tokens computed now; the last one may be cut. Because a cut prompt exhausts the budget, at most one prompt is in
prefill between steps, and it is the newest resident.

With drafts each request in a step also takes the drafter's extra slots of the budget, and its blocks must have room for
the drafter's lookahead. Blocks taken for rejected drafts stay taken. A newcomer with one token to compute, because the
rest is cached or has come from a prefill instance, is padded with placeholder drafts, unless draft lengths depend on
the batch or a prompt is in prefill; if the budget has no room for them, no further request is admitted. Which blocks
others find, and which drafters take slots, differs between the releases: `simtune.specs.draft_rules`.

With asynchronous scheduling a step is scheduled before the engine knows the result of the one before. Every answer ends
by its length here, so without drafts no token is discarded (after a stop token one would be). With drafts all those
in flight count as accepted, and the tokens in flight of a preempted request are delivered.

With `prefill_schedule_interval` only some steps have prompts (`simtune.engine.cadence`).

Over a pipeline a prompt counts as computed as soon as a chunk of it is scheduled, and as many batches are under way
as there are stages, so that its chunks follow one another, beside decodes too (`simtune.engine.following`).

Checked step by step against logs of the real engine, tests/engine/test_steplogs.py, and against the schedulers of both
releases in random worlds, tests/engine/test_vllm_worlds.py and, with drafts, test_vllm_draft_worlds.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Unpack

from simtune.engine.adapters import AdmissibleQueue
from simtune.engine.batch import Batch
from simtune.engine.batched import BatchScheduler, BatchSettings
from simtune.engine.cadence import PromptCadence
from simtune.engine.following import FollowingScheduler
from simtune.engine.kv import NO_HIT
from simtune.engine.policy_traits import Feature
from simtune.engine.request import Request
from simtune.engine.step import Chunk, Step
from simtune.engine.waiting import PriorityQueue, urgency


class VllmSettings(BatchSettings, total=False):
    """Settings of vLLM's schedulers."""

    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    prefill_schedule_interval: int
    prefill_steps_aligned: bool
    scheduler_reserve_full_isl: bool
    self_preemption_ends_step: bool


class Scheduled(NamedTuple):
    """Tokens and blocks of a resident in the coming step, if residents are scheduled one by one."""

    tokens: int
    new_blocks: int
    chunk: Chunk | None
    """Chunk of a prompt; None for a decode."""


def _longest_now(scheduler: VllmFcfs) -> int:
    """Most tokens of a prompt in the coming step: a prompt that is alone keeps no other request waiting."""
    # Late arrivals count as waiting, as they do in the engine when it schedules.
    if (num_requests := scheduler.num_running + scheduler.num_waiting) == 1:
        return scheduler.max_model_len
    share = scheduler.max_num_batched_tokens // max(num_requests, 1) if scheduler._adaptive else 0
    return max(scheduler.long_prefill_token_threshold, share)


def _wanted_by(scheduler: VllmFcfs, request: Request) -> int:
    """Tokens that a resident computes in the coming step, if budget and blocks suffice."""
    if request.decoding:
        return scheduler.decoding.width_of(request)
    return min(request.known_tokens - request.computed, scheduler._longest_chunk)


def _admit(scheduler: VllmFcfs, chunks: list[Chunk], token_budget: int) -> int:
    """Admit waiting requests; return the number admitted."""
    if scheduler.offloading is not None:
        offloading, first = scheduler.offloading, partial(_admit_first, scheduler)
        newcomers = offloading.admit(scheduler, chunks, token_budget, first, partial(_admit_loaded, scheduler))
        if not scheduler._defers:
            scheduler._cadence.backlogged = offloading.backlogged(scheduler.waiting)
        return newcomers
    if not scheduler.waiting:
        newcomers = 0
    elif (places := scheduler.adapter_places()) is None:
        newcomers = scheduler._schedule_waiting(chunks, token_budget)
    else:
        queue = AdmissibleQueue(scheduler.waiting, places)
        scheduler.waiting = queue  # type: ignore[assignment]
        newcomers = scheduler._schedule_waiting(chunks, token_budget)
        scheduler.waiting = queue.restore()
    if not scheduler._defers:
        scheduler._cadence.backlogged = bool(scheduler.waiting)
    return newcomers


def _note_prompts(scheduler: VllmFcfs, chunks: list[Chunk], newcomers: int) -> None:
    """Let the cadence count from the coming step if it has prompts; the last `newcomers` chunks are of newcomers."""
    if scheduler._cadence.interval == 1:
        return
    residents = len(chunks) > newcomers or scheduler._gave_back
    scheduler._gave_back = False
    if scheduler.decoding.count or chunks:
        scheduler._cadence.note(scheduler.decoding, residents, chunks[len(chunks) - newcomers :])


def _cut_to(scheduler: VllmFcfs, budget: int, num_tokens: int, padding: int, rest: int) -> int:
    """Return the tokens of a newcomer in the coming step, of the `num_tokens` that it would take with its `padding`; 0
    if it must wait. `rest` is what it has left to compute."""
    # In a step without prompts a newcomer computes its newest token only, as all others do.
    if scheduler._defers and rest > 1:
        return 0
    if num_tokens <= budget:
        return num_tokens
    # A padded newcomer is never cut, nor is a prompt without chunked prefill.
    return 0 if padding or not scheduler.chunked_prefill else budget


def _cut_drafts(batch: Batch, request: Request, num_tokens: int, wanted_tokens: int) -> None:
    """Cut the drafts of a resident that gets fewer tokens than it wants, never the certain token."""
    if num_tokens < wanted_tokens and request.decoding:
        batch.cut(request, num_tokens)


def _until_prompts(scheduler: VllmFcfs, step: Step) -> Step:
    """Return a step, repeated at most until one may have the prompts that it defers."""
    waits = scheduler._defers and (scheduler.waiting or scheduler.prefilling)
    return scheduler._cadence.until_prompts(step, scheduler.decoding) if waits else step


def _admit_first(scheduler: VllmFcfs, chunks: list[Chunk], token_budget: int) -> int:
    """Admit the first waiting request, and add its chunk; return what it takes of the budget, 0 if it must wait."""
    waiting, count = scheduler.waiting, len(chunks)
    scheduler.waiting = deque([waiting[0]])
    scheduler._schedule_waiting(chunks, token_budget)
    scheduler.waiting = waiting
    if len(chunks) == count:
        return 0
    waiting.popleft()
    return chunks[-1].tokens + scheduler._needs.extra_slots


def _admit_loaded(scheduler: VllmFcfs, request: Request, chunks: list[Chunk], token_budget: int) -> int:
    """Do the same for a request with blocks, whose `computed` tokens have been loaded."""
    kv, needs, all_tokens = scheduler.kv, scheduler._needs, request.known_tokens
    if token_budget <= needs.extra_slots:
        return 0
    kv.name(request, request.computed)
    if request.computed == all_tokens:  # the step computes the last token again, to sample from it
        request.reserved_tokens, request.computed = all_tokens, all_tokens - 1
    past, held_blocks = request.computed, kv.held_by(request)
    room = kv.free - (scheduler.watermark_blocks if scheduler.num_running else 0)
    num_tokens = min(all_tokens - past, scheduler._longest_chunk)
    num_tokens = _cut_to(scheduler, token_budget - needs.extra_slots, num_tokens, 0, all_tokens - past)
    blocks = kv.blocks_for(all_tokens if scheduler.scheduler_reserve_full_isl else needs.slots(past, num_tokens))
    if not num_tokens or blocks - held_blocks > room:
        return 0
    _seat(scheduler, request)
    new_blocks = max(0, kv.blocks_for(needs.slots(past, num_tokens)) - held_blocks)
    chunks.append(scheduler._allocate(request, num_tokens, new_blocks))
    return num_tokens + needs.extra_slots


def _seat(scheduler: VllmFcfs, request: Request) -> None:
    """Make a request a resident with a prompt in prefill."""
    scheduler._seats += 1
    request.seat = scheduler._seats
    scheduler.prefilling.append(request)


def _served(in_order: Sequence[Request], defers: bool) -> Sequence[Request]:
    """Return the residents that may get tokens in the coming step, which has prompts unless it `defers` them."""
    return [request for request in in_order if request.decoding] if defers else in_order


_REFINED: tuple[Feature, ...] = ("long_prefills", "prefill_interval", "reserve_full_isl", "self_preemption")
"""Features of the scheduler that refine its rule."""


class VllmFcfs(FollowingScheduler):
    """First come, first served. See the module for the rule."""

    offers = BatchScheduler.offers | {"active_seqs", "cascade_attention", "images", "lora", *_REFINED}
    first_come = True
    chunks_follow = True

    def __init__(
        self,
        *,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        prefill_schedule_interval: int = 1,
        prefill_steps_aligned: bool = False,
        scheduler_reserve_full_isl: bool = True,
        self_preemption_ends_step: bool = True,
        **settings: Unpack[BatchSettings],
    ) -> None:
        """Limit the tokens of a prompt in a step to a threshold above 0, unless it is the only request. See
        `PromptCadence` for the interval, `aligned` or not. `self_preemption_ends_step`: a resident that is preempted
        for blocks of its own ends a step (vLLM up to 0.32). Raises ValueError, also if a threshold cuts drafts."""
        super().__init__(**settings)
        speculation = settings.get("speculation")
        if speculation is not None and 0 < long_prefill_token_threshold <= speculation.max_drafts:
            raise ValueError(
                f"long_prefill_token_threshold ({long_prefill_token_threshold}) must be more than the "
                f"{speculation.max_drafts} drafts of a request, which it would cut"
            )
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.scheduler_reserve_full_isl = scheduler_reserve_full_isl
        self.self_preemption_ends_step = self_preemption_ends_step
        self._adaptive = long_prefill_token_threshold_adaptive
        self._cadence = PromptCadence(prefill_schedule_interval, prefill_steps_aligned)
        self._longest_chunk = long_prefill_token_threshold or self.max_model_len
        # In a step without prompts a newcomer with one token to compute passes the prompts that wait for their turn.
        self._overtakes = long_prefill_token_threshold > 0 or prefill_schedule_interval > 1
        # the victim is the prompt in prefill, or the request that began to decode last
        self._newest_goes = not self._overtakes
        self._seats, self._defers = 0, False  # admissions so far; whether the coming step has no prompts
        self._gave_back = False  # whether a prompt was preempted that already had tokens in the coming step

    def schedule(self) -> Step | None:
        """Return the next step: residents first, then those that wait. See `Scheduler.schedule`."""
        if self._reserved.received:
            self._begin()
        if self.decoding.count and not (self.waiting or self.prefilling or self._preempted or self.offloading):
            step = self._decode_step()
            if step is not None:
                return step
        while True:
            if self.long_prefill_token_threshold:
                self._longest_chunk = _longest_now(self)
            self._defers = self._cadence.defers(self.decoding, self._settling)
            num_preempted = len(self._preempted)
            chunks, token_budget = self._schedule_running()
            preempting = len(self._preempted) > num_preempted
            newcomers = 0 if preempting else _admit(self, chunks, token_budget)
            _note_prompts(self, chunks, newcomers)
            changes = self._write(chunks, preempting)
            if self.decoding.count or chunks:
                step = self._step(chunks, newcomers, repeats=self._repeats(preempting))
                return _until_prompts(self, step)
            if not (changes or self._comes_back):
                return None
            self._catch_up()

    def _catch_up(self) -> None:
        # Nothing runs: the engine schedules again at once, and knows by then which requests have ended.
        self._left_out.rejoin(self.decoding, self._settling)
        self._late.move_all(self._queue)
        self._settling.settle()

    def _schedule_running(self) -> tuple[list[Chunk], int]:
        """Give the residents their next tokens; return chunks of prompts, and the remaining token budget."""
        # Several prompts may be in prefill then, so budget and blocks are asked for all of them.
        if self._overtakes and self.prefilling:
            return self._schedule_many_prompts()
        batch, kv, extra_slots, blocks_taken = self.decoding, self.kv, self._needs.extra_slots, 0
        while True:
            num_tokens, _, new_blocks = batch.totals()
            token_budget = self.max_num_batched_tokens - num_tokens - extra_slots * batch.count
            chunk_tokens = chunk_blocks = 0
            if token_budget > extra_slots and _served(self.prefilling, self._defers):
                (prompt,) = self.prefilling
                chunk_tokens = min(prompt.known_tokens - prompt.computed, token_budget - extra_slots)
                chunk_blocks = self._new_blocks(prompt, chunk_tokens)
            if token_budget >= 0 and new_blocks + chunk_blocks <= kv.free + blocks_taken and not batch.rests:
                break
            # preempting at once needs members that take one block at most, and the newest as the victim
            if self.drafting or self._settling.ended or not self._newest_goes:
                return self._schedule_one_by_one()
            # Members need one block or none: the members before the one in need take all free blocks.
            more = min(kv.free, new_blocks - blocks_taken)
            kv.take(more)
            blocks_taken += more
            self._preempt(self.prefilling[0] if self.prefilling else batch.newest())
        if new_blocks > blocks_taken:
            kv.take(new_blocks - blocks_taken)
        if not chunk_tokens:
            return [], token_budget
        return [self._allocate(prompt, chunk_tokens, chunk_blocks)], token_budget - chunk_tokens - extra_slots

    def _schedule_many_prompts(self) -> tuple[list[Chunk], int]:
        """Do the same if several prompts may be in prefill: at once, if budget and blocks suffice for all."""
        batch, extra_slots = self.decoding, self._needs.extra_slots
        num_tokens, _, new_blocks = batch.totals()
        prompts = () if self._defers else self.prefilling
        parts = [(p, min(p.known_tokens - p.computed, self._longest_chunk)) for p in prompts]
        blocks = [self._new_blocks(prompt, tokens) for prompt, tokens in parts]
        num_tokens += sum(tokens for _, tokens in parts) + extra_slots * (batch.count + len(parts))
        if num_tokens > self.max_num_batched_tokens or new_blocks + sum(blocks) > self.kv.free or batch.rests:
            return self._schedule_one_by_one()
        self.kv.take(new_blocks)
        chunks = [self._allocate(prompt, tokens, more) for (prompt, tokens), more in zip(parts, blocks, strict=True)]
        return chunks, self.max_num_batched_tokens - num_tokens

    def _schedule_one_by_one(self) -> tuple[list[Chunk], int]:
        """Do the same if budget or blocks do not suffice for all: one by one, in order of admission."""
        batch, extra_slots, ended = self.decoding, self._needs.extra_slots, self._settling.ended
        token_budget = self.max_num_batched_tokens
        scheduled: dict[Request, Scheduled] = {}
        # Requests that have ended unknown to the engine hold blocks and may be its victims.
        in_order = sorted([*batch, *ended, *self.prefilling], key=attrgetter("seat"))
        running = dict.fromkeys(in_order)
        for request in _served(in_order, self._defers):
            if token_budget <= extra_slots:
                break
            if request not in running or request in ended:
                continue
            wanted_tokens = _wanted_by(self, request)
            num_tokens = self._grant(request, request.computed, min(wanted_tokens, token_budget - extra_slots))
            if not num_tokens and (wanted_tokens or batch.rests):  # with nothing to compute it keeps its place
                continue
            _cut_drafts(batch, request, num_tokens, wanted_tokens)
            new_blocks = batch.blocks_of(request) if request.decoding else self._new_blocks(request, num_tokens)
            token_budget += self._make_room(request, new_blocks, running, scheduled)
            if request in running:
                scheduled[request] = self._give(request, num_tokens, new_blocks)
                token_budget -= num_tokens + extra_slots
            # Otherwise the more urgent ones behind it may fit into the blocks that it gave back.
            elif self.self_preemption_ends_step:
                break
        self._left_out.add((r for r in running if r not in scheduled), self.decoding, self._settling)
        return [part.chunk for part in scheduled.values() if part.chunk is not None], token_budget

    def _give(self, request: Request, num_tokens: int, new_blocks: int) -> Scheduled:
        """Take blocks for the next tokens of a resident."""
        if not request.decoding:
            return Scheduled(num_tokens, new_blocks, self._allocate(request, num_tokens, new_blocks))
        self.kv.take(new_blocks)
        return Scheduled(num_tokens, new_blocks, None)

    def _make_room(
        self, request: Request, blocks: int, running: dict[Request, None], scheduled: dict[Request, Scheduled]
    ) -> int:
        """Preempt residents until `blocks` blocks are free for a request, or it is preempted itself; return the token
        budget that the victims give back."""
        token_budget = 0
        while blocks > self.kv.free and request in running:
            victim = self._victim(running)
            del running[victim]
            given_back = scheduled.pop(victim, None)
            tokens = 0
            if given_back is not None:
                tokens = given_back.tokens
                token_budget += tokens + self._needs.extra_slots
                if given_back.chunk is None:
                    self.kv.give(given_back.new_blocks)
                else:
                    self._gave_back = True
                    # a prompt's blocks are freed with its other blocks, under their names
                    victim.reserved_tokens = max(victim.reserved_tokens, self._needs.slots(victim.computed, tokens))
            self._preempt(victim, tokens)
        return token_budget

    def _victim(self, running: dict[Request, None]) -> Request:
        """Return the resident to preempt, given those left in order of admission."""
        return next(reversed(running))

    def _new_blocks(self, prompt: Request, num_tokens: int) -> int:
        """Blocks that a prompt in prefill needs for its next tokens, besides those it has."""
        return max(0, self.kv.blocks_for(self._needs.slots(prompt.computed, num_tokens)) - self.kv.held_by(prompt))

    def _schedule_waiting(self, chunks: list[Chunk], token_budget: int) -> int:
        """Admit waiting requests in order, and add their chunks to those of residents; return the number admitted."""
        waiting, kv, needs, num_running = self.waiting, self.kv, self._needs, self.num_running
        caches, block_size, extra_slots, num_residents = kv.caches, kv.block_size, needs.extra_slots, len(chunks)
        hit, hit_blocks = NO_HIT, 0
        while waiting and token_budget > extra_slots and num_running < self.max_num_seqs:
            request = waiting[0]
            # Inlined for speed: the property `known_tokens` would be called in every step of a queue that waits.
            known_tokens, past = request.prompt_tokens + request.emitted, request.computed
            room = kv.free - (self.watermark_blocks if num_running else 0)
            if caches:
                hit = kv.find(request)
                hit_blocks, idle = hit.blocks, hit.idle
                past += hit_blocks * block_size + hit.copied_tokens
                # found blocks that other requests hold need no free block, idle ones do
                room += hit_blocks - idle
            # Of the whole prompt, not of its rest: what is found in the cache has blocks as well.
            all_blocks = -(-known_tokens // block_size)
            # blocks are taken for this chunk only, but all known tokens must fit if the setting asks for it
            if all_blocks * self.scheduler_reserve_full_isl > room:
                break
            num_tokens, padding = min(known_tokens - past, self._longest_chunk), 0
            if num_tokens == 1 and not num_residents:
                padding = self._padding_after(past)
                num_tokens += padding
            num_tokens = _cut_to(self, token_budget - extra_slots, num_tokens, padding, known_tokens - past)
            num_tokens = self._grant(request, past, num_tokens)
            if not num_tokens:
                break
            as_whole = past + num_tokens + needs.lookahead == known_tokens
            blocks = all_blocks if as_whole else kv.blocks_for(needs.slots(past, num_tokens))
            if blocks > room:
                break
            waiting.popleft()
            _seat(self, request)
            if caches:
                kv.hold(request, hit)
            chunks.append(self._allocate(request, num_tokens, blocks - hit_blocks, padding))
            token_budget -= num_tokens + extra_slots
            num_running += 1
        return len(chunks) - num_residents

    def _grant(self, request: Request, past: int, tokens: int) -> int:
        return tokens  # a scheduler with images gives fewer: see `EncodingFcfs`

    def _padding_after(self, past: int) -> int:
        """Placeholder drafts beside the one token that a newcomer has left to compute."""
        return self._needs.padding_after(past) if past or self.decoding.count else 0

    def _lose_residents(self) -> list[Request]:
        self._cadence.restart()
        return super()._lose_residents()

    def _enter(self, request: Request) -> None:
        self._seats += 1
        request.seat = self._seats
        super()._enter(request)

    def composition(self) -> dict[Request, int]:
        """Return the tokens of each request in the step returned last, in order of admission."""
        return dict(sorted(super().composition().items(), key=lambda entry: entry[0].seat))

    def would_notice(self) -> bool:
        """True if a newcomer could take a seat or, with an interval, wait for one; behind others with adapters only."""
        return (self.adapters is not None or not self.waiting) and (self._cadence.interval > 1 or self._has_seat())


class VllmPriority(VllmFcfs):
    """Most urgent first: by `Request.priority`, the smallest first, and among equals by arrival."""

    def __init__(self, **settings: Unpack[VllmSettings]) -> None:
        super().__init__(**settings)
        self.waiting = PriorityQueue()
        self._newest_goes = False

    def would_notice(self) -> bool:
        """True if a seat is free: a newcomer may come before others that wait."""
        return self._has_seat() or (self._cadence.interval > 1 and not self.waiting)

    def _victim(self, running: dict[Request, None]) -> Request:
        return max(running, key=urgency)
