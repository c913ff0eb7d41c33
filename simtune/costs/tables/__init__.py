"""Readers of operator times that others, or simtune itself, have measured.

A CSV or Parquet table is recognised by columns only its format has, and from then on every column it needs must be
there; a measurements.jsonl by its first line. What the files of one operator hold becomes one `Table`, a row a shape.

| source | tables | time |
|---|---|---|
| AIConfigurator | gemm, moe, all-reduce, nccl; attention, latent, sparse, linear layers, encoders; moe_a2a | ms; us |
| Vidur | mlp.csv, attention.csv, all_reduce.csv, send_recv.csv, cpu_overheads.csv | ms, rounded to 1 us |
| LLMServingSim | layers.csv; dense.csv, per_sequence.csv, attention.csv, skew.csv | ns; us |
| simtune | measurements.jsonl | s |

Two collections of one operator on one device differ by up to 7 % throughout, and more where kernels differ. They are
never mixed: the first source given that has an operator provides it, and the rows of others are counted as not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from simtune.costs.operators import operator_key
from simtune.costs.tables import aiconfigurator, aiconfigurator_attention, aiconfigurator_moe, llmservingsim, own, vidur
from simtune.costs.tables.common import (
    AICONFIGURATOR,
    LLMSERVINGSIM,
    VIDUR,
    Conflicts,
    FileContent,
    Formats,
    HostTable,
    ImbalanceTable,
    Origin,
    Table,
    account,
    designation,
    merge,
    read_csv,
    read_parquet,
    take,
)
from simtune.errors import Problem, SpecError, UsageError

__all__ = [
    "AICONFIGURATOR",
    "LLMSERVINGSIM",
    "SOURCES",
    "VIDUR",
    "Conflicts",
    "HostTable",
    "ImbalanceTable",
    "Origin",
    "Table",
    "Tables",
    "account",
    "designation",
    "read_tables",
    "take",
]

SOURCES: dict[str, Formats] = {
    "AIConfigurator": {**aiconfigurator.FORMATS, **aiconfigurator_attention.FORMATS, **aiconfigurator_moe.FORMATS},
    "Vidur": vidur.FORMATS,
    "LLMServingSim": llmservingsim.FORMATS,
}
"""For each source of CSV and Parquet tables: the columns that tell a format, and its reader."""

_CSV = (".csv", ".csv.gz")
_SUFFIXES = (*_CSV, ".parquet", ".jsonl")


@dataclass
class Tables:
    """What was found in the sources: operator tables by key, the host's table, and what is in none of them."""

    operators: dict[str, Table] = field(default_factory=dict)
    host: HostTable | None = None
    imbalance: ImbalanceTable | None = None
    notes: list[str] = field(default_factory=list)
    """Files that were passed over, and rows that belong to no operator."""


def read_tables(sources: Sequence[Path]) -> Tables:
    """Read table files and all tables in folders.

    A file given by name must be of a known format; in a folder other files are passed over and noted. Raises
    UsageError when a source does not exist, nothing was found, or tables of several devices are mixed; SpecError for a
    malformed table.
    """
    contents, notes = _read_sources(sources)
    pieces: dict[str, list[Table]] = {}
    for piece in (table for content in contents for table in content.tables if table.read):
        pieces.setdefault(piece.key, []).append(piece)
    if not pieces:
        raise UsageError(f"no table of operator times in {', '.join(map(str, sources))}")
    operators: dict[str, Table] = {}
    for key in sorted(pieces):
        table = _one_origin(pieces[key])
        if len(table):
            operators[key] = table
        else:
            notes.append(f"{key}: no row can be used: {account(table)}")
    return Tables(
        operators=dict(sorted(_with_nccl(operators).items())),
        host=_one_host([host for content in contents for host in content.hosts]),
        imbalance=next((table for content in contents for table in content.imbalance), None),
        notes=notes,
    )


def _read_sources(sources: Sequence[Path]) -> tuple[list[FileContent], list[str]]:
    """What the files of known formats hold, in the order given, and notes on what is in none of them."""
    contents: list[FileContent] = []
    notes: list[str] = []
    for source in sources:
        if not source.exists():
            raise UsageError(f"{source}: no such file or folder")
        for path in _files(source):
            content = _read_file(path)
            if content is not None:
                contents.append(content)
                unused = content.unused.items()
                notes += [f"{path.name}: {rows:,} rows belong to no operator: {why}" for why, rows in unused]
            elif path != source:
                notes.append(f"{path.name}: passed over, not a known table")
            else:
                raise SpecError(Problem(str(path), f"not a known table: one with {_tell_tales()} is"))
    return contents, notes


def _one_host(tables: Sequence[HostTable]) -> HostTable | None:
    """The rows of all tables of host times; None where there is none."""
    if not tables:
        return None
    return HostTable(
        np.concatenate([table.num_seqs for table in tables]),
        np.concatenate([table.seconds for table in tables]),
        tables[0].origin,
        tuple(name for table in tables for name in table.files),
    )


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    return sorted(p for p in source.rglob("*") if p.name.endswith(_SUFFIXES))


def _read_file(path: Path) -> FileContent | None:
    """The tables of one file, or None when it is of no known format."""
    if path.name.endswith(".jsonl"):
        return own.read(path)
    columns = read_parquet(path) if path.name.endswith(".parquet") else read_csv(path)
    for formats in SOURCES.values():
        for tell_tale, reader in formats.items():
            if all(name in columns.names for name in tell_tale):
                return reader(columns)
    return None


def _tell_tales() -> str:
    return "; ".join(
        f"the column{'s' * (len(names) > 1)} {', '.join(names)} ({source})"
        for source, formats in SOURCES.items()
        for names in formats
    )


def _one_origin(pieces: Sequence[Table]) -> Table:
    """The pieces of the first origin as one table; the rows of others are counted."""
    first = pieces[0].origin
    table = merge([p for p in pieces if p.origin == first])
    left_out = dict(table.left_out)
    for piece in pieces:
        if piece.origin != first:
            why = f"of {piece.origin.name}, since another source given before it has it"
            left_out[why] = left_out.get(why, 0) + piece.read
    return replace(table, left_out=left_out)


def _with_nccl(operators: dict[str, Table]) -> dict[str, Table]:
    """NCCL's all-reduce stands beside the engine's own one as a variant, and in its place where there is no other."""
    named = {}
    for key, table in operators.items():
        plain = operator_key("all_reduce", table.dtype)
        if table.kind == "all_reduce" and table.variant == "nccl" and plain not in operators:
            key, table = plain, replace(table, variant=None)
        named[key] = table
    return named
