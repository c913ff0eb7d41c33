"""Several runs side by side: the differences of their plans, every number beside the first run's, figures overlaid.

A run keeps its colour through the page. The first run is what others are compared with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from simtune import __version__
from simtune.report import figures, info, side_by_side, verdict
from simtune.report.certainty import certainty
from simtune.report.side_by_side import NamedFindings, NamedValidation
from simtune.report.templates import fill, template
from simtune.report.validation_page import headline as validated
from simtune.results.summary import Metric
from simtune.runs.schema import Run, Summary
from simtune.validation.published import headline as published

METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2el")
SHORT = 40
"""Most characters of a value that a warning contains."""
DECISIVE = 5e-4
"""Smaller relative differences are called none."""


class NamedRun(NamedTuple):
    """A run under the name it has in the page."""

    name: str
    run: Run


class Number(NamedTuple):
    """A row of the table of numbers: what it is, its unit, and how to take and print it."""

    what: str
    unit: str
    value: Callable[[Summary], float | None]
    interval: Callable[[Summary], tuple[float | None, float | None] | None]
    shown: Callable[[float | None], str]


class Cell(NamedTuple):
    """A number of one run, its interval, its difference from the first run's, and how likely it is below that."""

    value: str
    interval: str
    difference: str
    lower: str = ""


class NumberRow(NamedTuple):
    """A number over all runs."""

    what: str
    unit: str
    cells: tuple[Cell, ...]


def _field(name: str, what: str, unit: str, shown: Callable[[float | None], str] = info.number) -> Number:
    return Number(
        what,
        unit,
        lambda s: getattr(s, name),
        lambda s: s.uncertainty.of(name) if s.uncertainty else None,
        shown,
    )


def _within_limits(name: str, what: str, unit: str, shown: Callable[[float | None], str] = info.number) -> Number:
    """Return a number that is absent for runs without limits."""
    plain = _field(name, what, unit, shown)
    return plain._replace(
        value=lambda s: plain.value(s) if s.slo else None, interval=lambda s: plain.interval(s) if s.slo else None
    )


def _latency(metric: Metric, statistic: str) -> Number:
    def value(s: Summary) -> float | None:
        latencies = s.metrics.get(metric)
        return None if s.saturated or latencies is None else getattr(latencies, statistic)

    def interval(s: Summary) -> tuple[float | None, float | None] | None:
        if s.saturated or metric not in s.metrics:
            return None
        if s.uncertainty is not None:
            return s.uncertainty.of("metrics", metric, statistic)
        noise = (s.metrics[metric].ci95 or {}).get(statistic)
        return None if noise is None else (noise[0], noise[1])

    return Number(f"{info.METRIC_NAMES[metric]} {statistic}", "ms", value, interval, info.ms)


def _usd(name: str, what: str, unit: str) -> Number:
    return Number(what, unit, lambda s: getattr(s.price, name) if s.price else None, lambda s: None, info.number)


NUMBERS: tuple[Number, ...] = (
    _field("offered_rate_rps", "offered", "requests/s"),
    _field("request_throughput_rps", "finished", "requests/s"),
    _within_limits("goodput_rps", "goodput", "requests/s"),
    Number(
        "goodput per GPU",
        "requests/s",
        lambda s: None if s.goodput_rps is None or not s.slo else s.goodput_rps / s.mean_gpus,
        lambda s: None,
        info.number,
    ),
    _within_limits("slo_attainment", "SLO attainment", "of requests", info.percent),
    Number(
        "P(SLO holds)",
        "of worlds",
        lambda s: s.p_slo[0] if s.p_slo is not None and s.slo else None,
        lambda s: None,
        info.percent,
    ),
    *(_latency(metric, statistic) for metric in METRICS for statistic in ("p50", "p99")),
    _field("output_tokens_per_s_per_gpu", "output per GPU", "tokens/s"),
    _field("output_tokens_per_s_per_user", "output per user", "tokens/s"),
    _field("num_gpus", "GPUs", ""),
    _usd("per_hour_usd", "price", "USD an hour"),
    _usd("per_million_output_tokens_usd", "output tokens", "USD per million"),
    _usd("per_thousand_requests_usd", "requests", "USD per thousand"),
    Number("power", "W, mean of all GPUs", lambda s: s.power_w, lambda s: None, info.number),
    _field("joules_per_token", "energy", "J per output token"),
    _field("preemptions", "preemptions", ""),
)


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names; a name that occurs several times gets a number."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def numbers(runs: Sequence[NamedRun]) -> list[NumberRow]:
    """Return every number that some run has."""
    summaries = [entry.run.summary for entry in runs]
    rows = []
    for number in NUMBERS:
        values = [number.value(s) for s in summaries]
        if any(value is not None for value in values):
            cells = (
                _cell(number, s, value, values[0], i)._replace(
                    lower=_lower(number, s, summaries[0]) if i and value is not None else ""
                )
                for i, (s, value) in enumerate(zip(summaries, values, strict=True))
            )
            rows.append(NumberRow(number.what, number.unit, tuple(cells)))
    return rows


def _cell(number: Number, s: Summary, value: float | None, first: float | None, at: int) -> Cell:
    if value is None:
        return Cell("saturated" if s.saturated and number.unit == "ms" else info.ABSENT, "", "")
    bounds = number.interval(s)
    interval = ""
    if bounds is not None:
        low, high = (number.shown(x) if x is not None else "unbounded" for x in bounds)
        interval = f"{low}–{high}"
    return Cell(number.shown(value), interval, "" if at == 0 or not first else difference(value / first - 1))


def _lower(number: Number, s: Summary, first: Summary) -> str:
    """Return `P(lower) 97.0 %` if worlds of both runs were drawn; else an empty text."""
    sides = [_log_normal(number, summary) for summary in (first, s)]
    if None in sides:
        return ""
    (mean, spread), (own_mean, own_spread) = (side for side in sides if side is not None)
    spread_of_both = math.hypot(spread, own_spread)
    if not spread_of_both:
        return ""
    chance = NormalDist().cdf((mean - own_mean) / spread_of_both)
    words = "< 0.1 %" if chance < 5e-4 else "> 99.9 %" if chance > 1 - 5e-4 else info.percent(chance)
    return f"P(lower) {words}"


def _log_normal(number: Number, s: Summary) -> tuple[float, float] | None:
    """Mean and standard deviation of the logarithm that has the interval of the redrawn worlds."""
    bounds = number.interval(s) if s.uncertainty is not None else None
    if s.uncertainty is None or bounds is None:
        return None
    low, high = bounds
    if low is None or high is None or low <= 0:
        return None
    widths = 2 * NormalDist().inv_cdf((1 + s.uncertainty.level) / 2)
    return (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / widths


def difference(relative: float) -> str:
    """Return `+12.3 %`, or `=` if the difference is negligible."""
    return "=" if abs(relative) < DECISIVE else f"{relative * 100:+.1f} %".replace("-", "−")


def plan_differences(runs: Sequence[NamedRun]) -> list[tuple[str, tuple[str, ...]]]:
    """Return (key, value in each run) for every setting of plan, model, hardware or load that differs between runs."""
    tables = []
    for entry in runs:
        s = entry.run.summary
        table = {"model": s.model, "hardware": s.hardware.device, "engine": s.hardware.engine}
        tables.append(table | _load(s) | dict(info.settings(s.plan)))
    return _differing(tables)


def _differing(tables: Sequence[Mapping[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return (key, value in each table) for every key whose values differ."""
    keys = dict.fromkeys(key for table in tables for key in table if key != "name")
    rows = [(key, tuple(table.get(key, info.ABSENT) for table in tables)) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def _load(s: Summary) -> dict[str, str]:
    """Return what tells the load of a run from another one, and the limits that it was judged by."""
    load = s.load
    return {
        "load": s.load_source or info.ABSENT,
        "offered, requests/s": info.number(s.offered_rate_rps),
        "users": info.number(None if load is None else load.users),
        "requests": info.number(s.requests),
        "prompt tokens, mean": info.number(None if load is None else load.prompt_tokens.mean),
        "output tokens, mean": info.number(None if load is None else load.output_tokens.mean),
        "limits": ", ".join(map(info.limit, s.slo)) or "none",
        "seed": str(s.seed),
    }


def _short(values: Sequence[str]) -> str:
    """Return two different values in brackets; nothing if there are more, or long ones, which a table has."""
    different = [*dict.fromkeys(values)]
    short = len(different) == 2 and all(len(value) <= SHORT for value in different)
    return f" ({' beside '.join(different)})" if short else ""


def load_warning(runs: Sequence[NamedRun]) -> str | None:
    """Return a warning that names the keys of the load that differ between runs; None if none differs.

    A key that some run does not contain is left out.
    """
    differing = _differing([_load(entry.run.summary) for entry in runs])
    contained = [(key, values) for key, values in differing if info.ABSENT not in values]
    if not contained:
        return None
    keys = "; ".join(key + _short(values) for key, values in contained)
    return (
        f"The runs are not under the same load: {keys}. Differences of latency, goodput and price come from the load "
        "as well as from the plan."
    )


# --- figures ----------------------------------------------------------------------------------------------

MOST_POINTS = 40_000
"""Points of all runs in a figure over time: of a hundred runs all, of more every second, third, ..."""


def overlays(runs: Sequence[NamedRun]) -> dict[str, figures.Figure]:
    """Return the figures by name: every run that has the data, in its colour."""
    series = {entry.name: i for i, entry in enumerate(runs)}
    pictures: dict[str, figures.Figure] = {}
    pictures |= {
        metric: figures.cdf_figure(cdf, series) for metric in METRICS if (cdf := _cdf(runs, metric)) is not None
    }
    sweeps = [curve for entry in runs if (curve := _chosen_curve(entry))]
    if sweeps:
        pictures["goodput"] = figures.sweep_figure(sweeps, series)
    return pictures | _timelines(runs)


def _cdf(runs: Sequence[NamedRun], metric: Metric) -> info.Cdf | None:
    """Return the distribution of the runs that are not saturated; None if no run has the metric."""
    settled = [entry for entry in runs if not entry.run.summary.saturated]
    quantiles_by_run = [(entry.name, _quantiles(entry.run.summary, metric)) for entry in settled]
    curves = tuple((name, tuple(1e3 * x for x in values)) for name, values in quantiles_by_run if len(values) > 1)
    if not curves:
        return None
    wide = any(values[-1] > 20 * values[len(values) // 2] for _, values in curves)
    positive = all(values[0] > 0 for _, values in curves)
    return info.Cdf(info.METRIC_NAMES[metric], curves, (), wide and positive)


def _timelines(runs: Sequence[NamedRun]) -> dict[str, figures.Figure]:
    """Return figures of requests running and KV blocks used, over the simulated time of the runs that have it."""
    timelines = [(entry.name, t, i) for i, entry in enumerate(runs) if (t := entry.run.summary.timeline)]
    if not timelines:
        return {}
    every = -(-sum(len(t.t_s) for _, t, _ in timelines) // MOST_POINTS)
    running = [(name, t.t_s[::every], t.running[::every], i) for name, t, i in timelines]
    kv_used = [(name, t.t_s[::every], [100 * x for x in t.kv_used[::every]], i) for name, t, i in timelines]
    return {
        "running": figures.over_time(running, "requests running"),
        "kv": figures.over_time(kv_used, "KV blocks used, %"),
    }


def _quantiles(s: Summary, metric: str) -> tuple[float, ...]:
    return () if s.quantiles is None else tuple(getattr(s.quantiles, f"{metric}_s"))


def _chosen_curve(each: NamedRun) -> info.GoodputCurve | None:
    """Goodput against rate of the chosen plan, under the name of its run."""
    curves = info.sweep_curves(each.run)
    return curves[0]._replace(candidate=each.name) if curves else None


CAPTIONS = {
    "ttft": "Time to first token: share of requests at or below it.",
    "tpot": "Time per output token after the first, likewise.",
    "e2el": "From arrival to the last token, likewise.",
    "goodput": "Requests per second within every limit of the chosen plans, over the offered rate; knees are circled, "
    "and on the dashed line all are in time.",
    "running": "Requests running over simulated time.",
    "kv": "Used share of the KV blocks over simulated time.",
    "errors": "Validations: every latency of every load. On the line, prediction and measurement are equal.",
}


class Compared(NamedTuple):
    """Runs, validations and findings that a page compares; each keeps its colour, in this order."""

    runs: tuple[NamedRun, ...] = ()
    validations: tuple[NamedValidation, ...] = ()
    findings: tuple[NamedFindings, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of all of them, in this order."""
        names_by_group = ([entry.name for entry in group] for group in (self.runs, self.validations, self.findings))
        return [name for names in names_by_group for name in names]


class RunAccount(NamedTuple):
    """A row of the first table: the name of a run, its headline, and its bottleneck."""

    name: str
    says: str
    bottleneck: str


def accounts(compared: Compared) -> list[RunAccount]:
    """Return the statement of each run, validation and list of findings about itself."""
    return [
        *(
            RunAccount(entry.name, _headline(entry.run), verdict.bottleneck(entry.run.summary) or info.ABSENT)
            for entry in compared.runs
        ),
        *(RunAccount(entry.name, validated(entry.validation), info.ABSENT) for entry in compared.validations),
        *(RunAccount(entry.name, published(entry.findings.findings), info.ABSENT) for entry in compared.findings),
    ]


def _headline(run: Run) -> str:
    return " ".join(filter(None, (info.headline(run), certainty(run.summary))))


def render(compared: Compared) -> str:
    """Return the page; the same bytes for the same runs."""
    from markupsafe import Markup

    runs, validations = compared.runs, compared.validations
    # One legend above all figures, for in each it would take more room than the curves.
    pictures = {
        name: figures.fragment(figure | {"layout": figure["layout"] | {"showlegend": False}}, name, 360)
        for name, figure in overlays(runs).items()
    }
    if validations:
        scatter = side_by_side.errors_figure(validations, len(runs))
        pictures["errors"] = figures.fragment(scatter, "errors", 460)
    return fill(
        "compare.html.j2",
        accounts=accounts(compared),
        runs=runs,
        validations=validations,
        findings=compared.findings,
        errors=side_by_side.errors(validations),
        gains=side_by_side.gains(compared.findings),
        colours=[figures.series_colour(i) for i in range(len(compared.names))],
        info=info,
        numbers=(rows := numbers(runs)),
        likely=any(cell.lower for row in rows for cell in row.cells),
        plan_differences=plan_differences(runs),
        load_warning=load_warning(runs),
        figures={name: Markup(html) for name, html in pictures.items()},
        captions=CAPTIONS,
        version=__version__,
        numbers_json=Markup(json.dumps(document(compared), sort_keys=True, allow_nan=False).replace("<", "\\u003c")),
        style=Markup(template("style.j2")),
        plotly_js=Markup(figures.plotly_js()),
    )


def document(compared: Compared) -> dict[str, Any]:
    """Return the numbers behind the page: by run, then by name."""
    return {
        **{entry.name: _numbers_of(entry.run.summary) for entry in compared.runs},
        **{entry.name: entry.validation.to_data() for entry in compared.validations},
        **{entry.name: entry.findings.to_data() for entry in compared.findings},
    }


def _numbers_of(s: Summary) -> dict[str, Any]:
    values = {f"{n.what}, {n.unit}" if n.unit else n.what: _seconds_or_more(n, s) for n in NUMBERS}
    return {"plan": s.plan.to_data(), "saturated": s.saturated, **values}


def _seconds_or_more(number: Number, s: Summary) -> float | None:
    """Return the value of a number in the unit of its row."""
    value = number.value(s)
    return value * 1e3 if value is not None and number.unit == "ms" else value
