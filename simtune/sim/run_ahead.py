"""Steps of one core in a row, as long as nothing else happens in the deployment: the inner loop of most simulations."""

from __future__ import annotations

from simtune.engine import NO_PROGRESS
from simtune.sim.agenda import STEP_END
from simtune.sim.core import Deliver, EngineCore, note_tokens


def run_ahead(core: EngineCore, now: int, deliver: Deliver) -> None:
    """Do the same as repeated calls of `EngineCore.end`, until another event comes before the end of the next step.

    Inlined for speed, and compared with these calls by tests/sim/test_run_ahead.py.
    """
    agenda, recorder, sampler, time, timer = core.agenda, core.recorder, core.sampler, core.time, core.timer
    heap, note, decode = agenda.heap, recorder.rows.append, timer.affine
    complete, schedule, step, gaps = core.scheduler.complete, core.scheduler.schedule, core.step, core.gaps
    agenda.hold(None)  # so that the heap alone shows what comes first
    while step is not None:
        repetitions = time.repetitions
        recorder.steps += repetitions
        core.busy += now - core.started
        if core.busy >= sampler.due:
            sampler.take(core.busy, step, time, now - core.started)
        if gaps.waiting or not step.only_decodes or time.ends is not None:
            note_tokens(core, now)
        elif decodes := step.num_decodes - step.discarded:
            note((time.first, time.slope, repetitions, decodes))
        progress = complete(repetitions)
        core.step, core.ended = None, now
        if progress is not NO_PROGRESS:
            deliver(now, core, progress)
        # Another event at this instant may add a request, so the core schedules after it (WAKE sorts last).
        if heap[0][0] == now:
            core.wake(now)
            return
        core.step = step = schedule()
        if step is None:
            core.idle(now)
            return
        core.started = now
        core.version = version = core.version + 1
        if not step.only_decodes:
            core.find_time(now, step)
            now += time.first if time.repetitions == 1 else time.total
        elif decode is None:
            timer.decode(step, step.repeat, time)
            now += time.total
        else:
            time.first, time.slope, repetitions = decode(step.num_decodes, step.context_tokens)
            if step.repeat < repetitions:
                repetitions = step.repeat
            time.repetitions = repetitions
            now += repetitions * time.first + time.slope * (repetitions * (repetitions - 1) // 2)
        event = now, STEP_END, core.number, version
        if heap[0] < event:  # something else comes first, or the run was stopped
            agenda.held = event
            return
        agenda.handled += 1
