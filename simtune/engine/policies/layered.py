"""Prefill by groups of layers, in parallel with whole steps of requests that decode."""

from __future__ import annotations

from typing import Unpack

from simtune.engine.policies.listed import ScheduledTokens, StallFree
from simtune.engine.policy_traits import Settings
from simtune.engine.request import Request
from simtune.engine.step import Progress, Step


class LayeredPrefill(StallFree):
    """Prompts are cut by layers, not by tokens (layered prefill): first come, first served.

    A single group of prompts is in prefill at a time: the next one that waits, and those behind it as long as they are
    `group_tokens` together. It takes as many steps as it has `group_tokens`, and runs an equal share of the layers in
    each (`Step.part`), beside all requests that decode, which run through all layers (`Step.decodes_whole`). So
    weights, and the experts that a long prompt activates, are read for it once, not once for each chunk.
    """

    cuts_prompts = "never"
    first_come = True

    def __init__(self, *, group_tokens: int = 512, **settings: Unpack[Settings]) -> None:
        """Make a scheduler. Raises ValueError if `group_tokens` is below 1."""
        settings["chunked_prefill"] = False
        super().__init__(**settings)
        if group_tokens < 1:
            raise ValueError(f"group_tokens ({group_tokens}) must be at least 1")
        self.group_tokens = group_tokens
        self._group: ScheduledTokens = {}  # prompts of which some layers are still to run
        self._done, self._parts = 0, 1  # of their layers

    def serve_prompts(self, scheduled: ScheduledTokens, budget: int, admitting: bool) -> None:
        """Continue with the group in prefill, or begin the next one."""
        self._group = {request: tokens for request, tokens in self._group.items() if request in self.residents}
        if not self._group and admitting:
            self._begin_group(budget)
        scheduled |= self._group

    def _begin_group(self, budget: int) -> None:
        tokens = 0
        while self.waiting:
            request = self.waiting[0]
            hit = self.lookup(request)
            cached_tokens = hit.blocks * self.kv.block_size + hit.copied_tokens
            request_tokens = request.known_tokens - request.computed - cached_tokens
            if (tokens and tokens + request_tokens > self.group_tokens) or not self.admit(request, budget - tokens):
                break
            self.waiting.popleft()
            self._group[request] = request_tokens
            tokens += request_tokens
        self._done, self._parts = 0, max(1, -(-tokens // self.group_tokens))

    def _step(self, preempted: list[Request]) -> Step:
        step = super()._step(preempted)
        if step.chunks:
            step.part, step.decodes_whole = (self._done, self._parts), True
        return step

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver tokens to requests that decode; prompts get theirs after the last of their layers."""
        step = self._under_way
        if step is not None and step.chunks:
            self._done += 1
            if self._done < self._parts:
                self._scheduled = {request: n for request, n in self._scheduled.items() if request.decoding}
            else:
                self._group = {}
        return super().complete(repetitions)

    def _lose_residents(self) -> list[Request]:
        self._group = {}
        return super()._lose_residents()
