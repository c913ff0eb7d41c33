"""Candidates and their fates, and the answer of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from simtune.results.frames import PlainCurve, arrow, frame, html_table, plotted
from simtune.results.result import Result
from simtune.results.summary import Metric, SimulationSummary
from simtune.sim.deployment import Deployment
from simtune.tuner.doubt.same_draw import Gaps
from simtune.tuner.objectives import Judged
from simtune.tuner.question import Question
from simtune.tuner.search.front_points import Ladder
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.plan_classes import PlanClass


class Attempt(NamedTuple):
    """A simulation of a candidate."""

    rate_rps: float | None
    """None for the workload's own rate."""
    met: bool
    """True if the simulation met the SLO."""
    all_cores: bool = False
    """True if all cores were simulated although some could stand for all."""
    draw: int = 0
    """Draw of the requests; 0 is the draw of the search."""
    requests: int | None = None
    """Requests at the start of the simulation, over all cores; None for the study's own number."""
    missed_by: int | None = None
    """Requests of the simulated cores in the part of the run that missed the SLO; None if no part was cut off."""


class Confirmed(NamedTuple):
    """The fresh draws on all of which the chosen plan keeps the SLO."""

    draws: int
    requests: int
    """Least number of requests that were simulated in a draw."""
    lifetimes: float | None
    """Least number of lifetimes that a draw lasts; None for a load without a rate."""
    values: tuple[float, ...] = ()
    """Objective on each draw if the load is given; empty if rates are searched."""


@dataclass
class Trial:
    """A candidate and its fate. Numbers are those of the last simulation at `rate_rps`; None if there was none."""

    candidate: Candidate
    status: str
    reason: str
    kv_blocks: int | None = None
    """KV blocks of an instance of the first pool."""
    rate_bound_rps: float | None = None
    """Request rate above which the plan does not meet the SLO."""
    bounded_by: str = ""
    """Name of the bound that proves it."""
    rate_rps: float | None = None
    simulations: int = 0
    summary: SimulationSummary | None = None
    tried: list[Attempt] = field(default_factory=list)
    """Simulations of the plan, in order."""
    same_as: str = ""
    """Another plan that was simulated, of which this one must do the same, by its name."""
    allocation: str = ""
    """The class of plans that was ruled out as a whole, by its name (`simtune.tuner.space.plan_classes`)."""
    best: float | None = None
    """Bound on the objective, by the bounds of the plan and by its simulations."""
    drawn: tuple[float, ...] = ()
    """Objective on each fresh draw if the load is given; empty if there were none."""

    def take(self, summary: SimulationSummary, rate_rps: float | None) -> None:
        """Store the results of a simulation of this candidate."""
        self.summary, self.rate_rps = summary, rate_rps or summary.offered_rate_rps

    def statistic(self, metric: Metric, statistic: Literal["mean", "p99"]) -> float | None:
        """Return a statistic of a metric in seconds; None if nothing was simulated or counted."""
        if self.summary is None:
            return None
        latencies = self.summary.metrics[metric]
        return latencies.mean if statistic == "mean" else latencies.p99

    @property
    def judged(self) -> Judged:
        """Results of the last simulation that objectives need."""
        return Judged(self.rate_rps, None, None) if self.summary is None else judged_of(self.summary, self.rate_rps)


def judged_of(summary: SimulationSummary, rate_rps: float | None) -> Judged:
    """Return the results of a simulation that objectives need, at the rate at which it was made."""
    return Judged(
        rate_rps=rate_rps,
        output_tokens_per_s=summary.output_tokens_per_s,
        e2el_s=summary.metrics["e2el"].mean,
        tokens_per_s_per_user=summary.output_tokens_per_s_per_user,
        joules_per_token=summary.joules_per_token,
        makespan_s=summary.duration_s,
        family_s=summary.metrics["family"].mean if "family" in summary.metrics else None,
        family_active_s=_active_s(summary),
        users=summary.users,
        run_hours=next((of.hours for of in summary.autoscaling), summary.duration_s / 3600),
        pool_gpu_hours={of.pool: of.gpu_hours for of in summary.autoscaling},
        output_tokens=(summary.output_tokens_per_s or 0.0) * summary.duration_s,
    )


def _active_s(summary: SimulationSummary) -> float | None:
    """Return the mean latency of a family without its pauses; of families that have none, the mean latency."""
    latencies = summary.metrics.get("family_active", summary.metrics.get("family"))
    return None if latencies is None else latencies.mean


class CoursePoint(NamedTuple):
    """Progress of a search after a number of simulations."""

    simulations: int
    decided: int
    """Plans that were decided."""
    plan: str
    """Name of the best plan so far; empty if there was none."""
    value: float | None
    """Objective of the best plan, in its unit."""
    bound: float | None
    """Value that no plan of the space exceeds."""


@dataclass
class Tuned:
    """The answer of a search: the chosen plan first, then all others with the reason why they lost."""

    question: Question
    rows: list[Trial]
    deployment: Deployment
    result: Result
    value: float
    """Objective of the chosen plan, in its own unit."""
    bound: float
    """Value of the objective that no plan of the space exceeds, under the cost model and within the simulations made.

    A plan that misses the SLO on a draw of the requests is taken to miss it on any draw at rates that are more than two
    standard deviations higher (`simtune.tuner.doubt.draw_spread`). Of the gap they count less where the chosen plan met
    the SLO on the same requests (`simtune.tuner.doubt.same_draw`).
    """
    interrupted: bool = False
    ladder: Ladder | None = None
    """The front, if the study asks for one."""
    classes: tuple[PlanClass, ...] = ()
    """All classes of plans, and the parts of them that were ruled out as a whole, with their bounds."""
    course: tuple[CoursePoint, ...] = ()
    """Best plan and bound over the course of the search."""
    confirmed: Confirmed | None = None
    """None if the study asks for no draws."""
    gaps: Gaps | None = None
    """Shares of the chosen plan's value by which another plan could be better at most; None unless rates are searched,
    or if the chosen plan misses the SLO on the draw of the search."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of plans that have no row, by the constraint that they break or the reason why the engine would refuse
    them."""

    @property
    def chosen(self) -> Trial:
        """The plan that won."""
        return self.rows[0]

    @property
    def gap_on_draw(self) -> float | None:
        """Share by which another plan could be better at most on the same requests; None where `gaps` is."""
        return None if self.gaps is None else self.gaps.on_draw

    @property
    def gap(self) -> float:
        """Share of the chosen plan's value by which another plan could be better at most."""
        if self.gaps is not None:
            return self.gaps.on_any
        if self.value == self.bound:
            return 0.0
        return max(0.0, self.question.objective.sign * (self.bound - self.value) / self.value)

    def idle(self) -> dict[str, tuple[int, int]]:
        """Return (devices that the chosen plan leaves idle, devices that the study has) of each profile with such."""
        pools = self.chosen.candidate.pools
        counts = {
            entry.profile: (
                entry.devices - sum(p.devices for p in pools if p.shape.gpu == entry.profile),
                entry.devices,
            )
            for entry in self.question.study.hardware
        }
        return {profile: (unused, devices) for profile, (unused, devices) in counts.items() if unused > 0}

    def runners_up(self, most: int = 3) -> list[Trial]:
        """Return the best candidates that meet the SLO, then the nearest of the others that were simulated."""
        return [row for row in self.rows[1:] if row.status in ("feasible", "infeasible")][:most]

    def to_pandas(self) -> Any:
        """Return every plan that was considered as a row of a `pandas.DataFrame`. Raise UsageError without pandas."""
        return frame(self._columns())

    def to_arrow(self) -> Any:
        """Return the same as a `pyarrow.Table`. Raise UsageError without pyarrow."""
        return arrow(self._columns())

    def figures(self) -> dict[str, Any]:
        """Return figures of Plotly by name.

        `course` shows the bound and the best plan over the simulations; the others show the latencies of the chosen
        plan as `Result` draws them.
        """
        simulations = [point.simulations for point in self.course]
        lines = [
            PlainCurve("bound", simulations, [point.bound for point in self.course]),
            PlainCurve("best plan", simulations, [point.value for point in self.course]),
        ]
        return {"course": plotted("simulations", self.question.objective.unit, lines), **self.result.figures()}

    def _columns(self) -> dict[str, list[Any]]:
        """Return the columns of all plans by name; a value is None if the search did not need it."""
        rows = self.rows
        return {
            "plan": [row.candidate.name for row in rows],
            "status": [row.status for row in rows],
            "num_gpus": [row.candidate.num_gpus for row in rows],
            "best": [row.best for row in rows],
            "bounded_by": [row.bounded_by for row in rows],
            "rate_rps": [row.rate_rps for row in rows],
            "goodput_rps": [None if row.summary is None else row.summary.goodput_rps for row in rows],
            "ttft_p99_s": [row.statistic("ttft", "p99") for row in rows],
            "tpot_p99_s": [row.statistic("tpot", "p99") for row in rows],
            "simulations": [row.simulations for row in rows],
            "reason": [row.reason for row in rows],
        }

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        unit = self.question.objective.unit
        rows = [
            ("chosen", self.chosen.candidate.name),
            (self.question.study.objective, f"{self.value:,.4g} {unit}"),
            ("another plan is better at most by", f"{self.gap:.1%}"),
            *((f"{rank}. {row.candidate.name}", row.reason) for rank, row in enumerate(self.runners_up(), 2)),
        ]
        return html_table("simtune.Tuned", rows)
