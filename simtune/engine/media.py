"""Media of prompts, as engines see them: images, videos and recordings."""

from __future__ import annotations

from typing import NamedTuple


class MediaItem(NamedTuple):
    """An image, a video or a recording in a prompt."""

    start: int
    """Tokens of the prompt before it."""
    tokens: int
    """Tokens of the prompt that it takes."""
    vectors: int
    """Embeddings that the encoder delivers for it, which the budget and the cache count."""
    name: int
    """Identity: equal names, equal items."""
    work: tuple[int, int]
    """Sequences that are encoded apart, and patches of each."""
    kind: str = "image"
    """Kind of the item (`simtune.specs.media.MediaKind`): items of one kind are encoded together."""

    @property
    def end(self) -> int:
        """Tokens of the prompt up to its last one."""
        return self.start + self.tokens
