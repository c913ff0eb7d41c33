"""Draws how to speculate: gains over batch and context, the draft and its probabilities, yield and waste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from simtune import __version__
from simtune.report import figures, info
from simtune.report.figures import Figure
from simtune.report.labels import escape
from simtune.report.templates import fill, template
from simtune.runs.schema import DraftSchedule, DraftShape, ScheduleCell

LABELLED = 0.05
"""Nodes of a tree that are less likely go without a number."""

# --- computed ---------------------------------------------------------------------------------------------


class Edge(NamedTuple):
    """Between two cells of the map, one of which should not speculate; in cells, from the lower left corner of 0."""

    x: tuple[float, float]
    y: tuple[float, float]


def off_line(schedule: DraftSchedule) -> list[Edge]:
    """Return the line beyond which speculation should be off: all edges between cells with it and cells without."""
    edges = []
    for b, row in enumerate(schedule.cells):
        for c, cell in enumerate(row):
            if c + 1 < len(row) and _differ(cell, row[c + 1]):
                edges.append(Edge((c + 0.5, c + 0.5), (b - 0.5, b + 0.5)))
            if b + 1 < len(schedule.cells) and _differ(cell, schedule.cells[b + 1][c]):
                edges.append(Edge((c - 0.5, c + 0.5), (b + 0.5, b + 0.5)))
    return edges


def _differ(one: ScheduleCell, other: ScheduleCell) -> bool:
    return one.off != other.off and one.occurs and other.occurs


def _cells(schedule: DraftSchedule) -> list[ScheduleCell]:
    """Return the cells that occur."""
    return [cell for row in schedule.cells for cell in row if cell.occurs]


class Drawn(NamedTuple):
    """A node of the draft: its place, its parent's place, and the probability that the target takes it."""

    path: tuple[int, ...]
    x: float
    depth: int
    parent: tuple[float, int]
    probability: float


def drawn_tree(draft: DraftShape) -> list[Drawn]:
    """Leaves side by side in rank order, every other node above the middle of its children; the root at depth 0."""
    probability = {tuple(node.path): node.probability for node in draft.nodes}
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in sorted(probability):
        children.setdefault(path[:-1], []).append(path)
    x: dict[tuple[int, ...], float] = {}
    leaves = 0
    for path in _depth_first((), children):
        if path in children:
            x[path] = (x[children[path][0]] + x[children[path][-1]]) / 2
        else:
            x[path], leaves = float(leaves), leaves + 1
    return [Drawn(path, x[path], len(path), (x[path[:-1]], len(path) - 1), p) for path, p in probability.items()]


def _depth_first(
    path: tuple[int, ...], children: dict[tuple[int, ...], list[tuple[int, ...]]]
) -> list[tuple[int, ...]]:
    """Children before their parents."""
    return [*(node for child in children.get(path, ()) for node in _depth_first(child, children)), path]


def headline(schedule: DraftSchedule) -> str:
    """Return a sentence: the gain of drafting, and over what."""
    cells = _cells(schedule)
    most = max(cell.gain for cell in cells)
    if schedule.gain <= 1:
        return f"Drafting with {schedule.drafter} pays at no batch size and context looked at."
    where = sum(cell.off for cell in cells)
    fixed = schedule.gain / schedule.fixed.gain - 1
    beyond = f", {info.percent(fixed)} more than the best single setting," if fixed > 0 else ""
    off = f"; it should be off in {where} of {len(cells)} cells" if where else ""
    return (
        f"Drafting with {schedule.drafter} gains a factor of {info.number(schedule.gain)} altogether{beyond or ','} "
        f"{info.number(most)} at best{off}."
    )


def engine_rows(schedule: DraftSchedule) -> list[tuple[str, ...]]:
    """engine, scheme, gain, loss, settings (by name, as in the file) or why there are none."""
    return [
        (
            e.engine,
            e.scheme,
            info.number(e.gain),
            info.percent(e.loss),
            json.dumps(e.settings, sort_keys=True) if e.settings is not None else e.why,
        )
        for e in schedule.engines
    ]


# --- drawn ------------------------------------------------------------------------------------------------


def gain_figure(schedule: DraftSchedule) -> Figure:
    """Gain of the best setting over (context, batch), the setting in each cell, and the line beyond which none is."""
    data = [
        {
            "type": "heatmap",
            "x": [f"{c:,}" for c in schedule.contexts],
            "y": [f"{b:,}" for b in schedule.batches],
            "z": [[round(cell.gain, 4) if cell.occurs else None for cell in row] for row in schedule.cells],
            "text": [
                [f"{cell.short}<br>×{cell.gain:.2f}" if cell.occurs else "" for cell in row] for row in schedule.cells
            ],
            "hoverongaps": False,
            "texttemplate": "%{text}",
            "hovertext": [[f"{escape(cell.scheme)}: ×{cell.gain:.3f}" for cell in row] for row in schedule.cells],
            "hovertemplate": "batch %{y}, context %{x}<br>%{hovertext}<extra></extra>",
            "zmin": 1,
            "zmax": max(1.1, *(cell.gain for cell in _cells(schedule))),
            "colorscale": [[0, "#d5dbe3"], [0.5, "#7fb0e8"], [1, "#3d7edb"]],
            "colorbar": {"title": {"text": "gain"}, "thickness": 12},
            "textfont": {"color": "#10151d", "size": 12},
            "xgap": 1,
            "ygap": 1,
        }
    ]
    line = {"color": figures.RED, "width": 3}
    shapes = [
        {"type": "line", "x0": e.x[0], "x1": e.x[1], "y0": e.y[0], "y1": e.y[1], "line": line}
        for e in off_line(schedule)
    ]
    x = figures.axis("context, tokens", type="category", showgrid=False)
    y = figures.axis("batch, sequences", type="category", showgrid=False)
    return {"data": data, "layout": figures.layout(x, y, shapes=shapes)}


def compared_figure(schedule: DraftSchedule) -> Figure:
    """Figure of the gains over no drafts, altogether: of the best setting everywhere, of the best single one, of the
    settings that engines accept.
    """
    bars = [
        ("best for each cell", schedule.gain, figures.COLOURS[0]),
        (f"best single setting: {schedule.fixed.scheme}", schedule.fixed.gain, figures.COLOURS[1]),
        *((f"{e.engine}: {e.scheme}", e.gain, figures.COLOURS[2]) for e in schedule.engines),
    ]
    rows = list(range(len(bars)))
    labels = [
        {"text": escape(title), "x": 0, "xref": "paper", "xanchor": "left", "y": row, "yshift": 12, "yanchor": "bottom"}
        | {"showarrow": False, "font": {"size": 12}}
        for row, (title, _, _) in zip(rows, bars, strict=True)
    ]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": rows,
        "x": [gain for _, gain, _ in bars],
        "width": 0.4,
        "marker": {"color": [colour for _, _, colour in bars]},
        "text": [f"×{gain:.3f}" for _, gain, _ in bars],
        "textposition": "inside",
        "insidetextanchor": "start",
        "textfont": {"color": "#ffffff"},
        "hoverinfo": "skip",
    }
    down = {"visible": False, "range": [len(rows) - 0.5, -0.85], "fixedrange": True}
    return {
        "data": [bar],
        "layout": figures.layout(
            figures.axis("gain over no drafts", rangemode="tozero"), down, annotations=labels, showlegend=False
        ),
    }


def tree_figure(draft: DraftShape) -> Figure:
    """The draft as a tree, root above; a node is the larger and darker the likelier the target takes it."""
    nodes = drawn_tree(draft)
    root = next((node.parent for node in nodes if node.depth == 1), (0.0, 0))
    edges_x: list[float | None] = []
    edges_y: list[float | None] = []
    for node in nodes:
        edges_x += [node.parent[0], node.x, None]
        edges_y += [-node.parent[1], -node.depth, None]
    x, y = [root[0], *(n.x for n in nodes)], [0, *(-n.depth for n in nodes)]
    shares = [1.0, *(n.probability for n in nodes)]
    names = ["certain", *(" ".join(map(str, n.path)) for n in nodes)]
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": edges_x,
            "y": edges_y,
            "line": {"color": figures.GREY, "width": 1},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": x,
            "y": y,
            "text": [f"{p:.2f}".removeprefix("0") if p >= LABELLED else "" for p in shares],
            "textposition": "middle right",
            "marker": {
                "size": [8 + 18 * p for p in shares],
                "color": shares,
                "cmin": 0,
                "cmax": 1,
                "colorscale": [[0, "#d5dbe3"], [1, "#3d7edb"]],
                "line": {"color": figures.COLOURS[0], "width": 1},
            },
            "hovertext": [f"ranks {name}: {p:.1%}" for name, p in zip(names, shares, strict=True)],
            "hoverinfo": "text",
        },
    ]
    deepest = max((n.depth for n in nodes), default=0)
    depths = list(range(deepest + 1))
    horizontal = {"visible": False, "range": [min(x) - 0.7, max(x) + 0.9]}
    vertical = figures.axis(
        "draft tokens deep",
        tickvals=[-d for d in depths],
        ticktext=[str(d) for d in depths],
        range=[-deepest - 0.5, 0.5],
    )
    return {"data": data, "layout": figures.layout(horizontal, vertical, showlegend=False)}


def yield_figure(
    x: Sequence[float], tokens: Sequence[float], wasted: Sequence[float], title: str, logarithmic: bool
) -> Figure:
    """Tokens of a round and wasted tokens, per sequence, against load."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": list(x),
            "y": list(values),
            "line": {"color": colour, "width": 2},
            "hovertemplate": f"%{{y:.3f}} {name} at %{{x:,.4~g}}<extra></extra>",
        }
        for name, values, colour in (
            ("tokens per round", tokens, figures.COLOURS[0]),
            ("verified, then rejected", wasted, figures.COLOURS[1]),
        )
    ]
    across = figures.axis(title, **({"type": "log", "tickvals": list(x)} if logarithmic else {"rangemode": "tozero"}))
    return {
        "data": data,
        "layout": figures.layout(across, figures.axis("tokens per sequence and round", rangemode="tozero")),
    }


def drawn(schedule: DraftSchedule) -> dict[str, str]:
    """Return HTML of the figures by name."""
    pictures = {
        "speculation-gains": (gain_figure(schedule), 150 + 44 * len(schedule.batches)),
        "speculation-compared": (compared_figure(schedule), 90 + 56 * (2 + len(schedule.engines))),
    }
    if schedule.draft.nodes:
        pictures["speculation-draft"] = (
            tree_figure(schedule.draft),
            130 + 70 * max(len(n.path) for n in schedule.draft.nodes),
        )
    points = schedule.by_batch
    pictures["speculation-batch"] = (
        yield_figure(
            [p.batch for p in points], [p.tokens for p in points], [p.wasted for p in points], "batch, sequences", True
        ),
        360,
    )
    if schedule.load:
        rates = [p.rate_rps for p in schedule.load]
        simulated = yield_figure(
            rates, [p.tokens for p in schedule.load], [p.wasted for p in schedule.load], "offered requests/s", False
        )
        pictures["speculation-load"] = (simulated, 360)
    return {name: figures.fragment(figure, name, height) for name, (figure, height) in pictures.items()}


def section(schedule: DraftSchedule) -> str:
    """HTML of the part of a report that is about speculation."""
    from markupsafe import Markup

    return fill(
        "speculation.html.j2",
        schedule=schedule,
        headline=headline(schedule),
        rows=engine_rows(schedule),
        off_line=off_line(schedule),
        number=info.number,
        figures={name: Markup(html) for name, html in drawn(schedule).items()},
    )


def render(schedule: DraftSchedule, model: str, device: str) -> str:
    """A page of its own that opens offline, with the same bytes for the same schedule."""
    from markupsafe import Markup

    return fill(
        "speculation-page.html.j2",
        title=f"{schedule.drafter} for {model} on {device}",
        headline=headline(schedule),
        section=Markup(section(schedule)),
        style=Markup(template("style.j2")),
        plotly_js=Markup(figures.plotly_js()),
        version=__version__,
    )
