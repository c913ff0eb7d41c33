"""Names of the blocks of prompts with media whose text has named blocks as well: those of a trace.

Engines hash a block with all tokens before it, where the tokens of an item are hashed with its identity (vLLM 0.33:
`_gen_mm_extra_hash_keys` of vllm/v1/core/kv_cache_utils.py). So a block is named by the last block of text that it
reaches into, by all items that begin before its end, with their places, and by its number. Text beyond the named
blocks, and an item that never comes again, are shared with no request, so names end there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from simtune.workload.media import RequestMedia

_TEXT_BITS = 96
"""Bits of the name of a block of text in the name of a block."""
_NUMBER_BITS = 32
"""Bits of the number of a block in its name."""
_MOST_KEPT = 1 << 21
"""Names that one object keeps, for all of its prompts: a search asks for the same ones often."""


class MediaBlocks(Sequence[tuple[int, ...]]):
    """Names of the blocks of prompts, made on access."""

    def __init__(
        self, texts: Sequence[tuple[int, ...]] | None, text_block: int, media: RequestMedia, block_tokens: int
    ) -> None:
        """Name blocks of `block_tokens`. `texts` name the blocks of the text of each prompt, of `text_block` tokens, a
        multiple of `block_tokens`; None if no text is shared."""
        self._texts, self._text_block = texts, text_block
        self._media, self._size = media, block_tokens
        self._names: dict[int, tuple[int, ...]] = {}
        self._num_kept = 0

    def __len__(self) -> int:
        return len(self._media.begin) - 1

    @overload
    def __getitem__(self, at: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> MediaBlocks: ...
    def __getitem__(self, at: int | slice) -> tuple[int, ...] | MediaBlocks:
        if isinstance(at, slice):
            return self._rows(np.arange(len(self))[at])
        number = range(len(self))[at]
        if number not in self._names:
            names = tuple(self._of(number))
            if self._num_kept + len(names) > _MOST_KEPT:
                return names
            self._names[number] = names
            self._num_kept += len(names)
        return self._names[number]

    def kept(self, which: NDArray[np.bool_]) -> MediaBlocks:
        """Return the blocks of the requests for which `which` is true."""
        return self._rows(np.flatnonzero(which))

    def _rows(self, rows: NDArray[np.int64]) -> MediaBlocks:
        texts = None if self._texts is None else tuple(self._texts[i] for i in rows.tolist())
        return MediaBlocks(texts, self._text_block, self._media.rows(rows), self._size)

    def _of(self, number: int) -> Iterator[int]:
        """Yield the names of the blocks of one prompt."""
        text: tuple[int, ...] = () if self._texts is None else self._texts[number]
        named_tokens, size = len(text) * self._text_block, self._size
        block = 0
        for part in self._parts(number):
            last = part.end + named_tokens - part.text_before if named_tokens >= part.text_before else 0
            stop = last // size if part.next_start is None else min(last, part.next_start) // size
            for at in range(block, stop):
                # the text up to the end of the block; none of it behind the item that has the end
                tokens = part.text_before + max(0, (at + 1) * size - part.end)
                reached = text[-(-tokens // self._text_block) - 1] + 1 if tokens else 0
                yield ((part.items << _NUMBER_BITS | at) << _TEXT_BITS) + reached
            block = max(block, stop)

    def _parts(self, number: int) -> Iterator[_Part]:
        """Yield the parts of a prompt between the beginnings of its items, up to the first that never comes again."""
        rows = slice(*self._media.begin[number : number + 2].tolist())
        within = [False] * (rows.stop - rows.start) if self._media.group_s is None else self._media.group_s[rows] > 0
        text_before = past = items = tokens = 0
        for item, repeated, inside in zip(
            self._media.of(number), self._media.repeated[rows].tolist(), within, strict=True
        ):
            yield _Part(items, text_before, past, item.start)
            if not repeated:
                return
            # sound within its video begins where that does, and has no text between
            text_before, tokens = text_before if inside else item.start - tokens, tokens + item.shape.tokens
            past = text_before + tokens
            items = int.from_bytes(blake2b(f"{items},{item.name},{item.start}".encode(), digest_size=7).digest(), "big")
        yield _Part(items, text_before, past, None)


class _Part(NamedTuple):
    """Part of a prompt from the beginning of an item to that of the next."""

    items: int
    """Digest of the items that began before; 0 without any."""
    text_before: int
    """Tokens of text before the last item that began."""
    end: int
    """Tokens of the prompt up to the end of that item."""
    next_start: int | None
    """Tokens of the prompt before the next item; None if none follows."""
