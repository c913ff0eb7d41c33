"""Tables of AIConfigurator: gemm, quantising, custom all-reduce and NCCL; CSV or Parquet, times in ms.

Attention and experts are in `simtune.costs.tables.aiconfigurator_attention` and `aiconfigurator_moe`.

Times are means of six replays of a CUDA graph, stored without a spread. `message_size` counts elements, in the NCCL
table as in the custom ones of vLLM, SGLang and TensorRT-LLM: NCCL's collector divides the bytes by the width of the
dtype, and rows of half and int8 with equal bytes take equal times; buffers so large that engines leave them to NCCL
take equal times in all of them if all count elements. TensorRT-LLM's names no backend: all of it ran in graphs. An
all_gather, reduce_scatter or alltoall of S bytes is one whose larger buffer holds S, as in nccl-tests.

Products of 8 and 4 bits are timed with the quantising of their 16-bit inputs: with next to no outputs they take longer
than both tables of quantising together (vLLM and TensorRT-LLM on every card). Of those, scale_matrix is quantising with
known scales, and compute_scale the additional time to compute scales. It is a difference of two measurements, cut off
at zero; if most of a table is zero, as in SGLang's, it has no information. The collectors show which of the two a
product includes (collector/ENGINE/collect_gemm.py of ai-dynamo/aiconfigurator): for fp8 vLLM's layer has a static
activation scheme, TensorRT-LLM's no input scale and SGLang's one for each token, so both compute them. No table has the
time of quantising to nvfp4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators import operator_key
from simtune.costs.tables.common import AICONFIGURATOR, MS, Columns, FileContent, FormatReaders, Table, finish, take
from simtune.specs.base import DTYPE_BYTES, Dtype
from simtune.specs.hardware import OperatorKind

_DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "bf16", "half": "bf16", "fp8": "fp8"}
"""The two 16-bit formats run at the same speed, see `simtune.costs.predict`."""

_GEMM_DTYPES: dict[str, Dtype] = {
    **_DTYPES,
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "int8_wo": "int8_wo",
    "int4_wo": "int4",
}
_NCCL_DTYPES: dict[str, Dtype] = {**_DTYPES, "int8": "int8"}

_SCALES = "scales"
"""Variant of quantising for the additional time to compute scales, between reading and adding the tables."""

# A table with more zeros than this tells nothing.
_MOSTLY = 0.5

_NCCL: dict[str, tuple[OperatorKind, str | None]] = {
    "all_reduce": ("all_reduce", "nccl"),
    "all_gather": ("all_gather", None),
    "reduce_scatter": ("reduce_scatter", None),
    "alltoall": ("all_to_all", None),
}


def _gemm(columns: Columns) -> FileContent:
    shape = {name: columns.numbers(name) for name in "mnk"}
    content = _by_dtype(columns, "gemm", ("gemm_dtype",), shape, dtypes=_GEMM_DTYPES)
    content.tables = [replace(table, known_scales=_knows_scales(table)) for table in content.tables]
    return content


def _knows_scales(table: Table) -> bool:
    """True if products quantise their inputs by scales that the collector gives, for formats with a table of that."""
    return table.dtype == "fp8" and table.engine == "vllm"


def _quantise(columns: Columns) -> FileContent:
    """Read quantising with known scales, and the additional time to compute them; `with_dynamic_scales` adds the
    two."""
    shape = {name: columns.numbers(name) for name in "mk"}
    names = columns.text("op_name")
    content = FileContent()
    content.skip(sum(name not in ("scale_matrix", "compute_scale") for name in names), "unknown op_name")
    static, scales = columns.equal("op_name", "scale_matrix"), columns.equal("op_name", "compute_scale")
    content.add(_by_dtype(columns, "quantise", ("quant_dtype",), shape, {}, static, "static"))
    zero = scales & ~(columns.numbers("latency") > 0)
    if zero.sum() > _MOSTLY * scales.sum():
        content.skip(int(scales.sum()), f"compute_scale is zero in {zero.sum():,} of {scales.sum():,} rows")
    else:
        content.add(_by_dtype(columns, "quantise", ("quant_dtype",), shape, {}, scales, _SCALES))
    return content


def with_dynamic_scales(operators: Mapping[str, Table]) -> tuple[dict[str, Table], list[str]]:
    """Return quantising that computes its scales: the sum of the two tables at shapes that both have; and notes."""
    summed, notes = dict(operators), []
    for key, scales in operators.items():
        if scales.kind != "quantise" or scales.variant != _SCALES:
            continue
        del summed[key]
        static = operators.get(operator_key("quantise", scales.dtype, variant="static"))
        if static is None:
            file, rows = scales.files[0], f"{scales.read:,} rows of {scales.dtype}"
            notes.append(f"{file}: {rows} belong to no operator: no scale_matrix beside them")
            continue
        times = dict(zip(zip(*static.shape.values(), strict=True), static.seconds, strict=True))
        static_s = np.array([times.get(shape, np.nan) for shape in zip(*scales.shape.values(), strict=True)])
        files = tuple(dict.fromkeys((*static.files, *scales.files)))
        table = replace(scales, variant=None, seconds=scales.seconds + static_s, files=files)
        summed[table.key] = finish(table, {"no row of scale_matrix at this shape": np.isnan(static_s)})
    return summed, notes


def _custom_all_reduce(columns: Columns) -> FileContent:
    backends = columns.text("backend") if "backend" in columns.names else ["graph"] * len(columns)
    eager = np.array([not backend.endswith("graph") for backend in backends], dtype=np.bool_)
    shape = {"devices": columns.numbers("num_gpus"), "bytes": _message_bytes(columns, "allreduce_dtype", _DTYPES)}
    return _by_dtype(columns, "all_reduce", ("allreduce_dtype",), shape, {"launched eagerly": eager})


def _nccl(columns: Columns) -> FileContent:
    shape = {"devices": columns.numbers("num_gpus"), "bytes": _message_bytes(columns, "nccl_dtype", _NCCL_DTYPES)}
    names = columns.text("op_name")
    content = FileContent()
    content.skip(sum(name not in _NCCL for name in names), "unknown op_name")
    for name, (kind, variant) in _NCCL.items():
        rows = columns.equal("op_name", name)
        content.add(_by_dtype(columns, kind, ("nccl_dtype",), shape, {}, rows, variant, _NCCL_DTYPES))
    return content


def _message_bytes(columns: Columns, dtype_column: str, dtypes: Mapping[str, Dtype]) -> Array:
    widths = [DTYPE_BYTES[dtypes[d]] if d in dtypes else np.nan for d in columns.text(dtype_column)]
    sizes: Array = columns.numbers("message_size") * np.array(widths)
    return sizes


def _by_dtype(
    columns: Columns,
    kind: OperatorKind,
    dtype_columns: tuple[str, ...],
    shape: dict[str, Array],
    excluded: Mapping[str, Mask] | None = None,
    rows: Mask | None = None,
    variant: str | None = None,
    dtypes: Mapping[str, Dtype] = _DTYPES,
) -> FileContent:
    """Return one table per dtype (and KV dtype) among `rows`; rows of unknown dtypes are counted."""
    columns.require("latency")
    seconds = columns.numbers("latency") * MS
    content = FileContent()
    members: dict[tuple[str, ...], list[int]] = {}
    for row, names in enumerate(zip(*(columns.text(name) for name in dtype_columns), strict=True)):
        if rows is None or rows[row]:
            members.setdefault(names, []).append(row)
    for names, at in members.items():
        if any(name not in dtypes for name in names):
            content.skip(len(at), f"{dtype_columns[0]} {names[0]}" + "".join(f", KV {name}" for name in names[1:]))
            continue
        all_rows = Table(
            kind=kind,
            dtype=dtypes[names[0]],
            kv_dtype=dtypes[names[1]] if len(names) > 1 else None,
            variant=variant,
            shape=shape,
            seconds=seconds,
            origin=AICONFIGURATOR,
            files=(columns.file,),
            device=columns.device(),
            software=_software(columns),
        )
        index = np.array(at)
        content.tables.append(
            finish(take(all_rows, index), {why: mask[index] for why, mask in (excluded or {}).items()})
        )
    return content


_HYPER: dict[str, OperatorKind] = {"pre": "hyper_pre", "post": "hyper_post"}


def _hyper_connections(columns: Columns) -> FileContent:
    """Read the mixing of residual streams before and after a sublayer; a row counts `num_sites` sublayers.

    Streams are made and summed once a model (`expand`, `contract`), and mixed after and before at once by some engines
    (`fused_post_pre`): those rows belong to no operator.
    """
    columns.require("latency")
    names = columns.text("op_name")
    shape = {
        "tokens": columns.numbers("num_tokens"),
        "streams": columns.numbers("hc_mult"),
        "hidden": columns.numbers("hidden_size"),
    }
    content = FileContent()
    content.skip(sum(name not in _HYPER for name in names), "neither before nor after a sublayer")
    for name, kind in _HYPER.items():
        rows = np.flatnonzero(columns.equal("op_name", name))
        if len(rows):
            all_rows = Table(
                kind=kind,
                dtype="bf16",
                shape=shape,
                seconds=columns.numbers("latency") * MS / columns.numbers("num_sites"),
                origin=AICONFIGURATOR,
                files=(columns.file,),
                device=columns.device(),
                software=_software(columns),
            )
            content.tables.append(finish(take(all_rows, rows)))
    return content


def _software(columns: Columns) -> str | None:
    """Return engine and release of the kernels; NCCL's tables also name the engine that launched them."""
    made_by = "NCCL" if "nccl_dtype" in columns.names else columns.only("framework")
    return " ".join(x for x in (made_by, columns.only("version")) if x) or None


FORMATS: FormatReaders = {
    ("gemm_dtype",): _gemm,
    ("quant_dtype",): _quantise,
    ("allreduce_dtype",): _custom_all_reduce,
    ("nccl_dtype",): _nccl,
    ("hc_mult", "num_sites"): _hyper_connections,
}
