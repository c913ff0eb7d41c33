"""Host memory below the prefix cache of vLLM's schedulers, by the rule of its offloading connector.

While a request waits, its text is looked up in host memory from where the device's own cache ends. If whole blocks are
there, the request takes blocks of the device and waits for them to be loaded, while others step on; it needs no seat
meanwhile, and is admitted before all requests that have no blocks. It waits as well, without blocks, while a block of
the text is still being written, or is being loaded for another request. If the load would take blocks that prompts in
prefill are going to need, no request is admitted.

Every block of a prompt that a step fills is written in the step after it, and can be found after that one; answers are
not written (`offload_prompt_only`). What finds no room is offered again by the next step of its request. The private
blocks of a prompt are written too, and found by its request if it comes back from preemption.

Checked step by step against vLLM's scheduler and connector, without drafts and scheduled synchronously:
tests/engine/test_vllm_offloading.py. Left out: with asynchronous scheduling the engine frees blocks of a step under way
later; loads inside a step (`sync_load_budget_bytes`); the time of writing, which is over before the next step is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from simtune.engine.batch import Batch
from simtune.engine.host_blocks import HostBlocks, Rank
from simtune.engine.kv import Hit, KvBlocks
from simtune.engine.prefix import block_names
from simtune.engine.request import Request
from simtune.engine.step import Chunk
from simtune.engine.tiers import Tier, TierStack
from simtune.engine.waiting import PriorityQueue, WaitingQueue, urgency


class Admitting(Protocol):
    """Scheduler that admits requests with blocks that have been loaded; its cache is a `PrefixCache`."""

    kv: KvBlocks
    waiting: WaitingQueue
    decoding: Batch
    prefilling: list[Request]
    max_num_seqs: int
    watermark_blocks: int
    scheduler_reserve_full_isl: bool
    async_scheduling: bool

    @property
    def num_running(self) -> int:
        """Requests with a seat."""


AdmitFirst = Callable[[list[Chunk], int], int]
"""Admits the first waiting request within a token budget, and adds its chunk; returns its tokens, 0 if it must wait."""
AdmitLoaded = Callable[[Request, list[Chunk], int], int]
"""Does the same for a request with blocks, whose `computed` tokens have been loaded."""


class _Text:
    """Blocks of a request as the connector accounts for them, by their places in its text."""

    __slots__ = ("deferred", "loading", "offered", "rank", "touched", "writes")

    def __init__(self) -> None:
        self.offered = 0  # leading blocks that were offered to host memory, or loaded from it
        self.rank = 0  # of its blocks while it is under way
        self.writes = 0  # writes of its blocks under way
        self.loading: list[Hashable] = []
        self.deferred = False  # whether it ever waited for a transfer
        self.touched: set[int] = set()  # places of blocks that were written, found there or loaded


class Offloading(TierStack):
    """Host memory of one engine core: looked up by waiting requests, filled by every step."""

    loads_ahead = True

    def __init__(self, tier: Tier, capacity: int, *, newest: bool = True) -> None:
        """Make an empty memory of `capacity` KV blocks, with the `newest` rule, that of vLLM 0.33: a request that comes
        back from preemption offers all its blocks again, and they have ranks of their own (`HostBlocks`)."""
        super().__init__([tier])
        self.tier, self.host = tier, HostBlocks(capacity)
        self.holding: list[Request] = []
        """Waiting requests with blocks: they load, or have loaded and found no seat yet."""
        self.started: list[tuple[Request, int]] = []
        """Loads that began with the latest call of `schedule`, with their tokens."""
        self._newest = newest
        self._texts: dict[Request, _Text] = {}
        self._loads: set[Hashable] = set()  # blocks that are being loaded
        self._ended: list[tuple[Request, int]] = []  # since the latest step, with the tokens that can be written
        self._writing: list[tuple[Request, list[Hashable]]] = []  # since the latest step
        self._unwritten: set[Request] = set()  # requests whose blocks have found no room

    # --- the part of a `TierStack` ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Lose all content, and all requests."""
        super().clear()
        self.host.clear()
        for part in (self.holding, self.started, self._texts, self._loads, self._ended, self._writing, self._unwritten):
            part.clear()

    def find(self, names: Sequence[Hashable], unit: int, block_size: int, start: int, stop: int) -> tuple[int, ...]:
        """Return no tokens: a request is admitted with what it has loaded already."""
        return ()

    def fetch(self, hits: Sequence[int], names: Sequence[Hashable], counts: bool) -> None:
        """Do nothing, see `find`."""

    def note_computed(self, names: Sequence[Hashable], unit: int, first: int, tokens: int) -> None:
        """Do nothing: blocks are written by `write`."""

    def note_ended(self, request: Request, names: Sequence[Hashable], private_tokens: int, tokens: int) -> None:
        """Write the rest of a request's `tokens` tokens with the next step."""
        self._ended.append((request, tokens))

    # --- waiting requests -------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Note that the blocks of a request have been loaded; to be called between steps."""
        text = self._texts[request]
        self.host.unpin(text.loading)
        self._loads.difference_update(text.loading)
        text.loading = []

    def forget(self, request: Request, kv: KvBlocks) -> None:
        """Forget a waiting request, and free the blocks that it has."""
        if request in self.holding:
            self.arrive(request)
            self.holding.remove(request)
            kv.release(request, request.shared * kv.block_size, returns=True)
            request.lose_cache()
        self._texts.pop(request, None)
        self._unwritten.discard(request)

    def admit(
        self,
        scheduler: Admitting,
        chunks: list[Chunk],
        token_budget: int,
        admit_first: AdmitFirst,
        admit_loaded: AdmitLoaded,
    ) -> int:
        """Admit waiting requests, those with blocks first, and let others begin to load theirs; add the chunks of those
        that are admitted, and return their number."""
        kv, waiting, count = scheduler.kv, scheduler.waiting, len(chunks)
        deferred: list[Request] = []
        place = 0  # in `holding`: the requests before it are still loading
        while token_budget > 0 and scheduler.num_running < scheduler.max_num_seqs:
            if place < len(self.holding):
                if self._text(self.holding[place]).loading:
                    place += 1
                    continue
                budget_taken = admit_loaded(self.holding[place], chunks, token_budget)
                if budget_taken:
                    self._text(self.holding.pop(place)).deferred = False
            elif waiting:
                hit = kv.find(waiting[0])
                tokens = self._look_up(kv, waiting[0], hit)
                if tokens is None:
                    deferred.append(waiting.popleft())
                    continue
                if tokens and self._has_room(scheduler, waiting[0], hit, tokens, chunks):
                    self._begin(kv, waiting.popleft(), hit, tokens)
                    if isinstance(waiting, PriorityQueue):
                        self.holding.sort(key=urgency)
                    place = len(self.holding)
                    continue
                budget_taken = 0 if tokens else admit_first(chunks, token_budget)
                if budget_taken:
                    self._text(chunks[-1].request).deferred = False
            else:
                break
            if not budget_taken:
                break
            token_budget -= budget_taken
        for request in reversed(deferred):
            waiting.appendleft(request)
        return len(chunks) - count

    def backlogged(self, waiting: Iterable[Request]) -> bool:
        """True if a request waits that never had to wait for a transfer, with blocks or without."""
        return not all(self._text(request).deferred for request in (*self.holding, *waiting))

    def _look_up(self, kv: KvBlocks, request: Request, hit: Hit) -> int | None:
        """Return the tokens of a waiting request that can be loaded after those of its `hit` in the device; None if it
        must wait for a transfer to end."""
        text, size, readable = self._text(request), kv.block_size, self.host.readable
        self._unwritten.discard(request)
        if self._newest:
            text.offered = 0
        if text.writes:
            text.deferred = True
            return None
        tokens, defers = 0, False
        for name in block_names(kv, request, hit.blocks, request.known_tokens // size):
            state = readable(name)
            if state is None:
                break
            defers |= not state or name in self._loads
            tokens += size
        text.deferred |= defers
        return None if defers else tokens

    def _has_room(self, scheduler: Admitting, request: Request, hit: Hit, tokens: int, chunks: list[Chunk]) -> bool:
        """True if a request may take blocks for the `tokens` tokens that it loads beside its hit."""
        kv = scheduler.kv
        room = kv.free + hit.blocks - hit.idle - (scheduler.watermark_blocks if scheduler.num_running else 0)
        if kv.blocks_for(request.known_tokens) * scheduler.scheduler_reserve_full_isl > room:
            return False
        # What prompts in prefill, and the requests that hold blocks, still need for all their tokens stays free.
        computed = {chunk.request: chunk.past + chunk.tokens for chunk in chunks}
        in_prefill = (*scheduler.prefilling, *self.holding)
        needed_blocks = sum(
            max(0, kv.blocks_for(r.known_tokens) - max(kv.held_by(r), kv.blocks_for(computed.get(r, 0))))
            for r in in_prefill
        )
        return hit.blocks + tokens // kv.block_size <= room - needed_blocks

    def _begin(self, kv: KvBlocks, request: Request, hit: Hit, tokens: int) -> None:
        """Let a request take its blocks and begin to load."""
        text, size = self._text(request), kv.block_size
        kv.hold(request, hit._replace(copied_tokens=tokens))
        kv.take(tokens // size)
        text.offered = request.computed // size
        text.loading = block_names(kv, request, hit.blocks, text.offered)
        self._touch(text, range(hit.blocks, text.offered), text.loading, hit.blocks)
        text.deferred = True
        self.host.pin(text.loading)
        self._loads.update(text.loading)
        self.holding.append(request)
        self.started.append((request, tokens))
        if not request.preemptions:
            self.tier.hit_tokens += tokens

    # --- steps ------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """True if the next steps may differ though they compute the same: requests or writes are under way."""
        return bool(self.holding or self._writing or self._ended or self._unwritten)

    def write(self, scheduler: Admitting, chunks: Sequence[Chunk]) -> bool:
        """Begin to write the blocks that the coming step fills, which has these chunks, and the last ones of requests
        that are over; what the latest step began is written by the end of the coming one. Return True if any write
        begins or ends."""
        kv, batch = scheduler.kv, scheduler.decoding
        filled = [(c.request, min(c.past + c.tokens, c.request.prompt_tokens)) for c in chunks]
        if self._unwritten:
            filled += [(request, request.prompt_tokens) for request in batch if request in self._unwritten]
            filled.sort(key=lambda entry: entry[0].seat)
        ended, self._ended = self._ended, []
        written, self._writing = self._writing, []
        for request, tokens in filled:
            self._offer(kv, request, tokens // kv.block_size)
        for request, tokens in ended:
            self._offer(kv, request, min(tokens, request.prompt_tokens) // kv.block_size)
        for request, _ in ended:
            self._unwritten.discard(request)
            places = sorted(self._texts.pop(request).touched)
            self.host.use([name for place in places for name in block_names(kv, request, place, place + 1)])
        for request, names in written:
            self.host.written(names)
            if request in self._texts:
                self._texts[request].writes -= 1
        return bool(written or self._writing)

    def _offer(self, kv: KvBlocks, request: Request, stop: int) -> None:
        """Begin to write the blocks of a request before number `stop` that host memory does not have, if it has room
        for all of them."""
        text = self._text(request)
        if stop <= text.offered:
            return
        names = block_names(kv, request, text.offered, stop)
        places = [place for place, name in enumerate(names, text.offered) if self.host.readable(name) is not False]
        self._touch(text, places, names, text.offered)
        ranks = (self._rank(text, place) for place in range(text.offered, stop))
        new = self.host.write(dict(zip(names, ranks, strict=True)))
        if new is None:
            self._unwritten.add(request)
            return
        self._unwritten.discard(request)
        text.offered = stop
        if new:
            text.writes += 1
            self._writing.append((request, new))

    def _touch(self, text: _Text, places: Iterable[int], names: Sequence[Hashable], first: int) -> None:
        """Note that a request uses blocks at these places of its text; `names` has those from place `first` on."""
        for place in places:
            if place not in text.touched:
                text.touched.add(place)
                if self._newest:
                    self.host.raise_to(names[place - first], self._rank(text, place))

    def _rank(self, text: _Text, place: int) -> Rank:
        """Return the rank of a block that a request uses while it is under way."""
        if not self._newest:
            return self.host.next_rank(), 0
        text.rank = text.rank or self.host.next_rank()
        return text.rank, -place

    def _text(self, request: Request) -> _Text:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text()
        return text
