"""Model spec: the shape of a decoder-only transformer, as far as its serving cost depends on it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import Count, Dtype, FloatDtype, NonNegative, Part, Seq, Spec


class FullAttention(Part):
    """Softmax attention over all earlier tokens: MHA when kv_heads == heads, GQA or MQA when fewer."""

    kind: Literal["full"] = "full"
    heads: Count
    kv_heads: Count
    head_dim: Count
    output_gate: bool = Field(False, description="a gate as wide as the queries, projected along with them")

    @property
    def shared_heads(self) -> int:
        """Heads that several query heads share; they are repeated where they are fewer than ranks."""
        return self.kv_heads

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class SlidingAttention(FullAttention):
    """Softmax attention over the last `window` tokens."""

    kind: Literal["sliding"] = "sliding"  # type: ignore[assignment]
    window: Count


class MlaAttention(Part):
    """Latent attention (MLA): heads share one cached vector of kv_lora_rank + qk_rope_head_dim values a token.

    Named as in the configs of DeepSeek V2 and V3. Queries pass through q_lora_rank values unless it is left out.
    """

    kind: Literal["mla"] = "mla"
    heads: Count
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count

    @property
    def cached_values(self) -> int:
        """Values per token and layer in the KV cache, the same on every tensor-parallel rank."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_heads(self) -> int:
        """All heads share the latent, and every rank has it whole."""
        return 1


class LinearAttention(Part):
    """Linear attention or a state-space layer: a state of heads x key_dim x value_dim values per sequence.

    In a gated delta net `heads` are the value heads. In Mamba2 they are its heads, `key_heads` its groups,
    key_dim its state size, value_dim its head dimension, and there is one gate a head instead of two. A
    convolution over the last conv_width tokens runs before it.
    """

    kind: Literal["linear"] = "linear"
    heads: Count
    key_heads: Count
    key_dim: Count
    value_dim: Count
    conv_width: Count = 4
    gates: Annotated[int, Field(ge=1, le=2)] = Field(2, description="per head: 2 in a gated delta net, 1 in Mamba2")
    state_dtype: FloatDtype = "fp32"

    @property
    def shared_heads(self) -> int:
        """Key heads, or groups of Mamba2, that several heads share."""
        return self.key_heads

    @property
    def conv_channels(self) -> int:
        """Values per token that the convolution runs over: keys, queries and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def in_width(self) -> int:
        """Columns of the projections into the layer: keys, queries, values, the output gate and the gates."""
        return self.conv_channels + self.heads * self.value_dim + self.gates * self.heads

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.key_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of key_heads ({self.key_heads})")
        return self


Attention = Annotated[FullAttention | SlidingAttention | MlaAttention | LinearAttention, Field(discriminator="kind")]


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
    routing_skew: NonNegative = Field(0.0, description="Zipf exponent of how often experts are chosen; 0: all alike")

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


Module = Literal["attention", "dense", "experts", "head"]


class Model(Spec):
    """A decoder-only language model. Sizes are per layer and unsharded."""

    KIND: ClassVar[str] = "model"
    hf: str | None = Field(None, description="what an engine is told to load, e.g. meta-llama/Llama-3.1-8B")
    source: str | None = Field(None, description="where these sizes come from")
    hidden_size: Count
    vocab_size: Count
    max_position: Count = Field(description="longest context in tokens")
    tie_embeddings: bool = False
    dtype: FloatDtype = Field("bf16", description="dtype of activations, and of the KV cache unless a plan differs")
    weight_dtype: Dtype = Field(
        "bf16", description="dtype of the matrices inside the layers; fp8 and int8 quantise activations too, int4 not"
    )
    attention_dtype: Dtype | None = Field(
        None, description="of attention's projections; weight_dtype unless it differs"
    )
    expert_dtype: Dtype | None = Field(None, description="of routed experts; weight_dtype unless it differs")
    head_dtype: Dtype | None = Field(None, description="of the language-model head; dtype unless it differs")
    kv_dtype: Dtype | None = Field(None, description="of the KV cache, where the checkpoint asks for one")
    layers: Annotated[Seq[LayerGroup], Field(min_length=1, strict=False)]

    def dtype_of(self, module: Module) -> Dtype:
        """What the weights of a module are kept in: dense feed-forward and shared experts in `weight_dtype`."""
        own = {"attention": self.attention_dtype, "experts": self.expert_dtype, "head": self.head_dtype or self.dtype}
        return own.get(module) or self.weight_dtype

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(group.count for group in self.layers)
