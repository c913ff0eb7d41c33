"""simtune's own measurements: measurements.jsonl, a header line and then one JSON line for each finished point.

    {"schema": "simtune/measurements@1", "device": "NVIDIA H200", "driver": "570.1", "torch": "2.11.0"}
    {"kind": "gemm", "dtype": "bf16", "shape": {"m": 8, "n": 4096, "k": 4096}, "seconds": 1.2e-5, "mad": 1e-7}

A point has kind, dtype, shape and seconds, kv_dtype and variant if the operator needs them, and statistics of the
measurement: mad, p10, p90 (seconds), n (samples), timer, kernel. A point of `role` validation or sentinel is for
checking a fit and is not fitted; one that `failed` has a reason instead of a time. Besides the operators there
are the kinds `host` (host time of a step with `sequences` sequences), `decode_imbalance` (decode attention of a batch
whose longest context exceeds the mean `context`, with `even_s`, its time if all had the mean), `copy` (`bytes` within
memory, or to and from the host) and `step` (a whole step of a model), of which the first two become tables. If a shape
was measured several times, the lower median counts: disturbances lengthen a measurement. A last line cut short by an
interruption is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
from pydantic import ConfigDict, ValidationError, model_validator

from simtune.arrays import Array
from simtune.costs.operators import OPERATORS, operator_key
from simtune.costs.tables.common import FileContent, HostTable, ImbalanceTable, Origin, Table, finish
from simtune.errors import Problem, SpecError
from simtune.specs.base import Dtype, Part
from simtune.specs.hardware import OperatorKind
from simtune.specs.input_files import JsonError, json_document, parse_json, read_packed_text
from simtune.specs.schema_versions import schema_problem

P = TypeVar("P", bound=Part)

PointRole = Literal["fit", "validation", "sentinel"]
"""Purpose of a point: to be fitted, to check the fit, or to notice drift."""

SCHEMA = "simtune/measurements@1"

NOISY = 0.05
"""A point whose median absolute deviation exceeds 5 % of its median is not used."""


SHAPES: dict[str, tuple[str, ...]] = {
    **{kind: operator.shape for kind, operator in OPERATORS.items()},
    "host": ("sequences",),
    "decode_imbalance": ("batch", "context", "longest", "heads", "kv_heads", "head_dim"),
    "copy": ("bytes",),
    "step": ("layers", "decodes", "context", "past", "tokens", "samples"),
}
"""Names in the shape of a point of each kind. A step has `decodes` sequences of mean `context`, one chunk of `tokens`
new tokens after `past` ones, and `samples` rows that get a token."""


class MeasurementHeader(Part):
    """First line: device and software of the measurement. Further keys are the measurer's own."""

    model_config = ConfigDict(extra="allow", strict=True)

    device: str
    driver: str | None = None
    torch: str | None = None

    @property
    def further(self) -> dict[str, Any]:
        """The measurer's own keys."""
        return self.model_extra or {}


class MeasuredPoint(Part):
    """A finished point; times in seconds."""

    model_config = ConfigDict(extra="allow", strict=True)

    kind: Literal[OperatorKind, "host", "decode_imbalance", "copy", "step"]
    dtype: Dtype
    kv_dtype: Dtype | None = None
    variant: str | None = None
    shape: dict[str, float]
    role: PointRole = "fit"
    seconds: float | None = None
    failed: str | None = None
    mad: float | None = None
    p10: float | None = None
    p90: float | None = None
    n: int | None = None
    timer: str | None = None
    kernel: str | None = None

    @model_validator(mode="after")
    def _timed_or_failed(self) -> Self:
        if (self.seconds is None) == (self.failed is None):
            raise ValueError("give either seconds or failed, with the reason")
        return self

    @property
    def operator(self) -> str:
        """Key of the operator in a profile, or the kind with dtype and variant if it is not an operator."""
        return operator_key(self.kind, self.dtype, self.kv_dtype, self.variant)

    def number(self, key: str) -> float:
        """Return a number that the measurer added under a key of its own; 0 if there is none."""
        return float((self.model_extra or {}).get(key, 0.0))

    @property
    def noisy(self) -> bool:
        """True if the samples spread so much that the point is not used."""
        return self.mad is not None and self.seconds is not None and self.mad > NOISY * self.seconds


def read(path: Path) -> FileContent:
    """Return the tables of a measurement file. Raises SpecError naming the line of whatever is wrong in it."""
    header, points, cut_short = read_points(path)
    content = tables(header, points, path.name)
    content.skip(int(cut_short), "a last line cut short")
    return content


def read_points(path: Path) -> tuple[MeasurementHeader, list[MeasuredPoint], bool]:
    """Return header, points, and True if the last line was cut short and left out. Raises SpecError as `read` does."""
    lines = read_packed_text(path).split("\n")
    header = _header(path, lines[0])
    points: list[MeasuredPoint] = []
    for line, text in enumerate(lines[1:], start=2):
        if not text.strip():
            continue
        try:
            data = parse_json(text)
        except JsonError as error:
            if line == len(lines):
                return header, points, True
            raise SpecError(Problem(str(path), f"not valid JSON: {error}", "", line, error.column)) from None
        point = _parse(MeasuredPoint, data, path, line)
        names = SHAPES[point.kind]
        if set(point.shape) != set(names):
            message = f"of {point.kind} must name {', '.join(names)}; it names {', '.join(point.shape) or 'nothing'}"
            raise SpecError(Problem(str(path), message, "shape", line))
        points.append(point)
    return header, points, False


def tables(header: MeasurementHeader, points: Sequence[MeasuredPoint], file: str) -> FileContent:
    """Return the tables of points that were read from a file of this name."""
    content = FileContent()
    groups: dict[tuple[str | None, ...], list[MeasuredPoint]] = {}
    for point in points:
        if point.kind in ("copy", "step"):
            content.skip(1, f"{point.kind}, measured for comparison")
        elif point.failed is not None:
            content.skip(1, f"failed: {point.failed}")
        else:
            groups.setdefault((point.kind, point.dtype, point.kv_dtype, point.variant), []).append(point)
    origin = Origin(f"measured by simtune on {header.device}", None, "measured")
    for group in groups.values():
        if group[0].kind == "host":
            content.hosts.append(_host_table(group, origin, file))
        elif group[0].kind == "decode_imbalance":
            content.imbalance.append(_imbalance_table(group, header, origin, file))
        else:
            content.tables.append(_table(group, header, origin, file))
    return content


def _host_table(group: Sequence[MeasuredPoint], origin: Origin, file: str) -> HostTable:
    chosen = _lower_medians(_quiet(group))
    if len(chosen) < 2:
        # A line needs two numbers of sequences, noisy or not.
        chosen = _lower_medians(group)
    sequences = np.array([p.shape["sequences"] for p in chosen])
    return HostTable(sequences, np.array([p.seconds for p in chosen], dtype=np.float64), origin, (file,))


def _imbalance_table(
    group: Sequence[MeasuredPoint], header: MeasurementHeader, origin: Origin, file: str
) -> ImbalanceTable:
    chosen = [p for p in _lower_medians(_quiet(group)) if p.number("even_s") > 0]

    def column(make: Callable[[MeasuredPoint], float]) -> Array:
        return np.array([make(p) for p in chosen], dtype=np.float64)

    return ImbalanceTable(
        mixed=np.zeros(len(chosen), dtype=np.bool_),
        blocks=column(lambda p: p.shape["batch"] * p.shape["kv_heads"]),
        excess_tokens=column(lambda p: p.shape["longest"] - p.shape["context"]),
        balanced_s=column(lambda p: p.number("even_s")),
        imbalanced_s=column(lambda p: p.seconds or 0.0),
        origin=origin,
        files=(file,),
        device=header.device,
    )


def _table(group: Sequence[MeasuredPoint], header: MeasurementHeader, origin: Origin, file: str) -> Table:
    """Return the points of one operator as a table; points left out are counted."""
    kind = cast(OperatorKind, group[0].kind)
    quiet = _quiet(group)
    chosen = _lower_medians(quiet)
    table = Table(
        kind,
        group[0].dtype,
        {name: np.array([p.shape[name] for p in chosen], dtype=np.float64) for name in OPERATORS[kind].shape},
        np.array([p.seconds for p in chosen], dtype=np.float64),
        origin,
        (file,),
        kv_dtype=group[0].kv_dtype,
        variant=group[0].variant,
        device=header.device,
        software=_software(header, group),
        merged=len(quiet) - len(chosen),
    )
    table = finish(table)
    left_out = {
        "spread of more than 5 %": sum(p.role == "fit" for p in group) - len(quiet),
        "kept for checking the fit": sum(p.role == "validation" for p in group),
        "sentinels": sum(p.role == "sentinel" for p in group),
    }
    left_out = {why: rows for why, rows in left_out.items() if rows}
    return replace(table, left_out={**left_out, **table.left_out})


def _quiet(group: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Return the points that a fit uses."""
    return [p for p in group if p.role == "fit" and not p.noisy]


def _software(header: MeasurementHeader, group: Sequence[MeasuredPoint]) -> str | None:
    """Return library, driver and kernels, as far as they are known."""
    versions = (
        f"{name} {version}" for name, version in (("torch", header.torch), ("driver", header.driver)) if version
    )
    kernels = sorted({p.kernel for p in group if p.kernel})
    parts = (", ".join(versions), "kernels " + ", ".join(kernels) if kernels else "")
    return "; ".join(filter(None, parts)) or None


def _lower_medians(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Return for each shape the point of its lower median time, in the order in which shapes came first."""
    by_shape: dict[tuple[float, ...], list[MeasuredPoint]] = {}
    for point in points:
        by_shape.setdefault(tuple(point.shape[name] for name in SHAPES[point.kind]), []).append(point)
    return [sorted(group, key=lambda p: p.seconds or 0.0)[(len(group) - 1) // 2] for group in by_shape.values()]


def _header(path: Path, text: str) -> MeasurementHeader:
    data = json_document(text, str(path))
    schema = data.pop("schema", None) if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise SpecError(Problem(str(path), schema_problem(schema, SCHEMA, "measure again"), "schema", 1))
    return _parse(MeasurementHeader, data, path, 1)


def _parse(kind: type[P], data: Any, path: Path, line: int) -> P:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            message = str(item["msg"]).replace("Input should", "must").replace("Field required", "is missing")
            problems.append(Problem(str(path), message, ".".join(map(str, item["loc"])), line))
        raise SpecError(problems) from None
