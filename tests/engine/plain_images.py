"""vLLM's encoder cache and budget, as plainly as its own code has them: sets of request numbers by image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.engine.plain import PlainEngine, PlainRequest, PlainStep


@dataclass(frozen=True)
class PlainImage:
    start: int
    tokens: int
    vectors: int
    name: int
    seen: str = ""
    """Its tokens, those with embeddings marked by x; all have some unless given."""


class PlainEncodingEngine(PlainEngine):
    """Images of requests by their number; `encoded` are the names that the last step encodes."""

    def __init__(
        self, *sizes: Any, images: dict[int, list[PlainImage]], room: int, limit: int, whole: bool, **more: Any
    ):
        super().__init__(*sizes, **more)
        self.images, self.room, self.limit, self.whole = images, room, limit, whole
        self.cached: dict[int, set[int]] = {}
        self.unused: list[int] = []  # names without a request, the first to go first
        self.size: dict[int, int] = {image.name: image.vectors for of in images.values() for image in of}
        self.done: list[tuple[PlainRequest, int]] = []
        self.encoded: list[int] = []
        self.asked = (0, 0)

    def _step(self) -> PlainStep:
        self.encoded = []
        return super()._step()

    def _in_use(self) -> int:
        return sum(self.size[name] for name in self.cached)

    def _granted(self, request: PlainRequest, past: int, tokens: int) -> int:
        """As vLLM does it, but with a copy: nothing changes before the request gets its tokens."""
        before = {name: set(users) for name, users in self.cached.items()}, list(self.unused)
        granted, _ = self._reached(request, past, tokens)
        self.cached, self.unused = before
        self.asked = past, tokens
        return granted

    def _reached(self, request: PlainRequest, past: int, tokens: int) -> tuple[int, list[PlainImage]]:
        pending: list[PlainImage] = []
        budget = self.limit - sum(self.size[name] for name in self.encoded)
        for image in self.images[request.id] if tokens > 0 else ():
            if image.start >= past + tokens:
                break
            if image.start + image.tokens <= past or image.name in [other.name for other in pending]:
                continue
            if image.name in self.cached:
                if image.name in self.unused:
                    self.unused.remove(image.name)
                self.cached[image.name].add(request.id)
                continue
            if self.whole and past <= image.start and past + tokens < image.start + image.tokens:
                return image.start - past, pending
            waiting = sum(other.vectors for other in pending)
            free = self.room - self._in_use()
            freeable = free + sum(self.size[name] for name in self.unused)
            if image.vectors > budget or image.vectors + waiting > freeable:
                return max(0, image.start - past), pending
            while image.vectors + waiting > self.room - self._in_use():
                del self.cached[self.unused.pop(0)]
            if image.seen and "x" not in image.seen[max(0, past - image.start) : past + tokens - image.start]:
                continue
            budget -= image.vectors
            pending.append(image)
        return tokens, pending

    def _committed(self, request: PlainRequest) -> None:
        _, pending = self._reached(request, *self.asked)
        for image in pending:
            self.cached[image.name] = {request.id}
            self.encoded.append(image.name)
        assert self._in_use() <= self.room
        assert sum(self.size[name] for name in self.encoded) <= self.limit

    def _passed(self, request: PlainRequest, computed: int) -> None:
        self.done.append((request, computed))

    def _part(self) -> None:
        for request, computed in self.done:
            for image in self.images[request.id]:
                if image.start + image.tokens <= computed:
                    self._leave(request, image)
        self.done = []
        super()._part()

    def _gone(self, request: PlainRequest) -> None:
        for image in self.images[request.id]:
            if image.name in self.encoded and self.cached[image.name] == {request.id}:
                self.encoded.remove(image.name)
                del self.cached[image.name]
            else:
                self._leave(request, image)

    def _leave(self, request: PlainRequest, image: PlainImage) -> None:
        users = self.cached.get(image.name)
        if users and request.id in users:
            users.remove(request.id)
            if not users:
                self.unused.append(image.name)
