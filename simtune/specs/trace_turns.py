"""Turns of a recorded session that wait for the answers before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simtune.arrays import Array, Ints, Mask
from simtune.specs.base import LONGEST_S
from simtune.specs.trace_formats.log_rows import Problems


@dataclass(frozen=True, slots=True, eq=False)
class TraceTurns:
    """Turns of the sessions of a trace, whose rows are session by session, in order of arrival of the sessions."""

    first: Ints
    """Row of the first turn of each session, and after the last session the number of all rows."""
    after: Sequence[tuple[int, ...]]
    """Turns that each turn waits for, numbered within the session; all of them come before it."""
    pause_s: Array
    """Seconds from then until the turn is sent; for a turn that waits for none, from the arrival of the session."""

    @property
    def session(self) -> Ints:
        """Session of each row."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def kept(self, rows: Mask) -> TraceTurns:
        """Return the sessions whose rows `rows` marks; a session is marked as a whole."""
        sizes = np.diff(self.first)[rows[self.first[:-1]]]
        after = tuple(after for after, keep in zip(self.after, rows.tolist(), strict=True) if keep)
        return TraceTurns(np.concatenate([[0], np.cumsum(sizes)]), after, self.pause_s[rows])


def joined(parts: Sequence[TraceTurns], order: Ints) -> TraceTurns:
    """Return the sessions of several traces in a new order of all rows, which keeps the rows of a session together."""
    sizes = np.concatenate([np.diff(part.first) for part in parts])
    session = np.repeat(np.arange(len(sizes)), sizes)[order]
    after = [row for part in parts for row in part.after]
    first_rows = np.flatnonzero(np.diff(session, prepend=-1))
    first = np.concatenate([first_rows, [len(order)]])
    pause_s = np.concatenate([part.pause_s for part in parts])[order]
    return TraceTurns(first, tuple(after[i] for i in order.tolist()), pause_s)


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
