"""Cadence of prompts beside decodes: vLLM's `prefill_schedule_interval`.

While any request decodes, only some steps have prompts: with `interval` 4, the fourth step after the last one that had
some. If requests still wait after a step that could admit some, the next one has prompts too (`prefill_capacity_bound`
in vllm/v1/core/sched/scheduler.py).

Ranks that share attention count their steps together (`DPEngineCoreProc._should_throttle_prefills` in
vllm/v1/engine/core.py, since 0.24): steps 0, 4, 8 ... may have prompts in all of them. Other engines have the interval
since 0.33, counted from the last step with a prompt (`last_prefill_step` in the scheduler).
"""

from __future__ import annotations

from collections.abc import Sequence

from simtune.engine.batch import Batch
from simtune.engine.settling import Settling
from simtune.engine.step import Chunk, Step


class PromptCadence:
    """Decision which steps have no prompts."""

    __slots__ = ("_aligned", "_latest", "backlogged", "interval")

    def __init__(self, interval: int, aligned: bool) -> None:
        """`aligned`: steps whose number is a multiple of the interval have prompts, as in ranks that count together;
        otherwise the interval is counted from the last step with a prompt."""
        self.interval, self._aligned = interval, aligned
        self._latest = -interval  # number of the last step with a prompt, from 1
        self.backlogged = False
        """True if requests still waited after the last step that could admit some."""

    def defers(self, batch: Batch, settling: Settling) -> bool:
        """True if the coming step has no prompts, so that requests that decode do not wait for them."""
        if self.interval == 1 or self.backlogged:
            return False
        # Requests that have ended unknown to the engine count as decoding.
        return (batch.count > 0 or bool(settling.ended)) and self._remaining(batch) > 0

    def note(self, batch: Batch, residents: bool, admitted: Sequence[Chunk]) -> None:
        """Count from the coming step if it has prompts: chunks of `residents`, even of one that was preempted in the
        same step, or newcomers that compute more than their newest token."""
        if residents or any(chunk.past < chunk.request.known_tokens - 1 for chunk in admitted):
            self._latest = batch.steps + 1

    def restart(self) -> None:
        """Forget the steps so far: the engine is lost, and a new one may have prompts at once."""
        self._latest, self.backlogged = -self.interval, False

    def until_prompts(self, step: Step, batch: Batch) -> Step:
        """Return a step without prompts, repeated at most until one may have some."""
        step.repeat = min(step.repeat, self._remaining(batch))
        if step.contexts is not None:
            step.contexts = step.contexts[: step.repeat] if step.repeat > 1 else None
        return step

    def _remaining(self, batch: Batch) -> int:
        """Steps until one may have prompts; 0 if the coming one may."""
        if self._aligned:
            return -batch.steps % self.interval
        return max(0, self._latest + self.interval - batch.steps - 1)
