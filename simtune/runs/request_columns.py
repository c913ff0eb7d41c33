"""Every simulated request, in the format that the user chose: CSV, JSON lines or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from simtune.arrays import Array
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.runs import parquet
from simtune.runs.schema import RequestRow
from simtune.runs.tables import columns, plain_csv

BLOCK = 1 << 14
"""Rows that are made together: a row as Python objects takes five times its text."""


def requests_table(result: Result, rows: slice = slice(None)) -> dict[str, list[Any]]:
    """Yield every request, column by column as `RequestRow` declares them; None for an event that never happened.
    `rows` selects a part of them.
    """
    stream, outcome = result.stream, result.outcome
    computed: dict[str, Sequence[Any]] = {
        "request": range(len(stream))[rows],
        "class": [stream.class_names[i] for i in stream.class_index[rows].tolist()],
        "engine_core": outcome.core[rows].tolist(),
        "prompt_tokens": stream.prompt_tokens[rows].tolist(),
        "output_tokens": stream.output_tokens[rows].tolist(),
        "preemptions": outcome.preemptions[rows].tolist(),
        "resent": outcome.resent[rows].tolist(),
        "good": result.good[rows].tolist(),
    }
    return {
        name: list(computed[name]) if name in computed else _times(getattr(result, name)[rows])
        for name in _names(result)
    }


def _names(result: Result) -> list[str]:
    """Return the columns of the table: those of request graphs, of held-back requests, of front ends and of
    first tokens from decode instances only if there are any."""
    absent = set()
    if result.stream.families is None:
        absent |= {"family_s", "family_active_s"}
    elif not result.stream.families.has_pauses:
        absent.add("family_active_s")
    if result.stream.due_s is None:
        absent.add("held_s")
    if (result.outcome.routed < 0).all():
        absent.add("front_end_s")
    if (result.outcome.prefilled < 0).all():
        absent.add("delivery_s")
    return [name for name in columns(RequestRow) if name not in absent]


def _times(column: Array) -> list[float | None]:
    """Times, None for NaN."""
    return [None if x != x else x for x in column.tolist()]


def _rows(result: Result) -> Iterator[tuple[Any, ...]]:
    """The rows of the table, made in blocks."""
    for block in _blocks(result):
        yield from zip(*block.values(), strict=True)


def _blocks(result: Result) -> Iterator[dict[str, list[Any]]]:
    for begin in range(0, len(result.stream), BLOCK):
        yield requests_table(result, slice(begin, begin + BLOCK))


def requests_csv(result: Result) -> str:
    """`requests.csv` of a simulation."""
    blocks = (block | {"good": ["true" if good else "false" for good in block["good"]]} for block in _blocks(result))
    rows = (row for block in blocks for row in zip(*block.values(), strict=True))
    return plain_csv(tuple(_names(result)), rows)


def check_format(name: str) -> None:
    """Raise UsageError, before any work, if requests cannot be written to a file of this name."""
    if not name.endswith((".csv", ".jsonl", ".parquet")):
        raise UsageError(f"{name}: end the name in .csv, .jsonl or .parquet")
    if name.endswith(".parquet"):
        parquet.require(f"{name}: Parquet", ", or name a .csv")


def requests_file(name: str, result: Result) -> bytes:
    """Return the requests in the format of the file's ending: .csv, .jsonl or .parquet. Raises UsageError for any other
    ending.
    """
    if name.endswith(".csv"):
        return requests_csv(result).encode()
    if name.endswith(".jsonl"):
        names = _names(result)
        rows = (dict(zip(names, row, strict=True)) for row in _rows(result))
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    if name.endswith(".parquet"):
        check_format(name)
        return parquet.table_bytes(requests_table(result))
    raise UsageError(f"{name}: end the name in .csv, .jsonl or .parquet")
