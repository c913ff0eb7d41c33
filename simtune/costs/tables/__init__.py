"""Readers of operator times measured by others, or by simtune itself.

A CSV or Parquet table is recognised by columns that only its format has, and must then have every column that the
format needs; a measurements.jsonl is recognised by its first line. The files of one operator become one `Table`, with a
row per shape.

| source | tables | time |
|---|---|---|
| AIConfigurator | gemm, quantising, moe, all-reduce, nccl; attention, latent, linear layers, encoders; a2a | ms; us |
| Vidur | mlp.csv, attention.csv, all_reduce.csv, send_recv.csv, cpu_overheads.csv | ms, rounded to 1 us |
| LLMServingSim | layers.csv; dense.csv, per_sequence.csv, attention.csv, moe.csv, skew.csv | ns; us |
| simtune | measurements.jsonl, plain or gzipped | s |

Two collections of one operator on one device, by other people, other releases or other engines, differ by up to 7 %
throughout, and more where kernels differ. They are never mixed: the first source given that has an operator provides
it, and the rows of others are counted as not used. If there are tables of several engines' kernels, the engine must be
given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from simtune.costs.operators import operator_key
from simtune.costs.tables import (
    aiconfigurator,
    aiconfigurator_attention,
    aiconfigurator_moe,
    aiconfigurator_sparse,
    llmservingsim,
    own,
    vidur,
)
from simtune.costs.tables.common import (
    AICONFIGURATOR,
    ENGINES,
    LLMSERVINGSIM,
    VIDUR,
    Conflicts,
    Dispute,
    FileContent,
    FormatReaders,
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
    "ENGINES",
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

SOURCES: dict[str, FormatReaders] = {
    "AIConfigurator": {
        **aiconfigurator.FORMATS,
        **aiconfigurator_attention.FORMATS,
        **aiconfigurator_sparse.FORMATS,
        **aiconfigurator_moe.FORMATS,
    },
    "Vidur": vidur.FORMATS,
    "LLMServingSim": llmservingsim.FORMATS,
}
"""For each source of CSV and Parquet tables: the columns by which a format is recognised, and its reader."""

_CSV = (".csv", ".csv.gz")
_JSON_LINES = (".jsonl", ".jsonl.gz")
_SUFFIXES = (*_CSV, ".parquet", *_JSON_LINES)


@dataclass
class Tables:
    """Content of the sources: operator tables by key, the host's table, and notes."""

    operators: dict[str, Table] = field(default_factory=dict)
    host: HostTable | None = None
    imbalance: ImbalanceTable | None = None
    notes: list[str] = field(default_factory=list)
    """Files that were passed over, and rows that belong to no operator."""
    disputes: dict[str, Dispute] = field(default_factory=dict)
    """Tables that were refused since one in a format of equal bytes is much faster, by key."""


def read_tables(sources: Sequence[Path], engine: str | None = None) -> Tables:
    """Read table files and all tables in folders.

    A file given by name must be of a known format; in a folder other files are passed over and noted. With `engine`,
    tables of other engines' kernels are passed over and noted; those of no engine, as NCCL's, belong to all. Raises
    UsageError when a source does not exist, nothing was found, or tables of several devices or engines are mixed;
    SpecError for a malformed table.
    """
    contents, notes = _read_sources(sources)
    read = [table for content in contents for table in content.tables if table.read]
    if not read:
        raise UsageError(f"no table of operator times in {', '.join(map(str, sources))}")
    of_engine, passed_over = _of_engine(read, engine)
    operators, unusable = _by_operator(of_engine)
    if not operators:
        raise UsageError(f"{', '.join(map(str, sources))}: {'; '.join(unusable)}")
    operators, apart = aiconfigurator.with_dynamic_scales(operators)
    notes += passed_over + unusable + apart
    return Tables(
        operators=dict(sorted(_with_nccl(operators).items())),
        host=_one_host([host for content in contents for host in content.hosts]),
        imbalance=next((table for content in contents for table in content.imbalance), None),
        notes=notes,
    )


def _read_sources(sources: Sequence[Path]) -> tuple[list[FileContent], list[str]]:
    """Return the content of files of known formats, in the order given, and notes on everything that is unused."""
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


def _by_operator(tables: Iterable[Table]) -> tuple[dict[str, Table], list[str]]:
    """Return one table for each operator, and notes on those without a usable row."""
    pieces: dict[str, list[Table]] = {}
    for piece in tables:
        pieces.setdefault(piece.key, []).append(piece)
    joined = {key: _one_collection(pieces[key]) for key in sorted(pieces)}
    notes = [f"{key}: no row can be used: {account(table)}" for key, table in joined.items() if not len(table)]
    return {key: table for key, table in joined.items() if len(table)}, notes


def _of_engine(tables: list[Table], engine: str | None) -> tuple[list[Table], list[str]]:
    """Return the tables of one engine's kernels and of no engine's, and notes on the files of others."""
    accepted = (None, _chosen_engine(tables, engine))
    notes = {f"{t.files[0]}: passed over, kernels of {t.engine}": None for t in tables if t.engine not in accepted}
    return [table for table in tables if table.engine in accepted], list(notes)


def _chosen_engine(tables: list[Table], engine: str | None) -> str | None:
    """Return the engine. Raises UsageError if it is unknown or absent, or there are several and none is chosen."""
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: there are tables of {', '.join(ENGINES)}")
    file_of = {table.engine: table.files[0] for table in reversed(tables) if table.engine}
    if engine is None and len(file_of) > 1:
        engines = ", ".join(f"{name} in {file}" for name, file in sorted(file_of.items()))
        raise UsageError(f"tables of several engines' kernels: {engines}; choose one with --engine")
    if engine is not None and file_of and engine not in file_of:
        raise UsageError(f"no table of {engine}'s kernels; the tables are of {', '.join(sorted(file_of))}")
    return engine or next(iter(file_of), None)


def _one_host(tables: Sequence[HostTable]) -> HostTable | None:
    """Join the rows of all tables of host times; None if there is none."""
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
    """Return the tables of one file, or None if it is of no known format."""
    if path.name.endswith(_JSON_LINES):
        return own.read(path)
    columns = read_parquet(path) if path.name.endswith(".parquet") else read_csv(path)
    readers = {
        tell_tale: reader
        for formats in SOURCES.values()
        for tell_tale, reader in formats.items()
        if all(name in columns.names for name in tell_tale)
    }
    # of several formats, the one with the most columns in common is the most specific
    return readers[max(readers, key=len)](columns) if readers else None


def _tell_tales() -> str:
    return "; ".join(
        f"the column{'s' * (len(names) > 1)} {', '.join(names)} ({source})"
        for source, formats in SOURCES.items()
        for names in formats
    )


def _one_collection(pieces: Sequence[Table]) -> Table:
    """Return the pieces of the first collection with a usable row as one table; the rows of others are counted."""
    first = next((piece for piece in pieces if len(piece)), pieces[0]).collection
    table = merge([p for p in pieces if p.collection == first])
    left_out = dict(table.left_out)
    for piece in pieces:
        if piece.collection != first and not len(piece):
            left_out |= {why: left_out.get(why, 0) + rows for why, rows in piece.left_out.items()}
        elif piece.collection != first:
            source = piece.origin.name if piece.origin != first[0] else piece.software
            why = f"of {source}, since another source given before it has it"
            left_out[why] = left_out.get(why, 0) + piece.read
    return replace(table, left_out=left_out)


def _with_nccl(operators: dict[str, Table]) -> dict[str, Table]:
    """Name NCCL's all-reduce as a variant beside the engine's own, or as the all-reduce if there is no other."""
    by_key = {}
    for key, table in operators.items():
        plain = operator_key("all_reduce", table.dtype)
        if table.kind == "all_reduce" and table.variant == "nccl" and plain not in operators:
            key, table = plain, replace(table, variant=None)
        by_key[key] = table
    return by_key
