"""A controller that lets instances change between prefilling and decoding, as their queues ask for it.

It looks every so often, after the steps and transfers that end at an instant and before the requests that arrive. What
it counts, requests that wait or are under way, changes only with events that end a jump, so it is the same within a
jump as between the single steps of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simtune.engine import Request
from simtune.sim.agenda import LOOK, NEVER, Agenda
from simtune.sim.availability import Availability, Change
from simtune.sim.core import EngineCore
from simtune.sim.handover import Routers
from simtune.sim.router import Router
from simtune.specs.role_control import Pressure, Watched

Cores = Sequence[EngineCore]
"""Of one instance."""


class CountingRouter(Router):
    """Does what another router does, and counts the requests under way on each core by what it sent and heard of."""

    def __init__(self, router: Router) -> None:
        super().__init__(router.cores)
        self._router = router
        self.under_way = {core.number: 0 for core in router.cores}
        """By number of the core."""

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """The core that the other router chooses."""
        core = self._router.choose(request, now)
        if core is not None:
            self.under_way[core.number] += 1
        return core

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        """Tell the other router, too."""
        self.under_way[core.number] -= 1
        self._router.over(request, core, now)


@dataclass(frozen=True, slots=True)
class RoleCores:
    """The instances of one role, as a controller sees them."""

    pressure: Pressure
    instances: Sequence[Cores]
    """By what they run on: an instance at one place here and that at the same place of the other side are one, in two
    roles, of which at most one is up."""

    def up(self) -> list[int]:
        """Places of the instances that take requests."""
        return [at for at, cores in enumerate(self.instances) if cores[0].up]

    def load(self, router: CountingRouter) -> float:
        """Requests for each instance that is up."""
        up = self.up()
        return sum(self._of(at, router, self.pressure.watch) for at in up) / len(up)

    def least_busy(self, router: CountingRouter) -> int:
        """The place of the instance that has the fewest requests under way; of equals the last."""
        return min(reversed(self.up()), key=lambda at: self._of(at, router, "under_way"))

    def _of(self, place: int, router: CountingRouter, watch: Watched) -> int:
        cores = self.instances[place]
        if watch == "under_way":
            return sum(router.under_way[core.number] for core in cores)
        return sum(core.waiting + len(core.inbox.waiting) for core in cores)


class RoleController:
    """Looks at the queues of two pools and moves instances between them, one at a time. Serves one run."""

    def __init__(self, prefill: RoleCores, decode: RoleCores, *, every: int, patience: int, delay: int) -> None:
        """It looks every `every` ticks, and moves an instance after `patience` looks in a row that ask for it; `delay`
        ticks after it is drained it is up in its new role."""
        self._sides = prefill, decode
        self._every, self._patience, self._delay = every, patience, delay
        self._asked = [0, 0]  # looks in a row, by the side that asks
        self._coming: Cores = ()
        self.switches = 0
        """Instances that have begun to change their role."""

    def counted(self, routers: Routers) -> Routers:
        """The routers of the world it comes into, as it listens to them."""
        self._routers = CountingRouter(routers.front), CountingRouter(routers.back)
        return Routers(*self._routers)

    def begin(self, agenda: Agenda, availability: Availability) -> None:
        """Announce the first look."""
        self._agenda, self._availability = agenda, availability
        agenda.post((self._every, LOOK, 0, 0))

    def look(self, now: int, number: int, version: int) -> None:
        """Count, move an instance if that is asked for, and look again later, unless nothing else is to happen."""
        loads = [side.load(router) for side, router in zip(self._sides, self._routers, strict=True)]
        for taking in (0, 1):
            giving = 1 - taking
            wanted = loads[taking] >= self._sides[taking].pressure.high
            spared = loads[giving] <= self._sides[giving].pressure.low
            self._asked[taking] = self._asked[taking] + 1 if wanted and spared else 0
            if self._asked[taking] >= self._patience and self._may_move(self._sides[giving]):
                self._move(now, giving, taking)
        if self._agenda.heap[0] is not NEVER or self._agenda.held is not None:
            self._agenda.post((now + self._every, LOOK, 0, 0))

    def _may_move(self, giving: RoleCores) -> bool:
        on_its_way = any(not core.up for core in self._coming)
        return not on_its_way and len(giving.up()) > giving.pressure.least

    def _move(self, now: int, giving: int, taking: int) -> None:
        """Let the least busy instance of one side finish what it has and take the other role. Nobody is at its place on
        that side; what it had cached there before is gone."""
        place = self._sides[giving].least_busy(self._routers[giving])
        goes, self._coming = (self._sides[side].instances[place] for side in (giving, taking))
        for core in self._coming:
            core.scheduler.abandon()
        self._availability.announce(Change(now, goes, up=False, then=self._coming, delay=self._delay))
        self._asked = [0, 0]
        self.switches += 1
