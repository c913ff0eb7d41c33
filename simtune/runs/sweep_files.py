"""The files of a sweep: one table as CSV or Parquet, and its page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simtune.errors import UsageError
from simtune.runs.files import write_file
from simtune.runs.tables import to_csv


def write_sweep(folder: Path, rows: Sequence[Mapping[str, Any]], page: str, parquet: bool) -> None:
    """sweep.csv, sweep.html and, if asked for, sweep.parquet. Raises UsageError where pyarrow is missing for it."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "error"))
    columns.append("error")
    write_file(folder / "sweep.csv", to_csv(columns, ([row.get(key) for key in columns] for row in rows)))
    write_file(folder / "sweep.html", page)
    if parquet:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UsageError("--parquet needs pyarrow; pip install 'simtune[parquet]'") from None
        sink = io.BytesIO()
        table = pyarrow.table({key: [row.get(key) for row in rows] for key in columns})
        pyarrow.parquet.write_table(table, sink)
        write_file(folder / "sweep.parquet", sink.getvalue())
