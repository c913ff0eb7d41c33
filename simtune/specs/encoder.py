"""Encoders of media in the steps of a pool."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simtune.specs.base import Part, TokensPerStep
from simtune.specs.tower import MediaKind, MediaShape
from simtune.specs.towers import Towers

EncoderTpMode = Literal["weights", "data"]


Limit = Annotated[int, Field(ge=0, le=10_000)] | None


class MediaLimits(Part):
    """Most items of each kind in one prompt; any number unless given.

    Instances keep no room for a kind with the limit 0, and load no encoder that has only such kinds.
    """

    image: Limit = None
    video: Limit = None
    audio: Limit = None

    def of(self, kind: MediaKind) -> int | None:
        """Return the limit of a kind; None for any number."""
        return {"image": self.image, "video": self.video, "audio": self.audio}[kind]


class Encoder(Part):
    """Settings with which the instances of a pool encode media, as vLLM has them."""

    tp_mode: EncoderTpMode = Field(
        "weights",
        description="how tp ranks share it: each a part of its weights, or each some of the images and videos",
    )
    cache_size: TokensPerStep | None = Field(
        None,
        description="embeddings that are kept for requests to come; max_num_batched_tokens unless given, and at least "
        "those of the largest item",
    )
    max_batched_embeds: TokensPerStep | None = Field(
        None, description="embeddings that one step may make; the same unless given, and at least the same"
    )
    disable_chunked_mm_input: bool = Field(
        False, description="true: no chunk of a prompt ends within an item before which it began"
    )

    limit_per_prompt: MediaLimits = Field(
        MediaLimits(), description="most items of each kind in one prompt; a kind with 0 takes no memory"
    )

    def kinds(self, towers: Towers) -> tuple[MediaKind, ...]:
        """Return the kinds of media that instances take, of those that a model reads."""
        return tuple(kind for kind in towers.kinds if self.limit_per_prompt.of(kind) != 0)

    def largest(self, towers: Towers, max_model_len: int) -> tuple[MediaKind, MediaShape] | None:
        """Return the kind and the sizes of the largest item for which an engine keeps room; None if it takes none.

        `MultiModalBudget` of vllm/multimodal/encoder_budget.py: of equal ones the last by name.
        """
        items = [(kind, towers.largest(kind, max_model_len)) for kind in self.kinds(towers)]
        return max(items, key=lambda item: (item[1].vectors, item[0]), default=None)

    def room(self, max_num_batched_tokens: int, largest: int) -> int:
        """Return the embeddings that are kept, with items of up to `largest`."""
        return max(self.cache_size or self.budget(max_num_batched_tokens, largest), largest)

    def budget(self, max_num_batched_tokens: int, largest: int) -> int:
        """Return the embeddings that one step may make."""
        return max(self.max_batched_embeds or max_num_batched_tokens, largest)
