"""The report: one HTML page that opens offline, with the same bytes for the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simtune import __version__
from simtune.report import (
    explore,
    figures,
    first_screen,
    info,
    load_page,
    proof,
    speculation_page,
    swimlanes_page,
    verdict,
)
from simtune.report.certainty import certainty, in_one_line
from simtune.report.neighbours import neighbours
from simtune.report.templates import fill, template
from simtune.runs.schema import CandidateRow, Run, Summary
from simtune.specs.plan_words import differing, shared


def render(run: Run) -> str:
    """The page of a run of `optimize` or `simulate`: of one that was just made, or read again."""
    from markupsafe import Markup

    s, timeline, proven = run.summary, swimlanes_page.section(run), proof.section(run)
    first = first_screen.first_figure(run)
    return fill(
        "report.html.j2",
        s=s,
        run=run,
        info=info,
        load_rows=load_page.load_rows(s.load) if s.load else (),
        verdict=verdict,
        sure=certainty(s),
        sure_in_short=in_one_line(s),
        warned=first_screen.warnings(run),
        warned_in_a_line=first_screen.warned_in_a_line,
        first_caption=None if first is None else first.caption,
        runners_up=(runners_up := info.runners_up(run)),
        best_words=_listed([row.candidate.candidate for row in runners_up]),
        listed=(listed := run.candidates[:LISTED]),
        all_words=_listed([c.candidate for c in listed]),
        front_words=_listed([point.candidate for point in s.front or ()]),
        chosen=info.chosen_row(run),
        steps=neighbours(run),
        swimlanes=Markup(timeline) if timeline else None,
        proof=Markup(proven) if proven else None,
        explorer=Markup(_explorer(run)) if len(explore.points(run)) > 1 else None,
        version=__version__,
        figures={name: Markup(html) for name, html in _figures(run, first).items()},
        speculation=Markup(speculation_page.section(s.draft_schedule)) if s.draft_schedule else None,
        style=Markup(template("style.j2")),
        candidate_cells=candidate_cells,
        summary_json=Markup(_json_in_html(s)),
        plotly_js=Markup(figures.plotly_js()),
    )


LISTED = 1000
"""Most candidates in the table of all: of fifty thousand it would be thirty megabytes."""


class Listed(NamedTuple):
    """A list of plans in words: the plans by code name, and what all of them have."""

    words: Mapping[str, str]
    shared: str


def _listed(names: Sequence[str]) -> Listed:
    return Listed(differing(names), shared(names))


def _explorer(run: Run) -> str:
    """The section in which limits can be moved."""
    from markupsafe import Markup

    return fill("explore.j2", explore_json=Markup(explore.document(run)), common=explore.common(run))


def _figures(run: Run, first: first_screen.FirstFigure | None) -> dict[str, str]:
    """Return HTML by figure name, for the figures that the run directory has data for."""
    s = run.summary
    pictures, series, labels = {}, info.series(run), first_screen.legend(run)
    if first is not None:
        pictures["first"] = (first.figure, 340)
    pareto, curves, steps = info.pareto(run.candidates), info.sweep_curves(run), info.breakdown(s)
    if pareto.front or pareto.infeasible:
        pictures["pareto"] = (figures.pareto_figure(pareto), 460)
    if s.front:
        pictures["front"] = (figures.front_figure(s), 420)
    if curves:
        pictures["sweep"] = (figures.sweep_figure(curves, series, labels), 440)
    for cdf in info.cdfs(run):
        pictures[f"cdf-{cdf.title.lower()}"] = (figures.cdf_figure(cdf, series, labels), 420)
    if steps.labels:
        pictures["breakdown"] = (figures.breakdown_figure(steps), 150 + 70 * len(steps.labels))
    first_token = info.first_token(s)
    if first_token.layers and not s.saturated:
        pictures["first-token"] = (figures.breakdown_figure(first_token), 150 + 70 * len(first_token.labels))
    pictures |= _timelines(s)
    if len(s.instances) > 1:
        pictures["instances"] = (figures.instances_figure(s.instances), 300)
    if s.autoscaling:
        pictures["scaling"] = (figures.scaling_figure(s.autoscaling), 320)
    fragments = {name: figures.fragment(figure, name, height) for name, (figure, height) in pictures.items()}
    return fragments | (load_page.load_figures(s.load) if s.load else {})


def _timelines(s: Summary) -> dict[str, tuple[figures.Figure, int]]:
    """Return figure and height by name: of each pool, or of all instances together."""
    if s.pool_timelines and s.pool_timelines[0].t_s:
        return {f"timeline-{t.pool}": (figures.timeline_figure(t), 380) for t in s.pool_timelines}
    return {"timeline": (figures.timeline_figure(s.timeline), 440)} if s.timeline and s.timeline.t_s else {}


def candidate_cells(c: CandidateRow) -> list[str]:
    """The row of one candidate as the tables show it, latencies in milliseconds."""
    return [
        info.number(c.rank),
        c.candidate,
        c.status.replace("_", " "),
        info.number(c.num_gpus),
        info.number(c.goodput_rps),
        info.number(c.goodput_rps_per_gpu),
        info.number(c.output_tokens_per_s_per_gpu),
        info.number(c.output_tokens_per_s_per_user),
        info.ms(c.ttft_p99_s),
        info.ms(c.tpot_p99_s),
        info.percent(c.slo_attainment),
        info.number(c.usd_per_million_output_tokens),
    ]


def _json_in_html(summary: Summary) -> str:
    """Return the summary as JSON that cannot end the script element that contains it."""
    return json.dumps(summary.to_data(), sort_keys=True, allow_nan=False).replace("<", "\\u003c")
