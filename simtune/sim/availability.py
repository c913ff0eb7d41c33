"""Availability of instances: they start, fail, recover, and leave to return in another role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from simtune.costs.protocol import StepCosts
from simtune.engine import Request
from simtune.results.outcome import RankTurn
from simtune.sim.agenda import CHANGE, DRAINED, Agenda
from simtune.sim.core import EngineCore, KvTransfer
from simtune.sim.dispatch import Dispatcher
from simtune.sim.handover import Handover, Routers
from simtune.sim.recorder import Recorder
from simtune.sim.stepping import DpGroup


class Regroup(NamedTuple):
    """Change of the ranks that an instance runs on, the costs of which its steps have from then on."""

    group: DpGroup
    ranks: int
    until: int
    """Tick at which the instance computes again."""
    costs: StepCosts


class Change(NamedTuple):
    """Change of some cores at a tick: `up` is True if they come, `lost` if they go with all their requests.

    Cores that go without being lost finish what they have; `then` are cores that replace them, `delay` ticks
    after that. `done` is called with the tick at which cores that come are up, cores that go are drained, or cores are
    about to be lost. If the cores are ranks of an instance that goes on, `regroup` states on what terms.
    """

    tick: int
    cores: Sequence[EngineCore]
    up: bool
    lost: bool = False
    then: Sequence[EngineCore] = ()
    delay: int = 0
    done: Callable[[int], None] | None = None
    regroup: Regroup | None = None


class Availability:
    """Availability of cores: which ones accept requests, and where the requests of those that leave go."""

    def __init__(
        self,
        agenda: Agenda,
        recorder: Recorder,
        routers: Routers,
        dispatcher: Dispatcher,
        handover: Handover,
        changes: Sequence[Change],
    ) -> None:
        self._agenda, self._recorder = agenda, recorder
        self._routers, self._dispatcher, self._handover = routers, dispatcher, handover
        self._changes: list[Change] = []
        self._draining: dict[int, tuple[EngineCore, Change]] = {}  # cores that finish what they have, by number
        for change in changes:
            self.announce(change)

    def change(self, now: int, number: int, version: int) -> None:
        """Apply the change with this number."""
        change = self._changes[number]
        for core in change.cores:
            # All cores of the change at once: a router asked in between must not choose one that goes too.
            core.up = change.up
        if change.up:
            if change.regroup is not None:
                change.regroup.group.resume(now)
            self._dispatcher.route_parked(now)
            self._handover.offer_unroutable(now)
            if change.done is not None:
                change.done(now)
        elif change.lost:
            if change.done is not None:
                change.done(now)
            self._fail(now, change)
        else:
            self._drain(now, change)

    def drained(self, now: int, number: int, version: int) -> None:
        """Let others replace an instance once all of its cores are drained; called when a draining core has nothing to
        run, or a KV cache that no decode core is there to take."""
        if number not in self._draining:
            return
        core, change = self._draining[number]
        if not self._decode_core_comes():
            self._drop_unroutable(now, core)
        # KV caches that are still being sent keep the core busy, though it runs no step.
        if core.has_work or core.holding:
            return
        del self._draining[number]
        core.draining = False
        if any(member.draining for member in change.cores):
            return
        if change.then:
            self.announce(Change(now + change.delay, change.then, up=True))
        if change.done is not None:
            change.done(now)

    def announce(self, change: Change) -> int:
        """Schedule a change at its tick, which is not in the past. Return its number."""
        number = len(self._changes)
        self._agenda.post((change.tick, CHANGE, number, 0))
        self._changes.append(change)
        return number

    def cancel(self, number: int) -> None:
        """Let a change that has not come yet change nothing."""
        self._changes[number] = Change(self._changes[number].tick, (), up=True)

    def _drain(self, now: int, change: Change) -> None:
        """Let cores finish what they run and send the requests that wait there elsewhere."""
        for core in change.cores:
            core.draining = True
            self._draining[core.number] = core, change
        for core in change.cores:
            self._handover.withdraw(now, core)
            withdrawn = core.scheduler.withdraw()
            core.count_waiting()
            for request in withdrawn:
                self._routers.over(now, request, core)
                self._dispatcher.resubmit(now, request)
            if core.step is None:
                self.drained(now, core.number, 0)
            elif self._handover.unroutable(core):
                self._agenda.post((now, DRAINED, core.number, 0))

    def _decode_core_comes(self) -> bool:
        """True if a change is scheduled that brings a decode core up; one that waits for a drain is not yet."""
        coming = (self._changes[number] for _, phase, number, _ in self._agenda.heap if phase == CHANGE)
        decoding = self._routers.back.cores
        return any(change.up and any(core in decoding for core in change.cores) for change in coming)

    def _drop_unroutable(self, now: int, core: EngineCore) -> None:
        """Send requests again whose KV caches no decode core is up to take: a prefill core that is to become one might
        wait for itself, or for another one that waits for it. An orchestrator stops such an instance at the end of its
        grace period, with the KV caches that it still holds."""
        dropped = self._handover.drop_unroutable(now, core)
        if not dropped:
            return
        core.notify(now)  # its blocks are free
        for request in dropped:
            self._recorder.resent[request.id] += 1
            self._dispatcher.resubmit(now, request)

    def _fail(self, now: int, change: Change) -> None:
        """Fail cores with all they have; their requests are sent again, those furthest along first."""
        cores = change.cores
        lost: list[Request] = []
        coming: list[KvTransfer] = []
        for core in cores:
            core.fail(now)
        if change.regroup is not None:
            change.regroup.group.regroup(now, until=change.regroup.until, costs=change.regroup.costs)
        for core in cores:
            going = self._handover.fail_source(now, core)
            coming_here = self._handover.fail_target(now, core)
            handled_elsewhere = {request.id for request in going} | {transfer.request.id for transfer in coming_here}
            lost += going
            coming += coming_here
            abandoned = core.scheduler.abandon()
            core.count_waiting()
            for request in abandoned:
                # The handover has informed the routers of its own requests already.
                if request.id not in handled_elsewhere:
                    self._routers.over(now, request, core)
                    lost.append(request)
        # Their KV caches are safe at the source, so they come before those that compute all again.
        for transfer in coming:
            self._handover.offer(now, transfer)
        for request in lost:
            self._recorder.resent[request.id] += 1
            self._dispatcher.resubmit(now, request)
        if change.regroup is not None:
            self._note_ranks(now, change.regroup, len(lost) + len(coming))
        for core in cores:
            if core.draining:
                self.drained(now, core.number, 0)

    def _note_ranks(self, now: int, regroup: Regroup, lost: int) -> None:
        """Record a change of ranks that `lost` requests were lost by."""
        place = regroup.group.cores[0]
        pause = regroup.until - now
        self._recorder.rank_turns.append(RankTurn(place.pool, place.instance, now, regroup.ranks, pause, lost))
