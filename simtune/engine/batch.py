"""The resident requests that decode: what a scheduler asks of them, and the answers where each gains one token a step.

`Batch` is what every batch answers, whoever its members are; `DecodeBatch` ages members that go on alike, and
`simtune.engine.drafting` those that draft, each at a pace of its own. Of either a step, or any number of steps with
fixed membership, costs the same whatever the number of members.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

from simtune.engine.request import Request
from simtune.engine.step import Contexts, Step


class Tally(NamedTuple):
    """What verifications came to, over all requests and rounds."""

    rounds: int = 0
    """Of one request each."""
    drafts: int = 0
    accepted: int = 0
    """Drafts, those beyond the end of an answer included."""
    tokens: int = 0
    """Delivered."""

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.rounds + other.rounds,
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            self.tokens + other.tokens,
        )


class Batch(Protocol):
    """The resident requests that decode, in order of joining.

    A scheduler asks what the next step needs (`totals`, or member by member where blocks or budget are short), or how
    long it is repeated (`next_step`), and tells the batch that they are over (`advance`), then that the drafter
    has run (`draft`). A member's own fields are brought up to date when it leaves.
    """

    @property
    def drafting(self) -> bool:
        """Whether members may compute more than one token in a step: their drafts."""

    @property
    def count(self) -> int:
        """Members that the next step computes, `discarded` ones included."""

    @property
    def discarded(self) -> Collection[Request]:
        """Members whose answer is complete, in the next step all the same: it was scheduled before that was known."""

    @property
    def rests(self) -> bool:
        """Whether some members compute nothing in the next step."""

    @property
    def depth(self) -> int:
        """How many drafts in turn lead to those of the next step; 0 without drafts."""

    @property
    def longest_context(self) -> int:
        """KV tokens read in the next step by the member that reads most; 0 where the batch does not keep it."""

    @property
    def tally(self) -> Tally:
        """What verifications came to so far, those of present members included."""

    def __iter__(self) -> Iterator[Request]:
        """Members in order of joining; costs at least O(members)."""

    def newest(self) -> Request:
        """The member that joined last. There must be one."""

    # --- the next step --------------------------------------------------------------------------------------------

    def totals(self) -> tuple[int, int, int]:
        """(tokens the next step computes, tokens its members have computed before, new blocks it needs)."""

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member."""

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""

    def cut(self, member: Request, tokens: int) -> None:
        """Let the next step compute no more than so many tokens, at least 1, for a member."""

    def pad(self, member: Request) -> None:
        """Let the next step compute drafts that nobody made, all to be rejected, for a member that has just come; as
        many as there may be."""

    # --- any number of next steps ---------------------------------------------------------------------------------

    def next_step(self, free: int, budget: int) -> tuple[Step, int] | None:
        """The step in which members do what they do next, repeated as long as that remains the same and new blocks
        number at most `free`, and the new blocks of the first; None where those are too many already, or its tokens
        more than `budget`, or somebody rests. There must be members."""

    def contexts(self, steps: int) -> Contexts | None:
        """Before each of the next `steps` steps; None where every member gains one token a step."""

    def blocks_for(self, steps: int, after: int = 0) -> int:
        """New blocks that `steps` steps need, the first of them after so many others."""

    def steps_that_fit(self, free: int, limit: int) -> int:
        """The largest number of steps, at most `limit`, that all compute as many tokens as the next one and whose new
        blocks number at most `free`. There must be members."""

    def steps_to_completion(self) -> int:
        """Steps until the first member is complete, or does not draft as it was planned. The members' own affair: no
        policy decides by it."""

    # --- members --------------------------------------------------------------------------------------------------

    def join(self, request: Request, rejected: int = 0) -> None:
        """Take in a request whose known tokens but the newest are computed; of its drafts in the step before so many
        were rejected, which a scheduler that is one step ahead does not know."""

    def rejoin(self, request: Request) -> None:
        """Take in again one that left before a step and had no part in it."""

    def leave(self, member: Request) -> None:
        """Take a member out and bring it up to date."""

    def emitted_by(self, member: Request) -> int:
        """Output tokens a member has delivered so far."""

    def held_by(self, member: Request) -> int:
        """KV blocks a member holds."""

    def past_of(self, request: Request) -> int:
        """Tokens that a request which has left since the latest step had computed before that; -1 where it had no part
        in it."""

    # --- the step is over -----------------------------------------------------------------------------------------

    def end_discarded(self) -> Sequence[Request]:
        """The step is over for those `discarded`; takes them out and returns them. To be called before `advance`."""

    def advance(self, steps: int) -> Sequence[Request]:
        """So many steps are over, at most `steps_to_completion`; take out and return the members that are complete, in
        order of joining."""

    def draft(self, requests: int) -> Sequence[Request]:
        """The drafter has run after a step of so many requests; returns those who are `discarded` from now on."""


class DecodeBatch:
    """Members that gain one token a step, aged together. Times here are counts of steps taken by this batch.

    Nothing is written per token or per member: a member's context is what it had when it joined plus the steps since.
    The batch keeps three aggregates that answer every question a step asks:

    * the sum of contexts, for the cost model;
    * how many members stand at each residue of (context - steps) mod block_size, for the blocks that coming steps will
      need: a member needs a new block when its context is a multiple of the block size, and whole cycles of block_size
      steps need one block per member;
    * a heap of the steps at which members will be complete.

    Joining, leaving and finishing cost O(log members).
    """

    __slots__ = (
        "_admissions",
        "_block_size",
        "_completions",
        "_longest",
        "_members",
        "_past",
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
        self._block_size = block_size
        self._residues = [0] * block_size
        self._members: dict[Request, int] = {}  # the step at which each joined, in order of joining
        # A heap of (step, admission, request). An entry is void when the request has left, or has joined anew since.
        self._completions: list[tuple[int, int, Request]] = []
        self._longest: tuple[int, int, Request] | None = None  # (computed tokens at step 0, admission, request)
        self._past: dict[Request, int] = {}  # see `past_of`
        self._admissions = 0
        self.rests = False
        self.steps = 0
        self.count = 0
        self.context_tokens = 0
        """Sum of the members' computed tokens."""

    def __iter__(self) -> Iterator[Request]:
        """Members in order of joining. For executors and tests: costs O(members)."""
        return iter(self._members)

    def totals(self) -> tuple[int, int, int]:
        """(tokens the next step computes, tokens its members have computed before, new blocks it needs)."""
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

    def past_of(self, request: Request) -> int:
        """Tokens that a request which has left since the latest step had computed before that; -1 where it had no part
        in it."""
        return self._past.get(request, -1)

    def join(self, request: Request, rejected: int = 0) -> None:
        """Take in a request whose known tokens but the newest are computed."""
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
        done = steps + request.output_tokens - request.emitted
        heapq.heappush(self._completions, (done, request.admission, request))

    def rejoin(self, request: Request) -> None:
        """The same for one that left before a step, as the last of the members."""
        self.join(request)

    def newest(self) -> Request:
        """The member that joined last."""
        return next(reversed(self._members))

    def leave(self, member: Request) -> None:
        """Take a member out and bring it up to date."""
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
        """Nothing: a step computes one token for every member."""

    def pad(self, member: Request) -> None:
        """Nothing: a step computes one token for every member."""

    @property
    def longest_context(self) -> int:
        """KV tokens that the member with most reads in the next step; looked for again only when that one has left."""
        longest, members = self._longest, self._members
        if longest is None or longest[2] not in members or longest[2].admission != longest[1]:
            longest = max(
                (request.computed - joined, request.admission, request) for request, joined in members.items()
            )
            self._longest = longest
        return longest[0] + self.steps + 1

    def next_step(self, free: int, budget: int) -> tuple[Step, int] | None:
        """The step, repeated until a member is complete or blocks run short; see `Batch.next_step`."""
        count, blocks = self.count, self._residues[-self.steps % self._block_size]
        if blocks > free or count > budget:
            return None
        done, admission, request = self._completions[0]
        # Asked here as well, for these are the usual answers.
        here = request.admission == admission and request in self._members
        limit = done - self.steps if here else self.steps_to_completion()
        repeat = limit if free // count * self._block_size >= limit else self.steps_that_fit(free, limit)
        return Step(count, self.context_tokens + count, (), (), repeat, True), blocks

    def contexts(self, steps: int) -> None:
        """None: every member gains one token a step."""

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
        completions, members = self._completions, self._members
        while True:
            done, admission, request = completions[0]
            if request in members and request.admission == admission:
                return done - self.steps
            heapq.heappop(completions)

    def advance(self, steps: int) -> Sequence[Request]:
        """Age every member by `steps`; take out and return those that are complete, in order of joining."""
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
            done, admission, request = heapq.heappop(completions)
            if request in members and request.admission == admission:
                assert done == now, "a batch must not be advanced past a completion"
                self.leave(request)
                finished.append(request)
        return finished

    def end_discarded(self) -> Sequence[Request]:
        """Nobody: without drafts the end of an answer is known beforehand."""
        return ()

    def draft(self, requests: int) -> Sequence[Request]:
        """Nobody drafts."""
        return ()
