"""Validations side by side, and lists of published systems side by side: the part of a page of several runs that no
simulation of one plan is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simtune.report import figures, info
from simtune.report.figures import GREY, Figure
from simtune.report.labels import briefs, escape
from simtune.validation.judge.comparison import Validation
from simtune.validation.published import Findings


class NamedValidation(NamedTuple):
    """A validation under the name it has in the page."""

    name: str
    validation: Validation


class NamedFindings(NamedTuple):
    """Findings about published systems, with their name in the page."""

    name: str
    findings: Findings


class BesideRow(NamedTuple):
    """Row of a comparison: its title, and a cell for each run; a cell in doubt is marked."""

    what: str
    cells: tuple[tuple[str, bool], ...]


def errors(validations: Sequence[NamedValidation]) -> list[BesideRow]:
    """Return the error of each latency, predicted over measured, for every load that some validation ran."""
    tables = [
        {
            (load.label, c.name): (c.error, c.within is False)
            for load in entry.validation.loads
            for c in load.comparisons
            if c.error is not None
        }
        for entry in validations
    ]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        cells = (table.get(key) for table in tables)
        cells_of_row = tuple((info.ABSENT, False) if cell is None else (_signed(cell[0]), cell[1]) for cell in cells)
        rows.append(BesideRow(": ".join(key), cells_of_row))
    return rows


def _signed(error: float) -> str:
    return f"{error * 100:+.1f} %".replace("-", "−")


def errors_figure(validations: Sequence[NamedValidation], first: int) -> Figure:
    """Figure of every latency of every load, predicted over measured; one colour a run, of which the first has number
    `first`.
    """
    labels = briefs([entry.name for entry in validations])
    data: list[Figure] = []
    measured_ms: list[float] = []
    predicted_ms: list[float] = []
    for i, entry in enumerate(validations, first):
        points = [
            (load.label, c.name, c.measured, c.predicted)
            for load in entry.validation.loads
            for c in load.comparisons
            if c.unit == "s" and c.measured and c.predicted
        ]
        measured_ms += [1e3 * measured for _, _, measured, _ in points]
        predicted_ms += [1e3 * predicted for *_, predicted in points]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": labels[entry.name],
                "x": [1e3 * measured for _, _, measured, _ in points],
                "y": [1e3 * predicted for *_, predicted in points],
                "marker": {"color": figures.series_colour(i), "size": 8},
                "hovertext": [escape(f"{load}, {name}") for load, name, _, _ in points],
                "hovertemplate": "%{hovertext}: measured %{x:,.4~g} ms, predicted %{y:,.4~g} ms<extra></extra>",
            }
        )
    ends = [min(measured_ms, default=1.0), max(measured_ms, default=1.0)]
    equal = {"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "hoverinfo": "skip"}
    data.append({**equal, "line": {"color": GREY, "width": 1}})
    x, y = figures.log_axis("measured, ms", measured_ms), figures.log_axis("predicted, ms", predicted_ms)
    return {"data": data, "layout": figures.layout(x, y, hovermode="closest")}


def gains(lists: Sequence[NamedFindings]) -> list[BesideRow]:
    """Return the simulated gain of every system that some list ran, with its status; a gain that differs from its claim
    is marked.
    """
    tables = [{finding.title: finding for finding in entry.findings.findings} for entry in lists]
    rows = []
    for title in dict.fromkeys(title for table in tables for title in table):
        judged = [table.get(title) for table in tables]
        if any(finding is not None and finding.ran for finding in judged):
            cells = (
                (info.ABSENT, False)
                if finding is None
                else (f"{info.number(finding.simulated)} {finding.status}", finding.status == "differs")
                for finding in judged
            )
            rows.append(BesideRow(title, tuple(cells)))
    return rows
