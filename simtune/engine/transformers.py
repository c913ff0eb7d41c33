"""The schedulers of transformers' continuous batching (release 5.23): `fifo` and `prefill_first`.

Candidates for a step, in order: `fifo` takes those that decode, then prompts under way; `prefill_first` takes prompts
under way, then those that decode; both then take the waiting queue. Each gets its next tokens while the token budget
lasts, and at most `max_num_seqs` requests are in a step; a resident may be left out of one. Blocks are taken for the
tokens computed now and no more. A candidate that finds too few free blocks is passed over, and later ones are tried.

*Margin.* When the free share of the blocks at the beginning is under `safety_margin`, only requests that decode may
follow the first one chosen.

*Reset.* Residents that were passed over for want of blocks are starved. After the step is chosen, starved residents
are reset, the one tried last first, until the free blocks suffice for the rest of them, always leaving one resident.
They lose all blocks and go to the end of the waiting queue, prompt and delivered tokens together being their new
prompt; nobody is admitted then until a request finishes. Where nobody at all can be chosen, residents are reset first
and the choice is made again.

The engine's limit on cache reads (the size of the whole cache) cannot bind without shared blocks and is left out, and
so are block sharing, offloading to the host and asynchronous batching.
Checked step by step against logs of the real engine: tests/engine/test_hf_steplogs.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import ClassVar, Unpack

from simtune.engine.policies.listed import ListScheduler, ScheduledTokens
from simtune.engine.request import Request
from simtune.engine.scheduler import Settings
from simtune.engine.step import Progress


class TransformersFifo(ListScheduler):
    """See the module's text for the rule."""

    offers = frozenset({"safety_margin"})
    cuts_prompts = "always"
    DEFAULT_MARGIN: ClassVar[float] = 0.15
    PREFILL_FIRST: ClassVar[bool] = False

    def __init__(self, *, safety_margin: float | None = None, **settings: Unpack[Settings]) -> None:
        """`safety_margin`, a share of the blocks, is the engine's default unless given. Raises ValueError."""
        super().__init__(**settings)
        if not self.chunked_prefill:
            raise ValueError("transformers always cuts prompts at the token budget; chunked_prefill must be true")
        if self.watermark_blocks:
            raise ValueError("transformers keeps blocks free by safety_margin; watermark_blocks must be 0")
        self.safety_margin = self.DEFAULT_MARGIN if safety_margin is None else safety_margin
        self._closed = False  # nobody is admitted until a request finishes
        self._after: list[Request] = []  # reset after the step was chosen; their blocks are free when it is over

    def would_notice(self) -> bool:
        """Whether the step has room for one more, and anybody is admitted."""
        return not self._closed and len(self._scheduled) < self.max_num_seqs

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Candidates in order, each with its next tokens; where nobody can be chosen, residents are reset first."""
        scheduled, starved = self._attempt()
        while not scheduled and (reset := self._reset(starved)):
            for request in reset:
                self.kv.release(request)
            preempted += reset
            scheduled, starved = self._attempt()
        self._after = self._reset(starved)
        preempted += self._after
        return scheduled

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver the tokens of the step; those reset after it was chosen give their blocks back now."""
        progress = super().complete(repetitions)
        for request in self._after:
            self.kv.release(request)
        self._after = []
        if progress.finished:
            self._closed = False
        return progress

    def _lose_residents(self) -> list[Request]:
        self._after, self._closed = [], False
        return super()._lose_residents()

    def _attempt(self) -> tuple[ScheduledTokens, list[tuple[Request, int]]]:
        """The choice, and the starved residents with the tokens for which each found no blocks, as they were tried."""
        scheduled: ScheduledTokens = {}
        starved: list[tuple[Request, int]] = []
        budget = self.max_num_batched_tokens
        roomy = self.kv.free / self.kv.total >= self.safety_margin
        admitted = False
        for request in self._candidates():
            if scheduled and not roomy and not request.decoding:
                break
            resident = request in self.residents
            tokens = 1 if request.decoding else min(request.known_tokens - request.computed, budget)
            if not self.allocate(request, request.computed + tokens):
                if resident:
                    starved.append((request, tokens))
                elif not self.kv.free:
                    break
                continue
            scheduled[request] = tokens
            self.residents[request] = None
            admitted |= not resident
            budget -= tokens
            if budget == 0 or len(scheduled) == self.max_num_seqs:
                break
        if admitted:
            self.waiting = deque(request for request in self.waiting if request not in scheduled)
        return scheduled, starved

    def _candidates(self) -> Iterator[Request]:
        residents = list(self.residents)
        for decoding in (not self.PREFILL_FIRST, self.PREFILL_FIRST):
            yield from (request for request in residents if request.decoding is decoding)
        if not self._closed:
            yield from self.waiting

    def _reset(self, starved: list[tuple[Request, int]]) -> list[Request]:
        """Send starved residents back until the others' blocks are free, counting those they still hold as free."""
        kv = self.kv
        missing = [kv.blocks_for(request.computed + tokens) - kv.held_by(request) for request, tokens in starved]
        free, keep = kv.free, len(starved)
        while keep and len(self.residents) > 1 and sum(missing[:keep]) > free:
            keep -= 1
            victim = starved[keep][0]
            free += kv.held_by(victim)
            self._leave(victim)
        reset = [request for request, _ in starved[keep:]]
        for request in reset:
            request.computed = 0  # its slots stay taken until they are released
            request.preemptions += 1
        self.waiting.extend(reset)
        self._closed |= bool(reset)
        return reset


class TransformersPrefillFirst(TransformersFifo):
    """Prompts under way before those that decode; no margin by default."""

    DEFAULT_MARGIN = 0.0
    PREFILL_FIRST = True
