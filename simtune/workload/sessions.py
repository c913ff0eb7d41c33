"""Sessions whose turns follow answers: which turn waits for which, after what pause, and the text that turns share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.workload.graphs import Families, FamilyShape


@dataclass(frozen=True, eq=False)
class SessionTurns(Families):
    """Turns of sessions, in order: each waits for some before it, and then for a pause."""

    first: Ints
    """Number of the first turn of each session, and after the last session the number of all turns."""
    after: Sequence[tuple[int, ...]]
    """Turns that each turn waits for, numbered within the session; all of them come before it."""
    pause: Ints
    """Ticks from then until the turn is sent; for a turn that waits for none, from the arrival of the session."""

    @property
    def begin(self) -> Ints:
        """See `Families`."""
        return self.first

    def shape(self, family: int) -> FamilyShape:
        """See `Families`: every turn is a node of one request."""
        begin, end = self.first[family : family + 2].tolist()
        after, pause, size = self.after[begin:end], self.pause[begin:end].tolist(), end - begin
        followers: list[list[int]] = [[] for _ in range(size)]
        for turn, before in enumerate(after):
            for turn_before in before:
                followers[turn_before].append(turn)
        ones = [1] * size
        return FamilyShape(
            begin=range(size),
            counts=ones,
            first=ones,
            waits_for=[len(before) for before in after],
            followers=followers,
            delay=pause,
            since=[0] * size,
            node_of=range(size),
            earliest=min((turn for turn in range(size) if not after[turn]), key=pause.__getitem__),
        )

    @property
    def needed(self) -> NDArray[np.bool_]:
        """See `Families`: no turn is aborted."""
        return np.ones(len(self.after), dtype=bool)

    @property
    def may_abort(self) -> bool:
        """Always False: no turn is aborted."""
        return False

    @property
    def has_pauses(self) -> bool:
        """See `Families`."""
        return bool(self.pause.any())

    def longest_s(self, alone_s: Array, *, pauses: bool = True) -> Array:
        """See `Families`."""
        pause_s = (self.pause / TICKS_PER_SECOND if pauses else np.zeros(len(self.pause))).tolist()
        over_s = alone_s.tolist()
        longest = []
        for begin, end in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True):
            for turn in range(begin, end):
                waited_s = max((over_s[begin + turn_before] for turn_before in self.after[turn]), default=0.0)
                over_s[turn] += waited_s + pause_s[turn]
            longest.append(max(over_s[begin:end]))
        return np.array(longest)

    def kept(self, seen: NDArray[np.bool_]) -> SessionTurns:
        """Return the sessions whose turns `seen` marks; a session is marked as a whole."""
        sizes = self.sizes[seen[self.first[:-1]]]
        first: Ints = np.concatenate([[0], np.cumsum(sizes)])
        return SessionTurns(first, tuple(compress(self.after, seen.tolist())), self.pause[seen])
