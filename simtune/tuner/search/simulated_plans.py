"""Simulated plans, and the results that they imply for other plans."""

from __future__ import annotations

from typing import NamedTuple

from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import SimulationFinding


class SeenPlan(NamedTuple):
    """A plan that was simulated at a rate, or at the given load."""

    plan: BoundedCandidate
    rate_rps: float | None
    finding: SimulationFinding

    @property
    def proves_rps(self) -> float | None:
        """Rate at which a run of the study's own length would prove as much; None at the given load."""
        if self.rate_rps is None:
            return None
        question = self.plan.plan_cache.question
        return self.rate_rps * question.draw_spread.slack(question.requests, self.finding.missed_by)


class SeenPlans:
    """All simulated plans that imply results of other plans."""

    def __init__(self) -> None:
        self._of: dict[tuple[object, ...], list[SeenPlan]] = {}
        self._met: dict[tuple[object, ...], list[SeenPlan]] = {}

    def remember_met(self, plan: BoundedCandidate, rate: float, finding: SimulationFinding) -> None:
        """Store a run of the study's own length that meets the SLO at a rate."""
        if finding.used is not None:
            self._met.setdefault(plan.kind, []).append(SeenPlan(plan, rate, finding))

    def highest_met(self, plan: BoundedCandidate) -> SeenPlan | None:
        """Return the simulation at the highest rate at which a plan that must do the same as this one met the SLO."""
        same = [item for item in self._met.get(plan.kind, ()) if plan.does_the_same(item.plan, item.finding)]
        return max(same, key=lambda item: item.rate_rps or 0.0, default=None)

    def lowest_missed(self, plan: BoundedCandidate, above_rps: float) -> SeenPlan | None:
        """Return the simulation of full length at the lowest rate above `above_rps` at which a plan that must do the
        same as this one missed the SLO."""
        same = [
            item
            for item in self._of.get(plan.kind, ())
            if item.rate_rps is not None
            and item.rate_rps > above_rps
            and not item.finding.met
            and item.proves_rps == item.rate_rps
            and plan.does_the_same(item.plan, item.finding)
        ]
        return min(same, key=lambda item: item.rate_rps or 0.0, default=None)

    def remember(self, plan: BoundedCandidate, rate: float | None, finding: SimulationFinding) -> None:
        """Store a finding that may imply results of other plans."""
        if finding.used is not None or finding.first_tokens_miss or finding.decodes_miss:
            for key in plan.shared_keys:
                self._of.setdefault(key, []).append(SeenPlan(plan, rate, finding))

    def tell(self, plan: BoundedCandidate, low: float | None) -> tuple[SeenPlan, str] | None:
        """Return a simulated plan whose result this plan must share, and the reason; None if there is none.

        The simulated plan ran under the given load, or missed the SLO at a rate no higher than `low`.
        """
        for seen_plan in (seen_plan for key in plan.shared_keys for seen_plan in self._of.get(key, ())):
            if low is None:
                no_higher = seen_plan.rate_rps is None
            else:
                proves = seen_plan.proves_rps
                no_higher = proves is None or proves <= low * (1 + 1e-12)
            if no_higher and (reason := plan.ruled_out_by(seen_plan.plan, seen_plan.finding)):
                return (
                    seen_plan,
                    reason if seen_plan.rate_rps is None else f"at {seen_plan.rate_rps:.4g} requests/s {reason}",
                )
        return None
