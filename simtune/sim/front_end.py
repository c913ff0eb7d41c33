"""What requests pass before an engine sees them: the servers in front of instances."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heapreplace

from simtune.costs.ticks import to_ticks
from simtune.specs.pool import Pool


class FrontEnd:
    """The front ends of a deployment: each has one request at a time, first come first served, whichever is free first.

    A request is through after `request_s` and `token_s` for each token of its prompt, and not before those that came
    before it: requests reach routers in their order.
    """

    def __init__(self, servers: Iterable[tuple[int, int, int]]) -> None:
        """`servers`: (tick from which it is free, ticks for each request, ticks for each prompt token)."""
        self._servers = list(servers)
        heapify(self._servers)
        self._latest = 0

    @classmethod
    def of(cls, instances: Iterable[tuple[Pool, int]]) -> FrontEnd | None:
        """That of so many instances of each pool that takes new requests; None where requests pass none."""
        servers = [
            (0, to_ticks(pool.front_end.request_s), to_ticks(pool.front_end.token_s))
            for pool, number in instances
            if pool.front_end is not None and pool.role != "decode"
            for _ in range(number)
        ]
        return cls(servers) if servers else None

    def passed(self, now: int, prompt_tokens: int) -> int:
        """The tick at which a request that comes now is through."""
        free, each, token = self._servers[0]
        done = max(free, now) + each + token * prompt_tokens
        heapreplace(self._servers, (done, each, token))
        self._latest = max(self._latest, done)
        return self._latest
