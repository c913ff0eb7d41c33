"""Shared parts of readers of logs: how a file may be read, the requests they return, and looking up keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ZeroOutput = Literal["refuse", "drop", "one"]


@dataclass(frozen=True, slots=True)
class LogReading:
    """Rules for what a file leaves open. The defaults guess nothing but the length of texts, and say so."""

    zero_output: ZeroOutput = "refuse"
    """Treatment of requests without output tokens: they are an error, left out, or given one token."""
    characters_per_token: float = 4.0
    """Characters of a token, for a file that has texts and no token counts."""
    part: int | None = None
    """Number of the run in a file with several, from 1."""
    columns: tuple[tuple[str, str], ...] = ()
    """Columns and their names in the file: ("arrival", "ts"). Columns that are not listed are recognised by their usual
    names.
    """


AS_IT_IS = LogReading()


class Problems(Protocol):
    """Collects what is wrong with one file."""

    def add(self, message: str, line: int | None, key: str = "") -> None:
        """Add a problem; reading goes on."""

    def stop(self, message: str, line: int | None, key: str = "") -> None:
        """Add a problem after which nothing else can be judged. Raises SpecError."""


@dataclass(slots=True)
class LogRequests:
    """Requests as a file contains them, before they are checked: by field, its name in the file and its values."""

    names: dict[str, str]
    values: dict[str, list[Any]]
    lines: list[int]
    per_s: float = 1.0
    """Arrival times of one second: 1e3 if they are in milliseconds."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user: what was left out or estimated."""


class TraceFormat(Protocol):
    """A kind of file that consists of JSON objects."""

    title: str

    def recognises(self, first: Any) -> bool:
        """True if the first object of a file shows that it is of this kind."""

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Read the requests. `lines` are the lines in which the objects begin. Stops at what cannot be read."""


def look_up(row: Any, key: str) -> Any:
    """Return the value at a dotted key, `usage.prompt_tokens`; None if there is none."""
    for name in key.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def first_of(row: Any, keys: Sequence[str]) -> str | None:
    """The first of these dotted keys at which there is something."""
    return next((key for key in keys if look_up(row, key) is not None), None)


def first_value(row: Any, keys: Sequence[str]) -> Any:
    """Return the first value at these dotted keys; None if there is none."""
    key = first_of(row, keys)
    return None if key is None else look_up(row, key)


def cached_note(cached: Sequence[Any], prompts: Sequence[Any]) -> list[str]:
    """Return a note on prompt tokens that were found in a prefix cache, if requests give their number and not which."""
    num_cached = sum(number for number in map(_whole, cached) if number)
    if not num_cached:
        return []
    num_prompt = sum(number for number in map(_whole, prompts) if number)
    return [
        f"{num_cached:,} of {num_prompt:,} prompt tokens were found cached; this load says nothing of prefixes, so "
        "prefix caching has nothing to find: say what prompts share by shared_prefix in a spec, or by hash_ids"
    ]


def _whole(value: Any) -> int:
    """A count of tokens, also from a cell of a table; 0 for what is none."""
    try:
        return 0 if isinstance(value, bool) else max(int(value), 0)
    except (TypeError, ValueError, OverflowError):
        return 0


def left_out(count: int, why: str) -> list[str]:
    """Return a note on what was left out, if anything was."""
    return [f"{count:,} {why} left out"] if count else []


def tokens_of(text: str, reading: LogReading) -> int:
    """Estimate the number of tokens of a text, at least one if there is any text."""
    return max(1, round(len(text) / reading.characters_per_token)) if text else 0


def estimated(reading: LogReading) -> str:
    """The note on lengths that were not counted by a tokenizer."""
    return f"lengths estimated from texts, {reading.characters_per_token:g} characters to a token"


def sessions_of(rows: Sequence[Any], keys: Sequence[str]) -> dict[str, list[Any]]:
    """Return the column `session`, if every row has one of the keys and some session has several rows."""
    for key in keys:
        values = [look_up(row, key) for row in rows]
        if all(isinstance(value, (str, int)) for value in values) and 1 < len(set(values)) < len(values):
            return {"session": values}
    return {}


def parsed_json(text: Any) -> Any:
    """Return the value of a text that is JSON, else None."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
