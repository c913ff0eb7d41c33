"""Base of schedulers that keep their residents in a `Batch`.

A rule that decides by the batch as a whole (do all members fit the blocks, the budget) costs the same for a thousand
residents as for one, and many steps can be taken at once. The consequences of a rule's choice are implemented here: the
step and its repetitions, tokens delivered, and the features that vLLM also has, each a small object of its own:

* prefix caching: `KvBlocks` or `PrefixCache`;
* drafts: the kind of batch, and `DraftNeeds`;
* synchronous or asynchronous scheduling: `Settling`;
* preemption by recomputation or swap: `Preemption`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Literal, Unpack

from simtune.engine.batch import Batch, DecodeBatch, Tally
from simtune.engine.drafting import AsyncDraftingBatch, DraftingBatch, DraftingTerms, DraftNeeds
from simtune.engine.kv import KvBlocks
from simtune.engine.left_out import LeftOut
from simtune.engine.next_token import NextTokenCache
from simtune.engine.policy_traits import Settings
from simtune.engine.preemption import Preemption, Recompute, Swap
from simtune.engine.prefix import PrefixCache
from simtune.engine.request import Request
from simtune.engine.scheduler import Scheduler
from simtune.engine.settling import FreeRequest, NamedWhenVerified, OneStepLate, Settling, Synchronous
from simtune.engine.step import NO_PROGRESS, Chunk, Progress, Step

NO_REQUESTS: Sequence[Request] = ()

request_of = attrgetter("request")


class BatchSettings(Settings, total=False):
    """Settings of a `BatchScheduler`."""

    prefix_caching: bool
    hash_block_tokens: int | None
    async_scheduling: bool
    preemption: Literal["recompute", "swap"]
    speculation: DraftingTerms | None


class BatchScheduler(Scheduler):
    """Scheduler with its decoding residents in `decoding`, and those with a prompt in prefill in `prefilling`."""

    offers = frozenset({"async_scheduling", "prefix_caching", "speculation", "swap", "watermark"})
    drafts_vary = True

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
        super().__init__(**settings)
        _check_together(prefix_caching, async_scheduling, preemption, speculation)
        if prefix_caching:
            self.kv = _prefix_cache(self.kv, hash_block_tokens or self.kv.block_size, speculation)
        self.async_scheduling = async_scheduling
        self.decoding = self._new_batch(speculation)
        self.drafting = self.decoding.drafting
        self.prefilling: list[Request] = []
        """Residents whose prompt (or recomputation) is in prefill, in order of admission."""
        self._needs = DraftNeeds.of(speculation, self.max_num_batched_tokens, self.max_model_len)
        self._settling = _settling(self.decoding, self._free_request, async_scheduling, speculation)
        self._preemption: Preemption = Swap() if preemption == "swap" else Recompute()
        self._preempted: list[Request] = []  # since the latest step
        self._swapped_out_blocks = 0  # of the preempted requests
        self._left_out = LeftOut()
        self._overtakes = False  # whether a request may decode before one that was admitted earlier

    def _new_batch(self, speculation: DraftingTerms | None) -> Batch:
        if speculation is None:
            return DecodeBatch(self.kv.block_size)
        batch = AsyncDraftingBatch if self.async_scheduling else DraftingBatch
        return batch(self.kv.block_size, speculation, self.max_model_len)

    # --- what is here -----------------------------------------------------------------------------------------

    @property
    def tally(self) -> Tally:
        """Totals of verifications of drafts so far."""
        return self.decoding.tally

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine's view, including those that were preempted after they had ended."""
        return len(self.waiting) + len(self._late) + self._settling.num_preempted

    @property
    def num_running(self) -> int:
        """Requests with a seat in the engine's view, including those that have ended unknown to it."""
        seated = self.decoding.count + len(self.prefilling) + len(self._reserved)
        return seated + len(self._settling.ended) + len(self._left_out)

    def _admitted(self) -> Iterable[Request]:
        return chain(self.decoding, self.prefilling, self._settling.ended, self._left_out)

    def _has_seat(self) -> bool:
        """True if a newcomer would find a seat once the requests that have ended have left theirs."""
        seated = self.decoding.count + len(self.prefilling) + len(self._reserved) + len(self._left_out)
        if self.drafting:
            seated -= len(self.decoding.discarded)
        return seated < self.max_num_seqs

    @property
    def _comes_back(self) -> bool:
        """True if an engine with nothing to run would know more if it scheduled again at once."""
        return bool(self._settling.ended or self._left_out or self._late)

    @property
    def unsettled(self) -> bool:
        """True if seats or blocks will come free with the running step, though no request finishes in it."""
        return self._settling.num_ended > 0

    def emitted(self, request: Request) -> int:
        """Output tokens that a request in the scheduler has delivered so far."""
        return self.decoding.emitted_by(request) if request.decoding else request.emitted

    def composition(self) -> dict[Request, int]:
        """Return the tokens of each request in the step returned last, decodes first. Costs O(residents)."""
        assert self._under_way is not None, "no step is under way"
        tokens = {request: self.decoding.width_of(request) for request in self.decoding}
        return tokens | {chunk.request: chunk.tokens for chunk in self._under_way.chunks}

    # --- the step ---------------------------------------------------------------------------------------------

    def _decode_step(self) -> Step | None:
        """Return the step in which the batch only decodes, as in most steps; None if budget or blocks are short.

        Inlined for speed, for the case without other requests: same result as the rule and `_step`.
        """
        assert self._under_way is None, "the step given last was not completed"
        batch = self.decoding
        decodes = batch.next_step(self.kv.free, self.max_num_batched_tokens - self._needs.extra_slots * batch.count)
        if decodes is None:
            return None
        step, blocks = decodes
        if self.tells_longest:
            step.longest_context = batch.longest_context
        if self._late:
            # Newcomers are admitted after it at the earliest.
            step.repeat = 1
        if blocks:
            self.kv.take(blocks)
        self._under_way = step
        return step

    def _step(self, chunks: list[Chunk], newcomers: int, repeats: bool) -> Step:
        """Return the step of the batch and these chunks, those of newcomers last; all blocks are taken already.

        With `repeats`, a step without chunks is repeated as long as members do the same and blocks suffice.
        """
        assert self._under_way is None, "the step given last was not completed"
        batch, count, preempted = self.decoding, self.decoding.count, self._preempted
        tokens, context, blocks = batch.totals()
        step = self._under_way = Step(count, context + tokens, chunks, preempted)
        if self.drafting:
            step.draft_tokens, step.draft_depth, step.discarded = tokens - count, batch.depth, len(batch.discarded)
        elif count and self.tells_longest:
            step.longest_context = batch.longest_context
        if preempted:
            self._preempted = []
            step.swapped_out_blocks, self._swapped_out_blocks = self._swapped_out_blocks, 0
        if newcomers:
            admitted = chunks[-newcomers:]
            step.admitted = [*map(request_of, admitted)]
            if self._preemption.swaps:
                step.swapped_in_blocks = self._preemption.swap_in(admitted, self.kv)
        if self._left_out:
            step.paused = tuple(self._left_out)
        elif repeats and not chunks:
            self._repeat(step, blocks)
        return step

    def _repeat(self, step: Step, blocks: int) -> None:
        """Let a step without chunks be repeated; the first repetition's `blocks` are taken already."""
        batch = self.decoding
        # this step frees blocks and seats, or newcomers are admitted after it: the next one differs
        if step.discarded or self._late or (self._settling.ended and self.waiting):
            return
        step.repeat = batch.steps_that_fit(self.kv.free + blocks, batch.steps_to_completion())
        if step.repeat > 1:
            step.contexts = batch.contexts(step.repeat)

    def _allocate(self, prompt: Request, num_tokens: int, new_blocks: int, padding: int = 0) -> Chunk:
        """Take blocks for the next tokens of a prompt in prefill."""
        if new_blocks:
            self.kv.take(new_blocks)
        # otherwise the blocks are exactly those of the computed tokens
        if self._needs.lookahead or padding:
            prompt.reserved_tokens = max(prompt.reserved_tokens, self._needs.slots(prompt.computed, num_tokens))
        if self.kv.caches:
            self.kv.name(prompt, prompt.computed + num_tokens - padding)
        return Chunk(prompt, prompt.computed, num_tokens, padding)

    def _preempt(self, victim: Request, tokens: int = 0) -> None:
        """Take the blocks of a resident, which has `tokens` tokens in the coming step; it waits again."""
        self._preempted.append(victim)
        if self._settling.has_ended(victim):
            self._settling.preempt(victim, tokens > 0)
            return
        if victim.decoding:
            self.decoding.leave(victim)
            named_tokens = self._settling.named_tokens(victim, tokens > 0)
        else:
            self.prefilling.remove(victim)
            named_tokens = victim.computed + tokens
        self._swapped_out_blocks += self._preemption.preempt(victim, self.kv, named_tokens)
        victim.preemptions += 1
        # At the head of the queue: it was admitted before all that wait there.
        self.waiting.appendleft(victim)

    def complete(self, repetitions: int = 1) -> Progress:
        """End the step returned last, which ran `repetitions` times: see `Scheduler.complete`."""
        step, self._under_way = self._under_way, None
        assert step is not None
        assert 1 <= repetitions <= step.repeat
        batch, settling = self.decoding, self._settling
        if settling.pending:
            settling.settle(batch.end_discarded() if step.discarded else ())
        if repetitions > 1:  # The first one's blocks were taken with the step.
            self.kv.take(batch.blocks_for(repetitions - 1, 1))
        finished, first_token = batch.advance(repetitions), NO_REQUESTS
        if step.chunks:
            first_token, also_finished = _end_chunks(step.chunks, self.prefilling, batch)
            finished = [*finished, *also_finished] if also_finished else finished
        if finished:
            # blocks are freed in order of admission, since that decides which are found later
            if self._overtakes:
                finished = sorted(finished, key=attrgetter("seat"))
            settling.finish(finished)
        if self._left_out:
            self._left_out.rejoin(self.decoding, self._settling)
        if self._late:
            self._late.move(self._queue, repetitions)
        if self.drafting:
            self._draft(step)
        return Progress(first_token, finished) if first_token or finished else NO_PROGRESS

    def _draft(self, step: Step) -> None:
        """Let requests that decode make drafts after a step."""
        for request in self.decoding.draft(step.num_decodes + len(step.chunks)):
            self._settling.ended.remove(request)  # it is in the next step all the same

    # --- requests come and go ---------------------------------------------------------------------------------

    def _expel(self, request: Request) -> bool:
        if self._settling.has_ended(request):
            return False
        if request.decoding:
            self.decoding.leave(request)
            self._settling.finish([request])
        elif request in self.prefilling:
            self.prefilling.remove(request)
            self._free_request(request, request.computed)
        else:
            return False
        return True

    def release(self, request: Request) -> None:
        """Free the blocks of a request that is held or expected; of one that has ended, when the engine knows."""
        if self._settling.has_ended(request):
            request.hold = False
        else:
            super().release(request)

    def _enter(self, request: Request) -> None:
        self.decoding.receive(request, padded=self._needs.padding_after(request.computed) > 0)
        self.kv.name(request, request.computed)

    def _lose_residents(self) -> list[Request]:
        self._left_out.rejoin(self.decoding, self._settling)
        self._held.update((request, None) for request in self._settling.abandon() if request.hold)
        self._preempted, self._swapped_out_blocks = [], 0
        lost = list(self.decoding)
        for request in lost:
            self.decoding.leave(request)
        lost, self.prefilling = [*lost, *self.prefilling], []
        return lost


def _prefix_cache(kv: KvBlocks, hash_block_tokens: int, speculation: DraftingTerms | None) -> PrefixCache:
    """Return a prefix cache of as many blocks."""
    if speculation is None:
        return PrefixCache(kv.total, kv.block_size, hash_block_tokens)
    if speculation.hashes_next:
        return NextTokenCache(kv.total, kv.block_size, hash_block_tokens)
    return PrefixCache(kv.total, kv.block_size, hash_block_tokens, speculation.drops_last_hit)


def _settling(
    batch: Batch, free_request: FreeRequest, async_scheduling: bool, speculation: DraftingTerms | None
) -> Settling:
    """Return the moment when an engine learns the result of a step."""
    if async_scheduling:
        return OneStepLate(batch, free_request, hashes_next=speculation is not None and speculation.hashes_next)
    names_verified = speculation is not None and speculation.names_verified
    return (NamedWhenVerified if names_verified else Synchronous)(batch, free_request)


def _check_together(
    prefix_caching: bool, async_scheduling: bool, preemption: str, speculation: DraftingTerms | None
) -> None:
    """Raise ValueError for features that do not go together."""
    if prefix_caching and preemption == "swap":
        raise ValueError("preemption swap and prefix_caching are mutually exclusive; disable one")
    # An asynchronous engine dispatches a step before it knows how many drafts the last one made.
    if async_scheduling and speculation is not None and (speculation.stops or speculation.shares):
        raise ValueError("async_scheduling requires a number of drafts known in advance; disable async_scheduling")


def _end_chunks(
    chunks: Sequence[Chunk], prefilling: list[Request], batch: Batch
) -> tuple[list[Request], list[Request]]:
    """Advance prompts by their chunks; those that are complete begin to decode.

    Returns (requests with their first token, requests that are complete).
    """
    first_token, finished = [], []
    for chunk in chunks:
        request = chunk.request
        request.computed += chunk.tokens - chunk.padding
        if request.computed < request.prompt_tokens + request.emitted:
            continue
        prefilling.remove(request)
        request.emitted += 1
        if request.emitted == 1:
            first_token.append(request)
        batch.join(request, chunk.padding)
        if request.emitted == request.output_tokens:
            batch.leave(request)
            finished.append(request)
    return first_token, finished
