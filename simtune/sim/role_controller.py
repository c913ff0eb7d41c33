"""Controller that moves instances between prefill and decode according to their queues.

It looks at fixed intervals, after the steps and transfers that end at an instant and before the requests that arrive.
The requests that it counts, waiting or in flight, change only with events that end a jump, so the count is the same
within a jump as between the jump's single steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from simtune.engine import Request
from simtune.results.outcome import Outcome
from simtune.sim.agenda import LOOK, NEVER, Agenda
from simtune.sim.availability import Availability, Change
from simtune.sim.core import EngineCore
from simtune.sim.handover import Routers
from simtune.sim.router import Router
from simtune.specs.role_control import Pressure, WatchedQueue

Cores = Sequence[EngineCore]
"""Cores of one instance."""


class Controller(Protocol):
    """Decides at intervals which instances accept requests. Serves one run."""

    def counted(self, routers: Routers) -> Routers:
        """Return the routers of the world, wrapped so that the controller can count requests."""

    def begin(self, agenda: Agenda, availability: Availability) -> None:
        """Schedule the first look."""

    def look(self, now: int, number: int, version: int) -> None:
        """Read the loads, change which instances accept requests, and schedule the next look."""

    def close(self, outcome: Outcome, end: int) -> None:
        """Write the counts of a run that ended at tick `end` into its outcome."""


class CountingRouter(Router):
    """Router that delegates to another one and counts the requests in flight on each core."""

    def __init__(self, router: Router) -> None:
        super().__init__(router.cores)
        self._router = router
        self.under_way = {core.number: 0 for core in router.cores}
        """Requests in flight, by number of the core."""

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """Return the core that the other router chooses."""
        core = self._router.choose(request, now)
        if core is not None:
            self.under_way[core.number] += 1
        return core

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        """Count the request as over, and inform the other router."""
        self.under_way[core.number] -= 1
        self._router.over(request, core, now)


@dataclass(frozen=True, slots=True)
class RoleCores:
    """Instances of one role, as seen by the controller."""

    pressure: Pressure
    instances: Sequence[Cores]
    """Cores of each place: the instances at the same place of both roles are one machine, of which at most one role is
    up."""

    def up(self) -> list[int]:
        """Return the places of the instances that accept requests."""
        return [at for at, cores in enumerate(self.instances) if cores[0].up]

    def load(self, router: CountingRouter) -> float:
        """Return the requests per instance that is up."""
        up = self.up()
        return sum(self._of(at, router, self.pressure.watch) for at in up) / len(up)

    def least_busy(self, router: CountingRouter) -> int:
        """Return the place of the instance with the fewest requests in flight; the last one among equals."""
        return min(reversed(self.up()), key=lambda at: self._of(at, router, "under_way"))

    def _of(self, place: int, router: CountingRouter, watch: WatchedQueue) -> int:
        cores = self.instances[place]
        if watch == "under_way":
            return sum(router.under_way[core.number] for core in cores)
        return sum(core.waiting + len(core.inbox.waiting) for core in cores)


class RoleController:
    """Watches the queues of two pools and moves instances between them, one at a time. Serves one run."""

    def __init__(self, prefill: RoleCores, decode: RoleCores, *, every: int, patience: int, delay: int) -> None:
        """Create a controller that looks every `every` ticks and moves an instance after `patience` looks in a row that
        call for it; `delay` ticks after the instance is drained it is up in its new role."""
        self._sides = prefill, decode
        self._every, self._patience, self._delay = every, patience, delay
        self._asked = [0, 0]  # looks in a row, by the side that asks
        self._coming: Cores = ()
        self.switches = 0
        """Instances that have begun to change their role."""

    def counted(self, routers: Routers) -> Routers:
        """Return the routers of the world, wrapped so that the controller can count requests."""
        self._routers = CountingRouter(routers.front), CountingRouter(routers.back)
        return Routers(*self._routers)

    def begin(self, agenda: Agenda, availability: Availability) -> None:
        """Schedule the first look."""
        self._agenda, self._availability = agenda, availability
        agenda.post((self._every, LOOK, 0, 0))

    def look(self, now: int, number: int, version: int) -> None:
        """Count requests, move an instance if the pressures call for it, and schedule the next look unless nothing else
        is to happen."""
        loads = [side.load(router) for side, router in zip(self._sides, self._routers, strict=True)]
        for taking in (0, 1):
            giving = 1 - taking
            pressed = loads[taking] >= self._sides[taking].pressure.high
            spared = loads[giving] <= self._sides[giving].pressure.low
            self._asked[taking] = self._asked[taking] + 1 if pressed and spared else 0
            if self._asked[taking] >= self._patience and self._may_move(self._sides[giving]):
                self._move(now, giving, taking)
        if self._agenda.heap[0] is not NEVER or self._agenda.held is not None:
            self._agenda.post((now + self._every, LOOK, 0, 0))

    def close(self, outcome: Outcome, end: int) -> None:
        """Write the number of switches into the outcome of the run."""
        outcome.role_switches = self.switches

    def _may_move(self, giving: RoleCores) -> bool:
        on_its_way = any(not core.up for core in self._coming)
        return not on_its_way and len(giving.up()) > giving.pressure.least

    def _move(self, now: int, giving: int, taking: int) -> None:
        """Drain the least busy instance of one side and let it take the other role. Its caches on that side were lost
        when it left."""
        place = self._sides[giving].least_busy(self._routers[giving])
        goes, self._coming = (self._sides[side].instances[place] for side in (giving, taking))
        # The place has been down, so what it had cached before is gone.
        for core in self._coming:
            core.scheduler.abandon()
        self._availability.announce(Change(now, goes, up=False, then=self._coming, delay=self._delay))
        self._asked = [0, 0]
        self.switches += 1
