"""Decoding with drafts, one member and one step at a time: what `DraftingBatch` is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from simtune.engine import DraftingTerms, Request, Step, Tally


class PlainBatch:
    """A `Batch` that goes through its members and asks for every verification when it comes."""

    drafting = True
    rests = False
    longest_context = 0
    discarded: tuple[Request, ...] = ()

    def __init__(self, block_size: int, terms: DraftingTerms, max_model_len: int) -> None:
        self._block_size = block_size
        self._terms = terms
        self._max_model_len = max_model_len
        self._everyone = terms.max_drafts
        self._here: dict[Request, None] = {}
        self._shared: dict[Request, int] = {}
        self._cut: dict[Request, int] = {}
        self._joined = 0
        self.steps = self.count = 0
        self.counts = [0, 0, 0, 0]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._here)

    def totals(self) -> tuple[int, int, int]:
        everyone = list(self._here)
        blocks = sum(map(self.blocks_of, everyone))
        return sum(map(self.width_of, everyone)), sum(member.computed for member in everyone), blocks

    @property
    def depth(self) -> int:
        terms = self._terms
        if terms.depth is not None:
            return terms.depth if self._everyone else 0
        if terms.stops is not None:
            return max([self.width_of(member) - 1 for member in self._here], default=self._everyone)
        return max([self._planned_drafts(member) for member in self._here], default=self._everyone)

    @property
    def tally(self) -> Tally:
        return Tally(*self.counts)

    def _planned_drafts(self, member: Request) -> int:
        if self._terms.shares is not None:
            return self._shared.get(member, 0)
        if self._terms.lengths is not None:
            return min(self._everyone, self._terms.lengths(member))
        return self._everyone

    def _wanted(self, member: Request) -> int:
        drafts = self._planned_drafts(member)
        if self._terms.stops is not None and drafts:
            drafts = min(drafts, int(self._terms.stops(member, member.verifications, 1)[0]))
        return 1 + drafts

    def width_of(self, member: Request) -> int:
        width = min(self._wanted(member), self._cut.get(member, 1 << 30))
        return min(width, self._max_model_len - 1 - member.computed)

    def emitted_by(self, member: Request) -> int:
        return member.emitted

    def past_of(self, request: Request) -> int:
        return -1

    def cut(self, member: Request, tokens: int) -> None:
        self._cut[member] = tokens

    def receive(self, request: Request, *, padded: bool) -> None:
        raise AssertionError("no request is received")

    def draft(self, requests: int) -> Sequence[Request]:
        terms = self._terms
        if terms.shares is not None:
            if self._here.keys() != self._shared.keys():
                self._shared = dict(zip(self._here, terms.shares(list(self._here)), strict=True))
        elif terms.drafts is not None:
            self._everyone = min(terms.drafts(requests), terms.max_drafts)
        return ()

    def end_discarded(self) -> Sequence[Request]:
        return ()

    def newest(self) -> Request:
        return list(self._here)[-1]

    def join(self, request: Request, rejected: int = 0) -> None:
        self._joined += 1
        request.decoding = True
        request.admission = self._joined
        self._here[request] = None
        self.count += 1

    def rejoin(self, request: Request, past: int = -1) -> None:
        self.join(request)

    def leave(self, member: Request) -> None:
        del self._here[member]
        self.count -= 1
        self._cut.pop(member, None)
        member.decoding = False

    def held_by(self, member: Request) -> int:
        return -(-max(member.computed, member.reserved_tokens) // self._block_size)

    def blocks_of(self, member: Request) -> int:
        return max(0, -(-self._slots(member) // self._block_size) - self.held_by(member))

    def next_step(self, free: int, budget: int) -> tuple[Step, int] | None:
        tokens, context, blocks = self.totals()
        if tokens > budget or blocks > free:
            return None
        step = Step(self.count, context + tokens, [], [])
        step.draft_tokens, step.draft_depth = tokens - self.count, self.depth
        return step, blocks

    def blocks_for(self, steps: int, after: int = 0) -> int:
        raise AssertionError("it takes single steps")

    def contexts(self, steps: int) -> np.ndarray:
        raise AssertionError("it takes single steps")

    def steps_that_fit(self, free: int, limit: int) -> int:
        return 1

    def steps_to_completion(self) -> int:
        return 1

    def advance(self, steps: int) -> list[Request]:
        assert steps == 1
        self.steps += 1
        finished = []
        for member in list(self._here):
            member.reserved_tokens = max(member.reserved_tokens, self._slots(member))
            drafts, stopped = self.width_of(member) - 1, self._wanted(member) == 1
            accepted = self._terms.accepted(member, member.verifications, drafts) if drafts else 0
            # A round in which the drafter itself made nothing counts, one whose drafts were cut does not.
            member.verifications += drafts != 0 or (stopped and self._planned_drafts(member) > 0)
            before = member.emitted
            member.computed += 1 + accepted
            member.emitted = min(member.emitted + 1 + accepted, member.output_tokens)
            if drafts >= 0:
                for i, more in enumerate((1, drafts, accepted, member.emitted - before)):
                    self.counts[i] += more
            if member.emitted == member.output_tokens:
                self.leave(member)
                finished.append(member)
        self._cut.clear()
        return finished

    def _slots(self, member: Request) -> int:
        return min(member.computed + self.width_of(member) + self._terms.lookahead, self._max_model_len)
