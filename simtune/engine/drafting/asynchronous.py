"""Decoding with drafts under asynchronous scheduling: every step is scheduled before the one before it is known.

The scheduler takes all drafts in flight for accepted until it knows better. So a member that had d drafts rejected in
the step before is d tokens `behind` the scheduler's view: it gets blocks for that many more, and if max_model_len
leaves less room than its drafts need, it verifies fewer, perhaps not even the token that is certain: then it rests for
a step, after which all is known. A member whose answer was completed by accepted drafts is still in the next step, and
its tokens there are discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

import numpy as np

from simtune.arrays import Ints
from simtune.engine.drafting.drafting_batch import DraftingBatch
from simtune.engine.drafting.rounds import Course, PlannedRounds, RoundPlanner, joined
from simtune.engine.drafting.terms import DraftingTerms
from simtune.engine.request import Request
from simtune.engine.step import Step


class AsyncRoundPlanner(RoundPlanner):
    """Plans rounds each of which is scheduled as if all drafts of the one before were accepted."""

    def __init__(self, terms: DraftingTerms, block_size: int, max_model_len: int) -> None:
        super().__init__(terms, block_size, max_model_len)
        self._even = terms.steady and terms.lengths is None  # as many drafts in every round of every request

    def room(self, request: Request, behind: int) -> int:
        """Most tokens that the next step of a request may verify."""
        return self._limit - request.computed - behind

    def new_blocks(self, request: Request, width: int, behind: int) -> int:
        """New blocks of one step of `width` tokens, the first of a request since it was updated."""
        reach = min(request.computed + behind + width + self._terms.lookahead, self._max_model_len)
        return max(0, -(-reach // self._block_size) - self.held(request))

    def verifications(self, plan: PlannedRounds, age: int) -> int:
        """Number of rounds that verify drafts: only max_model_len and the budget may leave a round none."""
        if plan.widths is None or not plan.drafts:
            return super().verifications(plan, age)
        padded = plan.skips and plan.width(0) > 1
        return int(np.count_nonzero(plan.widths[:age] > 1)) - padded

    def reserved_tokens(self, request: Request, plan: PlannedRounds, age: int) -> int:
        """Tokens of whole blocks, or if cheap to compute, those with which the latest round was scheduled."""
        if age > 1 and self._even and plan.widths is None:
            tokens = plan.rows.item(0, age - 2) + 2 * (1 + plan.drafts) + self._terms.lookahead
            return min(tokens, self._max_model_len)
        return (self.held(request) + plan.blocks(age)) * self._block_size

    def _course(self, request: Request, computed: int, end: int, drafts: int, cut: int | None, behind: int) -> Course:
        if end + drafts + max(drafts, behind) < self._max_model_len:
            return super()._course(request, computed, end, drafts, cut, behind)
        number, courses = request.verifications, []
        if cut is None and drafts and computed < end and self._terms.tokens_after is not None:
            head = self._before_the_limit(request, computed, end, number, drafts, behind)
            if rounds := len(head.before):
                courses.append(head)
                # The scheduler still counts all drafts of the last round as accepted.
                behind = head.before.item(-1) + 1 + drafts - head.final
                computed, number = head.final, number + rounds
        if computed < end:
            courses.append(self._near_the_limit(request, computed, end, number, drafts, cut, behind))
        course = joined(courses, computed)
        unverified = not isinstance(course.widths, int) and len(course.widths) > 0 and course.widths[0] == 1
        return course._replace(skips=int(drafts > 0 and unverified))

    def _near_the_limit(
        self, request: Request, computed: int, end: int, number: int, drafts: int, cut: int | None, behind: int
    ) -> Course:
        """Return the rounds until `end` in which max_model_len may leave no room for some drafts, or for any token."""
        rounds: list[tuple[int, int]] = []  # tokens computed before, tokens verified
        while computed < end:
            width = max(0, min(1 + drafts, self._limit - computed - behind))
            if cut is not None and not rounds:
                width = min(width, cut)
            rounds.append((computed, width))
            gained = 1 + self._accepted(request, number, width - 1) if width else 0
            behind = width - gained
            computed += gained
            # A round without drafts is no verification, and draws nothing.
            number += width > 1
        before, widths = np.array(rounds).T
        return Course(before, widths, computed)

    def _reach(self, before: Ints, widths: Ints | int, behind: int, first: Ints | int) -> Ints:
        """Return the reach as if all drafts of the round before were accepted."""
        reach = before + widths
        reach[1:] = reach[:-1] + (widths if isinstance(widths, int) else widths[1:])
        reach[first] = before[first] + (widths if isinstance(widths, int) else widths[first]) + behind
        return reach


class DiscardedSteps(dict[Request, tuple[int, int]]):
    """Members whose answer is complete, and (tokens, new blocks) of the step that each is still in."""

    __slots__ = ("blocks", "context", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.context = self.blocks = 0
        """Totals: tokens of the step, tokens computed before it, its new blocks."""

    def put(self, request: Request, tokens: int, blocks: int) -> None:
        """Add a step, or replace its tokens and blocks."""
        if request in self:
            self.remove(request)
        self[request] = tokens, blocks
        self.tokens += tokens
        self.context += request.computed
        self.blocks += blocks

    def remove(self, request: Request) -> None:
        """Remove a step."""
        tokens, blocks = self.pop(request)
        self.tokens -= tokens
        self.context -= request.computed
        self.blocks -= blocks


class AsyncDraftingBatch(DraftingBatch):
    """A `DraftingBatch` whose steps are scheduled one ahead."""

    def __init__(self, block_size: int, terms: DraftingTerms, max_model_len: int) -> None:
        super().__init__(block_size, terms, max_model_len)
        self._planner: AsyncRoundPlanner = AsyncRoundPlanner(terms, block_size, max_model_len)
        self._discarded = DiscardedSteps()
        self._ended: list[Request] = []  # in the latest step, and perhaps in the next one too
        self._rejected: dict[Request, tuple[int, int]] = {}  # (step, drafts rejected in the one before)
        self._resting: dict[Request, None] = {}  # members with rounds in which they rest

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the members in order of joining. Costs O(members log members)."""
        return iter(sorted([*self._members, *self._discarded], key=attrgetter("admission")))

    @property
    def discarded(self) -> Collection[Request]:
        """Members whose answer is complete, but which are in the next step."""
        return self._discarded

    @property
    def rests(self) -> bool:
        """True if some members rest in the next step."""
        return bool(self._resting) and any(self.width_of(member) == 0 for member in self._resting)

    def newest(self) -> Request:
        """Return the member that joined last."""
        return max(self, key=attrgetter("admission"))

    # --- the next steps -------------------------------------------------------------------------------------------

    def totals(self) -> tuple[int, int, int]:
        """Return (tokens the next step computes, tokens its members have computed before, new blocks it needs)."""
        totals, discarded = self._calendar.totals(), self._discarded
        if not discarded:
            return totals
        tokens, context, blocks = totals
        return tokens + discarded.tokens, context + discarded.context, blocks + discarded.blocks

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member."""
        return self._discarded[member][0] if member in self._discarded else super().width_of(member)

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""
        return self._discarded[member][1] if member in self._discarded else super().blocks_of(member)

    def cut(self, member: Request, tokens: int) -> None:
        """Limit the tokens that the next step computes for a member to `tokens`."""
        if member in self._discarded:
            self._discard(member, tokens)
        else:
            super().cut(member, tokens)

    def next_step(self, free: int, budget: int) -> tuple[Step, int] | None:
        """See `Batch.next_step`: some tokens of the first repetition may be discarded."""
        # Policies decide one by one then, since a resting member takes no tokens of the budget.
        if self._resting and self.rests:
            return None
        discarded = self._discarded
        if not discarded:
            return super().next_step(free, budget)
        tokens, context, blocks = self.totals()
        if tokens > budget or blocks > free:
            return None
        step = Step(self.count, context + tokens, (), (), only_decodes=True)
        step.draft_tokens, step.draft_depth = tokens - self.count, self.depth
        step.discarded, step.discarded_tokens = len(discarded), discarded.tokens
        # The first repetition has the discarded tokens; how often it repeats is decided by the members alone.
        if self._members:
            going_on = super().next_step(free - discarded.blocks, budget - discarded.tokens)
            assert going_on is not None
            step.repeat, step.contexts = going_on[0].repeat, going_on[0].contexts
        return step, blocks

    def steps_to_completion(self) -> int:
        """Steps until the first member is complete, or the drafts of some change."""
        if self._discarded and not (self._steady and self._members):
            return 1
        return super().steps_to_completion()

    def steps_that_fit(self, free: int, limit: int) -> int:
        """See `Batch.steps_that_fit`."""
        return 1 if self._resting else super().steps_that_fit(free, limit)

    # --- members --------------------------------------------------------------------------------------------------

    def join(self, request: Request, rejected: int = 0) -> None:
        """Add a request, `rejected` of whose drafts were rejected in the step before."""
        if rejected:
            self._rejected[request] = self.steps, rejected
        super().join(request)

    def rejoin(self, request: Request, past: int = -1) -> None:
        """Add, at its old place, a request that had no part in a step: all is known of it."""
        self._take_in(request)
        self._past[request] = past

    def leave(self, member: Request) -> None:
        """Remove a member and update its fields."""
        if member in self._discarded:
            self._discarded.remove(member)
            self.count -= 1
            member.decoding = False
        else:
            super().leave(member)
        self._rejected.pop(member, None)

    def held_by(self, member: Request) -> int:
        """KV blocks a member holds."""
        return self._planner.held(member) if member in self._discarded else super().held_by(member)

    def emitted_by(self, member: Request) -> int:
        """Output tokens a member has delivered so far."""
        return member.emitted if member in self._discarded else super().emitted_by(member)

    # --- the step is over -----------------------------------------------------------------------------------------

    def end_discarded(self) -> list[Request]:
        """End the step of the discarded members; remove and return them."""
        ended = list(self._discarded)
        for request in ended:
            blocks = self._planner.held(request) + self._discarded[request][1]
            request.reserved_tokens = blocks * self._block_size
            self.leave(request)
        return ended

    def draft(self, requests: int) -> Sequence[Request]:
        """Run the drafter after a step of `requests` requests; return the members whose next step is discarded."""
        super().draft(requests)
        if not self._ended:
            return ()
        for request in self._ended:
            room = self._planner.room(request, self._behind(request))
            if room > 0:
                request.decoding = True
                self.count += 1
                self._discard(request, min(1 + self._counts.of(request), room))
            else:
                del self._rejected[request]
        self._ended.clear()
        return list(self._discarded)

    def _discard(self, request: Request, tokens: int) -> None:
        self._discarded.put(request, tokens, self._planner.new_blocks(request, tokens, self._behind(request)))

    def _behind(self, request: Request) -> int:
        step, rejected = self._rejected.get(request, (-1, 0))
        return rejected if step == self.steps else 0

    def _enter(self, request: Request, plan: PlannedRounds) -> None:
        super()._enter(request, plan)
        if plan.widths is not None and not plan.widths.all():
            self._resting[request] = None

    def _bring_up(self, request: Request, plan: PlannedRounds) -> None:
        age = self.steps - plan.begin
        self._resting.pop(request, None)
        super()._bring_up(request, plan)
        if not age:
            return
        last = plan.rows.item(0, age - 1)
        goes_on = age < plan.rounds
        if goes_on or plan.end - last > 1:
            # The scheduler assumes that all its drafts were accepted, until the next step.
            self._rejected[request] = self.steps, last + plan.width(age - 1) - request.computed
            if not goes_on:
                self._ended.append(request)
