"""File of finished points, measurements.jsonl: written a line at a time, so that a killed run can continue.

Its format is that of `simtune.costs.tables.own`. Only the point that was being measured is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

from simtune.costs.tables.own import SCHEMA, MeasuredPoint, MeasurementHeader, read_points
from simtune.errors import SimtuneError, UsageError
from simtune.profiling.measurement_plan import MeasurementTask

FILE = "measurements.jsonl"


class Journal:
    """Header and points of a file, and a method to append to it. Use as a context manager."""

    def __init__(self, path: Path, header: MeasurementHeader, points: list[MeasuredPoint]) -> None:
        self.path, self.header, self.points = path, header, points
        self._file: FileIO | None = None

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> Self:
        """Create a file with its header. Raises SimtuneError if it cannot be written."""
        journal = cls(path, MeasurementHeader.model_validate(dict(header)), [])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path.parent}: cannot be made ({error.strerror})") from None
        journal._append({"schema": SCHEMA, **header})
        return journal

    @classmethod
    def resume(cls, path: Path) -> tuple[Self, str | None]:
        """Return an existing file, and a note if it was repaired: a last line cut short is removed.

        Raises SpecError if the file is damaged elsewhere.
        """
        header, points, cut_short = read_points(path)
        repaired = None
        text = path.read_bytes()
        if cut_short:
            os.truncate(path, text.rindex(b"\n") + 1)
            repaired = f"{path}: the last line was cut short and is removed; its point is measured again"
        elif not text.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")
            repaired = f"{path}: the last line had no newline; added it"
        return cls(path, header, points), repaired

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def must_be(self, **wanted: Any) -> None:
        """Raise UsageError unless the header has these values of these keys."""
        for key, value in wanted.items():
            recorded = getattr(self.header, key, None)
            if recorded != value:
                raise UsageError(
                    f"{self.path}: has measurements with {key} {_short(recorded)}, this run has {_short(value)}; they "
                    "are not mixed: name another folder with --out"
                )

    def record(self, task: MeasurementTask, **result: Any) -> MeasuredPoint:
        """Append one finished point. Raises SimtuneError if it cannot be written; earlier points stay."""
        line = {**task.to_data(), **{key: value for key, value in result.items() if value is not None}}
        self._append(line)
        point = MeasuredPoint.model_validate(line)
        self.points.append(point)
        return point

    def _append(self, line: Mapping[str, Any]) -> None:
        unwritten = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise SimtuneError(
                f"{self.path}: cannot be written ({error.strerror}); its {len(self.points)} points are kept: make room "
                "and give the same command again"
            ) from None


def task_of(point: MeasuredPoint) -> MeasurementTask:
    """Return the task of a point."""
    return MeasurementTask(point.kind, point.dtype, point.shape, point.kv_dtype, point.variant, point.role)


def _short(value: Any) -> str:
    words = json.dumps(value, default=str)
    return words if len(words) < 60 else words[:57] + "..."
