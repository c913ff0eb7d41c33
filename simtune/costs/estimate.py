"""Operators from the data sheet alone, if no measurement exists."""

from __future__ import annotations

from typing import cast

from simtune.costs.operators import OPERATORS
from simtune.errors import Infeasible
from simtune.specs.base import COMPUTES_IN, Dtype
from simtune.specs.hardware import BaseFit, Hardware, Link, Operator, OperatorKind, Provenance

SHEET_SHARE = 0.7
"""Kernels reach about 70 % of the rates on the data sheet."""


def estimate(
    kind: OperatorKind, dtype: str, hardware: Hardware, *, kv_dtype: str | None = None, variant: str | None = None
) -> Operator | None:
    """Return the operator with 70 % of the data sheet's rates, and the overhead and block time usual for its kind.
    Flops are no more than the device's `attained_flops_per_s`.

    None if the device has no rate for the dtype: a device without fp8 runs no fp8 kernels. On such a roofline
    published GEMM tables lie 9-16 % off at the median and 30-76 % at the 90th percentile; for other kinds nothing is
    known. `variant` names the link of operators that move bytes between devices, intra_node unless given; raises
    Infeasible if the hardware has no such link.
    """
    operator, device = OPERATORS[kind], hardware.device
    computes_in = cast(Dtype, COMPUTES_IN.get(dtype, dtype))
    flops_per_s = device.flops_per_s.get(computes_in)
    bytes_per_s, overhead_s = device.memory_bytes_per_s, operator.overhead_s
    # kinds that only move bytes have no flops: any rate does, also if the dtype has none
    if not operator.computes:
        flops_per_s = max(device.flops_per_s.values())
    if flops_per_s is None:
        return None
    reached_per_s = SHEET_SHARE * flops_per_s
    if device.attained_flops_per_s is not None:
        reached_per_s = min(reached_per_s, device.attained_flops_per_s.get(computes_in, reached_per_s))
    if operator.link:
        link = link_of(hardware, variant or "intra_node")
        bytes_per_s = link.bytes_per_s
        if operator.starts_with_latency:
            overhead_s = link.latency_s
    return Operator(
        kind=kind,
        dtype=cast(Dtype, dtype),
        kv_dtype=cast(Dtype | None, kv_dtype),
        variant=variant,
        base=BaseFit(
            flops_per_s=reached_per_s,
            bytes_per_s=SHEET_SHARE * bytes_per_s,
            overhead_s=overhead_s,
            block_s=operator.block_s,
            overlap_p=1 + operator.overlap,
            ahead_s=operator.ahead_s,
        ),
        box={},
        hold_out=(),
        provenance=Provenance(
            kind="data-sheet",
            source=f"{SHEET_SHARE:.0%} of the rates of {device.name}; overhead and block time usual for {kind}",
        ),
    )


def link_of(hardware: Hardware, name: str) -> Link:
    """Return a link by its name. Raises Infeasible if it is missing."""
    link = hardware.links.get(name)
    if link is None:
        raise Infeasible(
            f"hardware {hardware.name}: it has no link {name}, which this parallelism needs; "
            f"add links.{name} to its profile"
        )
    return link
