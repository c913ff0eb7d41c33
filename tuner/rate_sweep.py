"""How the chosen plan and its rivals behave over a range of loads, and their latencies at their own rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simtune.parallel import Jobs, executor, ordered_map
from simtune.sim.summary import LatencyQuantiles, SimulationSummary
from simtune.tuner.question import Question
from simtune.tuner.trial import Trial, Tuned

FRACTIONS = (0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Offered rates, relative to the one the chosen plan sustains."""


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
    """Sweeps of the chosen plan, first, and of its rivals. `jobs` processes; the answer does not depend on it."""
    chosen_rate = tuned.chosen.rate_rps if tuned.question.searches_rate else None
    rates = tuple(fraction * chosen_rate for fraction in FRACTIONS) if chosen_rate is not None else ()
    tasks = [
        _Task(tuned.question, row, tuned.deployment.max_model_len, rates) for row in [tuned.chosen, *rivals(tuned)]
    ]
    with executor(jobs, len(tasks)) as pool:
        return list(ordered_map(pool, _Task.run, tasks))


@dataclass(frozen=True)
class _Task:
    question: Question
    row: Trial
    max_model_len: int
    rates: Sequence[float]

    def run(self) -> RateSweep:
        q = self.question
        deployment = q.deploy(self.row.candidate, self.max_model_len)
        own = self.row.rate_rps if q.searches_rate else None
        judged = q.watch(self.row.candidate, deployment, own)
        points = (
            (rate, judged if rate == own else q.watch(self.row.candidate, deployment, rate)) for rate in self.rates
        )
        return RateSweep(
            self.row.candidate.name,
            tuple((rate, result.summary()) for rate, result in points),
            judged.latency_quantiles(),
        )
