"""Static batching, as engines did before iteration-level scheduling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Unpack

from simtune.engine.policies.listed import ListScheduler, ScheduledTokens
from simtune.engine.policy_traits import Feature, Settings
from simtune.engine.request import Request
from simtune.engine.step import Chunk, Progress, Step


@dataclass(slots=True)
class PaddedChunk(Chunk):
    """A whole prompt, padded to the longest of its batch: `tokens` counts the padding."""

    @property
    def completes(self) -> bool:
        """True: prompts are not cut."""
        return True


class StaticBatching(ListScheduler):
    """A batch runs until the last of its members is complete, and only then is the next one formed.

    Prompts are padded to the longest of the batch; members that are complete are computed on, as padding. Answers are
    returned together, at the end (section 3 of the Orca paper, OSDI 2022, describes engines of this kind). Each member
    has blocks for max_model_len tokens, since its final length is unknown. Prompts are never cut, whatever
    `chunked_prefill` is.
    """

    lacks: ClassVar[Mapping[Feature, str]] = {
        "prefix_caching": "each prompt is computed at the length of the longest of its batch",
        "speculation": "all members of a batch advance by one token in each step",
        "swap": "members have blocks for max_model_len and are never preempted",
    }
    cuts_prompts = "never"
    takes_over = False
    first_come = True

    def __init__(self, **settings: Unpack[Settings]) -> None:
        settings["chunked_prefill"] = False
        super().__init__(**settings)
        self._width = 0  # tokens of every member, padding included

    def would_notice(self) -> bool:
        """False: no request joins a running batch."""
        return False

    def expect(self, request: Request) -> bool:
        """Return False: a batch is formed of prompts."""
        return False

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        """Return the running batch, or else a new one."""
        residents, waiting = self.residents, self.waiting
        if residents:
            return dict.fromkeys(residents, 1)
        blocks = self.kv.blocks_for(self.max_model_len)
        while waiting and len(residents) < self.max_num_seqs and blocks <= self.room:
            width = max(self._width, waiting[0].known_tokens)
            if width * (len(residents) + 1) > self.max_num_batched_tokens:
                break
            self._width = width
            request = waiting.popleft()
            self.allocate(request, self.max_model_len)
            residents[request] = None
        return dict.fromkeys(residents, self._width)

    def _step(self, preempted: list[Request]) -> Step:
        members = len(self._scheduled)
        chunks: list[Chunk] = [PaddedChunk(r, 0, tokens) for r, tokens in self._scheduled.items() if not r.decoding]
        if chunks:
            return Step(0, 0, chunks, preempted)
        context = self._width + 1
        remaining = [self.remaining(request) for request in self.residents]
        # Until one more is complete: complete members deliver nothing.
        repeat = min(tokens for tokens in remaining if tokens)
        step = Step(members, members * context, [], preempted, repeat, discarded=remaining.count(0))
        step.longest_context = context
        return step

    def complete(self, repetitions: int = 1) -> Progress:
        """Deliver tokens to members that need more; all are finished when the last one is complete."""
        step, self._under_way = self._under_way, None
        assert step is not None
        assert 1 <= repetitions <= step.repeat
        first_token: list[Request] = []
        finished: list[Request] = []
        for request in self.residents:
            if step.chunks:
                request.decoding, request.computed = True, request.known_tokens
                request.emitted += 1
                first_token.append(request)
            else:
                tokens = min(repetitions, self.remaining(request))
                request.computed += tokens
                request.emitted += tokens
        if not step.chunks:
            self._width += repetitions
        if not any(self.remaining(request) for request in self.residents):
            for request in list(self.residents):
                self._leave(request)
                self._finish(request, finished)
            self._width = 0
        return Progress(first_token, finished)

    def _expel(self, request: Request) -> bool:
        was_resident = super()._expel(request)
        if not self.residents:
            self._width = 0
        return was_resident

    def _lose_residents(self) -> list[Request]:
        self._width = 0
        return super()._lose_residents()
