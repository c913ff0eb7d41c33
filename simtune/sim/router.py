"""Routers: choose which of several equal cores gets a request.

A router knows what it sent to which core and what came back, `stale_s` seconds late; it sees neither output lengths
nor anything else that a real router could not. Cores that are down are never chosen. Ties go to the core with the
lowest number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, Literal

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Request
from simtune.sim.core import EngineCore

Need = Literal["block_tokens", "seed", "session"]


class Router(ABC):
    """Base class of routers, which choose among `cores`, in order of their numbers. A router may read `number`,
    `instance`, `pool` and `up` of a core.

    Further arguments of the constructor are options that a plan may set.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Arguments that the constructor is given by name besides its options:

    * `seed`: seed of the router's random draws;
    * `session`: the session of each request by its number; a load without sessions is refused;
    * `block_tokens`: tokens per block of shared prompts (`Request.blocks`); a load whose prompts do not name their
      blocks is refused.
    """
    deals_in_turn: ClassVar[bool] = False
    """True if the router depends only on the order of the requests, so that some cores can stand for all. Not
    inherited."""
    informed = False
    """True if the router is informed of requests that are over: set if its class overrides `over`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.informed = cls.over is not Router.over
        cls.deals_in_turn = vars(cls).get("deals_in_turn", False)

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        self.cores = list(cores)

    @abstractmethod
    def choose(self, request: Request, now: int) -> EngineCore | None:
        """Return a core that is up for a request at tick `now`; None if all are down."""

    def over(self, request: Request, core: EngineCore, now: int) -> None:  # noqa: B027
        """Called when a request is finished, lost with its core, or refused by it."""


class RoundRobin(Router):
    """Cores in turn.

    With weights of pools (1 unless given) smoothly interleaved: every turn each core gains the weight of its pool, the
    richest is chosen and pays for all.
    """

    deals_in_turn = True

    def __init__(self, cores: Sequence[EngineCore], *, weights: Mapping[str, float] | None = None) -> None:
        super().__init__(cores)
        self._next = 0
        self._weights = [weights.get(core.pool, 1.0) for core in self.cores] if weights else None
        self._credit = [0.0] * len(self.cores)

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """Return the next core that is up; with weights, the one with the most credit."""
        if self._weights is not None:
            return self._richest(self._weights)
        cores = self.cores
        for _ in cores:
            core = cores[self._next]
            self._next = (self._next + 1) % len(cores)
            if core.up:
                return core
        return None

    def _richest(self, weights: Sequence[float]) -> EngineCore | None:
        best = None
        paid = 0.0
        for i, core in enumerate(self.cores):
            if core.up:
                paid += weights[i]
                self._credit[i] += weights[i]
                # The margin keeps sums of weights that differ in the last bit from changing whose turn it is.
                if best is None or self._credit[i] > self._credit[best] + 1e-9:
                    best = i
        if best is None:
            return None
        self._credit[best] -= paid
        return self.cores[best]


class LoadAware(Router):
    """Router that tracks the load of every core: each request weighs `weight` while it is in flight.

    The tracked load is `stale_s` seconds old. The core with the least load is chosen, unless `best` is overridden.
    """

    def __init__(self, cores: Sequence[EngineCore], *, stale_s: float = 0.0) -> None:
        super().__init__(cores)
        self.load = [0] * len(self.cores)
        """Load of each core, by position in `cores`."""
        self._stale = round(stale_s * TICKS_PER_SECOND)
        self._at = {core.number: i for i, core in enumerate(self.cores)}
        self._news: deque[tuple[int, int, int]] = deque()  # (tick it is known, core, change of load)

    def weight(self, request: Request) -> int:
        """Return the load that a request adds to its core."""
        return 1

    def best(self, request: Request, now: int) -> int | None:
        """Return the position of the core for a request; None if all are down."""
        return self.lightest()

    def lightest(self) -> int | None:
        """Return the position of the core with the least load among those that are up."""
        # Two passes in C are faster than one in Python; cores are seldom down.
        lightest = self.load.index(min(self.load))
        if self.cores[lightest].up:
            return lightest
        up = [i for i, core in enumerate(self.cores) if core.up]
        return min(up, key=self.load.__getitem__, default=None)

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """Return the core at position `best` and add the request to its load."""
        self._catch_up(now)
        at = self.best(request, now)
        if at is None:
            return None
        self._change(now, at, self.weight(request))
        return self.cores[at]

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        """Subtract the request from the load of its core."""
        self._change(now, self._at[core.number], -self.weight(request))

    def _change(self, now: int, at: int, change: int) -> None:
        if self._stale:
            self._news.append((now + self._stale, at, change))
        else:
            self.load[at] += change

    def _catch_up(self, now: int) -> None:
        news = self._news
        while news and news[0][0] <= now:
            _, at, change = news.popleft()
            self.load[at] += change


class LeastOutstanding(LoadAware):
    """Choose the core with the fewest requests in flight."""


class LeastTokens(LoadAware):
    """Choose the core whose requests in flight have the fewest prompt tokens."""

    def weight(self, request: Request) -> int:
        """Return the tokens of the request's prompt."""
        return request.prompt_tokens


class ByLength(LeastTokens):
    """Send prompts to pools by their length, and there to the core with the fewest tokens.

    `longest` gives the longest prompt of each pool in tokens; a pool that is not named accepts any length. A prompt
    goes to the pools with the lowest limit that it fits, or beyond all limits to those with the highest. If
    none of their cores is up, the next higher limits are tried, then lower ones.
    """

    def __init__(
        self, cores: Sequence[EngineCore], *, longest: Mapping[str, int] | None = None, stale_s: float = 0.0
    ) -> None:
        super().__init__(cores, stale_s=stale_s)
        limits = [(longest or {}).get(core.pool, math.inf) for core in self.cores]
        self._limits = sorted(set(limits))
        self._within = [[i for i, limit in enumerate(limits) if limit == shared_limit] for shared_limit in self._limits]

    def best(self, request: Request, now: int) -> int | None:
        """Return the core with the fewest tokens in the first of the allowed pools that has a core up."""
        at = bisect_left(self._limits, request.prompt_tokens)
        for within in (*self._within[at:], *reversed(self._within[:at])):
            up = [i for i in within if self.cores[i].up]
            if up:
                return min(up, key=self.load.__getitem__)
        return None


class PowerOfTwo(LoadAware):
    """Choose the less loaded of two cores drawn for this request (Mitzenmacher 2001)."""

    needs = frozenset({"seed"})

    def __init__(self, cores: Sequence[EngineCore], *, seed: int = 0, stale_s: float = 0.0) -> None:
        super().__init__(cores, stale_s=stale_s)
        self._seed = seed

    def best(self, request: Request, now: int) -> int | None:
        """Return the less loaded of two cores that are drawn by the number of the request."""
        up = [i for i, core in enumerate(self.cores) if core.up]
        if len(up) < 2:
            return up[0] if up else None
        # By the number of the request: the order in which requests are routed must not change what they draw.
        draw = mix(self._seed, request.id)
        first = draw % len(up)
        # Two different cores out of one draw: the upper half of it chooses the distance.
        second = (first + 1 + (draw >> 32) % (len(up) - 1)) % len(up)
        a, b = sorted((up[first], up[second]))
        return b if self.load[b] < self.load[a] else a


class SessionAffinity(Router):
    """Send all requests of a session to one core, by rendezvous hashing: a core that fails moves only its own
    sessions."""

    needs = frozenset({"session"})

    def __init__(self, cores: Sequence[EngineCore], *, session: Sequence[int]) -> None:
        """Create the router; `session[i]` is the session of request i."""
        super().__init__(cores)
        self._session = session

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """Return the core with the highest hash for the request's session."""
        up = [core for core in self.cores if core.up]
        session = self._session[request.id]
        return max(up, key=lambda core: mix(session, core.number), default=None)


class PrefixAware(LoadAware):
    """Choose the core with the least to do: prompt tokens not cached there, plus `load_weight` x prompt tokens in
    flight.

    The cost is that of NVIDIA Dynamo's KV router at temperature zero. What a core has cached is taken to be the leading
    blocks of the prompts sent there: the latest `memory_tokens` per core, and up to as many before them, kept in two
    generations.
    """

    needs = frozenset({"block_tokens"})

    def __init__(
        self,
        cores: Sequence[EngineCore],
        *,
        block_tokens: int,
        memory_tokens: int = 1_000_000,
        load_weight: float = 1.0,
        stale_s: float = 0.0,
    ) -> None:
        super().__init__(cores, stale_s=stale_s)
        self._block_tokens = block_tokens
        self._generation = max(1, memory_tokens // block_tokens) * len(self.cores)
        self._load_weight = load_weight
        self._young: dict[Hashable, int] = {}  # block -> cores that have it, as bits
        self._old: dict[Hashable, int] = {}
        self._remembered = 0  # blocks times cores in the young generation, at most
        self._sent: deque[tuple[int, int, Sequence[Hashable]]] = deque()  # (tick it is known, core, blocks)

    def weight(self, request: Request) -> int:
        """Return the tokens of the request's prompt."""
        return request.prompt_tokens

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        """Subtract the request from the load of its core; a core that is down by then has lost its cache."""
        super().over(request, core, now)
        # The core has left, or was lost with everything it had cached.
        if not core.up:
            all_but_it = ~(1 << self._at[core.number])
            for generation in (self._young, self._old):
                for block in generation:
                    generation[block] &= all_but_it

    def best(self, request: Request, now: int) -> int | None:
        """Return the core with the least to do, the one with the lowest number among equals."""
        sent = self._sent
        while sent and sent[0][0] <= now:
            _, at, blocks = sent.popleft()
            self._remember(at, blocks)
        best = self.lightest()
        if best is None:
            return None
        load, weight, lightest = self.load, self._load_weight, best
        least = weight * load[best]
        for cores, cached in self._cached(request.blocks):
            # Among cores with equally much cached the least loaded is best, so it alone is tried if it is one of them.
            for at in (lightest,) if cores >> lightest & 1 else _bits(cores):
                cost = weight * load[at] - cached * self._block_tokens
                if (cost < least or (cost == least and at < best)) and self.cores[at].up:
                    best, least = at, cost
        if self._stale:
            sent.append((now + self._stale, best, request.blocks))
        else:
            self._remember(best, request.blocks)
        return best

    def _cached(self, blocks: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Return (cores as bits, number of leading blocks they have cached) for cores that have any."""
        young, old = self._young.get, self._old.get
        hits: list[tuple[int, int]] = []
        cores, depth = -1, 0
        for block in blocks:
            still = cores & (young(block, 0) | old(block, 0))
            if still != cores and depth:
                hits.append((cores & ~still, depth))
            cores = still
            if not cores:
                break
            depth += 1
        if cores > 0:
            hits.append((cores, depth))
        return hits

    def _remember(self, at: int, blocks: Sequence[Hashable]) -> None:
        young, bit = self._young, 1 << at
        for block in blocks:
            have = young.get(block, 0)
            if not have & bit:
                young[block] = have | bit
        self._remembered += len(blocks)
        if self._remembered >= self._generation:
            # Whole generations are forgotten: an order of use for each block would cost more than routing.
            self._old, self._young, self._remembered = young, {}, 0


def _bits(mask: int) -> list[int]:
    """Return the positions of the bits that are set, from the lowest."""
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers


def mix(a: int, b: int) -> int:
    """Return 64 well-mixed bits of two numbers (the finaliser of SplitMix64)."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_outstanding": LeastOutstanding,
    "least_tokens": LeastTokens,
    "by_length": ByLength,
    "power_of_two": PowerOfTwo,
    "session_affinity": SessionAffinity,
    "prefix_aware": PrefixAware,
}
"""Built-in routers by their kind in a plan; further fields there are options of the router."""
