"""Sessions as readers find them, made into rows in order of arrival: turns, what they wait for, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simtune.specs.base import LONGEST_S
from simtune.specs.text_blocks import TextBlocks
from simtune.specs.trace_formats.log_rows import LogRequests, Problems
from simtune.specs.trace_turns import TraceTurns


@dataclass(slots=True)
class RecordedTurn:
    """Request of a session. Lengths are as the file contains them, and are checked with those of all formats."""

    line: int
    prompt: Any
    output: Any
    after: tuple[int, ...]
    """Turns that it waits for, numbered within the session."""
    pause_s: float
    """Seconds from then until it is sent; for a turn that waits for none, from the arrival of the session."""
    text: int = 0
    """Number of the text, within the session, that its prompt and answer are the beginning of."""
    blocks: int = 0
    """Leading blocks of the text that its prompt and answer fill."""
    media: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the media that it adds, as the file contains them."""
    text_before: int = 0
    """Tokens of text before what it adds."""


@dataclass(slots=True)
class RecordedSession:
    """Turns in an order in which each comes after those that it waits for."""

    turns: list[RecordedTurn]
    arrival: float | None = None
    """Time of the first turn; None if the file has none."""
    texts: list[tuple[range, ...]] = field(default_factory=list)
    """Names of the blocks of each text; empty if they are not known."""


@dataclass(slots=True)
class SessionLog(LogRequests):
    """Requests of a file whose turns wait for answers."""

    turns: TraceTurns | None = None
    block_tokens: int = 0
    text_before: Sequence[int] | None = None
    """Tokens of text before what each turn adds, if turns add media."""


def session_log(
    sessions: Sequence[RecordedSession],
    names: dict[str, str],
    *,
    block_tokens: int,
    per_s: float = 1.0,
    notes: Sequence[str] = (),
) -> SessionLog:
    """Return the rows of sessions, those that arrive first before all others."""
    timed = all(session.arrival is not None for session in sessions)
    ordered = sorted(sessions, key=_arrival) if timed else list(sessions)
    if not timed:
        names = {key: name for key, name in names.items() if key != "arrival"}
    turns = [turn for session in ordered for turn in session.turns]
    media = _media_columns(turns)
    return SessionLog(
        names,
        {**_columns(ordered, timed), **media},
        [turn.line for turn in turns],
        per_s,
        list(notes),
        _turns(ordered),
        block_tokens,
        [turn.text_before for turn in turns] if media else None,
    )


def _columns(sessions: Sequence[RecordedSession], timed: bool) -> dict[str, Any]:
    """Return the columns of the turns of sessions, with arrivals if `timed`."""
    rows = [(number, session, turn) for number, session in enumerate(sessions) for turn in session.turns]
    values: dict[str, Any] = {
        "prompt": [turn.prompt for _, _, turn in rows],
        "output": [turn.output for _, _, turn in rows],
        "session": [number for number, _, _ in rows],
    }
    if timed:
        values["arrival"] = [session.arrival for _, session, _ in rows]
    if all(session.texts for session in sessions):
        values["hash_ids"] = _text_blocks(sessions)
    return values


def _media_columns(turns: Sequence[RecordedTurn]) -> dict[str, list[Any]]:
    """Return the columns of media of all turns; None where a turn has none."""
    columns = dict.fromkeys(column for turn in turns for column in turn.media)
    return {column: [turn.media.get(column) for turn in turns] for column in columns}


def _arrival(session: RecordedSession) -> float:
    return session.arrival or 0.0


def _text_blocks(sessions: Sequence[RecordedSession]) -> TextBlocks:
    """Return the blocks of the text of each turn of sessions."""
    begin = np.cumsum([0, *(len(session.texts) for session in sessions)]).tolist()
    turns = [(at, turn) for at, session in zip(begin, sessions, strict=False) for turn in session.turns]
    return TextBlocks(
        [text for session in sessions for text in session.texts],
        np.array([at + turn.text for at, turn in turns]),
        np.array([turn.blocks for _, turn in turns]),
    )


def _turns(sessions: Sequence[RecordedSession]) -> TraceTurns:
    """Return what each turn of sessions waits for."""
    turns = [turn for session in sessions for turn in session.turns]
    sizes = [len(session.turns) for session in sessions]
    return TraceTurns(
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        tuple(turn.after for turn in turns),
        np.array([turn.pause_s for turn in turns], dtype=np.float64),
    )


def in_sessions(count: int, sessions: int) -> str:
    """Return the note on turns that wait for answers."""
    return (
        f"{count:,} requests in {sessions:,} sessions: turns follow the answers before them, after the pauses recorded"
    )


def whole_tokens(value: Any) -> int:
    """Return a number of tokens to compute with, 0 if it is none: what is wrong with it is reported later."""
    return value if type(value) is int and 0 < value <= 10**9 else 0


def turns_of(columns: Mapping[str, Sequence[Any]], lines: Sequence[int], problems: Problems) -> TraceTurns:
    """Return the turns of a trace that simtune wrote: columns `session`, `after` and `pause_s`."""
    for name in ("session", "pause_s"):
        if name not in columns:
            problems.stop("is missing; turns with `after` need it", lines[0], name)
    session, first = columns["session"], [0]
    ended: set[Any] = set()
    for row in range(1, len(session)):
        if session[row] != session[row - 1]:
            ended.add(session[row - 1])
            first.append(row)
        if session[row] in ended:
            problems.stop("turns of a session must follow one another", lines[row], "session")
    begins = np.repeat(first, np.diff([*first, len(session)])).tolist()
    for row, (after, pause_s) in enumerate(zip(columns["after"], columns["pause_s"], strict=True)):
        begin = begins[row]
        if not isinstance(after, list) or any(type(x) is not int or not 0 <= x < row - begin for x in after):
            problems.stop("must be a list of numbers of earlier turns of the session, from 0", lines[row], "after")
        if isinstance(pause_s, bool) or not isinstance(pause_s, int | float) or not 0 <= pause_s <= LONGEST_S:
            problems.stop(f"must be seconds from 0 to {LONGEST_S:.0f}, not {pause_s!r}", lines[row], "pause_s")
    after_of_rows = tuple(tuple(after) for after in columns["after"])
    return TraceTurns(np.array([*first, len(session)]), after_of_rows, np.array(columns["pause_s"], dtype=np.float64))
