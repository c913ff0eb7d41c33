"""How the cores of one instance share its GPUs: the stages of a pipeline, or steps taken together.

Only a core that is alone jumps: as soon as another one is about to schedule, its jump is cut. The virtual engines of a
pipeline fly beside one another instead.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from simtune.costs.protocol import GroupCosts
from simtune.sim.core import EngineCore, Stepping


class SharedStepping(Stepping):
    """Of cores that cannot all step as they like."""

    shared = True

    def __init__(self) -> None:
        self.cores: list[EngineCore] = []
        self._jumping: EngineCore | None = None

    def join(self, core: EngineCore) -> int:
        """Add a core to the instance; its number there."""
        self.cores.append(core)
        return len(self.cores) - 1


class Flight:
    """Repetitions of a core's step that go through the stages between those of other cores."""

    __slots__ = ("alone", "core", "ends", "started", "time")

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.started = core.started
        time = core.time
        self.time = time
        self.alone = time.ends
        """The ends of the repetitions if the core were alone, where they follow no rule."""
        self.ends: list[int] = []
        """Of those that were launched, the last perhaps under way: ticks after the first began."""

    def ticks_of(self, repetition: int) -> int:
        """What a repetition takes, numbered from 0, without waiting."""
        alone = self.alone
        if alone is None:
            return self.time.first + repetition * self.time.slope
        return alone[repetition] - (alone[repetition - 1] if repetition else 0)


Launch = tuple[int, int, list[int], Flight]
"""A step sent through the stages: when, the number of its core, when each stage was free before, and the flight."""


class Pipeline(SharedStepping):
    """Virtual engines that share the stages of an instance: a stage works for one of them at a time.

    A step of D ticks takes D / stages in each (the first ones a tick longer where that leaves a rest); it enters a
    stage when it has left the one before and the stage is free.

    A core that is alone jumps. Cores that decode beside one another fly: the steps of all of them are launched in
    order of time, without their schedulers, up to the end of the first that has no repetition left; only that is an
    event. What changes a core before cuts its flight, and launches from then on are taken back and made anew.
    """

    def __init__(self, stages: int) -> None:
        super().__init__()
        self._free = [0] * stages  # the tick from which on each stage is free
        self._next: list[tuple[int, int, Flight]] = []  # a heap of (end of the step under way, number of the core)
        self._launches: list[Launch] = []  # those that could still be taken back
        self._posted: EngineCore | None = None  # whose end is announced

    def may_jump(self, core: EngineCore) -> bool:
        """Whether no other core needs the stages, or cores may fly."""
        return not self.stepwise or self._alone(core)

    def _alone(self, core: EngineCore) -> bool:
        return all(other is core or (other.step is None and not other.woken) for other in self.cores)

    def start(self, now: int, core: EngineCore) -> None:
        """Send the core's next step through the stages, or let it jump or fly."""
        self._forget_ended(now)
        self._take_back(now, core.number)
        time = core.time
        time.ends = None  # those of an earlier flight
        if core.plan(now):
            if time.repetitions > 1 and self._alone(core):
                self._pass_through(now, time.first)
                self._jumping = core
                core.launch(now + time.total)
                return
            if self._jumping is core:
                self._jumping = None
            flight = Flight(core)
            self._launches.append((now, core.number, self._free, flight))
            end = self._pass_through(now, flight.ticks_of(0))
            flight.ends.append(end - now)
            heappush(self._next, (end, core.number, flight))
            if time.repetitions == 1:
                time.take(flight.ends[0])  # what it waited for the others included
            else:
                time.ends = flight.ends
        self._fly()

    def wakes(self, now: int, core: EngineCore) -> None:
        """Another core needs the pipeline too: from its next step on the one that jumps is not alone."""
        jumping = self._jumping
        if jumping is None or jumping is core or jumping.step is None:
            return
        jumping.shorten(jumping.time.reaching(now - jumping.started)[0])
        self._jumping = None
        before = jumping.time.elapsed(jumping.time.repetitions - 1)
        self._free = [0] * len(self._free)
        self._pass_through(jumping.started + before, jumping.time.total - before)

    def cut(self, now: int, core: EngineCore, repetitions: int) -> None:
        """Let a jump or a flight end after so many repetitions, the last under way; the others go on from there."""
        time = core.time
        if core is self._jumping or time.ends is None:
            core.shorten(repetitions)
            return
        if repetitions < time.repetitions:
            time.repetitions = repetitions
            self._forget_ended(now)
            self._take_back(core.started + time.ends[repetitions - 1], core.number)
            self._fly()

    def reset(self) -> None:
        """Nothing is in the stages any more."""
        self._free = [0] * len(self._free)
        self._next.clear()
        self._launches.clear()
        self._jumping = self._posted = None

    def _forget_ended(self, now: int) -> None:
        """The flight that was announced may be over, and earlier launches cannot be taken back any more."""
        while self._next and self._next[0][2].core.step is None:
            heappop(self._next)
            self._posted = None
        if self._launches and self._launches[-1][0] < now:
            self._launches.clear()

    def _fly(self) -> None:
        """Launch repetitions in order of time up to the first core that has none left, and announce its end.

        `_pass_through` is inlined for speed.
        """
        upcoming, launches = self._next, self._launches
        if not upcoming:
            return
        free, stages = self._free, len(self._free)
        while True:
            now, number, flight = upcoming[0]
            ends, time = flight.ends, flight.time
            done = len(ends)
            if done >= time.repetitions:
                break
            launches.append((now, number, free, flight))
            ticks = time.first + done * time.slope if flight.alone is None else flight.ticks_of(done)
            share, rest = divmod(ticks, stages)
            end, left = now, []
            for until in free:
                if until > end:
                    end = until
                end += share
                if rest:
                    end += 1
                    rest -= 1
                left.append(end)
            free = left
            ends.append(end - flight.started)
            heapreplace(upcoming, (end, number, flight))
        self._free = free
        if self._posted is not None:
            self._posted.version += 1
        self._posted = flight.core
        flight.core.launch(now, held=False)  # perhaps while another core runs ahead, which looks at no held event

    def _take_back(self, tick: int, number: int) -> None:
        """Undo launches from a tick on, at that tick those of cores from a number on; never the first of a flight."""
        launches = self._launches
        if not launches or launches[-1][:2] < (tick, number):
            return
        while launches and launches[-1][:2] >= (tick, number) and len(launches[-1][3].ends) > 1:
            _, _, self._free, flight = launches.pop()
            flight.ends.pop()
        self._next = [(f.started + f.ends[-1], n, f) for _, n, f in self._next]
        heapify(self._next)

    def _pass_through(self, now: int, ticks: int) -> int:
        """Send a step of `ticks` through; the tick at which it leaves the last stage."""
        share, rest = divmod(ticks, len(self._free))
        left = []
        for free in self._free:
            if free > now:
                now = free
            now += share
            if rest:
                now += 1
                rest -= 1
            left.append(now)
        self._free = left
        return now


class DpGroup(SharedStepping):
    """Data-parallel attention over experts that all share: cores step together, each step as long as the longest.

    Experts compute the tokens that all cores have in a step, where the costs know what that changes (`GroupCosts`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._costs: list[GroupCosts | None] = []

    def join(self, core: EngineCore) -> int:
        """Add a core to the instance; its number there."""
        self._costs.append(core.costs if isinstance(core.costs, GroupCosts) else None)
        return super().join(core)

    def start(self, now: int, core: EngineCore) -> None:
        """Start all cores, unless a step of theirs is under way."""
        if any(member.step is not None for member in self.cores):
            return
        planned = [member for member in self.cores if member.plan(now)]
        everybodys = sum(_tokens(member) for member in planned)
        for member in planned:
            self._share_experts(member, everybodys)
        if len(planned) > 1:
            longest = max(member.time.first for member in planned)
            for member in planned:
                member.time.take(longest)
        self._jumping = planned[0] if len(planned) == 1 else None
        for member in planned:
            member.launch(now + member.time.total)

    def wakes(self, now: int, core: EngineCore) -> None:
        """The core that jumps is to wait for this one from its next step on."""
        if self._jumping is not None and self._jumping.step is not None:
            time = self._jumping.time
            self._jumping.shorten(time.reaching(now - self._jumping.started)[0])

    def _share_experts(self, core: EngineCore, everybodys: int) -> None:
        """Correct the planned step of a core for the tokens that all of them have in theirs."""
        step, time, costs = core.step, core.time, self._costs[core.virtual_engine]
        if costs is None or step is None or step.part != (0, 1):
            return
        shape = (_tokens(core), step.num_decodes + len(step.chunks), everybodys, bool(step.chunks))
        first, second = (costs.together(ticks, *shape) for ticks in (time.first, time.first + time.slope))
        if second - first != time.slope:  # the first step waits for the host, and later ones will not
            time.repetitions = 1
        time.first = first


def _tokens(core: EngineCore) -> int:
    """Tokens of the planned step."""
    step = core.step
    return 0 if step is None else step.verify_tokens + sum(chunk.tokens for chunk in step.chunks)
