"""Predicted beside measured: the error of a simulation, beside the noise of repeats and its own interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
from pydantic import Field

from simtune.errors import EngineError
from simtune.results.frames import PlainCurve, arrow, frame, html_table, plotted
from simtune.results.summary import SimulationSummary, Uncertainty
from simtune.specs.base import Count, NonNegative, Positive, Record, Seq, Whole
from simtune.validation.client.measured_run import MEASURED_METRICS, Clock, EngineFacts, MeasuredMetric, MeasuredRun

VALIDATION_SCHEMA: Literal["simtune/validation@1"] = "simtune/validation@1"

STATISTICS = ("mean", "p50", "p90", "p99")
JUDGED = (("ttft", "mean"), ("tpot", "mean"), ("e2el", "mean"))
"""Numbers that the verdict depends on: the means, which repeat best. All other numbers are only reported."""

MOST_LATE = 0.01
"""Share of the mean TPOT: a client that is later than this measures itself."""


class Comparison(Record):
    """A number, predicted and measured."""

    metric: str
    statistic: str
    unit: Literal["s", "1/s", "count", "share"]
    predicted: float | None
    low: float | None = Field(description="of our own 90 % interval; null where none was drawn")
    high: float | None
    measured: float | None = Field(description="the median of the repeats")
    noise: NonNegative | None = Field(description="half the range of the repeats over their median; null for one run")
    error: float | None = Field(description="predicted / measured - 1")
    within: bool | None = Field(description="null where the verdict does not ask")

    @property
    def name(self) -> str:
        """Name in words, such as TTFT p99."""
        return f"{self.metric.upper() if self.unit == 's' else self.metric.replace('_', ' ')} {self.statistic}".strip()


class LoadResult(Record):
    """Result of one load over its repeats."""

    label: str
    rate_rps: Positive | None
    requests: Count
    repeats: Count
    failed: Whole = Field(description="requests of all repeats that were not answered to the end")
    failures: dict[str, Count] = Field(description="how often, by what went wrong")
    saturated: bool = Field(description="predicted: requests pile up")
    lateness_p99_s: NonNegative | None = Field(description="of the client, in its worst repeat")
    comparisons: Seq[Comparison]

    def error(self, metric: str, statistic: str = "mean") -> float | None:
        """Return predicted / measured - 1 of one number, if there is one."""
        return next((c.error for c in self.comparisons if (c.metric, c.statistic) == (metric, statistic)), None)


class Validation(Record):
    """A plan on a real engine: what was predicted, what was measured, and whether that is close enough."""

    schema_id: Literal["simtune/validation@1"] = Field(alias="schema")
    name: str = Field(description="of the plan")
    model: str
    hardware: str
    device: str
    engine: EngineFacts
    clock: Clock
    tolerance: Positive
    loads: Seq[LoadResult]
    within: bool = Field(description="every judged number within the tolerance, or within twice the repeats' noise")

    def to_pandas(self) -> Any:
        """Return every number of every load as a row of a `pandas.DataFrame`. Raise UsageError without pandas."""
        return frame(self._columns())

    def to_arrow(self) -> Any:
        """Return the same as a `pyarrow.Table`. Raise UsageError without pyarrow."""
        return arrow(self._columns())

    def figures(self) -> dict[str, Any]:
        """Return `scatter`: predicted over measured latencies of every load, in milliseconds, as a figure of Plotly."""
        clouds = []
        for load in self.loads:
            latencies = [c for c in load.comparisons if c.unit == "s" and c.predicted and c.measured]
            measured, predicted = (
                [1e3 * (getattr(c, side) or 0.0) for c in latencies] for side in ("measured", "predicted")
            )
            clouds.append(PlainCurve(load.label, measured, predicted, mode="markers"))
        return {"scatter": plotted("measured, ms", "predicted, ms", clouds)}

    def _columns(self) -> dict[str, list[Any]]:
        """Return columns of all numbers of all loads, by name."""
        rows = [(load.label, c) for load in self.loads for c in load.comparisons]
        columns: dict[str, list[Any]] = {"load": [label for label, _ in rows], "number": [c.name for _, c in rows]}
        for name in ("unit", "predicted", "low", "high", "measured", "noise", "error", "within"):
            columns[name] = [getattr(c, name) for _, c in rows]
        return columns

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: the means that were judged."""
        rows = [
            (f"{load.label}: {c.name}", f"{c.error:+.1%}, {'within' if c.within else 'outside'}")
            for load in self.loads
            for c in load.comparisons
            if c.within is not None and c.error is not None
        ]
        return html_table(f"{self.name} on {self.device}: predicted over measured", rows)


def compare(
    label: str,
    runs: Sequence[MeasuredRun],
    predicted: SimulationSummary,
    drawn: Uncertainty | None,
    tolerance: float,
) -> LoadResult:
    """Compare the repeats of a load with one simulation of the same requests. Failed requests are counted, not
    compared."""
    rows = [
        _comparison(metric, statistic, "s", runs, predicted, drawn, tolerance)
        for metric in MEASURED_METRICS
        for statistic in STATISTICS
    ]
    rows += [
        _comparison(name, "", "1/s", runs, predicted, drawn, tolerance)
        for name in ("request_throughput_rps", "output_tokens_per_s")
    ]
    rows += [_comparison(name, "", unit, runs, predicted, drawn, tolerance) for name, unit in _COUNTED.items()]
    failures = [r.error for run in runs for r in run.failed if r.error is not None]
    late = [run.facts.lateness.p99_s for run in runs if run.facts.lateness is not None]
    return LoadResult(
        label=label,
        rate_rps=predicted.offered_rate_rps,
        requests=predicted.requests,
        repeats=len(runs),
        failed=len(failures),
        failures={error: failures.count(error) for error in dict.fromkeys(failures)},
        saturated=predicted.saturated,
        lateness_p99_s=max(late, default=None),
        comparisons=tuple(row for row in rows if row.measured is not None),
    )


_COUNTED: dict[str, Literal["count", "share"]] = {
    "preemptions": "count",
    "acceptance": "share",
    "tokens_per_round": "count",
    "prefix_hit_rate": "share",
}
"""Counters of engines, by unit, if the engine reports them."""


def _comparison(
    metric: str,
    statistic: str,
    unit: Literal["s", "1/s", "count", "share"],
    runs: Sequence[MeasuredRun],
    predicted: SimulationSummary,
    drawn: Uncertainty | None,
    tolerance: float,
) -> Comparison:
    keys, ours, values = _sides(metric, statistic, unit == "s", runs, predicted)
    measured = float(np.median(values)) if values else None
    noise = (max(values) - min(values)) / 2 / measured if len(values) > 1 and measured else None
    error = ours / measured - 1 if ours is not None and measured else None
    low, high = (drawn.of(*keys) or (None, None)) if drawn is not None else (None, None)
    judged = (metric, statistic) in JUDGED and error is not None
    return Comparison(
        metric=metric,
        statistic=statistic,
        unit=unit,
        predicted=ours,
        low=low,
        high=high,
        measured=measured,
        noise=noise,
        error=error,
        within=abs(error) <= max(tolerance, 2 * (noise or 0.0)) if judged and error is not None else None,
    )


def _sides(
    metric: str, statistic: str, latency: bool, runs: Sequence[MeasuredRun], predicted: SimulationSummary
) -> tuple[tuple[str, ...], float | None, list[float]]:
    """Return (path of the number in the summary, predicted value, measured value of every run)."""
    if latency:
        ours = getattr(predicted.metrics[cast(MeasuredMetric, metric)], statistic)
        values = [run.statistic(cast(MeasuredMetric, metric), statistic) for run in runs]
        return ("metrics", metric, statistic), ours, [value for value in values if value is not None]
    counts = [_MEASURED[metric](run) for run in runs]
    return (metric,), _PREDICTED[metric](predicted), [value for value in counts if value is not None]


def _drafts(run: MeasuredRun) -> tuple[float | None, float | None]:
    """Return (share of the drafts that was accepted, tokens per verification)."""
    counts = run.facts.drafts
    if counts is None:
        return None, None
    share = counts.accepted_tokens / counts.draft_tokens if counts.draft_tokens else None
    return share, 1 + counts.accepted_tokens / counts.rounds


_PREDICTED: dict[str, Callable[[SimulationSummary], float | None]] = {
    "request_throughput_rps": lambda s: s.request_throughput_rps,
    "output_tokens_per_s": lambda s: s.output_tokens_per_s,
    "preemptions": lambda s: float(s.preemptions),
    "acceptance": lambda s: s.speculation.acceptance if s.speculation else None,
    "tokens_per_round": lambda s: s.speculation.tokens_per_round if s.speculation else None,
    "prefix_hit_rate": lambda s: s.prefix_cache[0].hit_rate if len(s.prefix_cache) == 1 else None,
}
_MEASURED: dict[str, Callable[[MeasuredRun], float | None]] = {
    "request_throughput_rps": lambda run: run.request_throughput_rps,
    "output_tokens_per_s": lambda run: run.output_tokens_per_s,
    "preemptions": lambda run: None if run.facts.preemptions is None else float(run.facts.preemptions),
    "acceptance": lambda run: _drafts(run)[0],
    "tokens_per_round": lambda run: _drafts(run)[1],
    "prefix_hit_rate": lambda run: run.facts.prefix_hit_rate,
}


def check_client(run: MeasuredRun, most_late: float = MOST_LATE) -> None:
    """Raise EngineError if the client was later than `most_late` of the mean TPOT, because its times are its own
    then."""
    lateness, tpot_s = run.facts.lateness, run.statistic("tpot", "mean")
    if lateness is None or tpot_s is None or lateness.p99_s <= most_late * tpot_s:
        return
    mean = f"the mean TPOT of {1e3 * tpot_s:.2f} ms"
    share = f"{lateness.p99_s / tpot_s:.1%} of {mean}" if tpot_s > 0 else f"beyond any share of {mean}"
    raise EngineError(
        f"load {run.facts.label}: the client itself was late by {1e3 * lateness.p99_s:.2f} ms (p99), which is "
        f"{share} and more than {most_late:.1%}; "
        "nothing is judged by its times. Give the client a quiet core (taskset), or allow more with --max-lateness"
    )
