"""The timeline of a run: what every instance did, the counters over the same axis, and the lives of requests."""

from __future__ import annotations

import base64
from typing import NamedTuple

from simtune.errors import plural
from simtune.report import info
from simtune.report.templates import fill
from simtune.runs.schema import Run
from simtune.runs.swimlanes import KINDS, CoreLane, Swimlanes


class LaneRow(NamedTuple):
    """A swimlane as the table shows it: its name, then shares of the run that went to each kind of step, and idle."""

    name: str
    cells: tuple[str, ...]


def swimlane_name(swimlane: CoreLane, swimlanes: Swimlanes) -> str:
    """Return the name of its instance, as in the Perfetto trace, and of the engine core if the instance has several."""
    several = sum(core_of_run.instance == swimlane.instance for core_of_run in swimlanes.swimlanes) > 1
    return f"{swimlane.instance}, core {swimlane.core}" if several else swimlane.instance


def rows(swimlanes: Swimlanes) -> list[LaneRow]:
    """Return the shares of time of each swimlane, in percent."""
    table = []
    for swimlane in swimlanes.swimlanes:
        shares = [swimlane.share(kind, swimlanes.duration_us) for kind in KINDS]
        idle = max(0.0, 1 - sum(shares))
        table.append(
            LaneRow(swimlane_name(swimlane, swimlanes), tuple(info.percent(share) for share in (*shares, idle)))
        )
    return table


def note(swimlanes: Swimlanes) -> str:
    """Return a note on what a span of the picture is, and which requests can be selected."""
    spans = sum(len(swimlane.length_us) for swimlane in swimlanes.swimlanes)
    merged = (
        ""
        if swimlanes.steps_per_span == 1
        else f", each of up to {swimlanes.steps_per_span:,} neighbours, with their least and most"
    )
    of = "all" if len(swimlanes.lives) == swimlanes.requests else f"{len(swimlanes.lives):,}"
    selection = "" if of == "all" else ": the slowest, and others evenly spread"
    steps = plural(swimlanes.steps, "step")
    return f"{steps} in {spans:,} spans{merged}; {of} of {swimlanes.requests:,} requests{selection}."


def section(run: Run) -> str | None:
    """Return HTML of the timeline; None if the run kept no steps."""
    from markupsafe import Markup

    if run.swimlanes is None:
        return None
    return fill(
        "swimlanes.html.j2",
        rows=rows(run.swimlanes),
        kinds=KINDS,
        note=note(run.swimlanes),
        of_search=run.summary.study is not None,
        packed=Markup(base64.b64encode(run.swimlanes.to_bytes()).decode()),
    )
