"""Steps that are lost while they run, and computed again: see `simtune.sim.rank_changes`."""

from __future__ import annotations

from copy import copy

from simtune.engine import Step
from simtune.sim.core import EngineCore


def ends_between_steps(core: EngineCore, now: int) -> bool:
    """End a core's running step if none of its repetitions is under way at `now`, since one has just ended; return
    True if it did."""
    time = core.time
    over = time.over_after(now - core.started) if time.repetitions > 1 else 0
    if not over or core.started + time.elapsed(over) != now:
        return False
    core.stop(over)
    core.ended = now
    return True


def begin_anew(core: EngineCore, now: int) -> tuple[Step, list[int]]:
    """Set the time of a core to that of the repetition that is under way at `now`, alone and from its beginning.
    Return that repetition as a step, and the ends of those before it in ticks after the first began."""
    step, time = core.step, core.time
    assert step is not None
    over = time.over_after(now - core.started) if time.repetitions > 1 else 0
    ends = [time.elapsed(n) for n in range(1, over + 1)]
    repetition = _repetition(step, over)
    time.ends, time.slope = None, 0
    if repetition.chunks:
        chunks = [(chunk.past, chunk.tokens) for chunk in repetition.chunks]
        time.take(core.timer.mixed(repetition, chunks, sum(chunk.completes for chunk in repetition.chunks)))
    else:
        core.timer.decode(repetition, 1 if repetition.contexts is None else 2, time)
    if repetition.part != (0, 1):
        time.first = core.timer.of_part(repetition, time.first)
    return repetition, ends


def _repetition(step: Step, over: int) -> Step:
    """Return a repetition of a step as a step of its own, after `over` others."""
    if not over:
        step = copy(step)
        step.contexts = None
        return step
    repetition = copy(step)
    if step.contexts is not None:
        repetition.num_decodes -= step.discarded
        repetition.draft_tokens -= step.discarded_tokens - step.discarded
        repetition.discarded = repetition.discarded_tokens = 0
        repetition.contexts = step.contexts[over : over + 1]
        return repetition
    repetition.context_tokens += over * step.num_decodes
    repetition.longest_context += over * (step.longest_context > 0)
    return repetition
