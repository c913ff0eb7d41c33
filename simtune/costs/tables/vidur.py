"""Tables of Vidur: mlp.csv, attention.csv (the layout without models), all_reduce.csv, send_recv.csv and
cpu_overheads.csv; times in ms, medians of 20 (collectives: 3) repeats. Most tables are rounded to 1 us, some of the
attention not: how far is measured table by table.

Its kernels are those of 2024 in fp16; matrix products of the projections under tensor parallelism become GEMM rows.
Times between nodes are left out: they depend on the network of one cluster, 7.8 GB/s in one and 36 GB/s in the other.
"""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array
from simtune.costs.tables.common import (
    LLMSERVINGSIM,
    MS,
    VIDUR,
    Columns,
    FileContent,
    FormatReaders,
    HostTable,
    Table,
    TableReader,
    finish,
)
from simtune.errors import SpecError
from simtune.specs.hardware import OperatorKind

_HOST_PARTS = (
    "schedule_median",
    "prepare_inputs_launch_median",
    "sampler_launch_median",
    "process_model_outputs_median",
)


def _mlp(columns: Columns) -> FileContent:
    tp = columns.numbers("num_tensor_parallel_workers")
    hidden, heads = columns.numbers("n_embd"), columns.numbers("n_head")
    kv_heads, inter = columns.numbers("n_kv_head"), columns.numbers("n_expanded_embd")
    gated = columns.equal("use_gated_mlp", "True")
    tokens, head_dim = columns.numbers("num_tokens"), hidden / heads
    rotated = (heads / tp + np.maximum(1, kv_heads / tp)) * head_dim
    widths = {
        "input_layernorm": ("norm", 2 * hidden),
        "post_attention_layernorm": ("norm", 2 * hidden),
        "mlp_act": ("activation", np.where(gated, 3, 2) * inter / tp),
        "attn_rope": ("rope", 2 * rotated),
        "add": ("add", 3 * hidden),
    }
    products = {
        "attn_pre_proj": ((heads / tp + 2 * np.maximum(1, kv_heads / tp)) * head_dim, hidden),
        "attn_post_proj": (hidden, hidden / tp),
        "mlp_up_proj": (np.where(gated, 2, 1) * inter / tp, hidden),
        "mlp_down_proj": (hidden, inter / tp),
    }
    content = FileContent()
    for name, (variant, width) in widths.items():
        content.add(_table(columns, "elementwise", name, {"rows": tokens, "width": width}, variant))
    for name, (n, k) in products.items():
        content.add(_table(columns, "gemm", name, {"m": tokens, "n": n, "k": k}))
    if "time_stats.emb.median" in columns.names:
        content.skip(len(columns), "no operator for the embedding")
    return content


def _attention(columns: Columns) -> FileContent:
    """Read one file for both phases; a prefill row is one chunk of one prompt over its cached past.

    The first layout of LLMServingSim is the same except for the block size.
    """
    tp = columns.numbers("num_tensor_parallel_workers")
    heads = columns.numbers("n_q_head")
    prefill, past = columns.equal("is_prefill", "True"), columns.numbers("kv_cache_size")
    batch = columns.numbers("batch_size")
    origin = VIDUR if "block_size" in columns.names else LLMSERVINGSIM
    content = FileContent()
    kinds: tuple[tuple[OperatorKind, str, bool], ...] = (
        ("prefill_attention", "attn_prefill", True),
        ("decode_attention", "attn_decode", False),
    )
    for kind, name, is_prefill in kinds:
        rows = np.flatnonzero(prefill == is_prefill)
        tokens = columns.numbers("prefill_chunk_size") if is_prefill else np.ones(len(columns))
        shape = {
            "batch": batch,
            **({"tokens": tokens} if is_prefill else {}),
            "context": past + tokens,
            "heads": heads / tp,
            "kv_heads": np.maximum(1, columns.numbers("n_kv_head") / tp),
            "head_dim": columns.numbers("n_embd") / heads,
            "window": past + tokens,
        }
        rows_shape = {at: column[rows] for at, column in shape.items()}
        seconds = columns.numbers(f"time_stats.{name}.median")[rows] * MS
        content.tables.append(
            finish(Table(kind, "bf16", rows_shape, seconds, origin, (columns.file,), kv_dtype="bf16"))
        )
    return content


def _collective(kind: OperatorKind) -> TableReader:
    def read(columns: Columns) -> FileContent:
        devices, per_node = columns.numbers("num_workers"), columns.numbers("devices_per_node")
        size = columns.numbers("size")
        shape = {"bytes": size} if kind == "send_recv" else {"devices": devices, "bytes": size}
        table = Table(
            kind,
            "bf16",
            shape,
            columns.numbers(f"time_stats.{kind}.median") * MS,
            VIDUR,
            (columns.file,),
            variant="nccl" if kind == "all_reduce" else None,
        )
        return FileContent(
            [finish(table, {"between nodes: it is the cluster's network that they time": per_node < devices})]
        )

    return read


def _host(columns: Columns) -> FileContent:
    columns.require("batch_size", *_HOST_PARTS)
    num_seqs = columns.numbers("batch_size")
    seconds = np.sum([columns.numbers(name) for name in _HOST_PARTS], axis=0) * MS
    usable = np.isfinite(seconds) & (seconds > 0) & (num_seqs > 0)
    content = FileContent(hosts=[HostTable(num_seqs[usable], seconds[usable], VIDUR, (columns.file,))])
    content.skip(int((~usable).sum()), "no positive time")
    return content


def _table(
    columns: Columns, kind: OperatorKind, name: str, shape: dict[str, Array], variant: str | None = None
) -> FileContent:
    """Return the rows of one column of times; if the column is absent or has no times, they are counted under its
    name."""
    content = FileContent()
    try:
        seconds = columns.numbers(f"time_stats.{name}.median") * MS
    except SpecError as error:
        content.skip(len(columns), f"time_stats.{name}.median: {error.problems[0].message}")
        return content
    table = Table(kind, "bf16", shape, seconds, VIDUR, (columns.file,), variant=variant)
    content.tables.append(finish(table))
    return content


FORMATS: FormatReaders = {
    ("n_expanded_embd",): _mlp,
    ("time_stats.attn_decode.median",): _attention,
    ("time_stats.all_reduce.median",): _collective("all_reduce"),
    ("time_stats.send_recv.median",): _collective("send_recv"),
    ("sampler_launch_median",): _host,
}
