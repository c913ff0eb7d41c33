"""Stall-free batching in another order than that of arrival."""

from __future__ import annotations

from bisect import bisect_left

from simtune.engine.policies.listed import ScheduledTokens, StallFree
from simtune.engine.request import Request


class ShortestPredictedFirst(StallFree):
    """Shortest job first by `Request.predicted_tokens`, not preemptive except for want of memory.

    The policy is as good as the predictions, which are inputs; it never learns how wrong they were.
    """

    reads = frozenset({"predicted_tokens"})

    def key(self, request: Request) -> int:
        """Return the predicted number of output tokens."""
        return request.predicted_tokens


class EarliestDeadlineFirst(StallFree):
    """Prompts in the order of `Request.deadline`: between two chunks, an urgent prompt overtakes one in prefill."""

    reads = frozenset({"deadline"})

    def key(self, request: Request) -> float:
        """Return the request's deadline."""
        return request.deadline


class DualQueue(StallFree):
    """Short and long prompts in separate queues, so that a long one never delays a short one.

    Short prompts (at most SHORT_TOKENS) have a claim to half of the token budget that decodes leave, long ones to the
    rest; the unused part of one queue goes to the other. Within a queue, first come, first served.
    """

    SHORT_TOKENS = 1024

    def key(self, request: Request) -> bool:
        """Return the request's queue: True if its prompt is long."""
        return request.prompt_tokens > self.SHORT_TOKENS

    def serve_prompts(self, scheduled: ScheduledTokens, budget: int, admitting: bool) -> None:
        """Give half of the budget to each queue; the unused part of one goes to the other."""
        claim = budget - budget // 2
        budget -= claim - self._serve(False, scheduled, claim, admitting)
        budget = self._serve(True, scheduled, budget, admitting)
        self._serve(False, scheduled, budget, admitting)

    def _serve(self, long: bool, scheduled: ScheduledTokens, budget: int, admitting: bool) -> int:
        """Give one queue up to `budget` tokens more; return the unused tokens."""
        waiting, key = self.waiting, self.key
        under_way = [request for request in self.residents if not request.decoding and key(request) is long]
        while budget:
            if under_way:
                request = under_way.pop(0)
            else:
                head = bisect_left(waiting, long, key=key)
                if not admitting or head == len(waiting) or key(waiting[head]) is not long:
                    break
                request = waiting[head]
                if not self.admit(request, budget):
                    break
                del waiting[head]
            scheduled_tokens = scheduled.get(request, 0)
            if tokens := min(request.known_tokens - request.computed - scheduled_tokens, budget):
                scheduled[request] = scheduled_tokens + tokens
                budget -= tokens
        return budget
