"""Results of the search for plans that are one step of a knob away from the chosen plan."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from simtune.report.info import KNOBS, chosen_row, why_lost
from simtune.runs.schema import CandidateRow, Run
from simtune.specs.plan_words import differing, sentence_in_words

COUNTED = {"tp", "pp", "attention_dp", "instances", "max_num_seqs", "max_num_batched_tokens"}
"""Knobs of which there is a next smaller and a next larger value; of the others there are only other ones."""
NO_EFFECT = "nothing changes"
ALTERNATIVES = 3
"""Other values of such a knob that are shown, the best by rank."""
FOLLOWS_FROM = {knob: {"instances"} for knob in ("gpu", "tp", "pp", "attention_dp")}
"""Knobs that change with another knob: the number of instances that fit on a given number of GPUs depends on their
size.
"""
ALIKE = re.compile(r"(?:at \S+ requests/s )?misses the SLO as (\S+) does")
"""Pattern of the search's note on a plan that none of its limits tells from another."""


class Neighbour(NamedTuple):
    """A candidate that differs from the chosen one in a single knob, and how it fared."""

    knob: str
    chosen: str
    value: str
    effect: str


def neighbours(run: Run) -> list[Neighbour]:
    """Return the nearest smaller and larger value that was tried of each knob, all other knobs alike; of knobs that are
    not counted, such as drafters, the best of the other values.
    """
    chosen = chosen_row(run)
    if chosen is None:
        return []
    steps = []
    for knob in KNOBS:
        alike = [
            c
            for c in run.candidates
            if c is not chosen and _differ(c, chosen) - FOLLOWS_FROM.get(knob, set()) == {knob}
        ]
        for neighbour in _nearest(alike, chosen, knob) if knob in COUNTED else _best(alike, knob):
            chosen_value, other_value = (_words(getattr(x, knob)) for x in (chosen, neighbour))
            steps.append(Neighbour(knob, chosen_value, other_value, _effect(neighbour, chosen, run)))
    return steps


def same_as(candidate: CandidateRow) -> str | None:
    """The plan that does whatever this one does, as far as the search saw."""
    match = ALIKE.match(candidate.reason or "")
    return match[1] if match else None


def _effect(other: CandidateRow, chosen: CandidateRow, run: Run) -> str:
    """Return how a candidate fared; if it behaves as another one, how that one fared."""
    name = same_as(other)
    twin = next((c for c in run.candidates if c.candidate == name), None)
    if name is None or twin is None:
        return why_lost(other, chosen, run.summary)
    if twin is chosen:
        return f"{NO_EFFECT}: no limit that tells them apart is reached"
    return f"{why_lost(twin, chosen, run.summary)} (as the plan with {differing([other.candidate, name])[name]})"


def _differ(a: CandidateRow, b: CandidateRow) -> set[str]:
    """The knobs by which they differ. How many tokens a drafter drafts follows from seats."""
    differ = {knob for knob in KNOBS if getattr(a, knob) != getattr(b, knob)}
    drafters = [(c.speculation or "").partition(":")[0] for c in (a, b)]
    return differ - {"speculation"} if "max_num_seqs" in differ and drafters[0] == drafters[1] else differ


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return sentence_in_words(str(value or "none"))


def _best(alike: list[CandidateRow], knob: str) -> list[CandidateRow]:
    """The best of each other value."""
    ranked = sorted(alike, key=lambda c: (c.rank is None, c.rank))
    return [*{getattr(c, knob): c for c in reversed(ranked)}.values()][::-1][:ALTERNATIVES]


def _nearest(alike: list[CandidateRow], chosen: CandidateRow, knob: str) -> list[CandidateRow]:
    """Return the next value below and the next above the chosen value."""
    value = getattr(chosen, knob)
    comparable = [c for c in alike if None not in (value, getattr(c, knob))]
    below = [c for c in comparable if getattr(c, knob) < value]
    above = [c for c in comparable if getattr(c, knob) > value]
    nearest = [max(below, key=lambda c: getattr(c, knob))] if below else []
    return [*nearest, *([min(above, key=lambda c: getattr(c, knob))] if above else [])]
