"""Resident requests that decode: the protocol of batches, and the batch whose members gain one token a step.

`Batch` is the protocol of all batches; `DecodeBatch` ages members that progress alike, and `simtune.engine.drafting`
those that draft, each at its own pace. For both, a step, or any number of steps with fixed membership, costs the same
whatever the number of members.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from simtune.engine.request import Request
from simtune.engine.step import Contexts, Step


class Tally(NamedTuple):
    """Totals of verifications, over all requests and rounds."""

    rounds: int = 0
    """Rounds, each of one request."""
    drafts: int = 0
    accepted: int = 0
    """Accepted drafts, those beyond the end of an answer included."""
    tokens: int = 0
    """Tokens delivered."""

    def plus(self, other: Tally) -> Tally:
        """Return the sum of both."""
        return Tally(
            self.rounds + other.rounds,
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            self.tokens + other.tokens,
        )


class Batch(Protocol):
    """The resident requests that decode, in order of joining.

    A scheduler reads the needs of the next step (`totals`, or member by member if blocks or budget are short), or how
    long it is repeated (`next_step`), reports to the batch that steps are over (`advance`), then that the drafter has
    run (`draft`). A member's own fields are updated when it leaves.
    """

    @property
    def drafting(self) -> bool:
        """True if members may compute more than one token in a step: their drafts."""

    @property
    def count(self) -> int:
        """Members that the next step computes, `discarded` ones included."""

    @property
    def steps(self) -> int:
        """Steps that the batch has been advanced by, those without members included."""

    @property
    def discarded(self) -> Collection[Request]:
        """Members whose answer is complete, but which are in the next step: it was scheduled before that was known."""

    @property
    def rests(self) -> bool:
        """True if some members compute nothing in the next step."""

    @property
    def depth(self) -> int:
        """Number of drafts in turn that lead to those of the next step; 0 without drafts."""

    @property
    def longest_context(self) -> int:
        """KV tokens read in the next step by the member that reads most; 0 if the batch does not track it."""

    @property
    def tally(self) -> Tally:
        """Totals of verifications so far, those of present members included."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the members in order of joining; costs at least O(members)."""

    def newest(self) -> Request:
        """Return the member that joined last. There must be one."""

    # --- the next step --------------------------------------------------------------------------------------------

    def totals(self) -> tuple[int, int, int]:
        """Return (tokens the next step computes, tokens its members have computed before, new blocks it needs)."""

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member."""

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""

    def cut(self, member: Request, tokens: int) -> None:
        """Limit the tokens that the next step computes for a member to `tokens`, at least 1."""

    # --- any number of next steps ---------------------------------------------------------------------------------

    def next_step(self, free: int, budget: int) -> tuple[Step, int] | None:
        """Return the next step, repeated as long as it stays the same and new blocks number at most `free`, and the new
        blocks of its first repetition; None if those are already too many, its tokens exceed `budget`, or a member
        rests. There must be members."""

    def contexts(self, steps: int) -> Contexts | None:
        """Return contexts before each of the next `steps` steps; None if every member gains one token a step."""

    def blocks_for(self, steps: int, after: int = 0) -> int:
        """New blocks that `steps` steps need, the first of them after `after` others."""

    def steps_that_fit(self, free: int, limit: int) -> int:
        """Return the largest number of steps, at most `limit`, that all compute as many tokens as the next one and
        whose new blocks number at most `free`. There must be members."""

    def steps_to_completion(self) -> int:
        """Steps until the first member is complete, or drafts otherwise than planned. For the batch and its driver
        only: no policy decides by it."""

    # --- members --------------------------------------------------------------------------------------------------

    def join(self, request: Request, rejected: int = 0) -> None:
        """Add a request whose known tokens but the newest are computed; `rejected` of its drafts in the step before
        were rejected, which a scheduler that is one step ahead does not know."""

    def receive(self, request: Request, *, padded: bool) -> None:
        """Add a request whose prompt was computed elsewhere, and which has no drafts yet. With `padded` the next step
        computes as many placeholder drafts for it as there may be, all to be rejected."""

    def rejoin(self, request: Request, past: int = -1) -> None:
        """Add a request that left before a step and had no part in it; `past` is what `past_of` then returns."""

    def leave(self, member: Request) -> None:
        """Remove a member and update its fields."""

    def emitted_by(self, member: Request) -> int:
        """Output tokens a member has delivered so far."""

    def held_by(self, member: Request) -> int:
        """KV blocks a member holds."""

    def past_of(self, request: Request) -> int:
        """Tokens that a request which has left since the latest step had computed before it; if it had no part in the
        step, those with which it has rejoined, else -1."""

    # --- the step is over -----------------------------------------------------------------------------------------

    def end_discarded(self) -> Sequence[Request]:
        """End the step of the `discarded` members; remove and return them. To be called before `advance`."""

    def advance(self, steps: int) -> Sequence[Request]:
        """End `steps` steps, at most `steps_to_completion`; remove and return the members that are complete, in order
        of joining."""

    def draft(self, requests: int) -> Sequence[Request]:
        """Run the drafter after a step of `requests` requests; return the members that are `discarded` from now on."""


M = TypeVar("M")


class BatchMembers(Generic[M]):
    """Members of a batch in order of joining, each with what the batch notes of it, and those that have just left."""

    __slots__ = ("_members", "_past")

    def __init__(self) -> None:
        self._members: dict[Request, M] = {}
        self._past: dict[Request, int] = {}  # see `past_of`

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the members in order of joining. For executors and tests: costs O(members)."""
        return iter(self._members)

    def newest(self) -> Request:
        """Return the member that joined last."""
        return next(reversed(self._members))

    def past_of(self, request: Request) -> int:
        """Tokens that a request which has left since the latest step had computed before it; -1 if it had no part in
        the step."""
        return self._past.get(request, -1)

    def end_discarded(self) -> Sequence[Request]:
        """Return none: when a step is scheduled, it is known which requests are complete."""
        return ()


class DecodeBatch(BatchMembers[int]):
    """Members that gain one token a step, aged together. Times here are counts of steps taken by this batch.

    Nothing is written per token or per member: a member's context is what it had when it joined plus the steps since.
    The batch maintains three aggregates that answer every question of a step:

    * the sum of contexts, for the cost model;
    * the number of members at each residue of (context - steps) mod block_size, for the blocks that coming steps need:
      a member needs a new block when its context is a multiple of the block size, and whole cycles of block_size steps
      need one block per member;
    * a heap of the steps at which members will be complete.

    Joining, leaving and finishing cost O(log members).
    """

    __slots__ = (
        "_admissions",
        "_block_size",
        "_completions",
        "_longest",
        "_residues",
        "context_tokens",
        "count",
        "rests",
        "steps",
    )
    drafting: ClassVar[bool] = False
    depth: ClassVar[int] = 0
    discarded: ClassVar[tuple[Request, ...]] = ()
    tally: ClassVar[Tally] = Tally()

    def __init__(self, block_size: int) -> None:
        super().__init__()  # each member with the step at which it joined
        self._block_size = block_size
        self._residues = [0] * block_size
        # A heap of (step, admission, request). An entry is void when the request has left, or has joined anew since.
        self._completions: list[tuple[int, int, Request]] = []
        self._longest: tuple[int, int, Request] | None = None  # (computed tokens at step 0, admission, request)
        self._admissions = 0
        self.rests = False
        self.steps = 0
        self.count = 0
        self.context_tokens = 0
        """Sum of the members' computed tokens."""

    def totals(self) -> tuple[int, int, int]:
        """Return (tokens the next step computes, tokens its members have computed before, new blocks it needs)."""
        return self.count, self.context_tokens, self._residues[-self.steps % self._block_size]

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member."""
        return 1

    def emitted_by(self, member: Request) -> int:
        """Output tokens a member has delivered so far."""
        return member.emitted + self.steps - self._members[member]

    def held_by(self, member: Request) -> int:
        """KV blocks a member holds."""
        return -(-(member.computed + self.steps - self._members[member]) // self._block_size)

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""
        return int((member.computed + self.steps - self._members[member]) % self._block_size == 0)

    def join(self, request: Request, rejected: int = 0) -> None:
        """Add a request whose known tokens but the newest are computed."""
        steps = self.steps
        self._admissions += 1
        self._members[request] = steps
        if self._past:
            self._past.pop(request, None)
        request.decoding = True
        request.admission = self._admissions
        self.count += 1
        self.context_tokens += request.computed
        self._residues[(request.computed - steps) % self._block_size] += 1
        if self._longest is not None and request.computed - steps > self._longest[0]:
            self._longest = (request.computed - steps, request.admission, request)
        end = steps + request.output_tokens - request.emitted
        heapq.heappush(self._completions, (end, request.admission, request))

    def receive(self, request: Request, *, padded: bool) -> None:
        """Add a request whose prompt was computed elsewhere."""
        self.join(request)

    def rejoin(self, request: Request, past: int = -1) -> None:
        """Add a request that left before a step, as the last of the members."""
        self.join(request)
        self._past[request] = past

    def leave(self, member: Request) -> None:
        """Remove a member and update its fields."""
        age = self.steps - self._members.pop(member)
        member.decoding = False
        if age:
            self._past[member] = member.computed + age - 1
            member.computed += age
            member.emitted += age
        self.count -= 1
        self.context_tokens -= member.computed
        self._residues[(member.computed - self.steps) % self._block_size] -= 1

    def cut(self, member: Request, tokens: int) -> None:
        """Do nothing: a step computes one token for every member."""

    @property
    def longest_context(self) -> int:
        """KV tokens that the member with most reads in the next step; searched for only after that member has left."""
        longest, members = self._longest, self._members
        if longest is None or longest[2] not in members or longest[2].admission != longest[1]:
            longest = max(
                (request.computed - joined, request.admission, request) for request, joined in members.items()
            )
            self._longest = longest
        return longest[0] + self.steps + 1

    def next_step(self, free: int, budget: int) -> tuple[Step, int] | None:
        """Return the step, repeated until a member is complete or blocks run short; see `Batch.next_step`."""
        count, blocks = self.count, self._residues[-self.steps % self._block_size]
        if blocks > free or count > budget:
            return None
        end, admission, request = self._completions[0]
        # The usual answers of `steps_to_completion` and `steps_that_fit`, inlined for speed.
        present = request.admission == admission and request in self._members
        limit = end - self.steps if present else self.steps_to_completion()
        repeat = limit if free // count * self._block_size >= limit else self.steps_that_fit(free, limit)
        return Step(count, self.context_tokens + count, (), (), repeat, True), blocks

    def contexts(self, steps: int) -> None:
        """Return None: every member gains one token a step."""

    def blocks_for(self, steps: int, after: int = 0) -> int:
        """New blocks that `steps` steps need, the first of them after `after` others."""
        size, residues = self._block_size, self._residues
        # the steps use the residues from this one downwards, wrapping around
        end = -(self.steps + after) % size
        if steps == 1:
            return residues[end]
        blocks = steps // size * self.count
        begin = end - steps % size
        if begin >= -1:
            return blocks + sum(residues[begin + 1 : end + 1])
        return blocks + sum(residues[: end + 1]) + sum(residues[begin + 1 :])

    def steps_that_fit(self, free: int, limit: int) -> int:
        """Return the largest number of steps, at most `limit`, whose new blocks number at most `free`."""
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
        """Steps until the first member is complete. For the batch and its driver only: no policy decides by it."""
        completions, members = self._completions, self._members
        while True:
            end, admission, request = completions[0]
            if request in members and request.admission == admission:
                return end - self.steps
            heapq.heappop(completions)

    def advance(self, steps: int) -> Sequence[Request]:
        """Age every member by `steps`; remove and return those that are complete, in order of joining."""
        now = self.steps = self.steps + steps
        self.context_tokens += steps * self.count
        if self._past:
            self._past.clear()
        completions = self._completions
        if not completions or completions[0][0] > now:
            return ()
        finished: list[Request] = []
        members = self._members
        while completions and completions[0][0] <= now:
            end, admission, request = heapq.heappop(completions)
            if request in members and request.admission == admission:
                assert end == now, "a batch must not be advanced past a completion"
                self.leave(request)
                finished.append(request)
        return finished

    def draft(self, requests: int) -> Sequence[Request]:
        """Return none: there is no drafter."""
        return ()
