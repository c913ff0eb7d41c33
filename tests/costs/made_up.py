"""A made-up device and small models whose costs can be worked out by hand."""

from __future__ import annotations

from typing import Any

from simtune.specs.hardware import (
    BaseFit,
    Calibration,
    Correction,
    Device,
    Hardware,
    Host,
    Link,
    Operator,
    OperatorKind,
    Provenance,
)
from simtune.specs.model import (
    DenseFeedForward,
    FeedForward,
    FullAttention,
    LayerGroup,
    Model,
    MoeFeedForward,
    SlidingAttention,
)
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool

ASSUMED = Provenance(kind="assumed", source="made up")


def operator(
    kind: OperatorKind,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    variant: str | None = None,
    **base: Any,
) -> Operator:
    """An operator with round numbers: 1 TFLOP/s, 1 GB/s, 1 us overhead, 1 ns a block, no overlap (p = 1)."""
    numbers = {"flops_per_s": 1e12, "bytes_per_s": 1e9, "overhead_s": 1e-6, "block_s": 1e-9, "overlap_p": 1.0}
    return Operator(
        kind=kind,
        dtype=dtype,  # type: ignore[arg-type]
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        variant=variant,
        base=BaseFit(**(numbers | base)),
        box={},
        hold_out=(),
        provenance=ASSUMED,
    )


def hardware(
    *, host_step_s: float = 0.0, host_per_sequence_s: float = 0.0, memory_bytes: float = 1e9, **base: Any
) -> Hardware:
    """Eight made-up devices in a node; every operator has the same base parameters."""
    operators = {
        "gemm.bf16": operator("gemm", **base),
        "gemm.fp8": operator("gemm", "fp8", **base),
        "moe.bf16": operator("moe", **base),
        "prefill_attention.bf16": operator("prefill_attention", kv_dtype="bf16", **base),
        "decode_attention.bf16": operator("decode_attention", kv_dtype="bf16", **base),
        "all_reduce.bf16": operator("all_reduce", **base),
    }
    for variant in ("norm", "activation", "rope", "add"):
        operators[f"elementwise.{variant}.bf16"] = operator("elementwise", variant=variant, **base)
    return Hardware(
        name="made-up",
        engine="none",
        device=Device(
            name="Made-up 1",
            vendor="nobody",
            memory_bytes=memory_bytes,
            memory_bytes_per_s=1e9,
            processors=8,
            flops_per_s={"bf16": 1e12, "fp8": 2e12},
            source="made up",
        ),
        links={"intra_node": Link(bytes_per_s=1e8, latency_s=1e-5, source="made up")},
        host=Host(step_s=host_step_s, per_sequence_s=host_per_sequence_s, provenance=ASSUMED),
        operators=operators,
    )


def mixing(device: Hardware) -> Hardware:
    """The device with kernels in which decodes take longer beside a prefill chunk, and where they are unequal."""
    alone = device.operators["decode_attention.bf16"]
    beside = operator("mixed_attention", kv_dtype="bf16", block_s=1e-7, overlap_p=2.0)
    operators = {
        "decode_attention.bf16": alone.model_copy(update={"uneven_s": 2e-8}),
        "mixed_attention.bf16": beside.model_copy(update={"uneven_s": 3e-8}),
    }
    return device.model_copy(update={"operators": device.operators | operators})


def calibrated(device: Hardware, **numbers: tuple[float, float]) -> Hardware:
    """The device with steps of kinds `decode` and `prefill` corrected by (scale, offset_s)."""
    errors = {"median_before": 0.5, "p90_before": 0.6, "median_after": 0.01, "p90_after": 0.02}
    corrections = {k: Correction(scale=s, offset_s=o, steps=8, **errors) for k, (s, o) in numbers.items()}
    calibration = Calibration(model="tiny", tp=1, pp=1, source="made up", **corrections)
    return device.model_copy(update={"calibration": calibration})


def model(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    window: int | None = None,
    feed_forward: FeedForward | None = None,
    vocab: int = 256,
    max_position: int = 4096,
    tie: bool = False,
) -> Model:
    """A tiny model; `window` makes all of its layers sliding ones."""
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    attention = FullAttention(**sizes) if window is None else SlidingAttention(**sizes, window=window)
    group = LayerGroup(
        count=layers,
        attention=attention,
        feed_forward=feed_forward or DenseFeedForward(intermediate_size=128),
    )
    return Model(
        name="tiny",
        hidden_size=hidden,
        vocab_size=vocab,
        max_position=max_position,
        tie_embeddings=tie,
        layers=(group,),
    )


def moe(shared: int = 0) -> MoeFeedForward:
    return MoeFeedForward(experts=8, experts_per_token=2, intermediate_size=32, shared_intermediate_size=shared)


def pool(
    *,
    tp: int = 1,
    pp: int = 1,
    max_num_seqs: int = 64,
    budget: int = 512,
    asynchronous: bool = True,
    cuda_graphs: bool = True,
    expert_parallel: bool = False,
    attention_dp: int = 1,
    kv_cache: KvCache | None = None,
    max_model_len: int | None = None,
) -> Pool:
    return Pool(
        hardware="made-up",
        instances=1,
        parallelism=Parallelism(tp=tp, pp=pp, expert_parallel=expert_parallel, attention_dp=attention_dp),
        batching=Batching(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        kv_cache=kv_cache or KvCache(),
        async_scheduling=asynchronous,
        cuda_graphs=cuda_graphs,
        max_model_len=max_model_len,
    )
