"""Stall-free batching in another order than that of arrival."""

from __future__ import annotations

from bisect import bisect_left

from simtune.engine.policies.listed import ScheduledTokens, StallFree
from simtune.engine.request import Request


class ShortestPredictedFirst(StallFree):
    """Shortest job first by `Request.predicted_tokens`, not preemptive except for want of memory.

    The policy is as good as the predictions, which come from outside; it never learns how wrong they were.
    """

    reads = frozenset({"predicted_tokens"})

    def key(self, request: Request) -> int:
        """How many tokens it is predicted to emit."""
        return request.predicted_tokens


class EarliestDeadlineFirst(StallFree):
    """Prompts in the order of `Request.deadline`: between two chunks, an urgent one overtakes one under way."""

    reads = frozenset({"deadline"})

    def key(self, request: Request) -> float:
        """Its deadline."""
        return request.deadline


class DualQueue(StallFree):
    """Short and long prompts in queues of their own, so that a long one never stands before a short one.

    Short prompts (at most SHORT_TOKENS) have a claim to half of what those that decode leave of the token budget, long
    ones to the rest; what one queue does not use goes to the other. Within a queue, first come, first served.
    """

    SHORT_TOKENS = 1024

    def key(self, request: Request) -> bool:
        """Which queue it belongs to: whether its prompt is long."""
        return request.prompt_tokens > self.SHORT_TOKENS

    def serve_prompts(self, scheduled: ScheduledTokens, budget: int, admitting: bool) -> None:
        """Half of the budget is claimed by each queue; what one leaves goes to the other."""
        claim = budget - budget // 2
        budget -= claim - self._serve(False, scheduled, claim, admitting)
        budget = self._serve(True, scheduled, budget, admitting)
        self._serve(False, scheduled, budget, admitting)

    def _serve(self, long: bool, scheduled: ScheduledTokens, budget: int, admitting: bool) -> int:
        """Give one queue up to `budget` tokens more; what it leaves."""
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
            given = scheduled.get(request, 0)
            if tokens := min(request.known_tokens - request.computed - given, budget):
                scheduled[request] = given + tokens
                budget -= tokens
        return budget
