"""What one step of each knob away from the chosen plan did in the search."""

from __future__ import annotations

from typing import NamedTuple

from simtune.report.info import why_lost
from simtune.runs.schema import CandidateRow, Run

STEPPED = ("tp", "pp", "instances", "max_num_seqs", "max_num_batched_tokens", "speculation")
"""Columns of a candidate that a plan may differ in."""
FOLLOWS_FROM = {"tp": {"instances"}, "pp": {"instances"}}
"""Of a given number of GPUs instances are as many as there is room for, so they change with their size."""


class Neighbour(NamedTuple):
    """A candidate that differs from the chosen one in a single knob, and how it fared."""

    knob: str
    chosen: str
    value: str
    effect: str


def neighbours(run: Run) -> list[Neighbour]:
    """The nearest smaller and larger value that was tried of each knob, all other knobs alike; for drafts, each other
    drafter.
    """
    chosen = next((c for c in run.candidates if c.status == "chosen"), None)
    if chosen is None:
        return []
    steps = []
    for knob in STEPPED:
        alike = [
            c
            for c in run.candidates
            if c is not chosen and _differ(c, chosen) - FOLLOWS_FROM.get(knob, set()) == {knob}
        ]
        for other in alike if knob == "speculation" else _nearest(alike, chosen, knob):
            here, there = (str(getattr(x, knob) or "none") for x in (chosen, other))
            steps.append(Neighbour(knob, here, there, why_lost(other, chosen, run.summary)))
    return steps


def _differ(a: CandidateRow, b: CandidateRow) -> set[str]:
    return {knob for knob in STEPPED if getattr(a, knob) != getattr(b, knob)}


def _nearest(alike: list[CandidateRow], chosen: CandidateRow, knob: str) -> list[CandidateRow]:
    """The next below and the next above the chosen value."""
    value = getattr(chosen, knob)
    below = [c for c in alike if getattr(c, knob) < value]
    above = [c for c in alike if getattr(c, knob) > value]
    nearest = [max(below, key=lambda c: getattr(c, knob))] if below else []
    return [*nearest, *([min(above, key=lambda c: getattr(c, knob))] if above else [])]
