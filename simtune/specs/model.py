"""Model spec: the shape of a decoder-only transformer, as far as its serving cost depends on it.

Every block counts its own parameters: `matrices`, which products read, and `vectors` beside them (biases, norms of
its own, convolutions, sinks), which are far below 1 % and kept in the dtype of activations.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simtune.specs.base import Context, Dtype, FloatDtype, NonNegative, Part, Seats, Seq, Spec, Width


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


class MlaAttention(Part):
    """Latent attention (MLA): heads share one cached vector of kv_lora_rank + qk_rope_head_dim values a token.

    Named as in the configs of DeepSeek V2 and V3. Queries pass through q_lora_rank values unless it is left out.
    With index_topk an indexer chooses the tokens that are attended to (DeepSeek V3.2, GLM 5): index_heads score one
    cached key of index_head_dim values a token, kept in 8 bits with a scale of 4 bytes.
    """

    kind: Literal["mla"] = "mla"
    heads: Width
    q_lora_rank: Width | None = None
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Width
    v_head_dim: Width
    index_topk: Context | None = Field(None, description="tokens that each token attends to at most; all unless given")
    index_heads: Width | None = None
    index_head_dim: Width | None = None

    @property
    def cached_values(self) -> int:
        """Values per token and layer in the KV cache, the same on every tensor-parallel rank."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_bytes(self) -> int:
        """Bytes per token and layer of the indexer's keys, whatever the dtype of the KV cache."""
        return 0 if self.index_head_dim is None else self.index_head_dim + 4

    @property
    def indexer(self) -> list[tuple[int, int]]:
        """(n, k) of the indexer's matrices, k 0 for the hidden size; every tensor-parallel rank has them whole."""
        heads, dim = self.index_heads, self.index_head_dim
        return [] if heads is None or dim is None else [(heads * dim, self.q_lora_rank or 0), (dim + heads, 0)]

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices in a model of this hidden size."""
        queries = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        into = queries * hidden if rank is None else rank * (hidden + queries)
        spelled_out = self.heads * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        indexer = sum(n * (k or hidden) for n, k in self.indexer)
        return into + hidden * (self.cached_values + self.heads * self.v_head_dim) + spelled_out + indexer

    def vectors(self, hidden: int) -> int:
        """Parameters of the norms of latents, and of the indexer's keys."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank + 2 * (self.index_head_dim or 0)

    @model_validator(mode="after")
    def _whole_indexer(self) -> Self:
        index_fields = [self.index_topk, self.index_heads, self.index_head_dim]
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
    FullAttention | SlidingAttention | MlaAttention | LinearAttention | NoAttention, Field(discriminator="kind")
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
        width = experts * self.intermediate_size + self.shared_intermediate_size
        return hidden * (self.experts + (2 + self.gated) * width)


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


Module = Literal["attention", "dense", "experts", "head"]


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
    head_dtype: Dtype | None = Field(None, description="dtype of the language-model head; dtype unless given")
    kv_dtype: Dtype | None = Field(None, description="dtype of the KV cache, if the checkpoint states one")
    layers: Annotated[Seq[LayerGroup], Field(min_length=1, strict=False)]

    def to_data(self) -> dict[str, Any]:
        """Plain data as it would be written to YAML: what layers and model have by default is left out, dtypes not."""
        settings = self.model_dump(mode="json", exclude_defaults=True, exclude={"layers"})
        head = {"schema": self.schema_id(), **settings, "dtype": self.dtype, "weight_dtype": self.weight_dtype}
        return {**head, "layers": [group.to_data() for group in self.layers]}

    def dtype_of(self, module: Module) -> Dtype:
        """Return the format of the weights of a module: dense feed-forward and shared experts are in `weight_dtype`."""
        dtypes = {
            "attention": self.attention_dtype,
            "experts": self.expert_dtype,
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
        return frozenset((self.weight_dtype, self.dtype_of("attention"), self.dtype_of("experts"), *of_groups))

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
        formats = {"weight_dtype": dtype, "attention_dtype": None, "expert_dtype": None}
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
        norms = 1 + self.norms_per_sublayer * sum(group.count * group.sublayers for group in self.layers)
        layers = sum(group.matrices(hidden) + group.vectors(hidden) for group in self.layers)
        return tables * hidden + norms * self.norm_parameters + layers

    @property
    def active_parameters(self) -> int:
        """Parameters that each token is multiplied with: without tables of embeddings and experts it does not visit."""
        hidden = self.hidden_size
        return self.vocab_size * hidden + sum(group.active_matrices(hidden) for group in self.layers)
