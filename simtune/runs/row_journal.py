"""Finished rows, in a file of JSON lines that grows while work goes on: a kill loses only the row under way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simtune.errors import SimtuneError, UsageError
from simtune.specs.input_files import JsonError, parse_json, read_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk, not of the request."""


class RowJournal:
    """A file of lines `{"key": ..., "row": ..., "sha256": ...}`, the hash of key and row. A line that is not as it was
    written is as if it had not been."""

    def __init__(self, file: Path) -> None:
        self.file = file
        # True once the file is known to end with a complete line.
        self._whole = False

    def read(self) -> dict[str, Any]:
        """Rows by their key. Raises UsageError if the file cannot be read."""
        rows: dict[str, Any] = {}
        for line in self._bytes().split(b"\n"):
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
        line = (json.dumps({"key": key, "row": row, "sha256": _hash(key, row)}, allow_nan=False) + "\n").encode()
        try:
            if not self._whole:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._end()
            with self.file.open("ab", buffering=0) as file:
                self._whole = file.write(line) == len(line)
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(error.strerror) from None
            raise UsageError(
                f"{self.file}: cannot be written ({error.strerror}); name a file you may write to"
            ) from None
        if not self._whole:
            raise self._full("no space left")

    def _end(self) -> None:
        """Remove a last line that was cut short: the next line would be joined to it."""
        content = self._bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self.file, content.rfind(b"\n") + 1)

    def _bytes(self) -> bytes:
        return read_bytes(self.file) if self.file.exists() else b""

    def _full(self, why: str | None) -> SimtuneError:
        remedy = "make room and give the same command again"
        return SimtuneError(f"{self.file}: cannot be written ({why}); what it holds is kept: {remedy}")


def _hash(key: object, row: object) -> str:
    return hashlib.sha256(json.dumps([key, row]).encode()).hexdigest()[:16]
