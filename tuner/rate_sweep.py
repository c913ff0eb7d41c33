"""How the chosen plan and its rivals behave over a range of loads, and their latencies at their own rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simtune.parallel import Jobs, executor, ordered_map
from simtune.sim.deployment import Deployment
from simtune.sim.result import Result
from simtune.sim.summary import LatencyQuantiles, SimulationSummary
from simtune.tuner.question import Question
from simtune.tuner.trial import Trial, Tuned

FRACTIONS = (0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Offered rates, relative to the one the chosen plan sustains."""
SHORTER = 4
"""A curve needs no percentile to a hundredth: each point is so much shorter than a simulation of the search."""
LEAST = 1000
"""Requests of a point, where the study has as many."""
NOTHING = LatencyQuantiles(ttft_s=(), tpot_s=(), e2el_s=())


@dataclass(frozen=True)
class RateSweep:
    """One candidate over the offered rates (none when the load is given), and its latencies where it was judged."""

    candidate: str
    points: tuple[tuple[float, SimulationSummary], ...]
    """What was simulated at each offered rate, rates rising."""
    judged: LatencyQuantiles


def rivals(tuned: Tuned, most: int = 2) -> list[Trial]:
    """The best of the simulated candidates whose GPUs are cut in other ways than the chosen plan's and each other's."""
    seen = {tuned.chosen.candidate.cut}
    rows: list[Trial] = []
    for row in tuned.runners_up(len(tuned.rows)):
        if row.summary is not None and row.candidate.cut not in seen:
            seen.add(row.candidate.cut)
            rows.append(row)
    return rows[:most]


def sweeps(tuned: Tuned, *, jobs: Jobs = None) -> list[RateSweep]:
    """Sweeps of the chosen plan, first, and of its rivals. `jobs` processes; the answer does not depend on it.

    The chosen plan's own rate is that of the search; all else is a shorter load, the beginning of the same one.
    """
    question = tuned.question
    own = tuned.chosen.rate_rps if question.searches_rate else None
    rates = () if own is None else tuple(fraction * own for fraction in FRACTIONS)
    requests = min(question.requests, max(LEAST, question.requests // SHORTER))
    tasks = [
        _SweepTask(question, row, tuned.deployment.max_model_len, rates, requests)
        for row in [tuned.chosen, *rivals(tuned)]
    ]
    tasks[0] = replace(tasks[0], rates=tuple(rate for rate in rates if rate != own), judged=False)
    with executor(jobs, len(tasks)) as pool:
        chosen, *of_rivals = ordered_map(pool, _SweepTask.run, tasks)
    known = () if own is None else ((own, tuned.result.summary()),)
    points = tuple(sorted((*chosen.points, *known), key=lambda point: point[0]))
    return [replace(chosen, points=points, judged=tuned.result.latency_quantiles()), *of_rivals]


@dataclass(frozen=True)
class _SweepTask:
    question: Question
    row: Trial
    max_model_len: int
    rates: Sequence[float]
    requests: int
    judged: bool = True
    """Whether its latencies at its own rate are asked for."""

    def run(self) -> RateSweep:
        deployment = self.question.deploy(self.row.candidate, self.max_model_len)
        own = self.row.rate_rps if self.question.searches_rate else None
        points = tuple((rate, self._watched(deployment, rate).summary()) for rate in self.rates)
        judged = self._watched(deployment, own).latency_quantiles() if self.judged else NOTHING
        return RateSweep(self.row.candidate.name, points, judged)

    def _watched(self, deployment: Deployment, rate_rps: float | None) -> Result:
        return self.question.watch(self.row.candidate, deployment, rate_rps, self.requests)
