"""Reading of every file that a user gives.

Only regular files are opened: reading a pipe, a device or a socket might never end. The bytes of a file, as it stands
and unpacked, are limited (`MAX_BYTES`, or the environment's SIMTUNE_MAX_FILE_BYTES), so that a few kilobytes of gzip do
not become all memory there is. Text is UTF-8. JSON is that of RFC 8259: no NaN, no number that a float cannot hold, no
key twice, nothing nested deeper than `DEEPEST`. Nothing is ever unpickled.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from simtune.errors import Problem, SpecError, UsageError
from simtune.specs import room

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 256 << 20
"""Most bytes of one file, as it stands and unpacked, unless SIMTUNE_MAX_FILE_BYTES is set."""
ENVIRONMENT = "SIMTUNE_MAX_FILE_BYTES"
DEEPEST = 200
"""No file of ours nests deeper than ten levels."""
LARGEST_INT = 2**63 - 1
"""Largest whole number in any file; a larger one is no count of anything."""

_GZIP = b"\x1f\x8b"
CELL_BYTES = 64.0
"""Bytes of a cell of a table as a Python text in a list."""
_LONG_INT = re.compile(r"[0-9]{19}")
_KINDS = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def max_bytes() -> int:
    """Return the most bytes of one file. Raises UsageError if the environment variable is no number."""
    text = os.environ.get(ENVIRONMENT)
    if text is None:
        return MAX_BYTES
    if not text.isdigit() or len(text) > len(str(LARGEST_INT)):
        raise UsageError(f"{ENVIRONMENT}={text}: must be a number of bytes, such as {MAX_BYTES}")
    return int(text)


# --- bytes and text ---------------------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises UsageError naming the file and the reason if it cannot be read or is
    too large.
    """
    most = max_bytes()
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{path}: is a folder, a file was expected")
        if not stat.S_ISREG(mode):
            kind = next((words for is_kind, words in _KINDS.items() if is_kind(mode)), "no regular file")
            raise UsageError(
                f"{path}: is {kind}, a regular file was expected; write what comes from it to a file first"
            )
        with open(path, "rb") as file:
            raw = file.read(most + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    # A NUL in the name.
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: is no name of a file ({error})") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) > most:
        raise UsageError(f"{path}: {_too_large(most)}")
    return raw


def unpacked(path: Path, raw: bytes) -> bytes:
    """Return the contents of a gzip-compressed file, recognised by its first bytes; any other file as it is.

    Raises SpecError if the data are damaged, cut off, or larger than a file may be, UsageError if a file is only named
    .gz.
    """
    if not raw.startswith(_GZIP):
        if path.suffix == ".gz" and raw:
            raise SpecError(Problem(str(path), "is named .gz but is not gzip-compressed; compress it or drop the .gz"))
        return raw
    most, data = max_bytes(), b""
    try:
        # A gzip file may consist of several members.
        while raw:
            member = zlib.decompressobj(wbits=31)
            data += member.decompress(raw, most + 1 - len(data))
            if len(data) > most:
                raise SpecError(Problem(str(path), _too_large(most, " when unpacked")))
            if not member.eof:
                message = "the gzip data end too early: the file is cut off; fetch it again"
                raise SpecError(Problem(str(path), message))
            raw = member.unused_data.lstrip(b"\0")
    except zlib.error as error:
        raise SpecError(Problem(str(path), f"the gzip data are damaged ({error}); fetch the file again")) from None
    return data


def decoded(path: Path, raw: bytes) -> str:
    """The text of UTF-8 bytes. Raises SpecError naming the line of what is not."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"not a UTF-8 text file ({error.reason} at byte {error.start}); save it as UTF-8"
        raise SpecError(Problem(str(path), message, "", line)) from None


def read_text(path: Path) -> str:
    """Return the text of a file. Raises UsageError if it cannot be read, SpecError if it is not UTF-8."""
    return decoded(path, read_bytes(path))


def read_packed_text(path: Path) -> str:
    """The text of a file, plain or gzip-compressed. Raises UsageError and SpecError as its parts do."""
    return decoded(path, unpacked(path, read_bytes(path)))


def _too_large(most: int, how: str = "") -> str:
    limit = f"{room.in_words(most)}{how}"
    return f"is larger than {limit}; cut it, or set {ENVIRONMENT} to as many bytes as you have memory for"


# --- JSON -------------------------------------------------------------------------------------------------


class JsonError(ValueError):
    """Error in a JSON text, with line and column from 1; None if the place is not known."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the key {twice!r} stands there twice; keep one of the two")
    return mapping


def _no_constant(word: str) -> NoReturn:
    raise JsonError(f"{word} is not JSON: write null where there is no number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise JsonError(f"{shortened(text)} is larger than any number of 64 bits")
    return number


def _whole(text: str) -> int:
    if len(text) > len(str(LARGEST_INT)) + 1 or abs(int(text)) > LARGEST_INT:
        raise JsonError(f"{shortened(text)} is larger than any number of 64 bits")
    return int(text)


_HOOKS: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _no_constant, "parse_float": _finite}
_QUICK = json.JSONDecoder(**_HOOKS)
_CAREFUL = json.JSONDecoder(**_HOOKS, parse_int=_whole)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises JsonError for what is not strict JSON."""
    decoder = _CAREFUL if _LONG_INT.search(text) else _QUICK
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise JsonError(f"nested deeper than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise JsonError(f"nested deeper than {DEEPEST} levels")
    return value


def _depth(value: Any) -> int:
    """Return how deep lists and mappings are nested."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (list, dict))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def json_document(text: str, file: str, first_line: int = 1) -> Any:
    """The value of a JSON text that begins at a line of a file. Raises SpecError."""
    try:
        return parse_json(text)
    except JsonError as error:
        line = first_line + (error.line or 1) - 1 if first_line > 1 or error.line else None
        raise SpecError(Problem(file, f"not valid JSON: {error}", "", line, error.column)) from None


def json_lines(text: str, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of every line that is not empty. Raises SpecError at the first that is no JSON object."""
    for number, line in numbered_lines(text):
        value = json_document(line, file, number)
        if not isinstance(value, dict):
            raise SpecError(Problem(file, 'an object was expected: {"key": value, ...}', "", number))
        yield number, value


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Every line that is not empty, and its number from 1."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line and not line.isspace())


# --- CSV --------------------------------------------------------------------------------------------------


DELIMITERS = ",;\t|"


def delimiter_of(text: str) -> str:
    """Return the separator of the columns of a table: the one of DELIMITERS that its first line has most of."""
    header = next((line for _, line in numbered_lines(text)), "")
    return max(DELIMITERS, key=header.count)


def csv_rows(text: str, file: str, delimiter: str = ",") -> tuple[list[list[str]], list[int]]:
    """Rows that are not empty, and the line that each ends in.

    Raises SpecError for what is no CSV, a cell of more than 131,072 characters included, UsageError if the rows
    would not fit into memory.
    """
    cells = text.count(delimiter) + text.count("\n")
    room.need(cells * CELL_BYTES, f"{file}: its {cells:,} cells", "cut the file")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise SpecError(Problem(file, f"not valid CSV: {error}", "", reader.line_num)) from None
    return rows, lines


def csv_table(text: str, file: str) -> tuple[list[str], list[list[str]], list[int]]:
    """Return header, rows as long as the header, and the line in which each of them ends.

    Raises SpecError and UsageError as `csv_rows` does, and if a row has another length or two columns one name.
    """
    rows, lines = csv_rows(text, file)
    header, rows = (rows[0], rows[1:]) if rows else ([], [])
    refuse_columns_twice(header, file)
    for row, line in zip(rows, lines[1:], strict=True):
        if len(row) != len(header):
            raise SpecError(Problem(file, f"has {len(row)} values, the header names {len(header)}", "", line))
    return header, rows, lines[1:]


def refuse_columns_twice(header: Sequence[str], file: str) -> None:
    """Raise SpecError if two columns have one name."""
    for name in dict.fromkeys(header):
        if name.strip() and header.count(name) > 1:
            raise SpecError(Problem(file, f"{header.count(name)} columns have this name; keep one", name, 1))


# --- arrays -----------------------------------------------------------------------------------------------


def read_arrays(path: Path, raw: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file by name. Nothing in it is unpickled, and nothing is unpacked that would be too
    large.

    Raises SpecError if the file is damaged or contains something else than arrays of plain numbers.
    """
    most = max_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > most:
                raise SpecError(Problem(str(path), _too_large(most, " when unpacked")))
            names = [member.filename for member in members]
            if len(set(names)) < len(names):
                raise ValueError("it holds two arrays of one name")
            return {name.removesuffix(".npy"): _array(archive.read(name), name) for name in names}
    except SpecError:
        raise
    # What a damaged archive can raise is not written down anywhere: struct.error, zlib.error, NotImplementedError, ...
    except Exception as error:
        message = f"cannot be read as an array file: {error or type(error).__name__}"
        raise SpecError(Problem(str(path), message)) from None


def _array(raw: bytes, name: str) -> NDArray[Any]:
    """Raise ValueError if these are not the bytes of an array of plain numbers."""
    import numpy as np
    from numpy.lib import format as npy

    stream = io.BytesIO(raw)
    if npy.read_magic(stream) != (1, 0):
        raise ValueError(f"{name} is of another version of numpy's format than 1.0")
    shape, by_columns, dtype = npy.read_array_header_1_0(stream)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are never unpickled")
    count = 1
    for size in shape:
        count *= size
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(raw) - stream.tell():
        raise ValueError(f"{name} says it is of shape {shape}, and holds {len(raw) - stream.tell():,} bytes")
    array: NDArray[Any] = np.frombuffer(raw, dtype, count, stream.tell()).reshape(
        shape, order="F" if by_columns else "C"
    )
    return array


def shortened(value: object, most: int = 60) -> str:
    """Return a value as a message shows it, shortened if it is long."""
    words = str(value)
    return words if len(words) <= most else f"{words[: most - 20]}... ({len(words):,} characters)"
