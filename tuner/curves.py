"""How the chosen plan and its rivals behave over a range of loads: goodput curves, and latencies at their own rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simtune.parallel import executor, ordered_map
from simtune.sim.result import Result, quantiles
from simtune.tuner.search import Question, Trial, Tuned

FRACTIONS = (0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Rates of the curves, relative to the one the chosen plan sustains."""


@dataclass(frozen=True)
class CurvePoint:
    """A candidate under one rate, as far as it concerns the objective; latencies are 99th percentiles in seconds."""

    rate_rps: float
    goodput_rps: float | None
    slo_attainment: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    saturated: bool
    tokens_per_round: float | None
    wasted_per_round: float | None
    """Of one request that drafts: tokens delivered by a verification, and tokens verified and rejected."""


@dataclass(frozen=True)
class LoadCurve:
    """One candidate: its points by rising rate (none when the load is given), its latencies where it was judged."""

    candidate: str
    points: tuple[CurvePoint, ...]
    ttft_quantiles_s: tuple[float, ...]
    tpot_quantiles_s: tuple[float, ...]


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


def curves(tuned: Tuned, *, jobs: int | None = None) -> list[LoadCurve]:
    """Curves of the chosen plan, first, and of its rivals. `jobs` processes; the answer does not depend on it."""
    chosen_rate = tuned.chosen.rate_rps if tuned.question.searches_rate else None
    rates = tuple(fraction * chosen_rate for fraction in FRACTIONS) if chosen_rate is not None else ()
    tasks = [
        _CurveTask(tuned.question, row, tuned.deployment.max_model_len, rates) for row in [tuned.chosen, *rivals(tuned)]
    ]
    with executor(jobs, len(tasks)) as pool:
        return list(ordered_map(pool, _CurveTask.run, tasks))


@dataclass(frozen=True)
class _CurveTask:
    question: Question
    row: Trial
    max_model_len: int
    rates: Sequence[float]

    def run(self) -> LoadCurve:
        q = self.question
        deployment = q.deploy(self.row.candidate, self.max_model_len)
        own = q.watch(deployment, self.row.rate_rps if q.searches_rate else None)
        return LoadCurve(
            self.row.candidate.name,
            tuple(_point(q.watch(deployment, rate), rate) for rate in self.rates),
            tuple(quantiles(own.values("ttft"))),
            tuple(quantiles(own.values("tpot"))),
        )


def _point(result: Result, rate_rps: float) -> CurvePoint:
    rounds, drafts, _, tokens = result.drafted
    return CurvePoint(
        rate_rps,
        result.goodput_rps,
        result.slo_attainment,
        result.statistic("ttft", "p99"),
        result.statistic("tpot", "p99"),
        result.saturated,
        tokens / rounds if rounds else None,
        1 + (drafts - tokens) / rounds if rounds else None,
    )
