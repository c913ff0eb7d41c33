"""Schedulers of transformers' continuous batching (release 5.23): `fifo` and `prefill_first`.

Candidates for a step, in order: `fifo` takes those that decode, then prompts in prefill; `prefill_first` takes prompts
in prefill, then those that decode; both then take the waiting queue. Each gets its next tokens while the token budget
lasts, and at most `max_num_seqs` requests are in a step; a resident may be left out of one. Blocks are taken for the
tokens computed now and no more. A candidate that finds too few free blocks is skipped, and later ones are tried.

*Margin.* When the free share of the blocks at the beginning is under `safety_margin`, only requests that decode may
follow the first one chosen.

*Reset.* Residents that were skipped for lack of blocks are starved. After the step is chosen, starved residents
are reset, the one tried last first, until the free blocks suffice for the rest of them, always leaving one resident.
They lose all blocks and go to the end of the waiting queue in the order of their admission, prompt and delivered tokens
together being their new prompt; no request is admitted then until one finishes, or no admitted request is left. If no
request at all can be chosen, residents are reset first and the choice is made again.

*Sharing* (`allow_block_sharing`, prefix_caching in a plan). A waiting candidate looks up the beginning of its text in
the cache (`simtune.engine.sharing`). A candidate that finds some of it is a resident from then on, even if there are
too few blocks for the rest, and may be starved like any other. The tokens that the requests of a step read from the
cache must not exceed the slots of the cache: a candidate that would read too many is skipped. (Without shared blocks
they cannot exceed them.)

Offloading to the host and asynchronous batching are left out. Checked step by step against logs of the real engine,
without sharing: tests/engine/test_hf_steplogs.py. Sharing is written from the engine's source (block_manager.py and
scheduler.py of its continuous batching) and compared with a plain copy of those rules only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import ClassVar, Unpack

from simtune.engine.policies.listed import ListScheduler, ScheduledTokens
from simtune.engine.policy_traits import Settings
from simtune.engine.request import Request
from simtune.engine.sharing import SharedBlocks
from simtune.engine.step import Progress, Step


class TransformersFifo(ListScheduler):
    """First in, first out. See the module for the rule."""

    offers = frozenset({"prefix_caching", "safety_margin"})
    cuts_prompts = "always"
    extends_cache = False
    DEFAULT_MARGIN: ClassVar[float] = 0.15
    PREFILL_FIRST: ClassVar[bool] = False

    def __init__(
        self,
        *,
        safety_margin: float | None = None,
        prefix_caching: bool = False,
        hash_block_tokens: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """`safety_margin`, a share of the blocks, is the engine's default unless given; `hash_block_tokens` is the size
        of the blocks that requests name for prefix caching, block_size unless given. Raises ValueError."""
        super().__init__(**settings)
        if not self.chunked_prefill:
            raise ValueError("transformers always cuts prompts at the token budget; set chunked_prefill to true")
        if self.watermark_blocks:
            raise ValueError("transformers keeps blocks free by safety_margin; set watermark_blocks to 0")
        self.safety_margin = self.DEFAULT_MARGIN if safety_margin is None else safety_margin
        self._shared: SharedBlocks | None = None
        if prefix_caching:
            block_size = self.kv.block_size
            self._shared = SharedBlocks(self.kv.total, block_size, hash_block_tokens or block_size)
            self.kv = self._shared
        self._unserved: set[Request] = set()  # residents that have been in no step since they came in
        self._closed = False  # admits no request until one finishes, or none is left
        self._after: list[Request] = []  # reset after the step was chosen; their blocks are free when it is over

    def would_notice(self) -> bool:
        """True if the step has room for one more, and requests are admitted."""
        return not self._closed and len(self._scheduled) < self.max_num_seqs

    def schedule(self) -> Step | None:
        """Return the step that `choose` makes; requests resident before their first step are admitted with it."""
        step = super().schedule()
        if step is not None and self._unserved:
            late = self._unserved.intersection(self._scheduled)
            admitted = late.union(step.admitted)
            step.admitted = [request for request in self._scheduled if request in admitted]
            self._unserved -= late
        return step

    def steady_steps(self, decoding: list[Request]) -> int:
        """Limit the steps to those in which all contexts may be read."""
        steps = super().steady_steps(decoding)
        if self._shared is None:
            return steps
        spare = self._slots - sum(request.computed for request in decoding)
        return max(1, min(steps, spare // len(decoding) + 1))

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return candidates in order, each with its next tokens; if none can be chosen, residents are reset first."""
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
        """Deliver the tokens of the step; those reset after it was chosen free their blocks now."""
        scheduled = self._scheduled
        if self._shared is not None and repetitions > 1:
            # before any blocks come free, as they do in the last repetition
            for request in scheduled:
                self.allocate(request, request.computed + repetitions)
        progress = super().complete(repetitions)
        if self._shared is not None:
            for request in scheduled:
                if request in self.residents:
                    self._shared.name(request, request.computed)
        for request in self._after:
            self.kv.release(request)
        self._after = []
        if progress.finished:
            self._closed = False
        return progress

    def _expel(self, request: Request) -> bool:
        was_resident = super()._expel(request)
        self._unserved.discard(request)
        if not self.residents:
            self._closed = False
        return was_resident

    def _lose_residents(self) -> list[Request]:
        self._after, self._closed = [], False
        self._unserved.clear()
        return super()._lose_residents()

    def _attempt(self) -> tuple[ScheduledTokens, list[tuple[Request, int]]]:
        """Return the choice, and the starved residents, as tried, with the tokens for which each found no blocks."""
        scheduled: ScheduledTokens = {}
        starved: list[tuple[Request, int]] = []
        budget, slots = self.max_num_batched_tokens, self._slots
        roomy = self.kv.free / self.kv.total >= self.safety_margin
        residents_before = self.residents.copy().keys()
        for request in self._candidates():
            # below the safety margin only decodes may follow the first request
            if scheduled and not roomy and not request.decoding:
                break
            self._find(request)
            # with shared blocks a step could read more tokens than the cache has slots
            if request.computed > slots:
                continue
            tokens = 1 if request.decoding else min(request.known_tokens - request.computed, budget)
            if not self.allocate(request, request.computed + tokens):
                if request in self.residents:
                    starved.append((request, tokens))
                continue
            scheduled[request] = tokens
            self.residents[request] = None
            budget -= tokens
            slots -= request.computed
            if budget == 0 or slots <= 0 or len(scheduled) == self.max_num_seqs:
                break
        if len(self.residents) > len(residents_before):
            self._unserved.update(self.residents.keys() - residents_before - scheduled.keys())
            self.waiting = deque(request for request in self.waiting if request not in self.residents)
        return scheduled, starved

    def _find(self, request: Request) -> None:
        """Let a waiting request hold the cached beginning of its text, if blocks are shared; it is then a resident."""
        if self._shared is None or request in self.residents:
            return
        tokens = self._shared.match(request)
        if tokens:
            request.computed = request.reserved_tokens = tokens
            self.residents[request] = None

    @property
    def _slots(self) -> int:
        """Tokens that fit the whole cache."""
        return self.kv.total * self.kv.block_size

    def _candidates(self) -> Iterator[Request]:
        residents = list(self.residents)
        for decoding in (not self.PREFILL_FIRST, self.PREFILL_FIRST):
            yield from (request for request in residents if request.decoding is decoding)
        for request in self.waiting:
            if self._closed or (self._shared is None and not self.kv.free):
                break
            yield request

    def _reset(self, starved: list[tuple[Request, int]]) -> list[Request]:
        """Send starved residents back until the others' blocks are free, counting those they still hold as free."""
        kv = self.kv
        missing_blocks = [kv.blocks_for(request.computed + tokens) - kv.held_by(request) for request, tokens in starved]
        free, keep, in_order = kv.free, len(starved), list(self.residents)
        while keep and len(self.residents) > 1 and sum(missing_blocks[:keep]) > free:
            keep -= 1
            victim = starved[keep][0]
            free += kv.freed_by(victim)
            self._leave(victim)
            self._unserved.discard(victim)
        victims = {request for request, _ in starved[keep:]}
        reset = [request for request in in_order if request in victims]
        for request in reset:
            # Its slots stay taken until they are released.
            request.computed = 0
            request.preemptions += 1
        self.waiting.extend(reset)
        self._closed |= bool(reset)
        return reset


class TransformersPrefillFirst(TransformersFifo):
    """Prompts in prefill before those that decode; no margin by default."""

    DEFAULT_MARGIN = 0.0
    PREFILL_FIRST = True
