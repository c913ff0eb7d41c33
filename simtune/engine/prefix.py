"""Prefix caching as vLLM V1 does it: free blocks keep what they contain until they are needed.

A prompt's hash blocks have names (`Request.blocks`). What is cached under a name is a `CachedRun` of one hash block's
KV blocks, shared by all requests that hold it. Runs that nobody holds wait in one queue: a request that gives its
blocks back appends them tail first, blocks that nobody can ever find (partial ones) are taken first, then the queue's
head, block by block from the tail of a run; a hit takes a run out of the queue. At least one token of a request is
computed again, so that there is something to sample from.

Blocks without a name (answers, the private part of a prompt) are one run per request. Nobody else can find it, but its
owner can when it comes back from preemption, and until then it takes its turn in the queue like any other.

With one KV block per hash block this is the engine's rule exactly: tests/engine/test_steplogs.py. With more (traces
name larger blocks), a run of which another request holds a part is not extended by a second one that computes the
rest; and the rest of an idle run, of which a request may use only the beginning, is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence

from simtune.engine.kv import Hit, KvBlocks
from simtune.engine.request import CachedRun, Request


class PrefixCache(KvBlocks):
    """KV blocks that can be found again by what they contain."""

    __slots__ = ("_blank", "_cached", "_drops", "_hash_blocks", "_idle", "hit_tokens", "queried_tokens")

    def __init__(self, total: int, block_size: int, hash_block_tokens: int, drops_last_hit: bool = False) -> None:
        """With `drops_last_hit` the last KV block of every hit counts as not found.

        Raises ValueError unless hash_block_tokens is a multiple of block_size.
        """
        super().__init__(total, block_size, caches=True)
        if hash_block_tokens < block_size or hash_block_tokens % block_size:
            raise ValueError(f"hash_block_tokens ({hash_block_tokens}) must be a multiple of block_size ({block_size})")
        self._hash_blocks = hash_block_tokens // block_size
        self._drops = drops_last_hit
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.clear()

    def clear(self) -> None:
        """All blocks are free, and what they contained is lost."""
        super().clear()
        self._blank = self.total  # free blocks with nothing to find in them
        self._idle: deque[CachedRun] = deque()  # the others, in order of eviction, among runs that are held again
        self._cached: dict[Hashable, CachedRun] = {}

    def find(self, request: Request) -> Hit:
        """The longest cached beginning of a request; changes nothing."""
        limit = (request.known_tokens - 1) // self.block_size
        cached, whole = self._cached, self._hash_blocks
        runs: list[CachedRun] = []
        blocks = idle = 0
        for name in request.blocks:
            run = cached.get(name)
            if run is None or blocks == limit:
                break
            size = run.size if run.size < limit - blocks else limit - blocks
            runs.append(run)
            blocks += size
            if not run.holders:
                idle += size
            if size < whole:
                break
        private = cached.get(request)
        if private is not None and blocks == request.shared < limit:
            own = min(private.size, limit - blocks)
            blocks += own
            idle += own
        else:
            private = None
        hit = Hit(runs, private, blocks, idle)
        return self._less_one(hit, request.shared) if self._drops and blocks else hit

    def _less_one(self, hit: Hit, shared: int) -> Hit:
        """A hit without its last block; of one with a private run so many blocks are shared."""
        runs, private, blocks, idle = hit
        if private is not None:
            return Hit(runs, private if blocks - 1 > shared else None, blocks - 1, idle - 1)
        used = blocks - (len(runs) - 1) * self._hash_blocks
        return Hit(runs if used > 1 else runs[:-1], None, blocks - 1, idle - (not runs[-1].holders))

    def hold(self, request: Request, hit: Hit) -> None:
        """Let a request hold what was found of it: those tokens count as computed."""
        rest = hit.blocks if hit.private is None else request.shared
        own = hit.blocks - rest
        request.shared = rest
        for run in hit.runs:
            if not run.holders:
                self.free -= run.size
                if run.size > rest:
                    self.give(run.size - rest)
                    run.size = rest
            run.holders += 1
            rest -= run.size
        private = self._cached.get(request) if request.preemptions else None
        if private is not None:
            self._forget(private)
            private.name = None
        if hit.private is not None:
            self.free -= own
            hit.private.size -= own
        request.runs = hit.runs
        request.computed = hit.blocks * self.block_size
        if not request.preemptions:
            self.queried_tokens += request.known_tokens
            self.hit_tokens += request.computed

    def name(self, request: Request, tokens: int) -> None:
        """Let others find the first `tokens` tokens of a request, for which it holds blocks."""
        whole, full, names = self._hash_blocks, tokens // self.block_size, request.blocks
        runs = request.runs
        if runs is None:
            runs = request.runs = []
            request.shared = 0
        if runs:
            part = request.shared - (len(runs) - 1) * whole
            if part < whole:
                last = runs[-1]
                more = min(whole, full - (len(runs) - 1) * whole) - part
                if last.holders > 1 or last.size != part or more <= 0:
                    return
                last.size += more
                request.shared += more
                if part + more < whole:
                    return
        cached, start = self._cached, len(runs)
        stop = min(len(names), full // whole)
        for name in names[start:stop]:
            run = CachedRun(name, whole, 1)
            if cached.setdefault(name, run) is not run:
                self._add_twin(run)
            runs.append(run)
        request.shared += max(0, stop - start) * whole
        if start <= stop < len(names) and full > stop * whole:
            runs.append(self._remember(CachedRun(names[stop], full - stop * whole, 1)))
            request.shared += runs[-1].size

    def take(self, blocks: int) -> None:
        """Take so many of the free blocks, blank ones first, then those that wait longest to be found again."""
        assert blocks <= self.free, f"{blocks} blocks taken, {self.free} free"
        self.free -= blocks
        self._blank -= blocks
        if self._blank < 0:
            self._evict()

    def _evict(self) -> None:
        blank, idle, cached = self._blank, self._idle, self._cached
        while blank < 0:
            run = idle.popleft()
            run.queued -= 1
            if run.holders or run.queued:
                continue
            blank += run.size
            name = run.name
            if blank > 0:
                run.size, blank = blank, 0
                run.queued = 1
                idle.appendleft(run)
            elif name is not None:
                if run.twin is None and cached[name] is run:
                    del cached[name]
                else:
                    self._forget(run)
        self._blank = blank

    def _queue(self, runs: Iterable[CachedRun]) -> None:
        """One holder less for each of these runs; those without any are the last to be evicted, in this order."""
        idle, freed = self._idle, 0
        for run in runs:
            run.holders -= 1
            if not run.holders:
                freed += run.size
                run.queued += 1
                idle.append(run)
        self.free += freed
        if len(idle) > 4 * self.total:  # most places are old ones, for a run has at least one block
            last = []
            for run in idle:
                run.queued -= 1
                if not run.queued and not run.holders:
                    last.append(run)
            for run in last:
                run.queued = 1
            self._idle = deque(last)

    def give(self, blocks: int) -> None:
        """Give blocks back that contain nothing to be found again."""
        super().give(blocks)
        self._blank += blocks

    def release(self, request: Request, named_tokens: int | None = None, *, returns: bool = False) -> None:
        """Give back all blocks of a request: those of its named tokens wait to be found again, its tail first."""
        if named_tokens is None:
            named_tokens = request.computed
        if request.blocks:
            self.name(request, named_tokens)
        held, full = self.held_by(request), max(named_tokens // self.block_size, request.shared)
        self.give(held - full)
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


def hit_rate(prompts: Iterable[Sequence[Hashable]], capacity: int | None = None) -> float:
    """Share of all hash blocks that are cached when prompts, each a sequence of names, are served one after the other.

    `capacity` is in hash blocks, unbounded unless given; the least recently used are evicted, tails first. It never
    falls when the capacity grows: what a small cache contains, a larger one contains too.
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
