"""Steps that a scheduler gives to run, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simtune.engine.media import MediaItem
from simtune.engine.request import Request

Contexts = Sequence[int] | NDArray[np.int64]
"""Tokens that all members of a batch together have computed before each of some steps."""


@dataclass(slots=True)
class Chunk:
    """Tokens of one request to compute in this step, after the `past` ones already in the cache."""

    request: Request
    past: int
    tokens: int
    padding: int = 0
    """Number of these tokens that are placeholder drafts, to be rejected."""

    @property
    def completes(self) -> bool:
        """True if the step samples a token for this request."""
        return self.past + self.tokens - self.padding == self.request.known_tokens


@dataclass
class Step:
    """Engine iteration. Rarely used fields are defaults on the class, since there are millions of steps."""

    num_decodes: int
    """Requests that decode; each computes one token, plus its drafts if any."""
    context_tokens: int
    """KV tokens the decodes read, their own new ones included: sum of (computed + tokens of this step)."""
    chunks: Sequence[Chunk]
    preempted: Sequence[Request]
    """Requests that lost their blocks and wait again, in the order in which they were chosen."""
    repeat: int = 1
    """Number of times this step may be run before `schedule` could answer differently; 1 unless it only decodes."""
    only_decodes: bool = False
    """True if the step is known to have no chunks, preemptions and moved blocks, so that these need not be checked."""
    discarded: int = 0
    """Decodes whose answer is complete: they deliver nothing, and are neither in the repetitions that follow nor in
    `contexts`."""
    admitted: Sequence[Request] = field(default=(), init=False)
    """Requests that come out of the waiting queue in this step, each with a chunk of its own."""
    paused: Sequence[Request] = field(default=(), init=False)
    """Requests that decode, but not in this step, in which others decode."""
    draft_tokens: int = field(default=0, init=False)
    """Drafts verified in this step, of all decodes together."""
    draft_depth: int = field(default=0, init=False)
    """Number of drafts in turn that lead to those that requests verify in a step like this one."""
    contexts: Contexts | None = field(default=None, init=False)
    """Tokens that the decodes have computed before each repetition of a step with drafts that may be repeated: they
    grow as drafts are accepted."""
    discarded_tokens: int = field(default=0, init=False)
    """Number of tokens that the discarded decodes compute."""
    swapped_out_blocks: int = field(default=0, init=False)
    """KV blocks of the preempted requests that go to host memory before this step."""
    swapped_in_blocks: int = field(default=0, init=False)
    """KV blocks of the admitted requests that come back from host memory."""
    longest_context: int = field(default=0, init=False)
    """KV tokens read by the decode that reads most; 0 if the scheduler does not state it."""
    part: tuple[int, int] = field(default=(0, 1), init=False)
    """(i, n): this is only the i-th, from 0, of n equal parts of the step's layers, and costs a share of it. Results
    appear only after the last part."""
    encoded: Sequence[MediaItem] = field(default=(), init=False)
    """Media that are encoded in this step, before its chunks that reach them."""
    decodes_whole: bool = False
    """True if, in such a part, the decodes run through all layers: only prompts are cut."""

    @property
    def is_last_part(self) -> bool:
        """True if results appear after this part of the step."""
        return self.part[0] + 1 == self.part[1]

    @property
    def is_followed(self) -> bool:
        """True if the next step can be scheduled without any result of this one: all its prompts go on."""
        return not self.num_decodes and self.goes_on

    @property
    def goes_on(self) -> bool:
        """True if the step has prompts, and all of them go on after it."""
        if not self.chunks or self.part != (0, 1):
            return False
        return not any(chunk.completes for chunk in self.chunks)

    @property
    def verify_tokens(self) -> int:
        """Tokens the decodes compute: one each, and the drafts."""
        return self.num_decodes + self.draft_tokens


class Progress:
    """Results of a completed step (or of the last of its repetitions)."""

    __slots__ = ("finished", "first_token")

    def __init__(self, first_token: Sequence[Request], finished: Sequence[Request]) -> None:
        self.first_token = first_token
        self.finished = finished


NO_PROGRESS = Progress((), ())
"""Result of most steps."""
