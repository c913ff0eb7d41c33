"""Orders of the passes of a target and of its drafter in a round: in turn, in parallel, in chunks.

Each order assembles rounds from the passes, without prefill chunks as a line over context tokens, with them as a
number; `simtune.costs.drafting.compiled_rounds` has the formulas.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from simtune.costs.drafting.lines import TickLine
from simtune.costs.drafting.passes import DraftPasses, TargetPasses
from simtune.costs.protocol import ChunkList
from simtune.specs.schemes import RoundShape


class RoundOrder(ABC):
    """Time of rounds with one order of passes, without the host's time after the last pass.

    With `prepares_each` the host prepares every pass, and nothing hides that.
    """

    def __init__(
        self, shape: RoundShape, target: TargetPasses, drafter: DraftPasses, prepares_each: bool = False
    ) -> None:
        self.shape, self.target, self.drafter = shape, target, drafter
        self._prepares_each = prepares_each

    @abstractmethod
    def line(self, num_decodes: int, verify_tokens: int, depth: int) -> TickLine:
        """Ticks of a round without prefill chunks, by the context tokens that the target reads."""

    @abstractmethod
    def beside_chunks(
        self, num_decodes: int, verify_tokens: int, depth: int, context_tokens: int, chunks: ChunkList, completing: int
    ) -> int:
        """Ticks of a round with prefill chunks."""

    @abstractmethod
    def steps_prepared(self, depth: int) -> int:
        """Number of times that the host's time comes on top of the GPU's, if it prepares every pass."""


class InTurn(RoundOrder):
    """A verification of all drafts, then the next drafts."""

    def __init__(
        self, shape: RoundShape, target: TargetPasses, drafter: DraftPasses, prepares_each: bool = False
    ) -> None:
        super().__init__(shape, target, drafter, prepares_each)
        # Looked up in every round: taken out of the tables for speed.
        tables = target.tables
        self._linear, self._head, self._launch = tables.mixed.linear, tables.mixed.head, target.launch[True]
        self._prompts = tables.prompts
        self._largest = tables.largest_graphs[True]

    def line(self, num_decodes: int, verify_tokens: int, depth: int) -> TickLine:
        """Return the sum of both."""
        line = self.target.alone(num_decodes, verify_tokens)
        if not depth:
            return line
        if self.drafter.tables is None:
            return line.plus(self.drafter.ticks(num_decodes, depth, 0, False))
        # the drafter reads the contexts without the drafts that are verified
        shorter = verify_tokens - depth * num_decodes
        return line.added_to(self.drafter.line(num_decodes, depth, False).moved(shorter))

    def beside_chunks(
        self, num_decodes: int, verify_tokens: int, depth: int, context_tokens: int, chunks: ChunkList, completing: int
    ) -> int:
        """Return the sum of both, with drafts of the prompts just completed."""
        # Equal to `TargetPasses.beside_chunks` plus `chunks`; inlined for speed.
        new, length, number = 0, 0, len(chunks)
        for past, tokens in chunks:
            new += tokens
            length += past + tokens
        ticks = self._prompts(chunks) + self._linear[verify_tokens + new] + self._head[verify_tokens + completing]
        ticks += self.target.adapted
        if num_decodes:
            ticks += self.target.attention(num_decodes, verify_tokens, True).at(context_tokens)
        least = self._launch if verify_tokens + new <= self._largest else self.target.least(verify_tokens + new, True)
        if ticks < least:
            ticks = least
        if depth:
            drafting = num_decodes + completing
            if drafting:
                context = context_tokens - verify_tokens + depth * num_decodes
                context += completing * (length // number + depth)
                ticks += self.drafter.ticks(drafting, depth, context, True)
            ticks += self.drafter.chunks(drafting, depth, chunks, new)
        return ticks

    def steps_prepared(self, depth: int) -> int:
        """Return the sum for verification and drafts."""
        return 1 + self.drafter.passes(depth)


class Beside(RoundOrder):
    """Drafts made on the drafter's own devices while one target replica after the other begins a verification.

    With one replica the drafts are for the next verification; with several they fill the whole window of every decode.
    """

    def line(self, num_decodes: int, verify_tokens: int, depth: int) -> TickLine:
        """Return the larger of verification and drafts."""
        if not depth:
            return self.target.alone(num_decodes, verify_tokens)
        tokens, replicas = self._verified(num_decodes, verify_tokens, depth), self.shape.replicas
        verify = self.target.alone(num_decodes, tokens).moved(max(0, verify_tokens - tokens)).at_speed(replicas)
        draft = self.drafter.line(num_decodes, depth, False).moved(-depth * replicas * num_decodes)
        return verify.or_larger(draft.plus(self._host(num_decodes, depth, False)))

    def beside_chunks(
        self, num_decodes: int, verify_tokens: int, depth: int, context_tokens: int, chunks: ChunkList, completing: int
    ) -> int:
        """Return the larger of both; the chunks' time is not divided among replicas, which all compute them.

        The first drafts of a prompt just completed are made in its first round.
        """
        target, replicas = self.target, self.shape.replicas
        tokens = self._verified(num_decodes, verify_tokens, depth)
        ticks = target.beside_chunks(num_decodes, tokens, context_tokens - max(0, verify_tokens - tokens))
        verify = -(-ticks // replicas) + target.chunks(tokens, chunks, completing)
        new = sum(new for _, new in chunks)
        verify = max(verify, -(-target.least(tokens + new, True) // replicas))
        if not depth:
            return verify
        context = context_tokens + depth * replicas * num_decodes
        draft = self.drafter.ticks(num_decodes, depth, context, True)
        draft += self.drafter.chunks(num_decodes, depth, chunks, new)
        return max(verify, draft + self._host(num_decodes + len(chunks), depth, True))

    def _verified(self, num_decodes: int, verify_tokens: int, depth: int) -> int:
        """Tokens of the verification that begins."""
        return num_decodes * depth if depth and self.shape.replicas > 1 else verify_tokens

    def _host(self, num_seqs: int, depth: int, mixed: bool) -> int:
        """Ticks of the host before every pass of the drafter but one."""
        if not self._prepares_each:
            return 0
        tables = self.target.tables.mixed if mixed else self.target.tables.pure
        return (self.drafter.passes(depth) - 1) * tables.after[num_seqs]

    def steps_prepared(self, depth: int) -> int:
        """Return 1: for the target and one pass of the drafter."""
        return 1


class InChunks(RoundOrder):
    """A chain in chunks, each verified while the next is drafted, each with its share of the processors."""

    def line(self, num_decodes: int, verify_tokens: int, depth: int) -> TickLine:
        """Return the first chunk drafted, then the larger of both chunk by chunk, then the last chunk verified."""
        chunks = self.shape.chunks
        assert chunks is not None
        verifies, remaining = [], verify_tokens
        for part in self._parts(num_decodes, verify_tokens, depth):
            remaining -= part
            verifies.append(self.target.alone(num_decodes, part).moved(max(0, remaining)))
        line = verifies[-1]
        if not depth:
            return line
        shorter = verify_tokens - depth * num_decodes
        drafts = [self.drafter.line(num_decodes, depth, False, i).moved(shorter) for i in range(len(verifies))]
        line = line.added_to(drafts[0])
        for draft, verify in zip(drafts[1:], verifies[:-1], strict=True):
            slower = draft.at_speed(chunks.draft_share).or_larger(verify.at_speed(chunks.verify_share))
            line = line.added_to(slower)
        return line

    def beside_chunks(
        self, num_decodes: int, verify_tokens: int, depth: int, context_tokens: int, chunks: ChunkList, completing: int
    ) -> int:
        """Return the same; prefill chunks are computed with the first verification and the first drafts."""
        target, cut = self.target, self.shape.chunks
        assert cut is not None
        parts, remaining, verifies = self._parts(num_decodes, verify_tokens, depth), verify_tokens, []
        more, new = target.chunks(parts[0], chunks, completing), sum(new for _, new in chunks)
        for part in parts:
            remaining -= part
            ticks = target.beside_chunks(num_decodes, part, context_tokens - remaining) + more
            verifies.append(max(ticks, target.least(part + new, True)))
            more, new = 0, 0
        if not depth:
            return verifies[-1]
        context = context_tokens - verify_tokens + depth * num_decodes
        drafts = [self.drafter.ticks(num_decodes, depth, context, True, i) for i in range(len(parts))]
        drafts[0] += self.drafter.chunks(num_decodes, depth, chunks, sum(tokens for _, tokens in chunks))
        ticks = verifies[-1] + drafts[0]
        for draft, verify in zip(drafts[1:], verifies[:-1], strict=True):
            ticks += max(math.ceil(draft / cut.draft_share), math.ceil(verify / cut.verify_share))
        return ticks

    def _parts(self, num_decodes: int, verify_tokens: int, depth: int) -> list[int]:
        """Tokens that the target computes in each pass; drafts are taken to be spread evenly."""
        parts, remaining = [], verify_tokens
        if depth and num_decodes and self.shape.chunks is not None:
            for size in self.shape.chunks.sizes[:-1]:
                parts.append(min(remaining, num_decodes * size))
                remaining -= parts[-1]
        return [*parts, remaining]

    def steps_prepared(self, depth: int) -> int:
        """Return the sum for every chunk's verification and all drafts."""
        assert self.shape.chunks is not None
        return len(self.shape.chunks.sizes) + self.drafter.passes(depth)


def order_of(shape: RoundShape) -> type[RoundOrder]:
    """Return the order of the passes of a scheme."""
    if shape.overlapped:
        return Beside
    return InTurn if shape.chunks is None else InChunks
