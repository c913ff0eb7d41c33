"""Gains of the variants of a study, and of prefill/decode against mixed plans: the best plan of each, what it reached
and what no plan of it exceeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.trial import Trial, Tuned

MOST_SHOWN = 12
"""Most variants of each of which a plan is simulated even if a bound rules all of them out."""


class VariantGain(NamedTuple):
    """The best that a search knows of the plans of a variant."""

    variant: str
    """Name of the variant; empty for the plans as they are."""
    plan: str
    """Plan that reached the most; empty if none was found to meet the SLO."""
    reached: float | None
    """Objective of that plan: on all fresh draws if it was chosen, else on the draw of the search."""
    at_most: float | None
    """Value that no plan of the variant exceeds; None if none of them can meet the objective."""
    score: float | None = None
    """Score of its model; None if it has none."""
    reason: str = ""
    """Reason why most of its plans cannot meet the objective; empty if one of them might."""


MIXED, APART = "mixed", "prefill/decode"
"""Names of families of plans: pools that do all, and a prefill pool with a decode pool."""


class FamilyGain(NamedTuple):
    """The best that a search knows of a family of plans."""

    family: str
    plan: str
    """Plan that reached the most; empty if none was found to meet the SLO."""
    reached: float | None
    at_most: float | None


def to_show(question: Question, plans: Sequence[BoundedCandidate]) -> Iterator[BoundedCandidate]:
    """Yield the most promising plan of each drafter, then of each variant if there are several and not too many, unless
    one of its plans meets the SLO by then: it is simulated whatever its bound.
    """
    groups = [[plan for plan in plans if plan.candidate.drafter == label] for label in question.labels]
    variants = [variant.label for variant in question.study.variants]
    for variant in variants if 1 < len(variants) <= MOST_SHOWN else ():
        groups.append([plan for plan in plans if plan.candidate.decoding.shape.variant == variant])
    for group in groups:
        promising = [plan for plan in group if plan.bound_rps > 0]
        if promising and all(plan.row.status != "feasible" for plan in promising):
            yield min(promising, key=BoundedCandidate.order)


def variant_gains(tuned: Tuned) -> list[VariantGain]:
    """Return the best of each variant, in the order of the study; empty if there is only one variant, or a front."""
    question = tuned.question
    variants = question.study.variants
    if len(variants) < 2 or tuned.ladder is not None:
        return []
    rows: dict[str, list[Trial]] = {variant.label: [] for variant in variants}
    for row in tuned.rows:
        rows[row.candidate.decoding.shape.variant].append(row)
    gains = [(variant, _gain(tuned, variant.label, rows[variant.label])) for variant in variants]
    return [gain._replace(score=variant.scored(question.study.score)) for variant, gain in gains]


def family_gains(tuned: Tuned) -> list[FamilyGain]:
    """Return the best of mixed and of prefill/decode plans, that of the chosen plan first; empty unless plans of both
    were searched, or if a front was."""
    rows: dict[str, list[Trial]] = {}
    for row in tuned.rows:
        roles = {pool.shape.role for pool in row.candidate.pools}
        rows.setdefault(MIXED if roles == {"mixed"} else APART, []).append(row)
    if len(rows) < 2 or tuned.ladder is not None:
        return []
    # The chosen plan is the first of the rows.
    return [FamilyGain(*_gain(tuned, family, of_family)[:4]) for family, of_family in rows.items()]


def _gain(tuned: Tuned, label: str, rows: list[Trial]) -> VariantGain:
    question, values = tuned.question, {id(tuned.chosen): tuned.value}
    # Plans of a class that was ruled out as a whole have no bound of their own.
    classes = {group.name: group.best for group in tuned.classes}
    sign = question.objective.sign
    feasible = [(_value(question, row, values), row) for row in rows if row.status in ("chosen", "feasible")]
    reached, plan = max(feasible, key=lambda entry: sign * entry[0], default=(None, None))
    bounds = [best for row in rows if (best := row.best if row.best is not None else classes.get(row.allocation))]
    bounds += [] if reached is None else [reached]
    at_most = max(bounds, key=lambda best: sign * best, default=None)
    refused = Counter(row.reason for row in rows if row.reason) if at_most is None else Counter[str]()
    reason = next((reason for reason, _ in refused.most_common(1)), "")
    return VariantGain(label, "" if plan is None else plan.candidate.name, reached, at_most, reason=reason)


def _value(question: Question, row: Trial, values: Mapping[int, float]) -> float:
    if id(row) in values:
        return values[id(row)]
    facts = question.facts(row.candidate, question.stream(row.candidate))
    return question.objective.value(facts, row.judged)
