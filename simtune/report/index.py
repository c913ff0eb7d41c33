"""An index of all runs in a folder: one line each, sorted by any column, with links to their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from simtune import __version__
from simtune.errors import plural
from simtune.report import info
from simtune.report.compare import Compared, NamedRun
from simtune.report.side_by_side import NamedFindings, NamedValidation
from simtune.report.sweep_page import DRAWN, curves
from simtune.report.templates import fill, template
from simtune.report.thumbnails import AxisSpan, drawn, e2el_span, of_run, of_validation
from simtune.runs.sweep_files import PAGE, SweepTable
from simtune.validation.published.findings import counts

COLUMNS = (
    "run", "thumbnail", "model", "hardware", "plan", "GPUs", "offered, requests/s", "goodput, requests/s",
    "p99 TTFT, ms", "p99 TPOT, ms", "USD per 1M output tokens", "state",
)  # fmt: skip
TEXTS = (0, 1, 2, 3, 4, 11)
"""Columns of words."""


class IndexRow(NamedTuple):
    """A run: the path of its report, the cells shown, the keys it is sorted by, and its thumbnail as SVG."""

    link: str
    thumbnail: str
    cells: tuple[str, ...]
    keys: tuple[str, ...]


def index_row(each: NamedRun, page: str, span: AxisSpan | None = None) -> IndexRow:
    """Row of a run whose report is `page` beside the index; thumbnails share the axis `span`."""
    s = each.run.summary
    p99 = {x: None if s.saturated or x not in s.metrics else s.metrics[x].p99 for x in ("ttft", "tpot")}
    usd = s.price.per_million_output_tokens_usd if s.price else None
    limits = "no limits" if not s.slo else "meets its limits" if all(x.met for x in s.slo) else "misses a limit"
    state = "saturated" if s.saturated else limits
    e2el = None if s.saturated or "e2el" not in s.metrics else s.metrics["e2el"].p50
    values: tuple[Any, ...] = (
        each.name, e2el, s.model, s.hardware.name, info.chosen_words(each.run), s.num_gpus, s.offered_rate_rps,
        s.goodput_rps if s.slo else None, p99["ttft"], p99["tpot"], usd, state,
    )  # fmt: skip
    cells = [*map(_shown, values)]
    cells[1], cells[8:10] = info.ABSENT, [info.ms(p99["ttft"]), info.ms(p99["tpot"])]
    return IndexRow(quote(page), of_run(s, span), tuple(cells), _keys(values))


def validated_row(each: NamedValidation, page: str) -> IndexRow:
    """Row of a validation; its latencies belong to its loads, so they are on its page and not here."""
    v = each.validation
    rates = {load.rate_rps for load in v.loads}
    offered = rates.pop() if len(rates) == 1 else None
    errors = [abs(c.error) for load in v.loads for c in load.comparisons if c.unit == "s" and c.error is not None]
    most = f", at most {info.percent(max(errors))} off" if errors else ""
    state = f"validated on {v.engine.engine}: {'' if v.within else 'not '}within {info.percent(v.tolerance)}{most}"
    values = (each.name, None, v.model, v.hardware, v.name, None, offered, None, None, None, None, state)
    return IndexRow(quote(page), of_validation(v), tuple(map(_shown, values)), _keys(values))


def published_row(each: NamedFindings, page: str) -> IndexRow:
    """Row of a list of published systems."""
    f = each.findings
    state = ", ".join(f"{count} {status}" for status, count in counts(f.findings).items())
    many = plural(len(f.findings), "published system")
    values = (each.name, None, None, f.hardware, many, None, None, None, None, None, None, state)
    return IndexRow(quote(page), "", tuple(map(_shown, values)), _keys(values))


def sweep_row(sweep: SweepTable) -> IndexRow:
    """Row of a sweep: the values that are the same at every point that could be simulated, and the number of points."""
    points = [row for row in sweep.rows if not row["error"]]
    first = points[0] if points else {}
    same: dict[str, Any] = {key: first[key] for key in first if all(row[key] == first[key] for row in points)}
    columns = (
        "num_gpus", "offered_rate_rps", "goodput_rps", "ttft_p99_s", "tpot_p99_s", "usd_per_million_output_tokens",
    )  # fmt: skip
    state = f"sweep of {plural(len(sweep.rows), 'point')} over {', '.join(sweep.keys)}"
    names = (same.get("model"), same.get("hardware"), same.get("plan"))
    values: tuple[Any, ...] = (sweep.name, None, *names, *(same.get(column) for column in columns), state)
    cells = [*map(_shown, values)]
    cells[8:10] = [info.ms(same.get("ttft_p99_s")), info.ms(same.get("tpot_p99_s"))]
    return IndexRow(f"{quote(sweep.name)}/{PAGE}", _swept(sweep, points), tuple(cells), _keys(values))


def _swept(sweep: SweepTable, points: Sequence[Mapping[str, Any]]) -> str:
    """Return the first curve of the page of a sweep."""
    column, title, scale = DRAWN[0]
    lines = curves(sweep.keys, points, column, scale) if points else []
    if not lines or len(lines[0].x) < 2:
        return ""
    line = [(x if isinstance(x, float) else float(i), y) for i, (x, y) in enumerate(zip(*lines[0][1:], strict=True))]
    return drawn(sorted(line), f"{title} along the sweep")


def _shown(value: str | float | None) -> str:
    return value if isinstance(value, str) else info.number(value)


def _keys(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple("" if value is None else str(value) for value in values)


def render(title: str, listed: Compared, sweeps: Sequence[SweepTable], pages: Mapping[str, str]) -> str:
    """Return the page; the same bytes for the same runs and sweeps. `pages` maps the names of all but the sweeps to
    their pages.
    """
    from markupsafe import Markup

    span = e2el_span(entry.run.summary for entry in listed.runs)
    rows = [
        *(index_row(run, pages[run.name], span) for run in listed.runs),
        *(validated_row(validation, pages[validation.name]) for validation in listed.validations),
        *(published_row(findings, pages[findings.name]) for findings in listed.findings),
        *map(sweep_row, sweeps),
    ]
    counted = {
        "run": listed.runs,
        "validation": listed.validations,
        "reproduction": listed.findings,
        "sweep": sweeps,
    }
    return fill(
        "index.html.j2",
        title=title,
        count=", ".join(plural(len(entries), word) for word, entries in counted.items() if entries),
        columns=COLUMNS,
        texts=TEXTS,
        rows=sorted(rows, key=lambda row: row.cells[0]),
        Markup=Markup,
        version=__version__,
        style=Markup(template("style.j2")),
    )
