"""An index of all runs in a folder: one line each, sorted by any column, with links to their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from simtune import __version__
from simtune.report import info
from simtune.report.compare import NamedRun
from simtune.report.sweep import DRAWN, curves
from simtune.report.templates import fill, template
from simtune.report.thumbnails import Span, drawn, e2el_span, of_run
from simtune.runs.sweep_files import PAGE, SweepTable

COLUMNS = (
    "run", "E2EL or front", "model", "hardware", "plan", "GPUs", "offered, requests/s", "goodput, requests/s",
    "p99 TTFT, ms", "p99 TPOT, ms", "USD per 1M output tokens", "state",
)  # fmt: skip
TEXTS = (0, 1, 2, 3, 4, 11)
"""Columns of words."""


class IndexRow(NamedTuple):
    """A run: where its report is, what is shown, what it is sorted by, and its thumbnail as SVG."""

    link: str
    thumbnail: str
    cells: tuple[str, ...]
    keys: tuple[str, ...]


def index_row(each: NamedRun, span: Span | None = None) -> IndexRow:
    """Of a run that stands in a folder of its name beside the index; thumbnails share the axis `span`."""
    s = each.run.summary
    p99 = {x: None if s.saturated or x not in s.metrics else s.metrics[x].p99 for x in ("ttft", "tpot")}
    usd = s.price.per_million_output_tokens_usd if s.price else None
    limits = "no limits" if not s.slo else "meets its limits" if all(x.met for x in s.slo) else "misses a limit"
    state = "saturated" if s.saturated else limits
    e2el = None if s.saturated or "e2el" not in s.metrics else s.metrics["e2el"].p50
    values: tuple[Any, ...] = (
        each.name, e2el, s.model, s.hardware.name, info.chosen_name(each.run), s.num_gpus, s.offered_rate_rps,
        s.goodput_rps, p99["ttft"], p99["tpot"], usd, state,
    )  # fmt: skip
    shown = [value if isinstance(value, str) else info.number(value) for value in values]
    shown[1], shown[8:10] = info.ABSENT, [info.ms(p99["ttft"]), info.ms(p99["tpot"])]
    return IndexRow(f"{quote(each.name)}/report.html", of_run(s, span), tuple(shown), _keys(values))


def sweep_row(sweep: SweepTable) -> IndexRow:
    """Of a sweep likewise: what is the same at every point that could be simulated, and how many there are."""
    points = [row for row in sweep.rows if not row["error"]]
    first = points[0] if points else {}
    same: dict[str, Any] = {key: first[key] for key in first if all(row[key] == first[key] for row in points)}
    columns = (
        "num_gpus", "offered_rate_rps", "goodput_rps", "ttft_p99_s", "tpot_p99_s", "usd_per_million_output_tokens",
    )  # fmt: skip
    state = f"sweep of {info.plural(len(sweep.rows), 'point')} over {', '.join(sweep.keys)}"
    named = (same.get("model"), same.get("hardware"), same.get("plan"))
    values: tuple[Any, ...] = (sweep.name, None, *named, *(same.get(column) for column in columns), state)
    shown = [value if isinstance(value, str) else info.number(value) for value in values]
    shown[8:10] = [info.ms(same.get("ttft_p99_s")), info.ms(same.get("tpot_p99_s"))]
    return IndexRow(f"{quote(sweep.name)}/{PAGE}", _swept(sweep, points), tuple(shown), _keys(values))


def _swept(sweep: SweepTable, points: Sequence[Mapping[str, Any]]) -> str:
    """The first curve of the page of a sweep."""
    column, what, scale = DRAWN[0]
    lines = curves(sweep.keys, points, column, scale) if points else []
    if not lines or len(lines[0].x) < 2:
        return ""
    line = [(x if isinstance(x, float) else float(i), y) for i, (x, y) in enumerate(zip(*lines[0][1:], strict=True))]
    return drawn(sorted(line), f"{what} along the sweep")


def _keys(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple("" if value is None else str(value) for value in values)


def render(title: str, runs: Sequence[NamedRun], sweeps: Sequence[SweepTable] = ()) -> str:
    """The page; the same bytes for the same runs and sweeps."""
    from markupsafe import Markup

    span = e2el_span(each.run.summary for each in runs)
    return fill(
        "index.html.j2",
        title=title,
        count=" and ".join([info.plural(len(runs), "run"), *([info.plural(len(sweeps), "sweep")] if sweeps else [])]),
        columns=COLUMNS,
        texts=TEXTS,
        rows=sorted([*(index_row(each, span) for each in runs), *map(sweep_row, sweeps)], key=lambda row: row.cells[0]),
        Markup=Markup,
        version=__version__,
        style=Markup(template("style.j2")),
    )
