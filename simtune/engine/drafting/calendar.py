"""Totals of the coming rounds of all members, step by step.

Every member's rounds are added to the calendar when it joins, and removed when it leaves early or is planned anew; any
number of steps is then read from it, whatever the number of members.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtune.arrays import Ints
from simtune.engine.drafting.rounds import PlannedRounds

_FEW = 32
"""Number of steps up to which lists are read faster than arrays."""


class Calendar:
    """Totals of coming steps, from the next one on."""

    __slots__ = ("_at", "_fewer", "_rows", "_soon", "_totals", "_wide", "ragged")

    def __init__(self) -> None:
        self._rows = np.zeros((2, 1024), dtype=np.int64)  # the members' rows added up
        self._fewer = np.zeros(1024, dtype=np.int64)  # tokens missing to one plus all drafts of each member
        self._at = 0  # index of the next step in the arrays
        self._wide = 0  # tokens of all members, one and all drafts of each
        self._soon: list[list[int]] | None = None  # the rows of the next steps, if they were read as lists
        self._totals: tuple[int, int, int] | None = None
        self.ragged = 0
        """Members that do not verify as many tokens in each of their rounds."""

    @property
    def tokens(self) -> int:
        """Tokens verified in the next step."""
        return self._wide - int(self._fewer[self._at]) if self.ragged else self._wide

    def totals(self) -> tuple[int, int, int]:
        """Return (tokens verified, tokens computed before, new blocks) of the next step."""
        totals = self._totals
        if totals is None:
            context, blocks = self._rows[:, self._at].tolist()
            totals = self._totals = self.tokens if self.ragged else self._wide, context, blocks
        return totals

    def read(self, steps: int) -> tuple[int, int, Sequence[int] | Ints]:
        """Return (tokens computed before the next step, its new blocks, tokens computed before each of `steps`
        steps)."""
        at = self._at
        if steps <= _FEW:
            self._soon = contexts, blocks = self._rows[:, at : at + steps].tolist()
            return contexts[0], blocks[0], contexts
        context, block = self._rows[:, at].tolist()
        return context, block, self._rows[0, at : at + steps]

    def contexts(self, steps: int) -> Ints:
        """Return tokens computed before each of the next `steps` steps."""
        return self._rows[0, self._at : self._at + steps]

    def blocks(self, steps: int, after: int = 0) -> int:
        """New blocks of `steps` steps, the first of them after `after` others."""
        if self._soon is not None and len(self._soon[1]) >= after + steps:
            return sum(self._soon[1][after : after + steps])
        at = self._at + after
        return int(self._rows[1, at : at + steps].sum())

    def steps_alike(self, limit: int) -> int:
        """Return the largest number of steps, at most `limit`, that verify as many tokens as the next one."""
        if not self.ragged:
            return limit
        fewer = self._fewer[self._at : self._at + limit]
        differs = fewer != fewer[0]
        return int(differs.argmax()) if differs.any() else limit

    def steps_within(self, free: int, limit: int) -> int:
        """Return the largest number of steps, at most `limit`, whose new blocks number at most `free`."""
        blocks = self._rows[1, self._at : self._at + limit]
        return limit if int(blocks.sum()) <= free else int(blocks.cumsum().searchsorted(free, "right"))

    def add(self, plan: PlannedRounds) -> None:
        """Add rounds of which the next step is the first."""
        self._open(plan.rounds)
        self._soon = self._totals = None
        self._wide += 1 + plan.drafts
        coming = self._rows[:, self._at : self._at + plan.rounds]
        np.add(coming, plan.rows, out=coming)
        if plan.widths is not None:
            self.ragged += 1
            self._fewer[self._at : self._at + plan.rounds] += 1 + plan.drafts - plan.widths

    def take_out(self, plan: PlannedRounds, age: int) -> None:
        """Remove rounds of which `age` are over."""
        self.close(plan)
        self._rows[:, self._at : self._at + plan.rounds - age] -= plan.rows[:, age:]
        if plan.widths is not None:
            self._fewer[self._at : self._at + plan.rounds - age] -= 1 + plan.drafts - plan.widths[age:]

    def close(self, plan: PlannedRounds) -> None:
        """Remove a member from the totals whose rounds are all over."""
        self._soon = self._totals = None
        self._wide -= 1 + plan.drafts
        self.ragged -= plan.widths is not None

    def advance(self, steps: int) -> None:
        """End `steps` steps. To be called before `close` for the rounds that end with them."""
        self._soon = self._totals = None
        # Else nothing is written anywhere.
        if self._wide:
            self._at += steps

    def _open(self, rounds: int) -> None:
        """Make room for `rounds` steps."""
        size = len(self._fewer)
        if self._at + rounds < size:
            return
        remaining = size - self._at
        while rounds * 2 > size:
            size *= 2
        rows, fewer = np.zeros((2, size), np.int64), np.zeros(size, np.int64)
        rows[:, :remaining] = self._rows[:, self._at :]
        fewer[:remaining] = self._fewer[self._at :]
        self._rows, self._fewer, self._at = rows, fewer, 0
