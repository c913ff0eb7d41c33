"""Turns of a recorded session that wait for the answers before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simtune.arrays import Array, Ints, Mask


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
