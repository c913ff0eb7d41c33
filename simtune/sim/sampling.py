"""Samples of the steps of a core, evenly spaced in its busy time, so that each stands for an equal part of it.

The basis of a run's numbers is found from these steps (`simtune.sim.run_basis`): all steps would be too many, and
typical ones would be invented.
"""

from __future__ import annotations

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Step
from simtune.results.outcome import SampledStep
from simtune.sim.step_timing import JumpTime

MOST = 64
"""Steps that are kept; at twice as many, every second one is dropped."""


class StepSampler:
    """Samples a step whenever the core has been busy for another `interval` ticks; the interval doubles as the run goes
    on."""

    def __init__(self, interval: int = TICKS_PER_SECOND // 1000) -> None:
        """Create a sampler; `interval` is the first interval in ticks."""
        self.due = 1
        """Busy ticks at which the next sample is due."""
        self._interval = interval
        self._steps: list[tuple[int, SampledStep]] = []  # when it was due, and the step, whose ticks are found last

    def take(self, busy: int, step: Step, time: JumpTime, ticks: int) -> None:
        """Sample the repetitions that are due of a step that has ended; `ticks` is the time of all its repetitions."""
        chunks = tuple((chunk.past, chunk.tokens) for chunk in step.chunks)
        samples = step.num_decodes + sum(chunk.completes for chunk in step.chunks)
        begun, sample = busy - ticks, None
        while self.due <= busy:
            before = time.reaching(self.due - begun)[0] - 1 if time.repetitions > 1 else 0
            # Drafts let contexts grow by more than a token per step.
            contexts = step.contexts
            grown = step.num_decodes * before if contexts is None else int(contexts[before]) - int(contexts[0])
            context = step.context_tokens + grown
            if sample is None or sample.context_tokens != context:
                sample = SampledStep(0, step.num_decodes, context, step.verify_tokens, samples, chunks)
            self._steps.append((self.due, sample))
            self.due += self._interval
            if len(self._steps) >= 2 * MOST:
                self._widen()

    def _widen(self) -> None:
        """Double the interval, and keep only the steps that the new interval would have sampled."""
        self._interval *= 2
        self._steps = [(due, step) for due, step in self._steps if (due - 1) % self._interval == 0]
        self.due = 1 + -(-(self.due - 1) // self._interval) * self._interval

    def steps(self) -> tuple[SampledStep, ...]:
        """Return the sampled steps; consecutive samples of the same step are merged."""
        merged: list[SampledStep] = []
        last: SampledStep | None = None
        for _, step in self._steps:
            if step is last:
                merged[-1] = merged[-1]._replace(ticks=merged[-1].ticks + self._interval)
            else:
                merged.append(step._replace(ticks=self._interval))
            last = step
        return tuple(merged)
