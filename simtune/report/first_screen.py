"""First screen of a report: one figure, one line on certainty, and the warnings that stand below it."""

from __future__ import annotations

from typing import NamedTuple

from simtune.errors import plural
from simtune.report import figures, info, verdict
from simtune.report.labels import plan_labels
from simtune.results.summary import Rejections
from simtune.runs.schema import Run
from simtune.specs.plan_words import chosen_releases

SAMPLING = "sampling.fp32"
"""Operator without a table on any device, and small: the report names it under the cost model only."""


class FirstFigure(NamedTuple):
    """Figure of the first screen, and its caption."""

    figure: figures.Figure
    caption: str


def first_figure(run: Run) -> FirstFigure | None:
    """Return the figure that shows best what the chosen plan does; None if the run has no data for one."""
    s, chosen = run.summary, info.chosen_name(run)
    if s.front:
        return FirstFigure(figures.front_figure(s), "Simulated points of the front, one colour for each plan.")
    curves = [curve for curve in info.sweep_curves(run) if curve.candidate == chosen]
    if curves:
        words = "Requests per second within every limit, over the offered rate. The circle is the knee."
        figure = figures.sweep_figure(curves, {chosen: 0}, {chosen: "chosen plan"})
        return FirstFigure(figure, words)
    for cdf in info.cdfs(run):
        alone = cdf._replace(curves=cdf.curves[:1])
        figure = figures.cdf_figure(alone, {chosen: 0}, {chosen: "this plan"})
        marked = " A limit is met where the curve passes above its diamond." if cdf.limits else ""
        return FirstFigure(figure, f"{cdf.title}: share of requests at or below it.{marked}")
    if s.timeline and s.timeline.t_s:
        return FirstFigure(figures.timeline_figure(s.timeline), "Requests running and waiting over the simulated time.")
    return None


def legend(run: Run) -> dict[str, str]:
    """Return the labels of the plans that figures of a run draw as curves."""
    return plan_labels([*info.series(run)], info.chosen_name(run) if run.candidates else "")


# --- warnings ---------------------------------------------------------------------------------------------


class Warned(NamedTuple):
    """A warning: name and sentences; a loud one if numbers of the run must not be used as they are."""

    name: str
    text: str
    loud: bool = False


def warnings(run: Run) -> list[Warned]:
    """Return all warnings of a run, the loud ones first."""
    warned = [*_of_simulation(run), *_of_costs(run)]
    edges = (
        Warned("At the edge of what was searched", f"{note}. A better plan may lie beyond it.")
        for note in verdict.edges(run)
    )
    return sorted([*warned, *edges], key=lambda warning: not warning.loud)


def _of_simulation(run: Run) -> list[Warned]:
    """Return warnings of what happened in the simulation or the search."""
    s, of_all, warned = run.summary, f"of {info.number(run.summary.requests)}", []
    if s.saturated:
        warned.append(
            Warned(
                "Saturated",
                "Requests arrive faster than this plan finishes them. Its queue grows as long as the load lasts, so "
                "every latency below measures the length of the simulation and not the plan.",
                loud=True,
            )
        )
    if s.refused:
        text = f"{plural(s.refused, 'request')} {of_all} exceed max_model_len and were never served."
        warned.append(Warned("Refused", text, loud=True))
    if s.rejections is not None and s.rejections.requests:
        text = (
            f"{plural(s.rejections.requests, 'request')} {of_all} found the queue of a server full and were rejected "
        )
        text += f"(HTTP 503){_by_class(s.rejections)}. They count as missing every limit, so the SLO is not met."
        warned.append(Warned("Rejected", text, loud=True))
    if s.unserved:
        text = f"{plural(s.unserved, 'request')} {of_all} were left when no instance was up any more."
        warned.append(Warned("Not served", text, loud=True))
    if s.no_engine is not None:
        warned.append(Warned("No engine", " ".join(s.no_engine.split())))
    if s.interrupted:
        text = "The search was stopped before it was done; this is the best plan it had found."
        warned.append(Warned("Interrupted", text))
    return warned


def _by_class(rejections: Rejections) -> str:
    """Return the requests of each class that were rejected, in words; empty if there is one class."""
    counts = [f"{row.requests:,} of {row.request_class}" for row in rejections.classes if row.requests]
    return f": {', '.join(counts)}" if counts else ""


def _of_costs(run: Run) -> list[Warned]:
    """Return warnings of what step times rest on."""
    hardware, warned = run.summary.hardware, []
    if chosen := chosen_releases(run.summary.plan):
        warned.append(Warned("Engine release chosen", "; ".join(chosen) + "."))
    if run.summary.model_notes:
        warned.append(Warned("Assumed of the model", "; ".join(run.summary.model_notes) + "."))
    estimated = [key for key in hardware.estimated if key != SAMPLING]
    if estimated:
        them = "it" if len(estimated) == 1 else "them"
        text = (
            f"{', '.join(estimated)}. No table of this device covers {them}; the times follow from its data sheet and "
            "may be far off."
        )
        warned.append(Warned("Estimated, not fitted", text))
    if hardware.validated is None:
        text = (
            "Every number here comes from a simulation whose step times are fitted, not from this model running on "
            f"{info.devices(run.summary)}. How far off each operator was on points held back from its fit is shown "
            "under cost model."
        )
        if hardware.published_runs is not None:
            text += f" On serving runs that others measured: {hardware.published_runs}."
        warned.append(Warned("Never validated on this hardware", text))
    return warned


def warned_in_a_line(warned: list[Warned]) -> str:
    """Return the names of all warnings: `3 warnings: saturated; refused; never validated on this hardware`."""
    names = dict.fromkeys(warning.name for warning in warned)
    return f"{plural(len(warned), 'warning')}: {'; '.join(name[0].lower() + name[1:] for name in names)}"
