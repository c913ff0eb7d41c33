"""Hardware profiles from the points of a journal: tables, quick fits between rounds, the facts of the device."""

from __future__ import annotations

from collections.abc import Sequence

from simtune.costs.fit import fit_predictor
from simtune.costs.hardware_profile import build, data_sheet
from simtune.costs.operators import OPERATORS, Chip
from simtune.costs.predict import Predictor
from simtune.costs.tables import Tables, own
from simtune.costs.tables.common import merge
from simtune.costs.tables.own import MeasuredPoint
from simtune.costs.tables.screen import screen
from simtune.errors import UsageError
from simtune.profiling.checks import Check, errors_by_operator, validate
from simtune.profiling.measurement_journal import FILE, Journal, task_of
from simtune.profiling.measurement_plan import Limits, work
from simtune.specs.base import Dtype
from simtune.specs.hardware import Device, Facts, Hardware, HoldOut, Link

VALIDATION = "points measured for checking"

# A smaller copy within memory may be one within a cache.
_STREAM_BYTES = 1 << 26


def tables_of(journal: Journal, points: Sequence[MeasuredPoint] | None = None) -> Tables:
    """Return the tables of all points of a journal, or of `points`."""
    content = own.tables(journal.header, journal.points if points is None else points, FILE)
    usable = {table.key: merge([table]) for table in content.tables if len(table)}
    imbalance = next(iter(content.imbalance), None)
    return Tables(dict(sorted(usable.items())), content.hosts[0] if content.hosts else None, imbalance)


def predictors(journal: Journal) -> dict[str, Predictor]:
    """Return quick fits of all operators measured so far, by key."""
    facts = facts_of(journal, "measured")
    fitted = {}
    for key, table in tables_of(journal).operators.items():
        sheet = data_sheet(table, facts)
        clean = screen(table, sheet)
        fitted[key] = fit_predictor(clean, sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, sheet.chip)
    return fitted


def fit(journal: Journal, name: str) -> tuple[Facts, Hardware, list[Check]]:
    """Return facts and profile of all points, and the checks. Raises UsageError if there are too few points."""
    tables = tables_of(journal)
    if not any(table.kind == "gemm" for table in tables.operators.values()):
        raise UsageError(f"{journal.path}: too few points for a profile; give a larger --budget")
    facts = facts_of(journal, name)
    hardware = build(tables, facts)
    judges = {
        key: Predictor(operator, hardware.device.processors, hardware.arrays, Chip.of(hardware.device))
        for key, operator in hardware.operators.items()
    }
    checks = validate(journal, judges)
    operators = dict(hardware.operators)
    for key, errors in errors_by_operator(checks).items():
        tested = HoldOut(
            split=VALIDATION,
            train_points=operators[key].provenance.points or 1,
            test_points=errors.points,
            **{name: round(getattr(errors, name), 4) for name in ("median", "p90", "max")},
            coverage=round(errors.covered, 4),
        )
        operators[key] = operators[key].model_copy(update={"hold_out": (tested, *operators[key].hold_out)})
    return facts, hardware.model_copy(update={"operators": operators}).with_arrays(hardware.arrays), checks


def facts_of(journal: Journal, name: str) -> Facts:
    """Return the facts of the device: the rates are the best measured ones, since there is no data sheet."""
    header, further = journal.header, journal.header.further
    best = _BestRates(Limits(**further["limits"]))
    for point in journal.points:
        best.take(point)
    return Facts(
        name=name,
        engine=f"torch {header.torch}",
        device=Device(
            name=header.device,
            vendor=header.device.split()[0],
            memory_bytes=further["memory_bytes"],
            memory_bytes_per_s=short(best.bytes_per_s),
            architecture=further.get("architecture"),
            processors=further["processors"],
            flops_per_s={dtype: short(rate) for dtype, rate in sorted(best.flops_per_s.items())},
            devices_per_node=max(further["devices"], *further["tp"]),
            source="fastest matrix product and copy that simtune measured on it, not a data sheet",
        ),
        links=best.links,
        host_note="what a plain torch loop does for a step, to launch its graph on a GPU too; an engine does more",
    )


class _BestRates:
    """Fastest product of each dtype, fastest copy, and each link by its fastest and its shortest transfer."""

    def __init__(self, limits: Limits) -> None:
        self.flops_per_s: dict[Dtype, float] = {}
        self.bytes_per_s = limits.bytes_per_s
        self.links: dict[str, Link] = {}
        self._rough_flops_per_s = limits.flops_per_s

    def take(self, point: MeasuredPoint) -> None:
        if point.kind in OPERATORS and OPERATORS[point.kind].computes:
            self.flops_per_s.setdefault(point.dtype, self._rough_flops_per_s)
        if not point.seconds:
            return
        flops, moved = work(task_of(point))
        if point.kind == "gemm":
            self.flops_per_s[point.dtype] = max(self.flops_per_s[point.dtype], flops / point.seconds)
        elif point.kind == "copy" and point.variant != "in_memory":
            self._transfer("host", point.shape["bytes"], point.seconds)
        elif point.kind == "copy" and point.shape["bytes"] >= _STREAM_BYTES:
            self.bytes_per_s = max(self.bytes_per_s, moved / point.seconds)
        elif point.kind in ("send_recv", "all_reduce"):
            self._transfer("intra_node", moved, point.seconds)

    def _transfer(self, name: str, size: float, seconds: float) -> None:
        previous = self.links.get(name)
        rate = max(size / seconds, previous.bytes_per_s if previous else 0.0)
        latency = min(seconds, previous.latency_s if previous else seconds)
        self.links[name] = Link(
            bytes_per_s=short(rate), latency_s=short(latency), source="fastest and shortest measured"
        )


def short(value: float) -> float:
    """Round to four significant digits: a single measurement supports no more."""
    return float(f"{value:.4g}")
