"""Prefix caching as SGLang does it: computed text is a radix tree of pages, evicted by whole leaves.

A node contains the pages between two branches of the texts in the tree. A request locks the path to the node where its
own text ends; nodes without locks count as free, and the leaf that was looked up least recently is evicted first, all
of it, even if fewer pages are needed. A lookup finds whole pages, at most all tokens but one, and counts as a use even
if the request is not admitted then.

Text enters the tree after each chunk of a prompt and when a request is finished; pages that another request has entered
meanwhile are given back. The tree is then cut where the prompt ends, so that an answer can be evicted without it. A
retracted request enters nothing more, and finds its prompt again if that is still in the tree.

Texts are compared by the names of their hash blocks (`Request.blocks`); tokens beyond the named ones are found by
their own request only. A page of several hash blocks is named by the last of them, since a name includes the text
before it.

Facts: radix_cache.py, evict_policy.py and common.py (mem_cache) of SGLang 0.5; compared with RadixCache of 0.5.23 in
random worlds. Left out: that lookups of waiting requests by a cache-aware order of the queue count as uses.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import cast

from simtune.engine.kv import NO_HIT, Hit, KvBlocks
from simtune.engine.request import CachedRun, Request
from simtune.engine.tiers import TierStack


class RadixNode:
    """Pages `start` to `end` of a text, in tokens; the text before them is that of its parents."""

    __slots__ = ("children", "end", "locks", "parent", "queued", "start", "text", "used")

    def __init__(self, parent: RadixNode | None, text: Request | None, start: int, end: int, used: int) -> None:
        self.parent = parent
        self.text = text  # a request that begins with the text
        self.start = start
        self.end = end
        self.used = used  # number of the latest lookup
        self.locks = 0  # requests whose text runs through the node
        self.queued = False  # whether the node has an entry in the heap of leaves
        self.children: dict[Hashable, RadixNode] = {}


class RadixCache(KvBlocks):
    """KV pages that can be found by their content, in a radix tree."""

    __slots__ = (
        "_blank",
        "_clock",
        "_hash_tokens",
        "_leaves",
        "_order",
        "_paths",
        "_root",
        "hit_tokens",
        "queried_tokens",
    )

    def __init__(self, total: int, block_size: int, hash_block_tokens: int) -> None:
        """Make the cache of `total` pages of `block_size` tokens."""
        super().__init__(total, block_size, caches=True)
        self._hash_tokens = hash_block_tokens
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Free all pages; their content is lost."""
        super().clear()
        self._blank = self.total  # free pages that are not in the tree
        self._clock = self._order = 0
        self._root = RadixNode(None, None, 0, 0, 0)
        self._leaves: list[tuple[int, int, RadixNode]] = []  # (use, order of entry, node): a heap, perhaps out of date
        self._paths: dict[Request, RadixNode] = {}  # node where the locked text of each request ends
        if self.tiers is not None:
            self.tiers.clear()

    # --- lookups ----------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Hit:
        """Return the longest beginning of a request in the tree, which counts as used."""
        if not (request.blocks or request.preemptions):
            return NO_HIT
        node = self._walk(request, request.known_tokens - 1)
        if node is self._root and self.tiers is None:
            return NO_HIT
        idle, up = 0, node
        while up is not self._root and not up.locks:
            idle += up.end - up.start
            up = cast(RadixNode, up.parent)
        size = self.block_size
        hit = Hit(cast(list[CachedRun], []), None, node.end // size, idle // size)
        if self.tiers is None:
            return hit
        hits = self.tiers.find(request.blocks, self._hash_tokens, size, node.end, request.known_tokens - 1)
        return hit._replace(copied_tokens=sum(hits), fetched=hits) if hits else hit

    def hold(self, request: Request, hit: Hit) -> None:
        """Lock the path of a hit, the latest lookup of this request: its tokens count as computed."""
        present = hit.blocks * self.block_size
        request.computed = present + hit.copied_tokens
        request.shared = hit.blocks
        node = self._walk(request, present)
        assert node.end == present, "a hit is held before anything else happens"
        self._lock(node)
        self._paths[request] = node
        if self.tiers is not None:
            count = -(-request.computed // self._hash_tokens)
            self.tiers.fetch(hit.fetched, request.blocks[:count], not request.preemptions)
        # A request that comes back finds its own text, which is no merit of the cache.
        if not request.preemptions:
            self.queried_tokens += request.known_tokens
            self.hit_tokens += request.computed

    def _walk(self, request: Request, tokens: int) -> RadixNode:
        """Return the last node of the tree with only the first `tokens` tokens of a request, cut there if necessary."""
        self._clock = use = self._clock + 1
        node, page = self._root, self.block_size
        stop = tokens // page * page
        while node.end < stop:
            child = node.children.get(self._name(request, node.end))
            if child is None:
                break
            common = self._common(child, request, stop)
            if common == child.start:
                break
            child.used = use
            if common < child.end:
                return self._cut(child, common)
            node = child
        return node

    def _name(self, request: Request, start: int) -> Hashable:
        """Return the name of the page of a request that begins at token `start`: the request, if it is private."""
        index = (start + self.block_size - 1) // self._hash_tokens
        return request.blocks[index] if index < len(request.blocks) else request

    def _common(self, node: RadixNode, request: Request, stop: int) -> int:
        """Return where the text of a node and a request part, at the end of a page, or where either ends."""
        text, end = node.text, min(node.end, stop)
        if text is request:
            return end
        assert text is not None
        ours, theirs, size = text.blocks, request.blocks, self._hash_tokens
        index, last = node.start // size, min(len(ours), len(theirs), -(-end // size))
        if ours[index:last] == theirs[index:last]:
            index = last
        else:
            while ours[index] == theirs[index]:
                index += 1
        # the first of these blocks may begin before the node
        return max(min(index * size, end) // self.block_size * self.block_size, node.start)

    def _cut(self, node: RadixNode, end: int) -> RadixNode:
        """Divide a node at token `end`; return its first part."""
        parent = cast(RadixNode, node.parent)
        first = RadixNode(parent, node.text, node.start, end, node.used)
        first.locks = node.locks
        assert node.text is not None
        parent.children[self._name(node.text, node.start)] = first
        node.parent, node.start = first, end
        first.children[self._name(node.text, end)] = node
        return first

    # --- requests ---------------------------------------------------------------------------------------------

    def name(self, request: Request, tokens: int) -> None:
        """Enter the whole pages of the first `tokens` tokens of a request, which has them, and lock them; pages that
        are in the tree already come free."""
        page, before = self.block_size, self._paths.get(request, self._root)
        stop = tokens // page * page
        if stop <= before.end:
            return
        if self.tiers is not None:
            self.tiers.note_computed(request.blocks, self._hash_tokens, before.end // self._hash_tokens, stop)
        node = self._walk(request, stop)
        present = node.end
        # If names of other texts collide with this one's, the rest of it cannot be entered.
        if present < stop and self._name(request, present) not in node.children:
            # newer than the rest of a node that the walk has cut
            self._clock += 1
            child = RadixNode(node, request, present, stop, self._clock)
            node.children[self._name(request, present)] = child
            node = child
            # Its pages were taken already; locking takes them again.
            self.free += (stop - present) // page
        if present > before.end:
            self.give((present - before.end) // page)
        self._lock(node)
        self._unlock(before)
        self._paths[request] = node
        request.shared = node.end // page
        if request.prompt_tokens // page * page < node.end:
            self._walk(request, request.prompt_tokens)

    def release(self, request: Request, named_tokens: int | None = None, *, returns: bool = False) -> None:
        """Free all pages of a request; text in the tree can be found until evicted.

        A request that `returns` after a preemption enters nothing: memory is short.
        """
        held_blocks = self.held_by(request)
        if named_tokens is None:
            named_tokens = request.computed
        if not returns:
            self.name(request, named_tokens)
            if self.tiers is not None:
                private = request.shared * self.block_size - len(request.blocks) * self._hash_tokens
                self.tiers.note_ended(request, request.blocks, max(0, private), named_tokens)
        self.give(held_blocks - request.shared)
        self._unlock(self._paths.pop(request, self._root))
        request.reserved_tokens = request.shared = 0

    def freed_by(self, request: Request) -> int:
        """Return the pages that only this request holds."""
        node, shared = self._paths.get(request, self._root), 0
        while node is not self._root:
            if node.locks > 1:
                shared += node.end - node.start
            node = cast(RadixNode, node.parent)
        return self.held_by(request) - shared // self.block_size

    # --- pages ------------------------------------------------------------------------------------------------

    def give(self, blocks: int) -> None:
        """Free pages that are not in the tree."""
        super().give(blocks)
        self._blank += blocks

    def take(self, blocks: int) -> None:
        """Take `blocks` of the free pages; leaves are evicted if there are too few blank ones."""
        # not by the base's method: a page is taken for every token that is decoded
        self.free -= blocks
        self._blank -= blocks
        assert self.free >= 0, f"{blocks} pages taken, {self.free + blocks} free"
        while self._blank < 0:
            self._evict()

    def _evict(self) -> None:
        """Remove the leaf that was used least recently."""
        at, _, node = heapq.heappop(self._leaves)
        node.queued = False
        if node.locks or node.children:
            return
        if node.used != at:
            self._queue(node)
            return
        if self.tiers is not None and self.tiers.takes_evicted:
            self._evict_to_tiers(self.tiers, node)
        parent = cast(RadixNode, node.parent)
        assert node.text is not None
        del parent.children[self._name(node.text, node.start)]
        self._blank += (node.end - node.start) // self.block_size
        if parent is not self._root:
            self._queue(parent)

    def _evict_to_tiers(self, tiers: TierStack, node: RadixNode) -> None:
        """Write the hash blocks of a node to the tiers, and take room for its private tokens."""
        assert node.text is not None
        names, size = node.text.blocks, self._hash_tokens
        private = node.end - max(node.start, len(names) * size)
        if private > 0:
            tiers.note_evicted(None, private)
        for index in range(min(len(names), -(-node.end // size)) - 1, node.start // size - 1, -1):
            tiers.note_evicted(names[index], min(size, node.end - index * size))

    def _queue(self, node: RadixNode) -> None:
        """Let a node be evicted, if it is a leaf without locks."""
        if not (node.locks or node.children or node.queued):
            node.queued = True
            self._order += 1
            heapq.heappush(self._leaves, (node.used, self._order, node))

    def _lock(self, node: RadixNode) -> None:
        """Lock the path to a node; pages that no request held are free no more."""
        tokens = 0
        while node is not self._root:
            if not node.locks:
                tokens += node.end - node.start
            node.locks += 1
            node = cast(RadixNode, node.parent)
        self.free -= tokens // self.block_size

    def _unlock(self, node: RadixNode) -> None:
        """Unlock the path to a node; pages without holders count as free."""
        tokens = 0
        while node is not self._root:
            node.locks -= 1
            if not node.locks:
                tokens += node.end - node.start
                self._queue(node)
            node = cast(RadixNode, node.parent)
        self.free += tokens // self.block_size
