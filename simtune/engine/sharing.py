"""Block sharing as transformers' continuous batching does it: complete blocks are identified by their content.

A block is complete when a step has computed the last token in it; a block with the same content as another one is given
back, and the other is shared by both. Complete blocks without holders can be found until the engine runs out of blank
ones; then the one that became free last is blanked first. A request looks up the beginning of its text when it is
admitted, also after a reset; at least one token is computed again.
"""

from __future__ import annotations

from collections.abc import Hashable

from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request


class SharedBlocks(KvBlocks):
    """KV blocks that several requests may share. Blocks are counted, and complete ones identified by name."""

    counts_hits = False  # a candidate that is put back is counted again when it is looked up again
    __slots__ = (
        "_blank",
        "_complete",
        "_hash_blocks",
        "_holders",
        "_idle",
        "_names_each",
        "hit_tokens",
        "queried_tokens",
    )

    def __init__(self, total: int, block_size: int, hash_block_tokens: int) -> None:
        """Make the pool. Raises ValueError unless hash_block_tokens is a multiple of block_size, or divides it."""
        super().__init__(total, block_size)
        if hash_block_tokens % block_size and block_size % hash_block_tokens:
            raise ValueError(
                f"hash_block_tokens ({hash_block_tokens}) must be a multiple of block_size ({block_size}), or divide it"
            )
        self._hash_blocks = max(1, hash_block_tokens // block_size)
        self._names_each = max(1, block_size // hash_block_tokens)
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Free all blocks; their content is lost."""
        super().clear()
        self._blank = self.total  # free blocks with nothing to find in them
        self._holders: dict[Hashable, int] = {}  # of every complete block, by its name
        self._idle: dict[Hashable, None] = {}  # those without holders, in the order in which they came free
        self._complete: dict[Request, list[Hashable]] = {}  # the complete blocks of a request, the first it holds

    def take(self, blocks: int) -> None:
        """Take `blocks` of the free blocks, blank ones first, then those that became free last."""
        super().take(blocks)
        self._blank -= blocks
        while self._blank < 0:
            name, _ = self._idle.popitem()
            del self._holders[name]
            self._blank += 1

    def give(self, blocks: int) -> None:
        """Free blocks without content that could be found."""
        super().give(blocks)
        self._blank += blocks

    def match(self, request: Request) -> int:
        """Let a newcomer hold the cached beginning of its text; return its number of tokens, at most all but one."""
        hits: list[Hashable] = []
        for block in range((request.known_tokens - 1) // self.block_size):
            name = self._name(request, block)
            if name not in self._holders:
                break
            self._hold(name)
            hits.append(name)
        tokens = len(hits) * self.block_size
        if hits:
            self._complete[request] = hits
        if not request.preemptions:
            self.queried_tokens += request.known_tokens
            self.hit_tokens += tokens
        return tokens

    def name(self, request: Request, tokens: int) -> None:
        """Mark the blocks filled by the first `tokens` tokens of a request, which are computed, as complete."""
        complete = self._complete.setdefault(request, [])
        for block in range(len(complete), tokens // self.block_size):
            name = self._name(request, block)
            complete.append(name)
            if name in self._holders:
                self._hold(name)
                self.give(1)
            else:
                self._holders[name] = 1

    def release(self, request: Request, named_tokens: int | None = None, *, returns: bool = False) -> None:
        """Free all blocks of a request; complete ones without other holders can still be found."""
        self.name(request, request.computed)
        complete = self._complete.pop(request)
        self.give(self.held_by(request) - len(complete))
        for name in complete:
            self._holders[name] -= 1
            if not self._holders[name]:
                self._idle[name] = None
                self.free += 1
        request.reserved_tokens = 0

    def freed_by(self, request: Request) -> int:
        """Blocks that only this request holds."""
        complete = self._complete.get(request, ())
        return self.held_by(request) - sum(self._holders[name] > 1 for name in complete)

    def _hold(self, name: Hashable) -> None:
        if name in self._idle:
            del self._idle[name]
            self.free -= 1
        self._holders[name] += 1

    def _name(self, request: Request, block: int) -> Hashable:
        """Return the name of a full block's content, the text before it included. Answers are named by their
        request."""
        index, part = divmod(block, self._hash_blocks)
        # a block of several hash blocks has the name of the last, which includes the text before it
        index = index * self._names_each + self._names_each - 1
        if index < len(request.blocks) and (block + 1) * self.block_size <= request.prompt_tokens:
            return request.blocks[index], part
        return request, block
