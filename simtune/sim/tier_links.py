"""Fetches of cached tokens from the tiers below a device, in time."""

from __future__ import annotations

from collections.abc import Sequence

from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.engine.offloading import Offloading
from simtune.engine.request import Request
from simtune.engine.tiers import Tier, TierStack, TierStore
from simtune.sim.agenda import LOADED, WAKE, Agenda
from simtune.specs.cache_tiers import CacheTier


class TierLink:
    """Link from a tier to the devices, which serves one fetch after the other; shared by all that read the tier."""

    __slots__ = ("_free", "_latency", "_token_ticks", "beside")

    def __init__(self, tier: CacheTier, token_bytes: float) -> None:
        self.beside = tier.fetched == "beside"
        """True if a step computes while it fetches, layer by layer; False if it computes afterwards."""
        assert tier.bytes_per_s is not None, "see `DeployedPool.tiers`"
        self._token_ticks = token_bytes / tier.bytes_per_s * TICKS_PER_SECOND
        self._latency = to_ticks(tier.latency_s)
        self._free = 0  # tick from which the link serves the next fetch

    def fetched(self, now: int, tokens: int) -> int:
        """Return the tick at which `tokens` tokens that are asked for now have come."""
        self._free = max(now, self._free) + round(tokens * self._token_ticks)
        return self._free + self._latency


class TierFetches:
    """Tiers of one engine core with their links."""

    def __init__(self, tiers: Sequence[Tier], links: Sequence[TierLink], one_by_one: bool, shares_writes: bool) -> None:
        self._tiers = [*zip(tiers, links, strict=True)]
        self.shares_writes = shares_writes
        """True if another core may look for what is written when a request leaves the scheduler: with asynchronous
        scheduling a step after its last, which no jump may pass over."""
        self.one_by_one = one_by_one
        """True if no step may be repeated: a jump evicts the blocks of all its steps at once, before or after another
        core looks for them."""

    def around(self, now: int, ticks: int) -> int:
        """Return the ticks of a step that computes for `ticks` and begins now, with what it fetches. Tiers are read at
        the same time."""
        before = beside = 0
        for tier, link in self._tiers:
            if tier.pending:
                waits = link.fetched(now, tier.pending) - now
                tier.pending = 0
                if link.beside:
                    beside = max(beside, waits)
                else:
                    before = max(before, waits)
        return max(before + ticks, beside)


class HostLoads:
    """Loads of requests that wait for their blocks ahead of admission, over the link from host memory."""

    def __init__(self, offloading: Offloading, link: TierLink) -> None:
        self._offloading, self._link = offloading, link
        self._under_way: list[tuple[int, Request]] = []  # with the ticks at which they end, in order

    def arrive(self, now: int) -> None:
        """Let the loads end that have come by now."""
        while self._under_way and self._under_way[0][0] <= now:
            request = self._under_way.pop(0)[1]
            # A request that was aborted, or lost with its instance, waits no more.
            if request in self._offloading.holding:
                self._offloading.arrive(request)

    def begin(self, now: int, agenda: Agenda, number: int) -> None:
        """Begin the loads that the scheduler has asked for since the last time; core `number` wakes when they end."""
        for request, tokens in self._offloading.started:
            end = self._link.fetched(now, tokens)
            self._under_way.append((end, request))
            agenda.post((end, WAKE, number, LOADED))
        self._offloading.started.clear()


class TierMaker:
    """Makes the tiers of a pool's engine cores: one store for each instance, or one for all that share it."""

    def __init__(
        self, tiers: Sequence[CacheTier], block_bytes: int, block_size: int, instances: int = 1, cores_each: int = 1
    ) -> None:
        self._tiers, self._token_bytes, self._block_size = tiers, block_bytes / block_size, block_size
        self._one_by_one = self._shares_evictions(instances, cores_each)
        computed = [tier for tier in tiers if tier.written == "computed"]
        self._shares_writes = any(cores_each > 1 or (instances > 1 and tier.shared) for tier in computed)
        self._made: dict[tuple[str, int | None], tuple[TierStore, TierLink]] = {}

    def of_instance(self, instance: int) -> tuple[TierStack, TierFetches]:
        """Return the tiers of a core of an instance, and their links."""
        tiers, links = [], []
        for spec in self._tiers:
            key = spec.name, None if spec.shared else instance
            if key not in self._made:
                self._made[key] = TierStore(self._capacity(spec)), TierLink(spec, self._token_bytes)
            store, link = self._made[key]
            tiers.append(Tier(spec.name, store, spec.written, spec.shared))
            links.append(link)
        return TierStack(tiers), TierFetches(tiers, links, self._one_by_one, self._shares_writes)

    @property
    def loads_ahead(self) -> bool:
        """True if requests wait for what they load, ahead of their admission."""
        return self._tiers[0].fetched == "ahead"

    def host_memory(self) -> tuple[Offloading, HostLoads]:
        """Return host memory of a core from which requests load ahead of their admission, and the link from there."""
        (spec,) = self._tiers
        capacity = self._capacity(spec)
        assert capacity is not None, "see `CacheTier`"
        offloading = Offloading(Tier(spec.name, TierStore(0)), capacity // self._block_size)
        return offloading, HostLoads(offloading, TierLink(spec, self._token_bytes))

    def _shares_evictions(self, instances: int, cores_each: int) -> bool:
        """True if what one core evicts from its device can reach a tier in which another core looks."""
        evicted = [tier for tier in self._tiers if tier.written == "evicted"]
        if self._tiers[0] not in evicted:
            return False
        return cores_each > 1 or (instances > 1 and any(tier.shared for tier in evicted))

    def _capacity(self, tier: CacheTier) -> int | None:
        """Return the tokens that a tier has room for, in whole KV blocks; None if it has no limit."""
        if tier.bytes is None:
            return None
        return int(tier.bytes / self._token_bytes) // self._block_size * self._block_size
