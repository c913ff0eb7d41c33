"""What a scheduler gives to run, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
    """How many of them are drafts that nobody made, to be rejected."""

    @property
    def completes(self) -> bool:
        """Whether the step samples a token for this request."""
        return self.past + self.tokens - self.padding == self.request.known_tokens


@dataclass
class Step:
    """One engine iteration. What few of them have stands at its default on the class, for there are millions."""

    num_decodes: int
    """Requests that decode; each computes one token, plus its drafts where there are any."""
    context_tokens: int
    """KV tokens the decodes read, their own new ones included: sum of (computed + tokens of this step)."""
    chunks: Sequence[Chunk]
    preempted: Sequence[Request]
    """Requests that lost their blocks and wait again, in the order in which they were chosen."""
    repeat: int = 1
    """How often this step may be run before `schedule` could answer differently; 1 unless it only decodes."""
    only_decodes: bool = False
    """Whether it is known to have no chunks, to preempt nobody and to move no blocks, so that nobody need look."""
    discarded: int = 0
    """Of the decodes, those whose answer is complete: they deliver nothing, and are not in the repetitions that follow;
    nor in `contexts`."""
    admitted: Sequence[Request] = field(default=(), init=False)
    """Requests that come out of the waiting queue in this step, each with a chunk of its own."""
    draft_tokens: int = field(default=0, init=False)
    """Drafts verified in this step, of all decodes together."""
    draft_depth: int = field(default=0, init=False)
    """How many drafts in turn lead to those that requests verify in a step like this one."""
    contexts: Contexts | None = field(default=None, init=False)
    """Tokens that the decodes have computed before each repetition of a step with drafts that may be repeated: they
    grow as drafts are accepted."""
    discarded_tokens: int = field(default=0, init=False)
    """How many tokens those compute."""
    swapped_out_blocks: int = field(default=0, init=False)
    """KV blocks that the preempted take to host memory before this step."""
    swapped_in_blocks: int = field(default=0, init=False)
    """KV blocks that the admitted bring back from there."""
    longest_context: int = field(default=0, init=False)
    """Of the KV tokens the decodes read, those of the one that reads most; 0 where the scheduler does not say."""
    part: tuple[int, int] = field(default=(0, 1), init=False)
    """(i, n): this is only the i-th, from 0, of n equal parts of the step's layers, and costs so much less. Nothing
    comes out before the last."""
    decodes_whole: bool = False
    """Of such a part, whether those that decode run through all layers all the same: only prompts are cut."""

    @property
    def verify_tokens(self) -> int:
        """Tokens the decodes compute: one each, and the drafts."""
        return self.num_decodes + self.draft_tokens


class Progress:
    """What came out of a completed step (or of the last of its repetitions)."""

    __slots__ = ("finished", "first_token")

    def __init__(self, first_token: Sequence[Request], finished: Sequence[Request]) -> None:
        self.first_token = first_token
        self.finished = finished


NO_PROGRESS = Progress((), ())
"""What comes of most steps."""
