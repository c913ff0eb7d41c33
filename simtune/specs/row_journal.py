"""Finished rows, in a file of JSON lines that grows while work goes on: a kill loses only the row being written.

Several processes may append to one file. Sweeps, findings of published systems and simulations of a search are kept so;
the points of `simtune profile` are a table that others read, without checksums (`simtune.costs.tables.own`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from simtune.errors import SimtuneError, UsageError
from simtune.specs.folder_lock import renew
from simtune.specs.input_files import JsonError, parse_json, read_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk, not of the request."""


class RowJournal:
    """A file of lines `{"key": ..., "row": ..., "sha256": ...}`, the hash of key and row. A line that is not as it was
    written is as if it had not been."""

    def __init__(self, file: Path, resume: str = "give the same command again") -> None:
        """`resume` is what continues with the rows, in messages."""
        self.file, self._resume = file, resume

    def read(self) -> dict[str, Any]:
        """Rows by their key. Raises UsageError if the file cannot be read."""
        rows: dict[str, Any] = {}
        for line in (read_bytes(self.file) if self.file.exists() else b"").split(b"\n"):
            try:
                entry = parse_json(line.decode())
                key, row = entry["key"], entry["row"]
                if entry["sha256"] == _hash(key, row):
                    rows[key] = row
            except (JsonError, UnicodeDecodeError, KeyError, TypeError):
                continue
        return rows

    def add(self, key: str, row: Mapping[str, Any] | list[Any]) -> None:
        """Write a row immediately. Raises SimtuneError if there is no room, UsageError if no file can be made; earlier
        rows stay.
        """
        text = json.dumps({"key": key, "row": row, "sha256": _hash(key, row)}, allow_nan=False)
        renew(self.file.absolute())
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab+", buffering=0) as file:
                line = f"{_line_break(file)}{text}\n".encode()
                # One write, so that lines of several processes do not mix.
                written = file.write(line)
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(error.strerror) from None
            raise UsageError(
                f"{self.file}: cannot be written ({error.strerror}); name a file you may write to"
            ) from None
        if written != len(line):
            raise self._full("no space left")

    def _full(self, why: str | None) -> SimtuneError:
        return SimtuneError(
            f"{self.file}: cannot be written ({why}); what it holds is kept: make room and {self._resume}"
        )


def _line_break(file: BinaryIO) -> str:
    """Return what ends a last line that was cut short: nothing if none was."""
    if file.seek(0, os.SEEK_END) == 0:
        return ""
    file.seek(-1, os.SEEK_END)
    return "" if file.read(1) == b"\n" else "\n"


def _hash(key: object, row: object) -> str:
    return hashlib.sha256(json.dumps([key, row]).encode()).hexdigest()[:16]
