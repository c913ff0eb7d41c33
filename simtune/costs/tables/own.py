"""simtune's own measurements: measurements.jsonl, a header line and then one JSON line for each finished point.

    {"schema": "simtune/measurements@1", "device": "NVIDIA H200", "driver": "570.1", "torch": "2.11.0"}
    {"kind": "gemm", "dtype": "bf16", "shape": {"m": 8, "n": 4096, "k": 4096}, "seconds": 1.2e-5, "mad": 1e-7}

A point has kind, dtype, shape and seconds, where the operator needs them kv_dtype and variant, and what the measurement
says of itself: mad, p10, p90 (seconds), n (samples), timer, kernel. A last line cut short by an interruption is left
out and counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ConfigDict, ValidationError

from simtune.costs.operators import OPERATORS
from simtune.costs.tables.common import Found, Origin, Table, finish
from simtune.errors import Problem, SpecError
from simtune.specs.base import Dtype, Part
from simtune.specs.hardware import OperatorKind

P = TypeVar("P", bound=Part)

SCHEMA = "simtune/measurements@1"

_NOISY = 0.05
"""A point whose median absolute deviation exceeds 5 % of its median is not used."""


class Header(Part):
    """First line: what was measured, with what. Further keys are the measurer's own."""

    model_config = ConfigDict(extra="allow", strict=True)

    device: str
    driver: str | None = None
    torch: str | None = None


class Point(Part):
    """One finished point; times in seconds."""

    model_config = ConfigDict(extra="allow", strict=True)

    kind: OperatorKind
    dtype: Dtype
    kv_dtype: Dtype | None = None
    variant: str | None = None
    shape: dict[str, float]
    seconds: float
    mad: float | None = None
    p10: float | None = None
    p90: float | None = None
    n: int | None = None
    timer: str | None = None
    kernel: str | None = None


def read(path: Path) -> Found:
    """The tables of a measurement file. Raises SpecError naming the line of whatever is wrong in it."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(Problem(str(path), f"cannot be read: {error}")) from None
    found = Found()
    header = _header(path, lines[0])
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for line, text in enumerate(lines[1:], start=2):
        if not text.strip():
            continue
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            if line == len(lines):
                found.skip(1, "a last line cut short")
                continue
            raise SpecError(Problem(str(path), f"is not JSON: {error.msg}", "", line, error.colno)) from None
        point = _parse(Point, data, path, line)
        wanted = OPERATORS[point.kind].shape
        if set(point.shape) != set(wanted):
            message = f"of {point.kind} must name {', '.join(wanted)}; it names {', '.join(point.shape) or 'nothing'}"
            raise SpecError(Problem(str(path), message, "shape", line))
        groups.setdefault((point.kind, point.dtype, point.kv_dtype, point.variant), []).append(point)
    software = ", ".join(f"{k} {v}" for k, v in (("torch", header.torch), ("driver", header.driver)) if v)
    origin = Origin(f"measured by simtune on {header.device}", None, "measured")
    for (kind, dtype, kv_dtype, variant), points in groups.items():
        kernels = sorted({p.kernel for p in points if p.kernel})
        noisy = np.array([p.mad is not None and p.mad > _NOISY * p.seconds for p in points], dtype=np.bool_)
        table = Table(
            kind,
            dtype,
            {name: np.array([p.shape[name] for p in points]) for name in OPERATORS[kind].shape},
            np.array([p.seconds for p in points]),
            origin,
            (path.name,),
            kv_dtype=kv_dtype,
            variant=variant,
            device=header.device,
            software="; ".join(filter(None, (software, "kernels " + ", ".join(kernels) if kernels else ""))) or None,
        )
        found.tables.append(finish(table, {"spread of more than 5 %": noisy}))
    return found


def _header(path: Path, text: str) -> Header:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(Problem(str(path), f"is not JSON: {error.msg}", "", 1, error.colno)) from None
    schema = data.pop("schema", None) if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise SpecError(Problem(str(path), f"must be {SCHEMA}, found {schema!r}", "schema", 1))
    return _parse(Header, data, path, 1)


def _parse(kind: type[P], data: Any, path: Path, line: int) -> P:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            message = str(item["msg"]).replace("Input should", "must").replace("Field required", "is missing")
            problems.append(Problem(str(path), message, ".".join(map(str, item["loc"])), line))
        raise SpecError(problems) from None
