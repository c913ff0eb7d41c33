"""Steps of prompts alone that a core begins while decodes of its last step are in later stages of a pipeline."""

from __future__ import annotations

from simtune.engine import Step
from simtune.engine.following import FollowingScheduler
from simtune.sim.agenda import WAKE
from simtune.sim.core import EngineCore


def may_be_followed(core: EngineCore, step: Step) -> bool:
    """True if the core may go on with prompts while decodes of this step are in the pipeline. What its inbox has joins
    or leaves between steps, and requests that load blocks wait for their admission."""
    if core.inbox or core.inbox.unheard or core.loads is not None:
        return False
    return isinstance(core.scheduler, FollowingScheduler) and core.scheduler.may_be_followed(step)


def follow(core: EngineCore, now: int) -> bool:
    """Schedule a step of prompts alone, and compute its time; return False if there is none."""
    if core.inbox:
        return False
    assert isinstance(core.scheduler, FollowingScheduler)
    core.step = step = core.scheduler.follow()
    if step is None:
        return False
    core.find_time(now, step)
    core.started = now
    core.version += 1
    return True


def sleep(core: EngineCore, until: int) -> None:
    """Let an idle core schedule at a tick to come, and not before."""
    core.woken = True
    core.agenda.post((until, WAKE, core.number, 0))
