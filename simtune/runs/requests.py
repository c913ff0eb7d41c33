"""Every simulated request, as the file that was asked for: CSV, JSON lines or Parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from simtune.errors import UsageError
from simtune.runs.schema import RequestRow
from simtune.runs.tables import columns, to_csv
from simtune.sim.result import Result


def requests_table(result: Result) -> dict[str, list[Any]]:
    """Every request, column by column as `RequestRow` declares them; None where a time never came."""
    stream, outcome = result.stream, result.outcome
    computed: dict[str, Sequence[Any]] = {
        "request": range(len(stream)),
        "class": [stream.class_names[i] for i in stream.class_index.tolist()],
        "engine_core": outcome.core.tolist(),
        "prompt_tokens": stream.prompt_tokens.tolist(),
        "output_tokens": stream.output_tokens.tolist(),
        "preemptions": outcome.preemptions.tolist(),
        "resent": outcome.resent.tolist(),
        "good": result.good.tolist(),
    }
    names = [name for name in columns(RequestRow) if stream.graph is not None or name not in RequestRow.MAY_LACK]
    return {name: list(computed[name]) if name in computed else _times(result, name) for name in names}


def _times(result: Result, column: str) -> list[float | None]:
    """A column of `Result`, None for its NaN."""
    return [None if x != x else x for x in getattr(result, column).tolist()]


def requests_csv(result: Result) -> str:
    """`requests.csv` of a simulation."""
    table = requests_table(result)
    return to_csv(tuple(table), zip(*table.values(), strict=True))


def requests_file(name: str, result: Result) -> bytes:
    """The requests as the file's ending says: .csv, .jsonl or .parquet. Raises UsageError for any other ending."""
    if name.endswith(".csv"):
        return requests_csv(result).encode()
    table = requests_table(result)
    if name.endswith(".jsonl"):
        rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    if name.endswith(".parquet"):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UsageError(f"{name}: Parquet needs pyarrow; pip install 'simtune[parquet]', or name a .csv") from None
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(table), sink)
        return sink.getvalue()
    raise UsageError(f"{name}: end the name in .csv, .jsonl or .parquet")
