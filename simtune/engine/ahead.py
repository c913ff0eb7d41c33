"""Decoding with drafts under asynchronous scheduling: every step is scheduled before the one before it is known.

The scheduler takes all drafts under way for accepted until it hears. So a member that had d drafts rejected in the step
before stands d tokens further on for it than it is: it takes blocks for that many more, and where max_model_len leaves
less room than its drafts need, it verifies fewer, perhaps not even the token that is certain: then it rests for a step,
after which all is known. A member whose answer was completed by accepted drafts is in the next step all the same, and
what it computes there is discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from simtune.arrays import Ints
from simtune.engine.request import Request
from simtune.engine.speculation import NextSteps, Speculation, SpeculativeBatch, _Plan, _unless_even


class AheadBatch(SpeculativeBatch):
    """A `SpeculativeBatch` whose steps are scheduled one ahead."""

    def __init__(self, block_size: int, speculation: Speculation, max_model_len: int) -> None:
        super().__init__(block_size, speculation, max_model_len)
        self._even = self._steady and speculation.lengths is None  # as many drafts in every round of every request
        self.discarded: dict[Request, tuple[int, int]] = {}
        """Members that are complete, in the next step all the same: its tokens and new blocks."""
        self._discarded = 0, 0, 0  # their tokens, tokens computed before, new blocks
        self._ended: list[Request] = []  # in the latest step, and perhaps in the next one too
        self._rejected: dict[Request, tuple[int, int]] = {}  # (step, drafts rejected in the one before)
        self._resting: dict[Request, None] = {}  # members with rounds in which they rest

    def __iter__(self) -> Iterator[Request]:
        """Members in order of joining. Costs O(members log members)."""
        return iter(sorted([*self._members, *self.discarded], key=attrgetter("joins")))

    def totals(self) -> tuple[int, int, int]:
        if self._totals is None and self.discarded:
            tokens, context, blocks = super().totals()
            more = self._discarded
            self._totals = tokens + more[0], context + more[1], blocks + more[2]
        return super().totals()

    def _sum_up(self) -> None:
        widths = self.discarded.values()
        context = sum(request.computed for request in self.discarded)
        self._discarded = sum(width for width, _ in widths), context, sum(blocks for _, blocks in widths)
        self._totals = None

    @property
    def rests(self) -> bool:
        """Whether some members rest in the next step."""
        return bool(self._resting) and any(self.width_of(member) == 0 for member in self._resting)

    def join(self, request: Request, rejected: int = 0) -> None:
        """`rejected`: of its drafts in the step before."""
        if rejected:
            self._rejected[request] = self.steps, rejected
        super().join(request)

    def rejoin(self, request: Request) -> None:
        """One that had no part in a step takes part again."""
        latest, self._joins = self._joins, request.joins - 1
        self.join(request)  # at its old place
        self._joins = latest

    def leave(self, request: Request) -> None:
        self._rejected.pop(request, None)
        if self.discarded.pop(request, None) is not None:
            self.count -= 1
            self._sum_up()
            request.joined = -1
            return
        super().leave(request)
        self._paused.clear()  # its rounds to come are others now
        self._rejected.pop(request, None)

    def cut(self, member: Request, tokens: int) -> None:
        if member in self.discarded:
            self.discarded[member] = self._once(member, tokens)
            self._sum_up()
        else:
            super().cut(member, tokens)

    def width_of(self, member: Request) -> int:
        return self.discarded[member][0] if member in self.discarded else super().width_of(member)

    def blocks_of(self, member: Request) -> int:
        return self.discarded[member][1] if member in self.discarded else super().blocks_of(member)

    def held_by(self, member: Request) -> int:
        return self._held(member) if member in self.discarded else super().held_by(member)

    def emitted_by(self, member: Request) -> int:
        return member.emitted if member in self.discarded else super().emitted_by(member)

    def end_discarded(self) -> list[Request]:
        """The step is over for those of whom it is discarded; returns them. To be called before `advance`."""
        ended = list(self.discarded)
        for request, (_, blocks) in self.discarded.items():
            request.slots = (self._held(request) + blocks) * self._block_size
            request.joined = -1
            del self._rejected[request]
        self.count -= len(ended)
        self.discarded.clear()
        return ended

    def draft(self, requests: int) -> Sequence[Request]:
        super().draft(requests)
        if not self._ended:
            return ()
        for request in self._ended:
            room = self._max_model_len - 1 - request.computed - self._behind(request)
            if room > 0:
                request.joined = self.steps
                self.discarded[request] = self._once(request, min(1 + self._drafts_of(request), room))
            else:
                del self._rejected[request]
        self._ended.clear()
        self.count += len(self.discarded)
        self._sum_up()
        return list(self.discarded)

    def next_steps(self, free: int, budget: int) -> NextSteps | None:
        if self._resting and self.rests:
            return None
        if not self.discarded:
            return super().next_steps(free, budget)
        tokens, context, blocks = self.totals()
        if tokens > budget or blocks > free:
            return None
        tokens_discarded, _, more = self._discarded
        if not self._members:
            return NextSteps(tokens, context, blocks, 1, (), tokens_discarded)
        others = super().next_steps(free - more, budget - tokens_discarded)
        assert others is not None
        return NextSteps(tokens, context, blocks, others.steps, others.contexts, tokens_discarded)

    def steps_to_completion(self) -> int:
        if self.discarded and not (self._steady and self._members):
            return 1
        return super().steps_to_completion()

    def steps_that_fit(self, free: int, limit: int) -> int:
        return 1 if self._resting else super().steps_that_fit(free, limit)

    def _behind(self, request: Request) -> int:
        """Drafts of a request that were rejected in the step before, of which the scheduler does not know yet."""
        step, rejected = self._rejected.get(request, (-1, 0))
        return rejected if step == self.steps else 0

    def _held(self, request: Request) -> int:
        """Blocks of a request that does not verify just now."""
        return -(-max(request.computed, request.slots) // self._block_size)

    def _once(self, request: Request, width: int) -> tuple[int, int]:
        """(tokens, new blocks) of a step to be discarded."""
        reach = request.computed + self._behind(request) + width + self._speculation.lookahead
        return width, max(0, -(-min(reach, self._max_model_len) // self._block_size) - self._held(request))

    def _follow(self, request: Request, end: int, drafts: int, rejected: int) -> _Plan:
        self._rejected[request] = self.steps, rejected
        plan = self._planned(request, end, drafts)
        del self._rejected[request]
        return plan

    def _enter(self, request: Request, plan: _Plan) -> None:
        super()._enter(request, plan)
        if plan.widths is not None and not plan.widths.all():
            self._resting[request] = None

    def _bring_up(self, request: Request, plan: _Plan) -> None:
        age = self.steps - plan.begin
        if self._resting:
            self._resting.pop(request, None)
        if not age:
            return
        last, rounds = plan.rows.item(0, age - 1), request.rounds
        reach = last + (1 + plan.drafts if plan.widths is None else plan.widths.item(age - 1))
        if age > 1 and self._even and plan.widths is None:
            slots = plan.rows.item(0, age - 2) + 2 * (1 + plan.drafts) + self._speculation.lookahead
            slots = min(slots, self._max_model_len)
        else:
            slots = (self._held(request) + int(plan.rows[1, :age].sum())) * self._block_size
        super()._bring_up(request, plan)
        if plan.drafts and plan.widths is not None:
            padded = plan.skips and plan.widths[0] > 1
            request.rounds = rounds + int(np.count_nonzero(plan.widths[:age] > 1)) - int(padded)
        if slots > request.slots:
            request.slots = slots
        if age < plan.rounds:
            self._rejected[request] = self.steps, reach - request.computed
        elif plan.end - last > 1:
            self._rejected[request] = self.steps, reach - request.computed
            self._ended.append(request)

    def _planned(self, request: Request, end: int, drafts: int, cut: int | None = None) -> _Plan:
        if end + drafts + max(drafts, self._behind(request)) < self._max_model_len:
            return super()._planned(request, end, drafts, cut)
        return self._planned_to_the_limit(request, end, drafts, cut)

    def _planned_to_the_limit(self, request: Request, end: int, drafts: int, cut: int | None) -> _Plan:
        """The same where max_model_len may leave no room for some drafts."""
        computed, behind, number = request.computed, self._behind(request), request.rounds
        limit, head = self._max_model_len - 1, np.zeros(0, dtype=np.int64)
        if cut is None and drafts and computed < end and self._many is not None:
            after, rounds = self._foreseen(request, computed, end, number, drafts)
            head = np.concatenate([[computed], after[: rounds - 1]])
            reach = head + 2 * (1 + drafts)
            reach[1:] = reach[:-1]
            reach[0] = computed + behind + 1 + drafts
            if reach[-1] > limit:
                head = head[: int((reach > limit).argmax())]
            if len(head):
                computed = int(after[len(head) - 1])
                behind = int(head[-1]) + 1 + drafts - computed
                number += len(head)
        tail: list[tuple[int, int]] = []  # tokens computed before, tokens verified
        while computed < end:
            width = max(0, min(1 + drafts, limit - computed - behind))
            if cut is not None and not tail:
                width = min(width, cut)
            tail.append((computed, width))
            gained = 1 + self._taken(request, number, width - 1) if width else 0
            behind = width - gained
            computed += gained
            number += width > 1
        rounds, skips = len(head) + len(tail), 0
        rows, widths = np.zeros((2, rounds), dtype=np.int64), np.full(rounds, 1 + drafts)
        rows[0, : len(head)] = head
        if tail:
            rows[0, len(head) :], widths[len(head) :] = np.array(tail).T
        if rounds:
            self._need(request, rows, widths)
            skips = int(drafts > 0 and widths[0] == 1)
        return _Plan(self.steps, drafts, end, rounds, rows, _unless_even(widths, drafts), skips, computed)

    def _reach(self, before: Ints, first: Ints) -> Ints:
        wide = 1 + self._speculation.max_drafts
        reach = before + 2 * wide  # as in `_need`
        reach[1:] = reach[:-1]
        reach[first] = before[first] + wide
        return reach

    def _need(self, request: Request, rows: Ints, widths: Ints | int) -> None:
        reach, behind = rows[0] + widths, self._behind(request)
        # As if all drafts of the round before were accepted.
        reach[1:] = reach[:-1] + (widths if isinstance(widths, int) else widths[1:])
        reach[0] += behind
        reach += self._speculation.lookahead + self._block_size - 1
        np.minimum(reach, self._max_model_len + self._block_size - 1, out=reach)
        reach //= self._block_size
        if not isinstance(widths, int) or behind > widths:
            np.maximum.accumulate(reach, out=reach)
        held = self._held(request)
        np.maximum(reach, held, out=reach)
        rows[1, 0] = reach[0] - held
        np.subtract(reach[1:], reach[:-1], out=rows[1, 1:])
