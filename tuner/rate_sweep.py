"""How the chosen plan and its rivals behave over a range of loads, and their latencies at their own rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simtune.parallel import executor, ordered_map
from simtune.sim.summary import LatencyQuantiles, SimulationSummary
from simtune.tuner.search import Question, Trial, Tuned

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
    """The best candidates that meet the SLO with another tp x pp than the chosen plan's and than each other's."""
    seen = {(tuned.chosen.candidate.shape.tp, tuned.chosen.candidate.shape.pp)}
    rows: list[Trial] = []
    for row in tuned.rows[1:]:
        key = (row.candidate.shape.tp, row.candidate.shape.pp)
        if row.status == "feasible" and key not in seen:
            seen.add(key)
            rows.append(row)
    return rows[:most]


def sweeps(tuned: Tuned, *, jobs: int | None = None) -> list[RateSweep]:
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
        judged = q.watch(deployment, self.row.rate_rps if q.searches_rate else None)
        return RateSweep(
            self.row.candidate.name,
            tuple((rate, q.watch(deployment, rate).summary()) for rate in self.rates),
            judged.latency_quantiles(),
        )
