"""Model spec: the shape of a decoder-only transformer, as far as its serving cost depends on it.

Every block counts its own parameters: `matrices`, which products read, and `vectors` beside them (biases, norms of
its own, convolutions, sinks), which are far below 1 % and kept in the dtype of activations.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.audio import Audio
from simtune.specs.base import Context, Dtype, FloatDtype, NonNegative, Part, Seats, Seq, Spec, Width
from simtune.specs.towers import Towers
from simtune.specs.vision import Vision


class FullAttention(Part):
    """Softmax attention over all earlier tokens: MHA when kv_heads == heads, GQA or MQA when fewer."""

    kind: Literal["full"] = "full"
    heads: Width
    kv_heads: Width
    head_dim: Width
    output_gate: bool = Field(False, description="a gate as wide as the queries, projected along with them")
    qkv_bias: bool = Field(False, description="queries, keys and values have a bias")
    output_bias: bool = Field(False, description="the projection out of attention has a bias")
    head_gate: bool = Field(False, description="a gate of one value for each head, projected from the hidden states")
    v_dim: Width | None = Field(None, description="values of a head, if they are fewer or more than head_dim")
    values_from_keys: bool = Field(
        False, description="no projection for values: they are the projected keys, which both are cached"
    )
    qk_norm: bool = Field(False, description="queries and keys are normed by head")
    wide_qk_norm: bool = Field(False, description="norms of queries and keys have a weight for each value of all heads")
    sinks: bool = Field(False, description="a learned score for each head that takes part in its softmax")
    q_lora_rank: Width | None = Field(
        None, description="values that queries are projected through; not divided over ranks"
    )

    @property
    def shared_heads(self) -> int:
        """Heads that several query heads share; they are repeated if they are fewer than ranks."""
        return self.kv_heads

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size."""
        queries, out = self.heads * self.head_dim, self.heads * self.value_width
        if self.q_lora_rank is None:
            return hidden * (self._projected + out)
        return hidden * (self.q_lora_rank + self._projected - queries + out) + self.q_lora_rank * queries

    def vectors(self, hidden: int) -> int:
        """Parameters of its biases, norms and sinks."""
        biases = self.qkv_bias * self._projected + self.output_bias * hidden
        normed = self.heads + self.kv_heads if self.wide_qk_norm else 2
        return biases + self.qk_norm * normed * self.head_dim + self.sinks * self.heads + (self.q_lora_rank or 0)

    @property
    def value_width(self) -> int:
        """Values of one head."""
        return self.v_dim or self.head_dim

    @property
    def measurable(self) -> bool:
        """True if kernels that are measured here attend so: keys and values of one width, none left out."""
        return self.kind in ("full", "sliding") and self.value_width == self.head_dim

    @property
    def like_llama(self) -> bool:
        """True for full attention with only the projections that Llama, Qwen2 and Qwen3 have."""
        beyond = self.output_gate or self.head_gate or self.sinks or self.values_from_keys or self.wide_qk_norm
        return self.kind == "full" and self.measurable and not beyond and self.q_lora_rank is None

    @property
    def _projected(self) -> int:
        gates = self.heads * (self.output_gate * self.value_width + self.head_gate)
        values = 0 if self.values_from_keys else self.kv_heads * self.value_width
        return (self.heads + self.kv_heads) * self.head_dim + values + gates

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class SlidingAttention(FullAttention):
    """Softmax attention over the last `window` tokens, or over those of the same chunk of `window` tokens.

    A chunk is taken for a window: its cache is as large at most, its time at most twice as long.
    """

    kind: Literal["sliding"] = "sliding"  # type: ignore[assignment]
    window: Context
    chunked: bool = Field(False, description="chunks begin at multiples of `window`, as in Llama 4")


class BlockSparseAttention(FullAttention):
    """Softmax attention to the best blocks of earlier tokens (MSA, MiniMax M3).

    index_heads score one cached key of index_dim values a token, kept in 16 bits; the best `topk_blocks` blocks of
    `block` tokens are attended to, the last one always among them.
    """

    kind: Literal["block_sparse"] = "block_sparse"  # type: ignore[assignment]
    index_heads: Width
    index_dim: Width
    block: Context
    topk_blocks: Seats

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size, the indexer's among them."""
        return super().matrices(hidden) + hidden * (self.index_heads + 1) * self.index_dim

    def vectors(self, hidden: int) -> int:
        """Parameters of its biases and norms, those of the indexer's queries and keys among them."""
        return super().vectors(hidden) + 2 * self.index_dim


class MlaAttention(Part):
    """Latent attention (MLA): heads share one cached vector of kv_lora_rank + qk_rope_head_dim values a token.

    Named as in the configs of DeepSeek V2 and V3. Queries pass through q_lora_rank values unless it is left out.
    With index_topk an indexer chooses the tokens that are attended to (DeepSeek V3.2, GLM 5): index_heads score one
    cached key of index_head_dim values a token, kept in 8 bits with a scale of 4 bytes. Layers that attend to the
    tokens chosen in an earlier layer have index_topk and no indexer.
    """

    kind: Literal["mla"] = "mla"
    heads: Width
    q_lora_rank: Width | None = None
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=10**8)]
    v_head_dim: Width
    index_topk: Context | None = Field(None, description="tokens that each token attends to at most; all unless given")
    index_heads: Width | None = None
    index_head_dim: Width | None = None
    index_reused: bool = Field(False, description="attends to the tokens that an earlier layer's indexer chose")
    index_pool: Width = Field(1, description="tokens whose keys are pooled into one that the indexer scores")
    output_gate: bool = Field(False, description="a gate as wide as the values of all heads")

    @property
    def cached_values(self) -> int:
        """Values per token and layer in the KV cache, the same on every tensor-parallel rank."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_bytes(self) -> float:
        """Bytes per token and layer of the indexer's keys, whatever the dtype of the KV cache."""
        return 0 if self.index_head_dim is None else (self.index_head_dim + 4) / self.index_pool

    @property
    def indexer(self) -> list[tuple[int, int]]:
        """(n, k) of the indexer's matrices, k 0 for the hidden size; every tensor-parallel rank has them whole."""
        heads, dim = self.index_heads, self.index_head_dim
        if heads is None or dim is None:
            return []
        # a pooled key is a sum of keys, weighted by a gate of each of their values
        keys = dim * (1 + (self.index_pool > 1))
        return [(heads * dim, self.q_lora_rank or 0), (keys + heads, 0)]

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size."""
        queries = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        into = queries * hidden if rank is None else rank * (hidden + queries)
        spelled_out = self.heads * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        indexer = sum(n * (k or hidden) for n, k in self.indexer)
        values = (1 + self.output_gate) * self.heads * self.v_head_dim
        return into + hidden * (self.cached_values + values) + spelled_out + indexer

    def vectors(self, hidden: int) -> int:
        """Parameters of the norms of latents, and of the indexer's keys."""
        pooling = self.index_pool if self.index_pool > 1 else 0
        return (self.q_lora_rank or 0) + self.kv_lora_rank + (2 + pooling) * (self.index_head_dim or 0)

    @model_validator(mode="after")
    def _whole_indexer(self) -> Self:
        index_fields = [self.index_topk, self.index_heads, self.index_head_dim]
        if self.index_reused:
            if self.index_topk is None or index_fields[1:] != [None, None]:
                raise ValueError("index_reused requires index_topk, and neither index_heads nor index_head_dim")
            return self
        if None in index_fields and index_fields != [None] * 3:
            raise ValueError("index_topk, index_heads and index_head_dim go together; give all three, or none")
        return self

    @property
    def shared_heads(self) -> int:
        """Return 1: all heads share the latent, and every rank stores all of it."""
        return 1


class LinearAttention(Part):
    """Linear attention or a state-space layer: a state of heads x key_dim x value_dim values per sequence.

    In a gated delta net `heads` are the value heads. In Mamba2 they are its heads, `key_heads` its groups,
    key_dim its state size, value_dim its head dimension, and there is one gate a head instead of two. A
    convolution over the last conv_width tokens runs before it.
    """

    kind: Literal["linear"] = "linear"
    heads: Width
    key_heads: Width
    key_dim: Width
    value_dim: Width
    conv_width: Width = 4
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

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size."""
        return hidden * (self.in_width + self.heads * self.value_dim)

    def vectors(self, hidden: int) -> int:
        """Parameters of the convolution, of decay and time step, and of the norm; those of Mamba2 differ."""
        if self.gates == 2:
            return self.conv_channels * self.conv_width + 2 * self.heads + self.value_dim
        return self.conv_channels * (self.conv_width + 1) + 3 * self.heads + self.heads * self.value_dim

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.key_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of key_heads ({self.key_heads})")
        return self


class KdaAttention(LinearAttention):
    """Gated delta rule whose state decays by key channel (KDA; Kimi Linear, Kimi K3, GLM 5.3 Flash).

    The decays pass through decay_rank values, the output gate through gate_rank unless it is projected directly. Every
    head has keys of its own.
    """

    kind: Literal["kda"] = "kda"  # type: ignore[assignment]
    decay_rank: Width
    gate_rank: Width | None = None

    @property
    def in_width(self) -> int:
        """Columns of the projections into the layer: keys, queries, values, decays, the output gate, a rate a head."""
        return self.conv_channels + self.decay_rank + (self.gate_rank or self.heads * self.value_dim) + self.heads

    @property
    def widened(self) -> list[tuple[int, int]]:
        """(n, k) of the products that widen decays and output gate."""
        decays = [(self.heads * self.key_dim, self.decay_rank)]
        return decays if self.gate_rank is None else [*decays, (self.heads * self.value_dim, self.gate_rank)]

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size."""
        return super().matrices(hidden) + sum(n * k for n, k in self.widened)

    def vectors(self, hidden: int) -> int:
        """Parameters of the convolution, of decay and time step, and of the norm."""
        return self.conv_channels * self.conv_width + self.heads * (self.key_dim + 1) + self.value_dim

    @model_validator(mode="after")
    def _keys_of_their_own(self) -> Self:
        if self.key_heads != self.heads:
            raise ValueError(f"key_heads ({self.key_heads}) must be heads ({self.heads}): no keys are shared")
        return self


class CompressedAttention(Part):
    """Attention to a window and to compressed entries of `ratio` earlier tokens each (DeepSeek V4).

    All heads share one cached vector of head_dim values, key and value at once, of which rope_dim are kept in 16 bits.
    With index_topk an indexer chooses the entries that are attended to (CSA), else all are (HCA); without a ratio there
    is only the window. Outputs pass through o_lora_rank values in each of o_groups groups of heads.
    """

    kind: Literal["compressed"] = "compressed"
    heads: Width
    head_dim: Width
    rope_dim: Width
    q_lora_rank: Width
    o_groups: Width
    o_lora_rank: Width
    window: Context
    ratio: Context | None = Field(None, description="tokens of one compressed entry; only the window unless given")
    overlapping: bool = Field(False, description="an entry is made of the tokens of the one before as well")
    index_topk: Context | None = Field(None, description="entries that each token attends to at most; all unless given")
    index_heads: Width | None = None
    index_head_dim: Width | None = None

    @property
    def shared_heads(self) -> int:
        """Return 1: all heads share the cached vector, and every rank stores all of it."""
        return 1

    @property
    def compressor(self) -> int:
        """Columns of the projections that entries are made from, of their weights, and of the same for the indexer."""
        spans = 1 + self.overlapping
        return 2 * spans * (self.head_dim + (self.index_head_dim or 0)) if self.ratio else 0

    @property
    def in_width(self) -> int:
        """Columns of the projections of hidden states that every rank has whole."""
        return self.q_lora_rank + self.head_dim + self.compressor + (self.index_heads or 0)

    @property
    def index_width(self) -> int:
        """Values of the indexer's queries."""
        return (self.index_heads or 0) * (self.index_head_dim or 0)

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size."""
        queries = self.heads * self.head_dim
        out = self.o_lora_rank * (queries + self.o_groups * hidden)
        return hidden * self.in_width + self.q_lora_rank * (queries + self.index_width) + out

    def vectors(self, hidden: int) -> int:
        """Parameters of norms, sinks, and the weights of positions within an entry."""
        norms = self.q_lora_rank + self.head_dim + self.heads
        if self.ratio is None:
            return norms
        entries = self.head_dim + (self.index_head_dim or 0)
        return norms + entries + self.ratio * self.compressor // 2

    @model_validator(mode="after")
    def _possible(self) -> Self:
        index_fields = [self.index_topk, self.index_heads, self.index_head_dim]
        if None in index_fields and index_fields != [None] * 3:
            raise ValueError("index_topk, index_heads and index_head_dim go together; give all three, or none")
        if self.ratio is None and (self.index_topk is not None or self.overlapping):
            raise ValueError("an indexer and overlapping entries require a ratio")
        if self.rope_dim > self.head_dim or self.heads % self.o_groups:
            raise ValueError("rope_dim must be at most head_dim, and heads a multiple of o_groups")
        return self


class NoAttention(Part):
    """A layer that is only a feed-forward block, as some of Nemotron-H are. Its attention costs nothing."""

    kind: Literal["none"] = "none"

    @property
    def heads(self) -> int:
        """Return 0: there are no heads."""
        return 0

    @property
    def shared_heads(self) -> int:
        """Return 1: there is nothing to divide over ranks."""
        return 1

    def matrices(self, hidden: int) -> int:
        """Return 0: there are no matrices."""
        return 0

    def vectors(self, hidden: int) -> int:
        """Return 0: there are no vectors."""
        return 0


Attention = Annotated[
    FullAttention
    | SlidingAttention
    | BlockSparseAttention
    | MlaAttention
    | CompressedAttention
    | LinearAttention
    | KdaAttention
    | NoAttention,
    Field(discriminator="kind"),
]


class DenseFeedForward(Part):
    """Two (plain) or three (gated) matrices of hidden_size x intermediate_size."""

    kind: Literal["dense"] = "dense"
    intermediate_size: Width
    gated: bool = True
    bias: bool = False

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size."""
        return (2 + self.gated) * hidden * self.intermediate_size

    def active_matrices(self, hidden: int) -> int:
        """Parameters that each token is multiplied with: all."""
        return self.matrices(hidden)

    def vectors(self, hidden: int) -> int:
        """Parameters of its biases."""
        return self.bias * ((1 + self.gated) * self.intermediate_size + hidden)


class MoeFeedForward(Part):
    """Experts of hidden_size x intermediate_size, of which each token visits experts_per_token.

    Experts and shared experts are gated, three matrices each, unless `gated` is false.
    """

    kind: Literal["moe"] = "moe"
    experts: Seats
    experts_per_token: Seats
    intermediate_size: Width
    shared_intermediate_size: Annotated[int, Field(ge=0, le=10**8)] = 0
    latent_size: Width | None = Field(
        None,
        description="values that experts read and write, behind two products with the hidden size; it unless given",
    )
    gated: bool = True
    bias: bool = Field(False, description="experts and router have biases")
    routing_skew: Annotated[NonNegative, Field(le=10)] = Field(
        0.0, description="Zipf exponent of how often experts are chosen; 0: all equally often"
    )
    neighbour_reuse: Annotated[NonNegative, Field(le=1)] = Field(
        0.0,
        description="probability that a token keeps the experts of the token before it in its sequence, not choosing "
        "anew; drafts that are verified together then wake fewer",
    )

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        return self

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size, the router's among them."""
        return self._matrices(hidden, self.experts)

    def active_matrices(self, hidden: int) -> int:
        """Parameters that each token is multiplied with: those of the experts it visits, the router, the shared."""
        return self._matrices(hidden, self.experts_per_token)

    def vectors(self, hidden: int) -> int:
        """Parameters of its biases."""
        return self.bias * self.experts * ((1 + self.gated) * self.intermediate_size + hidden + 1)

    def _matrices(self, hidden: int, experts: int) -> int:
        shared, products = self.shared_intermediate_size, 2 + self.gated
        outside = hidden * (self.experts + products * shared + 2 * (self.latent_size or 0))
        return outside + products * (self.latent_size or hidden) * experts * self.intermediate_size


class NoFeedForward(Part):
    """A layer that is only attention, as some of Nemotron-H are. Its feed-forward block costs nothing."""

    kind: Literal["none"] = "none"

    def matrices(self, hidden: int) -> int:
        """Return 0: there are no matrices."""
        return 0

    def active_matrices(self, hidden: int) -> int:
        """Return 0: there are no matrices."""
        return 0

    def vectors(self, hidden: int) -> int:
        """Return 0: there are no vectors."""
        return 0


FeedForward = Annotated[DenseFeedForward | MoeFeedForward | NoFeedForward, Field(discriminator="kind")]


class LayerGroup(Part):
    """`count` equal layers."""

    count: Annotated[int, Field(ge=1, le=10_000)]
    attention: Attention
    feed_forward: FeedForward
    attention_dtype: Dtype | None = Field(
        None,
        description="dtype of attention's projections in these layers, if it differs from that of the model's others",
    )

    def to_data(self) -> dict[str, Any]:
        """Plain data; what its sublayers have by default is left out, their kinds are not."""
        parts = {"attention": self.attention, "feed_forward": self.feed_forward}
        data = {key: {"kind": part.kind, **part.model_dump(exclude_defaults=True)} for key, part in parts.items()}
        dtype = {} if self.attention_dtype is None else {"attention_dtype": self.attention_dtype}
        return {"count": self.count, **data, **dtype}

    @property
    def sublayers(self) -> int:
        """Sublayers of each layer: 2 if it has attention and a feed-forward block, 1 if it has only one of them."""
        return sum(part.kind != "none" for part in (self.attention, self.feed_forward))

    def matrices(self, hidden: int) -> int:
        """Parameters of the matrices of all its layers."""
        return self.count * (self.attention.matrices(hidden) + self.feed_forward.matrices(hidden))

    def active_matrices(self, hidden: int) -> int:
        """Parameters of the matrices that each token is multiplied with."""
        return self.count * (self.attention.matrices(hidden) + self.feed_forward.active_matrices(hidden))

    def vectors(self, hidden: int) -> int:
        """Parameters beside the matrices of all its layers; the norms before its sublayers belong to the model."""
        return self.count * (self.attention.vectors(hidden) + self.feed_forward.vectors(hidden))

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.sublayers:
            raise ValueError("attention and feed_forward are both none; give the layer one of them, or leave it out")
        return self


class HyperConnections(Part):
    """Several residual streams, mixed before and after each sublayer (mHC; DeepSeek V4, GLM 5.3 Flash)."""

    kind: Literal["hyper"] = "hyper"
    streams: Annotated[int, Field(ge=2, le=64)]

    @property
    def weights(self) -> int:
        """Weights of one sublayer that each token computes: of its input, its output and the mixing."""
        return self.streams * (self.streams + 2)

    def parameters(self, hidden: int) -> int:
        """Parameters of one sublayer."""
        return self.weights * (self.streams * hidden + 1) + 3

    def values(self, hidden: int) -> int:
        """Values that one sublayer reads and writes for each token: the streams three times, its input and output."""
        return (3 * self.streams + 2) * hidden


class AttentionResiduals(Part):
    """Attention of each sublayer to the outputs of earlier blocks of layers, in place of their sum (Kimi K3)."""

    kind: Literal["attention"] = "attention"
    blocks: Annotated[int, Field(ge=1, le=10_000)]

    @property
    def weights(self) -> int:
        """Weights of one sublayer that each token computes: one for each earlier block, a product of one column."""
        return 1

    def parameters(self, hidden: int) -> int:
        """Parameters of one sublayer: a norm and the product."""
        return 2 * hidden

    def values(self, hidden: int) -> int:
        """Values that one sublayer reads and writes for each token: half of the blocks on average, and its input."""
        return (self.blocks + 1) // 2 * hidden + 2 * hidden


Residual = Annotated[HyperConnections | AttentionResiduals, Field(discriminator="kind")]

Module = Literal["attention", "dense", "shared", "experts", "head"]


class Model(Spec):
    """A decoder-only language model. Sizes are per layer and unsharded."""

    KIND: ClassVar[str] = "model"
    hf: str | None = Field(None, description="checkpoint that an engine loads, e.g. meta-llama/Llama-3.1-8B")
    source: str | None = Field(None, description="source of these sizes")
    notes: Seq[str] = Field((), description="assumptions on what a checkpoint's files leave open")
    hidden_size: Width
    vocab_size: Width
    max_position: Context = Field(description="longest context in tokens")
    tie_embeddings: bool = False
    learned_positions: Annotated[int, Field(ge=0, le=2**28)] = Field(
        0, description="rows of a table of position embeddings; 0 if positions are computed"
    )
    norms_per_sublayer: Annotated[int, Field(ge=1, le=2)] = Field(
        1, description="2 if sublayers are normed after as well as before, as in Gemma"
    )
    norm_bias: bool = Field(False, description="norms have a bias: layer norms, not RMS norms")
    residual: Residual | None = Field(None, description="how sublayers are joined, if not by one sum")
    mtp_layers: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="layers of the checkpoint that predict further tokens; not counted, and loaded only to draft"
    )
    dtype: FloatDtype = Field("bf16", description="dtype of activations, and of the KV cache unless a plan differs")
    weight_dtype: Dtype = Field(
        "bf16", description="dtype of the matrices inside the layers; fp8 and int8 quantise activations too, int4 not"
    )
    attention_dtype: Dtype | None = Field(
        None, description="dtype of attention's projections; weight_dtype unless given"
    )
    expert_dtype: Dtype | None = Field(None, description="dtype of routed experts; weight_dtype unless given")
    shared_dtype: Dtype | None = Field(None, description="dtype of shared experts; weight_dtype unless given")
    head_dtype: Dtype | None = Field(None, description="dtype of the language-model head; dtype unless given")
    kv_dtype: Dtype | None = Field(None, description="dtype of the KV cache, if the checkpoint states one")
    vision: Vision | None = Field(
        None, description="vision encoder, for loads with images and pools that encode them; none unless given"
    )
    audio: Audio | None = Field(
        None, description="audio encoder, for loads with recordings and pools that encode them; none unless given"
    )
    layers: Annotated[Seq[LayerGroup], Field(min_length=1, strict=False)]

    def to_data(self) -> dict[str, Any]:
        """Plain data as it would be written to YAML: what layers and model have by default is left out, dtypes not."""
        settings = self.model_dump(mode="json", exclude_defaults=True, exclude={"layers"})
        if self.residual is not None:
            settings["residual"] = {"kind": self.residual.kind, **settings["residual"]}
        if self.vision is not None:
            settings["vision"]["sizing"] = {"kind": self.vision.sizing.kind, **settings["vision"]["sizing"]}
        head = {"schema": self.schema_id(), **settings, "dtype": self.dtype, "weight_dtype": self.weight_dtype}
        return {**head, "layers": [group.to_data() for group in self.layers]}

    @property
    def towers(self) -> Towers:
        """Encoders of media."""
        return Towers(self.vision, self.audio)

    def dtype_of(self, module: Module) -> Dtype:
        """Return the format of the weights of a module: dense feed-forward blocks are in `weight_dtype`."""
        dtypes = {
            "attention": self.attention_dtype,
            "experts": self.expert_dtype,
            "shared": self.shared_dtype,
            "head": self.head_dtype or self.dtype,
        }
        return dtypes.get(module) or self.weight_dtype

    def of_group(self, group: LayerGroup) -> Model:
        """Return the model with the number formats of one of its groups as its own; itself if the group has none."""
        if group.attention_dtype is None:
            return self
        return self.model_copy(update={"attention_dtype": group.attention_dtype})

    @property
    def layer_dtypes(self) -> frozenset[Dtype]:
        """Formats of the matrices inside its layers."""
        of_groups = (group.attention_dtype for group in self.layers if group.attention_dtype is not None)
        modules: tuple[Module, ...] = ("dense", "attention", "shared", "experts")
        return frozenset((*map(self.dtype_of, modules), *of_groups))

    def without_feed_forward(self) -> Model:
        """Return the model with only attention in its layers."""
        layers = tuple(group.model_copy(update={"feed_forward": NoFeedForward()}) for group in self.layers)
        return self.model_copy(update={"layers": layers})

    def with_weights(self, dtype: Dtype | None) -> Model:
        """Return the model with all matrices inside its layers in a dtype, those of the head unchanged; the model
        itself for None.
        """
        if dtype is None or self.layer_dtypes == {dtype}:
            return self
        layers = tuple(group.model_copy(update={"attention_dtype": None}) for group in self.layers)
        formats = {"weight_dtype": dtype, "attention_dtype": None, "expert_dtype": None, "shared_dtype": None}
        return self.model_copy(update={**formats, "layers": layers})

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(group.count for group in self.layers)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (1 + self.norm_bias)

    @property
    def parameters(self) -> int:
        """Parameters of the language model, embeddings and head included, `mtp_layers` not."""
        hidden = self.hidden_size
        tables = self.vocab_size * (1 if self.tie_embeddings else 2) + self.learned_positions
        sublayers = sum(group.count * group.sublayers for group in self.layers)
        norms = 1 + self.norms_per_sublayer * sublayers
        layers = sum(group.matrices(hidden) + group.vectors(hidden) for group in self.layers)
        return tables * hidden + norms * self.norm_parameters + sublayers * self.residual_parameters + layers

    @property
    def residual_parameters(self) -> int:
        """Parameters of what joins one sublayer to the others; 0 for a sum."""
        return 0 if self.residual is None else self.residual.parameters(self.hidden_size)

    @property
    def active_parameters(self) -> int:
        """Parameters that each token is multiplied with: without tables of embeddings and experts it does not visit."""
        hidden = self.hidden_size
        return self.vocab_size * hidden + sum(group.active_matrices(hidden) for group in self.layers)
