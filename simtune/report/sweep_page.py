"""The page of a sweep: every number over the field that was swept, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simtune import __version__
from simtune.report import figures, info
from simtune.report.templates import fill, template

DRAWN = (
    ("request_throughput_rps", "finished, requests/s", 1.0),
    ("ttft_p99_s", "TTFT p99, ms", 1e3),
    ("tpot_p99_s", "TPOT p99, ms", 1e3),
    ("output_tokens_per_s_per_gpu", "output tokens/s per GPU", 1.0),
    ("usd_per_million_output_tokens", "USD per million output tokens", 1.0),
)
SHOWN = (
    ("num_gpus", "GPUs", 1.0),
    ("offered_rate_rps", "offered, requests/s", 1.0),
    *DRAWN,
    ("preemptions", "preemptions", 1.0),
)

SweepRow = Mapping[str, Any]


def curves(keys: Sequence[str], rows: Sequence[SweepRow], column: str, scale: float) -> list[figures.SweptLine]:
    """Return a curve over the field with the most values for each combination of the other fields; points without a
    value are left out.
    """
    over = max(keys, key=lambda key: len({row[key] for row in rows}))
    other_keys = [key for key in keys if key != over]
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        if row.get(column) is not None:
            name = ", ".join(f"{key.rpartition('.')[2]} {row[key]}" for key in other_keys) or "all"
            lines.setdefault(name, []).append((_place(row[over]), row[column] * scale))
    return [
        figures.SweptLine(name, tuple(x for x, _ in line), tuple(y for _, y in line)) for name, line in lines.items()
    ]


def _place(value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        return value


def table(keys: Sequence[str], rows: Sequence[SweepRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and cells: the swept fields, then the numbers; the last cell states that a point is saturated or
    failed.
    """
    header = (*keys, *(title for _, title, _ in SHOWN), "")
    cells = []
    for row in rows:
        numbers = (row[name] * scale if scale != 1 and row.get(name) else row.get(name) for name, _, scale in SHOWN)
        note = row["error"] or ("saturated" if row.get("saturated") else "")
        cells.append((*(str(row[key]) for key in keys), *(info.number(value) for value in numbers), note))
    return header, cells


def render(title: str, keys: Sequence[str], rows: Sequence[SweepRow]) -> str:
    """Return the page; the same bytes for the same rows."""
    from markupsafe import Markup

    over = max(keys, key=lambda key: len({row[key] for row in rows}))
    pictures = {}
    for column, label, scale in DRAWN:
        lines = curves(keys, rows, column, scale)
        if lines:
            pictures[column] = figures.fragment(figures.sweep_over(lines, over, label), column, 360)
    header, cells = table(keys, rows)
    return fill(
        "sweep.html.j2",
        title=title,
        header=header,
        keys=keys,
        rows=cells,
        figures={name: Markup(html) for name, html in pictures.items()},
        version=__version__,
        style=Markup(template("style.j2")),
        plotly_js=Markup(figures.plotly_js()),
    )
