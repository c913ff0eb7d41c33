"""Coming rounds of a member, planned when it joins: each verifies one token and the drafts that follow it.

The number of drafts accepted in a request's n-th verification does not depend on other requests. So the tokens computed
before each round, the tokens it verifies and the blocks it needs are known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from simtune.arrays import Ints
from simtune.engine.batch import Tally
from simtune.engine.drafting.terms import DraftingTerms
from simtune.engine.request import Request


@dataclass(slots=True)
class PlannedRounds:
    """A member's rounds to come, by the number of steps since `begin`: their age."""

    drafts: int
    """Drafts of each round, as planned for the batch."""
    end: int
    """Number of computed tokens with which the answer is complete."""
    rounds: int
    rows: Ints
    """(2, rounds): tokens computed before, new blocks."""
    widths: Ints | None
    """Tokens verified in each round, if that is not always one plus `drafts`."""
    final: int
    """Computed tokens after the last round."""
    skips: int = 0
    """1 if the first round verifies no drafts, or placeholder drafts only, and counts as no verification."""
    cut: bool = False
    """True if the first round was made narrower than planned, for one step."""
    begin: int = 0
    """Number of the batch's steps before the first round."""

    def width(self, age: int) -> int:
        """Tokens verified in a round."""
        return 1 + self.drafts if self.widths is None else self.widths.item(age)

    def computed(self, age: int) -> int:
        """Computed tokens after the first `age` rounds."""
        return self.rows.item(0, age) if age < self.rounds else self.final

    def blocks(self, age: int) -> int:
        """New blocks of the first `age` rounds."""
        return int(self.rows[1, :age].sum())

    def tally(self, age: int) -> Tally:
        """Return the totals of the first `age` rounds, at least one. Beyond the end of the answer nothing is
        delivered."""
        if self.widths is None:
            verified, drafts = age, age * self.drafts
        else:
            tokens = self.widths[:age]
            verified = int(np.count_nonzero(tokens))
            drafts = int(tokens.sum()) - verified
        before, after = self.rows.item(0, 0), self.computed(age)
        return Tally(verified, drafts, after - before - verified, min(after, self.end) - before)

    def rest(self, age: int) -> PlannedRounds:
        """Return the rounds after the first `age`."""
        return replace(
            self,
            rows=self.rows[:, age:],
            widths=None if self.widths is None else self.widths[age:],
            rounds=self.rounds - age,
            skips=0 if age else self.skips,
        )


class Course(NamedTuple):
    """Consecutive rounds of a request, without their blocks."""

    before: Ints
    """Tokens computed before each round."""
    widths: Ints | int
    """Tokens verified in each round, or in every one."""
    final: int
    """Tokens computed after the last round."""
    skips: int = 0
    """See `PlannedRounds`."""


class RoundPlanner:
    """Plans rounds if each step is scheduled when the one before is known."""

    def __init__(self, terms: DraftingTerms, block_size: int, max_model_len: int) -> None:
        self._terms = terms
        self._block_size = block_size
        self._max_model_len = max_model_len
        # An answer's last token is never computed.
        self._limit = max_model_len - 1
        self._laid_out = terms.laid_out if terms.stops is None else None

    def planned(
        self, request: Request, end: int, drafts: int, *, cut: int | None = None, behind: int = 0
    ) -> PlannedRounds:
        """Return the rounds of a request until it has computed `end` tokens, with `drafts` drafts in each.

        With `cut`, at most `cut` tokens in the first round. `behind`: drafts of the step before that were rejected,
        which a scheduler that is one step ahead does not know.
        """
        course = self._course(request, request.computed, end, drafts, cut, behind)
        return self._with_blocks(request, course, end, drafts, behind)

    def padded(self, request: Request, end: int, drafts: int, width: int, *, behind: int = 0) -> PlannedRounds:
        """Return the same rounds with a first round of `width` tokens, all but one of them placeholder drafts."""
        computed = request.computed
        remaining = self._course(request, computed + 1, end, drafts, None, behind=width - 1)
        course = joined([Course(np.array([computed]), width, computed + 1), remaining])
        return self._with_blocks(request, course._replace(skips=1), end, drafts, behind)

    def received(self, request: Request, drafts: int, padded: bool, behind: int) -> PlannedRounds:
        """Return the rounds of a request that has no drafts yet: the first has placeholder drafts if `padded`."""
        end = request.computed + request.output_tokens - request.emitted
        if padded:
            return self.padded(request, end, drafts, 1 + self._terms.max_drafts, behind=behind)
        plan = self.planned(request, end, drafts, cut=1, behind=behind)
        plan.cut = True
        return plan

    def known(self, request: Request, end: int, drafts: int) -> PlannedRounds | None:
        """Return the result of `planned` if the rounds of many requests, this one among them, were laid out at once."""
        if self._laid_out is None or request.verifications or drafts != self._terms.max_drafts or not drafts:
            return None
        computed, reserved = request.computed, request.reserved_tokens
        held_tokens = computed if computed > reserved else reserved
        if computed != request.prompt_tokens or held_tokens != computed + self._terms.lookahead or computed == end:
            return None
        # Near the limit rounds are cut, request by request.
        if end + 2 * drafts >= self._max_model_len:
            return None
        laid_out = self._laid_out(request, self.lay_out)
        if laid_out is None:
            return None
        rows, final = laid_out
        return PlannedRounds(drafts, end, rows.shape[1], rows, None, final)

    def lay_out(self, before: Ints, prompts: Ints, begins: Sequence[int]) -> Ints:
        """Return rows of the rounds of many requests that follow their prompts and make all drafts, see `LayOut`."""
        lookahead, size, first = self._terms.lookahead, self._block_size, np.array(begins[:-1])
        rows = np.empty((2, len(before)), dtype=np.int64)
        rows[0] = before
        reach = self._reach(before, 1 + self._terms.max_drafts, 0, first)
        reach = np.minimum(reach + lookahead, self._max_model_len)
        reach += size - 1
        reach //= size
        rows[1, 1:] = np.diff(reach)
        rows[1, first] = reach[first] + -(prompts + lookahead) // size
        # Requests of a group share the array: a write would change the rounds of all.
        rows.flags.writeable = False
        return rows

    def held(self, request: Request) -> int:
        """Blocks of a request before its first round."""
        return -(-max(request.computed, request.reserved_tokens) // self._block_size)

    def verifications(self, plan: PlannedRounds, age: int) -> int:
        """Number of the first `age` rounds that count as verifications of drafts: a round in which the drafter made
        none does, a round whose drafts were cut does not."""
        return age - plan.skips if plan.drafts else 0

    def bring_up(self, request: Request, plan: PlannedRounds, age: int) -> Tally:
        """Update a request by the first `age` rounds of its plan, and return their totals."""
        tally = plan.tally(age)
        request.reserved_tokens = max(request.reserved_tokens, self.reserved_tokens(request, plan, age))
        request.verifications += self.verifications(plan, age)
        request.computed += tally.rounds + tally.accepted
        request.emitted += tally.tokens
        return tally

    def reserved_tokens(self, request: Request, plan: PlannedRounds, age: int) -> int:
        """Tokens for which a request has blocks after the first `age` rounds, at least one."""
        if plan.widths is None:
            reach = plan.rows.item(0, age - 1) + 1 + plan.drafts
        else:
            reach = int((plan.rows[0, :age] + plan.widths[:age]).max())
        return min(reach + self._terms.lookahead, self._max_model_len)

    def _course(self, request: Request, computed: int, end: int, drafts: int, cut: int | None, behind: int) -> Course:
        """Return the rounds of a request from `computed` tokens to `end`; the other arguments are those of
        `planned`."""
        number, skips, courses = request.verifications, 0, []
        if cut is not None:
            made_drafts = self._made(request, number, drafts)
            width = min(1 + made_drafts, cut, self._limit - computed)
            skips = int(width == 1 and made_drafts > 0)
            before, computed = computed, computed + 1 + self._accepted(request, number, width - 1)
            courses.append(Course(np.array([before]), width, computed))
            # A round whose drafts were cut draws nothing, so the next one has its draw.
            number += 1 - skips
        if computed < end and not drafts:
            courses.append(Course(np.arange(computed, end), 1, end))
            computed = end
        elif computed < end and self._terms.tokens_after is not None:
            courses.append(self._before_the_limit(request, computed, end, number, drafts, behind))
            number, computed = number + len(courses[-1].before), courses[-1].final
        if computed < end:
            courses.append(self._one_by_one(request, computed, end, number, drafts))
        return joined(courses, computed)._replace(skips=skips)

    def _before_the_limit(
        self, request: Request, computed: int, end: int, number: int, drafts: int, behind: int
    ) -> Course:
        """Return the rounds until `end` that max_model_len does not cut, perhaps none."""
        after, rounds = self._foreseen(request, computed, end, number, drafts)
        before = np.empty(rounds, dtype=np.int64)
        before[0] = computed
        before[1:] = after[: rounds - 1]
        final = after.item(rounds - 1)
        widths: Ints | int = 1 + drafts
        if self._terms.stops is not None:
            widths = np.minimum(widths, 1 + self._terms.stops(request, number, rounds), dtype=np.int64)
        reach = self._reach(before, widths, behind, 0)
        if reach.max() > self._limit:
            rounds = int((reach > self._limit).argmax())
            before, final = before[:rounds], before.item(rounds)
            widths = widths if isinstance(widths, int) else widths[:rounds]
        return Course(before, widths, final)

    def _one_by_one(self, request: Request, computed: int, end: int, number: int, drafts: int) -> Course:
        """Return the rounds until `end`, each computed when the one before is known."""
        rounds: list[tuple[int, int]] = []  # tokens computed before, tokens verified
        while computed < end:
            width = min(1 + self._made(request, number, drafts), self._limit - computed)
            rounds.append((computed, width))
            computed += 1 + self._accepted(request, number, width - 1)
            number += 1
        before, widths = np.array(rounds).T
        return Course(before, widths, computed)

    def _foreseen(self, request: Request, computed: int, end: int, number: int, drafts: int) -> tuple[Ints, int]:
        """Return (tokens computed after each round, rounds until `end`), if max_model_len cuts none; perhaps some
        more."""
        assert self._terms.tokens_after is not None
        count = -(-(end - computed) // (1 + drafts))
        while True:
            after = self._terms.tokens_after(request, number, count, drafts, computed)
            if after[-1] >= end:
                break
            count = 2 * len(after)
        return after, int(after.searchsorted(end)) + 1

    def _made(self, request: Request, number: int, drafts: int) -> int:
        """Drafts made for a verification."""
        stops = self._terms.stops
        return drafts if stops is None or not drafts else min(drafts, int(stops(request, number, 1)[0]))

    def _accepted(self, request: Request, number: int, drafts: int) -> int:
        accepted = self._terms.accepted(request, number, drafts) if drafts else 0
        assert min(0, drafts) <= accepted <= drafts, f"{accepted} of {drafts} drafts accepted"
        return accepted

    def _with_blocks(self, request: Request, course: Course, end: int, drafts: int, behind: int) -> PlannedRounds:
        """Add to the rounds of a course the new blocks that each needs."""
        before, widths, final, skips = course
        rounds = len(before)
        rows = np.empty((2, rounds), dtype=np.int64)
        rows[0] = before
        if rounds:
            reach = self._reach(before, widths, behind, 0)
            reach += self._terms.lookahead + self._block_size - 1
            np.minimum(reach, self._max_model_len + self._block_size - 1, out=reach)
            reach //= self._block_size
            if not isinstance(widths, int) or behind > widths:
                # blocks taken for rejected drafts stay taken
                np.maximum.accumulate(reach, out=reach)
            held_blocks = self.held(request)
            np.maximum(reach, held_blocks, out=reach)
            rows[1, 0] = reach[0] - held_blocks
            np.subtract(reach[1:], reach[:-1], out=rows[1, 1:])
        return PlannedRounds(drafts, end, rounds, rows, _unless_even(widths, rounds, drafts), final, skips)

    def _reach(self, before: Ints, widths: Ints | int, behind: int, first: Ints | int) -> Ints:
        """Return the last token that each of some rounds verifies, as the scheduler sees it, given the tokens computed
        before and those verified; `first` are the rounds that begin a request, which is `behind` drafts behind."""
        return before + widths


def _unless_even(widths: Ints | int, rounds: int, drafts: int) -> Ints | None:
    if isinstance(widths, int):
        return None if widths == 1 + drafts else np.full(rounds, widths)
    return widths if (widths != 1 + drafts).any() else None


def joined(courses: Sequence[Course], computed: int = 0) -> Course:
    """Join consecutive courses; without any, return a course without rounds, at `computed` tokens."""
    if len(courses) == 1:
        return courses[0]
    if not courses:
        return Course(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), computed)
    before = np.concatenate([course.before for course in courses])
    first = courses[0].widths
    if isinstance(first, int) and all(isinstance(course.widths, int) and course.widths == first for course in courses):
        return Course(before, first, courses[-1].final)
    widths = [
        np.full(len(course.before), course.widths) if isinstance(course.widths, int) else course.widths
        for course in courses
    ]
    return Course(before, np.concatenate(widths), courses[-1].final)
