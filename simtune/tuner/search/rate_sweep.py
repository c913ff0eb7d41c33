"""Simulate the chosen plan and its rivals over a range of rates, and report their latencies at their own rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simtune.results.result import Result
from simtune.results.steady import needed_for
from simtune.results.summary import LatencyQuantiles, SimulationSummary
from simtune.sim.deployment import Deployment
from simtune.sim.parallel import Jobs, executor, ordered_map
from simtune.tuner.question import Question
from simtune.tuner.search.confirm import ENOUGH_LIFETIMES
from simtune.tuner.trial import Confirmed, Trial, Tuned

FRACTIONS = (0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Offered rates, relative to the one the chosen plan sustains."""
OF_RIVALS = FRACTIONS[:5]
"""Rates of the rivals: up to the chosen plan's own, beyond which they miss the SLO as it does."""
SHORTER = 4
"""Factor by which a point of the chosen plan lasts less long than a fresh draw: a curve needs less than a verdict.
At a lower rate fewer requests last as long."""
BEYOND = 8000
"""Most requests of the first point beyond the rate of the chosen plan: enough for requests to pile up, or not to.
Points farther beyond have as many requests more than are served, and so fewer in all."""
LEAST = 1000
"""Fewest requests of a point, if the study has as many."""
NOTHING = LatencyQuantiles(ttft_s=(), tpot_s=(), e2el_s=())


@dataclass(frozen=True)
class RateSweep:
    """Sweep of one candidate over the offered rates (empty if the load is given), and its latencies at its own rate."""

    candidate: str
    points: tuple[tuple[float, SimulationSummary], ...]
    """Offered rates in ascending order, each with the summary of its simulation."""
    judged: LatencyQuantiles


def rivals(tuned: Tuned, most: int = 2) -> list[Trial]:
    """Return the best simulated candidates whose GPUs are cut differently from the chosen plan's and from each
    other's."""
    cuts = {tuned.chosen.candidate.cut}
    rows: list[Trial] = []
    for row in tuned.runners_up(len(tuned.rows)):
        if row.summary is not None and row.candidate.cut not in cuts:
            cuts.add(row.candidate.cut)
            rows.append(row)
    return rows[:most]


def sweeps(tuned: Tuned, *, jobs: Jobs = None) -> list[RateSweep]:
    """Return the sweeps of the chosen plan, first, and of its rivals. The answer does not depend on `jobs`, the number
    of processes.

    The point at the chosen plan's own rate is that of the search; the others are the beginning of the same load.
    """
    question = tuned.question
    chosen_rps = tuned.chosen.rate_rps if question.searches_rate else None
    confirmed = 0 if tuned.confirmed is None else question.arrivals(_enough(tuned.confirmed))
    most = max(question.requests, confirmed)
    longest = tuned.deployment.max_model_len

    tasks = [_SweepTask(question, tuned.chosen, longest, _at(chosen_rps, _requests_at(most)))]
    of_rivals = question.requests if chosen_rps is None else _of_rivals(question)
    of_each = _at(chosen_rps, dict.fromkeys(OF_RIVALS, of_rivals))
    tasks += [_SweepTask(question, row, longest, of_each, of_rivals) for row in rivals(tuned)]
    with executor(jobs, len(tasks)) as pool:
        chosen, *sweeps_of_rivals = ordered_map(pool, _SweepTask.run, tasks)
    chosen_point = () if chosen_rps is None else ((chosen_rps, tuned.result.summary()),)
    points = tuple(sorted((*chosen.points, *chosen_point), key=lambda point: point[0]))
    if tuned.confirmed is not None and chosen_rps is not None:
        points = tuple((rate, _kept_up(summary) if rate <= chosen_rps else summary) for rate, summary in points)
    return [replace(chosen, points=points, judged=tuned.result.latency_quantiles()), *sweeps_of_rivals]


def _at(chosen_rps: float | None, requests_at: Mapping[float, int]) -> tuple[tuple[float, int], ...]:
    """Return rates and numbers of requests by the share of the chosen plan's rate; none without a rate."""
    return () if chosen_rps is None else tuple((share * chosen_rps, n) for share, n in requests_at.items())


def _requests_at(most: int) -> dict[float, int]:
    """Return the requests of the points of the chosen plan by the share of its rate, which has `most` itself."""
    short = min(most, max(LEAST, most // SHORTER))
    beyond = [share for share in FRACTIONS if share > 1.0]
    too_many = min(most, BEYOND) * _excess(beyond[0])
    farther = {share: max(short, math.ceil(too_many / _excess(share))) for share in beyond}
    below = {share: max(min(most, LEAST), math.ceil(short * share)) for share in FRACTIONS if share < 1.0}
    return below | farther


def _excess(share: float) -> float:
    """Return the share of requests that cannot be served at `share` times the rate that is kept up with."""
    return 1 - 1 / share


def _kept_up(summary: SimulationSummary) -> SimulationSummary:
    """Return the summary of a run whose rate is known to be kept up with: its goodput is its rate times the attainment,
    however short it is."""
    rate, attainment = summary.offered_rate_rps, summary.slo_attainment
    if rate is None or attainment is None:
        return summary
    return summary.model_copy(update={"goodput_rps": rate * attainment})


def _of_rivals(question: Question) -> int:
    """Return the requests of a rival's point: as many as the percentiles of the SLO need."""
    enough = (needed_for(statistic) for _, statistic, _ in question.study.slo.limits())
    return min(question.requests, question.arrivals(max([LEAST, *enough])))


def _enough(confirmed: Confirmed) -> int:
    """Return the requests of a fresh draw that last ENOUGH_LIFETIMES, if it was made longer than that to show that the
    plan keeps up."""
    lasting = ENOUGH_LIFETIMES / confirmed.lifetimes if confirmed.lifetimes else 1.0
    return math.ceil(confirmed.requests * min(1.0, lasting))


@dataclass(frozen=True)
class _SweepTask:
    question: Question
    row: Trial
    max_model_len: int
    loads: Sequence[tuple[float, int]]
    """Rates, each with its number of requests."""
    judged: int | None = None
    """Requests by which the latencies at the candidate's own rate are simulated; None if they are not."""

    def run(self) -> RateSweep:
        deployment = self.question.deploy(self.row.candidate, self.max_model_len)
        rate_rps = self.row.rate_rps if self.question.searches_rate else None
        points = tuple((rate, self._watched(deployment, rate, n).summary()) for rate, n in self.loads)
        judged = (
            NOTHING if self.judged is None else self._watched(deployment, rate_rps, self.judged).latency_quantiles()
        )
        return RateSweep(self.row.candidate.name, points, judged)

    def _watched(self, deployment: Deployment, rate_rps: float | None, requests: int) -> Result:
        return self.question.watch(self.row.candidate, deployment, rate_rps, requests)
