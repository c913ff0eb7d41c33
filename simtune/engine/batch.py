"""The resident requests that decode, aged together.

Every member gains one token per step, so nothing is written per token or per member: a member's context is what it had
when it joined plus the steps since. The batch keeps three aggregates that answer every question a step asks:

* the sum of contexts, for the cost model;
* how many members stand at each residue of (context - steps) mod block_size, for the blocks that coming steps will
  need: a member needs a new block when its context is a multiple of the block size, and whole cycles of block_size
  steps need one block per member;
* a heap of the steps at which members will be complete.

Joining, leaving and finishing cost O(log members). With fixed membership any number of steps can be
taken at once, exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from simtune.engine.request import Request


class DecodeBatch:
    """Members in order of joining. Times here are counts of steps taken by this batch."""

    __slots__ = (
        "_block_size",
        "_completions",
        "_joins",
        "_longest",
        "_members",
        "_residues",
        "context_tokens",
        "count",
        "steps",
    )

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._residues = [0] * block_size
        self._members: list[tuple[int, Request]] = []  # (join number, request); left members are swept lazily
        self._completions: list[tuple[int, int, Request]] = []  # heap of (step, join number, request)
        self._longest: tuple[int, int, Request] | None = None  # (computed tokens at step 0, join number, request)
        self._joins = 0
        self.steps = 0
        self.count = 0
        self.context_tokens = 0
        """Sum of the members' computed tokens."""

    def __iter__(self) -> Iterator[Request]:
        """Members in order of joining. For executors and tests: costs O(members)."""
        return (request for joins, request in self._members if self._present(joins, request))

    def totals(self) -> tuple[int, int, int]:
        """(tokens the next step computes, tokens its members have computed before, new blocks it needs)."""
        return self.count, self.context_tokens, self._residues[-self.steps % self._block_size]

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member."""
        return 1

    def emitted_by(self, member: Request) -> int:
        """Output tokens a member has delivered so far."""
        return member.emitted + self.steps - member.joined

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""
        return int((member.computed + self.steps - member.joined) % self._block_size == 0)

    def join(self, request: Request) -> None:
        self._joins += 1
        request.joined = self.steps
        request.joins = self._joins
        self.count += 1
        self.context_tokens += request.computed
        self._residues[(request.computed - self.steps) % self._block_size] += 1
        self._members.append((self._joins, request))
        if self._longest is not None and request.computed - self.steps > self._longest[0]:
            self._longest = (request.computed - self.steps, self._joins, request)
        done = self.steps + request.output_tokens - request.emitted
        heapq.heappush(self._completions, (done, self._joins, request))

    def newest(self) -> Request:
        members = self._members
        while not self._present(*members[-1]):
            members.pop()
        return members[-1][1]

    def leave(self, request: Request) -> None:
        """Take a member out and bring its `computed` and `emitted` up to date."""
        age = self.steps - request.joined
        request.computed += age
        request.emitted += age
        request.settled = request.computed - 1 if age else -1
        request.joined = -1
        self.count -= 1
        self.context_tokens -= request.computed
        self._residues[(request.computed - self.steps) % self._block_size] -= 1
        if self.count * 4 + 64 < len(self._members):
            self._members = [m for m in self._members if self._present(*m)]

    @property
    def longest(self) -> int:
        """Computed tokens of the member that has most; looked for again only when the one that had it has left."""
        if self._longest is None or not self._present(*self._longest[1:]):
            present = ((joins, request) for joins, request in self._members if self._present(joins, request))
            self._longest = max((request.computed - request.joined, joins, request) for joins, request in present)
        return self._longest[0] + self.steps

    def blocks_for(self, steps: int, after: int = 0) -> int:
        """New blocks that `steps` steps need, the first of them after so many others."""
        size, residues = self._block_size, self._residues
        end = -(self.steps + after) % size  # steps are those of the residues from this one downwards and around
        if steps == 1:
            return residues[end]
        blocks = steps // size * self.count
        begin = end - steps % size
        if begin >= -1:
            return blocks + sum(residues[begin + 1 : end + 1])
        return blocks + sum(residues[: end + 1]) + sum(residues[begin + 1 :])

    def steps_that_fit(self, free: int, limit: int) -> int:
        """The largest number of steps, at most `limit`, whose new blocks number at most `free`."""
        size, residues, now = self._block_size, self._residues, self.steps
        cycles = free // self.count
        if cycles * size >= limit:
            return limit
        free -= cycles * self.count
        steps = cycles * size
        while steps < limit:
            free -= residues[-(now + steps) % size]
            if free < 0:
                break
            steps += 1
        return steps

    def steps_to_completion(self) -> int:
        """Steps until the first member is complete. The members' own affair: no policy decides by it."""
        completions = self._completions
        while True:
            done, joins, request = completions[0]
            if request.joins == joins and request.joined >= 0:
                return done - self.steps
            heapq.heappop(completions)

    def advance(self, steps: int) -> Sequence[Request]:
        """Age every member by `steps`; take out and return those that are complete, in order of joining."""
        now = self.steps = self.steps + steps
        self.context_tokens += steps * self.count
        completions = self._completions
        if not completions or completions[0][0] > now:
            return ()
        finished: list[Request] = []
        while completions and completions[0][0] <= now:
            done, joins, request = heapq.heappop(completions)
            if request.joins == joins and request.joined >= 0:
                assert done == now, "a batch must not be advanced past a completion"
                self.leave(request)
                finished.append(request)
        return finished

    @staticmethod
    def _present(joins: int, request: Request) -> bool:
        return request.joined >= 0 and request.joins == joins
