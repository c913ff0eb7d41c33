"""SGLang's scheduler: prompts first, and an estimate of the tokens that answers still need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from simtune.engine.adapters import AdmissibleQueue
from simtune.engine.kv import Hit
from simtune.engine.policies.dynamic_chunks import DynamicChunks
from simtune.engine.policies.listed import ListScheduler, ScheduledTokens, missing_blocks
from simtune.engine.policy_traits import Feature, Settings
from simtune.engine.polls import Polls
from simtune.engine.radix import RadixCache
from simtune.engine.request import Request
from simtune.engine.step import Progress


class SglangScheduler(ListScheduler):
    """Prompts run in separate steps, before those that decode; requests are admitted on an estimate of their answers.

    *Admission.* Each decoding request is taken to need `new_token_ratio` of the tokens it may still deliver, at most
    CLIP_MAX_NEW_TOKENS; a newcomer, in the order of arrival, must find its prompt and all of its own. Prompts follow
    one another until `max_num_batched_tokens` (SGLang's chunked_prefill_size) are reached, and the last one is cut at
    whole pages; no other follows it before it is complete. Once seats or memory were short, no request is considered
    until the batch is smaller.

    *Ratio.* It begins at INIT_NEW_TOKEN_RATIO x `schedule_conservativeness` (at most 1) and falls with every step that
    decodes, within DECAY_STEPS steps to MIN_NEW_TOKEN_RATIO_FACTOR of that. If a decode finds no page, requests are
    retracted, those with the fewest delivered tokens first (of equals the longest prompt), until RETRACT_DECODE_STEPS
    steps of the others fit; they go to the end of the queue, to be computed again. The ratio is then the share of their
    allowed tokens that the others have delivered, those steps included. An idle engine starts anew.

    *Options.* Prompts of a step also end when `max_prefill_tokens` are reached. With `enable_mixed_chunk` all requests
    decode beside prompts, in the same budget. The engine polls for newcomers, and for requests that are handed over to
    it, before every `scheduler_recv_interval`-th step that decodes, and after every one with prompts. Under overlap
    (`async_scheduling`) a newcomer waits for one more dispatched step. A request may deliver the `max_tokens` that its
    client allows, up to `max_new_tokens` and max_model_len.

    *Drafts.* Every request that decodes has room for all drafts of a round before it runs, and prompts never share a
    step with them.

    *Cache.* With `prefix_caching` a newcomer needs no room for the beginning of its prompt that is in the radix tree
    (`simtune.engine.radix`); pages of it that no other request holds are free no more.

    *Adapters.* A request whose LoRA adapter finds no slot is passed over (`simtune.engine.adapters`).

    Facts: schedule_policy.py, schedule_batch.py, scheduler.py and scheduler_recv_skipper.py of SGLang 0.5. Left out:
    orders of the queue by the radix cache, and that under overlap an end is known one step late.
    """

    offers = frozenset({"async_scheduling", "dynamic_chunks", "lora", "prefix_caching", "speculation"})
    lacks: ClassVar[Mapping[Feature, str]] = {"swap": "SGLang computes retracted requests again"}
    chunks_follow = True
    INIT_NEW_TOKEN_RATIO = 0.7
    MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
    DECAY_STEPS = 600
    RETRACT_DECODE_STEPS = 20
    CLIP_MAX_NEW_TOKENS = 4096
    polls: Polls

    def __init__(
        self,
        *,
        schedule_conservativeness: float = 1.0,
        max_new_tokens: int | None = None,
        max_prefill_tokens: int = 16384,
        enable_mixed_chunk: bool = False,
        scheduler_recv_interval: int = 1,
        linear_tokens: float | None = None,
        smooth_factor: float = 0.75,
        **settings: Unpack[Settings],
    ) -> None:
        """Make a scheduler. Raises ValueError for an option that is out of range."""
        super().__init__(**settings)
        if schedule_conservativeness <= 0:
            raise ValueError(f"schedule_conservativeness ({schedule_conservativeness}) must be above 0")
        self._initial = min(self.INIT_NEW_TOKEN_RATIO * schedule_conservativeness, 1.0)
        self._least = self._initial * self.MIN_NEW_TOKEN_RATIO_FACTOR
        self._max_new_tokens = self.max_model_len if max_new_tokens is None else max_new_tokens
        self._max_prefill_tokens, self._mixes = max_prefill_tokens, enable_mixed_chunk and not self.drafting
        self.polls = Polls(scheduler_recv_interval)
        self._page = min(self.kv.block_size, self.max_num_batched_tokens)  # a budget below a page counts as one
        self._chunks = DynamicChunks(self.max_num_batched_tokens, self._page, linear_tokens, smooth_factor)
        self._begin_anew()

    def new_cache(self, hash_block_tokens: int) -> RadixCache:
        """Return an empty radix tree."""
        return RadixCache(self.kv.total, self.kv.block_size, hash_block_tokens)

    @property
    def new_token_ratio(self) -> float:
        """Share of its remaining tokens that a request is taken to need. It falls by the number of steps, not by a
        running sum, so that many steps at once give the same value."""
        if self._decoded < 1:
            return self._ratio
        fallen = (self._initial - self._least) / self.DECAY_STEPS * self._decoded
        return max(self._ratio - fallen, self._least)

    def would_notice(self) -> bool:
        """True if waiting requests are considered."""
        return not self._full

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return prompts, if there are any to run; otherwise all residents decode."""
        prompts = self._prefill()
        if not prompts or not self._mixes:
            return prompts or self._decode(preempted)
        decoding = [request for request in self.residents if request.decoding]
        if missing_blocks(self.kv, decoding, 1) > self.kv.free:
            return prompts
        return prompts | self.decode_each(decoding)

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver tokens; the ratio falls with each step that decoded, and a batch that has shrunk is not full."""
        step = self._under_way
        assert step is not None
        progress = super().complete(repetitions)
        if step.chunks:
            self.polls.restart()
        else:
            self._decoded += repetitions
            self.polls.stepped(repetitions)
        if progress.finished:
            self._full = False
        if not self.has_work:
            self._begin_anew()
        return progress

    def release(self, request: Request) -> None:
        """Free blocks that were held: a waiting request may find room now."""
        super().release(request)
        self._full = False

    def abort(self, request: Request) -> bool:
        """See `Scheduler.abort`; a batch that has shrunk is not full."""
        gone = super().abort(request)
        if not self.has_work:
            self._begin_anew()
        return gone

    def _expel(self, request: Request) -> bool:
        was_resident = super()._expel(request)
        if was_resident:
            self._full = False
        return was_resident

    def _begin_anew(self) -> None:
        self._ratio, self._decoded = self._initial, 0
        self.polls.restart()
        self._full = False  # seats or memory were short, and the batch has not shrunk since

    def _to_come(self, request: Request) -> int:
        """Tokens that a request may still deliver."""
        return max(self._most_output(request) - request.emitted, 0)

    def _most_output(self, request: Request) -> int:
        """Output tokens that the engine has to expect of a request."""
        return min(self._max_new_tokens, request.max_tokens, self.max_model_len - request.prompt_tokens)

    def _prefill(self) -> ScheduledTokens:
        budget = self._chunks.budget(self.residents)
        if self._mixes:
            budget -= sum(request.decoding for request in self.residents)
        least = budget - self._max_prefill_tokens
        scheduled: ScheduledTokens = {}
        for request in self.residents:
            if not request.decoding:
                scheduled[request] = min(request.known_tokens - request.computed, budget)
                budget -= scheduled[request]
        if not self._full and self.polls.due(any(request.decoding for request in self.residents)):
            if (places := self.adapter_places()) is None:
                self._admit(scheduled, budget, max(least, 0))
            else:
                queue = AdmissibleQueue(self.waiting, places)
                self.waiting = queue  # type: ignore[assignment]
                self._admit(scheduled, budget, max(least, 0))
                self.waiting = queue.restore()  # type: ignore[assignment]
        return scheduled

    def _spare(self) -> float:
        """Tokens that have room beside the estimated needs of all residents."""
        reserved = sum(
            min(self._to_come(request), self.CLIP_MAX_NEW_TOKENS) * (self.new_token_ratio if request.decoding else 1)
            for request in self.residents
        )
        return self.kv.free * self.kv.block_size - reserved

    def _admit(self, scheduled: ScheduledTokens, budget: int, least: int) -> None:
        """Add prompts of newcomers, as long as more than `least` of the budget is left."""
        spare, page = self._spare(), self.kv.block_size
        while self.waiting and budget > least:
            request = self.waiting[0]
            if self.num_running >= self.max_num_seqs:
                self._full = True
                break
            hit = self.lookup(request)
            new_tokens = request.known_tokens - hit.blocks * page
            answer_tokens = min(self._to_come(request), self.CLIP_MAX_NEW_TOKENS)
            if not self._has_room(request, hit, new_tokens + answer_tokens, spare):
                self._full = True
                break
            tokens = new_tokens - hit.copied_tokens
            if tokens > budget:
                tokens = budget // self._page * self._page if self.chunked_prefill else 0
                # No prompt follows it.
                budget = tokens
            if not tokens:
                break
            self.waiting.popleft()
            free = self.kv.free
            self.seat(request, request.known_tokens, hit)
            scheduled[request] = tokens
            budget -= tokens
            spare -= (free - self.kv.free) * page + answer_tokens

    def steady_steps(self, decoding: list[Request]) -> int:
        """Limit the steps to the next poll, if requests wait that were not considered."""
        steps = super().steady_steps(decoding)
        return min(steps, self.polls.steps_left) if self.waiting and not self._full else steps

    def _has_room(self, request: Request, hit: Hit, needed: int, spare: float) -> bool:
        """True if a newcomer fits by the estimate; a newcomer that is alone needs no estimate."""
        # Pages of a hit that no request holds are no longer free.
        if self.kv.blocks_for(request.known_tokens) - hit.blocks + hit.idle > self.kv.free:
            return False
        return needed + hit.idle * self.kv.block_size < spare or not self.num_running

    def _decode(self, preempted: list[Request]) -> ScheduledTokens:
        decoding = list(self.residents)
        if self._missing(decoding) > self.kv.free:
            decoding = self._retract(decoding, preempted)
        if self._missing(decoding) > self.kv.free:
            return {}
        if self.drafts is None:
            return self.decode_each(decoding)
        widths = {request: self.width(request) for request in decoding}
        for request, width in widths.items():
            self.allocate(request, request.computed + width)
        return widths

    def _missing(self, decoding: list[Request]) -> int:
        """Return the blocks that a step of these requests needs beyond those they have."""
        if self.drafts is None:
            return missing_blocks(self.kv, decoding, 1)
        return sum(missing_blocks(self.kv, [request], self.width(request)) for request in decoding)

    def _retract(self, decoding: list[Request], preempted: list[Request]) -> list[Request]:
        """Retract requests until the others have room for some steps; return the others."""
        order = sorted(decoding, key=lambda request: (request.emitted, -request.prompt_tokens), reverse=True)
        while len(order) > 1 and (
            not preempted or self.kv.free * self.kv.block_size < len(order) * self.RETRACT_DECODE_STEPS
        ):
            victim = order.pop()
            self.preempt(victim)
            self.waiting.remove(victim)
            self.waiting.append(victim)
            preempted.append(victim)
        delivered = sum(request.emitted + self.RETRACT_DECODE_STEPS for request in order)
        most = sum(map(self._most_output, order))
        # This step does not count.
        self._ratio, self._decoded = min(delivered / most, 1.0) if most else 1.0, -1
        self._full = False
        return [request for request in decoding if request in self.residents]

    def _lose_residents(self) -> list[Request]:
        self._begin_anew()
        return super()._lose_residents()
