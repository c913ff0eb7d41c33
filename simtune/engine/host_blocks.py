"""KV blocks in host memory, as vLLM's offloading connector keeps them (`CPUOffloadingManager`, policy `lru`).

A block is evicted only while no transfer uses it: one that is being written, or that a request loads, stays. The block
with the lowest rank goes first. While a request is under way all its blocks have its own rank, and those at the end of
its text go before those at the beginning; when it is over they rank above all others, the first of them highest. Up to
release 0.32 a block that a request under way has written ranks by the order of writing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from heapq import heapify, heappop, heappush

Rank = tuple[int, int]
"""Order of eviction, the lowest first: a number that grows with time, and a place in a text, from its end."""
_WRITING = -1


class HostBlocks:
    """Blocks by name."""

    __slots__ = ("_blocks", "_heap", "_idle", "_latest", "_ranks", "capacity")

    def __init__(self, capacity: int) -> None:
        """Make an empty memory of `capacity` blocks."""
        self.capacity = capacity
        self._blocks: dict[Hashable, int] = {}  # the number of loads from each, or _WRITING
        self._ranks: dict[Hashable, Rank] = {}
        self._heap: list[tuple[Rank, Hashable]] = []  # idle blocks, among entries that are void
        self._idle = self._latest = 0  # blocks that no transfer uses; the latest number of a rank

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Lose all content."""
        self._idle = 0
        for part in (self._blocks, self._ranks, self._heap):
            part.clear()

    def next_rank(self) -> int:
        """Return a number above those of all ranks."""
        self._latest += 1
        return self._latest

    def readable(self, name: Hashable) -> bool | None:
        """Return True if a block can be loaded, False if it is still being written, None if it is not here."""
        loads = self._blocks.get(name)
        return None if loads is None else loads != _WRITING

    def write(self, ranks: dict[Hashable, Rank]) -> list[Hashable] | None:
        """Begin to write those of the blocks with these ranks that are not here, and return their names; None, and
        nothing changes, if too few blocks can be evicted for them."""
        blocks = self._blocks
        new = [name for name in ranks if name not in blocks]
        excess = len(blocks) + len(new) - self.capacity
        if excess > 0 and not self._evict(excess, ranks.keys()):
            return None
        for name in new:
            blocks[name], self._ranks[name] = _WRITING, ranks[name]
        return new

    def written(self, names: Sequence[Hashable]) -> None:
        """Note that these blocks have been written: they can be loaded, and evicted."""
        for name in names:
            self._blocks[name] = 0
            heappush(self._heap, (self._ranks[name], name))
        self._idle += len(names)

    def pin(self, names: Sequence[Hashable]) -> None:
        """Begin to load these blocks, which must be readable."""
        for name in names:
            self._idle -= not self._blocks[name]
            self._blocks[name] += 1

    def unpin(self, names: Sequence[Hashable]) -> None:
        """Note that these blocks have been loaded."""
        for name in names:
            self._blocks[name] -= 1
            if not self._blocks[name]:
                self._idle += 1
                heappush(self._heap, (self._ranks[name], name))

    def raise_to(self, name: Hashable, rank: Rank) -> None:
        """Give a block this rank, if it is here and has a lower one."""
        if name in self._blocks and self._ranks[name] < rank:
            self._ranks[name] = rank
            if not self._blocks[name]:
                heappush(self._heap, (rank, name))

    def use(self, names: Sequence[Hashable]) -> None:
        """Let these blocks of a text, as far as they are here, rank above all others, the first of them highest."""
        for name in reversed(names):
            self.raise_to(name, (self.next_rank(), 0))
        if len(self._heap) > 64 + 4 * self.capacity:
            self._heap = [(self._ranks[name], name) for name, loads in self._blocks.items() if not loads]
            heapify(self._heap)

    def _evict(self, excess: int, wanted: Collection[Hashable]) -> bool:
        """Evict `excess` blocks that are idle and not wanted; False, and nothing changes, if there are fewer."""
        if excess > self._idle:
            return False
        chosen: dict[Hashable, Rank] = {}
        passed: list[tuple[Rank, Hashable]] = []
        while self._heap and len(chosen) < excess:
            rank, name = heappop(self._heap)
            if self._blocks.get(name) != 0 or self._ranks[name] != rank or name in chosen:
                continue
            if name in wanted:
                passed.append((rank, name))
            else:
                chosen[name] = rank
        if len(chosen) < excess:
            passed += [(rank, name) for name, rank in chosen.items()]
            chosen = {}
        for entry in passed:
            heappush(self._heap, entry)
        for name in chosen:
            del self._blocks[name], self._ranks[name]
        self._idle -= len(chosen)
        return bool(chosen)
