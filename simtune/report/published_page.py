"""Figures of published systems: the claimed gains of every family, their bands and the simulated gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simtune import __version__
from simtune.report import figures, info
from simtune.report.figures import Figure
from simtune.report.labels import escape
from simtune.report.templates import fill, template
from simtune.specs import yamlfile
from simtune.validation.published import Entry, Finding, Findings, headline
from simtune.validation.published.findings import WORDS, FindingStatus, counts

LONGEST_LABEL = 18
ROW_PX = 26
DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7))
"""Digits of the ticks, coarse to fine."""
FEWEST_TICKS = 4
MARGIN = 1.1
"""Factor by which a tick may be outside of the range that is drawn."""

COLOUR: dict[FindingStatus, str] = {
    "reproduced": figures.COLOURS[2],
    "counts": figures.COLOURS[6],
    "assumed": figures.COLOURS[0],
    "fitted": figures.COLOURS[5],
    "weak": figures.COLOURS[8],
    "differs": figures.COLOURS[1],
    "elsewhere": figures.COLOURS[4],
}
"""Colours of the dots; a system that was not run has none."""

# --- computed ---------------------------------------------------------------------------------------------


class ClaimRow(NamedTuple):
    """A row of a figure."""

    label: str
    low: float
    high: float
    claimed: float | None
    simulated: float
    status: FindingStatus
    anchor: str


class FamilyFigure(NamedTuple):
    """A section of the page."""

    name: str
    title: str
    compared: list[ClaimRow]
    rows: list[FindingRow]


class FindingRow(NamedTuple):
    """A system as a table shows it."""

    finding: Finding
    anchor: str
    settings: list[tuple[str, str]]
    """Pairs (side, its settings as YAML)."""


def families(findings: Findings, entries: Sequence[Entry]) -> list[FamilyFigure]:
    """Return the sections in order, each with its comparisons and all of its systems."""
    sections: dict[str, FamilyFigure] = {}
    for finding, entry in zip(findings.findings, entries, strict=True):
        name = entry.family.name
        section = sections.setdefault(name, FamilyFigure(name, entry.family.title, [], []))
        sides = entry.family.sides(entry.system)
        settings = [(side, yamlfile.dump(side_settings)) for side, side_settings in sides.items()]
        anchor = f"system-{finding.system}"
        section.rows.append(FindingRow(finding, anchor, settings))
        if finding.simulated is not None and finding.band is not None:
            low, high = finding.band
            label = _short(finding.title)
            section.compared.append(
                ClaimRow(label, low, high, finding.claimed, finding.simulated, finding.status, anchor)
            )
    return list(sections.values())


def _short(title: str) -> str:
    return title if len(title) <= LONGEST_LABEL else title[: LONGEST_LABEL - 1].rstrip() + "…"


# --- drawn ------------------------------------------------------------------------------------------------


def gains_figure(compared: Sequence[ClaimRow]) -> Figure:
    """A row for each system: its band as a bar, the claim as a tick, what was simulated as a dot; a log axis."""
    numbers = list(range(len(compared)))
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": "band of the claim",
        "y": numbers,
        "base": [c.low for c in compared],
        "x": [c.high - c.low for c in compared],
        "width": 0.5,
        "marker": {"color": figures.GREY, "opacity": 0.35},
        "hoverinfo": "skip",
    }
    figured = [i for i in numbers if compared[i].claimed is not None]
    claims = {
        "type": "scatter",
        "mode": "markers",
        "name": "claimed",
        "x": [compared[i].claimed for i in figured],
        "y": figured,
        "marker": {"symbol": "line-ns", "size": 14, "line": {"width": 2, "color": figures.GREY}},
        "hovertemplate": "claimed %{x:.3~g}<extra></extra>",
    }
    return {"data": [bars, claims, *_dots(compared)], "layout": _frame(compared)}


def _dots(compared: Sequence[ClaimRow]) -> list[Figure]:
    dots: list[Figure] = []
    for status, colour in COLOUR.items():
        of = [i for i, c in enumerate(compared) if c.status == status]
        if of:
            dots.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"simulated: {status}",
                    "x": [compared[i].simulated for i in of],
                    "y": of,
                    "text": [f'<a href="#{compared[i].anchor}">{escape(compared[i].label)}</a>' for i in of],
                    "marker": {"size": 11, "color": colour},
                    "hovertemplate": f"%{{text}}<br>simulated %{{x:.3~g}}<br>{escape(WORDS[status])}<extra></extra>",
                }
            )
    return dots


def _frame(compared: Sequence[ClaimRow]) -> Figure:
    values = [x for c in compared for x in (c.low, c.high, c.simulated)]
    labels = [f'<a href="#{c.anchor}">{escape(c.label)}</a>' for c in compared]
    x = figures.axis(
        "gain; the variant wins above 1", type="log", tickvals=_ticks(min(values), max(values)), tickformat="~g"
    )
    y = figures.axis(
        "", tickvals=list(range(len(compared))), ticktext=labels, range=[len(compared) - 0.5, -0.5], showgrid=False
    )
    return figures.layout(x, y, showlegend=False)


def _ticks(low: float, high: float) -> list[float]:
    """Few round numbers from `low` to `high`: a narrow screen has room for no more."""
    ticks: list[float] = []
    for digits in DIGITS:
        ticks = [digit * 10.0**power for power in range(-2, 4) for digit in digits]
        ticks = [tick for tick in ticks if low / MARGIN <= tick <= high * MARGIN]
        if len(ticks) >= FEWEST_TICKS:
            break
    return ticks


def drawn(section: FamilyFigure) -> str:
    """Return HTML of the figure of a family; empty if none of it was run."""
    if not section.compared:
        return ""
    return figures.fragment(
        gains_figure(section.compared), f"gains-{section.name}", 90 + ROW_PX * len(section.compared)
    )


def render(findings: Findings, entries: Sequence[Entry]) -> str:
    """A page that opens offline, with the same bytes for the same findings."""
    from markupsafe import Markup

    sections = families(findings, entries)
    return fill(
        "published.html.j2",
        findings=findings,
        headline=headline(findings.findings),
        counts=counts(findings.findings),
        words=WORDS,
        colours=COLOUR,
        families=sections,
        figures={section.name: Markup(drawn(section)) for section in sections},
        number=info.number,
        style=Markup(template("style.j2")),
        plotly_js=Markup(figures.plotly_js()),
        version=__version__,
    )
