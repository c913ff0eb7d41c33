"""Prefix caching as vLLM V1 does it: free blocks retain their content until they are needed.

A prompt's hash blocks have names (`Request.blocks`). The content cached under a name is a `CachedRun` of one hash
block's KV blocks, shared by all requests that use it. Runs without users wait in one queue: a request that frees its
blocks appends them tail first, blocks without findable content (partial ones) are taken first, then the queue's head,
block by block from the tail of a run; a hit takes a run out of the queue. At least one token of a request is computed
again, so that there is something to sample from.

Blocks without a name (answers, the private part of a prompt) are one run per request. No other request can find it, but
its owner can when it comes back from preemption; until then it is in the queue like any other.

`simtune.engine.next_token` has the cache of an engine whose hash of a block covers the token after it.

With one KV block per hash block this is the engine's rule exactly: tests/engine/test_steplogs.py. With more (traces
name larger blocks), a run of which another request uses a part is not extended by a second one that computes the
rest; and the rest of an idle run, of which a request may use only the beginning, is forgotten. A KV block of several
hash blocks is named by the last of them, since a name includes the text before it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence

from simtune.engine.kv import Hit, KvBlocks
from simtune.engine.request import CachedRun, Request


class PrefixCache(KvBlocks):
    """KV blocks that can be found by their content."""

    __slots__ = ("_blank", "_cached", "_drops", "_each", "_hash_blocks", "_idle", "hit_tokens", "queried_tokens")

    def __init__(self, total: int, block_size: int, hash_block_tokens: int, drops_last_hit: bool = False) -> None:
        """Make the cache of `total` blocks; with `drops_last_hit` the last KV block of every hit counts as not found.

        Raises ValueError unless one of hash_block_tokens and block_size is a multiple of the other.
        """
        super().__init__(total, block_size, caches=True)
        if hash_block_tokens % block_size and block_size % hash_block_tokens:
            raise ValueError(
                f"hash_block_tokens ({hash_block_tokens}) must be a multiple of block_size ({block_size}), or divide it"
            )
        self._hash_blocks = max(1, hash_block_tokens // block_size)
        self._each = max(1, block_size // hash_block_tokens)
        self._drops = drops_last_hit
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Free all blocks; their content is lost."""
        super().clear()
        self._blank = self.total  # free blocks with nothing to find in them
        self._idle: deque[CachedRun] = deque()  # the others, in order of eviction, among runs that are held again
        self._cached: dict[Hashable, CachedRun] = {}
        if self.tiers is not None:
            self.tiers.clear()

    def find(self, request: Request) -> Hit:
        """Return the longest cached beginning of a request; changes nothing."""
        # the last token is always computed: the step samples from it
        limit = (request.known_tokens - 1) // self.block_size
        cached, run_blocks = self._cached, self._hash_blocks
        runs: list[CachedRun] = []
        blocks = idle = 0
        for name in self._names(request):
            run = cached.get(name)
            if run is None or blocks == limit:
                break
            size = run.size if run.size < limit - blocks else limit - blocks
            runs.append(run)
            blocks += size
            if not run.holders:
                idle += size
            if size < run_blocks:
                break
        private = cached.get(request)
        # the private run continues the text only if all shared blocks before it were found
        if private is not None and blocks == request.shared < limit:
            private_blocks = min(private.size, limit - blocks)
            blocks += private_blocks
            idle += private_blocks
        else:
            private = None
        hit = Hit(runs, private, blocks, idle)
        if self.tiers is not None and private is None:
            size, unit = self.block_size, run_blocks * self.block_size
            hits = self.tiers.find(self._names(request), unit, size, blocks * size, limit * size)
            hit = hit._replace(copied_tokens=sum(hits), fetched=hits)
        drops = self._drops and blocks + hit.copied_tokens
        return less_one(hit, request.shared, self.block_size, run_blocks) if drops else hit

    def _names(self, request: Request) -> tuple[Hashable, ...]:
        """Return the names of a request's blocks, or runs of blocks."""
        size = self._each
        return request.blocks if size == 1 else request.blocks[size - 1 :: size]

    def hold(self, request: Request, hit: Hit) -> None:
        """Let a request hold the blocks of a hit: their tokens count as computed."""
        remaining = hit.blocks if hit.private is None else request.shared
        private_blocks = hit.blocks - remaining
        request.shared = remaining
        for run in hit.runs:
            if not run.holders:
                self.free -= run.size
                if run.size > remaining:
                    self.give(run.size - remaining)
                    run.size = remaining
            run.holders += 1
            remaining -= run.size
        private = self._cached.get(request) if request.preemptions else None
        if private is not None:
            self._forget(private)
            private.name = None
        if hit.private is not None:
            self.free -= private_blocks
            hit.private.size -= private_blocks
        request.runs = hit.runs
        request.computed = hit.blocks * self.block_size + hit.copied_tokens
        if self.tiers is not None:
            count = -(-request.computed // (self._hash_blocks * self.block_size))
            self.tiers.fetch(hit.fetched, self._names(request)[:count], not request.preemptions)
        # A request that comes back finds its own blocks, which is no merit of the cache.
        if not request.preemptions:
            self.queried_tokens += request.known_tokens
            self.hit_tokens += request.computed

    def name(self, request: Request, tokens: int) -> None:
        """Let others find the first `tokens` tokens of a request, for which it holds blocks."""
        run_blocks, full, names = self._hash_blocks, tokens // self.block_size, self._names(request)
        runs = request.runs
        if runs is None:
            runs = request.runs = []
            request.shared = 0
        if self.tiers is not None:
            unit = run_blocks * self.block_size
            self.tiers.note_computed(names, unit, max(0, len(runs) - 1), full * self.block_size)
        if runs:
            part = request.shared - (len(runs) - 1) * run_blocks
            if part < run_blocks:
                last = runs[-1]
                more = min(run_blocks, full - (len(runs) - 1) * run_blocks) - part
                # A run that others hold or that was found in part must not grow: its blocks are not this request's
                # alone.
                if last.holders > 1 or last.size != part or more <= 0:
                    return
                last.size += more
                request.shared += more
                if part + more < run_blocks:
                    return
        cached, start = self._cached, len(runs)
        stop = min(len(names), full // run_blocks)
        for name in names[start:stop]:
            run = CachedRun(name, run_blocks, 1)
            if cached.setdefault(name, run) is not run:
                self._add_twin(run)
            runs.append(run)
        request.shared += max(0, stop - start) * run_blocks
        if start <= stop < len(names) and full > stop * run_blocks:
            runs.append(self._remember(CachedRun(names[stop], full - stop * run_blocks, 1)))
            request.shared += runs[-1].size

    def take(self, blocks: int) -> None:
        """Take `blocks` of the free blocks: blank ones first, then those in the queue for longest."""
        super().take(blocks)
        self._blank -= blocks
        if self._blank < 0:
            self._evict()

    def _evict(self) -> None:
        blank, idle, cached = self._blank, self._idle, self._cached
        tiers = None if self.tiers is None or not self.tiers.takes_evicted else self.tiers
        while blank < 0:
            run = idle.popleft()
            run.queued -= 1
            # An old entry: the run is held, or came free again later and stands further behind.
            if run.holders or run.queued:
                continue
            name, gone = run.name, min(run.size, -blank)
            if tiers is not None:
                tiers.note_tail(None if isinstance(name, Request) else name, gone, run.size, self.block_size)
            blank += run.size
            if blank > 0:
                run.size, blank = blank, 0
                run.queued = 1
                # Evicted from its tail: what remains is still found, and first to go next time.
                idle.appendleft(run)
            elif name is not None:
                if run.twin is None and cached[name] is run:
                    del cached[name]
                else:
                    self._forget(run)
        self._blank = blank

    def _queue(self, runs: Iterable[CachedRun]) -> None:
        """Remove one holder from each of these runs; runs without holders go to the end of the queue, in this order."""
        idle, freed = self._idle, 0
        for run in runs:
            run.holders -= 1
            if not run.holders:
                freed += run.size
                run.queued += 1
                idle.append(run)
        self.free += freed
        # a run has at least one block, so most entries are old ones: rebuild the queue
        if len(idle) > 4 * self.total:
            last = []
            for run in idle:
                run.queued -= 1
                if not run.queued and not run.holders:
                    last.append(run)
            for run in last:
                run.queued = 1
            self._idle = deque(last)

    def give(self, blocks: int) -> None:
        """Free blocks without content that could be found."""
        super().give(blocks)
        self._blank += blocks

    def release(self, request: Request, named_tokens: int | None = None, *, returns: bool = False) -> None:
        """Free all blocks of a request: those of its named tokens can be found until evicted, its tail first."""
        if named_tokens is None:
            named_tokens = request.computed
        if request.blocks:
            self.name(request, named_tokens)
        held_blocks, full = self.held_by(request), max(named_tokens // self.block_size, request.shared)
        self.give(held_blocks - full)
        if self.tiers is not None and not returns:
            private_tokens = (full - request.shared) * self.block_size
            self.tiers.note_ended(request, self._names(request), private_tokens, named_tokens)
        if full > request.shared:
            self._idle_run(request if returns else None, full - request.shared)
        if request.runs:
            self._queue(reversed(request.runs))
        request.reserved_tokens = 0
        if not returns:
            request.shared = 0
        request.runs = None

    def _idle_run(self, name: Hashable, size: int) -> None:
        if name is None and self._idle:
            last = self._idle[-1]
            # Blocks that cannot be found are all alike: one run for neighbours keeps the queue short.
            if last.name is None and last.queued == 1:
                self.free += size
                last.size += size
                return
        run = CachedRun(name, size, 1)
        self._queue([run])
        if name is not None:
            self._remember(run)

    def _remember(self, run: CachedRun) -> CachedRun:
        if self._cached.setdefault(run.name, run) is not run:
            self._add_twin(run)
        return run

    def _add_twin(self, run: CachedRun) -> None:
        first = self._cached[run.name]
        while first.twin is not None:
            first = first.twin
        first.twin = run

    def _forget(self, run: CachedRun) -> None:
        first = self._cached[run.name]
        if first is run:
            if run.twin is None:
                del self._cached[run.name]
            else:
                self._cached[run.name] = run.twin
            return
        while first.twin is not run:
            assert first.twin is not None
            first = first.twin
        first.twin = run.twin


def block_names(cache: KvBlocks, request: Request, start: int, stop: int) -> list[Hashable]:
    """Return the names of a request's KV blocks from number `start` to before `stop`, those of private ones unique."""
    assert isinstance(cache, PrefixCache)
    names, size = cache._names(request), cache._hash_blocks
    last = min(stop, len(names) * size)
    shared: list[Hashable] = []
    if start < last:
        shared += names[start:last] if size == 1 else [(names[n // size], n % size) for n in range(start, last)]
    return shared + [(request, number) for number in range(max(start, last), stop)]


def less_one(hit: Hit, shared: int, block_size: int, run_blocks: int) -> Hit:
    """Return a hit without its last block; in one with a private run, `shared` blocks are shared."""
    if hit.copied_tokens:
        last = max(number for number, tokens in enumerate(hit.fetched) if tokens)
        fetched = tuple(tokens - block_size * (number == last) for number, tokens in enumerate(hit.fetched))
        return hit._replace(copied_tokens=sum(fetched), fetched=fetched)
    runs, private, blocks, idle = hit[:4]
    if private is not None:
        return Hit(runs, private if blocks - 1 > shared else None, blocks - 1, idle - 1)
    last_blocks = blocks - (len(runs) - 1) * run_blocks
    return Hit(runs if last_blocks > 1 else runs[:-1], None, blocks - 1, idle - (not runs[-1].holders))


def hit_rate(prompts: Iterable[Sequence[Hashable]], capacity: int | None = None) -> float:
    """Return the share of hash blocks that are cached when prompts, each a sequence of names, are served in turn.

    `capacity` is in hash blocks, unbounded unless given; the least recently used are evicted, tails first. The rate
    never falls when the capacity grows: the content of a small cache is also in a larger one.
    """
    cache: OrderedDict[Hashable, None] = OrderedDict()
    hits = total = 0
    for names in prompts:
        total += len(names)
        for name in names:
            if name not in cache:
                break
            hits += 1
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return hits / total if total else 0.0
