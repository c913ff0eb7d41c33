"""How the cores of one instance share its GPUs: the stages of a pipeline, or steps taken together.

Only a core that is alone jumps: as soon as another one is about to schedule, its jump is cut.
"""

from __future__ import annotations

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


class Pipeline(SharedStepping):
    """Virtual engines that share the stages of an instance: a stage works for one of them at a time.

    A step of D ticks takes D / stages in each (the first ones a tick longer where that leaves a rest); it enters a
    stage when it has left the one before and the stage is free.
    """

    def __init__(self, stages: int) -> None:
        super().__init__()
        self._free = [0] * stages  # the tick from which on each stage is free

    def may_jump(self, core: EngineCore) -> bool:
        """Whether no other core needs the stages."""
        return all(other is core or (other.step is None and not other.woken) for other in self.cores)

    def start(self, now: int, core: EngineCore) -> None:
        """Send the core's next step through the stages, or let it jump."""
        if not core.plan(now):
            return
        time = core.time
        end = self._pass_through(now, time.first)
        if time.repetitions > 1:
            self._jumping, end = core, now + time.total
        else:
            time.first = end - now  # what it waited for the others included
            if self._jumping is core:
                self._jumping = None
        core.launch(end)

    def wakes(self, now: int, core: EngineCore) -> None:
        """Another core needs the pipeline too: from its next step on each one goes step by step."""
        jumping = self._jumping
        if jumping is None or jumping is core or jumping.step is None:
            return
        jumping.cut(now)
        self._jumping = None
        before = jumping.time.elapsed(jumping.time.repetitions - 1)
        self.reset()
        self._pass_through(jumping.started + before, jumping.time.total - before)

    def reset(self) -> None:
        """Nothing is in the stages any more."""
        self._free = [0] * len(self._free)

    def _pass_through(self, now: int, ticks: int) -> int:
        """Send a step of `ticks` through; the tick at which it leaves the last stage."""
        share, rest = divmod(ticks, len(self._free))
        for stage, free in enumerate(self._free):
            now = max(now, free) + share + (stage < rest)
            self._free[stage] = now
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
            self._jumping.cut(now)

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
