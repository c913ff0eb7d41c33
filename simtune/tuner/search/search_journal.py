"""The file of finished simulations, journal.jsonl: a search that was killed can be resumed.

Every result is a row (`simtune.specs.row_journal`), on the disk before the search continues. The key of a result is the
plan and the rate that were simulated; every row names the inputs. Only simulations that were running are lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import TypeAdapter

from simtune.errors import UsageError
from simtune.specs.plan import Plan
from simtune.specs.row_journal import RowJournal

SCHEMA = "simtune/journal@3"

R = TypeVar("R")


class Ledger(Protocol[R]):
    """Store of simulation results that a search reads before it simulates, and adds to afterwards."""

    def look(self, key: str) -> R | None:
        """Return the stored result of a simulation; None if there is none."""

    def keep(self, key: str, result: R) -> None:
        """Store the result of a simulation."""


def key_of(plan: Plan, rate_rps: float | None, draw: int = 0, requests: int = 0, how: str = "") -> str:
    """Return the key of a simulation of a plan at a rate, or at the workload's own, on a draw of a number of requests;
    `how` says what is simulated otherwise than by default."""
    at = None if rate_rps is None else float(rate_rps).hex()
    text = json.dumps([plan.to_data(), at, draw, requests, *([how] if how else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class SearchJournal(Generic[R]):
    """A `Ledger` in a file. Results are of a dataclass or a pydantic model, `kind`.

    Pickling keeps only the path: another process reads the file again.
    """

    def __init__(self, path: Path, inputs: str, kind: type[R]) -> None:
        """Open the file, which must be of the same `inputs`. Raise UsageError if it is of other inputs, or cannot be
        read."""
        self.path, self.inputs, self.kind = path, inputs, kind
        self._adapter: TypeAdapter[R] = TypeAdapter(kind)
        self._file = RowJournal(path, resume="give --resume")
        rows = self._file.read()
        if any((row.get("schema"), row.get("inputs")) != (SCHEMA, inputs) for row in rows.values()):
            raise UsageError(
                f"{path}: holds results of another study, or of other inputs or another release; give --force "
                "instead of --resume to begin anew"
            )
        self._stored: dict[str, Any] = {key: row["result"] for key, row in rows.items()}

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

    def __len__(self) -> int:
        return len(self._stored)

    def look(self, key: str) -> R | None:
        """Return the stored result of a simulation; None if there is none."""
        data = self._stored.get(key)
        return None if data is None else self._adapter.validate_json(json.dumps(data))

    def keep(self, key: str, result: R) -> None:
        """Store the result durably, on the disk. Raise SimtuneError if it cannot be written."""
        data = self._adapter.dump_python(result, mode="json", by_alias=True, exclude_unset=True)
        self._stored[key] = data
        self._file.add(key, {"inputs": self.inputs, "result": data, "schema": SCHEMA})
