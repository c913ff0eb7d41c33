"""Cadence of prompts beside decodes: vLLM's `prefill_schedule_interval`.

Of `interval` steps one may have prompts, while any request decodes. If requests still wait after a step that could
admit some, the next one has prompts too (`prefill_capacity_bound` in vllm/v1/core/sched/scheduler.py).
"""

from __future__ import annotations

from simtune.engine.batch import Batch
from simtune.engine.settling import Settling
from simtune.engine.step import Step


class PromptCadence:
    """Decision which steps have no prompts."""

    __slots__ = ("backlogged", "interval")

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.backlogged = False
        """True if requests still waited after the last step that could admit some."""

    def defers(self, batch: Batch, settling: Settling) -> bool:
        """True if the coming step has no prompts, so that requests that decode do not wait for them."""
        if self.interval == 1 or self.backlogged:
            return False
        # Requests that have ended unknown to the engine count as decoding.
        return (batch.count > 0 or bool(settling.ended)) and batch.steps % self.interval != 0

    def until_prompts(self, step: Step, batch: Batch) -> Step:
        """Return a step without prompts, repeated at most until one may have some."""
        step.repeat = min(step.repeat, self.interval - batch.steps % self.interval)
        if step.contexts is not None:
            step.contexts = step.contexts[: step.repeat] if step.repeat > 1 else None
        return step
