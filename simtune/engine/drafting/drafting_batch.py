"""Decoding with drafts: a member computes its next token and some drafts, and advances by one plus those accepted.

When a request joins, all its coming rounds are planned, and added to a calendar from which steps are read. If the
drafts of a member turn out to be others than planned, because a step is cut or the batch as a whole drafts more or
fewer, it is planned anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from simtune.arrays import Ints
from simtune.engine.batch import BatchMembers, Tally
from simtune.engine.drafting.calendar import Calendar
from simtune.engine.drafting.completions import Completions
from simtune.engine.drafting.counts import DraftCounts
from simtune.engine.drafting.rounds import PlannedRounds, RoundPlanner
from simtune.engine.drafting.terms import DraftingTerms
from simtune.engine.request import Request
from simtune.engine.step import Step


class DraftingBatch(BatchMembers[PlannedRounds]):
    """A `Batch` whose members progress at their own pace, with steps scheduled when the one before is known.

    Joining and leaving early cost O(rounds of the request), in a few array operations; steps do not depend on the
    number of members.
    """

    drafting: ClassVar[bool] = True
    longest_context: ClassVar[int] = 0

    def __init__(self, block_size: int, terms: DraftingTerms, max_model_len: int) -> None:
        super().__init__()
        self._block_size, self._terms = block_size, terms
        self._steady = terms.steady
        self._planner = RoundPlanner(terms, block_size, max_model_len)
        self._counts = DraftCounts(terms)
        self._calendar = Calendar()
        self._left_out: dict[Request, PlannedRounds] = {}  # left before this step, may rejoin unchanged
        self._completions = Completions(self._members)
        self._admissions = 0
        self._most_drafts: int | None = None  # planned for any member
        self._over = Tally()  # of rounds that are recorded
        self.steps = 0
        self.count = 0
        """Members that the next step computes, `discarded` ones included."""

    @property
    def discarded(self) -> Collection[Request]:
        """Return none: a step is scheduled when it is known which requests are complete."""
        return ()

    @property
    def rests(self) -> bool:
        """False: a request that waits for a verdict does not count as resting."""
        return False

    @property
    def depth(self) -> int:
        """Number of drafts in turn that lead to those of the next step."""
        if self._counts.depth is not None:
            return self._counts.depth
        if self._terms.stops is not None:
            return max(map(self.width_of, self._members), default=self._counts.most + 1) - 1
        if self._most_drafts is None:
            self._most_drafts = max((plan.drafts for plan in self._members.values()), default=self._counts.most)
        return self._most_drafts

    @property
    def tally(self) -> Tally:
        """Totals of verifications so far, those of present members included. Costs O(members)."""
        tally = self._over
        for plan in self._members.values():
            if age := self.steps - plan.begin:
                tally = tally.plus(plan.tally(age))
        return tally

    # --- the next steps -------------------------------------------------------------------------------------------

    def totals(self) -> tuple[int, int, int]:
        """Return (tokens the next step computes, tokens its members have computed before, new blocks it needs)."""
        return self._calendar.totals()

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member. Drafts that would not fit max_model_len are not made."""
        plan = self._members[member]
        return plan.width(self.steps - plan.begin)

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""
        plan = self._members[member]
        return plan.rows.item(1, self.steps - plan.begin)

    def cut(self, member: Request, tokens: int) -> None:
        """Limit the tokens that the next step computes for a member to `tokens`."""
        plan = self._withdraw(member)
        behind = self._behind(member)
        if plan.skips and plan.begin == self.steps and plan.width(0) > 1:
            plan = self._planner.padded(member, plan.end, plan.drafts, tokens, behind=behind)
        else:
            plan = self._planner.planned(member, plan.end, plan.drafts, cut=tokens, behind=behind)
        plan.cut = True
        self._enter(member, plan)

    def next_step(self, free: int, budget: int) -> tuple[Step, int] | None:
        """Return the step, repeated until a member is complete, drafts differ from the plan, or blocks run short; see
        `Batch.next_step`."""
        calendar, tokens = self._calendar, self._calendar.tokens
        if tokens > budget:
            return None
        repeat = self.steps_to_completion()
        # the exact search is needed only if widths differ or blocks may run short
        if calendar.ragged or not self._roomy(free, repeat):
            repeat = self.steps_that_fit(free, repeat)
        context, blocks, contexts = calendar.read(repeat)
        if blocks > free:
            return None
        step = Step(self.count, context + tokens, (), (), repeat, True)
        step.draft_tokens, step.draft_depth = tokens - self.count, self.depth
        if repeat > 1:
            step.contexts = contexts
        return step, blocks

    def contexts(self, steps: int) -> Ints:
        """Return the members' computed tokens before each of the next `steps` steps."""
        return self._calendar.contexts(steps)

    def blocks_for(self, steps: int, after: int = 0) -> int:
        """New blocks that `steps` steps need, the first of them after `after` others."""
        return self._calendar.blocks(steps, after)

    def steps_that_fit(self, free: int, limit: int) -> int:
        """Return the largest number of steps, at most `limit`, whose new blocks number at most `free` and that all
        compute as many tokens as the next one.
        """
        if limit == 1:
            return 1
        limit = self._calendar.steps_alike(limit)
        return limit if self._roomy(free, limit) else max(1, self._calendar.steps_within(free, limit))

    def steps_to_completion(self) -> int:
        """Steps until the first member is complete, or drafts otherwise than planned. For the batch and its driver
        only: no policy decides by it.
        """
        terms = self._terms
        if not self._steady and (
            (terms.stops is not None and terms.depth is None) or not self._counts.last(self._members, self.count)
        ):
            return 1
        return self._completions.first() - self.steps

    def _roomy(self, free: int, steps: int) -> bool:
        """True if enough blocks are free for `steps` steps, whatever is accepted."""
        most = steps * (1 + self._terms.max_drafts) + self._terms.lookahead
        return len(self._members) * (most // self._block_size + 1) <= free

    # --- members --------------------------------------------------------------------------------------------------

    def join(self, request: Request, rejected: int = 0) -> None:
        """Add a request whose known tokens but the newest are computed."""
        self._admissions += 1
        request.admission = self._admissions
        self._take_in(request)

    def receive(self, request: Request, *, padded: bool) -> None:
        """Add a request whose prompt was computed elsewhere; its first round has placeholder drafts or none."""
        self._admissions += 1
        request.admission = self._admissions
        self._take_in(request, self._planner.received(request, self._counts.of(request), padded, self._behind(request)))

    def rejoin(self, request: Request, past: int = -1) -> None:
        """Add, as the last, a request that left before a step and had no part in it."""
        self._admissions += 1
        request.admission = self._admissions
        self._take_in(request, self._left_out.pop(request, None))
        self._past[request] = past

    def leave(self, member: Request) -> None:
        """Remove a member and update its fields."""
        plan = self._withdraw(member)
        del self._members[member]
        self.count -= 1
        member.decoding = False
        age = self.steps - plan.begin
        if age or not plan.cut:
            self._left_out[member] = plan.rest(age)

    def emitted_by(self, member: Request) -> int:
        """Output tokens a member has delivered so far."""
        plan = self._members[member]
        return member.emitted + plan.computed(self.steps - plan.begin) - member.computed

    def held_by(self, member: Request) -> int:
        """KV blocks a member holds."""
        plan = self._members[member]
        return self._planner.held(member) + plan.blocks(self.steps - plan.begin)

    def _take_in(self, request: Request, plan: PlannedRounds | None = None) -> None:
        """Make a request a member, with the rounds of `plan` if they are still those to come."""
        request.decoding = True
        self.count += 1
        self._past.pop(request, None)
        drafts = self._counts.of(request)
        if plan is None or plan.drafts != drafts or not plan.rounds or request.computed != plan.rows[0, 0]:
            planner, end = self._planner, request.computed + request.output_tokens - request.emitted
            plan = planner.known(request, end, drafts) or planner.planned(
                request, end, drafts, behind=self._behind(request)
            )
        self._enter(request, plan)

    # --- the step is over -----------------------------------------------------------------------------------------

    def advance(self, steps: int) -> Sequence[Request]:
        """Verify `steps` times; remove and return the members that are complete, in order of joining.

        Tokens accepted beyond the end of an answer are not delivered.
        """
        now = self.steps = self.steps + steps
        self._calendar.advance(steps)
        if self._past:
            self._past.clear()
        finished = []
        for request in self._completions.until(now):
            plan = self._members.pop(request)
            self.count -= 1
            self._calendar.close(plan)
            self._most_drafts = None
            self._bring_up(request, plan)
            request.decoding = False
            finished.append(request)
        return finished

    def draft(self, requests: int) -> Sequence[Request]:
        """Run the drafter after a step of `requests` requests; return the members whose next step is discarded."""
        if self._left_out:
            self._left_out.clear()
        if not self._steady and self._counts.renew(requests, self._members):
            for member, plan in list(self._members.items()):
                drafts = self._counts.of(member)
                if drafts != plan.drafts:
                    self._withdraw(member)
                    self._enter(member, self._planner.planned(member, plan.end, drafts, behind=self._behind(member)))
        return ()

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _behind(self, request: Request) -> int:
        """Drafts of a request rejected in the step before, unknown to the scheduler."""
        return 0

    def _enter(self, request: Request, plan: PlannedRounds) -> None:
        """Make `plan` the rounds of a member from the next step on; the member keeps its place, if it has one."""
        plan.begin = self.steps
        self._members[request] = plan
        self._most_drafts = None
        self._calendar.add(plan)
        self._completions.add(self.steps + plan.rounds, request)

    def _withdraw(self, member: Request) -> PlannedRounds:
        """Remove a member's coming rounds from the calendar; it keeps its place."""
        plan = self._members[member]
        self._most_drafts = None
        self._calendar.take_out(plan, self.steps - plan.begin)
        self._bring_up(member, plan)
        return plan

    def _bring_up(self, request: Request, plan: PlannedRounds) -> None:
        """Update a request by the rounds that are over."""
        if age := self.steps - plan.begin:
            self._past[request] = plan.rows.item(0, age - 1)
            self._over = self._over.plus(self._planner.bring_up(request, plan, age))
