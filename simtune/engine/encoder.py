"""Media in prompts, and the cache of embeddings that an encoder makes of them, as vLLM V1 schedules both.

An item is encoded in the step in which a chunk first reaches its tokens, all of it at once: the encoder attends in
both directions. If the step's budget of vectors is used up, or no room is free for its vectors, the chunk ends before
the item, and other requests may go on. Vectors are kept under the name of the item. A request refers to them until
all tokens of the item are computed; afterwards they stay until others need the room, the oldest first, and another
request with the same item finds them. What a prefix cache has of an item is not encoded again.

The rule is `_try_schedule_encoder_inputs` of vllm/v1/core/sched/scheduler.py and vllm/v1/core/encoder_cache_manager.py
(release 0.33), without encoder-cache connectors. Items may stand in turns: the tokens of a video and those of its sound
are one range of the prompt for both, and a chunk without any token of the sound does not encode it. Two differences: an
item of a request that is preempted in the very step that would encode it is not encoded, and is not in the cache; and a
request that gets no tokens, for want of KV blocks, changes nothing. In vLLM it refers to items that it finds, and
others are evicted for it, so that a waiting request can keep room for ever from a resident that needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from simtune.engine.media import MediaItem
from simtune.engine.request import Request
from simtune.engine.step import Chunk


class EncoderLimits(NamedTuple):
    """Limits of an encoder in the steps of one engine core, in vectors."""

    room: int
    """Vectors that are kept."""
    budget: int
    """Vectors that one step may make."""
    chunked: bool = True
    """False if no chunk ends within an item before which it began."""


class EncoderCache:
    """Vectors of items that are kept, and the budget of the step that is being scheduled."""

    def __init__(self, limits: EncoderLimits, *, late: bool = False) -> None:
        """Make an empty cache. If `late`, the engine knows one step later that the tokens of an item are computed."""
        self.limits, self._late = limits, late
        self.encoded = self.hits = 0
        """Items encoded so far, and items whose vectors a request found when it reached them."""
        self.clear()

    def clear(self) -> None:
        """Lose all vectors."""
        self.free = self.freeable = self.limits.room
        self.holders: dict[int, set[int]] = {}  # requests that refer to an item
        self.idle: OrderedDict[int, int] = OrderedDict()  # vectors of items without a holder, the oldest first
        self._computed: list[tuple[Request, int]] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Start the budget of a new step."""
        self.budget = self.limits.budget
        self._coming: dict[int, MediaItem] = {}
        self._granted: tuple[Request, int, list[tuple[MediaItem, bool]]] | None = None
        self.refused = False
        """True if a request got fewer tokens in this step for want of budget or room."""

    def grant(self, request: Request, past: int, tokens: int) -> int:
        """Return how many of the next `tokens` tokens of a request, after `past`, may be computed in this step. Changes
        nothing: `commit` encodes what they reach, or refers to it."""
        granted_tokens, items = self._reach(request, past, tokens)
        self.refused = self.refused or granted_tokens < tokens
        self._granted = request, past, items
        return granted_tokens

    def _reach(self, request: Request, past: int, tokens: int) -> tuple[int, list[tuple[MediaItem, bool]]]:
        """Return how many tokens may be computed, and the items in their range: true for those that are encoded for
        them or found, false for those for which there is only made room."""
        end, trial = past + tokens, _Trial(self)
        items: list[tuple[MediaItem, bool]] = []
        for item in request.media:
            if item.start >= end:
                break
            if item.end <= past:
                continue
            if trial.has(item):
                items.append((item, True))
                continue
            # vLLM 0.33 does not let a chunk end within the item at which it begins either
            cut = not self.limits.chunked and past <= item.start and end < item.end
            is_reached = item.reaches(past, end)
            if cut or not trial.takes_in(item, is_reached):
                return max(0, item.start - past), items
            items.append((item, is_reached))
        return tokens, items

    def commit(self, request: Request) -> None:
        """Encode, or refer to, the items that the last `grant` reached, if it was for this request."""
        if self._granted is None or self._granted[0] is not request:
            return
        _, past, items = self._granted
        self._granted = None
        for item, is_reached in items:
            holders = self.holders.get(item.name)
            if holders is None:
                self._make_room(item)
                if is_reached:
                    self._encode(request, item)
                continue
            if not holders:
                self.freeable -= self.idle.pop(item.name)
            if request.id not in holders:
                holders.add(request.id)
                self.hits += item.start >= past

    def _make_room(self, item: MediaItem) -> None:
        """Make room for an item; the oldest ones without a holder go first."""
        while item.vectors > self.free:
            name, freed_vectors = self.idle.popitem(last=False)
            del self.holders[name]
            self.free += freed_vectors

    def _encode(self, request: Request, item: MediaItem) -> None:
        """Encode an item, for which there is room, in the coming step."""
        self.holders[item.name] = {request.id}
        self.free -= item.vectors
        self.freeable -= item.vectors
        self.budget -= item.vectors
        self._coming[item.name] = item

    def take(self) -> list[MediaItem]:
        """Return the items of the step that has been scheduled, which are encoded now."""
        items = [*self._coming.values()]
        self.encoded += len(items)
        self._coming = {}
        return items

    def end_step(self, chunks: Sequence[Chunk]) -> None:
        """Let go of items whose tokens are computed with these chunks."""
        ended = [(chunk.request, chunk.past + chunk.tokens) for chunk in chunks if chunk.request.media]
        if self._late:
            ended, self._computed = self._computed, ended
        self._let_go_of(ended)

    def settle(self) -> bool:
        """Let go at once of items that the engine would know of one step later; False if there are none."""
        late, self._computed = self._computed, []
        self._let_go_of(late)
        return bool(late)

    def release(self, request: Request) -> None:
        """Let go of all items of a request that leaves: finished, aborted or preempted."""
        for item in request.media:
            coming = self._coming.get(item.name)
            if coming is not None and self.holders[item.name] == {request.id}:
                # no other request waits for it, so it is not encoded
                del self._coming[item.name], self.holders[item.name]
                self.free += coming.vectors
                self.freeable += coming.vectors
                self.budget += coming.vectors
            else:
                self._let_go(request, item)

    def _let_go_of(self, ended: Sequence[tuple[Request, int]]) -> None:
        """Let go of the items whose tokens are among the first ones of a request, which are computed."""
        for request, computed in ended:
            for item in request.media:
                if item.end <= computed:
                    self._let_go(request, item)

    def _let_go(self, request: Request, item: MediaItem) -> None:
        holders = self.holders.get(item.name)
        if holders and request.id in holders:
            holders.discard(request.id)
            if not holders:
                self.idle[item.name] = item.vectors
                self.freeable += item.vectors


class _Trial:
    """A cache as it would be with the items that a chunk reaches; the cache itself does not change."""

    def __init__(self, cache: EncoderCache) -> None:
        self._cache = cache
        self._free, self._freeable, self._budget = cache.free, cache.freeable, cache.budget
        self._vectors = 0  # of items to encode
        self._reached: set[int] = set()
        self._evicted: set[int] = set()

    def has(self, item: MediaItem) -> bool:
        """True if the vectors of an item are here, or will be with this step."""
        holders = self._cache.holders.get(item.name)
        if item.name in self._reached:
            return True
        if holders is None or item.name in self._evicted:
            return False
        self._reached.add(item.name)
        self._freeable -= 0 if holders else item.vectors
        return True

    def takes_in(self, item: MediaItem, is_reached: bool) -> bool:
        """Make room for an item and, if tokens of it are reached, encode it; False if budget or room do not suffice."""
        needed_vectors = self._vectors + item.vectors
        if needed_vectors > self._budget or needed_vectors > self._freeable:
            return False
        idle = (pair for pair in self._cache.idle.items() if pair[0] not in self._reached | self._evicted)
        while needed_vectors > self._free:
            name, vectors = next(idle)
            self._evicted.add(name)
            self._free += vectors
        if is_reached:
            self._vectors = needed_vectors
            self._reached.add(item.name)
        return True
