"""Front ends: the servers in front of instances that every request passes."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappush, heapreplace

from simtune.costs.ticks import to_ticks
from simtune.specs.pool import Pool


class FrontEnd:
    """The front ends of a deployment: each serves one request at a time, and a request goes to the one that is free
    first, first come first served.

    A request is through after `request_s` and `token_s` for each token of its prompt, and not before those that came
    before it: requests reach routers in their order.
    """

    def __init__(self, servers: Iterable[tuple[int, int, int]]) -> None:
        """Create front ends from `servers`: (tick from which it is free, ticks per request, ticks per prompt token)."""
        self._servers = list(servers)
        heapify(self._servers)
        self._latest = 0

    @classmethod
    def of(cls, instances: Iterable[tuple[Pool, int]]) -> FrontEnd | None:
        """Return the front ends of a number of instances of each pool that accepts new requests; None if there are
        none."""
        servers = [(0, *_ticks(pool)) for pool, number in instances if has_front_end(pool) for _ in range(number)]
        return cls(servers) if servers else None

    def join(self, now: int, pool: Pool) -> None:
        """Add the front end of an instance of a pool, which is free from tick `now` on."""
        heappush(self._servers, (now, *_ticks(pool)))

    def leave(self, pool: Pool) -> None:
        """Remove the front end of an instance of a pool: the one that is free first. Requests that are in it pass."""
        times = _ticks(pool)
        self._servers.remove(min(server for server in self._servers if server[1:] == times))
        heapify(self._servers)

    def passed(self, now: int, prompt_tokens: int) -> int:
        """Return the tick at which a request that arrives now has passed the front end."""
        free, request_ticks, token = self._servers[0]
        end = max(free, now) + request_ticks + token * prompt_tokens
        heapreplace(self._servers, (end, request_ticks, token))
        self._latest = max(self._latest, end)
        return self._latest


def has_front_end(pool: Pool) -> bool:
    """True if requests pass a front end of the pool; decode pools get theirs from prefill pools, without passing it."""
    return pool.front_end is not None and pool.role != "decode"


def _ticks(pool: Pool) -> tuple[int, int]:
    """Return the ticks of the front end of a pool per request, and per prompt token."""
    assert pool.front_end is not None
    return to_ticks(pool.front_end.request_s), to_ticks(pool.front_end.token_s)
