"""The files of a sweep: one table as CSV or Parquet, and its page; and the table read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simtune.errors import Problem, SpecError
from simtune.runs import parquet
from simtune.runs.files import write_file
from simtune.runs.tables import to_csv
from simtune.specs.input_files import csv_rows, read_text

TABLE, PAGE = "sweep.csv", "sweep.html"
FIRST_NUMBER = "saturated"
"""The column after the swept fields."""


class SweepTable(NamedTuple):
    """A sweep that was read: the fields that were swept, and a row for each point."""

    name: str
    keys: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


_MOST = 1e300
"""Largest number in a table: it may be shown in another unit."""


def is_sweep(folder: Path) -> bool:
    """True if `simtune sweep --out` wrote the folder to its end."""
    return (folder / TABLE).is_file() and not (folder / "summary.json").is_file()


def sweeps_in(folder: Path) -> tuple[Path, ...]:
    """The sweeps in a folder that is none itself, by name."""
    if not folder.is_dir() or is_sweep(folder):
        return ()
    return tuple(sorted(below for below in folder.iterdir() if is_sweep(below)))


def read_sweep(folder: Path, name: str | None = None) -> SweepTable:
    """The table of a sweep as it was written. Raises UsageError if it cannot be read, SpecError with line and column if
    it is damaged.
    """
    file = str(folder / TABLE)
    lists, lines = csv_rows(read_text(folder / TABLE), file)
    header = lists[0] if lists else []
    if FIRST_NUMBER not in header[1:] or header[-1] != "error":
        raise SpecError(
            Problem(file, f"must have the swept fields, {FIRST_NUMBER}, ... and error as its header", "", 1)
        )
    if len(lists) == 1:
        raise SpecError(Problem(file, "has no points below its header", "", 1))
    swept = header.index(FIRST_NUMBER)
    rows = []
    for cells, line in zip(lists[1:], lines[1:], strict=True):
        if len(cells) != len(header):
            raise SpecError(Problem(file, f"{len(cells)} cells under a header of {len(header)}", "", line))
        numbers = {
            key: _value(cell, file, key, line) for key, cell in zip(header[swept:-1], cells[swept:-1], strict=True)
        }
        rows.append({**dict(zip(header[:swept], cells, strict=False)), **numbers, "error": cells[-1] or None})
    return SweepTable(name or folder.resolve().name, tuple(header[:swept]), tuple(rows))


def _value(cell: str, file: str, key: str, line: int) -> float | int | bool | None:
    """Return the value that a cell was before it was written."""
    if cell in ("", "true", "false"):
        return None if not cell else cell == "true"
    try:
        value = int(cell) if cell.lstrip("-").isdecimal() else float(cell)
        # False for NaN; `float` raises OverflowError for whole numbers beyond its range.
        if abs(float(value)) <= _MOST:
            return value
    except (ValueError, OverflowError):
        pass
    raise SpecError(Problem(file, f"must be a number, true, false or empty, not {cell!r}", key, line))


def write_sweep(folder: Path, rows: Sequence[Mapping[str, Any]], page: str, as_parquet: bool) -> None:
    """sweep.csv, sweep.html and, if asked for, sweep.parquet. Raises UsageError if pyarrow is missing for it."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "error"))
    columns.append("error")
    write_file(folder / TABLE, to_csv(columns, ([row.get(key) for key in columns] for row in rows)))
    write_file(folder / PAGE, page)
    if as_parquet:
        parquet.require("--parquet")
        write_file(
            folder / "sweep.parquet", parquet.table_bytes({key: [row.get(key) for row in rows] for key in columns})
        )
