"""The page of a validation: predicted beside measured, with the noise of repeats and our own interval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simtune import __version__
from simtune.errors import plural
from simtune.report import figures
from simtune.report.figures import COLOURS, GREY, Figure
from simtune.report.labels import briefs
from simtune.report.templates import fill, template
from simtune.results.result import Result
from simtune.results.summing import quantiles
from simtune.runs.schema import Timeline
from simtune.validation.client.measured_run import MeasuredMetric, MeasuredRun, QueueSamples
from simtune.validation.judge.comparison import Comparison, LoadResult, Validation

NOISY = 0.25
"""Noise of the repeats beyond which being within twice of it is no merit."""

METRICS: tuple[MeasuredMetric, ...] = ("ttft", "tpot", "e2el")


class Curves(NamedTuple):
    """Curves of one load that are drawn: quantiles by metric in seconds, and queues over time if they are known."""

    label: str
    predicted_s: dict[str, tuple[float, ...]]
    measured_s: dict[str, tuple[float, ...]]
    timeline: Timeline | None
    queues: QueueSamples | None


class LoadSection(NamedTuple):
    """A load as the page shows it."""

    title: str
    words: str
    rows: tuple[tuple[str, ...], ...]
    figures: tuple[str, ...]


def curves(label: str, result: Result, runs: Sequence[MeasuredRun], timeline: Timeline | None) -> Curves:
    """Return the curves of a load's simulation and its repeats, which count together."""
    measured: dict[str, tuple[float, ...]] = {
        m: quantiles(np.concatenate([run.values(m) for run in runs])) for m in METRICS
    }
    predicted: dict[str, tuple[float, ...]] = {m: quantiles(result.values(m)) for m in METRICS}
    queues = next((run.facts.queues for run in runs if run.facts.queues is not None), None)
    return Curves(label, predicted, measured, timeline, queues)


def rows(load: LoadResult) -> tuple[tuple[str, ...], ...]:
    """The table of a load: latencies in milliseconds."""
    return tuple(
        (
            c.name + (", ms" if c.unit == "s" else ""),
            _shown(c, c.predicted),
            "-" if c.low is None and c.high is None else f"{_shown(c, c.low)} to {_shown(c, c.high)}",
            _shown(c, c.measured),
            "-" if c.noise is None else f"± {c.noise:.1%}",
            "-" if c.error is None else f"{c.error:+.1%}",
            {None: "", True: "within", False: "outside"}[c.within],
        )
        for c in load.comparisons
    )


def _shown(c: Comparison, value: float | None) -> str:
    if value is None:
        return "-"
    if c.unit == "share":
        return f"{value:.1%}"
    return f"{1e3 * value:,.2f}" if c.unit == "s" else f"{value:,.4g}"


def scatter_figure(v: Validation) -> Figure:
    """Figure of every latency on two logarithmic axes, one colour a load."""
    data = []
    labels = briefs([load.label for load in v.loads])
    measured_ms: list[float] = []
    predicted_ms: list[float] = []
    for i, load in enumerate(v.loads):
        points = [c for c in load.comparisons if c.unit == "s" and c.predicted and c.measured]
        x, y = [1e3 * (c.measured or 0.0) for c in points], [1e3 * (c.predicted or 0.0) for c in points]
        measured_ms += x
        predicted_ms += y
        data.append(
            {
                "x": x,
                "y": y,
                "text": [c.name for c in points],
                "name": labels[load.label],
                "mode": "markers",
                "marker": {"color": figures.series_colour(i), "size": 9},
                "hovertemplate": "%{text}: measured %{x:,.4g} ms, predicted %{y:,.4g} ms<extra></extra>",
            }
        )
    ends = [min(measured_ms, default=1.0), max(measured_ms, default=1.0)]
    for factor, dash in ((1.0, "solid"), (1 + v.tolerance, "dot"), (1 / (1 + v.tolerance), "dot")):
        line = {"color": GREY, "width": 1, "dash": dash}
        data.append(
            {"x": ends, "y": [factor * e for e in ends], "mode": "lines", "line": line, "showlegend": False}
            | {"hoverinfo": "skip"}
        )
    x_axis, y_axis = figures.log_axis("measured, ms", measured_ms), figures.log_axis("predicted, ms", predicted_ms)
    return {"data": data, "layout": figures.layout(x_axis, y_axis)}


def cdf_figure(c: Curves, metric: str) -> Figure:
    """Share of the requests at or below a latency, predicted and measured."""
    levels = np.linspace(0, 1, 101).tolist()
    sides = (("predicted", c.predicted_s[metric], "dash"), ("measured", c.measured_s[metric], "solid"))
    data = [
        {
            "x": [1e3 * s for s in seconds],
            "y": levels,
            "name": name,
            "mode": "lines",
            "line": {"color": COLOURS[i], "dash": dash, "width": 2},
            "hovertemplate": f"{name}: %{{y:.0%}} within %{{x:,.4g}} ms<extra></extra>",
        }
        for i, (name, seconds, dash) in enumerate(sides)
        if seconds
    ]
    y = figures.axis("share of the requests", tickformat=".0%", range=[0, 1.02])
    return {"data": data, "layout": figures.layout(figures.axis(f"{metric.upper()}, ms"), y)}


def queues_figure(c: Curves) -> Figure:
    """Figure of running and waiting requests over time, predicted and as the engine reported them."""
    data = []
    for i, state in enumerate(("running", "waiting")):
        for name, series, dash in (("predicted", c.timeline, "dash"), ("measured", c.queues, "solid")):
            if series is not None and series.t_s:
                line = {"color": COLOURS[i], "dash": dash, "width": 2, "shape": "hv"}
                y = list(getattr(series, state))
                data.append({"x": list(series.t_s), "y": y, "name": f"{state}, {name}", "mode": "lines", "line": line})
    return {"data": data, "layout": figures.layout(figures.axis("seconds"), figures.axis("requests"))}


def headline(v: Validation) -> str:
    """Return a sentence on how far off the predictions are."""
    verdict = "within" if v.within else "NOT within"
    return f"{v.model} on {v.device}: predictions are {verdict} {v.tolerance:.0%} of what {_engine(v)} measured"


def _engine(v: Validation) -> str:
    return " ".join(filter(None, (v.engine.engine, v.engine.version)))


def warnings(v: Validation) -> list[str]:
    """Warnings that a reader must see first."""
    failed = [
        f"{load.label}: {load.failed} requests failed: "
        + "; ".join(f"{error} ({count})" for error, count in load.failures.items())
        for load in v.loads
        if load.failed
    ]
    noisy = [
        f"{load.label}: repeats of {c.name} differ by ± {c.noise:.0%}, so that the verdict says little; measure on a "
        "quieter machine"
        for load in v.loads
        for c in load.comparisons
        if c.within is not None and (c.noise or 0.0) > NOISY
    ]
    return failed + noisy


def _load_words(load: LoadResult, clock: str) -> str:
    rate = "as its users ask" if load.rate_rps is None else f"{load.rate_rps:.3g} requests/s"
    late = "" if load.lateness_p99_s is None else f", client late by {1e3 * load.lateness_p99_s:.2f} ms (p99)"
    full = "; predicted to be saturated: latencies grow as long as the load lasts" if load.saturated else ""
    return f"{load.requests:,} requests, {rate}, {load.repeats} times, {clock} clock{late}{full}."


def render(v: Validation, drawn: Sequence[Curves]) -> str:
    """Return a page that opens offline; the same bytes for the same validation."""
    from markupsafe import Markup

    pictures = {"scatter": figures.fragment(scatter_figure(v), "scatter", 460)}
    by_load: dict[str, tuple[str, ...]] = {}
    for i, c in enumerate(drawn):
        names = []
        for metric in METRICS:
            if c.measured_s[metric] and c.predicted_s[metric]:
                names.append(f"load-{i}-{metric}")
                pictures[names[-1]] = figures.fragment(cdf_figure(c, metric), names[-1], 340)
        if c.queues is not None:
            names.append(f"load-{i}-queues")
            pictures[names[-1]] = figures.fragment(queues_figure(c), names[-1], 340)
        by_load[c.label] = tuple(names)
    return fill(
        "validation.html.j2",
        v=v,
        headline=headline(v),
        circumstances=f"{plural(len(v.loads), 'load')}; hardware profile {v.hardware}; {v.clock} clock.",
        warnings=warnings(v),
        loads=[
            LoadSection(load.label, _load_words(load, v.clock), rows(load), by_load.get(load.label, ()))
            for load in v.loads
        ],
        figures={name: Markup(html) for name, html in pictures.items()},
        version=__version__,
        style=Markup(template("style.j2")),
        json=Markup(json.dumps(v.to_data(), sort_keys=True, allow_nan=False).replace("<", "\\u003c")),
        plotly_js=Markup(figures.plotly_js()),
    )
