"""Draws the info tuples: Plotly figures as plain data, and the HTML fragment of one.

Colours are of middle lightness, so that they read on white and on black; text and grid lines get theirs from
the style sheet of the page. Whatever a user named is escaped: Plotly takes labels for HTML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from simtune.errors import plural
from simtune.report.info import (
    BreakdownInfo,
    Cdf,
    GoodputCurve,
    LimitLine,
    ParetoInfo,
    ParetoPoint,
    ms,
    number,
    percent,
)
from simtune.report.labels import briefs, escape, plan_labels
from simtune.results.summary import InstanceUse, PoolScaling
from simtune.runs.schema import Summary, Timeline
from simtune.specs.plan_words import MIXED, in_words, kind_of_server, sentence_in_words
from simtune.workload.load import LengthFacts, LoadFacts

Figure = dict[str, Any]

COLOURS = (
    "#3d7edb", "#e0803c", "#2a9d78", "#c7619f", "#8b72d8", "#b59a2d", "#3aa0b5", "#d0605e", "#ab7b5d", "#7f9e2e",
    "#cf86d6", "#788799",
)  # fmt: skip
GOLDEN_ANGLE = 137.508
"""Degrees between the hues of further things: each falls into the widest gap that those before have left."""
GREY = "#8a909b"
RED = "#d64545"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
LOG_TICKS = [digit * 10**power for power in range(7) for digit in (1, 3)]
FEW_TICKS = 3
HATCHED = (
    "transferred",
    "other-engine",
    "data-sheet",
    "assumed",
)  # provenances other than a measurement of this device


def fragment(figure: Figure, name: str, height_px: int) -> str:
    """HTML of one figure under a fixed id; the page brings plotly.js. Raises ValueError for a name that is none."""
    from plotly.io import to_html

    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ValueError(f"{name!r} cannot be the id of a figure: Plotly writes it into the page as it is")
    return str(
        to_html(
            figure,
            full_html=False,
            include_plotlyjs=False,
            div_id=name,
            validate=False,
            default_height=f"{height_px}px",
            config={"displayModeBar": False, "responsive": True},
        )
    )


def plotly_js() -> str:
    """The whole library, for a page that loads nothing."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def series_colour(i: int) -> str:
    """Return the colour of series i; no two series have the same, however many they are."""
    return COLOURS[i] if i < len(COLOURS) else f"hsl({(GOLDEN_ANGLE * i) % 360:.0f}, 45%, {42 + 9 * (i % 3)}%)"


def _line(series: int) -> Figure:
    """Return the style of a line; that of the chosen plan, which is series 0, is wider."""
    return {"color": series_colour(series), "width": 3 if series == 0 else 1.5}


def axis(title: str, **more: Any) -> Figure:
    """An axis as all figures have it; `more` are settings of Plotly."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 13}},
        "tickformat": ",",
        "automargin": True,
        "gridcolor": GREY,
        "zeroline": False,
        # Unseen ticks keep the first numbers of both axes apart where they meet.
        "ticks": "outside",
        "ticklen": 7,
        "tickcolor": "rgba(0,0,0,0)",
        **more,
    }


def log_ticks(low: float, high: float) -> list[int]:
    """Numbers on a logarithmic axis from low to high: the roundest of which a few lie within, else both ends."""
    for digits in ((1, 3), (1, 2, 5), range(1, 10), range(10, 100, 5)):
        within = [t for power in range(7) for t in (digit * 10**power for digit in digits) if low <= t <= high]
        if len(set(within)) >= FEW_TICKS:
            return sorted(set(within))
    return sorted({math.ceil(low), math.floor(high)})


def log_axis(title: str, values: Sequence[float]) -> Figure:
    """A logarithmic axis with a few round numbers, which do not touch on a phone; below 1 Plotly picks them."""
    ticks = {"tickvals": log_ticks(min(values), max(values))} if values and max(values) >= 1 else {}
    return axis(title, type="log", **ticks)


def layout(x: Figure, y: Figure, **more: Any) -> Figure:
    """The frame of all figures around two axes."""
    return {
        "font": {"family": FONT, "size": 13, "color": GREY},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 16, "b": 8},
        "hoverlabel": {
            "bgcolor": "#1d2129",
            "bordercolor": "#1d2129",
            "font": {"family": FONT, "color": "#f4f5f7"},
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": -0.2,
            "yanchor": "top",
            "traceorder": "normal",
        },
        "xaxis": x,
        "yaxis": y,
        **more,
    }


MANY = 500
"""Points of one trace from which on they are drawn by WebGL."""


def front_figure(s: Summary) -> Figure:
    """Figure of the simulated points of a front: offered tokens/s/GPU against tokens/s/user, one line for each plan."""
    names = list(dict.fromkeys(point.candidate for point in s.front))
    labels = plan_labels(names)
    data = []
    for i, name in enumerate(names):
        points = [point for point in s.front if point.candidate == name]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": labels[name],
                "x": [point.output_tokens_per_s_per_user for point in points],
                "y": [point.output_tokens_per_s_per_gpu for point in points],
                "marker": {"size": 10, "color": series_colour(i)},
                "hovertext": [f"{plan_hover(name)}<br>{point.rate_rps:.4g} requests/s" for point in points],
                "hoverinfo": "text",
            }
        )
    axes = axis("output tokens/s per user"), axis("output tokens/s per GPU")
    return {"data": data, "layout": layout(*axes, hovermode="closest")}


FEW = 3
"""Number of points that met the SLO below which no front is visible; points that were stopped early are then drawn too.
"""


def pareto_figure(info: ParetoInfo) -> Figure:
    """Tokens/s/GPU against tokens/s/user: front joined, dominated faded, infeasible apart, chosen a star."""
    feasible = [*info.front, *info.dominated]
    families = list(dict.fromkeys(family for _, family in sorted(map(_family, feasible))))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [p.x for p in info.front],
            "y": [p.y for p in info.front],
            "line": {"color": GREY, "width": 1.5, "dash": "dot"},
            "hoverinfo": "skip",
        }
    ]
    for i, name in enumerate(families):
        on, off = ([p for p in group if _family(p)[1] == name] for group in (info.front, info.dominated))
        # One entry in the legend for each kind of server, even if none of its plans is on the front.
        data.append(_points(off, name, size=8, color=series_colour(i), opacity=0.35, showlegend=not on))
        if on:
            data.append(_points(on, name, size=11, color=series_colour(i), opacity=1.0))
    if info.infeasible:
        data.append(_points(info.infeasible, "infeasible", size=8, color=GREY, symbol="x-thin-open"))
    if info.unfinished:
        stopped = _points(info.unfinished, "stopped early", size=6, color=GREY, symbol="line-ew-open")
        # Shown from the start only if there are too few finished points for a front.
        data.append(stopped if len(feasible) < FEW else stopped | {"visible": "legendonly"})
    chosen = [p for p in feasible if p.candidate.status == "chosen"]
    if chosen:
        colour = series_colour(families.index(_family(chosen[0])[1]))
        data.append(_points(chosen, "chosen", size=20, color=colour, symbol="star"))
    return {
        "data": data,
        "layout": layout(
            axis("output tokens/s per user"),
            axis("output tokens/s per GPU"),
            hovermode="closest",
            dragmode="select",
        ),
    }


def _family(p: ParetoPoint) -> tuple[tuple[int, ...], str]:
    """Return the kind of server of a plan that decodes, in words, after a key to sort it by."""
    c = p.candidate
    # Only of plans with a prefill pool the other pool decodes alone.
    role, dp = "decode" if c.prefill else MIXED, c.attention_dp or 1
    words = kind_of_server(role, {"tp": c.tp, "pp": c.pp, "dp": dp}, bool(c.expert_parallel))
    return (c.tp, c.pp, dp, bool(c.expert_parallel), role != MIXED), words


def _points(
    points: Sequence[ParetoPoint], name: str, showlegend: bool = True, opacity: float = 1.0, **marker: Any
) -> Figure:
    return {
        "type": "scattergl" if len(points) > MANY else "scatter",
        "mode": "markers",
        "name": name,
        "legendgroup": name,
        "showlegend": showlegend,
        "x": [p.x for p in points],
        "y": [p.y for p in points],
        "customdata": [p.candidate.candidate for p in points],
        "opacity": opacity,
        "marker": {"line": {"width": 1.5, "color": marker["color"]}, **marker},
        "hovertext": [_hover(p) for p in points],
        "hoverinfo": "text",
    }


def plan_hover(name: str) -> str:
    """Return what is shown of a plan under the pointer, escaped: its words, and its code name below."""
    words = in_words(name)
    return f"<b>{escape(words)}</b>" + ("" if words == name else f"<br>{escape(name)}")


def _hover(p: ParetoPoint) -> str:
    c = p.candidate
    lines = [
        plan_hover(c.candidate),
        f"{number(p.x)} tokens/s per user, {number(p.y)} per GPU",
        f"goodput {number(c.goodput_rps)} requests/s on {plural(c.num_gpus, 'GPU')}",
        f"p99 TTFT {ms(c.ttft_p99_s)} ms, p99 TPOT {ms(c.tpot_p99_s)} ms",
    ]
    if c.reason:
        lines.append(escape(sentence_in_words(c.reason, c.candidate)))
    return "<br>".join(lines)


def sweep_figure(
    curves: Sequence[GoodputCurve], series: Mapping[str, int], labels: Mapping[str, str] | None = None
) -> Figure:
    """Goodput against offered rate, each knee circled; the dashed line is goodput = rate. `labels` are for the legend,
    escaped.
    """
    labels = labels or briefs([curve.candidate for curve in curves])
    top = max(max(c.goodput_rps) for c in curves) * 1.1
    knees = [(series[c.candidate], c.rate_rps[c.knee], c.goodput_rps[c.knee]) for c in curves if c.knee is not None]
    diagonal = {
        "type": "scatter",
        "mode": "lines",
        "name": "all in time",
        "x": [0, top],
        "y": [0, top],
        "line": {"color": GREY, "width": 1, "dash": "dash"},
        "hoverinfo": "skip",
    }
    return {
        "data": [
            diagonal,
            *(_goodput_line(c, labels[c.candidate], series[c.candidate]) for c in curves),
            *([_knees(knees)] if knees else []),
        ],
        "layout": layout(
            axis("offered requests/s", rangemode="tozero"),
            axis("goodput, requests/s", rangemode="tozero"),
            hovermode="closest",
        ),
    }


def _goodput_line(curve: GoodputCurve, label: str, number_in_series: int) -> Figure:
    """Saturated points are crosses."""
    hover = [
        f"{plan_hover(curve.candidate)}<br>goodput {number(goodput)} of {number(rate)} requests/s offered"
        f"<br>SLO attainment {percent(attainment)}{'<br>saturated' if saturated else ''}"
        for rate, goodput, attainment, saturated in zip(
            curve.rate_rps, curve.goodput_rps, curve.attainment, curve.saturated, strict=True
        )
    ]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label,
        "x": list(curve.rate_rps),
        "y": list(curve.goodput_rps),
        "line": _line(number_in_series),
        "marker": {"size": 7, "symbol": ["x" if saturated else "circle" for saturated in curve.saturated]},
        "cliponaxis": False,
        "hovertext": hover,
        "hoverinfo": "text",
    }


def _knees(knees: Sequence[tuple[int, float, float]]) -> Figure:
    """(number in the series, rate, goodput) of each; that of the chosen plan, number 0, is labelled."""
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "knee",
        "x": [rate for _, rate, _ in knees],
        "y": [goodput for _, _, goodput in knees],
        "text": [f"knee {number(rate)} " if i == 0 else "" for i, rate, _ in knees],
        "textposition": "top left",
        "marker": {
            "size": 16,
            "symbol": "circle-open",
            "color": [series_colour(i) for i, _, _ in knees],
            "line": {"width": 2},
        },
        "hoverinfo": "skip",
    }


def cdf_figure(info: Cdf, series: Mapping[str, int], labels: Mapping[str, str] | None = None) -> Figure:
    """Share of requests at or below a latency; limits are vertical lines, marked at their level. `labels` are for the
    legend, escaped.
    """
    labels = labels or briefs([name for name, _ in info.curves])
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": labels[name],
            "x": list(values),
            "y": [100 * i / (len(values) - 1) for i in range(len(values))],
            "line": _line(series[name]),
            "hovertemplate": "%{y:.0f} % within %{x:,.4~g} ms<extra></extra>",
        }
        for name, values in info.curves
    ]
    return {
        "data": [*data, *(_limit_line(x) for x in info.limits)],
        "layout": layout(
            axis(
                f"{info.title}, ms",
                **({"type": "log", "tickvals": LOG_TICKS} if info.logarithmic else {"rangemode": "tozero"}),
            ),
            axis("requests", range=[0, 103], ticksuffix=" %", dtick=25),
            hovermode="closest",
        ),
    }


def _limit_line(limit: LimitLine) -> Figure:
    """A vertical line with a diamond at the level that the curve must pass above."""
    level = [] if limit.level is None else [100 * limit.level]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(limit.label),
        "x": [limit.ms] * (2 + len(level)),
        "y": [0, *level, 100],
        "line": {"color": RED, "width": 1.5, "dash": "dash"},
        "marker": {
            "size": [0, *(9 for _ in level), 0],
            "symbol": "diamond",
            "color": RED,
            "line": {"width": 0},
        },
        "hovertext": escape(limit.label),
        "hoverinfo": "text",
    }


def breakdown_figure(info: BreakdownInfo) -> Figure:
    """Figure with a bar for each step, stacked by operator; hatched if the operator was not measured on this device."""
    operators = list(dict.fromkeys(layer.operator for layer in info.layers))
    rows = list(range(len(info.labels)))
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(f"{layer.operator}, {layer.provenance}"),
            "x": list(layer.ms),
            "y": rows,
            "width": 0.46,
            "marker": {
                "color": series_colour(operators.index(layer.operator)),
                "pattern": {"shape": "/" if layer.provenance in HATCHED else "", "size": 5, "solidity": 0.35},
            },
            "hovertext": [
                f"<b>{escape(layer.operator)}</b> {number(x)} ms<br>{escape(layer.provenance)}" for x in layer.ms
            ],
            "hoverinfo": "text",
        }
        for layer in info.layers
    ]
    labels = [
        {
            "text": escape(label),
            "x": 0,
            "xref": "x",
            "xanchor": "left",
            "y": row,
            "yshift": 19,
            "yanchor": "bottom",
            "align": "left",
            "font": {"size": 12},
            "showarrow": False,
        }
        for row, label in zip(rows, info.labels, strict=True)
    ]
    return {
        "data": data,
        "layout": layout(
            axis("", showgrid=False, ticksuffix=" ms"),
            {"visible": False, "range": [len(rows) - 0.5, -0.85], "fixedrange": True},
            barmode="stack",
            hovermode="closest",
            annotations=labels,
            # Of a figure as low as this one so much of it is the height of its tick labels.
            legend={"orientation": "h", "x": 0, "y": -0.3, "yanchor": "top", "traceorder": "normal"},
        ),
    }


def timeline_figure(t: Timeline) -> Figure:
    """Running and waiting requests above, used KV blocks below, over simulated time."""

    def line(name: str, values: Sequence[float], colour: str, **more: Any) -> Figure:
        width = {"color": colour, "width": 1.5, "shape": "hv"}
        return {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": list(t.t_s),
            "y": list(values),
            "line": width,
        } | more

    return {
        "data": [
            line("running", t.running, COLOURS[0]),
            line("waiting", t.waiting, COLOURS[1]),
            line(
                "KV blocks used",
                [100 * share for share in t.kv_used],
                COLOURS[2],
                yaxis="y2",
                fill="tozeroy",
                fillcolor="rgba(42,157,120,0.18)",
            ),
        ],
        "layout": layout(
            axis("simulated time, s", anchor="y2"),
            axis("requests", domain=[0.42, 1], rangemode="tozero"),
            yaxis2=axis("KV blocks", domain=[0, 0.32], range=[0, 103], ticksuffix=" %", dtick=50),
            hovermode="x unified",
        ),
    }


def instances_figure(instances: Sequence[InstanceUse]) -> Figure:
    """Share of the time in which each instance ran steps."""
    pools = list(dict.fromkeys(x.pool for x in instances))
    data = []
    for i, pool in enumerate(pools):
        of_pool = [x for x in instances if x.pool == pool]
        data.append(
            {
                "type": "bar",
                "name": escape(pool),
                "x": [f"{escape(pool)} {x.instance}" for x in of_pool],
                "y": [100 * x.busy for x in of_pool],
                "marker": {"color": series_colour(i)},
                "hovertext": [f"{number(100 * x.busy)} % busy, {number(x.requests)} requests" for x in of_pool],
                "hoverinfo": "x+text",
            }
        )
    return {
        "data": data,
        "layout": layout(
            axis("instance", type="category", showgrid=False),
            axis("busy", range=[0, 103], ticksuffix=" %", dtick=25),
            showlegend=len(pools) > 1,
        ),
    }


def scaling_figure(pools: Sequence[PoolScaling]) -> Figure:
    """Instances of autoscaled pools, or their ranks, over time: those that accept requests, and those that hold
    GPUs."""
    end_s = max(pool.hours for pool in pools) * 3600.0
    per, unit = time_unit(end_s)
    data = []
    units = " and ".join(sorted({pool.units for pool in pools}))
    for i, pool in enumerate(pools):
        label = f"{escape(pool.pool)} " if len(pools) > 1 else ""
        for name, numbers, dash in (("hold GPUs", pool.holding, "dot"), ("accept requests", pool.accepting, "solid")):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"{label}{name}",
                    "x": [*(t / per for t in pool.at_s), end_s / per],
                    "y": [*numbers, numbers[-1]],
                    "line": {"color": series_colour(i), "width": 2, "shape": "hv", "dash": dash},
                    "hovertemplate": f"%{{y}} {label}{name}<extra></extra>",
                }
            )
    return {
        "data": data,
        "layout": layout(axis(f"time, {unit}"), axis(units, rangemode="tozero"), showlegend=True, hovermode="closest"),
    }


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds of the unit in which an axis of this length is labelled, and the unit."""
    return (3600.0, "h") if seconds > 7200 else (60.0, "min") if seconds > 300 else (1.0, "s")


def rates_figure(load: LoadFacts) -> Figure:
    """Arrivals per second over the time of the load, with their mean."""
    width = load.bin_s or 1.0
    per, unit = time_unit(load.span_s or 0)
    begin = [i * width / per for i in range(len(load.rates_rps) + 1)]
    rates = [*load.rates_rps, load.rates_rps[-1]]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "arrivals",
                "x": begin,
                "y": rates,
                "line": {"color": COLOURS[0], "width": 2, "shape": "hv"},
                "fill": "tozeroy",
                "fillcolor": "rgba(61,126,219,0.18)",
                "hovertemplate": "%{y:.3~g} requests/s<extra></extra>",
            }
        ],
        "layout": layout(
            axis(f"time, {unit}"), axis("requests/s", rangemode="tozero"), showlegend=False, hovermode="closest"
        ),
    }


def lengths_figure(lengths: LengthFacts, what: str, series: int = 0) -> Figure:
    """A histogram of lengths over a logarithmic axis."""
    edges = lengths.edges
    return {
        "data": [
            {
                "type": "bar",
                "name": what,
                "x": [(a * b) ** 0.5 for a, b in pairwise(edges)],
                "width": [b - a for a, b in pairwise(edges)],
                "y": list(lengths.counts),
                "marker": {"color": series_colour(series), "line": {"width": 0}},
                "hovertext": [f"{a:,.0f} to {b - 1:,.0f}" for a, b in pairwise(edges)],
                "hovertemplate": "%{hovertext} tokens: %{y:,} requests<extra></extra>",
            }
        ],
        "layout": layout(
            axis(what, type="log", tickvals=log_ticks(edges[0], edges[-1])),
            axis("requests", rangemode="tozero"),
            showlegend=False,
            bargap=0,
            hovermode="closest",
        ),
    }


def over_time(curves: Sequence[tuple[str, Sequence[float], Sequence[float], int]], what: str) -> Figure:
    """(name, seconds, values, number in the series) of several runs over the same axis."""
    labels = briefs([name for name, *_ in curves])
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": labels[name],
                "x": list(t_s),
                "y": list(values),
                "line": {"color": series_colour(series), "width": 1.5, "shape": "hv"},
            }
            for name, t_s, values, series in curves
        ],
        "layout": layout(axis("simulated time, s"), axis(what, rangemode="tozero"), hovermode="x unified"),
    }


class SweptLine(NamedTuple):
    """Values over numbers or names."""

    name: str
    x: tuple[Any, ...]
    y: tuple[float, ...]


def sweep_over(curves: Sequence[SweptLine], over: str, what: str) -> Figure:
    """A number over the field that was swept, one line for each value of the others."""
    names = any(isinstance(x, str) for curve in curves for x in curve.x)
    labels = briefs([curve.name for curve in curves])
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": labels[curve.name],
                "x": [escape(x) if isinstance(x, str) else x for x in curve.x],
                "y": list(curve.y),
                "line": {"color": series_colour(i), "width": 2},
                "marker": {"size": 7},
            }
            for i, curve in enumerate(curves)
        ],
        "layout": layout(
            axis(escape(over), **({"type": "category"} if names else {})),
            axis(what, rangemode="tozero"),
            showlegend=len(curves) > 1,
            hovermode="closest",
        ),
    }
