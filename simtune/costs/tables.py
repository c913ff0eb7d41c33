"""Readers of published tables of operator times, each with its own columns and units.

A table is recognised by a column only its format has, and from then on every column it needs must be there.
Values are turned into SI units and into the shape parameters of `simtune.costs.operators`. Rows without a
positive, finite time are left out and counted; rows measured more than once count as one point with the
median time.

| format | recognised by | time | remarks |
|---|---|---|---|
| AIConfigurator GEMM, attention, MoE | gemm_dtype, attn_dtype, moe_dtype | ms | under CUDA graphs |
| AIConfigurator custom all-reduce | allreduce_dtype | ms | message_size counts elements; graph rows only |
| Vidur mlp.csv | n_expanded_embd | ms, rounded to 1 us | norm, activation, rope, add |
| Vidur cpu_overheads.csv | sampler_launch_median | ms | host time per step |
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simtune.costs.operators import OPERATORS, Array, operator_key
from simtune.errors import Problem, SpecError, UsageError
from simtune.specs.base import DTYPE_BYTES, Dtype
from simtune.specs.hardware import OperatorKind

Mask = NDArray[np.bool_]

_DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "bf16", "fp8": "fp8"}
"""The two 16-bit formats run at one speed, see `simtune.costs.predict`."""
_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Origin:
    """Who published a table, and under which licence."""

    name: str
    licence: str


AICONFIGURATOR = Origin("AIConfigurator (NVIDIA, ai-dynamo/aiconfigurator)", "Apache-2.0")
VIDUR = Origin("Vidur (microsoft/vidur)", "MIT")


@dataclass(frozen=True)
class Table:
    """Measured times of one operator: one row per shape, times in seconds."""

    kind: OperatorKind
    dtype: Dtype
    shape: dict[str, Array]
    seconds: Array
    origin: Origin
    files: tuple[str, ...]
    kv_dtype: Dtype | None = None
    variant: str | None = None
    device: str | None = None
    software: str | None = None
    resolution_s: float = 0.0
    """Step to which the times were rounded."""
    left_out: int = 0
    """Rows without a usable shape and time."""
    merged: int = 0
    """Rows that measured a shape again; the median of its rows stands for it."""

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def key(self) -> str:
        return operator_key(self.kind, self.dtype, self.kv_dtype, self.variant)


@dataclass(frozen=True)
class HostTable:
    """Measured host time per step, in seconds, for numbers of running sequences."""

    num_seqs: Array
    seconds: Array
    origin: Origin
    files: tuple[str, ...]


@dataclass
class Tables:
    """What was found in the sources: operator tables by key, the host's table, and what was passed over."""

    operators: dict[str, Table] = field(default_factory=dict)
    host: HostTable | None = None
    notes: list[str] = field(default_factory=list)


def read_tables(sources: Sequence[Path]) -> Tables:
    """Read table files and all tables in folders.

    A file given by name must be of a known format; in a folder other files are passed over and noted.
    Raises UsageError when a source does not exist or nothing was found, SpecError for a malformed table.
    """
    found = Tables()
    pieces: dict[str, list[Table]] = {}
    hosts: list[HostTable] = []
    for source in sources:
        if not source.exists():
            raise UsageError(f"{source}: no such file or folder")
        for path in _files(source):
            read = _read_file(path, found.notes)
            if read is None and path == source:
                raise SpecError(Problem(str(path), f"not a known table: one of the columns {', '.join(FORMATS)} tells"))
            for piece in read or ():
                if isinstance(piece, HostTable):
                    hosts.append(piece)
                elif len(piece):
                    pieces.setdefault(piece.key, []).append(piece)
    if not pieces:
        raise UsageError(f"no table of operator times in {', '.join(map(str, sources))}")
    found.operators = {key: _merge(pieces[key]) for key in sorted(pieces)}
    if hosts:
        found.host = HostTable(
            np.concatenate([h.num_seqs for h in hosts]),
            np.concatenate([h.seconds for h in hosts]),
            hosts[0].origin,
            tuple(name for h in hosts for name in h.files),
        )
    return found


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    return sorted(p for p in source.rglob("*") if p.name.endswith((".csv", ".csv.gz")))


def _read_file(path: Path, notes: list[str]) -> Sequence[Table | HostTable] | None:
    """The tables of one file, or None when it is of no known format."""
    table = _Csv(path)
    for column, reader in FORMATS.items():
        if column in table.names:
            return reader(table, notes)
    notes.append(f"{path.name}: passed over, not a known table")
    return None


class _Csv:
    """A CSV file as columns of text, which remembers the line of every row."""

    def __init__(self, path: Path) -> None:
        self.file = path.name
        self._path = str(path)
        try:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="") as stream:
                rows = list(csv.reader(stream))
        except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
            raise SpecError(Problem(self._path, f"cannot be read as a CSV table: {error}")) from None
        self.names = {name: at for at, name in enumerate(rows[0])} if rows else {}
        self._lines = [line for line, row in enumerate(rows[1:], start=2) if row]
        body = [row for row in rows[1:] if row]
        for line, row in zip(self._lines, body, strict=True):
            if len(row) != len(rows[0]):
                message = f"has {len(row)} values, the header names {len(rows[0])}"
                raise SpecError(Problem(self._path, message, "", line))
        self._columns = list(zip(*body, strict=True))

    def __len__(self) -> int:
        return len(self._lines)

    def require(self, *names: str) -> None:
        """Raises SpecError naming every column that is missing."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise SpecError([Problem(self._path, "column is missing", name, 1) for name in missing])

    def text(self, name: str) -> Sequence[str]:
        self.require(name)
        return self._columns[self.names[name]] if self._columns else ()

    def numbers(self, name: str) -> Array:
        """A column of numbers; an empty cell is NaN. Raises SpecError at the first cell that is no number."""
        cells = self.text(name)
        try:
            return np.fromiter(map(float, cells), np.float64, len(cells))
        except ValueError:
            return np.array([self._number(cell, at, name) for at, cell in enumerate(cells)])

    def _number(self, cell: str, at: int, name: str) -> float:
        if not cell.strip():
            return float("nan")
        try:
            return float(cell)
        except ValueError:
            column = self.names[name] + 1
            message = f"{cell!r} is not a number (field {column})"
            raise SpecError(Problem(self._path, message, name, self._lines[at])) from None

    def only(self, name: str) -> str | None:
        """The value of a column where it is the same in all rows."""
        values = set(self.text(name)) if name in self.names else set()
        return values.pop() if len(values) == 1 else None

    def equal(self, name: str, value: str) -> Mask:
        return np.array([cell == value for cell in self.text(name)], dtype=np.bool_)


Reader = Callable[[_Csv, list[str]], Sequence[Table | HostTable]]


def _gemm(table: _Csv, notes: list[str]) -> list[Table]:
    shape = {name: table.numbers(name) for name in "mnk"}
    return _by_dtype(table, notes, "gemm", ("gemm_dtype",), shape)


def _moe(table: _Csv, notes: list[str]) -> list[Table]:
    table.require("distribution")
    shape = {
        "tokens": table.numbers("num_tokens"),
        "hidden": table.numbers("hidden_size"),
        "intermediate": table.numbers("inter_size") / table.numbers("moe_tp_size"),
        "experts_per_token": table.numbers("topk"),
        "experts": table.numbers("num_experts"),
        "ep": table.numbers("moe_ep_size"),
    }
    balanced = table.equal("distribution", "balanced")
    _note(notes, table, int((~balanced).sum()), "skewed routing")
    return _by_dtype(table, notes, "moe", ("moe_dtype",), shape, balanced)


def _attention(table: _Csv, notes: list[str]) -> list[Table]:
    new, step = table.numbers("isl"), table.numbers("step")
    dtypes = ("attn_dtype", "kv_cache_dtype")
    tables: list[Table] = []
    for name, kind, length in (
        ("context_attention", "prefill_attention", "tokens"),
        ("generation_attention", "decode_attention", "context"),
    ):
        rows = table.equal("op_name", name)
        if not rows.any():
            continue
        tokens = new if length == "tokens" else new + step
        window = table.numbers("window_size") if "window_size" in table.names else np.zeros(len(table))
        shape = {
            "batch": table.numbers("batch_size"),
            length: tokens,
            "heads": table.numbers("num_heads"),
            "kv_heads": table.numbers("num_key_value_heads"),
            "head_dim": table.numbers("head_dim"),
            "window": np.where(window > 0, np.minimum(window, tokens), tokens),
        }
        if length == "tokens":
            cached = rows & (step != 0)
            _note(notes, table, int(cached.sum()), "prefill over a cached prefix")
            rows = rows & ~cached
        tables += _by_dtype(table, notes, kind, dtypes, shape, rows)  # type: ignore[arg-type]
    return tables


def _all_reduce(table: _Csv, notes: list[str]) -> list[Table]:
    dtypes = table.text("allreduce_dtype")
    element = np.array([DTYPE_BYTES[_DTYPES[d]] if d in _DTYPES else np.nan for d in dtypes])
    shape = {"devices": table.numbers("num_gpus"), "bytes": table.numbers("message_size") * element}
    graph = np.array([backend.endswith("graph") for backend in table.text("backend")], dtype=np.bool_)
    _note(notes, table, int((~graph).sum()), "launched eagerly")
    return _by_dtype(table, notes, "all_reduce", ("allreduce_dtype",), shape, graph)


def _by_dtype(
    table: _Csv,
    notes: list[str],
    kind: OperatorKind,
    dtype_columns: tuple[str, ...],
    shape: dict[str, Array],
    rows: Mask | None = None,
) -> list[Table]:
    """One table per dtype (and KV dtype) found; rows of dtypes that no model here has are noted."""
    table.require("latency")
    seconds = table.numbers("latency") * _MS
    software = [x for x in (table.only("framework"), table.only("version")) if x]
    tables = []
    columns = [table.text(name) for name in dtype_columns]
    wanted = np.ones(len(table), dtype=np.bool_) if rows is None else rows
    found: dict[tuple[str, ...], list[int]] = {}
    for row, names in enumerate(zip(*columns, strict=True)):
        if wanted[row]:
            found.setdefault(names, []).append(row)
    for names, members in found.items():
        if any(name not in _DTYPES for name in names):
            _note(notes, table, len(members), f"{dtype_columns[0]} {names[0]}")
            continue
        at = np.array(members)
        tables.append(
            _clean(
                Table(
                    kind=kind,
                    dtype=_DTYPES[names[0]],
                    kv_dtype=_DTYPES[names[1]] if len(names) > 1 else None,
                    shape={name: column[at] for name, column in shape.items()},
                    seconds=seconds[at],
                    origin=AICONFIGURATOR,
                    files=(table.file,),
                    device=table.only("device"),
                    software=" ".join(software) or None,
                )
            )
        )
    return tables


def _vidur_mlp(table: _Csv, notes: list[str]) -> list[Table]:
    tp = table.numbers("num_tensor_parallel_workers")
    hidden, heads = table.numbers("n_embd"), table.numbers("n_head")
    kv_heads, inter = table.numbers("n_kv_head"), table.numbers("n_expanded_embd")
    gated = table.equal("use_gated_mlp", "True")
    width = {
        "input_layernorm": ("norm", 2 * hidden),
        "post_attention_layernorm": ("norm", 2 * hidden),
        "mlp_act": ("activation", np.where(gated, 3, 2) * inter / tp),
        "attn_rope": ("rope", 2 * (heads / tp + np.maximum(1, kv_heads / tp)) * hidden / heads),
        "add": ("add", 3 * hidden),
    }
    rows = table.numbers("num_tokens")
    return [
        _clean(
            Table(
                kind="elementwise",
                dtype="bf16",  # measured in fp16
                variant=variant,
                shape={"rows": rows, "width": elements},
                seconds=table.numbers(f"time_stats.{name}.median") * _MS,
                origin=VIDUR,
                files=(table.file,),
                resolution_s=1e-6,
            )
        )
        for name, (variant, elements) in width.items()
    ]


def _vidur_host(table: _Csv, notes: list[str]) -> list[HostTable]:
    columns = (
        "schedule_median",
        "prepare_inputs_launch_median",
        "sampler_launch_median",
        "process_model_outputs_median",
    )
    table.require("batch_size", *columns)
    num_seqs = table.numbers("batch_size")
    seconds = np.sum([table.numbers(name) for name in columns], axis=0) * _MS
    usable = np.isfinite(seconds) & (seconds > 0) & (num_seqs > 0)
    _note(notes, table, int((~usable).sum()), "no positive time")
    return [HostTable(num_seqs[usable], seconds[usable], VIDUR, (table.file,))]


FORMATS: dict[str, Reader] = {
    "gemm_dtype": _gemm,
    "attn_dtype": _attention,
    "moe_dtype": _moe,
    "allreduce_dtype": _all_reduce,
    "n_expanded_embd": _vidur_mlp,
    "sampler_launch_median": _vidur_host,
}
"""The column that tells a format, and its reader."""


def _note(notes: list[str], table: _Csv, rows: int, why: str) -> None:
    if rows:
        notes.append(f"{table.file}: {rows} rows left out: {why}")


def _clean(table: Table) -> Table:
    """Without rows whose time or shape is not a positive, finite number."""
    columns = [*table.shape.values(), table.seconds]
    usable: Mask = np.logical_and.reduce([np.isfinite(x) & (x > 0) for x in columns])
    return replace(take(table, np.flatnonzero(usable)), left_out=int((~usable).sum()))


def take(table: Table, rows: NDArray[np.intp]) -> Table:
    """The table with these rows only."""
    shape = {name: column[rows] for name, column in table.shape.items()}
    return replace(table, shape=shape, seconds=table.seconds[rows])


def _merge(pieces: Sequence[Table]) -> Table:
    """Pieces of one operator as one table, with one row per shape."""
    first = pieces[0]
    names = OPERATORS[first.kind].shape
    shapes = np.column_stack([np.concatenate([p.shape[name] for p in pieces]) for name in names])
    seconds = np.concatenate([p.seconds for p in pieces])
    unique, group, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    ordered = seconds[np.lexsort((seconds, group.ravel()))]
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    median = (ordered[start + (counts - 1) // 2] + ordered[start + counts // 2]) / 2
    return replace(
        first,
        shape={name: unique[:, at] for at, name in enumerate(names)},
        seconds=median,
        files=tuple(dict.fromkeys(name for p in pieces for name in p.files)),
        left_out=sum(p.left_out for p in pieces),
        merged=len(seconds) - len(unique),
    )
