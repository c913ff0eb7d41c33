"""Decoding with drafts: a member computes its next token and some drafts, and goes on by one plus those accepted.

How many are accepted in a request's n-th verification does not depend on who else is there, so the moment a request
joins, all its coming rounds are known: what it has computed before each, how many tokens it verifies, which blocks it
will need. The batch adds them to calendars by step and takes them out again when the member leaves early; a step, or
any number of steps, is then read off the calendars, whatever the number of members. Where the drafts of a member come
to be others than was planned, because a step is cut or the batch as a whole drafts more or fewer, it is planned anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Ints
from simtune.engine.request import Request

_FEW = 32
"""Steps whose calendar is sooner read one by one."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How many drafts there are, what they cost a scheduler, and how many are accepted."""

    max_drafts: int
    """The most drafts verified per request and step, the nodes of a tree all counted."""
    accepted: Callable[[Request, int, int], int]
    """Of (request, round, drafts): how many of so many drafts are accepted in a request's verification number `round`,
    counted from 0. In a tree at most its depth. Of -1 drafts -1: nothing is verified in that round, and none delivered.

    It may have a method `many(request, first, count, drafts, tokens)`, which is faster: after each of at least
    `count` rounds from `first` on, how many tokens there are, when so many drafts are made in each and there were
    `tokens` before. And a method `laid_out(request, lay_out)`, faster still, for requests whose prompt was just
    computed: it returns their rows and the tokens computed after the last round, or None where it cannot tell, and gets
    rows of as many requests as it likes from `lay_out`, see `SpeculativeBatch._lay_out`."""
    drafts: Callable[[int], int] | None = None
    """How many drafts each request gets after a step of so many requests; always max_drafts unless given."""
    lookahead: int = 0
    """Tokens beyond those of a step that a resident's blocks must have room for, where the drafter writes keys and
    values of its own: vLLM takes max_drafts for draft models, EAGLE, MTP and dspark, one more for dflash."""
    extra_slots: int = 0
    """What each request takes of the token budget besides its tokens, for what the drafter alone computes: in vLLM 1
    for a draft model, max_drafts for dflash, max_drafts - 1 for dspark, else 0."""
    depth: int | None = None
    """Levels drafted in every step, whatever is verified: those of a tree. None for chains, where every draft is a
    level."""
    stops: Callable[[Request, int, int], NDArray[np.integer]] | None = None
    """Of (request, first, count): after how many drafts the drafter stops by itself in each of so many rounds; -1 where
    a request only waits for a verdict, and does not even verify the token that is certain."""
    lengths: Callable[[Request], int] | None = None
    """The same where it is the same in all rounds of a request."""
    shares: Callable[[Sequence[Request]], Sequence[int]] | None = None
    """How the drafts of one step are shared out among these requests, where they are counted for the batch."""
    drops_last_hit: bool = False
    """Whether the last block found in the prefix cache is computed again, for a drafter that needs what the target
    makes of those tokens: EAGLE, MTP and block drafters in vLLM."""

    @property
    def pads(self) -> bool:
        """Whether a newcomer with one token to compute gets drafts that nobody made, to be as wide as the others."""
        return self.drafts is None and self.shares is None and self.stops is None


class NextSteps(NamedTuple):
    """Steps in which all members do alike."""

    tokens: int
    """Verified in the first."""
    context: int
    """Tokens computed before the first."""
    blocks: int
    """New ones in the first."""
    steps: int
    contexts: Sequence[int] | Ints
    """Tokens that members have computed before each."""
    discarded_tokens: int = 0
    """Of those of the first step, the ones to be discarded, for their members are complete; the contexts are without
    them."""


class Tally(NamedTuple):
    """What verifications came to, over all requests and rounds."""

    rounds: int = 0
    """Of one request each."""
    drafts: int = 0
    accepted: int = 0
    """Drafts, those beyond the end of an answer included."""
    tokens: int = 0
    """Delivered."""


@dataclass(slots=True)
class _Plan:
    """A member's rounds to come, by the number of steps since `begin`."""

    begin: int
    drafts: int
    """Of each round, as the batch had it when this was planned."""
    end: int
    """Computed tokens with which the answer is complete."""
    rounds: int
    rows: Ints
    """(2, rounds): tokens computed before, new blocks."""
    widths: Ints | None
    """Tokens verified in each round, where that is not always one and `drafts`."""
    skips: int
    """1 where the first round verifies no drafts, or some that nobody made, and counts as none."""
    final: int
    """Computed tokens after the last round."""


class SpeculativeBatch:
    """What `DecodeBatch` is without drafts, for members that go on at their own pace.

    Joining and leaving early cost O(rounds of the request), in a few array operations; steps do not depend on the
    number of members.
    """

    def __init__(self, block_size: int, speculation: Speculation, max_model_len: int) -> None:
        self._block_size = block_size
        self._speculation = speculation
        self._max_model_len = max_model_len
        self._drafts = speculation.max_drafts
        self._many = getattr(speculation.accepted, "many", None)
        self._laid_out = getattr(speculation.accepted, "laid_out", None) if speculation.stops is None else None
        self._steady = speculation.drafts is None and speculation.shares is None and speculation.stops is None
        self._members: dict[Request, _Plan] = {}
        self._paused: dict[Request, _Plan] = {}  # left in this step, perhaps to come back as they went
        self._shares: dict[Request, int] = {}
        self._cuts: list[Request] = []  # whose next round is other than the batch's
        self._calendar = np.zeros((2, 1024), dtype=np.int64)  # the members' rows added up; from step _origin on
        self._fewer = np.zeros(1024, dtype=np.int64)  # tokens verified than one and `drafts` of each member
        self._origin = 0
        self._wide = 0  # one and `drafts` of all members
        self._read: list[list[int]] | None = None  # the calendar at the next steps
        self._totals: tuple[int, int, int] | None = None  # see `totals`
        self._completions: list[tuple[int, int, Request]] = []  # heap of (step, join number, request)
        self._joins = 0
        self._longest: int | None = None  # drafts of any member
        self._ragged = 0  # members whose plan is
        self.steps = 0
        self.count = 0
        self._rounds = self._drafted = self._accepted = self._tokens = 0

    def __iter__(self) -> Iterator[Request]:
        """Members in order of joining."""
        return iter(self._members)

    def totals(self) -> tuple[int, int, int]:
        """(tokens the next step computes, tokens its members have computed before, new blocks it needs)."""
        totals = self._totals
        if totals is None:
            at = self.steps - self._origin
            tokens = self._wide - int(self._fewer[at]) if self._ragged else self._wide
            context, blocks = self._calendar[:, at].tolist()
            totals = self._totals = tokens, context, blocks
        return totals

    @property
    def levels(self) -> int:
        """How many drafts in turn lead to those of the next step."""
        speculation = self._speculation
        if speculation.depth is not None:
            return speculation.depth if self._drafts else 0
        if speculation.stops is not None:
            return max(map(self.width_of, self._members), default=self._drafts + 1) - 1
        if speculation.shares is None and speculation.lengths is None:
            return self._drafts
        if self._longest is None:
            self._longest = max((plan.drafts for plan in self._members.values()), default=self._drafts)
        return self._longest

    @property
    def tally(self) -> Tally:
        """Of all rounds so far, those of present members included."""
        found = [self._rounds, self._drafted, self._accepted, self._tokens]
        for plan in self._members.values():
            age = self.steps - plan.begin
            if age:
                rounds, drafted = _verified(plan, age)
                gained = _computed(plan, age) - int(plan.rows[0, 0])
                found = [a + b for a, b in zip(found, (rounds, drafted, gained - rounds, gained), strict=True)]
        return Tally(*found)

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member. Drafts that would not fit max_model_len are not made."""
        plan = self._members[member]
        return 1 + plan.drafts if plan.widths is None else int(plan.widths[self.steps - plan.begin])

    def emitted_by(self, member: Request) -> int:
        """Output tokens a member has delivered so far."""
        plan = self._members[member]
        return member.emitted + _computed(plan, self.steps - plan.begin) - member.computed

    def cut(self, member: Request, tokens: int) -> None:
        """Let the next step compute no more than so many tokens for a member."""
        plan = self._withdraw(member)
        padded = plan.skips and plan.begin == self.steps and self.width_of(member) > 1
        planned = self._padded if padded else self._planned
        self._enter(member, planned(member, plan.end, plan.drafts, tokens))
        self._cuts.append(member)

    def pad(self, member: Request) -> None:
        """Let the next step compute drafts that nobody made, all to be rejected, for a member that has just come."""
        plan = self._withdraw(member)
        self._enter(member, self._padded(member, plan.end, plan.drafts, 1 + self._speculation.max_drafts))

    def draft(self, requests: int) -> Sequence[Request]:
        """The drafter has run with a step of so many requests; returns those of whom the next step is discarded."""
        if self._paused:
            self._paused.clear()
        if not self._steady:
            self._draft_anew(requests)
        return ()

    def _draft_anew(self, requests: int) -> None:
        speculation = self._speculation
        if speculation.shares is not None:
            if self._unshared:
                members = list(self._members)
                self._shares = dict(zip(members, speculation.shares(members), strict=True))
                self._replan()
        elif (drafts := self._drafts_after(requests)) != self._drafts:
            self._drafts = drafts
            self._replan()

    def join(self, request: Request) -> None:
        self._joins += 1
        request.joined = self.steps
        request.joins = self._joins
        request.settled = -1
        drafts = self._drafts_of(request)
        plan = self._paused.pop(request, None) if self._paused else None
        if plan is None or plan.drafts != drafts or not plan.rounds or request.computed != plan.rows[0, 0]:
            end = request.computed + request.output_tokens - request.emitted
            plan = self._known(request, end, drafts) or self._planned(request, end, drafts)
        self.count += 1
        self._enter(request, plan)

    def leave(self, request: Request) -> None:
        """Take a member out and bring its `computed`, `emitted`, `slots` and `rounds` up to date."""
        plan = self._withdraw(request)
        del self._members[request]
        self.count -= 1
        request.joined = -1
        if request not in self._cuts:
            age = self.steps - plan.begin
            skips = 0 if age else plan.skips
            widths = None if plan.widths is None else plan.widths[age:]
            rows, rounds = plan.rows[:, age:], plan.rounds - age
            self._paused[request] = replace(plan, rows=rows, widths=widths, rounds=rounds, skips=skips)

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""
        plan = self._members[member]
        return int(plan.rows[1, self.steps - plan.begin])

    def blocks_for(self, steps: int, after: int = 0) -> int:
        """New blocks that `steps` steps need, the first of them after so many others."""
        if self._read is not None and len(self._read[1]) >= after + steps:
            return sum(self._read[1][after : after + steps])
        at = self.steps - self._origin + after
        return int(self._calendar[1, at : at + steps].sum())

    def held_by(self, member: Request) -> int:
        """Blocks a member holds."""
        plan = self._members[member]
        held = -(-max(member.computed, member.slots) // self._block_size)
        return held + int(plan.rows[1, : self.steps - plan.begin].sum())

    def contexts(self, steps: int) -> Ints:
        """The members' computed tokens before each of the next `steps` steps."""
        at = self.steps - self._origin
        return self._calendar[0, at : at + steps]

    def next_steps(self, free: int, budget: int) -> NextSteps | None:
        """What members do next as long as it remains the same; None where the first step's new blocks number more than
        `free`, or its tokens more than `budget`.
        """
        at = self.steps - self._origin
        tokens = self._wide - int(self._fewer[at]) if self._ragged else self._wide
        if tokens > budget:
            return None
        if self._steady:  # `steps_to_completion` comes to the same
            completions, members = self._completions, self._members
            while True:
                done, joins, request = completions[0]
                plan = members.get(request)
                if plan is not None and request.joins == joins and plan.begin + plan.rounds == done:
                    break
                heapq.heappop(completions)
            steps = done - self.steps
        else:
            steps = self.steps_to_completion()
        most = steps * (1 + self._speculation.max_drafts) + self._speculation.lookahead
        if self._ragged or len(self._members) * (most // self._block_size + 1) > free:
            steps = self.steps_that_fit(free, steps)
        if steps <= _FEW:
            self._read = contexts, blocks = self._calendar[:, at : at + steps].tolist()
            return NextSteps(tokens, contexts[0], blocks[0], steps, contexts) if blocks[0] <= free else None
        context, block = self._calendar[:, at].tolist()
        return NextSteps(tokens, context, block, steps, self._calendar[0, at : at + steps]) if block <= free else None

    def steps_that_fit(self, free: int, limit: int) -> int:
        """The largest number of steps, at most `limit`, whose new blocks number at most `free` and that all compute
        as many tokens as the next one.
        """
        if limit == 1:
            return 1
        at = self.steps - self._origin
        if self._ragged:
            fewer = self._fewer[at : at + limit]
            other = fewer != fewer[0]
            if other.any():
                limit = int(other.argmax())
        speculation = self._speculation
        most = limit * (1 + speculation.max_drafts) + speculation.lookahead
        if self.count * (most // self._block_size + 1) > free:
            blocks = self._calendar[1, at : at + limit]
            if int(blocks.sum()) > free:
                limit = int(blocks.cumsum().searchsorted(free, "right"))
        return max(1, limit)

    def steps_to_completion(self) -> int:
        """Steps until the first member is complete. The members' own affair: no policy decides by it."""
        speculation = self._speculation
        if not self._steady and (
            (speculation.stops is not None and speculation.depth is None)
            or self._drafts_after(self.count) != self._drafts
            or self._unshared
        ):
            return 1  # the drafts of the step after are others
        completions = self._completions
        while not self._present(*completions[0]):
            heapq.heappop(completions)
        return completions[0][0] - self.steps

    def advance(self, steps: int) -> list[Request]:
        """Verify so many times; take out and return those that are complete, in order of joining.

        What is accepted beyond the end of an answer is not delivered.
        """
        self.steps += steps
        self._read = self._totals = None
        if not self._members:
            self._origin += steps  # nothing is in the calendars
            return []
        finished = []
        completions = self._completions
        while completions and completions[0][0] <= self.steps:
            done, joins, request = heapq.heappop(completions)
            if self._present(done, joins, request):
                assert done == self.steps, "a batch must not be advanced past a completion"
                plan = self._members.pop(request)
                self.count -= 1
                self._wide -= 1 + plan.drafts
                self._ragged -= plan.widths is not None
                self._longest = None
                self._bring_up(request, plan)
                request.joined = -1
                finished.append(request)
        if self._cuts:
            self._cuts.clear()
        return finished

    @property
    def _unshared(self) -> bool:
        """Whether drafts counted for the batch were shared out among others than are here."""
        return self._speculation.shares is not None and self._members.keys() != self._shares.keys()

    def _drafts_after(self, requests: int) -> int:
        """Drafts of each request after a step of so many."""
        drafts, most = self._speculation.drafts, self._speculation.max_drafts
        return most if drafts is None else min(drafts(requests), most)

    # --- plans ----------------------------------------------------------------------------------------------------

    def _replan(self) -> None:
        """The next drafts of all members are others than they were."""
        for request, plan in list(self._members.items()):
            drafts = self._drafts_of(request)
            if drafts != plan.drafts:
                self._withdraw(request)
                self._enter(request, self._planned(request, plan.end, drafts))

    def _drafts_of(self, request: Request) -> int:
        if self._speculation.shares is not None:
            return self._shares.get(request, 0)
        if self._speculation.lengths is not None:
            return min(self._drafts, self._speculation.lengths(request))
        return self._drafts

    def _enter(self, request: Request, plan: _Plan) -> None:
        plan.begin = self.steps
        self._read = self._totals = None
        self._longest = None
        self._members[request] = plan
        self._wide += 1 + plan.drafts
        self._open(plan.rounds)
        at = self.steps - self._origin
        coming = self._calendar[:, at : at + plan.rounds]
        np.add(coming, plan.rows, out=coming)
        if plan.widths is not None:
            self._ragged += 1
            self._fewer[at : at + plan.rounds] += 1 + plan.drafts - plan.widths
        heapq.heappush(self._completions, (self.steps + plan.rounds, request.joins, request))

    def _withdraw(self, request: Request) -> _Plan:
        """Take a member's coming rounds out of the calendars; it keeps its place."""
        plan = self._members[request]
        self._read = self._totals = None
        self._longest = None
        self._wide -= 1 + plan.drafts
        age, at = self.steps - plan.begin, self.steps - self._origin
        self._calendar[:, at : at + plan.rounds - age] -= plan.rows[:, age:]
        if plan.widths is not None:
            self._ragged -= 1
            self._fewer[at : at + plan.rounds - age] -= 1 + plan.drafts - plan.widths[age:]
        self._bring_up(request, plan)
        return plan

    def _bring_up(self, request: Request, plan: _Plan) -> None:
        """Write down what became of a request in the rounds that are over."""
        age = self.steps - plan.begin
        if not age:
            return
        computed = _computed(plan, age)
        gained = computed - request.computed
        delivered = min(gained, plan.end - request.computed)
        request.settled = reach = plan.rows.item(0, age - 1)
        if plan.widths is None:
            reach += 1 + plan.drafts
        else:
            reach = int((plan.rows[0, :age] + plan.widths[:age]).max())
        reach += self._speculation.lookahead
        request.slots = max(request.slots, min(reach, self._max_model_len))
        request.computed = computed
        request.emitted += delivered
        if plan.drafts:
            request.rounds += age - plan.skips
        rounds, drafted = _verified(plan, age)
        self._rounds += rounds
        self._drafted += drafted
        self._accepted += gained - rounds
        self._tokens += delivered

    def _known(self, request: Request, end: int, drafts: int) -> _Plan | None:
        """What `_planned` comes to, where the rounds of many requests were laid out at once, this one among them."""
        if self._laid_out is None or request.rounds or drafts != self._speculation.max_drafts or not drafts:
            return None
        computed, slots = request.computed, request.slots
        held = computed if computed > slots else slots
        if computed != request.prompt_tokens or held != computed + self._speculation.lookahead or computed == end:
            return None
        if end + 2 * drafts >= self._max_model_len:
            return None
        known = self._laid_out(request, self._lay_out)
        if known is None:
            return None
        return _Plan(self.steps, drafts, end, known[0].shape[1], known[0], None, 0, known[1])

    def _planned(self, request: Request, end: int, drafts: int, cut: int | None = None) -> _Plan:
        """The rounds of a request until it has computed `end` tokens, with so many drafts in each; with `cut`, at most
        so many tokens in the first.
        """
        computed, number, skips = request.computed, request.rounds, 0
        limit, foreseen = self._max_model_len - 1, self._many is not None and self._speculation.stops is None
        if cut is None and foreseen and drafts and computed < end < limit - drafts:
            after, rounds = self._foreseen(request, computed, end, number, drafts)
            rows = np.empty((2, rounds), dtype=np.int64)
            rows[0, 0] = computed
            rows[0, 1:] = after[: rounds - 1]
            self._need(request, rows, 1 + drafts)
            return _Plan(self.steps, drafts, end, rounds, rows, None, 0, int(after[rounds - 1]))
        parts: list[tuple[Ints, Ints | int]] = []  # tokens computed before, tokens verified
        if cut is not None:
            width = min(1 + self._length(request, number, drafts), cut, limit - computed)
            skips = int(width == 1 and self._length(request, number, drafts) > 0)
            parts.append((np.array([computed]), width))
            computed += 1 + self._taken(request, number, width - 1)
            number += 1 - skips
        if computed < end and not drafts:
            parts.append((np.arange(computed, end), 1))
            computed = end
        elif computed < end and self._many is not None:
            before, widths, computed = self._before_the_limit(request, computed, end, number, drafts)
            parts.append((before, widths))
            number += len(before)
        while computed < end:
            width = min(1 + self._length(request, number, drafts), limit - computed)
            parts.append((np.array([computed]), width))
            computed += 1 + self._taken(request, number, width - 1)
            number += 1
        rows = np.empty((2, sum(len(before) for before, _ in parts)), dtype=np.int64)
        widths = np.empty(rows.shape[1], dtype=np.int64)
        at = 0
        for some, of_each in parts:
            rows[0, at : at + len(some)] = some
            widths[at : at + len(some)] = of_each
            at += len(some)
        if at:
            self._need(request, rows, widths)
        return _Plan(self.steps, drafts, end, at, rows, _unless_even(widths, drafts), skips, computed)

    def _padded(self, request: Request, end: int, drafts: int, width: int) -> _Plan:
        """The rounds of a request whose first one verifies `width` tokens, all but one of them drafts nobody made."""
        request.computed += 1
        rest = self._follow(request, end, drafts, width - 1)
        request.computed -= 1
        rows = np.concatenate([[[request.computed], [0]], rest.rows], axis=1)
        widths = np.full(rest.rounds + 1, 1 + drafts)
        widths[0] = width
        if rest.widths is not None:
            widths[1:] = rest.widths
        self._need(request, rows, widths)
        return replace(rest, rounds=rest.rounds + 1, rows=rows, widths=_unless_even(widths, drafts), skips=1)

    def _follow(self, request: Request, end: int, drafts: int, rejected: int) -> _Plan:
        """The rounds of a request of which so many drafts were rejected in the one before."""
        return self._planned(request, end, drafts)

    def _lay_out(self, before: Ints, prompt: Ints, begins: Sequence[int]) -> Ints:
        """Rows of the rounds of many requests, one after the other, that follow their prompts and draft all they may:
        given the tokens computed before each round, the prompts, and where each request begins (and the last one ends).
        """
        lookahead, size, first = self._speculation.lookahead, self._block_size, np.array(begins[:-1])
        rows = np.empty((2, len(before)), dtype=np.int64)
        rows[0] = before
        reach = np.minimum(self._reach(before, first) + lookahead, self._max_model_len)
        reach += size - 1
        reach //= size
        rows[1, 1:] = np.diff(reach)
        rows[1, first] = reach[first] + -(prompt + lookahead) // size
        rows.flags.writeable = False
        return rows

    def _reach(self, before: Ints, first: Ints) -> Ints:
        """Up to which token each of such rounds verifies, as the scheduler sees it; `first` are those that begin a
        request."""
        return before + (1 + self._speculation.max_drafts)

    def _foreseen(self, request: Request, computed: int, end: int, number: int, drafts: int) -> tuple[Ints, int]:
        """(tokens computed after each round, rounds until `end`), when max_model_len cuts none; perhaps some more."""
        assert self._many is not None
        need = end - computed
        count = -(-need // (1 + drafts))
        while True:
            after: Ints = self._many(request, number, count, drafts, computed)
            if after[-1] >= end:
                break
            count = 2 * len(after)
        rounds = int(after.searchsorted(end)) + 1
        return after, rounds

    def _before_the_limit(
        self, request: Request, computed: int, end: int, number: int, drafts: int
    ) -> tuple[Ints, Ints, int]:
        """(tokens computed before, tokens verified) of the rounds that max_model_len does not cut, and what is computed
        after them."""
        after, rounds = self._foreseen(request, computed, end, number, drafts)
        before = np.concatenate([[computed], after[: rounds - 1]])
        widths = np.full(rounds, 1 + drafts)
        if self._speculation.stops is not None:
            np.minimum(widths, 1 + self._speculation.stops(request, number, rounds), out=widths)
        over = before + widths > self._max_model_len - 1
        if over.any():
            rounds = int(over.argmax())
            return before[:rounds], widths[:rounds], int(before[rounds])
        return before, widths, int(after[rounds - 1])

    def _length(self, request: Request, number: int, drafts: int) -> int:
        """Drafts made for a verification."""
        stops = self._speculation.stops
        return drafts if stops is None or not drafts else min(drafts, int(stops(request, number, 1)[0]))

    def _taken(self, request: Request, number: int, drafts: int) -> int:
        accepted = self._speculation.accepted(request, number, drafts) if drafts else 0
        assert min(0, drafts) <= accepted <= drafts, f"{accepted} of {drafts} drafts accepted"
        return accepted

    def _need(self, request: Request, rows: Ints, widths: Ints | int) -> None:
        """Fill in the new blocks of each round, of which each verifies so many tokens."""
        reach: Ints = rows[0] + (widths + self._speculation.lookahead + self._block_size - 1)
        top = self._max_model_len + self._block_size - 1
        if not isinstance(widths, int):
            np.maximum.accumulate(reach, out=reach)
        if reach[-1] > top:
            np.minimum(reach, top, out=reach)
        reach //= self._block_size
        held = -(-max(request.computed, request.slots) // self._block_size)
        if reach[0] < held:
            np.maximum(reach, held, out=reach)
        rows[1, 0] = reach[0] - held
        np.subtract(reach[1:], reach[:-1], out=rows[1, 1:])

    def _open(self, rounds: int) -> None:
        """Make the calendars reach so many steps ahead."""
        size = self._calendar.shape[1]
        past = self.steps - self._origin
        if past + rounds < size:
            return
        while rounds * 2 > size:
            size *= 2
        rest, calendar, fewer = self._calendar.shape[1] - past, np.zeros((2, size), np.int64), np.zeros(size, np.int64)
        calendar[:, :rest] = self._calendar[:, past:]
        fewer[:rest] = self._fewer[past:]
        self._calendar, self._fewer, self._origin = calendar, fewer, self.steps

    def _present(self, done: int, joins: int, request: Request) -> bool:
        plan = self._members.get(request)
        return plan is not None and request.joins == joins and plan.begin + plan.rounds == done


def _verified(plan: _Plan, age: int) -> tuple[int, int]:
    """(verifications, drafts verified) of the first `age` rounds."""
    if plan.widths is None:
        return age, age * plan.drafts
    tokens = plan.widths[:age]
    rounds = int(np.count_nonzero(tokens))
    return rounds, int(tokens.sum()) - rounds


def _computed(plan: _Plan, age: int) -> int:
    return plan.rows.item(0, age) if age < plan.rounds else plan.final


def _unless_even(widths: Ints, drafts: int) -> Ints | None:
    return widths if (widths != 1 + drafts).any() else None
