"""Names of the blocks of texts that requests read and continue, as ranges: nothing is written out before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import overload

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Ints


class TextBlocks(Sequence[tuple[int, ...]]):
    """Names of the blocks of each turn's text, made on access: agents' prompts have millions.

    A text is a sequence of ranges of names; texts of one session begin with the same ones.
    """

    def __init__(self, texts: Sequence[tuple[range, ...]], text_of: Ints, blocks: Ints) -> None:
        """`text_of[i]` is the text that request i reads and continues, `blocks[i]` the number of its leading blocks
        that the request's prompt and answer fill."""
        self._texts, self._text_of, self._blocks = texts, text_of, blocks

    def __len__(self) -> int:
        return len(self._text_of)

    @overload
    def __getitem__(self, at: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> TextBlocks: ...
    def __getitem__(self, at: int | slice) -> tuple[int, ...] | TextBlocks:
        if isinstance(at, slice):
            return TextBlocks(self._texts, self._text_of[at], self._blocks[at])
        return tuple(islice(chain.from_iterable(self._texts[self._text_of[at]]), int(self._blocks[at])))

    @cached_property
    def end(self) -> int:
        """A number above all names."""
        return max((names.stop for text in self._texts for names in text), default=0)

    def kept(self, which: NDArray[np.bool_]) -> TextBlocks:
        """Return the blocks of the requests for which `which` is true."""
        return TextBlocks(self._texts, self._text_of[which], self._blocks[which])


def leading(text: Iterable[range], blocks: int) -> tuple[range, ...]:
    """Return the ranges of the first `blocks` names of a text."""
    ranges = []
    for names in text:
        if blocks <= 0:
            break
        ranges.append(names[:blocks])
        blocks -= len(ranges[-1])
    return tuple(ranges)
