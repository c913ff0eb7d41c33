"""Parts of attention layers of each kind on one tensor-parallel rank.

A layer names its matrix products, its small operations, the bytes it stores per token and per sequence, and the
memory of a rank (`simtune.costs.memory`). A new attention kind is its spec in `simtune.specs.model`, a class here and
a line in `ATTENTION_LAYERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.operators.attention import unsplit
from simtune.costs.predict import Predictor, Profile
from simtune.costs.selections import (
    Selection,
    block_shape,
    block_sparse,
    compressed,
    compressed_products,
    key_bytes,
    latent_products,
    pooled,
)
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES, Dtype
from simtune.specs.hardware import OperatorKind
from simtune.specs.model import (
    Attention,
    BlockSparseAttention,
    CompressedAttention,
    FullAttention,
    KdaAttention,
    LinearAttention,
    MlaAttention,
    Model,
    NoAttention,
    SlidingAttention,
)
from simtune.specs.research import KvPolicy


class AttentionCosts(NamedTuple):
    """Seconds of the attention of one layer, without its products, and without small operations unless it includes
    them."""

    decode: Callable[[int | Array, Array, int], Array]
    """Seconds by numbers of sequences, their mean context and the query tokens of each: 1, or a draft's width."""
    prefill: Callable[[Array], Array]
    """Seconds by lengths of whole prompts, less the overhead of a call."""
    overhead_s: float
    """Seconds of a call for the prefill chunks of a step, however short and many."""
    past: Callable[[Array], Array]
    """Seconds by cached tokens, of the work that a chunk has to repeat for them before it attends to them."""
    mixed: Callable[[int | Array, Array, int], Array] | None = None
    """Seconds by numbers of decodes, their mean context and the tokens of the prefill chunk in whose kernel they run;
    None if that was not measured: then decodes are taken to cost the same as alone."""
    imbalance_s: Callable[[Array, bool], Array] = lambda num_decodes, with_chunks: np.zeros(num_decodes.shape)
    """Seconds for each token by which the longest context exceeds the mean; in a kernel with a prefill chunk or
    alone."""
    launch_s: float = 0.0
    """Host seconds of launching the kernels of a prefill chunk, which no step with prompts beats; 0 if not measured."""
    includes: frozenset[str] = frozenset()
    """Variants of small operations that these times include, if the layer was measured as a whole block."""
    products: Callable[[Array], Array] | None = None
    """Seconds by all tokens of a step of the products that are left out here, if the layer was measured as a whole
    block; None if they are those of the layer."""
    among: Callable[[Array], Array] = lambda tokens: np.full(tokens.shape, np.inf)
    """`prefill` of each of as many equal prompts in one call as fill the device together; infinite for lengths of which
    one prompt fills it."""


def under_policy(costs: AttentionCosts, policy: KvPolicy | None, kv_dtype: str) -> AttentionCosts:
    """Return the costs if a policy keeps a part of the keys and values: decodes read less, prompts leave attention out.

    Decode attention is that of a context as much shorter, in bytes. The cost of the policy itself is not counted.
    """
    if policy is None:
        return costs
    read, computed, mixed = policy.read(kv_dtype), 1 - policy.prefill_sparsity, costs.mixed

    def shorter(context: Array) -> Array:
        return np.maximum(1.0, read * context)

    return costs._replace(
        decode=lambda batch, context, width: costs.decode(batch, shorter(context), width),
        prefill=lambda tokens: computed * costs.prefill(tokens),
        among=lambda tokens: computed * costs.among(tokens),
        mixed=None if mixed is None else lambda batch, context, chunk: mixed(batch, shorter(context), chunk),
        imbalance_s=lambda num_decodes, with_chunks: read * costs.imbalance_s(num_decodes, with_chunks),
    )


class AttentionLayer(ABC):
    """Attention layer on one tensor-parallel rank."""

    @property
    @abstractmethod
    def products(self) -> list[tuple[int, int]]:
        """(n, k) of the matrix products that all tokens of a step pass through; n k weights each."""

    @property
    @abstractmethod
    def small(self) -> list[tuple[str, int]]:
        """Elementwise operations: (variant, values read or written per token)."""

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Values per token that go into the last product."""

    @property
    def written_width(self) -> int:
        """Values per token that writing its keys and values to the cache reads and writes; 0 if nothing is written
        apart."""
        return 0

    @property
    def query_width(self) -> int:
        """Values per token of queries that are read in 8 bits beside a cache of 8 bits; 0 if none are."""
        return 0

    @property
    def norm_sums(self) -> int:
        """Sums of squares per token that ranks add up, by an all-reduce of its own, before queries and keys are
        normed; 0 if norms are within heads."""
        return 0

    @property
    def values_per_token(self) -> float:
        """Values each token leaves in the KV cache."""
        return 0

    @property
    def index_bytes(self) -> float:
        """Bytes each token stores besides, whatever the dtype of the cache."""
        return 0

    @property
    def window(self) -> int | None:
        """Tokens after which the cache need not grow; None if it always grows."""
        return None

    def state_bytes(self, dtype: str) -> float:
        """Bytes each sequence needs however long it is."""
        return 0.0

    @abstractmethod
    def costs(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        """Return the layer's times on a device. Raises Infeasible if the profile cannot predict them."""


class _Softmax(AttentionLayer):
    def __init__(self, model: Model, attention: FullAttention, tp: int) -> None:
        self._hidden = model.hidden_size
        self._heads, self._head_dim = attention.heads // tp, attention.head_dim
        # KV heads are repeated if there are fewer of them than ranks.
        self._kv_heads = max(1, attention.kv_heads // tp)
        self._v_dim = attention.value_width
        self._gate = self._heads * (attention.output_gate * self._v_dim + attention.head_gate)
        self._values = 0 if attention.values_from_keys else self._kv_heads * self._v_dim
        self._norm, self._q_rank = attention.qk_norm, attention.q_lora_rank
        self._over_ranks = attention.qk_norm and attention.wide_qk_norm and tp > 1
        self._window = attention.window if isinstance(attention, SlidingAttention) else None

    @property
    def products(self) -> list[tuple[int, int]]:
        q, out = self._heads * self._head_dim, (self._hidden, self.output_width)
        beside = self._kv_heads * self._head_dim + self._values + self._gate
        if self._q_rank is not None:
            return [(self._q_rank + beside, self._hidden), (q, self._q_rank), out]
        return [(q + beside, self._hidden), out]

    @property
    def small(self) -> list[tuple[str, int]]:
        rotated = 2 * (self._heads + self._kv_heads) * self._head_dim
        small = [("rope", rotated)]
        if self._norm:
            small.append(("norm", rotated))
        if self._q_rank is not None:
            small.append(("norm", 2 * self._q_rank))
        if self._gate:
            small.append(("activation", 3 * self.output_width))
        return small

    @property
    def written_width(self) -> int:
        return 2 * (self._kv_heads * self._head_dim + self._values)

    @property
    def norm_sums(self) -> int:
        # One for queries and one for keys, in one message: MiniMaxText01RMSNormTP.forward_qk in
        # vllm/model_executor/layers/mamba/linear_attn.py.
        return 2 if self._over_ranks else 0

    @property
    def output_width(self) -> int:
        return self._heads * self._v_dim

    @property
    def query_width(self) -> int:
        return self._heads * self._head_dim

    @property
    def values_per_token(self) -> int:
        return self._kv_heads * (self._head_dim + self._v_dim)

    @property
    def window(self) -> int | None:
        return self._window

    def costs(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        decode = profile.predictor("decode_attention", dtype, kv_dtype=kv_dtype)
        prefill = profile.predictor("prefill_attention", dtype, kv_dtype=kv_dtype)
        # Scores over head_dim and sums over v_dim are as much work, and as many bytes, as both over their mean.
        head_dim = (self._head_dim + self._v_dim) / 2
        shape = {"heads": self._heads, "kv_heads": self._kv_heads, "head_dim": head_dim}

        def window(context: Array) -> Array | int:
            return context if self._window is None else self._window

        def decode_s(batch: int | Array, context: Array, width: int) -> Array:
            call: dict[str, Any] = {"batch": batch, "context": context, "window": window(context), **shape}
            if width == 1:
                return decode.seconds(**call)
            # Decode kernels were measured, wider ones hardly ever: only the growth with the width is taken from the
            # wider kernels, so that two tokens never take less than one.
            tree = profile.predictor("tree_attention", dtype, kv_dtype=kv_dtype)
            wider: Array = tree.seconds(width=width, **call) / tree.seconds(width=1, **call)
            return decode.seconds(**call) * wider

        def prompts_s(number: Array | int, tokens: Array) -> Array:
            # Less the overhead, which belongs to a call: a prompt may be cut into several chunks.
            seconds = prefill.seconds(batch=number, tokens=tokens, context=tokens, window=window(tokens), **shape)
            return seconds - prefill.overhead_s

        mixed, mixed_s = None, None
        if profile.measured("mixed_attention", dtype, kv_dtype):
            mixed = profile.predictor("mixed_attention", dtype, kv_dtype=kv_dtype)

            def mixed_s(batch: int | Array, context: Array, tokens: int) -> Array:
                return mixed.seconds(batch=batch, tokens=tokens, context=context, window=window(context), **shape)

        def imbalance_s(num_decodes: Array, with_chunks: bool) -> Array:
            if self._window is not None:
                return np.zeros(num_decodes.shape)
            if with_chunks and mixed is not None:
                return np.full(num_decodes.shape, mixed.operator.uneven_s or 0.0)
            # Once pairs of sequence and KV head fill the processors, kernels stop splitting contexts, and the longest
            # one holds up the step.
            in_one_piece = unsplit(num_decodes * self._kv_heads, profile.processors)
            return np.where(in_one_piece, decode.operator.uneven_s or 0.0, 0.0)

        among, alone = _filling(prompts_s, _by_tiles(self._heads, profile.processors)), partial(prompts_s, 1)
        return AttentionCosts(decode_s, alone, prefill.overhead_s, np.zeros_like, mixed_s, imbalance_s, among=among)


_FULL_TILES = 4
"""Tiles of 128 rows for each processor in a call whose prompts fill the device."""
_FULL_HEADS = 2
"""Heads with a state for each processor in such a call."""
_MOST_PROMPTS = 256
"""Prompts of such a call at most, as in published tables."""


def _filling(
    prompts_s: Callable[[Array, Array], Array], filled_by: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    """Return `AttentionCosts.among`.

    Few heads of a short prompt leave most processors idle: several prompts take as long as one alone. `prompts_s` are
    the seconds of calls of a number of prompts, less the overhead; `filled_by` the number that fills the device.
    """

    def each_s(tokens: Array) -> Array:
        number = np.clip(filled_by(np.maximum(tokens, 1.0)), 1.0, _MOST_PROMPTS)
        # Tables have powers of two, and products of other numbers of rows may fill tiles worse.
        number = 2 ** np.ceil(np.log2(number))
        seconds = np.where(tokens > 0, prompts_s(number, tokens) / number, 0.0)
        return np.where(number > 1, np.maximum(seconds, 0.0), np.inf)

    return each_s


def _by_tiles(heads: int, processors: int) -> Callable[[Array], Array]:
    """Return a function: prompts that fill the device with tiles of their tokens and heads, by their tokens."""
    return lambda tokens: _FULL_TILES * 128 * processors / (heads * tokens)


def _costs_of_selection(
    selection: Selection, profile: Profile, dtype: str, kv_dtype: str, block: _Block | None = None
) -> AttentionCosts:
    """Return the times of a whole block if the profile has tables of it, else of attention alone, by bytes and flops
    unless it has tables of that."""
    if block is not None and all(
        profile.measured(kind, block.dtype, kv_dtype, block.variant) for kind in _SPARSE_BLOCK
    ):
        context, decode = (
            profile.predictor(kind, block.dtype, kv_dtype=kv_dtype, variant=block.variant) for kind in _SPARSE_BLOCK
        )
        products = _products_of_blocks(profile.predictor("gemm", block.dtype), block.products)
        shape_of_block = block_shape(selection, block.products)
        includes = _BLOCK | {"compress"}
        return _costs_of_blocks(context, decode, shape_of_block, includes, products, profile.processors)
    prefill = profile.predictor("sparse_prefill", dtype, kv_dtype=kv_dtype)
    decode = profile.predictor("sparse_decode", dtype, kv_dtype=kv_dtype)
    shape: dict[str, Any] = selection._asdict()

    def decode_s(batch: int | Array, context: Array, width: int) -> Array:
        # All query tokens of a sequence are taken to read the same entries: they are as many more heads.
        queries = {"heads": selection.heads * width, "index_heads": selection.index_heads * width}
        return decode.seconds(batch=batch, context=context, **(shape | queries))

    def prompts_s(number: Array | int, tokens: Array) -> Array:
        return prefill.seconds(batch=number, tokens=tokens, **shape) - prefill.overhead_s

    among = _filling(prompts_s, _by_tiles(selection.heads, profile.processors))
    return AttentionCosts(decode_s, partial(prompts_s, 1), prefill.overhead_s, np.zeros_like, among=among)


class _Block(NamedTuple):
    """Whole block of sparse attention, as it may have been measured: a name, the format of its products, and these."""

    variant: str
    dtype: Dtype
    products: Sequence[tuple[int, int]]


def _costs_of_blocks(
    context_block: Predictor,
    decode_block: Predictor,
    shape: Mapping[str, Any],
    includes: frozenset[str],
    gemm_s: Callable[[Array], Array],
    processors: int,
    past: Callable[[Array], Array] = np.zeros_like,
) -> AttentionCosts:
    """Return the costs of whole blocks of one shape, besides their batch, tokens and context.

    All tokens of a step pass through the products at once, whichever sequences they are of: `gemm_s` by their number,
    at most nine tenths of a block's time, are taken out of the blocks.
    """

    def block_s(number: Array | int, tokens: Array) -> Array:
        return context_block.seconds(batch=number, tokens=tokens, context=tokens, **shape)

    def products_s(rows: Array) -> Array:
        rows = np.maximum(np.asarray(rows, dtype=np.float64), 1)
        shortest = np.minimum(block_s(1, rows), decode_block.seconds(batch=rows, context=1, **shape))
        seconds: Array = np.minimum(gemm_s(rows), _MOST_PRODUCTS * shortest)
        return seconds

    def decode_s(batch: int | Array, context: Array, width: int) -> Array:
        seconds = decode_block.seconds(batch=batch, context=context, **shape)
        if width > 1:
            # Only the growth with the width is taken from blocks of several tokens.
            several = {"batch": batch, "context": np.maximum(context, width), **shape}
            wider = context_block.seconds(tokens=width, **several) / context_block.seconds(tokens=1, **several)
            seconds = seconds * np.maximum(wider, 1.0)
        return np.maximum(seconds - products_s(np.asarray(batch) * width), 0.0)

    # What the shortest prompt takes besides the products is the overhead of a call.
    single = np.ones(1)
    call_s = float((block_s(1, single) - products_s(single))[0])

    def prompts_s(number: Array | int, tokens: Array) -> Array:
        at_least_one = np.maximum(tokens, 1)
        seconds = block_s(number, at_least_one) - products_s(number * at_least_one) - call_s
        return np.where(tokens > 0, np.maximum(seconds, 0.0), 0.0)

    among, launch_s = _filling(prompts_s, _by_tiles(shape["heads"], processors)), context_block.operator.launch_s or 0.0
    kernels = AttentionCosts(decode_s, partial(prompts_s, 1), call_s, past, among=among)
    return kernels._replace(launch_s=launch_s, includes=includes, products=products_s)


_MOST_PRODUCTS = 0.9
"""Share of the time of a measured block that its products are taken to have at most: those of the profile were measured
apart, and may be slower than those inside the block."""


def _products_of_blocks(gemm: Predictor, products: Sequence[tuple[int, int]]) -> Callable[[Array], Array]:
    """Return a function: seconds of all products by the number of rows."""

    def seconds(rows: Array) -> Array:
        total: Array = np.sum([gemm.seconds(m=rows, n=n, k=k) for n, k in products], axis=0)
        return total

    return seconds


class _BlockSparse(_Softmax):
    def __init__(self, model: Model, attention: BlockSparseAttention, tp: int) -> None:
        super().__init__(model, attention, tp)
        self._index, self._weight_dtype = attention, model.dtype_of("attention")
        self._index_heads = max(1, attention.index_heads // tp)

    @property
    def products(self) -> list[tuple[int, int]]:
        indexer = ((self._index_heads + 1) * self._index.index_dim, self._hidden)
        return [indexer, *super().products]

    @property
    def index_bytes(self) -> float:
        return 2 * self._index.index_dim

    def costs(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        selection = block_sparse(self._index, self._heads, self._kv_heads, self._index_heads)
        block = _Block("msa", self._weight_dtype, self.products)
        return _costs_of_selection(selection, profile, dtype, kv_dtype, block)


class _Compressed(AttentionLayer):
    """Not divided between ranks: the products into latents and entries, the indexer, and the cache."""

    def __init__(self, model: Model, attention: CompressedAttention, tp: int) -> None:
        self._hidden, self._attention = model.hidden_size, attention
        self._heads, self._groups = attention.heads // tp, max(1, attention.o_groups // tp)
        self._weight_dtype = model.dtype_of("attention")

    @property
    def products(self) -> list[tuple[int, int]]:
        return compressed_products(self._attention, self._hidden, self._heads, self._groups)

    @property
    def small(self) -> list[tuple[str, int]]:
        a = self._attention
        normed = 2 * (a.q_lora_rank + (self._heads + 1) * a.head_dim)
        return [("norm", normed), ("rope", 4 * (self._heads + 1) * a.rope_dim), ("compress", 2 * a.compressor)]

    @property
    def output_width(self) -> int:
        return self._groups * self._attention.o_lora_rank

    @property
    def _entry_bytes(self) -> int:
        return 2 * self._attention.rope_dim + _ENTRY_SCALE_BYTES

    @property
    def values_per_token(self) -> float:
        a = self._attention
        return 0 if a.ratio is None else (a.head_dim - a.rope_dim) / a.ratio

    @property
    def index_bytes(self) -> float:
        a = self._attention
        return 0 if a.ratio is None else (self._entry_bytes + key_bytes(a)) / a.ratio

    def state_bytes(self, dtype: str) -> float:
        """Bytes of the window in 8 bits, and of the tokens that the next entry is made of, in 32."""
        a = self._attention
        window = a.window * (a.head_dim - a.rope_dim + self._entry_bytes)
        return window + (a.ratio or 0) * (1 + a.overlapping) * 4 * a.compressor

    def costs(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        selection = compressed(self._attention, self._heads)
        variant = _COMPRESSED.get((self._attention.ratio is None, self._attention.index_topk is None))
        block = None if variant is None else _Block(variant, self._weight_dtype, self.products)
        return _costs_of_selection(selection, profile, dtype, kv_dtype, block)


_COMPRESSED = {(False, False): "csa", (False, True): "hca"}
"""Names of compressed attention, by a window alone and by the absence of an indexer; a window alone has no table."""

_ENTRY_SCALE_BYTES = 8
"""Bytes of the scales of one vector in 8 bits (vLLM 0.33, models/deepseek_v4/attention.py: 448 + 128 + 8 bytes)."""
_BLOCK = frozenset({"norm", "rope"})
"""Small operations that measured whole blocks of latent attention include."""


class _Mla(AttentionLayer):
    """Prefill expands keys and values for every head; decode works on the latents (absorbed).

    Either way the product is the same, and counted once over all tokens. Not divided between ranks: the products into
    the latents, and the cache.
    """

    def __init__(self, model: Model, attention: MlaAttention, tp: int) -> None:
        self._hidden, self._attention, self._heads = model.hidden_size, attention, attention.heads // tp
        self._weight_dtype = model.dtype_of("attention")

    @property
    def products(self) -> list[tuple[int, int]]:
        return latent_products(self._attention, self._hidden, self._heads)

    @property
    def small(self) -> list[tuple[str, int]]:
        a = self._attention
        small = [("norm", 2 * ((a.q_lora_rank or 0) + a.kv_lora_rank))]
        if a.qk_rope_head_dim:
            small.append(("rope", 2 * (self._heads + 1) * a.qk_rope_head_dim))
        if a.output_gate:
            small.append(("activation", 3 * self.output_width))
        return small

    @property
    def output_width(self) -> int:
        return self._heads * self._attention.v_head_dim

    @property
    def values_per_token(self) -> int:
        return self._attention.cached_values

    @property
    def index_bytes(self) -> float:
        return self._attention.index_bytes

    def costs(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        """Return costs of whole blocks if the profile has measured them, or attention is sparse; else of their
        kernels."""
        kinds = _SPARSE if self._attention.index_topk is not None else _DENSE
        if self._attention.index_pool > 1:
            block = _Block("pooled", self._weight_dtype, self.products)
            return _costs_of_selection(pooled(self._attention, self._heads), profile, dtype, kv_dtype, block)
        if self._attention.output_gate and kinds is _DENSE:  # measured blocks have none
            return self._costs_of_kernels(profile, dtype, kv_dtype)
        measured = all(profile.measured(kind, self._weight_dtype, kv_dtype) for kind in kinds)
        if self._attention.q_lora_rank is not None and (measured or kinds is _SPARSE):
            context, decode = (profile.predictor(kind, self._weight_dtype, kv_dtype=kv_dtype) for kind in kinds)
            # Sparse attention works on the latents, and expands none of the past.
            past = np.zeros_like if kinds is _SPARSE else self._spelling_out(profile)
            products = _products_of_blocks(profile.predictor("gemm", self._weight_dtype), self.products)
            shape = self._block_shape
            return _costs_of_blocks(context, decode, shape, _BLOCK, products, profile.processors, past)
        return self._costs_of_kernels(profile, dtype, kv_dtype)

    def _spelling_out(self, profile: Profile) -> Callable[[Array], Array]:
        """Return a function: seconds of expanding the keys and values of a number of cached tokens."""
        gemm = profile.predictor("gemm", self._weight_dtype)
        *_, (n, k), _ = self.products
        return lambda tokens: np.where(tokens > 0, gemm.seconds(m=np.maximum(tokens, 1), n=n, k=k), 0.0)

    @property
    def _block_shape(self) -> dict[str, Any]:
        """Return the shape of a whole block besides its batch, tokens and context."""
        a = self._attention
        shape: dict[str, Any] = {
            "heads": self._heads,
            "hidden": self._hidden,
            "q_rank": a.q_lora_rank,
            "latent": a.kv_lora_rank,
            "rope": a.qk_rope_head_dim,
            "nope": a.qk_nope_head_dim,
            "v_dim": a.v_head_dim,
        }
        if a.index_topk is not None:
            # a layer that reuses another's choice has no index heads; the width of none is that of the usual ones
            shape |= {"index_heads": a.index_heads or 0, "index_dim": a.index_head_dim or 128, "topk": a.index_topk}
        return shape

    def _costs_of_kernels(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        a, heads = self._attention, self._heads
        if a.index_topk is not None:
            raise Infeasible(
                "sparse attention (index_topk) without q_lora_rank: its memory is modelled, its times are not"
            )
        decode = profile.predictor("mla_decode", dtype, kv_dtype=kv_dtype)
        prefill = profile.predictor("mla_prefill", dtype, kv_dtype=kv_dtype)

        def decode_s(batch: int | Array, context: Array, width: int) -> Array:
            # All heads of all query tokens read the same cache: a draft of `width` tokens is `width` times as many
            # heads.
            call = {"heads": heads * width, "latent": a.kv_lora_rank, "rope": a.qk_rope_head_dim}
            return decode.seconds(batch=batch, context=context, **call)

        def prompts_s(number: Array | int, tokens: Array) -> Array:
            qk_dim = a.qk_nope_head_dim + a.qk_rope_head_dim
            seconds = prefill.seconds(batch=number, tokens=tokens, heads=heads, qk_dim=qk_dim, v_dim=a.v_head_dim)
            return seconds - prefill.overhead_s

        among = _filling(prompts_s, _by_tiles(heads, profile.processors))
        past = self._spelling_out(profile)
        return AttentionCosts(decode_s, partial(prompts_s, 1), prefill.overhead_s, past, among=among)


_SPARSE_BLOCK: tuple[OperatorKind, OperatorKind] = ("sparse_context_block", "sparse_decode_block")
_DENSE: tuple[OperatorKind, OperatorKind] = ("mla_context_block", "mla_decode_block")
_SPARSE: tuple[OperatorKind, OperatorKind] = ("dsa_context_block", "dsa_decode_block")


class _Linear(AttentionLayer):
    def __init__(self, model: Model, attention: LinearAttention, tp: int) -> None:
        self._hidden = model.hidden_size
        self._rank = attention.model_copy(
            update={"heads": attention.heads // tp, "key_heads": max(1, attention.key_heads // tp)}
        )

    @property
    def products(self) -> list[tuple[int, int]]:
        return [(self._rank.in_width, self._hidden), (self._hidden, self.output_width)]

    @property
    def small(self) -> list[tuple[str, int]]:
        # The convolution reads as many inputs as it is wide and writes one; the norm is gated.
        return [("conv", self._rank.conv_channels * (self._rank.conv_width + 1)), ("norm", 3 * self.output_width)]

    @property
    def output_width(self) -> int:
        return self._rank.heads * self._rank.value_dim

    def state_bytes(self, dtype: str) -> float:
        a = self._rank
        states = DTYPE_BYTES[a.state_dtype] * a.heads * a.key_dim * a.value_dim
        return states + DTYPE_BYTES[dtype] * a.conv_channels * (a.conv_width - 1)

    def kinds(self, profile: Profile, dtype: str) -> tuple[tuple[OperatorKind, OperatorKind], dict[str, Any]]:
        """Return the operators of a gated delta net if they were measured, else of linear attention, and their
        shapes."""
        a = self._rank
        shape: dict[str, Any] = {"heads": a.heads, "key_dim": a.key_dim, "value_dim": a.value_dim}
        if a.gates == 2 and all(profile.measured(kind, dtype, a.state_dtype) for kind in _DELTA):
            return _DELTA, shape | {"key_heads": a.key_heads}
        return ("linear_prefill", "linear_decode"), shape

    def costs(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        """Return costs of a gated delta net and of the convolution before it if measured; else of linear attention."""
        a, (kinds, shape) = self._rank, self.kinds(profile, dtype)
        prefill, decode = (profile.predictor(kind, dtype, kv_dtype=a.state_dtype) for kind in kinds)
        convolved = all(profile.measured(kind, dtype, dtype) for kind in _CONVOLUTION)
        before, before_one = (profile.predictor(k, dtype) for k in _CONVOLUTION) if convolved else (None, None)
        conv = {"channels": a.conv_channels, "width": a.conv_width}

        def several(batch: int | Array, tokens: Array | int) -> Array:
            seconds = prefill.seconds(batch=batch, tokens=np.maximum(tokens, 1), **shape)
            return seconds if before is None else seconds + before.seconds(batch=batch, tokens=tokens, **conv)

        # Every chunk loads and stores the state.
        shortest_s = float(several(1, 1))

        def decode_s(batch: int | Array, context: Array, width: int) -> Array:
            if width > 1:
                return np.broadcast_to(several(batch, width), context.shape)
            seconds = decode.seconds(batch=batch, **shape)
            seconds = seconds if before_one is None else seconds + before_one.seconds(batch=batch, **conv)
            return np.broadcast_to(seconds, context.shape)

        def prompts_s(number: Array | int, tokens: Array) -> Array:
            return np.maximum(several(number, np.maximum(tokens, 1)) - shortest_s, 0.0)

        return AttentionCosts(
            decode_s,
            partial(prompts_s, 1),
            shortest_s,
            np.zeros_like,
            includes=frozenset({"conv"}) if convolved else frozenset(),
            # However long a prompt is, each of its heads goes through it alone.
            among=_filling(
                prompts_s,
                lambda tokens: np.full_like(tokens, _FULL_HEADS * profile.processors / a.heads),
            ),
        )


class _Kda(_Linear):
    def __init__(self, model: Model, attention: KdaAttention, tp: int) -> None:
        super().__init__(model, attention, tp)
        self._spec = attention.model_copy(update={"heads": attention.heads // tp, "key_heads": attention.heads // tp})

    @property
    def products(self) -> list[tuple[int, int]]:
        into, out = super().products
        return [into, *self._spec.widened, out]

    def kinds(self, profile: Profile, dtype: str) -> tuple[tuple[OperatorKind, OperatorKind], dict[str, Any]]:
        """Return the operators of the delta rule by channel, and their shapes."""
        a = self._spec
        return ("kda_prefill", "kda_decode"), {"heads": a.heads, "key_dim": a.key_dim, "value_dim": a.value_dim}


_DELTA: tuple[OperatorKind, OperatorKind] = ("delta_prefill", "delta_decode")
_CONVOLUTION: tuple[OperatorKind, OperatorKind] = ("conv_prefill", "conv_decode")


class _None(AttentionLayer):
    def __init__(self, model: Model, attention: NoAttention, tp: int) -> None:
        pass

    @property
    def products(self) -> list[tuple[int, int]]:
        return []

    @property
    def small(self) -> list[tuple[str, int]]:
        return []

    @property
    def output_width(self) -> int:
        return 0

    def costs(self, profile: Profile, dtype: str, kv_dtype: str) -> AttentionCosts:
        return AttentionCosts(lambda batch, context, width: np.zeros_like(context), np.zeros_like, 0.0, np.zeros_like)


ATTENTION_LAYERS: dict[type[Any], Callable[[Model, Any, int], AttentionLayer]] = {
    FullAttention: _Softmax,
    SlidingAttention: _Softmax,
    BlockSparseAttention: _BlockSparse,
    MlaAttention: _Mla,
    CompressedAttention: _Compressed,
    LinearAttention: _Linear,
    KdaAttention: _Kda,
    NoAttention: _None,
}


def attention_layer(model: Model, attention: Attention, tp: int) -> AttentionLayer:
    """Return one layer of a model's attention on one of tp ranks."""
    return ATTENTION_LAYERS[type(attention)](model, attention, tp)
