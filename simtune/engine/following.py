"""Chunks of prompts that follow a step with decodes through a pipeline of stages, as in vLLM V1.

A prompt counts as computed as soon as a chunk of it is scheduled, so the next batch of the queue may have its next
chunk while the decodes of the last one are still in later stages (`step_with_batch_queue` in vllm/v1/engine/core.py).
Those decodes are in no batch until their tokens are known. Here the step is completed when it leaves the first stage,
its decodes are left out of the steps of prompts that follow it, and they are back when it has left the last stage.

A step is followed only if none of its requests ends with it, since blocks and seats would be free too early, and if the
next chunks find blocks. Steps that follow have prompts in prefill alone: vLLM would admit requests that wait as well,
and would let decodes go on beside the last chunk of a prompt, for which they wait here.
"""

from __future__ import annotations

from simtune.engine.cadence import PromptCadence
from simtune.engine.offloading_scheduler import OffloadingScheduler
from simtune.engine.request import Request
from simtune.engine.step import Step


class FollowingScheduler(OffloadingScheduler):
    """Scheduler whose prompts may go on while decodes are in the pipeline. A scheduler derived from it sets
    `_longest_chunk`, the most tokens of a prompt in a step, and `_cadence`, by which all steps may have prompts."""

    decodes_followed = True
    _longest_chunk: int
    _cadence: PromptCadence

    def may_be_followed(self, step: Step) -> bool:
        """True if prompts of the step returned last may go on before the tokens of its decodes are known: it may be
        completed early, and until they are `follow` gives steps in place of `schedule`."""
        if self.drafting or not step.goes_on or not self.decoding.count or step.preempted or self._left_out:
            return False
        if self.offloading is not None or self._cadence.interval > 1:
            return False
        if self._settling.pending or self.decoding.steps_to_completion() <= 1:
            return False
        tokens = {chunk.request: chunk.tokens for chunk in step.chunks}
        blocks = sum(blocks for _, _, blocks in self._next_chunks(tokens))
        return blocks <= self.kv.free

    def follow(self) -> Step | None:
        """Return a step of the prompts in prefill alone, its blocks taken; None if there is none, or too few blocks.
        `complete` must follow a step."""
        parts = self._next_chunks({})
        if not parts or sum(blocks for _, _, blocks in parts) > self.kv.free:
            return None
        self._left_out.add(list(self.decoding), self.decoding, self._settling)
        chunks = [self._allocate(prompt, tokens, blocks) for prompt, tokens, blocks in parts]
        return self._step(chunks, 0, repeats=False)

    def _next_chunks(self, under_way: dict[Request, int]) -> list[tuple[Request, int, int]]:
        """Return (prompt, tokens, new blocks) of the next step of prompts alone, after the tokens that are
        `under_way`."""
        budget, parts = self.max_num_batched_tokens, []
        for prompt in self.prefilling:
            computed = prompt.computed + under_way.get(prompt, 0)
            tokens = min(prompt.known_tokens - computed, self._longest_chunk, budget)
            if tokens <= 0:
                continue
            blocks_before = max(self.kv.held_by(prompt), self.kv.blocks_for(computed))
            blocks = self.kv.blocks_for(self._needs.slots(computed, tokens))
            parts.append((prompt, tokens, max(0, blocks - blocks_before)))
            budget -= tokens
        return parts
