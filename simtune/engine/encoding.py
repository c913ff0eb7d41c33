"""vLLM's schedulers for prompts with images, videos or recordings: see `simtune.engine.encoder` for the rule.

A chunk that ends before an item leaves budget of the step, so that several prompts may be in prefill; residents are
scheduled one by one while any is.
"""

from __future__ import annotations

from typing import Unpack

from simtune.engine.encoder import EncoderCache, EncoderLimits
from simtune.engine.request import Request
from simtune.engine.step import Chunk, Progress, Step
from simtune.engine.vllm_scheduler import VllmFcfs, VllmPriority, VllmSettings


class EncodingFcfs(VllmFcfs):
    """First come, first served, with an encoder in the steps."""

    def __init__(self, *, encoder: EncoderLimits, **settings: Unpack[VllmSettings]) -> None:
        """Encode within these limits. Raises ValueError."""
        super().__init__(**settings)
        self.encoder = EncoderCache(encoder, late=self.async_scheduling)
        self._overtakes, self._newest_goes = True, False

    def schedule(self) -> Step | None:
        """Return the next step, with the items that it encodes. See `Scheduler.schedule`."""
        self.encoder.begin_step()
        step = super().schedule()
        if step is None and self.encoder.settle():
            # Nothing runs: the engine schedules again at once, and knows by then which items are computed.
            self.encoder.begin_step()
            step = super().schedule()
        if step is None:
            return None
        if items := self.encoder.take():
            step.encoded = items
        # the step that follows has a new budget, and perhaps room, for what waits
        if self.encoder.refused:
            step.repeat = 1
        return step

    def complete(self, repetitions: int = 1) -> Progress:
        """End the step returned last. See `Scheduler.complete`."""
        chunks = () if self._under_way is None else self._under_way.chunks
        progress = super().complete(repetitions)
        self.encoder.end_step(chunks)
        return progress

    def abort(self, request: Request) -> bool:
        """Remove a request that its client has given up. See `Scheduler.abort`."""
        removed = super().abort(request)
        self.encoder.release(request)
        return removed

    def withdraw(self) -> list[Request]:
        """Take back all waiting requests. See `Scheduler.withdraw`."""
        requests = super().withdraw()
        for request in requests:
            self.encoder.release(request)
        return requests

    def abandon(self) -> list[Request]:
        """Reset the scheduler, since the instance is lost. See `Scheduler.abandon`."""
        lost = super().abandon()
        self.encoder.clear()
        return lost

    def _catch_up(self) -> None:
        super()._catch_up()
        self.encoder.settle()

    def _grant(self, request: Request, past: int, tokens: int) -> int:
        return self.encoder.grant(request, past, tokens) if tokens and request.media else tokens

    def _schedule_many_prompts(self) -> tuple[list[Chunk], int]:
        return self._schedule_one_by_one()

    def _allocate(self, prompt: Request, num_tokens: int, new_blocks: int, padding: int = 0) -> Chunk:
        self.encoder.commit(prompt)
        return super()._allocate(prompt, num_tokens, new_blocks, padding)

    def _preempt(self, victim: Request, tokens: int = 0) -> None:
        super()._preempt(victim, tokens)
        self.encoder.release(victim)

    def _free_request(self, request: Request, named_tokens: int | None = None) -> None:
        super()._free_request(request, named_tokens)
        self.encoder.release(request)


class EncodingPriority(EncodingFcfs, VllmPriority):
    """Most urgent first, with an encoder in the steps."""


ENCODING: dict[type, type[EncodingFcfs]] = {VllmFcfs: EncodingFcfs, VllmPriority: EncodingPriority}
"""Schedulers with an encoder in the place of those without."""
