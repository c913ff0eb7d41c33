"""Decoding with drafts under asynchronous scheduling: every step is scheduled before the one before it is known.

The scheduler takes all drafts under way for accepted until it hears. So a member that had d drafts rejected in the step
before stands d tokens further on for it than it is: it takes blocks for that many more, and where max_model_len leaves
less room than its drafts need, it verifies fewer, perhaps not even the token that is certain: then it rests for a step,
after which all is known. A member whose answer was completed by accepted drafts is in the next step all the same, in
vain: it takes part in all but the delivery.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from simtune.engine.request import Request
from simtune.engine.speculation import Ints, Speculation, SpeculativeBatch, _Plan


class AheadBatch(SpeculativeBatch):
    """A `SpeculativeBatch` whose steps are scheduled one ahead."""

    def __init__(self, block_size: int, speculation: Speculation, max_model_len: int) -> None:
        super().__init__(block_size, speculation, max_model_len)
        self._even = self._steady and speculation.lengths is None  # as many drafts in every round of every request
        self.in_vain: dict[Request, tuple[int, int]] = {}
        """Members that are complete, in the next step all the same: its tokens and new blocks."""
        self._rejected: dict[Request, tuple[int, int]] = {}  # (step, drafts rejected in the one before)
        self._ended: list[Request] = []  # in the latest step, and perhaps in the next one in vain
        self._resting: dict[Request, None] = {}  # members with rounds in which they rest

    def __iter__(self) -> Iterator[Request]:
        """Members in order of joining. Costs O(members log members)."""
        return iter(sorted([*self._members, *self.in_vain], key=attrgetter("joins")))

    @property
    def count(self) -> int:
        return len(self._members) + len(self.in_vain)

    @property
    def _now(self) -> list[int]:
        if self._read is None:
            context, tokens, blocks = self._calendar[:, self.steps - self._origin].tolist()
            for request, (width, more) in self.in_vain.items():
                context += request.computed
                tokens += width
                blocks += more
            self._read = [context, tokens, blocks]
        return self._read

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
        if self.in_vain.pop(request, None) is not None:
            self._read, request.joined = None, -1
            return
        super().leave(request)
        self._paused.clear()  # its rounds to come are others now
        self._rejected.pop(request, None)

    def cut(self, member: Request, tokens: int) -> None:
        if member in self.in_vain:
            self._read, self.in_vain[member] = None, self._once(member, tokens)
        else:
            super().cut(member, tokens)

    def width_of(self, member: Request) -> int:
        return self.in_vain[member][0] if member in self.in_vain else super().width_of(member)

    def blocks_of(self, member: Request) -> int:
        return self.in_vain[member][1] if member in self.in_vain else super().blocks_of(member)

    def held_by(self, member: Request) -> int:
        return self._held(member) if member in self.in_vain else super().held_by(member)

    def emitted_by(self, member: Request) -> int:
        return member.emitted if member in self.in_vain else super().emitted_by(member)

    def advance(self, steps: int) -> list[Request]:
        for request, (_, blocks) in self.in_vain.items():
            request.slots = (self._held(request) + blocks) * self._block_size
            request.joined = -1
            del self._rejected[request]
        self.in_vain.clear()
        return super().advance(steps)

    def go_on_in_vain(self) -> list[Request]:
        """Let those who ended in the latest step by accepted drafts take part in the next one; return them."""
        if not self._ended:
            return []
        self._read = None
        for request in self._ended:
            room = self._max_model_len - 1 - request.computed - self._behind(request)
            if room > 0:
                request.joined = self.steps
                self.in_vain[request] = self._once(request, min(1 + self._drafts_of(request), room))
            else:
                del self._rejected[request]
        self._ended.clear()
        return list(self.in_vain)

    def steps_to_completion(self) -> int:
        return 1 if self.in_vain else super().steps_to_completion()

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
        """(tokens, new blocks) of a step in vain."""
        reach = request.computed + self._behind(request) + width + self._speculation.lookahead
        return width, max(0, -(-min(reach, self._max_model_len) // self._block_size) - self._held(request))

    def _follow(self, request: Request, end: int, drafts: int, rejected: int) -> _Plan:
        self._rejected[request] = self.steps, rejected
        plan = self._planned(request, end, drafts)
        del self._rejected[request]
        return plan

    def _enter(self, request: Request, plan: _Plan) -> None:
        super()._enter(request, plan)
        if plan.ragged and not plan.rows[1].all():
            self._resting[request] = None

    def _bring_up(self, request: Request, plan: _Plan) -> None:
        age = self.steps - plan.begin
        self._resting.pop(request, None)
        if not age:
            return
        before, tokens, blocks = plan.rows[:, :age]
        last, rounds = int(before[-1]), request.rounds
        reach = last + int(tokens[-1])
        if age > 1 and self._even and not plan.ragged:
            slots = min(int(before[-2]) + 2 * (1 + plan.drafts) + self._speculation.lookahead, self._max_model_len)
        else:
            slots = (self._held(request) + int(blocks.sum())) * self._block_size
        super()._bring_up(request, plan)
        if plan.drafts and plan.ragged:
            padded = plan.skips and tokens[0] > 1
            request.rounds = rounds + int(np.count_nonzero(tokens > 1)) - int(padded)
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
        rows = np.zeros((3, len(head) + len(tail)), dtype=np.int64)
        rows[0, : len(head)], rows[1, : len(head)] = head, 1 + drafts
        if tail:
            rows[:2, len(head) :] = np.array(tail).T
        skips = 0
        if rows.size:
            self._need(request, rows)
            skips = int(drafts > 0 and rows[1, 0] == 1)
        ragged = bool((rows[1] != 1 + drafts).any())
        return _Plan(self.steps, drafts, end, rows.shape[1], rows, ragged, skips, computed)

    def _reach(self, before: Ints, first: Ints) -> Ints:
        wide = 1 + self._speculation.max_drafts
        reach = before + 2 * wide  # as in `_need`
        reach[1:] = reach[:-1]
        reach[first] = before[first] + wide
        return reach

    def _need(self, request: Request, rows: Ints, width: int | None = None) -> None:
        reach, behind = rows[0] + rows[1], self._behind(request)
        reach[1:] = reach[:-1] + rows[1, 1:]  # as if all drafts of the round before were accepted
        reach[0] += behind
        reach += self._speculation.lookahead + self._block_size - 1
        np.minimum(reach, self._max_model_len + self._block_size - 1, out=reach)
        reach //= self._block_size
        if width is None or behind > width:
            np.maximum.accumulate(reach, out=reach)
        held = self._held(request)
        np.maximum(reach, held, out=reach)
        rows[2, 0] = reach[0] - held
        np.subtract(reach[1:], reach[:-1], out=rows[2, 1:])
