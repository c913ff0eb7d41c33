"""Differences between what a certificate claims and what is computed anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

SAME = 1e-9
"""Relative difference up to which numbers count as equal."""


class Differences(list[str]):
    """Sentences, one for each difference."""

    def same(self, what: str, claimed: Any, computed: Any) -> None:
        """Note a difference if two values are not equal, numbers except for rounding."""
        if not near(claimed, computed):
            self.append(f"{what} is {_words(claimed)} in the certificate, but {_words(computed)} was computed")

    def at_most(self, plan: str, claimed: float | None, computed: float | None) -> None:
        """Note a difference if the bound of a plan is not the one that is claimed."""
        if not near(claimed, computed):
            self.append(f"{plan} could reach {_words(computed)}, and {_words(claimed)} is claimed at most")


def near(claimed: Any, computed: Any) -> bool:
    """True if two values are equal, numbers except for rounding."""
    if isinstance(claimed, float) and isinstance(computed, float):
        return math.isclose(claimed, computed, rel_tol=SAME, abs_tol=SAME)
    return bool(claimed == computed)


def all_near(claimed: Sequence[float], computed: Sequence[float]) -> bool:
    """True if two rows of values are equal, except for rounding."""
    return len(claimed) == len(computed) and all(map(near, claimed, computed))


def _words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:200]
