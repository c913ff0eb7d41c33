"""Rows that are done, in a file of JSON lines that grows while work goes on: a kill costs what was under way."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simtune.errors import SimtuneError


class RowJournal:
    """A file of lines `{"key": ..., "row": ...}`. A line that is not whole is as if it had not been written."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._whole = False  # whether the file is known to end with the end of a line

    def read(self) -> dict[str, Any]:
        """Rows by their key. Raises SimtuneError where the file cannot be read."""
        rows: dict[str, Any] = {}
        for line in self._bytes().split(b"\n"):
            try:
                entry = json.loads(line)
                rows[entry["key"]] = entry["row"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return rows

    def add(self, key: str, row: Mapping[str, Any] | list[Any]) -> None:
        """Write a row down at once. Raises SimtuneError where it cannot be; the rows before it stay."""
        line = (json.dumps({"key": key, "row": row}, allow_nan=False) + "\n").encode()
        try:
            if not self._whole:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._end()
            with self.file.open("ab", buffering=0) as file:
                self._whole = file.write(line) == len(line)
                os.fsync(file.fileno())
        except PermissionError as error:
            raise self._refused(error.strerror, "name a file you may write to") from None
        except OSError as error:
            raise self._refused(error.strerror) from None
        if not self._whole:
            raise self._refused("no space left")

    def _end(self) -> None:
        """Take off a last line that was cut short: it must not take the next one with it."""
        whole = self._bytes()
        if whole and not whole.endswith(b"\n"):
            os.truncate(self.file, whole.rfind(b"\n") + 1)

    def _bytes(self) -> bytes:
        try:
            return self.file.read_bytes() if self.file.exists() else b""
        except OSError as error:
            raise SimtuneError(f"{self.file}: cannot be read ({error.strerror})") from None

    def _refused(self, why: str | None, remedy: str = "make room and give the same command again") -> SimtuneError:
        return SimtuneError(f"{self.file}: cannot be written ({why}); what it holds is kept: {remedy}")
