"""Chunks of a prompt that shrink so that each takes as long as the first, as SGLang cuts them over a pipeline.

If a prompt of l tokens takes a multiple of l^2 + r l, the chunk after L tokens that takes as long as a first one of c
tokens is the x with

    x^2 + (2 L + r) x = c^2 + r c.

SGLang goes only a part of the way from c to x (`SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR`), never below c / 4, and cuts at
whole pages and pieces of 64 tokens: scheduler_pp_mixin.py of SGLang 0.5, whose next micro-batch has the next chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from simtune.engine.request import Request

LEAST_PIECE = 64
"""Tokens of which chunks are multiples, unless pages are larger."""


@dataclass(frozen=True, slots=True)
class DynamicChunks:
    """Sizes of the chunks of one prompt."""

    first: int
    """Tokens of the first chunk, and the most of any other."""
    page: int
    linear_tokens: float | None
    """Length r at which the part of a prompt's time that grows by its square reaches the part that grows by its length;
    None if all chunks are as long as the first."""
    smooth_factor: float

    def __post_init__(self) -> None:
        if not 0 <= self.smooth_factor <= 1:
            raise ValueError(f"smooth_factor ({self.smooth_factor}) must be from 0 to 1")

    def budget(self, residents: Iterable[Request]) -> int:
        """Return the prompt tokens of the next step, by the prompt that was cut: it comes before newcomers."""
        if self.linear_tokens is None:
            return self.first
        return self.after(next((request.computed for request in residents if not request.decoding), 0))

    def after(self, computed: int) -> int:
        """Return the tokens of the chunk after `computed` tokens of the prompt."""
        first, linear = self.first, self.linear_tokens
        if linear is None:
            return first
        half = computed + linear / 2
        tokens = math.sqrt(half * half + first * (first + linear)) - half
        smoothed = max(int(first + self.smooth_factor * (tokens - first)), first // 4)
        piece = max(self.page, LEAST_PIECE)
        return min(max(smoothed // piece * piece, piece), first)
