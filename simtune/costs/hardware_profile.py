"""Hardware profiles from tables: operators fitted, their errors on held-back rows, the sources of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simtune.costs.fit import BASE_POINTS, fit_host, fit_imbalance, fit_operator
from simtune.costs.host import SYNCHRONOUS_SEQUENCE_S, SYNCHRONOUS_STEP_S
from simtune.costs.operators import OPERATORS, Chip, operator_key
from simtune.costs.predict import Profile
from simtune.costs.tables import Table, Tables, account, designation
from simtune.costs.tables.equal_bytes import disputes
from simtune.costs.tables.screen import MANY, Sheet, above_launches, launches, screen
from simtune.errors import UsageError
from simtune.specs.base import COMPUTES_IN
from simtune.specs.hardware import Arrays, Facts, Hardware, Host, Operator, Provenance

DIGITS = 6

UNLIKE = 3.0
"""Factor beyond the ratio of their data sheets by which times of one kernel on two cards may differ."""

FitProgress = Callable[[int, int, str], None]


def build(
    tables: Tables,
    facts: Facts,
    *,
    allow_device: bool = False,
    repair: bool = False,
    progress: FitProgress = lambda done, total, words: None,
) -> Hardware:
    """Screen and fit every operator found; all changes to the rows are recorded in its provenance.

    `repair` is passed on to `screen`. `progress(done, total, words)` is called before each operator. Raises UsageError
    if the facts lack a rate or link that a table needs, if a table cannot be of such a device or in its unit, or was
    measured on another device than the facts name (unless `allow_device`).
    """
    if not allow_device:
        _same_device(tables, facts)
    operators: dict[str, Operator] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for fitted, (key, table) in enumerate(tables.operators.items()):
        progress(fitted, len(tables.operators), key)
        sheet = data_sheet(table, facts)
        clean = screen(table, sheet, repair=repair)
        operators[key], of_operator = fit_operator(
            clean, sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, _provenance(clean), sheet.chip
        )
        arrays |= of_operator
    if tables.imbalance is not None:
        for kind, form in OPERATORS.items():
            key = operator_key(kind, "bf16")
            uneven_s = fit_imbalance(tables.imbalance, form, facts.device.processors)
            if key in operators and uneven_s is not None:
                operators[key] = operators[key].model_copy(update={"uneven_s": uneven_s})
    return Hardware(
        name=facts.name,
        engine=facts.engine,
        device=facts.device,
        links=facts.links,
        host=_host(tables, facts),
        operators=operators,
    ).with_arrays(Arrays(arrays))


def usable(
    tables: Tables,
    facts: Facts,
    *,
    repair: bool = False,
    allow_launches: bool = False,
    sister: Hardware | None = None,
) -> Tables:
    """Return the usable tables; the others are noted.

    A table is unusable if it is in another unit, of two kernels, faster than the device, of launches (unless
    `allow_launches`; of blocks of kernels the rows that took the device longer are kept), unlike the profile of a
    `sister` card, or much slower than one in a format of equal bytes. One column of a file may be unusable, and the
    others sound. Raises UsageError if no table is left.
    """
    accepted: dict[str, Table] = {}
    refused = []
    for key, table in tables.operators.items():
        sheet = data_sheet(table, facts)
        table = table if allow_launches else above_launches(table, sheet)
        why = None if allow_launches or table.launch_s is not None else launches(table, sheet)
        if why is None and sister is not None:
            why = _unlike(table, sheet, sister)
        try:
            screen(table, sheet, repair=repair)
        except UsageError as error:
            why = str(error)
        if why is None:
            accepted[key] = table
        else:
            refused.append(f"refused: {why}")
    disputed = disputes(accepted)
    for dispute in disputed.values():
        del accepted[dispute.key]
        refused.append(f"refused: {dispute.key}: {dispute.words}")
    if not accepted:
        raise UsageError("; ".join(refused))
    return replace(tables, operators=accepted, notes=[*tables.notes, *refused], disputes=disputed)


def _unlike(table: Table, sheet: Sheet, sister: Hardware) -> str | None:
    """Return why times are not those of the kernels that a sister card was fitted on; None if they may be.

    Also None if that card lacks the operator. The two cards may differ by the ratios of their data sheets, and a
    factor of three.
    """
    if table.key not in sister.operators or OPERATORS[table.kind].link:
        return None
    sister_sheet = data_sheet(table, sister)
    predictor = Profile(sister).predictor(table.kind, table.dtype, kv_dtype=table.kv_dtype, variant=table.variant)
    ratio = table.seconds / predictor.seconds(**table.shape)
    ratios = (1.0, sister_sheet.flops_per_s / sheet.flops_per_s, sister_sheet.bytes_per_s / sheet.bytes_per_s)
    off = predictor.inside(**table.shape) & ((ratio > UNLIKE * max(ratios)) | (ratio < min(ratios) / UNLIKE))
    if off.mean() <= MANY:
        return None
    return (
        f"{table.key}: {off.sum():,} of {len(table):,} rows take {np.median(ratio[off]):.2g} times as long (median) as "
        f"{sister.name}'s, where the data sheets differ by {min(ratios):.2g} to {max(ratios):.2g}; "
        f"{', '.join(table.files)} must time something else"
    )


def data_sheet(table: Table, facts: Facts | Hardware) -> Sheet:
    """Return the data sheet's rates by which an operator is judged. Raises UsageError if the facts lack them."""
    device, operator = facts.device, OPERATORS[table.kind]
    bytes_per_s = device.memory_bytes_per_s
    if operator.link:
        link = facts.links.get("intra_node")
        if link is None:
            raise UsageError(f"{facts.name}: the facts need links.intra_node for the table of {table.key}")
        bytes_per_s = link.bytes_per_s
    dtype = COMPUTES_IN.get(table.dtype, table.dtype)
    flops_per_s = device.flops_per_s.get(dtype)
    # kinds that only move bytes have no flops: any rate does, also if the dtype has none
    if not operator.computes:
        flops_per_s = max(device.flops_per_s.values())
    if flops_per_s is None:
        raise UsageError(f"{facts.name}: the facts need device.flops_per_s.{dtype} for the table of {table.key}")
    return Sheet(device.processors, flops_per_s, bytes_per_s, Chip.of(device))


def _same_device(tables: Tables, facts: Facts) -> None:
    for table in tables.operators.values():
        if table.device is not None and designation(table.device) != designation(facts.device.name):
            raise UsageError(
                f"{table.key}: {', '.join(table.files)} was measured on {table.device}, the facts are of "
                f"{facts.device.name}; give the tables of that device, or --allow-device if they are"
            )


def _provenance(table: Table) -> Provenance:
    notes = [account(table)]
    if len(table) > BASE_POINTS:
        notes.append(f"base fitted on {BASE_POINTS:,} random rows")
    if table.resolution_s:
        notes.append(f"times were rounded to {table.resolution_s:g} s")
    return Provenance(
        kind=table.origin.kind,
        source=f"{table.origin.name}: {', '.join(table.files)}",
        licence=table.origin.licence,
        device=table.device,
        software=table.software,
        points=len(table),
        note="; ".join(notes),
    )


def _host(tables: Tables, facts: Facts) -> Host:
    table = tables.host
    if table is None:
        provenance = Provenance(
            kind="assumed", source="none", note="no table of host times among the sources: as of vLLM 0.11"
        )
        return Host(step_s=SYNCHRONOUS_STEP_S, per_sequence_s=SYNCHRONOUS_SEQUENCE_S, provenance=provenance)
    step_s, per_sequence_s = fit_host(table)
    provenance = Provenance(
        kind=table.origin.kind,
        source=f"{table.origin.name}: {', '.join(table.files)}",
        licence=table.origin.licence,
        points=len(table.seconds),
        note=facts.host_note,
    )
    return Host(step_s=_short(step_s), per_sequence_s=_short(per_sequence_s), provenance=provenance)


def _short(value: float) -> float:
    """Round to six significant digits: more would only look exact."""
    return float(f"{value:.{DIGITS}g}")
