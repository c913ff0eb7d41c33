"""Routers: which of several equal cores gets a request.

A router knows what it sent where and what came back, as old as `stale` ticks; it sees neither output lengths nor
anything else a real one could not. Cores that are down are never chosen. Ties go to the core with the lowest number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence

from simtune.engine import Request
from simtune.sim.core import EngineCore


class Router(ABC):
    """Chooses among `cores`, in order of their numbers."""

    informed = False
    """Whether it wants to hear of requests that are over."""

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        self.cores = list(cores)

    @abstractmethod
    def choose(self, request: Request, now: int) -> EngineCore | None:
        """The core for a request; None when all are down."""

    def over(self, request: Request, core: EngineCore, now: int) -> None:  # noqa: B027
        """The request is finished, or lost with its core."""


class RoundRobin(Router):
    """One after the other."""

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        super().__init__(cores)
        self._next = 0

    def choose(self, request: Request, now: int) -> EngineCore | None:
        cores = self.cores
        for _ in cores:
            core = cores[self._next]
            self._next += 1
            if self._next == len(cores):
                self._next = 0
            if core.up:
                return core
        return None


class WeightedRoundRobin(Router):
    """Smoothly interleaved: every turn each core gains its weight, the richest is chosen and pays for all."""

    def __init__(self, cores: Sequence[EngineCore], weights: Sequence[float]) -> None:
        super().__init__(cores)
        self._weights = list(weights)
        self._credit = [0.0] * len(self._weights)

    def choose(self, request: Request, now: int) -> EngineCore | None:
        best = None
        paid = 0.0
        for i, core in enumerate(self.cores):
            if core.up:
                paid += self._weights[i]
                self._credit[i] += self._weights[i]
                if best is None or self._credit[i] > self._credit[best] + 1e-9:
                    best = i
        if best is None:
            return None
        self._credit[best] -= paid
        return self.cores[best]


class _Informed(Router):
    """Keeps the load of every core as the router knows it: each request weighs `weight` while it is under way."""

    informed = True

    def __init__(self, cores: Sequence[EngineCore], stale: int = 0) -> None:
        super().__init__(cores)
        self._stale = stale
        self._at = {core.number: i for i, core in enumerate(self.cores)}
        self._load = [0] * len(self.cores)
        self._news: deque[tuple[int, int, int]] = deque()  # (tick it is known, core, change of load)

    def choose(self, request: Request, now: int) -> EngineCore | None:
        self._catch_up(now)
        at = self._best(request, now)
        if at is None:
            return None
        self._change(now, at, self.weight(request))
        return self.cores[at]

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        self._change(now, self._at[core.number], -self.weight(request))

    def weight(self, request: Request) -> int:
        return 1

    def _best(self, request: Request, now: int) -> int | None:
        return self._lightest()

    def _lightest(self) -> int | None:
        lightest = self._load.index(min(self._load))
        if self.cores[lightest].up:
            return lightest
        up = [i for i, core in enumerate(self.cores) if core.up]
        return min(up, key=self._load.__getitem__, default=None)

    def _change(self, now: int, at: int, change: int) -> None:
        if self._stale:
            self._news.append((now + self._stale, at, change))
        else:
            self._load[at] += change

    def _catch_up(self, now: int) -> None:
        news = self._news
        while news and news[0][0] <= now:
            _, at, change = news.popleft()
            self._load[at] += change


class LeastOutstanding(_Informed):
    """The core with the fewest requests under way."""


class LeastTokens(_Informed):
    """The core whose requests under way have the fewest tokens to keep, as far as they were known on arrival."""

    def weight(self, request: Request) -> int:
        return request.prompt_tokens


class PowerOfTwo(_Informed):
    """The less loaded of two cores drawn for this request (Mitzenmacher 2001)."""

    def __init__(self, cores: Sequence[EngineCore], stale: int = 0, seed: int = 0) -> None:
        super().__init__(cores, stale)
        self._seed = seed

    def _best(self, request: Request, now: int) -> int | None:
        up = [i for i, core in enumerate(self.cores) if core.up]
        if len(up) < 2:
            return up[0] if up else None
        draw = mix(self._seed, request.id)
        first = draw % len(up)
        second = (first + 1 + (draw >> 32) % (len(up) - 1)) % len(up)
        a, b = sorted((up[first], up[second]))
        return b if self._load[b] < self._load[a] else a


class SessionAffinity(Router):
    """All requests of a session on one core, by rendezvous hashing: a core that fails moves only its own sessions.

    `sessions[i]` is the session of request i.
    """

    def __init__(self, cores: Sequence[EngineCore], sessions: Sequence[int]) -> None:
        super().__init__(cores)
        self._sessions = sessions

    def choose(self, request: Request, now: int) -> EngineCore | None:
        up = [core for core in self.cores if core.up]
        session = self._sessions[request.id]
        return max(up, key=lambda core: mix(session, core.number), default=None)


class PrefixAware(_Informed):
    """The core that would have the least to do: prompt tokens not cached there, plus `load_weight` x those under way.

    The cost is that of NVIDIA Dynamo's KV router at temperature zero. What a core has cached is taken to be the leading
    blocks of the prompts sent there: the latest `memory_blocks` per core, and up to as many before them, kept in two
    generations.
    """

    def __init__(
        self,
        cores: Sequence[EngineCore],
        *,
        block_tokens: int,
        memory_blocks: int,
        load_weight: float = 1.0,
        stale: int = 0,
    ) -> None:
        super().__init__(cores, stale)
        self._block_tokens = block_tokens
        self._generation = memory_blocks * len(self.cores)
        self._load_weight = load_weight
        self._young: dict[Hashable, int] = {}  # block -> cores that have it, as bits
        self._old: dict[Hashable, int] = {}
        self._remembered = 0  # blocks times cores in the young generation, at most
        self._sent: deque[tuple[int, int, Sequence[Hashable]]] = deque()  # (tick it is known, core, blocks)

    def weight(self, request: Request) -> int:
        return request.prompt_tokens

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        super().over(request, core, now)
        if not core.up:  # it has left, or is lost with everything it had cached
            others = ~(1 << self._at[core.number])
            for generation in (self._young, self._old):
                for block in generation:
                    generation[block] &= others

    def _best(self, request: Request, now: int) -> int | None:
        sent = self._sent
        while sent and sent[0][0] <= now:
            _, at, blocks = sent.popleft()
            self._remember(at, blocks)
        best = self._lightest()
        if best is None:
            return None
        load, weight, lightest = self._load, self._load_weight, best
        least = weight * load[best]
        for cores, cached in self._cached(request.blocks):
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
        """(cores as bits, leading blocks they have) for those that have any."""
        young, old = self._young.get, self._old.get
        found: list[tuple[int, int]] = []
        cores, depth = -1, 0
        for block in blocks:
            still = cores & (young(block, 0) | old(block, 0))
            if still != cores and depth:
                found.append((cores & ~still, depth))
            cores = still
            if not cores:
                break
            depth += 1
        if cores > 0:
            found.append((cores, depth))
        return found

    def _remember(self, at: int, blocks: Sequence[Hashable]) -> None:
        young, bit = self._young, 1 << at
        for block in blocks:
            have = young.get(block, 0)
            if not have & bit:
                young[block] = have | bit
        self._remembered += len(blocks)
        if self._remembered >= self._generation:
            self._old, self._young, self._remembered = young, {}, 0


def _bits(mask: int) -> list[int]:
    """Numbers of the bits that are set, from the lowest."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def mix(a: int, b: int) -> int:
    """64 well-mixed bits of two numbers (the finaliser of SplitMix64)."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
