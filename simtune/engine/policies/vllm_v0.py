"""Scheduler of vLLM in 2023 (V0, releases 0.1 to 0.2): prompts alone in a step, then all residents decode."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import ClassVar, Literal, Unpack

from simtune.engine.policies.listed import ListScheduler, ScheduledTokens, missing_blocks
from simtune.engine.policy_traits import Feature, Settings
from simtune.engine.request import Request
from simtune.engine.step import Step

arrival = attrgetter("id")


class VllmV0(ListScheduler):
    """Whole prompts first, in a separate step; if none can be admitted, all residents decode.

    Waiting requests are admitted, in order, while there are seats, their prompts fit the token budget, each counting as
    long as the longest of the step (the engine pads them), and their blocks leave the watermark free. To decode, a
    resident asks for one free block whether it needs one or not; if there is none, the resident that arrived last is
    preempted, finally the one that asks (not one that is alone and has room: the engine would deadlock). With recompute
    it waits before all others. With swap its keys and values stay in host memory; as long as any request is there, no
    prompt is admitted, and in a step without preemptions those that arrived first come back while seats and watermark
    allow.

    Facts: vllm/core/scheduler.py and block_manager.py of release 0.2. Its limit on the padding of prompts
    (`max_paddings`) is left out.
    """

    offers = frozenset({"swap", "watermark"})
    lacks: ClassVar[Mapping[Feature, str]] = {
        "prefix_caching": "vLLM 0.2 had none",
        "speculation": "vLLM 0.2 had none",
    }
    cuts_prompts = "never"
    first_come = True

    def __init__(self, *, preemption: Literal["recompute", "swap"] = "recompute", **settings: Unpack[Settings]) -> None:
        """Make a scheduler. Raises ValueError for settings with which an admitted request could wait forever."""
        settings["chunked_prefill"] = False
        super().__init__(preemption=preemption, **settings)

    def would_notice(self) -> bool:
        """True if a seat is free, and no request is in host memory."""
        return self.num_running < self.max_num_seqs and not self._swapped()

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return prompts, if any can be admitted; otherwise all residents decode."""
        scheduled = {} if self._swapped() else self._admit()
        if scheduled:
            return scheduled
        decoding = self._decode(preempted)
        if not preempted:
            decoding |= self._swap_in()
        return decoding

    def _swapped(self) -> bool:
        return bool(self.waiting) and self.waiting[0].computed > 0

    def _admit(self) -> ScheduledTokens:
        scheduled: ScheduledTokens = {}
        longest, waiting = 0, self.waiting
        while waiting and self.num_running < self.max_num_seqs:
            request = waiting[0]
            tokens = request.known_tokens
            longest = max(longest, tokens)
            if (len(scheduled) + 1) * longest > self.max_num_batched_tokens or self.kv.blocks_for(tokens) > self.room:
                break
            waiting.popleft()
            self.allocate(request, tokens)
            self.residents[request] = None
            scheduled[request] = tokens
        return scheduled

    def _decode(self, preempted: list[Request]) -> ScheduledTokens:
        """Return one token for each resident, in order of arrival, while there is a block for each."""
        decoding: ScheduledTokens = {}
        queue = sorted(self.residents, key=arrival)
        while queue:
            request = queue.pop(0)
            while not self.kv.free and queue:
                self._put_out(queue.pop(), preempted)
            if not self.kv.free and (decoding or missing_blocks(self.kv, [request], 1)):
                self._put_out(request, preempted)
                break
            self.allocate(request, request.computed + 1)
            decoding[request] = 1
        return decoding

    def _put_out(self, victim: Request, preempted: list[Request]) -> None:
        self.preempt(victim)
        preempted.append(victim)
        if self._swaps:
            # `preempt` has put it before all others, but requests in host memory are in order of arrival
            self.waiting.popleft()
            place = sum(1 for queued in self.waiting if queued.computed and queued.id < victim.id)
            self.waiting.insert(place, victim)

    def _swap_in(self) -> ScheduledTokens:
        back: ScheduledTokens = {}
        while self._swapped() and self.num_running < self.max_num_seqs:
            request = self.waiting[0]
            swapped_blocks = self.kv.blocks_for(request.computed)
            blocks = swapped_blocks + 1 if self.residents else self.kv.blocks_for(request.computed + 1)
            if blocks > self.room:
                break
            self.waiting.popleft()
            self.allocate(request, request.computed + 1)
            self.residents[request] = None
            request.decoding = True
            back[request] = 1
            self._moved_in += swapped_blocks
        return back

    def _step(self, preempted: list[Request]) -> Step:
        step = super()._step(preempted)
        if self._swaps:
            # Preemption and return are decided anew for every step.
            step.repeat = 1
        return step

    def _steps_that_fit(self, decoding: list[Request], limit: int) -> int:
        """Return the steps that leave one block free: each resident asks for a block, also if it does not need one."""
        return self._steps_within(self.kv.free - 1, decoding, limit)
