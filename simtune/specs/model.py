"""Model spec: the shape of a decoder-only transformer, as far as its serving cost depends on it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import Count, Dtype, Part, Seq, Spec


class FullAttention(Part):
    """Softmax attention over all earlier tokens: MHA when kv_heads == heads, GQA or MQA when fewer."""

    kind: Literal["full"] = "full"
    heads: Count
    kv_heads: Count
    head_dim: Count

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class SlidingAttention(FullAttention):
    """Softmax attention over the last `window` tokens."""

    kind: Literal["sliding"] = "sliding"  # type: ignore[assignment]
    window: Count


Attention = Annotated[FullAttention | SlidingAttention, Field(discriminator="kind")]


class DenseFeedForward(Part):
    """Two (plain) or three (gated) matrices of hidden_size x intermediate_size."""

    kind: Literal["dense"] = "dense"
    intermediate_size: Count
    gated: bool = True


class MoeFeedForward(Part):
    """Gated experts of hidden_size x intermediate_size, of which each token visits experts_per_token."""

    kind: Literal["moe"] = "moe"
    experts: Count
    experts_per_token: Count
    intermediate_size: Count
    shared_intermediate_size: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        return self


FeedForward = Annotated[DenseFeedForward | MoeFeedForward, Field(discriminator="kind")]


class LayerGroup(Part):
    """`count` equal layers."""

    count: Count
    attention: Attention
    feed_forward: FeedForward


class Model(Spec):
    """A decoder-only language model. Sizes are per layer and unsharded."""

    KIND: ClassVar[str] = "model"
    hf: str | None = Field(None, description="what an engine is told to load, e.g. meta-llama/Llama-3.1-8B")
    source: str | None = Field(None, description="where these sizes come from")
    hidden_size: Count
    vocab_size: Count
    max_position: Count = Field(description="longest context in tokens")
    tie_embeddings: bool = False
    dtype: Dtype = Field("bf16", description="dtype of activations and of the KV cache unless a plan says otherwise")
    weight_dtype: Dtype = Field("bf16", description="dtype of the matrices inside the layers")
    layers: Annotated[Seq[LayerGroup], Field(min_length=1, strict=False)]

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)
