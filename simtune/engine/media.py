"""Media of prompts, as engines see them: images, videos and recordings."""

from __future__ import annotations

from typing import NamedTuple


class MediaItem(NamedTuple):
    """An image, a video or a recording in a prompt."""

    start: int
    """Tokens of the prompt before it."""
    tokens: int
    """Tokens of the prompt from its first to its last one."""
    vectors: int
    """Embeddings that the encoder delivers for it, which the budget and the cache count."""
    name: int
    """Identity: equal names, equal items."""
    work: tuple[int, int]
    """Sequences that are encoded apart, and patches of each."""
    kind: str = "image"
    """Kind of the item (`simtune.specs.media.MediaKind`): items of one kind are encoded together."""

    runs: tuple[tuple[int, int], ...] = ()
    """First and last + 1 of its tokens with embeddings, counted from its start, if another item's are between them."""

    def reaches(self, past: int, end: int) -> bool:
        """Return True if tokens of the prompt from `past` to before `end`, some of which are of the item, need its
        embeddings."""
        return not self.runs or any(self.start + first < end and past < self.start + last for first, last in self.runs)

    @property
    def end(self) -> int:
        """Tokens of the prompt up to its last one."""
        return self.start + self.tokens
