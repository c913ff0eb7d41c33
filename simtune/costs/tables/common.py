"""Common parts of all readers of operator times: columns of a file, tables of one operator, and an account of rows.

A reader turns values into SI units and into the shape parameters of `simtune.costs.operators`. No row is dropped
silently: every row that a table does not use is counted under a reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Mask
from simtune.costs.operators import OPERATORS, operator_key
from simtune.errors import Problem, SpecError, UsageError
from simtune.specs import room
from simtune.specs.base import Dtype
from simtune.specs.hardware import OperatorKind
from simtune.specs.input_files import CELL_BYTES, csv_table, read_bytes, read_packed_text, refuse_columns_twice

MS, US, NS = 1e-3, 1e-6, 1e-9

# Fewer rows may be whole microseconds by chance.
_ROUNDED_ROWS = 20
_ROUNDED_TO = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)  # s, from the coarsest
# A median of an even number of rounded times may lie between two steps.
_ROUNDED_SHARE = 0.75
# Times of one shape that differ by more than this contradict each other.
_CONFLICT = 1.1


@dataclass(frozen=True, slots=True)
class Origin:
    """Author of the times, and the licence under which they are published."""

    name: str
    licence: str | None
    kind: Literal["measured", "published-tables"] = "published-tables"


AICONFIGURATOR = Origin("AIConfigurator (NVIDIA, ai-dynamo/aiconfigurator)", "Apache-2.0")
ENGINES = ("vllm", "trtllm", "sglang")
"""Engines whose kernels are timed by published tables."""

VIDUR = Origin("Vidur (microsoft/vidur)", "MIT")
LLMSERVINGSIM = Origin("LLMServingSim (casys-kaist/LLMServingSim)", "MIT")


@dataclass(frozen=True, slots=True)
class Conflicts:
    """Shapes measured several times with times that differ by more than 10 % and the rounding."""

    shapes: int = 0
    worst: float = 1.0
    """Longest over shortest time of the shape with the largest contradiction."""


@dataclass(frozen=True)
class Table:
    """Measured times of one operator: one row per shape, times in seconds.

    `read` is the number of rows in the files that belong to the operator: len(self) + merged + sum(left_out).
    """

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
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Rows that are not used, by reason."""
    merged: int = 0
    """Rows that measured a shape repeatedly; the median of its rows represents it."""
    conflicts: Conflicts = Conflicts()
    remarks: tuple[str, ...] = ()
    """Other changes to the rows, in words."""
    known_scales: bool = False
    """True if products were timed with quantising their inputs by scales that were known before."""

    launch_s: float | None = None
    """Seconds in which the host launched the kernels of a call, if that was the time of the rows left out."""

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def key(self) -> str:
        """The table's name in a hardware profile."""
        return operator_key(self.kind, self.dtype, self.kv_dtype, self.variant)

    @property
    def engine(self) -> str | None:
        """Engine whose kernels these are, by the first word of the software; None for those of no engine, such as
        NCCL's."""
        name = (self.software or "").partition(" ")[0].lower()
        return name if name in ENGINES else None

    @property
    def collection(self) -> tuple[Origin, str | None]:
        """Key of rows that were measured together: published times of two releases are two collections."""
        return self.origin, None if self.origin.kind == "measured" else self.software

    @property
    def read(self) -> int:
        """Rows of the files that belong to the operator."""
        return len(self) + self.merged + sum(self.left_out.values())


@dataclass(frozen=True)
class HostTable:
    """Measured host time per step, in seconds, for numbers of running sequences."""

    num_seqs: Array
    seconds: Array
    origin: Origin
    files: tuple[str, ...]


@dataclass(frozen=True)
class ImbalanceTable:
    """Measured decode attention of batches of unequal contexts, with that of equal contexts of the same mean."""

    mixed: Mask
    """True if a prefill chunk was in the same kernel."""
    blocks: Array
    """Pairs of a sequence and a KV head."""
    excess_tokens: Array
    """Tokens by which the longest context exceeds the mean."""
    balanced_s: Array
    imbalanced_s: Array
    origin: Origin
    files: tuple[str, ...]
    device: str | None


@dataclass
class FileContent:
    """Content of one file: tables, and counts of rows that belong to no operator, by reason."""

    tables: list[Table] = field(default_factory=list)
    hosts: list[HostTable] = field(default_factory=list)
    imbalance: list[ImbalanceTable] = field(default_factory=list)
    unused: dict[str, int] = field(default_factory=dict)

    def skip(self, rows: int, why: str) -> None:
        """Count rows that belong to no operator."""
        if rows:
            self.unused[why] = self.unused.get(why, 0) + rows

    def add(self, part: FileContent) -> None:
        """Add the tables, and the rows of no operator, of a part of the same file."""
        self.tables += part.tables
        for why, rows in part.unused.items():
            self.skip(rows, why)


class Columns:
    """Columns of cells of a file, with the line number of every row."""

    def __init__(self, path: Path, names: Sequence[str], columns: Sequence[Sequence[Any]], lines: Sequence[int]):
        self.path = path
        self.file = path.name
        self.names = {name: at for at, name in enumerate(names)}
        self._columns = columns
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, at: int) -> int:
        """Return the line of a row in the file, by its number from 0."""
        return self._lines[at]

    def require(self, *names: str) -> None:
        """Raise SpecError naming every column that is missing."""
        absent = [name for name in names if name not in self.names]
        if absent:
            raise SpecError([Problem(str(self.path), "column is missing", name, 1) for name in absent])

    def cells(self, name: str) -> Sequence[Any]:
        """Return a column as it was read. Raises SpecError if it is missing, as do all methods that name a column."""
        self.require(name)
        return self._columns[self.names[name]] if self._columns else ()

    def text(self, name: str) -> list[str]:
        """Return a column as text; an empty cell is the empty text."""
        return ["" if cell is None else str(cell) for cell in self.cells(name)]

    def numbers(self, name: str) -> Array:
        """Return a column of numbers; an empty cell is NaN. Raises SpecError at the first cell that is not a number."""
        cells = self.cells(name)
        try:
            return np.fromiter(map(float, cells), np.float64, len(cells))
        except (ValueError, TypeError):
            return np.array([self._number(cell, at, name) for at, cell in enumerate(cells)])

    def _number(self, cell: Any, at: int, name: str) -> float:
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            return float("nan")
        try:
            return float(cell)
        except (ValueError, TypeError):
            message = f"{cell!r} is not a number (field {self.names[name] + 1})"
            raise SpecError(Problem(str(self.path), message, name, self._lines[at])) from None

    def only(self, name: str) -> str | None:
        """Return the value of a column if it is the same in all rows; otherwise None."""
        values = set(self.text(name)) if name in self.names else set()
        return values.pop() if len(values) == 1 else None

    def device(self) -> str | None:
        """Return the device on which all rows were measured. Raises SpecError if they name several."""
        names = sorted(set(self.text("device"))) if "device" in self.names else []
        if len({designation(name) for name in names}) > 1:
            message = f"holds rows of several devices ({', '.join(names)}); split it into one table per device"
            raise SpecError(Problem(str(self.path), message, "device"))
        return names[0] if names else None

    def equal(self, name: str, value: str) -> Mask:
        """Return a mask of the rows whose cell is this text."""
        return np.array([cell == value for cell in self.text(name)], dtype=np.bool_)


TableReader = Callable[[Columns], FileContent]
FormatReaders = Mapping[tuple[str, ...], TableReader]
"""For each format: the columns by which it is recognised, and its reader."""


def read_csv(path: Path) -> Columns:
    """Read a CSV file, plain or gzipped. Raises SpecError if it cannot be read or its rows are of unequal length."""
    header, rows, lines = csv_table(read_packed_text(path), str(path))
    return Columns(path, header, list(zip(*rows, strict=True)), lines)


def read_parquet(path: Path) -> Columns:
    """Read a Parquet file; row r counts as line r. Raises UsageError if pyarrow is not installed."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UsageError(
            f"{path}: reading Parquet needs pyarrow: pip install 'simtune[parquet]', or convert the file to CSV"
        ) from None
    raw = read_bytes(path)
    try:
        with parquet.ParquetFile(BytesIO(raw)) as file:
            cells = file.metadata.num_rows * file.metadata.num_columns
            room.need(cells * CELL_BYTES, f"{path}: its {cells:,} cells", "cut the file")
            table = file.read()
    except (OSError, ArrowException) as error:
        raise SpecError(Problem(str(path), f"cannot be read as a Parquet table: {error}")) from None
    refuse_columns_twice(table.column_names, str(path))
    columns = [column.to_pylist() for column in table.columns]
    return Columns(path, table.column_names, columns, range(1, table.num_rows + 1))


def designation(device: str) -> str:
    """Return the part of a device's name that identifies it in all its spellings: H100 for `NVIDIA H100 80GB HBM3`.

    The first word with a digit that is no size of memory, no socket and no memory type; the whole name if there is
    none. Variants of one chip (PCIe, SXM, NVL) get the same designation; a device with a power cap does not: H100 PCAP.
    """
    words = re.split(r"[^A-Z0-9.]+", device.upper())
    memory_or_socket = re.compile(r"\d+GI?B|HBM\d\w*|SXM\d?|GDDR\d\w*")
    telling = (word for word in words if re.search(r"\d", word) and not memory_or_socket.fullmatch(word))
    capped = any(word in ("PCAP", "POWERCAP", "CAPPED") for word in words)
    return next(telling, " ".join(words)) + (" PCAP" if capped else "")


def finish(table: Table, excluded: Mapping[str, Mask] | None = None) -> Table:
    """Return the table without excluded rows, and without those whose time or shape is not a positive number.

    A row is counted under the first reason that applies. If most times are multiples of a step, they were rounded.
    """
    times = np.isfinite(table.seconds) & (table.seconds > 0)
    may_be = OPERATORS[table.kind].not_positive
    shapes: Mask = np.logical_and.reduce(
        [np.isfinite(x) & ((x > 0) | np.isin(x, may_be.get(name, ()))) for name, x in table.shape.items()]
    )
    reasons = {**(excluded or {}), "no positive time": ~times, "no positive shape": ~shapes}
    used_rows = np.ones(len(table), dtype=np.bool_)
    left_out = dict(table.left_out)
    for why, rows in reasons.items():
        hit = used_rows & rows
        if hit.any():
            left_out[why] = left_out.get(why, 0) + int(hit.sum())
            used_rows &= ~hit
    table = replace(take(table, np.flatnonzero(used_rows)), left_out=left_out)
    return replace(table, resolution_s=table.resolution_s or _resolution_s(table.seconds))


def _resolution_s(seconds: Array) -> float:
    """Return the coarsest step to which most of the times were rounded; 0 if none."""
    if len(seconds) < _ROUNDED_ROWS:
        return 0.0
    for step in _ROUNDED_TO:
        steps = seconds / step
        if np.mean(np.abs(steps - np.round(steps)) < 1e-6) >= _ROUNDED_SHARE:
            return step
    return 0.0


def take(table: Table, rows: NDArray[np.intp]) -> Table:
    """Return the table with these rows only."""
    shape = {name: column[rows] for name, column in table.shape.items()}
    return replace(table, shape=shape, seconds=table.seconds[rows])


def merge(pieces: Sequence[Table]) -> Table:
    """Join pieces of one operator to one table, with one row per shape and its median time.

    Raises UsageError if the pieces were measured on several devices.
    """
    _one_device(pieces)
    left_out: Counter[str] = Counter()
    for piece in pieces:
        left_out.update(piece.left_out)
    first = replace(pieces[0], left_out=dict(left_out))
    pieces = [p for p in pieces if len(p)]
    return _rows_of_all(first, pieces) if pieces else first


def _rows_of_all(first: Table, pieces: Sequence[Table]) -> Table:
    """Return `first` with the rows of all pieces, one row per shape."""
    names = OPERATORS[first.kind].shape
    shapes = np.column_stack([np.concatenate([p.shape[name] for p in pieces]) for name in names])
    seconds = np.concatenate([p.seconds for p in pieces])
    resolution_s = max(p.resolution_s for p in pieces)
    unique, median, conflicts = _one_row_per_shape(shapes, seconds, resolution_s)
    return replace(
        first,
        shape={name: unique[:, at] for at, name in enumerate(names)},
        seconds=median,
        files=_union(name for p in pieces for name in p.files),
        device=next((p.device for p in pieces if p.device), None),
        software=", ".join(_union(p.software for p in pieces if p.software)) or None,
        resolution_s=resolution_s,
        merged=len(seconds) - len(unique),
        conflicts=conflicts,
    )


def _one_device(pieces: Sequence[Table]) -> None:
    devices = {designation(p.device): p for p in pieces if p.device}
    if len(devices) > 1:
        raise UsageError(
            f"{pieces[0].key}: tables of several devices: "
            + ", ".join(f"{p.device} in {p.files[0]}" for p in devices.values())
            + "; fit one device at a time"
        )


def _one_row_per_shape(shapes: Array, seconds: Array, resolution_s: float) -> tuple[Array, Array, Conflicts]:
    """Return the distinct rows of `shapes` (calls, parameters), ascending; their median seconds; the contradictions."""
    unique, group, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    # Sorted by shape and then by time, so that the times of one shape are adjacent and ascending.
    ordered = seconds[np.lexsort((seconds, group.ravel()))]
    start = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp)
    median = (ordered[start + (counts - 1) // 2] + ordered[start + counts // 2]) / 2
    shortest, longest = ordered[start], ordered[start + counts - 1]
    conflicting = longest - shortest > (_CONFLICT - 1) * shortest + resolution_s
    worst = float((longest / shortest)[conflicting].max()) if conflicting.any() else 1.0
    return unique, median, Conflicts(int(conflicting.sum()), worst)


def _union(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def account(table: Table) -> str:
    """Return where every row of the table went, in words."""
    words = [f"{table.read:,} rows read, {len(table):,} used"]
    if table.merged:
        words.append(f"{table.merged:,} merged with another row of the same shape (median)")
    if table.conflicts.shapes:
        words.append(
            f"{table.conflicts.shapes:,} shapes have times that differ by more than 10 %, "
            f"the worst by a factor of {table.conflicts.worst:.3g}"
        )
    words += [f"{rows:,} left out: {why}" for why, rows in table.left_out.items()]
    return "; ".join([*words, *table.remarks])


class Dispute(NamedTuple):
    """A table that takes longer than that of another format of equal bytes."""

    key: str
    other: str
    ratio: float
    """Median ratio of times on common shapes."""
    shapes: int

    @property
    def words(self) -> str:
        """Why the table is refused."""
        return (
            f"takes {self.ratio:.2g} times as long (median of {self.shapes} common shapes) as "
            f"{self.other}, whose weights take as many bytes"
        )
