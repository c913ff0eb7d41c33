"""Seats and blocks that are reserved for requests whose KV cache is computed elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request


class Reservations(dict[Request, None]):
    """Requests that are expected, and those that were received and have not joined the batch yet, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Request] = []
        """Requests whose KV cache has come; they join before the next step."""
        self.joined: Sequence[Request] = ()
        """Requests that joined last, until `take_joined`."""

    def give_up(self, request: Request, kv: KvBlocks) -> None:
        """Free the blocks of a request that will not come."""
        del self[request]
        kv.give(kv.blocks_for(request.known_tokens))
        if request in self.received:
            self.received.remove(request)

    def joining(self, kv: KvBlocks) -> Iterator[Request]:
        """Yield the requests that were received; their seats and blocks are theirs from then on."""
        if not self.received:
            return
        self.joined, self.received = self.received, []
        for request in self.joined:
            del self[request]
            request.computed = request.known_tokens - 1
            # The step computes the newest token and takes the block for it then.
            kv.give(kv.blocks_for(request.known_tokens) - kv.blocks_for(request.computed))
            yield request

    def take_joined(self) -> Sequence[Request]:
        """Return the requests that have joined since the last call."""
        joined, self.joined = self.joined, ()
        return joined

    def clear(self) -> None:
        """Forget all requests; their blocks are gone already."""
        super().clear()
        self.received, self.joined = [], ()
