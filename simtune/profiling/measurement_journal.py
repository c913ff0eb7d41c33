"""The file of finished points, measurements.jsonl: written a line at a time, so that a run can be killed and go on.

Its format is that of `simtune.costs.tables.own`. Whatever is lost is the point that was being measured.
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
    """Header and points of a file, and a way to append to it. Use as a context manager."""

    def __init__(self, path: Path, header: MeasurementHeader, points: list[MeasuredPoint]) -> None:
        self.path, self.header, self.points = path, header, points
        self._file: FileIO | None = None

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> Self:
        """A new file with its header. Raises SimtuneError when it cannot be written."""
        journal = cls(path, MeasurementHeader.model_validate(dict(header)), [])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path.parent}: cannot be made ({error.strerror})") from None
        journal._append({"schema": SCHEMA, **header})
        return journal

    @classmethod
    def resume(cls, path: Path) -> tuple[Self, str | None]:
        """A file that is there, and what was repaired in it: a last line cut short is taken off.

        Raises SpecError when the file is damaged elsewhere.
        """
        header, points, cut_short = read_points(path)
        repaired = None
        text = path.read_bytes()
        if cut_short:
            os.truncate(path, text.rindex(b"\n") + 1)
            repaired = f"{path}: the last line was cut short and is taken off; its point is measured again"
        elif not text.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")
            repaired = f"{path}: the last line had no end and got one"
        return cls(path, header, points), repaired

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def must_be(self, **wanted: Any) -> None:
        """Raises UsageError unless the header says so of each of these keys."""
        for key, value in wanted.items():
            held = getattr(self.header, key, None)
            if held != value:
                raise UsageError(
                    f"{self.path}: holds measurements with {key} {_short(held)}, this run has {_short(value)}; they "
                    "are not mixed: name another folder with --out"
                )

    def record(self, task: MeasurementTask, **result: Any) -> MeasuredPoint:
        """Append one finished point. Raises SimtuneError when it cannot be written; what is there stays."""
        line = {**task.to_data(), **{key: value for key, value in result.items() if value is not None}}
        self._append(line)
        point = MeasuredPoint.model_validate(line)
        self.points.append(point)
        return point

    def _append(self, line: Mapping[str, Any]) -> None:
        rest = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise SimtuneError(
                f"{self.path}: cannot be written ({error.strerror}); its {len(self.points)} points are kept: make room "
                "and give the same command again"
            ) from None


def task_of(point: MeasuredPoint) -> MeasurementTask:
    """The task that a point answers."""
    return MeasurementTask(point.kind, point.dtype, point.shape, point.kv_dtype, point.variant, point.role)


def _short(value: Any) -> str:
    words = json.dumps(value, default=str)
    return words if len(words) < 60 else words[:57] + "..."
