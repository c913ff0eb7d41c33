"""Paged KV cache, as far as scheduling depends on it: the number of free blocks, and their findable content."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from simtune.engine.request import CachedRun, Request
from simtune.engine.tiers import TierStack


class Hit(NamedTuple):
    """Beginning of a waiting request that is in the prefix cache."""

    runs: list[CachedRun]
    private: CachedRun | None
    """Run of its own tokens that a preempted request finds, after `runs`."""
    blocks: int
    """KV blocks found."""
    idle: int
    """Number of found blocks without a holder: they count as free until they are held."""
    copied_tokens: int = 0
    """Tokens found after `blocks`, which are copied into new blocks of the request."""
    fetched: tuple[int, ...] = ()
    """Number of these that come from each tier below the device; () if none do."""


NO_HIT = Hit([], None, 0, 0)


class KvBlocks:
    """A pool of `total` equal blocks of `block_size` tokens, without a prefix cache. Blocks are counted, not named."""

    __slots__ = ("block_size", "caches", "free", "least_free", "tiers", "total")

    counts_hits = True
    """True if `queried_tokens` and `hit_tokens` count each request once, so that they can be reported."""
    queried_tokens = 0
    """Tokens of all requests that were looked up in the prefix cache when they were admitted for the first time."""
    hit_tokens = 0
    """Number of those tokens that were in it."""

    def __init__(self, total: int, block_size: int, *, caches: bool = False) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"total ({total}) and block_size ({block_size}) must be at least 1")
        self.total = self.free = total
        self.least_free = total
        """Fewest blocks that were free so far, after blocks were taken."""
        self.block_size = block_size
        self.caches = caches
        """True if content can be found; if not, `find`, `hold` and `name` need not be called."""
        self.tiers: TierStack | None = None
        """Tiers below the prefix cache; only caches that find content by name have any."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of one request fill, the last of them perhaps in part."""
        return -(-tokens // self.block_size)

    def held_by(self, request: Request) -> int:
        """Blocks of a request that is in no batch (a batch counts those of its members)."""
        return self.blocks_for(max(request.computed, request.reserved_tokens))

    def freed_by(self, request: Request) -> int:
        """Blocks that become free when a request that is in no batch frees all its blocks."""
        return self.held_by(request)

    def take(self, blocks: int) -> None:
        """Take `blocks` of the free blocks; there must be enough."""
        self.free = free = self.free - blocks
        assert free >= 0, f"{blocks} blocks taken, {free + blocks} free"
        if free < self.least_free:
            self.least_free = free

    def give(self, blocks: int) -> None:
        """Free blocks without content that could be found."""
        self.free += blocks
        assert self.free <= self.total, f"{self.free} blocks free of {self.total}"

    def find(self, request: Request) -> Hit:
        """Return the cached beginning of a waiting request; changes nothing."""
        return NO_HIT

    def first_missing(self, request: Request) -> Hashable | None:
        """Return the name of the first whole block of a request that is not cached; None if all are, or if no other
        request can have it."""
        return None

    def hold(self, request: Request, hit: Hit) -> None:
        """Let a request hold the blocks of a hit: their tokens count as computed."""

    def name(self, request: Request, tokens: int) -> None:
        """Let others find the first `tokens` tokens of a request, for which it holds blocks."""

    def release(self, request: Request, named_tokens: int | None = None, *, returns: bool = False) -> None:
        """Free all blocks of a request that is in no batch (any more).

        Its first `named_tokens` tokens, all computed ones unless given, can be found by others; if it `returns` after a
        preemption, also by itself.
        """
        tokens = request.computed if request.computed > request.reserved_tokens else request.reserved_tokens
        self.free += -(-tokens // self.block_size)
        assert self.free <= self.total, f"{self.free} blocks free of {self.total}"
        request.reserved_tokens = 0

    def clear(self) -> None:
        """Free all blocks; their content is lost."""
        self.free = self.total
