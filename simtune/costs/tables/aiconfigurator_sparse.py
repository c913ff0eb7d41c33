"""Tables of AIConfigurator of whole blocks of sparse attention: DeepSeek V4, MiniMax M3, GLM 5.3 Flash; in ms.

A block is a layer's attention from hidden states to hidden states on one rank. Rows of DeepSeek V4 count the heads of
the rank or of the model, by release; `tp_size` tells. Those of MiniMax M3 have the heads of a rank; KV and index heads
follow from them as the engines divide them: one for every 16. Those of GLM 5.3 Flash state their geometry. Rows of
single kernels (`paged_mqa_logits`, `topk`, `attn`) are parts of these blocks and belong to no operator.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from simtune.costs.operators import OPERATORS
from simtune.costs.selections import (
    block_shape,
    block_sparse,
    block_sparse_products,
    compressed,
    compressed_products,
    latent_products,
    pooled,
)
from simtune.costs.tables.common import AICONFIGURATOR, MS, Columns, FileContent, FormatReaders, Table, finish
from simtune.specs.base import Dtype
from simtune.specs.hardware import OperatorKind
from simtune.specs.model import BlockSparseAttention, CompressedAttention, MlaAttention

_DTYPES: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
}


class _Model(NamedTuple):
    """Sizes of a model of DeepSeek V4."""

    hidden: int
    heads: int
    q_rank: int
    groups: int
    topk: int


_V4 = {"Flash": _Model(4096, 64, 1024, 8, 512), "Pro": _Model(7168, 128, 1536, 16, 1024)}
_M3_HIDDEN, _M3_GROUP = 6144, 16
_M3 = BlockSparseAttention(
    heads=64, kv_heads=4, head_dim=128, qk_norm=True, index_heads=4, index_dim=128, block=128, topk_blocks=16
)


def _v4_block(model: _Model, ratio: int, heads: int) -> dict[str, float]:
    """Return the shape of a block of `heads` heads of a model, with an indexer if entries are of 4 tokens."""
    indexed = ratio == 4
    attention = CompressedAttention(
        heads=model.heads,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=model.q_rank,
        o_groups=model.groups,
        o_lora_rank=1024,
        window=128,
        ratio=ratio,
        overlapping=indexed,
        index_topk=model.topk if indexed else None,
        index_heads=64 if indexed else None,
        index_head_dim=128 if indexed else None,
    )
    groups = max(1, model.groups * heads // model.heads)
    return block_shape(compressed(attention, heads), compressed_products(attention, model.hidden, heads, groups))


def _m3_block(heads: int) -> dict[str, float]:
    """Return the shape of a block of `heads` heads of MiniMax M3."""
    of_rank = max(1, heads // _M3_GROUP)
    selection = block_sparse(_M3, heads, of_rank, of_rank)
    return block_shape(selection, block_sparse_products(_M3, _M3_HIDDEN, heads, of_rank, of_rank))


class _Calls(NamedTuple):
    """Calls of a file, a row each: the operator's kind and variant, its formats, batch, new tokens, context and block;
    None for rows of no operator."""

    kind: OperatorKind
    variant: str
    dtypes: tuple[str, str]
    software: str | None
    sizes: tuple[float, float, float]
    block: tuple[float, ...]


def _content(columns: Columns, calls: list[_Calls | None], why: str) -> FileContent:
    """Return one table per operator; rows of none are counted under `why`."""
    columns.require("latency")
    seconds, content = columns.numbers("latency") * MS, FileContent()
    content.skip(sum(call is None for call in calls), why)
    members: dict[tuple[OperatorKind, str, tuple[str, str], str | None], list[int]] = {}
    for row, call in enumerate(calls):
        if call is not None:
            members.setdefault(call[:4], []).append(row)
    for (kind, variant, dtypes, software), rows in members.items():
        if not all(dtype in _DTYPES for dtype in dtypes):
            content.skip(len(rows), f"gemm_type {dtypes[0]}, kv_cache_dtype {dtypes[1]}")
            continue
        chosen = [call for call in (calls[row] for row in rows) if call is not None]
        sizes, block = np.array([call.sizes for call in chosen]).T, np.array([call.block for call in chosen]).T
        by_name = dict(zip(("batch", "tokens", "context"), sizes, strict=True))
        by_name |= dict(zip(_BLOCK, block, strict=True))
        table = Table(
            kind=kind,
            dtype=_DTYPES[dtypes[0]],
            kv_dtype=_DTYPES[dtypes[1]],
            variant=variant,
            shape={name: by_name[name] for name in OPERATORS[kind].shape},
            seconds=seconds[rows],
            origin=AICONFIGURATOR,
            files=(columns.file,),
            device=columns.device(),
            software=software,
        )
        content.tables.append(finish(table))
    return content


_BLOCK = OPERATORS["sparse_decode_block"].shape[2:]


def _of(block: dict[str, float]) -> tuple[float, ...]:
    return tuple(float(block[name]) for name in _BLOCK)


_KINDS: dict[str, OperatorKind] = {"context": "sparse_context_block", "generation": "sparse_decode_block"}


def modules(columns: Columns) -> FileContent:
    """Read blocks of DeepSeek V4 and of MiniMax M3, by the names of their operators."""
    new, step, batch = (columns.numbers(name) for name in ("isl", "step", "batch_size"))
    heads, ranks = columns.numbers("num_heads"), columns.numbers("tp_size")
    texts = zip(*(columns.text(name) for name in ("op_name", "model", "gemm_type", "kv_cache_dtype")), strict=True)
    software = " ".join(x for x in (columns.only("framework"), columns.only("version")) if x) or None
    calls: list[_Calls | None] = []
    for row, (operation, model, weights, cache) in enumerate(texts):
        layer, _, phase = operation.removeprefix("dsv4_").partition("_")
        kind = _KINDS.get(phase.removesuffix("_module"))
        block = _block_of(layer, model, int(heads[row]), int(ranks[row])) if kind is not None else None
        sizes = (batch[row], new[row], new[row] + step[row])
        calls.append(
            None if kind is None or block is None else _Calls(kind, layer, (weights, cache), software, sizes, block)
        )
    return _content(columns, calls, "unknown op_name or model, or a single kernel of a block")


def _block_of(layer: str, model: str, heads: int, ranks: int) -> tuple[float, ...] | None:
    """Return the block of a row; None if the layer or the model is unknown."""
    if layer == "msa":
        return _of(_m3_block(heads)) if "MiniMax-M3" in model else None
    size = next((size for name, size in _V4.items() if f"V4-{name}" in model), None)
    if size is None or layer not in ("csa", "hca"):
        return None
    # as many heads as the model has are those of all ranks
    of_rank = heads // ranks if heads == size.heads else heads
    return _of(_v4_block(size, 4 if layer == "csa" else 128, of_rank))


def _pooled(columns: Columns) -> FileContent:
    """Read blocks of GLM 5.3 Flash, whose rows state their geometry; decodes count their context, prompts their new
    tokens."""
    engines = [text.partition("|")[0].partition(".")[0].rstrip("0123456789") for text in columns.text("kernel_source")]
    releases = [text.partition("|")[0] for text in columns.text("kernel_source")]
    geometries: dict[str, Any] = {text: json.loads(text) for text in set(columns.text("geometry"))}
    batch, past, x = (columns.numbers(name) for name in ("batch_size", "prefix", "x"))
    calls: list[_Calls | None] = []
    for row, text in enumerate(columns.text("geometry")):
        g = geometries[text]
        if g.get("layer_kind") != "sparse_mla":
            calls.append(None)
            continue
        prompt = bool(g["is_context"])
        sizes = (batch[row], x[row] if prompt else 1.0, past[row] + x[row])
        kind = _KINDS["context" if prompt else "generation"]
        dtypes = (g["projection_quant_mode"], g["kv_cache_dtype"])
        engine = engines[row]
        software = f"{engine} {releases[row].removeprefix(engine)}"
        calls.append(_Calls(kind, "pooled", dtypes, software, sizes, _of(_pooled_block(g))))
    return _content(columns, calls, "another kind of layer")


def _pooled_block(g: dict[str, Any]) -> dict[str, float]:
    attention = MlaAttention(
        heads=g["num_heads"] * g["tp_size"],
        q_lora_rank=g["q_lora_rank"],
        kv_lora_rank=g["kv_lora_rank"],
        qk_nope_head_dim=g["head_dim"],
        qk_rope_head_dim=0,
        v_head_dim=g["value_head_dim"],
        index_topk=g["index_topk"],
        index_heads=g["index_n_heads"],
        index_head_dim=g["index_head_dim"],
        index_pool=g["index_pool"],
    )
    heads = g["num_heads"]
    return block_shape(pooled(attention, heads), latent_products(attention, g["hidden_size"], heads))


FORMATS: FormatReaders = {
    ("mla_dtype", "gemm_type", "compress_ratio"): modules,
    ("geometry", "kv_seed_regime"): _pooled,
}
