"""Plans of a study before anything is simulated: how many there are, and which were left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simtune.tuner.plan_cache import Refused
from simtune.tuner.question import Question
from simtune.tuner.question_checks import check
from simtune.tuner.space.candidates import without_numbers
from simtune.tuner.space.expressible import space_for


@dataclass(frozen=True)
class Census:
    """Number of plans that would be searched, and of those that would not."""

    plans: int
    shapes: int
    left_out: Mapping[str, int]
    """Number of plans by the reason why they are left out, the most frequent first."""

    def to_data(self) -> dict[str, Any]:
        """Return the census as plain data."""
        return {"candidates": self.plans, "shapes": self.shapes, "left_out": dict(self.left_out)}


def census(question: Question) -> Census:
    """Count the plans of a study. Raise Infeasible if there are none, and UsageError if the study is not valid."""
    check(question)
    space = space_for(question)
    left_out = Counter(space.reasons)
    shapes, plans = set(), 0
    for candidate in space.candidates:
        settled = space.plan_cache.settled(candidate)
        if isinstance(settled, Refused):
            left_out[without_numbers(settled.reason)] += 1
        else:
            plans += 1
            shapes.add(settled.shape)
    return Census(plans, len(shapes), dict(left_out.most_common()))
