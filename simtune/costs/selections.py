"""Sparse attention of one rank: the tokens that it sees, how it reads them, and the products of its whole block.

Layers (`simtune.costs.layers`) and readers of tables describe a block by the same numbers, so that a block that was
measured is found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simtune.specs.model import BlockSparseAttention, CompressedAttention, MlaAttention

Products = Sequence[tuple[int, int]]
"""(n, k) of matrix products that every token passes through."""

_ALL = 2**30
"""More entries than any context has."""


class Selection(NamedTuple):
    """Selection of the tokens that sparse attention sees, and how it reads them, on one rank."""

    heads: int
    kv_heads: int
    width: int
    """Values that a query head computes with for each entry: scores and sums."""
    cached: int
    """Values of an entry that are read for each KV head."""
    topk: int
    window: int = 0
    ratio: int = 1
    index_heads: int = 0
    index_dim: int = 0
    index_bytes: float = 0.0
    pool: int = 1
    block: int = 1
    """Tokens whose keys share a score that is written: that of the best."""


def block_shape(selection: Selection, products: Products) -> dict[str, float]:
    """Return the shape of a whole block besides its batch, tokens and context."""
    weights, passed = sum(n * k for n, k in products), sum(n + k for n, k in products)
    return {**selection._asdict(), "weights": weights, "passed": passed}


def key_bytes(attention: CompressedAttention) -> int:
    """Return the bytes of one key of the indexer, its scale included; 0 without an indexer."""
    return 0 if attention.index_head_dim is None else attention.index_head_dim + 4


def compressed(a: CompressedAttention, heads: int) -> Selection:
    """Return the selection of compressed attention (DeepSeek V4) of `heads` heads."""
    return Selection(
        heads,
        kv_heads=1,
        width=2 * a.head_dim,
        cached=a.head_dim,
        topk=0 if a.ratio is None else a.index_topk or _ALL,
        window=a.window,
        ratio=a.ratio or 1,
        index_heads=a.index_heads or 0,
        index_dim=a.index_head_dim or 0,
        index_bytes=key_bytes(a),
        pool=a.ratio or 1,
    )


def compressed_products(a: CompressedAttention, hidden: int, heads: int, groups: int) -> list[tuple[int, int]]:
    """Return the products of compressed attention of `heads` heads in `groups` groups."""
    queries = heads * a.head_dim
    into = [(a.in_width, hidden), (queries + a.index_width, a.q_lora_rank)]
    return [*into, (a.o_lora_rank * groups, queries // groups), (hidden, groups * a.o_lora_rank)]


def block_sparse(a: BlockSparseAttention, heads: int, kv_heads: int, index_heads: int) -> Selection:
    """Return the selection of block-sparse attention (MiniMax M3) of these heads."""
    width = a.head_dim + a.value_width
    return Selection(
        heads,
        kv_heads,
        width=width,
        cached=width,
        topk=a.block * a.topk_blocks,
        index_heads=index_heads,
        index_dim=a.index_dim,
        index_bytes=2 * a.index_dim,
        block=a.block,
    )


def block_sparse_products(
    a: BlockSparseAttention, hidden: int, heads: int, kv_heads: int, index_heads: int
) -> list[tuple[int, int]]:
    """Return the products of block-sparse attention of these heads, without gates."""
    keys_and_values = kv_heads * (a.head_dim + a.value_width)
    into = (heads * a.head_dim + keys_and_values, hidden)
    return [((index_heads + 1) * a.index_dim, hidden), into, (hidden, heads * a.value_width)]


def pooled(a: MlaAttention, heads: int) -> Selection:
    """Return the selection by pooled keys of latents that `heads` heads read (GLM 5.3 Flash)."""
    assert a.index_topk is not None
    return Selection(
        heads,
        kv_heads=1,
        width=a.cached_values + a.kv_lora_rank,
        cached=a.cached_values,
        topk=a.index_topk,
        index_heads=a.index_heads or 0,
        index_dim=a.index_head_dim or 0,
        index_bytes=(a.index_head_dim or 0) + 4,
        pool=a.index_pool,
    )


def latent_products(a: MlaAttention, hidden: int, heads: int) -> list[tuple[int, int]]:
    """Return the products of latent attention of `heads` heads; the second last expands keys and values."""
    queries, outputs = heads * (a.qk_nope_head_dim + a.qk_rope_head_dim), heads * a.v_head_dim
    if a.q_lora_rank is None:
        into = [(queries, hidden), (a.cached_values, hidden)]
    else:
        into = [(a.q_lora_rank + a.cached_values, hidden), (queries, a.q_lora_rank)]
    into += [(n, k or hidden) for n, k in a.indexer]
    if a.output_gate:
        into.append((outputs, hidden))
    return [*into, (heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank), (hidden, outputs)]
