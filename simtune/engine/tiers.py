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
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Written = Literal["computed", "evicted"]


class TierStore:
    """Content of a tier: tokens of each hash block, the one to be evicted next first."""

    __slots__ = ("_blocks", "capacity", "used")

    def __init__(self, capacity: int | None) -> None:
        """Make a store of `capacity` tokens; None: without a limit."""
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Lose all content."""
        self.used = 0
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()

    def tokens(self, name: Hashable) -> int:
        """Return the tokens of a block that are here, counted from its beginning."""
        return self._blocks.get(name, 0)

    def use(self, name: Hashable) -> None:
        """Let a block be evicted last, if it is here."""
        if name in self._blocks:
            self._blocks.move_to_end(name)

    def put(self, name: Hashable, tokens: int) -> Iterator[tuple[Hashable, int]]:
        """Keep the first `tokens` tokens of a block; yield the blocks that are evicted for it, with their tokens."""
        blocks = self._blocks
        before = blocks.get(name, 0)
        blocks[name] = max(before, tokens)
        blocks.move_to_end(name)
        self.used += blocks[name] - before
        while self.capacity is not None and self.used > self.capacity:
            evicted = blocks.popitem(last=False)
            self.used -= evicted[1]
            yield evicted


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

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers

    def clear(self) -> None:
        """Lose what belongs to the instance."""
        for tier in self.tiers:
            tier.pending = 0
            if not tier.shared:
                tier.store.clear()

    def find(self, names: Sequence[Hashable], unit: int, block_size: int, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens found in each tier after the first `start` tokens of a text and before token `stop`, in
        whole KV blocks; () if there are none."""
        hits, at = [0] * len(self.tiers), start
        while at < stop and (index := at // unit) < len(names):
            begin = index * unit
            number, tokens = max(
                ((number, tier.store.tokens(names[index])) for number, tier in enumerate(self.tiers)),
                key=lambda entry: (entry[1], -entry[0]),
            )
            end = min(begin + tokens, stop) // block_size * block_size
            if end <= at:
                break
            hits[number] += end - at
            at = end
            if end < begin + unit:
                break
        return tuple(hits) if at > start else ()

    def fetch(self, hits: Sequence[int], names: Sequence[Hashable], counts: bool) -> None:
        """Fetch tokens that were found in each tier; they are hits if the lookup `counts`. The blocks of the text that
        are somewhere are used."""
        for tier in self.tiers:
            for name in reversed(names):
                tier.store.use(name)
        for tier, tokens in zip(self.tiers, hits, strict=False):
            tier.pending += tokens
            tier.hit_tokens += tokens * counts

    def note_computed(self, names: Sequence[Hashable], unit: int, first: int, tokens: int) -> None:
        """Write the blocks from number `first` on of a text of which `tokens` tokens are computed."""
        for index in range(min(len(names), -(-tokens // unit)) - 1, first - 1, -1):
            for number, tier in enumerate(self.tiers):
                if tier.written == "computed":
                    self._put(number, names[index], min(unit, tokens - index * unit))

    def note_ended(self, names: Sequence[Hashable], private_tokens: int) -> None:
        """Use all blocks of a text whose request is over, the first ones last; its private tokens take room."""
        for number, tier in enumerate(self.tiers):
            if private_tokens and tier.written == "computed" and tier.store.capacity is not None:
                self._put(number, object(), private_tokens)
            for name in reversed(names):
                tier.store.use(name)

    def note_evicted(self, name: Hashable | None, tokens: int) -> None:
        """Take in a block that the device evicts; one without a name takes room."""
        if self.tiers[0].written == "evicted":
            self._put(0, object() if name is None else name, tokens)

    def _put(self, number: int, name: Hashable, tokens: int) -> None:
        below = number + 1
        cascades = below < len(self.tiers) and self.tiers[below].written == "evicted"
        for evicted in self.tiers[number].store.put(name, tokens):
            if cascades:
                self._put(below, *evicted)
