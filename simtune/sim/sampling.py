"""Some of the steps of a core, evenly spaced in the time that it is busy, so that each stands for as much of it.

What a run's numbers rest on is asked of these steps (`simtune.sim.run_basis`): all of them would be too many to ask,
and typical ones would be made up.
"""

from __future__ import annotations

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Step
from simtune.results.outcome import SampledStep
from simtune.sim.step_timing import JumpTime

MOST = 64
"""Steps that are kept; with twice as many, every second one is dropped."""


class StepSampler:
    """Takes a step whenever the core has been busy for another `interval` ticks, which doubles as the run goes on."""

    def __init__(self, interval: int = TICKS_PER_SECOND // 1000) -> None:
        """`interval` is that of the first steps, in ticks."""
        self.due = 1
        """Ticks spent in steps at which the next is taken."""
        self._interval = interval
        self._steps: list[tuple[int, SampledStep]] = []  # when it was due, and the step, whose ticks are found last

    def take(self, busy: int, step: Step, time: JumpTime, ticks: int) -> None:
        """Take of a step that has ended, and took so many ticks with all its repetitions, those that are due."""
        chunks = tuple((chunk.past, chunk.tokens) for chunk in step.chunks)
        samples = step.num_decodes + sum(chunk.completes for chunk in step.chunks)
        begun, taken = busy - ticks, None
        while self.due <= busy:
            before = time.reaching(self.due - begun)[0] - 1 if time.repetitions > 1 else 0
            contexts = step.contexts  # where drafts let them grow by more than a token
            grown = step.num_decodes * before if contexts is None else int(contexts[before]) - int(contexts[0])
            context = step.context_tokens + grown
            if taken is None or taken.context_tokens != context:
                taken = SampledStep(0, step.num_decodes, context, step.verify_tokens, samples, chunks)
            self._steps.append((self.due, taken))
            self.due += self._interval
            if len(self._steps) >= 2 * MOST:
                self._widen()

    def _widen(self) -> None:
        """Twice the interval, and only the steps that it would have taken."""
        self._interval *= 2
        self._steps = [(due, step) for due, step in self._steps if (due - 1) % self._interval == 0]
        self.due = 1 + -(-(self.due - 1) // self._interval) * self._interval

    def steps(self) -> tuple[SampledStep, ...]:
        """The steps taken, those that were taken several times in a row as one."""
        kept: list[SampledStep] = []
        last: SampledStep | None = None
        for _, step in self._steps:
            if step is last:
                kept[-1] = kept[-1]._replace(ticks=kept[-1].ticks + self._interval)
            else:
                kept.append(step._replace(ticks=self._interval))
            last = step
        return tuple(kept)
