"""Hardware profile: facts of a device, and for each operator a fitted time model that says how far off it may be."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from simtune.specs.base import Count, Dtype, Name, NonNegative, Part, Positive, Seq, Spec

OperatorKind = Literal["gemm", "prefill_attention", "decode_attention", "moe", "elementwise", "all_reduce"]


class Provenance(Part):
    """Where numbers come from."""

    kind: Literal["measured", "published-tables", "data-sheet", "assumed"]
    source: str = Field(description="who measured, with what; table names and versions")
    licence: str | None = None
    device: str | None = None
    software: str | None = None
    points: int | None = Field(None, ge=0, description="rows the fit could see")
    note: str | None = None


class Device(Part):
    """Data-sheet facts of one device and its price."""

    name: str
    vendor: str
    memory_bytes: Positive = Field(description="memory an engine can see")
    memory_bytes_per_s: Positive
    processors: Count = Field(description="streaming multiprocessors, or 1 for a CPU")
    flops_per_s: dict[Dtype, Positive] = Field(description="dense peak by dtype")
    devices_per_node: Count = 8
    price_per_hour_usd: Positive | None = None
    price_source: str | None = None
    source: str


class Link(Part):
    """A path between devices: one direction, per device."""

    bytes_per_s: Positive
    latency_s: NonNegative
    source: str


class BaseFit(Part):
    """t = overhead + (a^p + b^p)^(1/p) + block * N, with a = flops / flops_per_s, b = bytes / bytes_per_s.

    F, bytes and N of each operator kind are those of `simtune.costs.operators`.
    """

    flops_per_s: Positive
    bytes_per_s: Positive
    overhead_s: Positive
    block_s: Positive
    overlap_p: Annotated[float, Field(ge=1, allow_inf_nan=False)]


class HoldOut(Part):
    """|predicted/measured - 1| on points the fit did not see."""

    split: str = Field(description="how the points were held back")
    train_points: Count
    test_points: Count
    median: NonNegative
    p90: NonNegative
    max: NonNegative


class Operator(Part):
    """One fitted operator: kind and dtype, base parameters, measured box, hold-out errors, provenance."""

    kind: OperatorKind
    dtype: Dtype
    kv_dtype: Dtype | None = None
    variant: str | None = Field(None, description="which member of a family: norm, activation, rope, add")
    base: BaseFit
    box: dict[str, Annotated[Seq[float], Field(min_length=2, max_length=2, strict=False)]] = Field(
        description="smallest and largest measured value of each shape parameter"
    )
    hold_out: Seq[HoldOut]
    provenance: Provenance


class Host(Part):
    """Time the engine's host side needs per step: fixed, and per running sequence."""

    step_s: NonNegative
    per_sequence_s: NonNegative
    provenance: Provenance


class Hardware(Spec):
    """A device type as the cost model sees it."""

    KIND: ClassVar[str] = "hardware"
    engine: str = Field(description="engine and version whose kernels the operators describe")
    device: Device
    links: dict[Name, Link] = Field(default_factory=dict, description="intra_node, inter_node, host")
    host: Host
    operators: dict[str, Operator]
