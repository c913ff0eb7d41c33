"""What readers of logs share: how a file may be read, the requests they give back, and looking up keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ZeroOutput = Literal["refuse", "drop", "one"]


@dataclass(frozen=True, slots=True)
class LogReading:
    """How to read what a file leaves open. The defaults guess nothing but the length of texts, and say so."""

    zero_output: ZeroOutput = "refuse"
    """What becomes of requests of no output token: they are an error, left out, or given one token."""
    characters_per_token: float = 4.0
    """Where a file holds texts and no token counts."""
    part: int | None = None
    """Which of several runs in one file, from 1."""
    columns: tuple[tuple[str, str], ...] = ()
    """Columns by the names that a file has for them: ("arrival", "ts"). Without them they are known by their names."""


AS_IT_IS = LogReading()


class Problems(Protocol):
    """Collects what is wrong with one file."""

    def add(self, message: str, line: int | None, key: str = "") -> None:
        """One thing that is wrong."""

    def stop(self, message: str, line: int | None, key: str = "") -> None:
        """One thing after which nothing else can be judged. Raises SpecError."""


@dataclass(slots=True)
class LogRequests:
    """Requests as a file holds them, still to be judged: field -> what the file calls it, and its values."""

    names: dict[str, str]
    values: dict[str, list[Any]]
    lines: list[int]
    per_s: float = 1.0
    """Arrivals count so many to a second."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know: what was left out or estimated."""


class TraceFormat(Protocol):
    """One kind of file of JSON objects."""

    title: str

    def recognises(self, first: Any) -> bool:
        """Whether the first object of a file says that it is of this kind."""

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Its requests. `lines` are those that the objects begin in. Stops at what cannot be read."""


def look_up(row: Any, key: str) -> Any:
    """The value at a dotted key, `usage.prompt_tokens`; None where there is none."""
    for name in key.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def first_of(row: Any, keys: Sequence[str]) -> str | None:
    """The first of these dotted keys at which there is something."""
    return next((key for key in keys if look_up(row, key) is not None), None)


def first_value(row: Any, keys: Sequence[str]) -> Any:
    """The first value at these dotted keys; None where there is none."""
    key = first_of(row, keys)
    return None if key is None else look_up(row, key)


def cached_note(cached: Sequence[Any], prompts: Sequence[Any]) -> list[str]:
    """A note on prompt tokens that were found in a prefix cache, of which requests say how many and not which."""
    num_cached = sum(number for number in map(_whole, cached) if number)
    if not num_cached:
        return []
    asked = sum(number for number in map(_whole, prompts) if number)
    return [
        f"{num_cached:,} of {asked:,} prompt tokens were found cached; this load says nothing of prefixes, so prefix "
        "caching has nothing to find: say what prompts share by shared_prefix in a spec, or by hash_ids"
    ]


def _whole(value: Any) -> int:
    """A count of tokens, also from a cell of a table; 0 for what is none."""
    try:
        return 0 if isinstance(value, bool) else max(int(value), 0)
    except (TypeError, ValueError, OverflowError):
        return 0


def left_out(count: int, why: str) -> list[str]:
    """A note, where there is something to note."""
    return [f"{count:,} {why} left out"] if count else []


def tokens_of(text: str, reading: LogReading) -> int:
    """How many tokens a text is taken for, at least one where there is any text."""
    return max(1, round(len(text) / reading.characters_per_token)) if text else 0


def estimated(reading: LogReading) -> str:
    """The note on lengths that were not counted by a tokenizer."""
    return f"lengths estimated from texts, {reading.characters_per_token:g} characters to a token"


def sessions_of(rows: Sequence[Any], keys: Sequence[str]) -> dict[str, list[Any]]:
    """The column `session`, where every row has one of the keys and some session has several rows."""
    for key in keys:
        values = [look_up(row, key) for row in rows]
        if all(isinstance(value, (str, int)) for value in values) and 1 < len(set(values)) < len(values):
            return {"session": values}
    return {}


def parsed_json(text: Any) -> Any:
    """What a text holds if it is JSON, else None."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
