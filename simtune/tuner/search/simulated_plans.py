"""Plans that were simulated, and what that tells of plans that were not."""

from __future__ import annotations

from typing import NamedTuple

from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import SimulationFinding


class SeenPlan(NamedTuple):
    """A plan that missed its SLO at a rate, or met it or not at the load that was given."""

    plan: BoundedCandidate
    rate_rps: float | None
    finding: SimulationFinding


class SeenPlans:
    """All that tell something of other plans."""

    def __init__(self) -> None:
        self._of: dict[tuple[object, ...], list[SeenPlan]] = {}

    def remember(self, plan: BoundedCandidate, rate: float | None, finding: SimulationFinding) -> None:
        """Keep what a plan says of others."""
        if finding.used is not None or finding.first_tokens_miss:
            for key in plan.shared_keys:
                self._of.setdefault(key, []).append(SeenPlan(plan, rate, finding))

    def tell(self, plan: BoundedCandidate, low: float | None) -> tuple[SeenPlan, str] | None:
        """A plan under the load that is given, or that missed the SLO at a rate no higher, of which this one must do
        the same, and why it must."""
        for seen in (seen for key in plan.shared_keys for seen in self._of.get(key, ())):
            if low is None:
                no_higher = seen.rate_rps is None
            else:
                no_higher = seen.rate_rps is None or seen.rate_rps <= low * (1 + 1e-12)
            if no_higher and (reason := plan.ruled_out_by(seen.plan, seen.finding)):
                return seen, reason if seen.rate_rps is None else f"at {seen.rate_rps:.4g} requests/s {reason}"
        return None
