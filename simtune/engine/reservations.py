"""Seats and blocks that are reserved for requests whose KV cache is computed elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request


class Reservations(dict[Request, None]):
    """Requests that are expected, and those that were received and have not joined the batch yet, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Request] = []
        """Requests whose KV cache has come; they join before the next step."""

    def give_up(self, request: Request, kv: KvBlocks) -> None:
        """Free the blocks of a request that will not come."""
        del self[request]
        kv.give(kv.blocks_for(request.known_tokens))
        if request in self.received:
            self.received.remove(request)

    def joining(self, kv: KvBlocks) -> Iterator[Request]:
        """Yield the requests that were received; their seats and blocks are theirs from then on."""
        for request in self.received:
            del self[request]
            request.computed = request.known_tokens - 1
            # The step computes the newest token and takes the block for it then.
            kv.give(kv.blocks_for(request.known_tokens) - kv.blocks_for(request.computed))
            yield request
        self.received.clear()

    def clear(self) -> None:
        """Forget all requests; their blocks are gone already."""
        super().clear()
        self.received.clear()
