"""Encoders of media of one model, by the kinds of media that they encode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simtune.specs.audio import Audio
from simtune.specs.tower import MEDIA_KINDS, MediaKind, MediaShape, Tower
from simtune.specs.vision import Vision


class Towers(NamedTuple):
    """Encoders of one model."""

    vision: Vision | None = None
    audio: Audio | None = None

    def of(self, kind: MediaKind) -> Tower | None:
        """Return the encoder of a kind of media; None if the model does not read it."""
        if kind == "audio":
            return self.audio
        return None if kind == "video" and self.vision is not None and self.vision.video is None else self.vision

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """Kinds of media that the model reads."""
        return tuple(kind for kind in MEDIA_KINDS if self.of(kind) is not None)

    def distinct(self, kinds: Iterable[MediaKind]) -> list[Tower]:
        """Return the encoders of some kinds, each once."""
        of_kinds = dict.fromkeys("audio" if kind == "audio" else "vision" for kind in kinds if self.of(kind))
        return [self._asdict()[name] for name in of_kinds]

    def largest(self, kind: MediaKind, max_model_len: int) -> MediaShape:
        """Return the sizes of the item of a kind for which engines keep room; the model reads this kind."""
        if kind == "audio":
            assert self.audio is not None
            return self.audio.largest_recording(max_model_len)
        assert self.vision is not None
        return self.vision.largest if kind == "image" else self.vision.largest_video(max_model_len)


NO_TOWERS = Towers()
"""Encoders of a model that reads text only."""
