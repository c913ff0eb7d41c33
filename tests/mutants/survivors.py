"""Mistakes that the tests do not catch, each with the reason; a campaign says it beside those that survive."""

from __future__ import annotations

from typing import NamedTuple


class Survivor(NamedTuple):
    """A mistake in a file: the text of its line, and the code there before and after."""

    file: str
    line: str
    before: str
    after: str
    reason: str


SURVIVORS = (
    Survivor(
        "simtune/sim/router.py",
        "if best is None or self._credit[i] > self._credit[best] + 1e-9:",
        "self._credit[i] > self._credit[best] + 1e-09",
        "self._credit[i] >= self._credit[best] + 1e-09",
        "1e-9 is room for the rounding of sums; two credits that differ by exactly as much are as good as equal",
    ),
)
