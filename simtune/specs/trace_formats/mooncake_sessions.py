"""Mooncake's keys with sessions: turns with `session_id` and `delay`, as aiperf replays them.

The first turn of a session has a `timestamp`, later turns a `delay` after the answer before them, in milliseconds. A
turn has the tokens, blocks and media that it adds alone: its prompt is all prompts and answers before it, and these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simtune.specs.text_blocks import leading
from simtune.specs.trace_formats.log_rows import LogRequests, Problems
from simtune.specs.trace_formats.logs import SHARED_BLOCK_TOKENS
from simtune.specs.trace_formats.session_rows import (
    RecordedSession,
    RecordedTurn,
    in_sessions,
    session_log,
    whole_tokens,
)
from simtune.specs.trace_media import MEDIA_COLUMNS

ID_TOKENS = 512
"""Tokens of a block of `hash_ids`."""
_PARTS = ID_TOKENS // SHARED_BLOCK_TOKENS
TITLE = "Mooncake sessions (aiperf)"
_LONGEST_MS = 2.0**22 * 1e3


def has_delays(rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if some rows are turns that are sent after the answer before them."""
    return any("delay" in row and "session_id" in row for row in rows)


def read_sessions(rows: Sequence[Mapping[str, Any]], lines: Sequence[int], problems: Problems) -> LogRequests:
    """Read rows in the order of the file. Stops at turns that cannot be put in order."""
    by_session: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        name = row.get("session_id")
        if isinstance(name, str | int):
            by_session.setdefault(name, []).append(i)
        else:
            problems.stop("is missing here; turns with a delay need it", lines[i], "session_id")
    name = 0
    hashed = all("hash_ids" in row for row in rows)
    sessions = []
    # Names of texts that no session shares come after all names of the file.
    free_name = _PARTS * (1 + max((max(_ids(row), default=0) for row in rows), default=0)) if hashed else name
    for numbers in by_session.values():
        session = _session([rows[i] for i in numbers], [lines[i] for i in numbers], problems, hashed, free_name)
        free_name += session.turns[-1].blocks
        sessions.append(session)
    timed = [session.arrival is not None for session in sessions]
    if any(timed) and not all(timed):
        at = lines[next(iter(numbers for numbers, t in zip(by_session.values(), timed, strict=True) if not t))[0]]
        problems.stop("is missing here: the first turns of other sessions have it", at, "timestamp")
    names = {"prompt": "input_length", "output": "output_length", "arrival": "timestamp"}
    notes = [f"read as {TITLE}", in_sessions(len(rows), len(sessions))]
    return session_log(sessions, names, block_tokens=SHARED_BLOCK_TOKENS, per_s=1e3, notes=notes)


def _ids(row: Mapping[str, Any]) -> list[int]:
    ids = row.get("hash_ids")
    return [x for x in ids if type(x) is int] if isinstance(ids, list) else []


def _session(
    rows: Sequence[Mapping[str, Any]], lines: Sequence[int], problems: Problems, hashed: bool, free_name: int
) -> RecordedSession:
    turns: list[RecordedTurn] = []
    before = 0
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        for key in ("input_length", "output_length"):
            if key not in row:
                problems.stop("is missing here", line, key)
        if hashed:
            _check_ids(row, line, problems)
        added, output = row["input_length"], row["output_length"]
        prompt, media = before + added if whole_tokens(added) else added, _media(row)
        text_before = before
        before += whole_tokens(added) + whole_tokens(output)
        pause_s = 0.0 if number == 0 else _delay_s(row, line, problems)
        after = (number - 1,) if number else ()
        blocks = before // SHARED_BLOCK_TOKENS
        turns.append(RecordedTurn(line, prompt, output, after, pause_s, 0, blocks, media, text_before))
    return RecordedSession(turns, _timestamp(rows[0], lines[0], problems), [_text(rows[0], turns, hashed, free_name)])


def _media(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of media of a row."""
    return {column: row[column] for column in MEDIA_COLUMNS if column in row}


def _check_ids(row: Mapping[str, Any], line: int, problems: Problems) -> None:
    ids, most = row["hash_ids"], -(-whole_tokens(row["input_length"]) // ID_TOKENS)
    if not isinstance(ids, list) or len(_ids(row)) < len(ids) or not min(ids, default=0) >= 0:
        problems.stop("must be a list of whole numbers of at least 0", line, "hash_ids")
    if max(ids, default=0) > 2**53:
        problems.stop(f"must be at most {2**53}, not {max(ids)}", line, "hash_ids")
    if most and len(ids) > most:
        problems.stop(f"has {len(ids)} ids, the turn {most} blocks of {ID_TOKENS} tokens", line, "hash_ids")


def _delay_s(row: Mapping[str, Any], line: int, problems: Problems) -> float:
    """Return the pause before a later turn, in seconds."""
    if "timestamp" in row:
        problems.stop(
            "a later turn of a session whose other turns have a delay; write its delay after the answer before it",
            line,
            "timestamp",
        )
    return _milliseconds(row.get("delay", 0), line, "delay", problems) / 1e3


def _timestamp(row: Mapping[str, Any], line: int, problems: Problems) -> float | None:
    if "timestamp" not in row:
        return None
    return _milliseconds(row["timestamp"], line, "timestamp", problems, most=float("inf"))


def _milliseconds(value: Any, line: int, key: str, problems: Problems, most: float = _LONGEST_MS) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or value != value:
        problems.stop(f"must be a number of milliseconds of at least 0, not {value!r}", line, key)
    return float(value)


def _text(row: Mapping[str, Any], turns: Sequence[RecordedTurn], hashed: bool, free_name: int) -> tuple[range, ...]:
    """Return the names of the blocks of a session: those of its first prompt as the file names them, cut finely, and
    others that no session shares, since an answer comes between."""
    num_named = whole_tokens(row["input_length"]) // SHARED_BLOCK_TOKENS if hashed else 0
    lead = leading((range(_PARTS * x, _PARTS * (x + 1)) for x in _ids(row)), num_named)
    return (*lead, range(free_name, free_name + max(0, turns[-1].blocks - sum(map(len, lead)))))
