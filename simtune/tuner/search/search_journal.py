"""The file of finished simulations, journal.jsonl: a search that was killed can be resumed.

Every result is a line of its own, with a checksum, on the disk before the search continues. The key of a result is the
plan and the rate that were simulated; every line names the inputs. Only simulations that were running are lost. A line
that was cut short is ignored. Several processes may append to one file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import TypeAdapter

from simtune.errors import SimtuneError, UsageError
from simtune.specs.plan import Plan

SCHEMA = "simtune/journal@1"

R = TypeVar("R")


class Ledger(Protocol[R]):
    """Store of simulation results that a search reads before it simulates, and adds to afterwards."""

    def look(self, key: str) -> R | None:
        """Return the stored result of a simulation; None if there is none."""

    def keep(self, key: str, result: R) -> None:
        """Store the result of a simulation."""


def key_of(plan: Plan, rate_rps: float | None, draw: int = 0, requests: int = 0) -> str:
    """Return the key of a simulation of a plan at a rate, or at the workload's own.

    For a fresh draw the key includes the draw and its number of requests.
    """
    at = None if rate_rps is None else float(rate_rps).hex()
    fresh = [draw, requests] if draw else []
    return _digest(json.dumps([plan.to_data(), at, *fresh], sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class SearchJournal(Generic[R]):
    """A `Ledger` in a file. Results are of a dataclass or a pydantic model, `kind`.

    Pickling keeps only the path: another process reads the file again.
    """

    def __init__(self, path: Path, inputs: str, kind: type[R]) -> None:
        """Open the file, which must be of the same `inputs`.

        Raise UsageError if it is of other inputs, and SimtuneError if it cannot be read or written.
        """
        self.path, self.inputs, self.kind = path, inputs, kind
        self._adapter: TypeAdapter[R] = TypeAdapter(kind)
        self._known: dict[str, Any] = {}
        self._file: int | None = None
        self._read()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.path, self.inputs, self.kind)

    @classmethod
    def begin(cls, path: Path, inputs: str, kind: type[R]) -> Self:
        """Return an empty journal, and delete an existing file. The file is created with the first result."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        return cls(path, inputs, kind)

    def discard(self) -> None:
        """Delete the file, and its folder if it is empty then."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __len__(self) -> int:
        return len(self._known)

    def look(self, key: str) -> R | None:
        """Return the stored result of a simulation; None if there is none."""
        data = self._known.get(key)
        return None if data is None else self._adapter.validate_json(json.dumps(data))

    def keep(self, key: str, result: R) -> None:
        """Store the result durably, on the disk. Raise SimtuneError if it cannot be written."""
        data = self._adapter.dump_python(result, mode="json", by_alias=True, exclude_unset=True)
        self._known[key] = data
        self._append({"inputs": self.inputs, "key": key, "found": data, "schema": SCHEMA})

    def _read(self) -> None:
        try:
            text = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise SimtuneError(f"{self.path}: cannot be read ({error.strerror})") from None
        lines = [line for line in map(_whole, text.split(b"\n")) if line is not None]
        if any((line.get("schema"), line.get("inputs")) != (SCHEMA, self.inputs) for line in lines):
            raise UsageError(
                f"{self.path}: holds results of another study, or of other inputs or another release; give --force "
                "instead of --resume to begin anew"
            )
        self._known = {line["key"]: line["found"] for line in lines}

    def _append(self, content: dict[str, Any]) -> None:
        body = json.dumps(content, allow_nan=False, sort_keys=True)
        # Start on a new line: an earlier line may have been cut short, and would make this one unreadable.
        line = f"\n{_digest(body)} {body}\n".encode()
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # One write, so that lines of several processes do not mix.
            written = os.write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            raise SimtuneError(f"{self.path}: cannot be written ({error.strerror})") from None
        if written < len(line):
            raise SimtuneError(f"{self.path}: cannot be written (no space left); make room and give --resume")


def _whole(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line; None if the line is incomplete."""
    checksum, _, body = line.partition(b" ")
    if not body or _digest(body.decode(errors="replace")).encode() != checksum:
        return None
    content: dict[str, Any] = json.loads(body)
    return content
