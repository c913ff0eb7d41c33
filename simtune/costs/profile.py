"""A hardware profile from tables: every operator fitted, its errors on held-back rows, and where the
numbers come from.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from simtune.costs.fit import fit_base, fit_host, hold_out
from simtune.costs.tables import Table, Tables, take
from simtune.errors import UsageError
from simtune.specs.base import Name, Spec
from simtune.specs.hardware import Device, Hardware, HoldOut, Host, Link, Operator, Provenance

FIT_POINTS = 2000
"""Rows the final fit uses; more of them change the parameters by less than a per cent."""

DIGITS = 6

_UNSEEN = {"gemm": ("n", "k")}
"""Parameters of which whole combinations are held back too: the sizes of a model that nobody measured."""


class Facts(Spec):
    """What tables cannot tell about a device: the part of a hardware profile that is not fitted."""

    KIND: ClassVar[str] = "device"
    engine: str = Field(description="engine and version whose kernels the tables describe")
    device: Device
    links: dict[Name, Link] = Field(default_factory=dict, description="intra_node, inter_node, host")
    host_note: str | None = Field(None, description="what to know about the host's table, such as another machine")


def build(tables: Tables, facts: Facts) -> Hardware:
    """Fit every operator found. Raises UsageError when the facts lack a peak rate that a table needs."""
    return Hardware(
        name=facts.name,
        engine=facts.engine,
        device=facts.device,
        links=facts.links,
        host=_host(tables, facts),
        operators={key: _operator(table, facts) for key, table in tables.operators.items()},
    )


def _operator(table: Table, facts: Facts) -> Operator:
    processors = facts.device.processors
    flops_per_s, bytes_per_s = _data_sheet(table, facts)
    fit = fit_base(_sample(table), processors, flops_per_s, bytes_per_s)
    splits = [(), _UNSEEN[table.kind]] if table.kind in _UNSEEN else [()]
    errors = [hold_out(table, processors, flops_per_s, bytes_per_s, unseen=unseen) for unseen in splits]
    return Operator(
        kind=table.kind,
        dtype=table.dtype,
        kv_dtype=table.kv_dtype,
        variant=table.variant,
        base=fit.model_copy(update={name: _short(value) for name, value in fit.model_dump().items()}),
        box={name: (float(x.min()), float(x.max())) for name, x in table.shape.items()},
        hold_out=tuple(_rounded(e) for e in errors),
        provenance=_provenance(table),
    )


def _sample(table: Table) -> Table:
    rows = np.random.default_rng(0).permutation(len(table))[:FIT_POINTS]
    return take(table, np.sort(rows))


def _data_sheet(table: Table, facts: Facts) -> tuple[float, float]:
    """Peak flops and bytes per second that the operator is judged by."""
    device = facts.device
    if table.kind == "all_reduce":
        link = facts.links.get("intra_node")
        if link is None:
            raise UsageError(f"{facts.name}: the facts need links.intra_node for the table of {table.key}")
        return max(device.flops_per_s.values()), link.bytes_per_s
    flops_per_s = device.flops_per_s.get(table.dtype)
    if flops_per_s is None:
        raise UsageError(f"{facts.name}: the facts need device.flops_per_s.{table.dtype} for the table of {table.key}")
    return flops_per_s, device.memory_bytes_per_s


def _provenance(table: Table) -> Provenance:
    notes = []
    if len(table) > FIT_POINTS:
        notes.append(f"fitted on {FIT_POINTS} random rows of {len(table)}")
    if table.merged:
        notes.append(f"{table.merged} repeated rows merged by median")
    if table.left_out:
        notes.append(f"{table.left_out} rows without a positive time left out")
    if table.resolution_s:
        notes.append(f"times were rounded to {table.resolution_s:g} s")
    return Provenance(
        kind="published-tables",
        source=f"{table.origin.name}: {', '.join(table.files)}",
        licence=table.origin.licence,
        device=table.device,
        software=table.software,
        points=len(table),
        note="; ".join(notes) or None,
    )


def _host(tables: Tables, facts: Facts) -> Host:
    table = tables.host
    if table is None:
        note = "no table of host times among the sources: taken as zero"
        return Host(step_s=0.0, per_sequence_s=0.0, provenance=Provenance(kind="assumed", source="none", note=note))
    step_s, per_sequence_s = fit_host(table)
    provenance = Provenance(
        kind="published-tables",
        source=f"{table.origin.name}: {', '.join(table.files)}",
        licence=table.origin.licence,
        points=len(table.seconds),
        note=facts.host_note,
    )
    return Host(step_s=_short(step_s), per_sequence_s=_short(per_sequence_s), provenance=provenance)


def _short(value: float) -> float:
    """To six significant digits: more would only look exact."""
    return float(f"{value:.{DIGITS}g}")


def _rounded(errors: HoldOut) -> HoldOut:
    return errors.model_copy(update={name: round(getattr(errors, name), 4) for name in ("median", "p90", "max")})
