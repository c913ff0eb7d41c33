"""Tiers below the prefix cache of a device: host memory, disks, a store that instances share.

A tier keeps hash blocks by name, and evicts those that were used least recently. It is written when an engine computes
tokens, or with what the level above it evicts. A lookup goes on where the device's own cache ends: as long as a tier
has the next block, its tokens are fetched into blocks of the request, and count as computed. Blocks without a name (the
private part of a text) take room in a tier, and are not found.

At its end a request uses all its blocks, the first ones last, so that texts are evicted from their tails, as in the
device (OffloadingManager of vLLM, HostKVCache of SGLang). Left out: what writing costs, and that a preempted request
finds its private blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from simtune.engine.request import Request

Written = Literal["computed", "evicted"]


class TierStore:
    """Content of a tier: tokens of each hash block, the one to be evicted next first."""

    __slots__ = ("_blocks", "capacity", "tokens", "used")

    def __init__(self, capacity: int | None) -> None:
        """Make a store of `capacity` tokens; None: without a limit."""
        self.capacity = capacity
        self.used = 0
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()
        self.tokens = self._blocks.get
        """Returns the tokens of a block that are here, counted from its beginning; None if the block is not."""

    def clear(self) -> None:
        """Lose all content."""
        self.used = 0
        self._blocks.clear()

    def use(self, names: Sequence[Hashable]) -> None:
        """Let the blocks of a text that are here be evicted last, and the first of them after the others."""
        if self.capacity is None:
            return  # without evictions the order is never read
        blocks, move_to_end = self._blocks, self._blocks.move_to_end
        for name in reversed(names):
            if name in blocks:
                move_to_end(name)

    def put(self, names: Sequence[Hashable], unit: int, last_tokens: int) -> list[tuple[Hashable, int]]:
        """Keep blocks of `unit` tokens, of the last one its first `last_tokens`; return the blocks that are evicted for
        them, with their tokens."""
        blocks, move_to_end, stored_tokens, tokens = self._blocks, self._blocks.move_to_end, self.used, last_tokens
        for name in reversed(names):
            before = blocks.get(name)
            if before is None:
                blocks[name] = tokens
                stored_tokens += tokens
            else:
                if self.capacity is not None:
                    move_to_end(name)
                if before < tokens:
                    blocks[name] = tokens
                    stored_tokens += tokens - before
            tokens = unit
        evicted = []
        if self.capacity is not None:
            while stored_tokens > self.capacity:
                evicted.append(blocks.popitem(last=False))
                stored_tokens -= evicted[-1][1]
        self.used = stored_tokens
        return evicted


@dataclass(slots=True)
class Tier:
    """A tier as one engine core sees it."""

    name: str
    store: TierStore
    written: Written = "computed"
    shared: bool = False
    """True if the store outlives the instance, and other instances have it too."""
    hit_tokens: int = 0
    """Prompt tokens found here when requests were admitted for the first time."""
    pending: int = 0
    """Tokens to fetch before or in the coming step."""


class TierStack:
    """Tiers of one engine core, the fastest first; blocks have names for each `unit` tokens."""

    loads_ahead = False
    """True if requests wait for their blocks before they are admitted (`simtune.engine.offloading`)."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers
        self._tokens_in = [tier.store.tokens for tier in tiers]
        self.takes_evicted = tiers[0].written == "evicted"
        """True if `note_evicted` must be called for what the device evicts."""

    def clear(self) -> None:
        """Lose what belongs to the instance."""
        for tier in self.tiers:
            tier.pending = 0
            if not tier.shared:
                tier.store.clear()

    def find(self, names: Sequence[Hashable], unit: int, block_size: int, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens found in each tier after the first `start` tokens of a text and before token `stop`, in
        whole KV blocks; () if there are none."""
        hits, at, count = [0] * len(self.tiers), start, len(names)
        while at < stop and (index := at // unit) < count:
            name, number, tokens = names[index], 0, 0
            for place, tokens_in in enumerate(self._tokens_in):
                kept_tokens = tokens_in(name)
                if kept_tokens is not None and kept_tokens > tokens:
                    number, tokens = place, kept_tokens
                    if tokens == unit:
                        break
            end = min(index * unit + tokens, stop) // block_size * block_size
            if end <= at:
                break
            hits[number] += end - at
            at = end
            if tokens < unit:
                break
        return tuple(hits) if at > start else ()

    def fetch(self, hits: Sequence[int], names: Sequence[Hashable], counts: bool) -> None:
        """Fetch tokens that were found in each tier; they are hits if the lookup `counts`. All blocks that were found,
        also in the device, are used: those with these names."""
        for tier in self.tiers:
            tier.store.use(names)
        for tier, tokens in zip(self.tiers, hits, strict=False):
            tier.pending += tokens
            tier.hit_tokens += tokens * counts

    def note_computed(self, names: Sequence[Hashable], unit: int, first: int, tokens: int) -> None:
        """Write the blocks from number `first` on of a text of which `tokens` tokens are computed."""
        stop = min(len(names), -(-tokens // unit))
        if stop <= first:
            return
        for number, tier in enumerate(self.tiers):
            if tier.written == "computed":
                self._put(number, names[first:stop], unit, min(unit, tokens - (stop - 1) * unit))

    def note_ended(self, request: Request, names: Sequence[Hashable], private_tokens: int, tokens: int) -> None:
        """Use all blocks of the text of a request that is over, the first ones last; its private tokens take room.
        `tokens` of it were computed and can be found."""
        for number, tier in enumerate(self.tiers):
            if private_tokens and tier.written == "computed" and tier.store.capacity is not None:
                self._put(number, [object()], private_tokens, private_tokens)
            tier.store.use(names)

    def note_evicted(self, name: Hashable | None, tokens: int) -> None:
        """Take in a block that the device evicts; one without a name takes room."""
        self._put(0, [object() if name is None else name], tokens, tokens)

    def note_tail(self, name: Hashable | None, gone: int, size: int, block_size: int) -> None:
        """Take in the last `gone` of `size` KV blocks under a name. Those without one go block by block, so that it
        does not matter how many are needed at a time."""
        if name is not None:
            self.note_evicted(name, size * block_size)
            return
        for _ in range(gone):
            self.note_evicted(None, block_size)

    def _put(self, number: int, names: Sequence[Hashable], unit: int, last_tokens: int) -> None:
        evicted, below = self.tiers[number].store.put(names, unit, last_tokens), number + 1
        if evicted and below < len(self.tiers) and self.tiers[below].written == "evicted":
            for name, tokens in evicted:
                self._put(below, [name], tokens, tokens)
