"""The paged KV cache, as far as scheduling depends on it: how many blocks are free."""

from __future__ import annotations

from simtune.engine.request import Request


class KvBlocks:
    """A pool of `total` equal blocks of `block_size` tokens. Blocks are counted, not named."""

    __slots__ = ("block_size", "free", "total")

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"total ({total}) and block_size ({block_size}) must be at least 1")
        self.total = self.free = total
        self.block_size = block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def held_by(self, request: Request) -> int:
        """Blocks of a request that does not decode just now (the batch knows those of its members)."""
        return self.blocks_for(max(request.computed, request.reserved_tokens))

    def take(self, blocks: int) -> None:
        assert blocks <= self.free, f"{blocks} blocks taken, {self.free} free"
        self.free -= blocks

    def give(self, blocks: int) -> None:
        self.free += blocks
        assert self.free <= self.total, f"{self.free} blocks free of {self.total}"

    def release(self, request: Request, again: bool = False) -> None:
        """Give back all that a request holds, which is not a member of the batch (any more), perhaps to come again."""
        tokens = request.computed if request.computed > request.reserved_tokens else request.reserved_tokens
        self.give(-(-tokens // self.block_size))
        request.reserved_tokens = 0

    def clear(self) -> None:
        """All blocks are free, and what they contained is lost."""
        self.free = self.total
