"""Sharing of an instance's GPUs among its cores: the stages of a pipeline, or steps taken together.

Only a core that is alone jumps: as soon as another one is about to schedule, its jump is cut. The virtual engines of a
pipeline fly beside one another instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import Protocol

from simtune.costs.protocol import GroupCosts, StepCosts
from simtune.engine import Step
from simtune.engine.prompt_balance import PromptBalance
from simtune.sim.agenda import STEP_END
from simtune.sim.core import Deliver, EngineCore, Stepping
from simtune.sim.following import follow, may_be_followed, sleep
from simtune.sim.lost_steps import begin_anew, ends_between_steps
from simtune.sim.step_timing import timer_for


class SharedStepping(Stepping):
    """Stepping of cores that share GPUs, so that a core cannot always step when it likes."""

    shared = True

    def __init__(self) -> None:
        self.cores: list[EngineCore] = []
        self._jumping: EngineCore | None = None

    def join(self, core: EngineCore) -> int:
        """Add a core to the instance and return the core's number within it."""
        self.cores.append(core)
        return len(self.cores) - 1


class Flight:
    """A core's step and its repetitions as they pass through the stages, interleaved with those of other cores."""

    __slots__ = ("alone", "core", "ends", "last", "started", "time")

    def __init__(self, core: EngineCore) -> None:
        self.core, self.time = core, core.time
        self.alone: Sequence[int] | None = None
        """Ends of the repetitions if the core were alone; None if they follow `time.first` and `time.slope`."""
        self.started = 0
        self.last = True
        """True if nothing is left to launch: the last repetition is running, or all of them run as a jump."""
        self.ends: list[int] = []
        """Ends of the launched repetitions, the last of which may be running, in ticks after the first began."""

    def begin(self, now: int, end: int) -> list[int]:
        """Launch the core's first repetition, which ends at tick `end`; return the list of ends relative to `now`."""
        self.started, self.alone, self.last = now, self.time.ends, False
        self.ends = [end - now]
        return self.ends


class Watch(Protocol):
    """Watch over what the cores of a pipeline share beside the stages."""

    def look(self, now: int, core: EngineCore) -> None:
        """Called after a core has scheduled, or ended a step."""

    def reset(self) -> None:
        """Called when the instance has failed."""


class Pipeline(SharedStepping):
    """Virtual engines that share the stages of an instance: a stage works for one of them at a time.

    A step of D ticks takes D / stages in each (the first ones a tick longer if that leaves a remainder); it enters a
    stage when it has left the one before and the stage is free.

    A core that is alone jumps. Cores that decode beside one another fly: while nothing else happens, their steps are
    launched in order of time, without agenda and schedulers. So nothing is ever launched after an event that could
    change it; what an event changes is how many repetitions are left.

    With `chunks_follow` a core schedules again as soon as a step leaves the first stage, if nothing of what the step
    computes is needed before: it has chunks that end no prompt, and no decodes. So n such steps of D ticks take
    (n + stages - 1) D / stages. If it has decodes too, some policies let the prompts go on alone (`FollowingScheduler`)
    until it has left the last stage.
    """

    def __init__(self, stages: int, *, chunks_follow: bool = False) -> None:
        super().__init__()
        self._chunks_follow = chunks_follow
        self._free = [0] * stages  # the tick from which on each stage is free
        self._flights: list[Flight] = []  # by core
        self._next: list[tuple[int, int, Flight]] = []  # a heap of (end of the step or jump under way, number of core)
        self._announced: EngineCore | None = None  # whose end the agenda knows: the first of these
        self._landing: list[int] = []  # by core: the tick until which decodes of an earlier step are in the stages
        self.watch: Watch | None = None
        """Watch over what the cores share beside the stages; None if that is nothing."""

    def join(self, core: EngineCore) -> int:
        """Add a core to the instance and return the core's number within it."""
        self._flights.append(Flight(core))
        self._landing.append(0)
        return super().join(core)

    def may_jump(self, core: EngineCore) -> bool:
        """True if no other core needs the stages, or if cores may fly."""
        # Timelines show every step in its stage, which jumps and flights do not keep.
        return not self.stepwise or self._alone(core)

    def _alone(self, core: EngineCore) -> bool:
        return all(member is core or (member.step is None and not member.woken) for member in self.cores)

    def start(self, now: int, core: EngineCore) -> None:
        """Send the core's next step through the stages, or let the core jump or fly."""
        end = self._send(now, core)
        if end is None:
            return
        if self.stepwise:
            core.launch(end)
        else:
            heappush(self._next, (end, core.number, self._flights[core.virtual_engine]))
            self._announce()

    def end(self, now: int, core: EngineCore, deliver: Deliver) -> None:
        """End the core's step, then those of all cores in order of time, as long as nothing else happens before."""
        if self.stepwise:
            self._conclude(now, core, deliver)
            if self._agenda.has_more_at(now):
                core.wake(now)
            else:
                self.start(now, core)
            return
        agenda, upcoming = self._agenda, self._next
        heap = agenda.heap
        # From here on this instance's end is not held back in the agenda, so the heap alone shows what comes first.
        agenda.hold(None)
        self._announced = None
        agenda.handled -= 1
        while upcoming:
            if not upcoming[0][2].last:
                self._fly(heap[0][0])
            now, number, flight = upcoming[0]
            core = flight.core
            event = now, STEP_END, number, core.version
            # Another event comes first, or the run was stopped: return the end to the agenda.
            if heap[0] < event:
                agenda.held, self._announced = event, core
                break
            agenda.handled += 1
            heappop(upcoming)
            # Something else happens at this instant and may change what follows, so only the launched repetitions
            # count.
            if not flight.last:
                core.time.repetitions, flight.last = len(flight.ends), True
            self._conclude(now, core, deliver)
            if heap[0][0] == now or (upcoming and upcoming[0][0] == now):
                core.wake(now)
            elif (end := self._send(now, core)) is not None:
                heappush(upcoming, (end, number, flight))

    def wakes(self, now: int, core: EngineCore) -> None:
        """Cut the jump of the core that is jumping: from its next step on another core needs the pipeline too."""
        jumping = self._jumping
        if jumping is None or jumping is core or jumping.step is None:
            return
        self._shorten(jumping, jumping.time.reaching(now - jumping.started)[0])
        self._jumping = None
        before = jumping.time.elapsed(jumping.time.repetitions - 1)
        # A jump does not keep the stages' times, so those of its last step are computed anew.
        self._free = [0] * len(self._free)
        self._pass_through(jumping.started + before, jumping.time.total - before)

    def cut(self, now: int, core: EngineCore, repetitions: int) -> None:
        """Let a jump or a flight end after `repetitions` repetitions, the last of which is running; other cores go on
        from there."""
        time = core.time
        if core is self._jumping:
            self._shorten(core, repetitions)
        elif repetitions < time.repetitions:
            time.repetitions = repetitions
            self._flights[core.virtual_engine].last = True

    def reset(self) -> None:
        """Empty the stages."""
        self._free = [0] * len(self._free)
        self._landing = [0] * len(self._landing)
        self._next.clear()
        if self.watch is not None:
            self.watch.reset()
        for flight in self._flights:
            flight.last = True
        self._jumping = self._announced = None

    def _send(self, now: int, core: EngineCore) -> int | None:
        """Send the next step of a core that runs nothing through the stages; return the tick of its end, None if there
        is no step."""
        time = core.time
        # The list belongs to an earlier flight.
        time.ends = None
        if now < self._landing[core.virtual_engine]:
            if not follow(core, now):
                sleep(core, self._landing[core.virtual_engine])
                return None
        elif not (core.plan(now) if self.watch is None else self._plan_watched(now, core, self.watch)):
            return None
        end = self._pass_through(now, time.first)
        if self._chunks_follow and core.step is not None and self._goes_on(core, core.step, end):
            end = self._free[0]
        if time.repetitions > 1 and not self._next and self._alone(core):
            self._jumping = core
            return now + time.total
        if self._jumping is core:
            self._jumping = None
        if time.repetitions == 1:
            # The step's time includes its waits for the steps of other cores.
            time.first, time.slope, time.ends = end - now, 0, None
        else:
            time.ends = self._flights[core.virtual_engine].begin(now, end)
        return end

    def _plan_watched(self, now: int, core: EngineCore, watch: Watch) -> bool:
        """Let a core schedule whose slots are watched; return False if it has no step."""
        has_step = core.plan(now)
        # The jump is over: a core that wakes now finds the stages as the jump has left them.
        if self._jumping is core:
            self._jumping = None
        watch.look(now, core)
        return has_step

    def _goes_on(self, core: EngineCore, step: Step, end: int) -> bool:
        """True if the core schedules again when the step, which ends at `end`, leaves the first stage."""
        if not step.num_decodes:
            return step.is_followed
        if not step.chunks or not may_be_followed(core, step):
            return False
        self._landing[core.virtual_engine] = end
        return True

    def _conclude(self, now: int, core: EngineCore, deliver: Deliver) -> None:
        """Complete the core's step; tokens of decodes in one that leaves the first stage come when it leaves the
        last."""
        landing, step = self._landing[core.virtual_engine], core.step
        lands_later = now < landing and step is not None and step.num_decodes > 0
        if lands_later:
            core.time.first = landing - core.started
        core.conclude(now, deliver)
        if self.watch is not None:
            self.watch.look(now, core)
        if lands_later:
            core.gaps.wait(landing)

    def _fly(self, horizon: int) -> None:
        """Launch repetitions in order of time, as long as they begin before the horizon and every core has one left.

        `_pass_through` is inlined for speed.
        """
        upcoming, free, stages = self._next, self._free, len(self._free)
        for end, _, flight in upcoming:
            if flight.last and end < horizon:
                horizon = end
        now, number, flight = upcoming[0]
        while now < horizon:
            ends, time, alone = flight.ends, flight.time, flight.alone
            repetition = len(ends)
            ticks = time.first + repetition * time.slope if alone is None else alone[repetition] - alone[repetition - 1]
            share, extra = divmod(ticks, stages)
            end, departures = now, []
            for until in free:
                if until > end:
                    end = until
                end += share
                if extra:
                    end += 1
                    extra -= 1
                departures.append(end)
            free = departures
            ends.append(end - flight.started)
            heapreplace(upcoming, (end, number, flight))
            if repetition + 1 == time.repetitions:
                flight.last = True
                if end < horizon:
                    horizon = end
            now, number, flight = upcoming[0]
        self._free = free

    def _announce(self) -> None:
        """Announce the first end to the agenda, and no other."""
        end, _, flight = self._next[0]
        if self._announced is not flight.core:
            # Voids the end announced before: the agenda knows one end of the instance, the first.
            if self._announced is not None:
                self._announced.version += 1
            self._announced = flight.core
            flight.core.launch(end)

    def _shorten(self, core: EngineCore, repetitions: int) -> None:
        """Let the jump of the only core that runs end after `repetitions` repetitions."""
        core.shorten(repetitions)
        if self._next:
            self._next[0] = core.started + core.time.total, core.number, self._flights[core.virtual_engine]

    def _pass_through(self, now: int, ticks: int) -> int:
        """Send a step of `ticks` ticks through the stages; return the tick at which it leaves the last one."""
        share, extra = divmod(ticks, len(self._free))
        departures = []
        for until in self._free:
            if until > now:
                now = until
            now += share
            if extra:
                now += 1
                extra -= 1
            departures.append(now)
        self._free = departures
        return now


class DpGroup(SharedStepping):
    """Data-parallel attention over experts that all share: cores step together, each step as long as the longest.

    Experts compute the tokens of all cores in a step, if the costs model the effect of that (`GroupCosts`).

    A core that decodes beside others flies: its step repeats from one step of the group to the next, without scheduler,
    until its last repetition or an event that its scheduler would notice. No core flies if every step is recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._costs: list[GroupCosts | None] = []
        self._under_way = 0  # how many cores run a step
        self._single = False
        """True while cores plan steps that several of them are likely to run: each then lasts one repetition."""
        self._flying: list[GroupFlight] = []
        """Cores whose steps are under way together, in order of cores; empty if a core jumps or each runs one step."""
        self._landing: list[EngineCore] = []
        """Cores whose flights are over and that are still to be concluded at this instant, in order of cores."""
        self._landed: EngineCore | None = None
        """The last of those that landed together; None if all fly on."""
        self._deliver: Deliver | None = None
        self._balanced: list[PromptBalance] = []
        self._until = 0  # end of the latest pause for a change of ranks

    def join(self, core: EngineCore) -> int:
        """Add a core to the instance and return the core's number within it."""
        if (balance := core.scheduler.prompt_balance) is not None:
            balance.in_group = True
            self._balanced += [balance] * balance.enabled
        self._costs.append(core.costs if isinstance(core.costs, GroupCosts) else None)
        return super().join(core)

    def may_jump(self, core: EngineCore) -> bool:
        """True if no other core is likely to run a step, or if cores may fly."""
        return not self._single and super().may_jump(core)

    def start(self, now: int, core: EngineCore) -> None:
        """Start all cores, unless a step of the group is running."""
        if not self._under_way and (end := self._begin(now)) is not None:
            self._flying[0].core.launch(end)

    def end(self, now: int, core: EngineCore, deliver: Deliver) -> None:
        """End the step of a core; with the last one begin the next steps, after all other events of this instant."""
        if self._flying:
            self._deliver = deliver
            self._land(now, deliver)
            return
        core.conclude(now, deliver)
        self._under_way -= 1
        if self._under_way:
            return
        if self._agenda.has_more_at(now):
            core.wake(now)
        else:
            self.start(now, core)

    def cut(self, now: int, core: EngineCore, repetitions: int) -> None:
        """Let a jump or a flight end after `repetitions` repetitions."""
        if not self._flying:
            core.shorten(repetitions)
        elif repetitions < core.time.repetitions:
            core.time.repetitions = repetitions

    def reset(self) -> None:
        """Mark all cores as running no step."""
        self._under_way = 0
        self._flying, self._landing = [], []
        for balance in self._balanced[:1]:
            balance.restart()

    def regroup(self, now: int, *, until: int, costs: StepCosts) -> None:
        """Lose the step that is under way, and compute it again from tick `until` on, at the costs of the ranks that
        are there then, as `simtune.sim.rank_changes` states. Nothing else begins before."""
        # A rank found to be drained is found so when the others have begun their next repetition, at this instant.
        begun = {flight.core for flight in self._flying if flight.ends and flight.core.started + flight.ends[-1] > now}
        self.reset()
        self._jumping, self._until = None, max(until, self._until)
        stepping = [core for core in self.cores if core.step is not None]
        running = [core for core in stepping if core in begun or not ends_between_steps(core, now)]
        self.adopt(costs)
        # Without a step to compute again, it seems to run one until `resume`.
        self._under_way = len(running) or 1
        lost = [begin_anew(core, now) for core in running]
        everybodys = sum(_tokens(step) for step, _ in lost)
        for core, (step, _) in zip(running, lost, strict=True):
            self._share_experts(core, step, everybodys)
        longest = max((core.time.first for core in running), default=0)
        for core, (_, ends) in zip(running, lost, strict=True):
            core.time.ends = [*ends, self._until + longest - core.started]
            core.time.repetitions = len(core.time.ends)
            core.version += 1
            # Nothing is computed in the pause.
            core.busy -= self._until - now
            core.launch(self._until + longest)

    def adopt(self, costs: StepCosts) -> None:
        """Give all cores the costs of another number of ranks."""
        for number, core in enumerate(self.cores):
            core.costs, core.timer = costs, timer_for(costs, core.scheduler.drafting)
            self._costs[number] = costs if isinstance(costs, GroupCosts) else None

    def resume(self, now: int) -> None:
        """Let cores step again at the end of a pause, if there was no step to compute again."""
        if now >= self._until and all(core.step is None for core in self.cores):
            self._under_way = 0
            self.cores[0].wake(now)

    def wakes(self, now: int, core: EngineCore) -> None:
        """Cut the jump of the core that is jumping: from its next step on it waits for this one."""
        if self._jumping is not None and self._jumping.step is not None:
            time = self._jumping.time
            self._jumping.shorten(time.reaching(now - self._jumping.started)[0])

    def _begin(self, now: int) -> int | None:
        """Let all cores begin a step, or another repetition; return the tick of its end if they fly, else None."""
        flying = self._still_flying(now)
        if self._balanced:
            self._balanced[0].decide(self._balanced)
        # Recorded jumps are cut to one repetition beside other cores, so that repetitions need not be timed.
        self._single = self.stepwise and sum(member.scheduler.num_running > 0 for member in self.cores) > 1
        planned = self._planned(now)
        if len(flying) == 1 and not planned:
            # It jumps from here on.
            self._conclude(now, flying.pop())
            planned = self._planned(now)
        if self.stepwise or len(planned) + len(flying) < 2:
            self._run_alone(now, planned)
            return None
        self._jumping = None
        if planned:
            flying += [GroupFlight(member, self._costs[member.virtual_engine]) for member in planned]
            flying.sort(key=lambda flight: flight.core.number)
        return self._fly(now, flying)

    def _planned(self, now: int) -> list[EngineCore]:
        """Let all cores plan that run nothing, and return those that have a step. All plan before any is timed: a step
        with experts depends on the tokens of all groups."""
        return [member for member in self.cores if member.step is None and _plan(now, member)]

    def _fly(self, now: int, flying: list[GroupFlight]) -> int:
        """Let cores run a repetition together; return the tick of its end."""
        self._flying, self._under_way = flying, len(flying)
        everybodys = sum(flight.tokens for flight in flying)
        end = now + max(flight.ticks(everybodys) for flight in flying)
        for flight in flying:
            flight.repeat(end)
        return end

    def _still_flying(self, now: int) -> list[GroupFlight]:
        """Return the flights that go on after a step of the group; end those that an event of this instant has cut."""
        flying, self._flying = self._flying, []
        for flight in flying:
            if flight.is_over and flight.core.step is not None:
                self._conclude(now, flight)
        return [flight for flight in flying if not flight.is_over]

    def _conclude(self, now: int, flight: GroupFlight) -> None:
        """Let a flight end with the repetition that has just ended."""
        flight.core.time.repetitions = len(flight.ends)
        assert self._deliver is not None
        flight.core.conclude(now, self._deliver)

    def _land(self, now: int, deliver: Deliver) -> None:
        """End a step of the group, and further ones as long as nothing else happens before."""
        agenda = self._agenda
        heap = agenda.heap
        # From here on nothing is held back in the agenda, so the heap alone shows what comes first.
        agenda.hold(None)
        while True:
            if not self._landing:
                self._landing = [flight.core for flight in self._flying if flight.is_over]
                self._landed = self._landing[-1] if self._landing else None
            if not self._conclude_in_turn(now, deliver):
                return
            # As many events as if each core had one.
            agenda.handled += self._under_way - 1
            self._under_way = 0
            if heap[0][0] == now:
                # A core that flies on cannot be woken.
                self._wake(now)
                return
            end = self._begin(now)
            if end is None:
                return
            lead = self._flying[0].core
            if heap[0] < (end, STEP_END, lead.number, lead.version):
                lead.launch(end)
                return
            agenda.handled += 1
            now = end

    def _conclude_in_turn(self, now: int, deliver: Deliver) -> bool:
        """End the steps of the landing cores in order; False if an event that comes before one of them, such as the end
        of a core of another instance, is to be handled first: then the agenda goes on with that core."""
        landing, heap = self._landing, self._agenda.heap
        while landing:
            core = landing[0]
            end = now, STEP_END, core.number, core.version
            if heap[0] < end:
                self._agenda.post(end)
                self._agenda.handled -= 1
                return False
            del landing[0]
            core.conclude(now, deliver)
        return True

    def _wake(self, now: int) -> None:
        """Let the group begin its next step after all other events of this instant."""
        core = self._landed
        if core is None:
            core = self._flying[0].core
            self._conclude(now, self._flying[0])
        core.wake(now)

    def _run_alone(self, now: int, planned: list[EngineCore]) -> None:
        """Let a core jump, or several run one step each."""
        if self._single and len(planned) == 1:
            self._single = False
            _retime(planned[0])
        steps = [member.step for member in planned if member.step is not None]
        everybodys = sum(map(_tokens, steps))
        for member, step in zip(planned, steps, strict=True):
            self._share_experts(member, step, everybodys)
        if len(planned) > 1:
            longest = max(member.time.first for member in planned)
            for member in planned:
                member.time.take(longest)
        # Beside others every step is as long as the longest, which may differ from step to step.
        self._jumping = planned[0] if len(planned) == 1 else None
        self._under_way = len(planned)
        for member in planned:
            member.launch(now + member.time.total)

    def _share_experts(self, core: EngineCore, step: Step, everybodys: int) -> None:
        """Correct the time of a core's next step for the tokens that all cores have in theirs."""
        time, costs = core.time, self._costs[core.virtual_engine]
        if costs is None or step.part != (0, 1):
            return
        shape = (_tokens(step), step.num_decodes + len(step.chunks), everybodys, bool(step.chunks))
        first, second = (costs.together(ticks, *shape) for ticks in (time.first, time.first + time.slope))
        # The first step waits for the host and later ones will not, so it is not repeated.
        if second - first != time.slope:
            time.repetitions = 1
        time.first = first


class GroupFlight:
    """A core's step and its repetitions in steps that it takes together with other cores."""

    __slots__ = ("_alone", "_costs", "_first", "_shape", "_slope", "core", "ends", "tokens")

    def __init__(self, core: EngineCore, costs: GroupCosts | None) -> None:
        """Begin the flight of a core that has planned a step."""
        step, time = core.step, core.time
        assert step is not None
        self.core, self.tokens = core, _tokens(step)
        self._costs = costs if step.part == (0, 1) else None
        self._first, self._slope = time.first, time.slope
        self._alone = time.ends
        """Ends of the repetitions if the core were alone; None if they follow `_first` and `_slope`."""
        self._shape = step.num_decodes + len(step.chunks), bool(step.chunks)
        self.ends: list[int] = []
        """Ends of the repetitions, the last of which may be running, in ticks after the first began."""
        # Requests whose answer is complete are in the first repetition only, so the tokens of the next one differ.
        if step.discarded:
            time.repetitions = 1
        time.ends = self.ends if time.repetitions > 1 else None

    def repeat(self, end: int) -> None:
        """Run the next repetition, which ends at a tick."""
        ticks = end - self.core.started
        self.ends.append(ticks)
        if self.core.time.ends is None:
            self.core.time.take(ticks)

    @property
    def is_over(self) -> bool:
        """True if the latest repetition is the last one."""
        return len(self.ends) >= self.core.time.repetitions

    def ticks(self, everybodys: int) -> int:
        """Return the ticks of the next repetition if no other core takes longer; `everybodys` are the tokens of all."""
        over, alone = len(self.ends), self._alone
        if alone is None:
            ticks = self._first + over * self._slope
        else:
            ticks = alone[over] - alone[over - 1] if over else alone[0]
        if self._costs is None:
            return ticks
        num_seqs, with_chunks = self._shape
        return self._costs.together(ticks, self.tokens, num_seqs, everybodys, with_chunks)


def _plan(now: int, core: EngineCore) -> bool:
    """Let a core plan its next step; True if it has one."""
    # The list belongs to an earlier flight.
    core.time.ends = None
    return core.plan(now)


def _retime(core: EngineCore) -> None:
    """Let a planned step repeat as often as it may, if it was limited to one repetition only because other cores seemed
    to run steps beside it."""
    step = core.step
    assert step is not None
    limited = core.inbox.unheard or step.part != (0, 1) or step.swapped_out_blocks or step.swapped_in_blocks
    if not step.chunks and not limited and step.repeat > 1 and core.may_jump(step):
        core.timer.decode(step, step.repeat, core.time)


def _tokens(step: Step) -> int:
    """Return the tokens of a step."""
    return step.verify_tokens + (sum(chunk.tokens for chunk in step.chunks) if step.chunks else 0)
