"""An index of all runs in a folder: one line each, sorted by any column, with links to their reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from simtune import __version__
from simtune.report import info
from simtune.report.compare import NamedRun
from simtune.report.templates import fill, template

COLUMNS = (
    "run", "model", "hardware", "plan", "GPUs", "offered, requests/s", "goodput, requests/s", "p99 TTFT, ms",
    "p99 TPOT, ms", "USD per 1M output tokens", "state",
)  # fmt: skip
TEXTS = (0, 1, 2, 3, 10)
"""Columns of words."""


class IndexRow(NamedTuple):
    """A run: where its report is, what is shown, and what it is sorted by."""

    link: str
    cells: tuple[str, ...]
    keys: tuple[str, ...]


def index_row(each: NamedRun) -> IndexRow:
    """Of a run that stands in a folder of its name beside the index."""
    s = each.run.summary
    p99 = {x: None if s.saturated or x not in s.metrics else s.metrics[x].p99 for x in ("ttft", "tpot")}
    usd = s.price.per_million_output_tokens_usd if s.price else None
    limits = "no limits" if not s.slo else "meets its limits" if all(x.met for x in s.slo) else "misses a limit"
    state = "saturated" if s.saturated else limits
    values: tuple[Any, ...] = (
        each.name, s.model, s.hardware.name, info.chosen_name(each.run), s.num_gpus, s.offered_rate_rps, s.goodput_rps,
        p99["ttft"], p99["tpot"], usd, state,
    )  # fmt: skip
    shown = [value if isinstance(value, str) else info.number(value) for value in values]
    shown[7:9] = [info.ms(p99["ttft"]), info.ms(p99["tpot"])]
    keys = tuple("" if value is None else str(value) for value in values)
    return IndexRow(f"{quote(each.name)}/report.html", tuple(shown), keys)


def render(title: str, runs: Sequence[NamedRun]) -> str:
    """The page; the same bytes for the same runs."""
    from markupsafe import Markup

    return fill(
        "index.html.j2",
        title=title,
        columns=COLUMNS,
        texts=TEXTS,
        rows=[index_row(each) for each in runs],
        version=__version__,
        style=Markup(template("style.j2")),
    )
