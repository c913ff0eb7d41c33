"""Block reuse as TensorRT-LLM does it: blocks are stored when a prompt is complete, and found block by block.

Free blocks retain their content and are evicted in the order in which they came free, the tails of texts first
(`simtune.engine.prefix`). A block with the content of a stored one is not stored a second time. A block of which only
the beginning is found is copied: the copy's tokens count as computed, and the block itself stays where it is.

Copies begin with whole hash blocks, so they need KV blocks of several of those; of blocks that begin alike, the one
stored last is found. Left out: that a leaf without holders is taken instead of copied, and that the last, partly filled
block of a text can be found.
"""

from __future__ import annotations

from collections.abc import Hashable

from simtune.engine.kv import Hit
from simtune.engine.prefix import PrefixCache
from simtune.engine.request import CachedRun, Request


class ReusedBlocks(PrefixCache):
    """KV blocks that can be found by their content, or by the beginning of it."""

    __slots__ = ("_hash_tokens", "_whole")

    def __init__(self, total: int, block_size: int, hash_block_tokens: int) -> None:
        self._hash_tokens = hash_block_tokens
        super().__init__(total, block_size, hash_block_tokens)

    def clear(self) -> None:
        """Free all blocks; their content is lost."""
        super().clear()
        # name of each hash block in a stored KV block that is not its last, and the name of the KV block
        self._whole: dict[Hashable, Hashable] = {}

    def find(self, request: Request) -> Hit:
        """Return the longest stored beginning of a request, tokens of a block to copy included; changes nothing."""
        hit, size = super().find(request), self._each
        if size == 1 or hit.private is not None or hit.copied_tokens:
            return hit
        first = hit.blocks * size
        most = (request.known_tokens - 1) // self._hash_tokens
        for index in range(min(first + size - 1, most, len(request.blocks)) - 1, first - 1, -1):
            if self._whole.get(request.blocks[index]) in self._cached:
                return hit._replace(copied_tokens=(index + 1 - first) * self._hash_tokens)
        return hit

    def name(self, request: Request, tokens: int) -> None:
        """Store the blocks that the first `tokens` tokens of a request fill."""
        super().name(request, tokens)
        size, blocks = self._each, request.blocks
        if size > 1:
            for end in range(size, min(len(blocks), tokens // self._hash_tokens) + 1, size):
                self._whole.update(dict.fromkeys(blocks[end - size : end - 1], blocks[end - 1]))

    def first_missing(self, request: Request) -> Hashable | None:
        """Return the name of the first whole block of a request that is not stored; see `KvBlocks.first_missing`."""
        complete = request.known_tokens // self.block_size // self._hash_blocks
        for name in self._names(request)[:complete]:
            run = self._cached.get(name)
            if run is None or run.size < self._hash_blocks:
                return name
        return None

    def _add_twin(self, run: CachedRun) -> None:
        run.name = None
