"""Ranks of an instance that come and go with its load (`min_ranks` in `simtune.specs.autoscaling`).

Each instance has a controller of its own. New ranks start beside those that serve; then all ranks pause while experts
are spread over them, and the new ones accept requests. Ranks that are too many, the last ones, accept no requests, send
those that wait elsewhere and finish what they run; then all ranks pause once more, and their GPUs are free at its
end, since they send their experts in it. What a pause does is stated in `simtune.sim.rank_changes`.

One change comes after another: while ranks come or go, the rule is read and nothing else changes. vLLM 0.24 answers 503
to all requests, further calls to scale among them, until a change is complete
(vllm/entrypoints/serve/elastic_ep/middleware.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from simtune.results.outcome import PoolInstances
from simtune.sim.autoscaler import InstanceCounts, Scaler
from simtune.sim.availability import Change, Regroup
from simtune.sim.core import EngineCore
from simtune.sim.rank_changes import RankTerms
from simtune.sim.role_controller import Cores
from simtune.sim.stepping import DpGroup
from simtune.specs.pool import Pool


def rank_scalers(pool: Pool, instances: Sequence[Cores], terms: Mapping[int, RankTerms]) -> list[Scaler]:
    """Return the controllers of a pool's instances, each given by its ranks, with the terms of every number of ranks.
    Ranks that an instance does not begin with are down."""
    assert pool.autoscaling is not None
    most, first = pool.parallelism.attention_dp, pool.autoscaling.first_ranks
    counts = InstanceCounts(instance * most + rank for instance in range(len(instances)) for rank in range(first))
    for ranks in instances:
        for core in ranks[first:]:
            core.up = False
        group = ranks[0].stepping
        assert isinstance(group, DpGroup)
        group.adopt(terms[first].costs)
    return [RankScaler(pool, ranks, terms, counts) for ranks in instances]


class RankScaler(Scaler):
    """Starts and drains the ranks of one instance. Serves one run."""

    def __init__(
        self, pool: Pool, ranks: Sequence[EngineCore], terms: Mapping[int, RankTerms], counts: InstanceCounts
    ) -> None:
        """Create the controller of the instance with these `ranks`; `counts` are those of all instances of the pool."""
        assert pool.autoscaling is not None
        assert pool.autoscaling.min_ranks is not None
        super().__init__(pool, counts, pool.autoscaling.min_ranks, len(ranks))
        self.instance = ranks[0].instance
        self._ranks, self._terms = ranks, terms
        self._present = self._accepting = self._grouped = pool.autoscaling.first_ranks
        """Numbers of ranks: that the instance is to have, that accept requests, that step together."""
        self._changing = False
        self._busy = [0] * len(ranks)  # ticks of each rank, as the number of ranks last changed
        self._busy_ticks = 0

    @property
    def num_present(self) -> int:
        """See `Scaler.num_present`."""
        return self._present

    @property
    def accepting(self) -> Sequence[Cores]:
        """See `Scaler.accepting`."""
        return [[core] for core in self._ranks[: self._accepting]]

    @property
    def settled(self) -> bool:
        """See `Scaler.settled`."""
        return not self._changing

    def summed(self, end: int, scalers: Sequence[Scaler]) -> PoolInstances:
        """See `Scaler.summed`."""
        busy_ticks = [scaler.busy_ticks for scaler in scalers if isinstance(scaler, RankScaler)]
        return self.counts.until(end, self.pool, len(self._ranks), busy_ticks)

    @property
    def busy_ticks(self) -> int:
        """Ticks in which the instance ran steps, as its busiest rank did, times the ranks that it had then."""
        return self._busy_ticks + self._grouped * self._longest([core.busy for core in self._ranks])

    def grow(self, now: int, number: int) -> None:
        """See `Scaler.grow`."""
        if self._changing:
            return
        joining = self._ranks[self._present : self._present + number]
        for core in joining:
            self.counts.starts.append(now)
            self.counts.change(now, held=1, place=self._place(core))
        self._changing, self._present = True, self._present + number
        self._regroup(now + self._startup, joining=joining)

    def shrink(self, now: int, number: int) -> None:
        """See `Scaler.shrink`."""
        if self._changing:
            return
        leaving = self._ranks[self._present - number : self._present][::-1]
        self._changing, self._present = True, self._present - number
        self._accepting = self._present
        # All that go are down before requests that wait at any of them are sent elsewhere.
        for core in leaving:
            core.up = False
            self.counts.drains.append(now)
        self.counts.change(now, accepting=-number)
        drained = partial(self._regroup, leaving=leaving)
        self._availability.announce(Change(now, leaving, up=False, done=drained))

    def _regroup(self, at: int, *, leaving: Sequence[EngineCore] = (), joining: Sequence[EngineCore] = ()) -> None:
        """Let the instance go on with other ranks, after a pause from tick `at` on."""
        group, terms = self._ranks[0].stepping, self._terms[self._present]
        assert isinstance(group, DpGroup)
        until = at + terms.pause
        regroup = Regroup(group, self._present, until, terms.costs)
        self._availability.announce(Change(at, leaving, up=False, lost=True, done=self._count_busy, regroup=regroup))
        complete = partial(self._complete, leaving)
        self._availability.announce(Change(until, joining, up=True, done=complete, regroup=regroup))

    def _count_busy(self, now: int) -> None:
        """Count the time in which the instance ran steps on the ranks that it has up to now."""
        busy = [core.busy + (0 if core.step is None else now - core.started) for core in self._ranks]
        self._busy_ticks += self._grouped * self._longest(busy)
        self._busy, self._grouped = busy, self._present

    def _longest(self, busy: Sequence[int]) -> int:
        return max(0, *(ticks - before for ticks, before in zip(busy, self._busy, strict=True)))

    def _complete(self, leaving: Sequence[EngineCore], now: int) -> None:
        for core in leaving:
            self.counts.change(now, held=-1, place=self._place(core))
        self.counts.change(now, accepting=self._present - self._accepting)
        self._accepting, self._changing = self._present, False

    def _place(self, core: EngineCore) -> int:
        return core.instance * len(self._ranks) + core.virtual_engine
