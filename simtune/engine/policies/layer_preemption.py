"""Priorities that take effect before the end of a long step."""

from __future__ import annotations

from typing import Unpack

from simtune.engine.policies.listed import ScheduledTokens, StallFree
from simtune.engine.policy_traits import Settings
from simtune.engine.request import Request
from simtune.engine.step import NO_PROGRESS, Progress, Step


class PriorityLayers(StallFree):
    """Priorities, with preemption at layer boundaries.

    A step that computes prompts is given out as PARTS parts of equal cost, each a run of layers (`Step.part`); results
    appear only after the last. Between two parts, waiting requests of a priority above that of all requests in the step
    may be admitted, if a seat and memory are free: the step halts, their prompts run in separate steps, and then it
    continues. Steps that only decode are short and are not cut.
    """

    PARTS = 8

    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(**settings)
        self._halted: ScheduledTokens = {}  # the step of which some parts are still to run
        self._done = 0  # parts of it that have run

    def key(self, request: Request) -> int:
        """Return the request's priority."""
        return request.priority

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return a new step; or urgent prompts, or else the rest of the halted step."""
        if not self._halted:
            self._done = 0
            return super().choose(preempted)
        if urgent := self._urgent():
            return urgent
        scheduled, self._halted = self._halted, {}
        return scheduled

    def _urgent(self) -> ScheduledTokens:
        """Return the prompts that may run before the halted step continues."""
        key, halted, waiting = self.key, self._halted, self.waiting
        bar = min(map(key, halted))
        scheduled: ScheduledTokens = {}
        budget = self.max_num_batched_tokens
        under_way = [r for r in self.residents if not r.decoding and r not in halted and key(r) < bar]
        while budget:
            if under_way:
                request = under_way.pop(0)
            elif waiting and key(waiting[0]) < bar and self.admit(waiting[0], budget):
                request = waiting.popleft()
            else:
                break
            scheduled[request] = min(request.known_tokens - request.computed, budget)
            budget -= scheduled[request]
        return scheduled

    def _step(self, preempted: list[Request]) -> Step:
        step = super()._step(preempted)
        if self._halted or not (step.chunks or self._done):
            return step
        # also the rest of a halted step, even if its prompts have left
        step.part, step.repeat = (self._done, self.PARTS), 1
        return step

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver nothing after a part that is not the last one; the step may halt after it."""
        step = self._under_way
        if step is None or step.part[0] + 1 == step.part[1]:
            return super().complete(repetitions)
        assert repetitions == 1
        self._under_way, self._scheduled, self._halted = None, {}, self._scheduled
        self._done += 1
        return NO_PROGRESS

    def _expel(self, request: Request) -> bool:
        self._halted.pop(request, None)
        return super()._expel(request)

    def _lose_residents(self) -> list[Request]:
        self._halted = {}
        return super()._lose_residents()
