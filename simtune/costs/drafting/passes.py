"""Ticks of the passes of a target and of its drafter, from which rounds are assembled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtune.arrays import Ints
from simtune.costs.compiled import DecodeTable, StepTables
from simtune.costs.drafting.lines import TickLine
from simtune.costs.protocol import ChunkList
from simtune.costs.ticks import to_ticks
from simtune.specs.drafters import Drafter
from simtune.specs.schemes import RoundShape

"""Prefill chunks: (past tokens, new tokens)."""


class WideAttention:
    """Decode attention with several query tokens for each sequence, at all tabulated contexts."""

    def __init__(self, tables: StepTables) -> None:
        self._tables = tables
        self._alike = tables.model.correction(False) == tables.model.correction(True)
        self._widths: dict[tuple[int, bool], DecodeTable] = {}
        self._ticks: dict[tuple[int, bool, int], Ints] = {}

    def ticks(self, width: int, sequences: int, mixed: bool) -> Ints:
        """Ticks of `sequences` with `width` query tokens each; `mixed` in steps with prefill chunks."""
        mixed = mixed and not self._alike
        ticks = self._ticks.get(key := (width, mixed, sequences))
        if ticks is None:
            if (width, mixed) not in self._widths:
                self._widths[width, mixed] = self._tables.attention(0, mixed, width)
            ticks = self._ticks[key] = self._widths[width, mixed].at_knots(sequences)
        return ticks

    def line(self, sequences: int, ticks: Ints) -> TickLine:
        """Return ticks at all tabulated contexts as a line over the context tokens of `sequences` sequences."""
        return TickLine.through(self._tables.contexts.astype(np.int64) * sequences, ticks)


class TargetPasses:
    """Passes of the target over the tokens that its decodes verify, alone or beside prefill chunks."""

    adapted = 0
    """Ticks of LoRA adapters' products in each pass."""

    def __init__(self, tables: StepTables) -> None:
        self.tables = tables
        self.launch = [to_ticks(tables.scale(mixed) * tables.model.launches.floors_s[mixed]) for mixed in (False, True)]
        """Least ticks of a pass that is no larger than the largest graph, without and with chunks."""
        self._attention = WideAttention(tables)
        self._lines: dict[tuple[int, int, bool], TickLine] = {}

    def attention(self, num_decodes: int, verify_tokens: int, mixed: bool) -> TickLine:
        """Return the attention of `verify_tokens` tokens of all decodes together.

        If they are no multiple of the decodes, it is interpolated between the two nearest widths.
        """
        key = (num_decodes, verify_tokens, mixed)
        line = self._lines.get(key)
        if line is None:
            width, remainder = divmod(max(verify_tokens, num_decodes), num_decodes)
            ticks = self._attention.ticks(width, num_decodes, mixed)
            if remainder:
                above = self._attention.ticks(width + 1, num_decodes, mixed)
                ticks = ticks + (above - ticks) * remainder // num_decodes
            line = self._lines[key] = self._attention.line(num_decodes, ticks)
        return line

    def alone(self, num_decodes: int, verify_tokens: int) -> TickLine:
        """Return a whole pass without chunks."""
        pure = self.tables.pure
        line = self.attention(num_decodes, verify_tokens, False).plus(pure.head[verify_tokens])
        shared = self.tables.shared
        saved = shared.ticks(num_decodes, verify_tokens) if shared is not None else 0
        line = line.plus(pure.linear[verify_tokens] - saved + self.adapted)
        least = self.least(verify_tokens, False)
        return line.or_larger(TickLine.flat(least)) if least else line

    def least(self, num_tokens: int, mixed: bool) -> int:
        """Return the least ticks of a pass over `num_tokens` tokens: those of launching its kernels without a graph."""
        launch = self.launch[mixed]
        return launch if num_tokens <= self.tables.largest_graphs[mixed] else max(launch, self.tables.launched(mixed))

    def beside_chunks(self, num_decodes: int, verify_tokens: int, context_tokens: int) -> int:
        """Ticks of a pass in a step with chunks, without the chunks' own part and without its least ticks."""
        mixed = self.tables.mixed
        ticks = mixed.linear[verify_tokens] + mixed.head[verify_tokens] + self.adapted
        if num_decodes:
            ticks += self.attention(num_decodes, verify_tokens, True).at(context_tokens)
        return ticks

    def chunks(self, verify_tokens: int, chunks: ChunkList, completing: int) -> int:
        """Ticks that prefill chunks, `completing` of which end their prompt, add to a pass over `verify_tokens`
        tokens."""
        tables, linear, head = self.tables, self.tables.mixed.linear, self.tables.mixed.head
        new = sum(tokens for _, tokens in chunks)
        together = min(len(linear) - 1, verify_tokens + new)
        ticks = tables.prompts(chunks) + linear[together] - linear[together - new]
        return ticks + head[verify_tokens + completing] - head[verify_tokens]


class DraftPasses:
    """Passes of a drafter; the first one reads the tokens that became certain in the round before."""

    def __init__(
        self,
        drafter: Drafter,
        shape: RoundShape,
        target: StepTables,
        tables: StepTables | None,
        join: Sequence[int] = (),
        heads: Sequence[int] = (),
    ) -> None:
        """Take the tables of the drafting network, None if nothing or only parallel heads run on the GPU.

        `join` are ticks of joining embeddings to hidden states, by tokens; `heads` those of the parallel heads, by
        sequences. Either is empty if there are none.
        """
        self.tables = tables
        self._drafter, self._shape, self._target = drafter, shape, target
        self._join, self._heads = join, heads
        self._attention = None if tables is None else WideAttention(tables)
        self._lines: dict[tuple[int, int, bool, int], TickLine] = {}

    def passes(self, depth: int) -> int:
        """Number of consecutive passes that make `depth` consecutive drafts."""
        return self._drafter.passes(depth)

    def first_width(self, depth: int) -> int:
        """Tokens of a sequence that are read as the first draft is made: as many as may have been accepted in the round
        before; if drafts overlap with verification, only the last token."""
        return 1 if self._shape.overlapped else depth + 1

    def ticks(self, sequences: int, depth: int, context_tokens: int, mixed: bool, part: int = 0) -> int:
        """Ticks of the drafts of `sequences` sequences, or of one chunk of them if they are made in chunks."""
        if not sequences:
            return 0
        if self.tables is not None:
            line = self._lines.get((sequences, depth, mixed, part))
            return (line or self.line(sequences, depth, mixed, part)).at(context_tokens)
        return round(self._target.scale(mixed) * self._heads[sequences]) if self._heads else 0

    def line(self, sequences: int, depth: int, mixed: bool, part: int = 0) -> TickLine:
        """Return `ticks` by context tokens, for a drafter that is a network."""
        key = (sequences, depth, mixed, part)
        line = self._lines.get(key)
        if line is None:
            if self._drafter.at_once:
                ticks = self._pass(sequences, depth, sequences * depth, mixed)
            else:
                chunks, width = self._shape.chunks, self._shape.width
                further = self._pass(sequences, width, sequences * width, mixed)
                ticks = further * (depth if chunks is None else chunks.sizes[part])
                # The first pass is wider: it reads the accepted tokens.
                if part == 0:
                    ticks = ticks - further + self._pass(sequences, self.first_width(depth), sequences, mixed)
            assert self._attention is not None
            line = self._lines[key] = self._attention.line(sequences, ticks)
        return line

    def chunks(self, sequences: int, depth: int, chunks: ChunkList, new: int) -> int:
        """Ticks that prefill chunks of `new` tokens in all add to the first pass, which drafts for `sequences`
        sequences."""
        tables, join = self.tables, self._join
        if tables is None:
            return 0
        linear = tables.mixed.linear
        most, tokens = len(linear) - 1, sequences * self.first_width(depth)
        without = tokens if tokens < most else most
        together = tokens + new if tokens + new < most else most
        ticks = tables.prompts(chunks) + linear[together] - linear[without]
        if join:
            ticks += join[together] - join[without]
        return ticks

    def _pass(self, sequences: int, width: int, samples: int, mixed: bool) -> Ints:
        """Ticks of one pass over `width` tokens of each sequence, at all contexts."""
        assert self.tables is not None
        assert self._attention is not None
        tables = self.tables.mixed if mixed else self.tables.pure
        scale = self.tables.scale(mixed)
        tokens = min(sequences * width, len(tables.linear) - 1)
        ticks = self._attention.ticks(width, sequences, mixed)
        ticks = ticks + tables.linear[tokens] + tables.head[min(samples, len(tables.head) - 1)]
        launch = to_ticks(scale * self.tables.model.launches.least_s(sequences * width, mixed))
        joins = round(scale * self._join[tokens]) if self._join else 0
        return np.maximum(ticks, launch) + joins
