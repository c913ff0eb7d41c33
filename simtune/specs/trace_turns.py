"""Turns of a recorded session that wait for the answers before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simtune.arrays import Array, Ints


@dataclass(frozen=True, slots=True, eq=False)
class TraceTurns:
    """Turns of the sessions of a trace, whose rows are session by session, in order of arrival of the sessions."""

    first: Ints
    """Row of the first turn of each session, and after the last session the number of all rows."""
    after: Sequence[tuple[int, ...]]
    """Turns that each turn waits for, numbered within the session; all of them come before it."""
    pause_s: Array
    """Seconds from then until the turn is sent; for a turn that waits for none, from the arrival of the session."""
