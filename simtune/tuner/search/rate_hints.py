"""Rates that full runs of a plan are likely to meet the SLO at, by short runs. They decide nothing."""

from __future__ import annotations

from collections.abc import Callable

from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import Climb, Rung, SimulationFinding
from simtune.tuner.search.short_runs import as_shown, lasting, short_lengths

NEAR = 0.8
"""Largest share of a limit used by a run that meets the SLO, above which the limit is near: then the share itself shows
where, better than shorter runs."""
SHOWING = 2.0
"""Mean end-to-end latencies that the arrivals of a short run last at least, if it shows where the highest rate of full
runs lies: in the first one few requests decode beside each other."""
BIASED = 3
"""Steps by which full runs of one plan meet less than short ones, or more, before those of the next plan are taken to
as well: fewer may be chance."""
COARSE = 2
"""Steps that count as equal for runs of the study's own number of requests."""


class RateHints:
    """Looks for the highest rate of one plan after the other by short runs, and learns from the full ones."""

    def __init__(
        self, question: Question, simulated: Callable[[BoundedCandidate, float, int], SimulationFinding]
    ) -> None:
        """Create hints; `simulated` runs a plan at a rate with the first requests of its load."""
        self._question, self._simulated = question, simulated
        self._step = 1 + question.study.search.rate_tolerance
        self._full_to_short: dict[int, float] = {}
        """The highest rate that full runs of a plan met over that of short runs, by the requests of these, of the last
        plan of which both are known: short runs end before they feel a rate that is a little too high, and where many
        ranks wait for one another their first requests stand for too much."""
        self._shown: tuple[int, float] | None = None
        """Requests of the short runs of the last plan, and the highest rate that they met; None if there were none."""

    def first(self, plan: BoundedCandidate) -> float | None:
        """Return the rate to try first of a plan of which nothing is known; None if short runs show nothing."""
        lengths = short_lengths(self._question, plan.candidate)
        return self._around(plan, lengths[-1]) if lengths else None

    def after(self, plan: BoundedCandidate, rate_rps: float, finding: SimulationFinding) -> float | None:
        """Return the rate to try after a full run met the SLO at a rate; None if its limit is near, or if short runs
        show nothing. If that run was made longer than the study's own requests, a run of these is short."""
        if finding.strain is not None and finding.strain >= NEAR:
            return None
        if finding.summary.requests > self._question.requests:
            return self._around(plan, self._question.requests, rate_rps)
        lengths = short_lengths(self._question, plan.candidate)
        return self._around(plan, lengths[-1], rate_rps) if lengths else None

    def learn(self, rate_rps: float | None) -> None:
        """Take the highest rate that full runs of the last plan met; None if there is none."""
        if self._shown is not None and rate_rps is not None:
            requests, shown_rps = self._shown
            self._full_to_short[requests] = rate_rps / shown_rps
        self._shown = None

    def _around(self, plan: BoundedCandidate, requests: int, met_rps: float | None = None) -> float | None:
        step = self._step if requests < self._question.requests else self._step**COARSE
        climb = Climb(plan.ceiling_rps, step, met_rps, met=None if met_rps is None else Rung(met_rps, None))
        enough = requests
        while (rate_rps := climb.rate_rps) is not None:
            finding = self._simulated(plan, rate_rps, enough)
            # A run that lasts too short a time is repeated with more requests, up to those of a full run.
            if (longer := min(self._question.requests, lasting(finding, SHOWING))) > enough:
                enough = longer
                finding = self._simulated(plan, rate_rps, enough)
            climb = climb.after(rate_rps, as_shown(finding, SHOWING))
        if climb.met is None:
            return None
        self._shown = requests, climb.met.rate_rps
        ratio = self._full_to_short.get(requests, 1.0)
        biased = max(ratio, 1 / ratio) > self._step**BIASED
        return climb.met.rate_rps * (ratio if biased else 1.0)
