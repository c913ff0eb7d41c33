"""Images in prompts, and the cache of what a vision encoder makes of them, as vLLM V1 schedules both.

An image is encoded in the step in which a chunk first reaches its tokens, all of it at once: the encoder attends in
both directions. If the step's budget of vectors is used up, or no room is free for its vectors, the chunk ends before
the image, and other requests may go on. Vectors are kept under the name of the image. A request refers to them until
all tokens of the image are computed; afterwards they stay until others need the room, the oldest first, and another
request with the same image finds them. What a prefix cache has of an image is not encoded again.

The rule is `_try_schedule_encoder_inputs` of vllm/v1/core/sched/scheduler.py and vllm/v1/core/encoder_cache_manager.py
(release 0.33), without encoder-cache connectors. Two differences: an image of a request that is preempted in the very
step that would encode it is not encoded, and is not in the cache; and a request that gets no tokens, for want of KV
blocks, changes nothing. In vLLM it refers to images that it finds, and others are evicted for it, so that a waiting
request can keep room for ever from a resident that needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from simtune.engine.images import Image
from simtune.engine.request import Request
from simtune.engine.step import Chunk


class EncoderLimits(NamedTuple):
    """Limits of an encoder in the steps of one engine core, in vectors."""

    room: int
    """Vectors that are kept."""
    budget: int
    """Vectors that one step may make."""
    chunked: bool = True
    """False if no chunk ends within an image before which it began."""


class EncoderCache:
    """Vectors of images that are kept, and the budget of the step that is being scheduled."""

    def __init__(self, limits: EncoderLimits, *, late: bool = False) -> None:
        """Make an empty cache. If `late`, the engine knows one step later that the tokens of an image are computed."""
        self.limits, self._late = limits, late
        self.encoded = self.hits = 0
        """Images encoded so far, and images whose vectors a request found when it reached them."""
        self.clear()

    def clear(self) -> None:
        """Lose all vectors."""
        self.free = self.freeable = self.limits.room
        self.holders: dict[int, set[int]] = {}  # requests that refer to an image
        self.idle: OrderedDict[int, int] = OrderedDict()  # vectors of images without a holder, the oldest first
        self._computed: list[tuple[Request, int]] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Start the budget of a new step."""
        self.budget = self.limits.budget
        self._coming: dict[int, Image] = {}
        self._granted: tuple[Request, int, int] | None = None
        self.refused = False
        """True if a request got fewer tokens in this step for want of budget or room."""

    def grant(self, request: Request, past: int, tokens: int) -> int:
        """Return how many of the next `tokens` tokens of a request, after `past`, may be computed in this step. Changes
        nothing: `commit` encodes what they reach, or refers to it."""
        granted_tokens = self._reach(request, past, tokens)
        self.refused = self.refused or granted_tokens < tokens
        self._granted = request, past, past + granted_tokens
        return granted_tokens

    def _reach(self, request: Request, past: int, tokens: int) -> int:
        end, trial = past + tokens, _Trial(self)
        for image in request.images:
            if image.start >= end:
                break
            if image.end <= past or trial.has(image):
                continue
            cut = not self.limits.chunked and past < image.start and end < image.end
            if cut or not trial.takes_in(image):
                return max(0, image.start - past)
        return tokens

    def commit(self, request: Request) -> None:
        """Encode, or refer to, the images that the last `grant` reached, if it was for this request."""
        if self._granted is None or self._granted[0] is not request:
            return
        _, past, end = self._granted
        self._granted = None
        for image in request.images:
            if image.end <= past or image.start >= end:
                continue
            holders = self.holders.get(image.name)
            if holders is None:
                self._encode(request, image)
                continue
            if not holders:
                self.freeable -= self.idle.pop(image.name)
            if request.id not in holders:
                holders.add(request.id)
                self.hits += image.start >= past

    def _encode(self, request: Request, image: Image) -> None:
        """Make room for an image that is encoded in the coming step; the oldest images without a holder go first."""
        while image.vectors > self.free:
            name, freed_vectors = self.idle.popitem(last=False)
            del self.holders[name]
            self.free += freed_vectors
        self.holders[image.name] = {request.id}
        self.free -= image.vectors
        self.freeable -= image.vectors
        self.budget -= image.vectors
        self._coming[image.name] = image

    def take(self) -> list[Image]:
        """Return the images of the step that has been scheduled, which are encoded now."""
        images = [*self._coming.values()]
        self.encoded += len(images)
        self._coming = {}
        return images

    def end_step(self, chunks: Sequence[Chunk]) -> None:
        """Let go of images whose tokens are computed with these chunks."""
        ended = [(chunk.request, chunk.past + chunk.tokens) for chunk in chunks if chunk.request.images]
        if self._late:
            ended, self._computed = self._computed, ended
        self._let_go_of(ended)

    def settle(self) -> bool:
        """Let go at once of images that the engine would know of one step later; False if there are none."""
        late, self._computed = self._computed, []
        self._let_go_of(late)
        return bool(late)

    def release(self, request: Request) -> None:
        """Let go of all images of a request that leaves: finished, aborted or preempted."""
        for image in request.images:
            coming = self._coming.get(image.name)
            if coming is not None and self.holders[image.name] == {request.id}:
                # no other request waits for it, so it is not encoded
                del self._coming[image.name], self.holders[image.name]
                self.free += coming.vectors
                self.freeable += coming.vectors
                self.budget += coming.vectors
            else:
                self._let_go(request, image)

    def _let_go_of(self, ended: Sequence[tuple[Request, int]]) -> None:
        """Let go of the images whose tokens are among the first ones of a request, which are computed."""
        for request, computed in ended:
            for image in request.images:
                if image.end <= computed:
                    self._let_go(request, image)

    def _let_go(self, request: Request, image: Image) -> None:
        holders = self.holders.get(image.name)
        if holders and request.id in holders:
            holders.discard(request.id)
            if not holders:
                self.idle[image.name] = image.vectors
                self.freeable += image.vectors


class _Trial:
    """A cache as it would be with the images that a chunk reaches; the cache itself does not change."""

    def __init__(self, cache: EncoderCache) -> None:
        self._cache = cache
        self._free, self._freeable, self._budget = cache.free, cache.freeable, cache.budget
        self._vectors = 0  # of images to encode
        self._reached: set[int] = set()
        self._evicted: set[int] = set()

    def has(self, image: Image) -> bool:
        """True if the vectors of an image are here, or will be with this step."""
        holders = self._cache.holders.get(image.name)
        if image.name in self._reached:
            return True
        if holders is None or image.name in self._evicted:
            return False
        self._reached.add(image.name)
        self._freeable -= 0 if holders else image.vectors
        return True

    def takes_in(self, image: Image) -> bool:
        """Encode an image; False if budget or room do not suffice."""
        needed_vectors = self._vectors + image.vectors
        if needed_vectors > self._budget or needed_vectors > self._freeable:
            return False
        idle = (pair for pair in self._cache.idle.items() if pair[0] not in self._reached | self._evicted)
        while needed_vectors > self._free:
            name, vectors = next(idle)
            self._evicted.add(name)
            self._free += vectors
        self._vectors = needed_vectors
        self._reached.add(image.name)
        return True
