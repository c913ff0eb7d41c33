"""The page of a profile that was measured here: its fits beside the points, how noisy these were, and whole steps.

It is the page of a hardware profile (`simtune.report.hardware_page`), preceded by facts that only the measurement has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from simtune.costs.operators import Chip
from simtune.costs.predict import Predictor
from simtune.costs.tables.own import MeasuredPoint
from simtune.report import figures, hardware_page
from simtune.report.figures import Figure
from simtune.report.hardware_page import Section
from simtune.report.labels import briefs, escape
from simtune.specs.hardware import Hardware

MEASURED = "measured, ms"
"""Title of an axis of measured times."""


class PredictedTime(NamedTuple):
    """A measured time and its prediction by the profile, for an operator or the steps of a model."""

    name: str
    shape: dict[str, float]
    measured_s: float
    predicted_s: float


class Dots(NamedTuple):
    """Points of one name: seconds (or seconds since the start), a share in per cent, and words for each."""

    name: str
    x: tuple[float, ...]
    percent: tuple[float, ...]
    words: tuple[str, ...]


def fitted(points: Sequence[MeasuredPoint], profile: Hardware) -> list[PredictedTime]:
    """Return every measured point of an operator that the fit used, with its prediction."""
    judges: dict[str, Predictor] = {
        key: Predictor(operator, profile.device.processors, profile.arrays, Chip.of(profile.device))
        for key, operator in profile.operators.items()
    }
    by_call = {(o.kind, o.dtype, o.kv_dtype, o.variant): key for key, o in profile.operators.items()}
    times = []
    for p in points:
        key = by_call.get((p.kind, p.dtype, p.kv_dtype, p.variant))  # type: ignore[arg-type]
        if key is not None and p.seconds and p.role == "fit" and not p.noisy:
            times.append(PredictedTime(key, dict(p.shape), p.seconds, float(judges[key].seconds(**p.shape))))
    return times


def errors(times: Sequence[PredictedTime]) -> list[Dots]:
    """predicted / measured - 1 by name."""
    return _dots([(c.name, c.measured_s, c.predicted_s / c.measured_s - 1, c.shape) for c in times])


def noise(points: Sequence[MeasuredPoint]) -> list[Dots]:
    """Median absolute deviation of the samples of each point over their median, by kind."""
    rows = [(p.kind, p.seconds, p.mad / p.seconds, p.shape) for p in points if p.seconds and p.mad is not None]
    return _dots(rows)


def drift(points: Sequence[MeasuredPoint]) -> list[Dots]:
    """Return repeated measurements against their own median, and the clock against its first reading, over time."""
    rows: list[tuple[str, float, float, dict[str, float]]] = []
    sentinels = [p for p in points if p.role == "sentinel" and p.seconds]
    for kind in sorted({p.kind for p in sentinels}):
        repeated = [p for p in sentinels if p.kind == kind]
        usual = float(np.median([p.seconds for p in repeated]))
        rows += [(kind, p.number("at_s"), (p.seconds or 0.0) / usual - 1, {}) for p in repeated]
    clocks = [(p.number("at_s"), p.number("clock_mhz")) for p in sentinels if p.number("clock_mhz")]
    rows += [("clock", at, clock / clocks[0][1] - 1, {}) for at, clock in clocks]
    return _dots(rows)


def _dots(rows: Sequence[tuple[str, float, float, dict[str, float]]]) -> list[Dots]:
    dots = []
    for name in sorted({row[0] for row in rows}):
        _, x, share, shapes = zip(*(row for row in rows if row[0] == name), strict=True)
        words = (", ".join(f"{key} {value:,.6g}" for key, value in shape.items()) for shape in shapes)
        dots.append(Dots(name, x, tuple(100 * s for s in share), tuple(words)))
    return dots


def dots_figure(dots: Sequence[Dots], x_title: str, y_title: str, *, log: bool, scale: float = 1e3) -> Figure:
    """Figure with a marker for each point, by name; x is in milliseconds if it is a measured time."""
    labels = briefs([d.name for d in dots])
    data = [
        {
            "x": [float(f"{scale * x:.5g}") for x in d.x],
            "y": [round(p, 2) for p in d.percent],
            "text": [escape(words) for words in d.words],
            "name": labels[d.name],
            "mode": "markers",
            "marker": {"color": figures.series_colour(i), "size": 6, "opacity": 0.7},
            "hovertemplate": f"{escape(d.name)}: %{{y:.1f}} %, %{{x:,.4g}}<br>%{{text}}<extra></extra>",
        }
        for i, d in enumerate(dots)
    ]
    x = figures.axis(x_title, **({"type": "log", "dtick": 1} if log else {"rangemode": "tozero"}))
    return {"data": data, "layout": figures.layout(x, figures.axis(y_title))}


def box_rows(profile: Hardware) -> tuple[tuple[str, ...], ...]:
    """Return the measured range of every operator; outside of it the fit extrapolates."""
    return tuple(
        (key, ", ".join(_range(name, *limits) for name, limits in operator.box.items()))
        for key, operator in profile.operators.items()
    )


def _range(name: str, low: float, high: float) -> str:
    return f"{name} {low:,.6g}" + ("" if low == high else f" to {high:,.6g}")


def error_rows(dots: Sequence[Dots]) -> tuple[tuple[str, ...], ...]:
    """Points, median, 90th percentile and maximum of the absolute errors, in per cent."""
    rows = []
    for d in dots:
        off = np.abs(d.percent)
        worst = (np.median(off), np.quantile(off, 0.9), off.max())
        rows.append((d.name, f"{len(off):,}", *(f"{x:.1f}" for x in worst)))
    return tuple(rows)


_ERROR_COLUMNS = ("", "points", "median, %", "p90, %", "max, %")


def sections(
    profile: Hardware,
    points: Sequence[MeasuredPoint],
    checks: Sequence[PredictedTime],
    steps: Sequence[PredictedTime],
    summary: dict[str, Any],
) -> list[Section]:
    """Return the sections before the fits. `checks` are points that no fit used, `steps` whole steps against sums of
    operators.
    """
    checked, stepped, of_fits = errors(checks), errors(steps), errors(fitted(points, profile))
    all_sections = [
        _error_section(
            "Whole steps, never measured as a whole for any fit",
            "A decoder of the model's shapes with random weights, its steps against the sum of their operators.",
            stepped,
        ),
        _error_section("Points measured for checking", "Inside the measured box, and seen by no fit.", checked),
        Section(
            "Fits beside their own points",
            "How far the fits are off the points they were made of: far less than off others where curves go through "
            "them.",
            _error_figure(of_fits),
            _ERROR_COLUMNS,
            error_rows(of_fits),
        ),
        Section(
            "Noise",
            _conditions(summary),
            dots_figure(noise(points), MEASURED, "spread of the samples, % of their median", log=True),
        ),
        Section(
            "Drift",
            "The same calls again and again, against their medians, and the clock against where it began.",
            dots_figure(drift(points), "seconds since the start", "change, %", log=False, scale=1.0),
        ),
        Section(
            "What was measured", "Beyond these ranges the fits extrapolate.", None, ("", "range"), box_rows(profile)
        ),
    ]
    return [section for section in all_sections if section.figure is not None or section.rows]


def _error_section(title: str, words: str, dots: Sequence[Dots]) -> Section:
    """Return a section with a figure and a table of errors; both empty if nothing was compared."""
    return Section(title, words, _error_figure(dots) if dots else None, _ERROR_COLUMNS, error_rows(dots))


def _error_figure(dots: Sequence[Dots]) -> Figure:
    return dots_figure(dots, MEASURED, "predicted over measured - 1, %", log=True)


def _conditions(summary: dict[str, Any]) -> str:
    """Return a paragraph: how much was measured, by which timers, and how quiet the machine was."""
    clean, timers = summary["clean_share"], ", ".join(f"{n:,} by {timer}" for timer, n in summary["timers"].items())
    sentences = [
        f"{summary['points']:,} points in {summary['spent_s']:.0f} s, timed {timers}.",
        "" if clean is None else f"{clean:.0%} of the trial samples at the start were undisturbed.",
        "The clock fell by more than a tenth: the device was throttled." if summary["throttled"] else "",
        *(f"{note}." for note in summary["notes"]),
    ]
    return " ".join(filter(None, sentences))


def render(
    profile: Hardware,
    points: Sequence[MeasuredPoint],
    checks: Sequence[PredictedTime],
    steps: Sequence[PredictedTime],
    summary: dict[str, Any],
) -> str:
    """Return a page that opens offline."""
    return hardware_page.render(profile, sections(profile, points, checks, steps, summary))
