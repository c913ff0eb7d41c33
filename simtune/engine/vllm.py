"""vLLM V1's first-come-first-served scheduler (release 0.32), with chunked prefill and recompute preemption.

Resident requests come first, in order of admission, prompt or decode alike: each gets its next tokens while the token
budget lasts. When a resident finds no free KV block, the newest resident loses all of its blocks and goes back to the
head of the waiting queue, to be computed again; such a step admits nobody. Otherwise waiting requests are admitted in
order while seats, budget and memory last: a request is admitted only if all its known tokens would fit the free blocks
(`scheduler_reserve_full_isl`), but takes blocks only for the tokens computed now; the last one admitted may be cut.

Because a cut prompt exhausts the budget, at most one prompt is under way between steps, and it is the newest resident.
Checked step by step against logs of the real engine: tests/engine/test_steplogs.py.
"""

from __future__ import annotations

from simtune.engine.request import Request
from simtune.engine.scheduler import Chunk, Progress, Scheduler, Step


class VllmFcfs(Scheduler):
    """See the module's text for the rule."""

    _prefilling: Request | None = None
    _step: Step | None = None

    @property
    def num_running(self) -> int:
        return self.decoding.count + (self._prefilling is not None)

    def would_notice(self) -> bool:
        return not self.waiting and self.num_running < self.max_num_seqs

    def schedule(self) -> Step | None:
        assert self._step is None, "the step given last was not completed"
        if not self.has_work:
            return None
        preempted = self._make_room()
        batch, kv = self.decoding, self.kv
        kv.take(batch.blocks_for(1))
        budget = self.max_num_batched_tokens - batch.count
        chunks: list[Chunk] = []
        if self._prefilling is not None:
            chunk = self._chunk(self._prefilling, budget)
            if kv.blocks_for(chunk.past + chunk.tokens) - kv.blocks_for(chunk.past) > kv.free:
                preempted.append(self._preempt())
            else:
                self._take(chunk)
                chunks.append(chunk)
                budget -= chunk.tokens
        if not preempted:
            budget = self._admit(chunks, budget)
        step = Step(batch.count, batch.context_tokens + batch.count, chunks, preempted)
        if not chunks and not preempted:
            # The first repetition's blocks are taken already.
            step.repeat = batch.steps_that_fit(kv.free + batch.blocks_for(1), batch.steps_to_completion())
        self._step = step
        return step

    def complete(self, repetitions: int = 1) -> Progress:
        step, self._step = self._step, None
        assert step is not None
        assert 1 <= repetitions <= step.repeat
        progress = Progress()
        batch, kv = self.decoding, self.kv
        if repetitions > 1:
            kv.take(batch.blocks_for(repetitions) - batch.blocks_for(1))
        for request in batch.advance(repetitions):
            self._release(request)
            progress.finished.append(request)
        for chunk in step.chunks:
            request = chunk.request
            completes = chunk.completes
            request.computed += chunk.tokens
            if not completes:
                self._prefilling = request
                continue
            if request is self._prefilling:
                self._prefilling = None
            request.emitted += 1
            if request.emitted == 1:
                progress.first_token.append(request)
            if request.emitted == request.output_tokens:
                self._release(request)
                progress.finished.append(request)
            else:
                batch.join(request)
        return progress

    def _make_room(self) -> list[Request]:
        """Preempt the newest residents until every decode of the next step finds its block."""
        preempted: list[Request] = []
        while self.decoding.blocks_for(1) > self.kv.free:
            preempted.append(self._preempt())
        return preempted

    def _preempt(self) -> Request:
        victim = self._prefilling
        if victim is not None:
            self._prefilling = None
        else:
            victim = self.decoding.newest()
            self.decoding.leave(victim)
        self._release(victim)
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _admit(self, chunks: list[Chunk], budget: int) -> int:
        running = self.num_running
        while self.waiting and budget > 0 and running < self.max_num_seqs:
            request = self.waiting[0]
            if not self.chunked_prefill and request.known_tokens > budget:
                break
            if self.kv.blocks_for(request.known_tokens) > self.kv.free:
                break
            self.waiting.popleft()
            chunk = self._chunk(request, budget)
            self._take(chunk)
            chunks.append(chunk)
            budget -= chunk.tokens
            running += 1
        return budget

    @staticmethod
    def _chunk(request: Request, budget: int) -> Chunk:
        return Chunk(request, request.computed, min(request.known_tokens - request.computed, budget))

    def _take(self, chunk: Chunk) -> None:
        self.kv.take(self.kv.blocks_for(chunk.past + chunk.tokens) - self.kv.blocks_for(chunk.past))

    def _release(self, request: Request) -> None:
        self.kv.give(self.kv.blocks_for(request.computed))
        request.computed = 0
