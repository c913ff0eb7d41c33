"""The timeline of a run: what every instance did, the counters over the same axis, and the lives of requests."""

from __future__ import annotations

import base64
from typing import NamedTuple

from simtune.report import info
from simtune.report.templates import fill
from simtune.runs.lanes import KINDS, CoreLane, Lanes
from simtune.runs.schema import Run


class LaneRow(NamedTuple):
    """A lane as the table shows it: its name, then shares of the run that went to each kind of step, and idle."""

    name: str
    cells: tuple[str, ...]


def lane_name(lane: CoreLane, lanes: Lanes) -> str:
    """Its instance, as the Perfetto trace calls it, and the engine core where the instance has several."""
    several = sum(other.instance == lane.instance for other in lanes.lanes) > 1
    return f"{lane.instance}, core {lane.core}" if several else lane.instance


def rows(lanes: Lanes) -> list[LaneRow]:
    """What the swimlanes say, in numbers."""
    table = []
    for lane in lanes.lanes:
        shares = [lane.share(kind, lanes.duration_us) for kind in KINDS]
        idle = max(0.0, 1 - sum(shares))
        table.append(LaneRow(lane_name(lane, lanes), tuple(info.percent(share) for share in (*shares, idle))))
    return table


def note(lanes: Lanes) -> str:
    """What a span of the picture is, and which requests can be looked at."""
    spans = sum(len(lane.length_us) for lane in lanes.lanes)
    merged = (
        ""
        if lanes.steps_per_span == 1
        else f", each of up to {lanes.steps_per_span:,} neighbours, with their least and most"
    )
    of = "all" if len(lanes.lives) == lanes.requests else f"{len(lanes.lives):,}"
    kept = "" if of == "all" else ": the slowest, and others evenly spread"
    return f"{info.plural(lanes.steps, 'step')} in {spans:,} spans{merged}; {of} of {lanes.requests:,} requests{kept}."


def section(run: Run) -> str | None:
    """HTML of the timeline; None where the run kept no steps."""
    from markupsafe import Markup

    if run.lanes is None:
        return None
    return fill(
        "lanes.html.j2",
        rows=rows(run.lanes),
        kinds=KINDS,
        note=note(run.lanes),
        packed=Markup(base64.b64encode(run.lanes.to_bytes()).decode()),
    )
