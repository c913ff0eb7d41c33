"""Pages of published techniques on a load of the user's own: a ranking, and one section for each technique."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from simtune import __version__
from simtune.report import figures, info
from simtune.report.figures import Figure
from simtune.report.labels import escape
from simtune.report.templates import fill, template
from simtune.validation.published import (
    OwnGain,
    OwnGains,
    OwnLoad,
    interval_in_words,
    left_out_in_words,
    pays_in_words,
    undecided,
)
from simtune.validation.published.own_gain import turns_of
from simtune.validation.published.own_load import OwnPoint

ROW_PX = 26
LONGEST_LABEL = 24
MARGIN = 1.15
"""Factor by which an interval without an end goes beyond all others, and one from 0 below them."""
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)

GIVEN, SIMULATED, OPEN = "an engine can be given it", "no engine can be given it yet", "a side may not keep up"
COLOUR = {GIVEN: figures.COLOURS[2], SIMULATED: figures.COLOURS[0], OPEN: figures.GREY}
"""Colours of the bars."""

# --- computed ---------------------------------------------------------------------------------------------


class RankBar(NamedTuple):
    """A bar of the ranking."""

    label: str
    gain: float
    low: float
    high: float | None
    kind: str
    anchor: str


def rank_bars(gains: Sequence[OwnGain]) -> list[RankBar]:
    """Return a bar for each gain that has numbers, in order."""
    return [
        RankBar(_short(g.title), g.gain, g.low or 0.0, g.high, _kind(g), f"system-{g.system}")
        for g in gains
        if g.gain is not None
    ]


def _kind(gain: OwnGain) -> str:
    return OPEN if undecided(gain) else GIVEN if gain.engines else SIMULATED


def _short(title: str) -> str:
    return title if len(title) <= LONGEST_LABEL else title[: LONGEST_LABEL - 1].rstrip() + "…"


# --- drawn ------------------------------------------------------------------------------------------------


def ranking_figure(bars: Sequence[RankBar]) -> Figure:
    """Draw a bar from 1 to each gain, with its interval, on a logarithmic axis."""
    ends = [x for bar in bars for x in (bar.gain, bar.low, bar.high or bar.gain) if x > 0]
    least, most = min([*ends, 1.0]) / MARGIN, max([*ends, 1.0]) * MARGIN
    data = [_bars(bars, kind) for kind in COLOUR if any(bar.kind == kind for bar in bars)]
    data.append(_intervals(bars, (least, most)))
    ticks = [tick for tick in TICKS if least <= tick <= most]
    x = figures.axis(
        "gain; the technique pays above 1",
        type="log",
        tickvals=ticks,
        tickformat="~g",
        range=[math.log10(least), math.log10(most)],
    )
    labels = [f'<a href="#{bar.anchor}">{escape(bar.label)}</a>' for bar in bars]
    numbers = list(range(len(bars)))
    y = figures.axis("", tickvals=numbers, ticktext=labels, range=[len(bars) - 0.5, -0.5], showgrid=False)
    return {"data": data, "layout": figures.layout(x, y, showlegend=False)}


def _bars(bars: Sequence[RankBar], kind: str) -> Figure:
    rows = [(i, bar) for i, bar in enumerate(bars) if bar.kind == kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "y": [i for i, _ in rows],
        "base": [min(1.0, bar.gain) for _, bar in rows],
        "x": [abs(bar.gain - 1.0) for _, bar in rows],
        "width": 0.6,
        "marker": {"color": COLOUR[kind], "opacity": 0.75},
        "hoverinfo": "skip",
    }


def _intervals(bars: Sequence[RankBar], span: tuple[float, float]) -> Figure:
    """Draw intervals around the gains; one without an end reaches the edge of the figure."""
    least, most = span
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "gain and interval",
        "x": [bar.gain for bar in bars],
        "y": list(range(len(bars))),
        "marker": {"size": 4, "color": figures.GREY},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [(most if bar.high is None else bar.high) - bar.gain for bar in bars],
            "arrayminus": [bar.gain - max(bar.low, least) for bar in bars],
            "color": figures.GREY,
            "thickness": 1.5,
            "width": 3,
        },
        "text": [f"{escape(bar.label)}: {bar.gain:.3g}" for bar in bars],
        "hovertemplate": "%{text}<extra></extra>",
    }


def points_figure(points: Sequence[OwnPoint], what: str) -> Figure:
    """Draw the gain over users or prompt tokens, with a line at 1 and one at each break-even."""
    fitting = [(point.at, point.gain) for point in points if point.gain is not None]
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [at for at, _ in fitting],
        "y": [gain for _, gain in fitting],
        "line": {"color": figures.COLOURS[0], "width": 2},
        "marker": {"size": 8},
        "hovertemplate": f"%{{x:,.0f}} {what}: %{{y:.3~g}}<extra></extra>",
    }
    even = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"color": figures.GREY}}
    turns = [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at, "line": {**_DOTTED}}
        for at in turns_of(points)
    ]
    ats = [at for at, _ in fitting]
    x = figures.axis(what, type="log", tickvals=sorted({round(at) for at in ats}), tickformat=",")
    y = figures.axis("gain", tickformat="~g", rangemode="tozero")
    return {"data": [line], "layout": figures.layout(x, y, showlegend=False, shapes=[even, *turns])}


_DOTTED = {"color": figures.RED, "dash": "dot", "width": 1.5}


def render_ranking(document: OwnGains, own: OwnLoad) -> str:
    """Return the page of a ranking, which opens offline."""
    bars = rank_bars(document.gains)
    figure = figures.fragment(ranking_figure(bars), "ranking", 90 + ROW_PX * len(bars)) if bars else ""
    return _page(document, own, figure, {})


def render_systems(document: OwnGains, own: OwnLoad) -> str:
    """Return the page of some systems: the gain of each against users and prompts, and the ends of its inputs."""
    return _page(document, own, "", {gain.system: _figures(gain) for gain in document.gains if gain.gain is not None})


def _figures(gain: OwnGain) -> list[str]:
    sides = ((gain.by_users, "users"), (gain.by_prompt_tokens, "prompt tokens"))
    return [
        figures.fragment(points_figure(points, unit), f"{unit.split()[0]}-{gain.system}", 300)
        for points, unit in sides
        if any(point.gain is not None for point in points)
    ]


def _page(document: OwnGains, own: OwnLoad, ranking: str, drawn: dict[str, list[str]]) -> str:
    from markupsafe import Markup

    kinds = {_kind(gain) for gain in document.gains if gain.gain is not None}
    return fill(
        "own-gains.html.j2",
        document=document,
        metric=own.metric(),
        ranking=Markup(ranking),
        drawn={name: [Markup(figure) for figure in fragments] for name, fragments in drawn.items()},
        colours={kind: colour for kind, colour in COLOUR.items() if kind in kinds},
        interval=interval_in_words,
        pays=pays_in_words,
        left_out=left_out_in_words(document.gains),
        number=info.number,
        style=Markup(template("style.j2")),
        plotly_js=Markup(figures.plotly_js()),
        version=__version__,
    )
