"""The paged KV cache, as far as scheduling depends on it: how many blocks are free, and what can be found in them."""

from __future__ import annotations

from typing import NamedTuple

from simtune.engine.request import CachedRun, Request


class Hit(NamedTuple):
    """The beginning of a waiting request that is in the prefix cache."""

    runs: list[CachedRun]
    private: CachedRun | None
    """What a request that was preempted finds of its own tokens, behind `runs`."""
    blocks: int
    """KV blocks found."""
    idle: int
    """How many of them nobody holds: they count as free until they are held again."""


NO_HIT = Hit([], None, 0, 0)


class KvBlocks:
    """A pool of `total` equal blocks of `block_size` tokens, without a prefix cache. Blocks are counted, not named."""

    __slots__ = ("block_size", "caches", "free", "total")

    queried_tokens = 0
    """Tokens of all requests that were looked up in the prefix cache when they were admitted for the first time."""
    hit_tokens = 0
    """How many of them were in it."""

    def __init__(self, total: int, block_size: int, *, caches: bool = False) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"total ({total}) and block_size ({block_size}) must be at least 1")
        self.total = self.free = total
        self.block_size = block_size
        self.caches = caches
        """Whether anything is found again: where it is not, `find`, `hold` and `name` need not be called."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of one request fill, the last of them perhaps in part."""
        return -(-tokens // self.block_size)

    def held_by(self, request: Request) -> int:
        """Blocks of a request that is in no batch (a batch knows those of its members)."""
        return self.blocks_for(max(request.computed, request.reserved_tokens))

    def freed_by(self, request: Request) -> int:
        """Blocks that come free when a request that is in no batch gives back what it holds."""
        return self.held_by(request)

    def take(self, blocks: int) -> None:
        """Take so many of the free blocks; there must be enough."""
        self.free = free = self.free - blocks
        assert free >= 0, f"{blocks} blocks taken, {free + blocks} free"

    def give(self, blocks: int) -> None:
        """Give blocks back that contain nothing to be found again."""
        self.free += blocks
        assert self.free <= self.total, f"{self.free} blocks free of {self.total}"

    def find(self, request: Request) -> Hit:
        """What of a waiting request is cached; changes nothing."""
        return NO_HIT

    def hold(self, request: Request, hit: Hit) -> None:
        """Let a request hold what was found of it: those tokens count as computed."""

    def name(self, request: Request, tokens: int) -> None:
        """Let others find the first `tokens` tokens of a request, for which it holds blocks."""

    def release(self, request: Request, named_tokens: int | None = None, *, returns: bool = False) -> None:
        """Give back all blocks of a request that is in no batch (any more).

        Its first `named_tokens` tokens, all that are computed unless given, can be found by others; where it `returns`
        after a preemption, also by itself.
        """
        tokens = request.computed if request.computed > request.reserved_tokens else request.reserved_tokens
        self.free += -(-tokens // self.block_size)
        assert self.free <= self.total, f"{self.free} blocks free of {self.total}"
        request.reserved_tokens = 0

    def clear(self) -> None:
        """All blocks are free, and what they contained is lost."""
        self.free = self.total
