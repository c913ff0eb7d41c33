"""Tables of AIConfigurator of all kinds of attention: softmax, encoders, latent and sparse blocks, linear layers.

Times are in ms. Blocks ("modules") are whole: from hidden states to hidden states, projections included, of `num_heads`
heads of one rank; `gemm_type` is the format of their weights. A block names its model; sizes that its table does not
contain are those of the model's config.json. A row of an unknown model belongs to no operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Mask
from simtune.costs.tables import aiconfigurator_sparse
from simtune.costs.tables.common import AICONFIGURATOR, MS, Columns, FileContent, FormatReaders, Table, finish, take
from simtune.specs.base import Dtype
from simtune.specs.hardware import OperatorKind

DTYPES: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "float16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
}
"""The two 16-bit formats run at the same speed, see `simtune.costs.predict`."""

_DEEPSEEK = {"hidden": 7168.0, "q_rank": 1536.0, "latent": 512.0, "rope": 64.0, "nope": 128.0, "v_dim": 128.0}
_GLM = {"hidden": 6144.0, "q_rank": 2048.0, "latent": 512.0, "rope": 64.0, "nope": 192.0, "v_dim": 256.0}
_DEEPSEEK_INDEX = {"index_heads": 64.0, "index_dim": 128.0, "topk": 2048.0}
_GLM_INDEX = {"index_heads": 32.0, "index_dim": 128.0, "topk": 2048.0}

_MODELS: dict[str, Mapping[str, float]] = {
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-R1": _DEEPSEEK,
    "DeepSeek-V3.2": _DEEPSEEK | _DEEPSEEK_INDEX,
    "GLM-5": _GLM | _GLM_INDEX,
    "GLM-5-FP8": _GLM | _GLM_INDEX,
    "GLM-5.2": _GLM | _GLM_INDEX,
    "GLM-5.2-FP8": _GLM | _GLM_INDEX,
}
"""Sizes by the last part of a model's name."""


class _MlaPart(NamedTuple):
    """Rows of a file that are one operator kind."""

    kind: OperatorKind
    rows: Mask
    shape: Mapping[str, Array]
    dtype_columns: tuple[str, ...] = ()
    """Columns of the dtype of the operator and, if there are two, of its KV cache; bf16 if there is none."""
    excluded: Mapping[str, Mask] = {}
    kv_dtype: Dtype | None = None
    """Dtype of a state, if the table names none."""


def _content(columns: Columns, parts: list[_MlaPart]) -> FileContent:
    """Return one table per part and dtype; rows of no part, or of an unknown dtype, are counted."""
    columns.require("latency")
    content = FileContent()
    of_none = ~np.logical_or.reduce([part.rows for part in parts])
    content.skip(int(of_none.sum()), "unknown op_name, phase, kernel or model")
    for part in parts:
        for dtypes, rows in _by_dtypes(columns, part).items():
            if all(dtype in DTYPES for dtype in dtypes):
                content.tables.append(_table(columns, part, dtypes, rows))
            else:
                unknown_dtypes = zip(part.dtype_columns, dtypes, strict=True)
                content.skip(len(rows), ", ".join(f"{column} {dtype}" for column, dtype in unknown_dtypes))
    return content


def _by_dtypes(columns: Columns, part: _MlaPart) -> dict[tuple[str, ...], NDArray[np.intp]]:
    """Group the rows of a part by the values of its dtype columns."""
    texts = [columns.text(name) for name in part.dtype_columns]
    members: dict[tuple[str, ...], list[int]] = {}
    for row in np.flatnonzero(part.rows):
        members.setdefault(tuple(text[row] for text in texts), []).append(int(row))
    return {dtypes: np.array(rows, dtype=np.intp) for dtypes, rows in members.items()}


def _table(columns: Columns, part: _MlaPart, dtypes: tuple[str, ...], rows: NDArray[np.intp]) -> Table:
    all_rows = Table(
        kind=part.kind,
        dtype=DTYPES[dtypes[0]] if dtypes else "bf16",
        kv_dtype=DTYPES[dtypes[1]] if len(dtypes) > 1 else part.kv_dtype,
        shape=dict(part.shape),
        seconds=columns.numbers("latency") * MS,
        origin=AICONFIGURATOR,
        files=(columns.file,),
        device=columns.device(),
        software=" ".join(x for x in (columns.only("framework"), columns.only("version")) if x) or None,
    )
    return finish(take(all_rows, rows), {why: mask[rows] for why, mask in part.excluded.items()})


def _attention(columns: Columns) -> FileContent:
    """Read prefill and decode. A window longer than the context stays as it is: its kernels are different."""
    new, step = columns.numbers("isl"), columns.numbers("step")
    window = columns.numbers("window_size") if "window_size" in columns.names else np.zeros(len(columns))
    context = new + step
    shape = {
        "batch": columns.numbers("batch_size"),
        "context": context,
        "heads": columns.numbers("num_heads"),
        "kv_heads": columns.numbers("num_key_value_heads"),
        "head_dim": columns.numbers("head_dim"),
        "window": np.where(window > 0, window, context),
    }
    dtypes = ("attn_dtype", "kv_cache_dtype")
    excluded = {
        "window as long as the context, which is told from none by no other column": window == context,
        "another kernel stands for the shape": _second_kernels(columns, shape | {"tokens": new}, window > 0),
    }
    prefill, decode = (columns.equal("op_name", f"{name}_attention") for name in ("context", "generation"))
    return _content(
        columns,
        [
            _MlaPart("prefill_attention", prefill, shape | {"tokens": new}, dtypes, excluded),
            _MlaPart("decode_attention", decode, shape, dtypes, excluded),
        ],
    )


def _second_kernels(columns: Columns, shape: Mapping[str, Array], windowed: Mask) -> Mask:
    """Select rows of kernels that were measured on shapes of a more common one of the same operator, dtypes and
    head_dim, both with a window or both without.

    SGLang's tables of B200 time the kernels of some models and those of all others on the same shapes; the median of
    both, to which several rows of a shape are merged, is the time of neither.
    """
    if "kernel_source" not in columns.names:
        return np.zeros(len(columns), dtype=np.bool_)
    kernels = columns.text("kernel_source")
    operator_columns = [columns.text(name) for name in ("op_name", "attn_dtype", "kv_cache_dtype")]
    operators = list(zip(*operator_columns, shape["head_dim"].tolist(), windowed.tolist(), strict=True))
    shapes = list(zip(operators, *(column.tolist() for column in shape.values()), strict=True))
    rows = Counter(zip(operators, kernels, strict=True))
    by_shape: dict[Any, set[str]] = {}
    for key, kernel in zip(shapes, kernels, strict=True):
        by_shape.setdefault(key, set()).add(kernel)
    second = {
        (key[0], kernel)
        for key, of_shape in by_shape.items()
        for kernel in of_shape
        if any(rows[key[0], rival] > rows[key[0], kernel] for rival in of_shape)
    }
    return np.array([key in second for key in zip(operators, kernels, strict=True)], dtype=np.bool_)


def _encoder(columns: Columns) -> FileContent:
    shape = {
        "batch": columns.numbers("batch_size"),
        "tokens": columns.numbers("isl"),
        "heads": columns.numbers("num_heads"),
        "head_dim": columns.numbers("head_dim"),
    }
    rows = columns.equal("op_name", "encoder_attention")
    return _content(columns, [_MlaPart("encoder_attention", rows, shape, ("attn_dtype",))])


def _latent_kernels(columns: Columns) -> FileContent:
    """Read kernels alone, of DeepSeek's sizes; rows of prompts after a cached part are excluded."""
    new, step = columns.numbers("isl"), columns.numbers("step")
    common = {"batch": columns.numbers("batch_size"), "heads": columns.numbers("num_heads")}
    qk, v, latent, rope = (np.full(len(columns), size) for size in (192.0, 128.0, 512.0, 64.0))
    prefill, decode = (columns.equal("op_name", f"mla_{name}") for name in ("context", "generation"))
    dtypes = ("mla_dtype", "kv_cache_dtype")
    past = {"after a cached past": prefill & (step > 0)}
    spelled = common | {"tokens": new, "qk_dim": qk, "v_dim": v}
    absorbed = common | {"context": new + step, "latent": latent, "rope": rope}
    return _content(
        columns,
        [_MlaPart("mla_prefill", prefill, spelled, dtypes, past), _MlaPart("mla_decode", decode, absorbed, dtypes)],
    )


def _latent_products(columns: Columns) -> FileContent:
    """Read products of queries into latents before attention (128 to 512), and of latents into outputs (512 to 128)."""
    into, out_of = columns.equal("op_name", "mla_gen_pre"), columns.equal("op_name", "mla_gen_post")
    shape = {
        "tokens": columns.numbers("num_tokens"),
        "heads": columns.numbers("num_heads"),
        "n": np.where(into, 512.0, 128.0),
        "k": np.where(into, 128.0, 512.0),
    }
    return _content(columns, [_MlaPart("mla_products", into | out_of, shape, ("bmm_dtype",))])


def _blocks(columns: Columns) -> FileContent:
    """Read whole blocks of latent and of sparse attention; those that skip the indexer have no index heads."""
    if all(name.startswith("msa_") for name in columns.text("op_name")):
        return aiconfigurator_sparse.modules(columns)
    names = [name.rpartition("/")[2] for name in columns.text("model")]
    operations = columns.text("op_name")
    skips = np.array([name.endswith("_skip_indexer") for name in operations], dtype=np.bool_)
    new, step = columns.numbers("isl"), columns.numbers("step")
    shape = {
        "batch": columns.numbers("batch_size"),
        "tokens": new,
        "context": new + step,
        "heads": columns.numbers("num_heads"),
    }
    for size in (*_DEEPSEEK, *_DEEPSEEK_INDEX):
        shape[size] = np.array([_MODELS.get(name, {}).get(size, np.nan) for name in names])
    shape["index_heads"] = np.where(skips, 0.0, shape["index_heads"])
    kinds: dict[str, OperatorKind] = {
        "mla_context_module": "mla_context_block",
        "mla_generation_module": "mla_decode_block",
        "dsa_context_module": "dsa_context_block",
        "dsa_generation_module": "dsa_decode_block",
    }
    kind_of = [kinds.get(name.removesuffix("_skip_indexer")) for name in operations]
    parts = []
    for kind in kinds.values():
        sizes = _MODELS["DeepSeek-V3"] if kind.startswith("mla") else _MODELS["DeepSeek-V3.2"]
        of_models = np.array(
            [row_kind == kind and name in _MODELS for row_kind, name in zip(kind_of, names, strict=True)]
        )
        columns_of_kind = ("batch", "tokens", "context") if "context" in kind else ("batch", "context")
        of_kind = {name: shape[name] for name in (*columns_of_kind, "heads", *sizes)}
        parts.append(_MlaPart(kind, of_models.astype(np.bool_), of_kind, ("gemm_type", "kv_cache_dtype")))
    return _content(columns, parts)


def _delta_nets(columns: Columns) -> FileContent:
    """Read gated delta nets and delta rules by channel (KDA): the rule and the convolution before it.

    Values have 16 bits, states 32.
    """
    heads, key_heads = columns.numbers("num_v_heads"), columns.numbers("num_k_heads")
    key_dim, value_dim = columns.numbers("head_k_dim"), columns.numbers("head_v_dim")
    channels = 2 * key_heads * key_dim + heads * value_dim
    by_channel = {"batch": columns.numbers("batch_size"), "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    rule, tokens, is_kda = (
        by_channel | {"key_heads": key_heads},
        columns.numbers("seq_len"),
        columns.equal("op_name", "kda"),
    )
    of_prompts = np.array([name.startswith(("chunk_kda", "flashkda_fwd")) for name in columns.text("kernel_source")])
    convolves = _kernels(columns, "causal_conv1d")
    # The operator has one token of each sequence; rows of phase verify have 2 to 8.
    verified = {"several tokens of a sequence, whose drafts are verified": tokens > 1}
    chunked, recurrent = (
        _kernels(columns, "chunk_gated_delta_rule"),
        _kernels(columns, "fused_recurrent_gated_delta_rule"),
    )
    return _content(
        columns,
        [
            _MlaPart("delta_prefill", chunked & ~is_kda, rule | {"tokens": tokens}, kv_dtype="fp32"),
            _MlaPart("delta_decode", recurrent & ~is_kda, rule, kv_dtype="fp32"),
            _MlaPart("kda_prefill", is_kda & of_prompts, by_channel | {"tokens": tokens}, kv_dtype="fp32"),
            _MlaPart("kda_decode", is_kda & ~of_prompts & ~convolves, by_channel, (), verified, "fp32"),
            *_convolutions(columns, channels),
        ],
    )


def _mamba2(columns: Columns) -> FileContent:
    """Read Mamba2: the convolution, over its heads and twice its groups of states. No engine has rows of its scans."""
    channels = columns.numbers("nheads") * columns.numbers("head_dim")
    channels = channels + 2 * columns.numbers("n_groups") * columns.numbers("d_state")
    return _content(columns, _convolutions(columns, channels))


def _convolutions(columns: Columns, channels: Array) -> list[_MlaPart]:
    shape = {"batch": columns.numbers("batch_size"), "channels": channels, "width": columns.numbers("d_conv")}
    forward, update = _kernels(columns, "causal_conv1d_fn"), _kernels(columns, "causal_conv1d_update")
    # SGLang 0.5.16 launches three for KDA, which take 8.6 us for a token where one takes 2.3.
    three = {"three convolutions, of queries, keys and values, in one time": _kernels(columns, "causal_conv1d_fn_qkv3")}
    return [
        _MlaPart("conv_prefill", forward, shape | {"tokens": columns.numbers("seq_len")}, (), three),
        _MlaPart("conv_decode", update, shape),
    ]


def _kernels(columns: Columns, start: str) -> Mask:
    return np.array([name.startswith(start) for name in columns.text("kernel_source")], dtype=np.bool_)


FORMATS: FormatReaders = {
    ("attn_dtype", "step"): _attention,
    ("attn_dtype",): _encoder,
    ("mla_dtype", "gemm_type"): _blocks,
    ("mla_dtype",): _latent_kernels,
    ("bmm_dtype",): _latent_products,
    ("num_v_heads", "head_k_dim"): _delta_nets,
    ("n_groups", "d_state"): _mamba2,
}
