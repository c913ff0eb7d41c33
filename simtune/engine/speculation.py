"""Decoding with drafts: a member computes its next token and some drafts, and goes on by one plus those accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simtune.engine.request import Request


@dataclass(frozen=True, slots=True)
class Speculation:
    """How many drafts there are, what they cost a scheduler, and how many are accepted."""

    max_drafts: int
    """The most drafts verified per request and step, the nodes of a tree all counted."""
    accepted: Callable[[Request, int, int], int]
    """Of (request, round, drafts): how many of so many drafts are accepted in a request's verification number `round`,
    counted from 0. In a tree at most its depth."""
    drafts: Callable[[int], int] | None = None
    """How many drafts each request gets after a step of so many requests; always max_drafts unless given."""
    lookahead: int = 0
    """Tokens beyond those of a step that a resident's blocks must have room for, where the drafter writes keys and
    values of its own: vLLM takes max_drafts for draft models, EAGLE and MTP."""
    extra_slots: int = 0
    """What each request takes of the token budget besides its tokens, for what the drafter alone computes: 1 for a
    draft model in vLLM, max_drafts - 1 where all drafts are made at once, else 0."""


class SpeculativeBatch:
    """What `DecodeBatch` is without drafts, for members that go on at their own pace. A step costs O(members)."""

    def __init__(self, block_size: int, speculation: Speculation, max_model_len: int) -> None:
        self._block_size = block_size
        self._speculation = speculation
        self._max_model_len = max_model_len
        self._drafts = speculation.max_drafts
        self._members: dict[Request, None] = {}
        self._cut: dict[Request, int] = {}
        self._joins = 0
        self.steps = 0

    def __iter__(self) -> Iterator[Request]:
        """Members in order of joining."""
        return iter(self._members)

    @property
    def count(self) -> int:
        return len(self._members)

    @property
    def context_tokens(self) -> int:
        """Sum of the members' computed tokens."""
        return sum(member.computed for member in self._members)

    @property
    def longest(self) -> int:
        """Computed tokens of the member that has most."""
        return max(member.computed for member in self._members)

    @property
    def tokens(self) -> int:
        """Tokens the next step computes."""
        return sum(map(self.width_of, self._members))

    def width_of(self, member: Request) -> int:
        """Tokens the next step computes for a member. Drafts that would not fit max_model_len are not made."""
        width = self._cut.get(member, 1 + self._drafts)
        return min(width, self._max_model_len - 1 - member.computed)

    def cut(self, member: Request, tokens: int) -> None:
        """Let the next step compute no more than so many tokens for a member."""
        self._cut[member] = tokens

    def draft(self, requests: int) -> None:
        """The drafter has run with a step of so many requests."""
        if self._speculation.drafts is not None:
            self._drafts = min(self._speculation.drafts(requests), self._speculation.max_drafts)

    def join(self, request: Request) -> None:
        self._joins += 1
        request.joined = self.steps
        request.joins = self._joins
        self._members[request] = None

    def leave(self, request: Request) -> None:
        del self._members[request]
        self._cut.pop(request, None)
        request.joined = -1

    def blocks_of(self, member: Request) -> int:
        """New blocks the next step needs for a member."""
        held = -(-max(member.computed, member.slots) // self._block_size)
        return max(0, -(-self._slots(member) // self._block_size) - held)

    def blocks_for(self, steps: int) -> int:
        """New blocks the next step needs; of more than one nothing can be said."""
        return sum(map(self.blocks_of, self._members)) if steps else 0

    def steps_that_fit(self, free: int, limit: int) -> int:
        return 1

    def steps_to_completion(self) -> int:
        return 1

    def advance(self, steps: int) -> list[Request]:
        """Verify once; take out and return those that are complete, in order of joining.

        What is accepted beyond the end of an answer is not delivered.
        """
        assert steps == 1
        self.steps += 1
        finished = []
        for member in list(self._members):
            drafts = self.width_of(member) - 1
            accepted = self._speculation.accepted(member, member.rounds, drafts) if drafts else 0
            assert 0 <= accepted <= drafts, f"{accepted} of {drafts} drafts accepted"
            member.rounds += drafts > 0
            member.slots = max(member.slots, self._slots(member))
            member.computed += 1 + accepted
            member.emitted = min(member.emitted + 1 + accepted, member.output_tokens)
            if member.emitted == member.output_tokens:
                self.leave(member)
                finished.append(member)
        self._cut.clear()
        return finished

    def _slots(self, member: Request) -> int:
        return min(member.computed + self.width_of(member) + self._speculation.lookahead, self._max_model_len)
