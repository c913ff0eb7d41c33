"""TensorRT-LLM's two schedulers: who has room in memory, then who has tokens in the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from simtune.engine.policies.listed import ScheduledTokens, StallFree
from simtune.engine.request import Request
from simtune.engine.scheduler import Settings
from simtune.engine.step import Progress

CapacityPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]
ChunkingPolicy = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]


class TensorRtLlmScheduler(StallFree):
    """Everyone who decodes goes on; prompts share the rest of the token budget in chunks of whole KV blocks.

    *Capacity.* GUARANTEED_NO_EVICT lets a request in only if the blocks for its longest possible answer are free
    beside those of everybody else: the `max_tokens` that its client allows, up to `max_new_tokens` and max_model_len.
    MAX_UTILIZATION asks for the blocks of what is known, and pauses the request that was started last when a decode
    finds no block; it is computed again. Requests are asked in order, and the first one without room ends it. A step
    that pauses somebody starts nobody.

    *Tokens.* Without chunked prefill whole prompts follow one another until one does not fit the budget; longer prompts
    than the budget are refused (unless somebody may be paused: then the budget must hold the longest request).
    FIRST_COME_FIRST_SERVED gives each prompt what it needs, or what is left, rounded down to blocks unless it is the
    rest of the prompt; EQUAL_PROGRESS gives all prompts one block after another in turn. One that gets no tokens has
    not been started, and holds nothing.

    *Waiting.* While others decode, prompts are held back for up to `batch_wait_timeout_iters` steps as long as the step
    would have fewer tokens with them than `batch_wait_max_tokens_ratio` of the budget.

    Under the overlap scheduler (`async_scheduling`) a newcomer waits for one more dispatched step.

    Facts: capacityScheduler.cpp, microBatchScheduler.cpp and py_executor.py of TensorRT-LLM 1.x. Left out: blocks for a
    second step that MAX_UTILIZATION asks for under the overlap scheduler, re-use of blocks, and encoders.
    """

    offers = frozenset({"async_scheduling"})

    def __init__(
        self,
        *,
        capacity_scheduler_policy: CapacityPolicy = "GUARANTEED_NO_EVICT",
        context_chunking_policy: ChunkingPolicy = "FIRST_COME_FIRST_SERVED",
        max_new_tokens: int | None = None,
        batch_wait_timeout_iters: int = 0,
        batch_wait_max_tokens_ratio: float = 0.0,
        **settings: Unpack[Settings],
    ) -> None:
        """Raises ValueError for policies that it does not have."""
        self.recomputes = self.recomputes_with({"capacity_scheduler_policy": capacity_scheduler_policy})
        super().__init__(**settings)
        if capacity_scheduler_policy not in ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"):
            raise ValueError(f"capacity_scheduler_policy must not be {capacity_scheduler_policy}")
        if context_chunking_policy not in ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"):
            raise ValueError(f"context_chunking_policy must not be {context_chunking_policy}")
        self._evicts = capacity_scheduler_policy == "MAX_UTILIZATION"
        self._in_turn = context_chunking_policy == "EQUAL_PROGRESS"
        self._unit = min(self.kv.block_size, self.max_num_batched_tokens)  # a budget below a block counts as one
        if max_new_tokens is not None:
            self.longest_answer = max_new_tokens
        self._wait_steps, self._wait_tokens = batch_wait_timeout_iters, batch_wait_max_tokens_ratio
        self._waited = 0  # steps for which prompts were held back
        self._holding = False  # in the step under way

    @classmethod
    def recomputes_with(cls, options: Mapping[str, Any]) -> bool:
        """True under MAX_UTILIZATION; whoever is let in by GUARANTEED_NO_EVICT keeps its blocks to the end."""
        return options.get("capacity_scheduler_policy") == "MAX_UTILIZATION"

    def reservation(self, request: Request) -> int:
        """All that it may ever need, or what is known of it."""
        if self._evicts:
            return request.known_tokens
        most = min(self.longest_answer, request.max_tokens)
        asked = max(request.prompt_tokens + most, request.known_tokens)
        return min(asked, self.max_model_len)

    def serve_prompts(self, scheduled: ScheduledTokens, budget: int, admitting: bool) -> None:
        """Tokens for prompts under way and those that have room, as far as the budget goes."""
        prompts = [request for request in self.residents if not request.decoding]
        newcomers = self._with_room() if admitting else []
        share = self._whole if not self.chunked_prefill else self._equally if self._in_turn else self._one_by_one
        given = share([*prompts, *newcomers], budget)
        self._holding = self._too_few(given, len(scheduled))
        if self._holding:
            return
        if given:
            self._waited = 0
        for request, tokens in given.items():
            scheduled[request] = tokens
            if request not in self.residents:
                self.allocate(request, self.reservation(request))
                self.residents[request] = None
        if any(request in given for request in newcomers):
            rest = [request for request in self.waiting if request not in given]
            self.waiting.clear()
            self.waiting.extend(rest)

    def _too_few(self, given: ScheduledTokens, decodes: int) -> bool:
        """Whether prompts of so few tokens are held back, for more to come, while others decode."""
        if not (given and decodes) or self._waited >= self._wait_steps:
            return False
        return decodes + sum(given.values()) < self._wait_tokens * self.max_num_batched_tokens

    def steady_steps(self, decoding: list[Request]) -> int:
        """While prompts are held back, until they have waited long enough."""
        steps = super().steady_steps(decoding)
        return min(steps, self._wait_steps - self._waited) if self._holding else steps

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver tokens; prompts that are held back have waited so much longer."""
        if self._holding:
            self._waited += repetitions
        return super().complete(repetitions)

    def _lose_residents(self) -> list[Request]:
        self._waited, self._holding = 0, False
        return super()._lose_residents()

    def _with_room(self) -> list[Request]:
        """Waiting requests that find a seat and blocks beside those before them."""
        seats, room = self.max_num_seqs - self.num_running, self.room
        admitted: list[Request] = []
        for request in self.waiting:
            room -= self.kv.blocks_for(self.reservation(request))
            if len(admitted) == seats or room < 0:
                break
            admitted.append(request)
        return admitted

    @staticmethod
    def _whole(prompts: list[Request], budget: int) -> ScheduledTokens:
        given: ScheduledTokens = {}
        for request in prompts:
            tokens = request.known_tokens - request.computed
            if tokens > budget:
                break
            given[request] = tokens
            budget -= tokens
        return given

    def _one_by_one(self, prompts: list[Request], budget: int) -> ScheduledTokens:
        unit, given = self._unit, ScheduledTokens()
        for request in prompts:
            wanted = request.known_tokens - request.computed
            tokens = wanted if wanted <= budget else budget // unit * unit
            if tokens:
                given[request] = tokens
                budget -= tokens
        return given

    def _equally(self, prompts: list[Request], budget: int) -> ScheduledTokens:
        unit, given = self._unit, dict.fromkeys(prompts, 0)
        more = True
        while more and budget:
            more = False
            for request in prompts:
                tokens = min(unit, request.known_tokens - request.computed - given[request])
                if 0 < tokens <= budget:
                    given[request] += tokens
                    budget -= tokens
                    more = True
        return {request: tokens for request, tokens in given.items() if tokens}
