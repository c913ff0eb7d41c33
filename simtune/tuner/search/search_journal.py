"""The file of finished simulations, journal.jsonl: a search that was killed goes on where it was.

Every result is a line of its own, with a checksum, on the disk before the search goes on; results are looked up by
what was simulated: a plan and a rate, of inputs that every line names. Whatever is lost is what was under way.
A line that is not whole is as if it had not been written. Several processes may append to one file.
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
    """Where a search looks for a result before it simulates, and keeps it afterwards."""

    def look(self, key: str) -> R | None:
        """What is known of a simulation."""

    def keep(self, key: str, result: R) -> None:
        """Know it from now on."""


def key_of(plan: Plan, rate_rps: float | None, draw: int = 0, requests: int = 0) -> str:
    """Of a simulation of a plan at a rate, or at the workload's own; of a fresh draw, with how many requests."""
    at = None if rate_rps is None else float(rate_rps).hex()
    fresh = [draw, requests] if draw else []
    return _digest(json.dumps([plan.to_data(), at, *fresh], sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class SearchJournal(Generic[R]):
    """A `Ledger` in a file. Results are of a dataclass or a pydantic model, `kind`.

    What goes to another process is the name of the file, which is read again there.
    """

    def __init__(self, path: Path, inputs: str, kind: type[R]) -> None:
        """Opens the file, which must be of the same `inputs`. Raises UsageError where it is not, SimtuneError where it
        cannot be read or written."""
        self.path, self.inputs, self.kind = path, inputs, kind
        self._adapter: TypeAdapter[R] = TypeAdapter(kind)
        self._known: dict[str, Any] = {}
        self._file: int | None = None
        self._read()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.path, self.inputs, self.kind)

    @classmethod
    def begin(cls, path: Path, inputs: str, kind: type[R]) -> Self:
        """An empty one, in place of what is there. The file is made for the first result."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        return cls(path, inputs, kind)

    def discard(self) -> None:
        """Take the file away, and its folder where nothing else is in it."""
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
        """What is known of a simulation."""
        data = self._known.get(key)
        return None if data is None else self._adapter.validate_json(json.dumps(data))

    def keep(self, key: str, result: R) -> None:
        """Know it from now on, whatever happens to this process. Raises SimtuneError when it cannot be written."""
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
        # A line that was cut short must not take this one with it.
        line = f"\n{_digest(body)} {body}\n".encode()
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            written = os.write(self._file, line)  # at once, so that lines of several processes do not mix
            os.fsync(self._file)
        except OSError as error:
            raise SimtuneError(f"{self.path}: cannot be written ({error.strerror})") from None
        if written < len(line):
            raise SimtuneError(f"{self.path}: cannot be written (no space left); make room and give --resume")


def _whole(line: bytes) -> dict[str, Any] | None:
    """A line that is all there."""
    checksum, _, body = line.partition(b" ")
    if not body or _digest(body.decode(errors="replace")).encode() != checksum:
        return None
    content: dict[str, Any] = json.loads(body)
    return content
