"""Scheduler of TensorRT-LLM: first the requests that have room in memory, then those that have tokens in the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack

from simtune.engine.block_reuse import ReusedBlocks
from simtune.engine.policies.listed import ScheduledTokens, StallFree
from simtune.engine.policy_traits import Feature, Settings
from simtune.engine.prompt_balance import BATCHING_WAIT_ITERS, TIMEOUT_ITERS, PromptBalance, RankLoad
from simtune.engine.request import Request
from simtune.engine.step import Progress

CapacityPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]
ChunkingPolicy = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]


class TensorRtLlmScheduler(StallFree):
    """All requests that decode run in each step; prompts share the rest of the budget in chunks of whole KV blocks.

    *Capacity.* GUARANTEED_NO_EVICT admits a request only if the blocks for its longest possible answer are free besides
    those of all others: the `max_tokens` that its client allows, up to `max_new_tokens` and max_model_len.
    MAX_UTILIZATION asks for the blocks of the known tokens, and pauses the request that was started last when a decode
    finds no block; it is computed again. Requests are tried in order, and the first one without room ends it. A step
    that pauses a request starts none.

    *Tokens.* Without chunked prefill whole prompts follow one another until one does not fit the budget; longer prompts
    than the budget are refused (unless requests may be paused: then the budget must fit the longest request).
    FIRST_COME_FIRST_SERVED gives each prompt what it needs, or the remaining budget, rounded down to blocks unless it
    is the rest of the prompt; EQUAL_PROGRESS gives all prompts one block after another in turn. A prompt without tokens
    has not been started, and has no blocks.

    *Waiting.* While others decode, prompts are held back for up to `batch_wait_timeout_iters` steps as long as the step
    would have fewer tokens with them than `batch_wait_max_tokens_ratio` of the budget.

    *Balance.* Ranks with data-parallel attention hold prompts back for one another with `attention_dp_enable_balance`
    (`simtune.engine.prompt_balance`), and do not wait for tokens as above.

    *Block reuse.* With `prefix_caching` a newcomer that is started holds the stored blocks of its prompt
    (`simtune.engine.block_reuse`). Room and the token budget are asked for whole prompts all the same; a step then
    computes the rest, and the budget that is left over stays unused. A newcomer waits for another prompt in prefill
    that will store the first block it lacks; those behind it do not. Prompts are stored when they are complete.

    *Drafts.* They count in the budget, and a request has room for them beyond its longest answer.

    *Adapters.* A request whose LoRA adapter finds no slot is passed over, as in vLLM (`simtune.engine.adapters`); its
    capacity scheduler does the same with pages of adapters, which is assumed and was not read.

    Under the overlap scheduler (`async_scheduling`) a newcomer waits for one more dispatched step.

    Facts: capacityScheduler.cpp, microBatchScheduler.cpp, kvCacheManager.cpp and py_executor.py of TensorRT-LLM 1.x.
    Left out: blocks for a second step that MAX_UTILIZATION asks for under the overlap scheduler, and encoders.
    """

    offers = frozenset({"async_scheduling", "lora", "prefix_caching", "speculation"})
    lacks: ClassVar[Mapping[Feature, str]] = {"swap": "TensorRT-LLM computes paused requests again"}

    def __init__(
        self,
        *,
        capacity_scheduler_policy: CapacityPolicy = "GUARANTEED_NO_EVICT",
        context_chunking_policy: ChunkingPolicy = "FIRST_COME_FIRST_SERVED",
        max_new_tokens: int | None = None,
        batch_wait_timeout_iters: int = 0,
        batch_wait_max_tokens_ratio: float = 0.0,
        attention_dp_enable_balance: bool = False,
        attention_dp_timeout_iters: int = TIMEOUT_ITERS,
        attention_dp_batching_wait_iters: int = BATCHING_WAIT_ITERS,
        **settings: Unpack[Settings],
    ) -> None:
        """Make a scheduler. Raises ValueError for unknown policies and negative numbers of steps."""
        self.recomputes = self.recomputes_with({"capacity_scheduler_policy": capacity_scheduler_policy})
        super().__init__(**settings)
        if capacity_scheduler_policy not in ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"):
            raise ValueError(
                "capacity_scheduler_policy must be GUARANTEED_NO_EVICT or MAX_UTILIZATION, "
                f"not {capacity_scheduler_policy}"
            )
        if context_chunking_policy not in ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"):
            raise ValueError(
                "context_chunking_policy must be FIRST_COME_FIRST_SERVED or EQUAL_PROGRESS, "
                f"not {context_chunking_policy}"
            )
        self._evicts = capacity_scheduler_policy == "MAX_UTILIZATION"
        self._in_turn = context_chunking_policy == "EQUAL_PROGRESS"
        # A budget below a block counts as one.
        self._unit = min(self.kv.block_size, self.max_num_batched_tokens)
        if max_new_tokens is not None:
            self.longest_answer = max_new_tokens
        self._wait_steps, self._wait_tokens = batch_wait_timeout_iters, batch_wait_max_tokens_ratio
        self._waited = 0  # steps for which prompts were held back
        self._holding = False  # in the step under way, for more tokens
        self._balancing = False  # in the step under way, for prompts of other ranks
        self._balance = self.prompt_balance = PromptBalance(
            self._load, attention_dp_enable_balance, attention_dp_timeout_iters, attention_dp_batching_wait_iters
        )

    def new_cache(self, hash_block_tokens: int) -> ReusedBlocks:
        """Return an empty cache of reused blocks."""
        return ReusedBlocks(self.kv.total, self.kv.block_size, hash_block_tokens)

    def remember(self, request: Request) -> None:
        """Store a prompt that is complete, but for its last token."""
        if request.computed == request.known_tokens:
            self.kv.name(request, request.computed - 1)

    @classmethod
    def recomputes_with(cls, options: Mapping[str, Any]) -> bool:
        """True under MAX_UTILIZATION; a request admitted by GUARANTEED_NO_EVICT keeps its blocks to the end."""
        return options.get("capacity_scheduler_policy") == "MAX_UTILIZATION"

    def reservation(self, request: Request) -> int:
        """Return the tokens that the request may ever need, or its known tokens if requests may be paused."""
        if self._evicts:
            return request.known_tokens
        drafts = 0 if self.drafts is None else self.drafts.most
        most = min(self.longest_answer, request.max_tokens) + drafts
        tokens = max(request.prompt_tokens + most, request.known_tokens)
        return min(tokens, self.max_model_len)

    def serve_prompts(self, scheduled: ScheduledTokens, budget: int, admitting: bool) -> None:
        """Give tokens to prompts in prefill and to those that have room, as far as the budget lasts."""
        if not self.waiting and len(scheduled) == len(self.residents):
            self._holding = self._balancing = False
            return
        shares = self._shares(budget, admitting)
        self._balancing = self._balance.held and bool(shares)
        self._holding = self._too_few(shares, sum(scheduled.values()))
        if self._holding or self._balancing:
            return
        if shares:
            self._waited = 0
        newcomers = any(request not in self.residents for request in shares)
        for request, tokens in shares.items():
            scheduled[request] = tokens if request in self.residents else self._start(request, tokens)
        if newcomers:
            queue = [request for request in self.waiting if request not in shares]
            self.waiting.clear()
            self.waiting.extend(queue)

    def _shares(self, budget: int, admitting: bool) -> ScheduledTokens:
        """Return the tokens of prompts in prefill and of those that have room, as far as the budget lasts."""
        prompts = [request for request in self.residents if not request.decoding]
        newcomers = self._with_room() if admitting else []
        share = self._whole if not self.chunked_prefill else self._equally if self._in_turn else self._one_by_one
        return share([*prompts, *newcomers], budget)

    def _load(self) -> RankLoad:
        """Work before the next step. Prompts count as if no request had to be paused for it."""
        decodes = [request for request in self.residents if request.decoding]
        tokens = len(decodes) if self.drafts is None else sum(map(self.width, decodes))
        waits = self.waiting or len(decodes) < len(self.residents)
        has_prompts = bool(waits and self._shares(max(0, self.max_num_batched_tokens - tokens), True))
        return RankLoad(has_prompts, len(decodes), len(decodes) < self.max_num_seqs)

    def _too_few(self, given: ScheduledTokens, decodes: int) -> bool:
        """True if prompts with these few tokens are held back, for more to come, while others decode that many."""
        if not (given and decodes) or self._waited >= self._wait_steps or self._balance.in_group:
            return False
        return decodes + sum(given.values()) < self._wait_tokens * self.max_num_batched_tokens

    def steady_steps(self, decoding: list[Request]) -> int:
        """Limit the steps while prompts are held back, until they have waited long enough."""
        if self._balancing:
            return 1
        steps = super().steady_steps(decoding)
        return min(steps, self._wait_steps - self._waited) if self._holding else steps

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver tokens; prompts that are held back have waited `repetitions` steps longer."""
        if self._holding:
            self._waited += repetitions
        return super().complete(repetitions)

    def _lose_residents(self) -> list[Request]:
        self._waited, self._holding, self._balancing, self._balance.held = 0, False, False, False
        return super()._lose_residents()

    def _start(self, request: Request, share: int) -> int:
        """Give a newcomer its seat and blocks; return the tokens that are computed of its share of the step."""
        hit = self.lookup(request)
        # what it will need later is only promised, so that stored blocks are evicted no sooner than they have to be
        self.seat(request, request.known_tokens, hit)
        remaining = request.known_tokens - request.computed
        if share >= remaining or not request.computed:
            return min(share, remaining)
        size = self.kv.block_size
        return (request.computed + share) // size * size - request.computed or share

    def promised(self) -> int:
        """Return the blocks that residents may still need, beyond those they have."""
        if self._evicts:
            return 0
        kv = self.kv
        return sum(
            max(0, kv.blocks_for(self.reservation(request)) - request.reserved_tokens // kv.block_size)
            for request in self.residents
        )

    def _with_room(self) -> list[Request]:
        """Return waiting requests that have a seat and blocks after those before them."""
        if not self.waiting:
            return []
        seats, room = self.max_num_seqs - self.num_running, self.room - self.promised()
        kv = self.kv
        to_come = {kv.first_missing(r) for r in self.residents if not r.decoding} if kv.caches else set()
        admitted: list[Request] = []
        places = self.adapter_places()
        for request in self.waiting:
            if places is not None and not places.admit(request):
                continue
            if kv.caches:
                absent = kv.first_missing(request)
                if absent is not None and absent in to_come:
                    continue
                to_come.add(absent)
            room -= kv.blocks_for(self.reservation(request))
            if len(admitted) == seats or room < 0:
                break
            admitted.append(request)
            if places is not None:
                places.note(request)
        return admitted

    @staticmethod
    def _whole(prompts: list[Request], budget: int) -> ScheduledTokens:
        shares: ScheduledTokens = {}
        for request in prompts:
            tokens = request.known_tokens - request.computed
            if tokens > budget:
                break
            shares[request] = tokens
            budget -= tokens
        return shares

    def _one_by_one(self, prompts: list[Request], budget: int) -> ScheduledTokens:
        unit, shares = self._unit, ScheduledTokens()
        for request in prompts:
            remaining = request.known_tokens - request.computed
            tokens = remaining if remaining <= budget else budget // unit * unit
            if tokens:
                shares[request] = tokens
                budget -= tokens
        return shares

    def _equally(self, prompts: list[Request], budget: int) -> ScheduledTokens:
        unit, shares = self._unit, dict.fromkeys(prompts, 0)
        more = True
        while more and budget:
            more = False
            for request in prompts:
                tokens = min(unit, request.known_tokens - request.computed - shares[request])
                if 0 < tokens <= budget:
                    shares[request] += tokens
                    budget -= tokens
                    more = True
        return {request: tokens for request, tokens in shares.items() if tokens}
