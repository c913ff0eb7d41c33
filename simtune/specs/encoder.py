"""Vision encoder in the steps of a pool."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simtune.specs.base import Part, TokensPerStep

EncoderTpMode = Literal["weights", "data"]


class Encoder(Part):
    """Settings with which the instances of a pool encode images, as vLLM has them."""

    tp_mode: EncoderTpMode = Field(
        "weights", description="how tp ranks share it: each a part of its weights, or each some of the images"
    )
    cache_size: TokensPerStep | None = Field(
        None,
        description="embeddings that are kept for requests to come; max_num_batched_tokens unless given, and at least "
        "those of the largest image",
    )
    max_batched_embeds: TokensPerStep | None = Field(
        None, description="embeddings that one step may make; the same unless given, and at least the same"
    )
    disable_chunked_mm_input: bool = Field(
        False, description="true: no chunk of a prompt ends within an image before which it began"
    )

    def room(self, max_num_batched_tokens: int, largest: int) -> int:
        """Return the embeddings that are kept, with images of up to `largest`."""
        return max(self.cache_size or self.budget(max_num_batched_tokens, largest), largest)

    def budget(self, max_num_batched_tokens: int, largest: int) -> int:
        """Return the embeddings that one step may make."""
        return max(self.max_batched_embeds or max_num_batched_tokens, largest)
