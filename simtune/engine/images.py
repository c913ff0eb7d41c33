"""Images of prompts, as engines see them."""

from __future__ import annotations

from typing import NamedTuple


class Image(NamedTuple):
    """An image of a prompt."""

    start: int
    """Tokens of the prompt before it."""
    tokens: int
    """Tokens of the prompt that it takes."""
    vectors: int
    """Embeddings that the encoder delivers for it, which the budget and the cache count."""
    name: int
    """Identity: equal names, equal images."""
    work: tuple[int, int]
    """Sequences that are encoded apart, and patches of each."""

    @property
    def end(self) -> int:
        """Tokens of the prompt up to its last one."""
        return self.start + self.tokens
