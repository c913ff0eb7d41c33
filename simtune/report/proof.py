"""The certificate of a search as pictures: the bound against the best plan, and what became of every plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simtune.report import figures, info, verdict
from simtune.report.figures import Figure
from simtune.report.labels import escape
from simtune.report.templates import fill
from simtune.runs.schema import CourseRow, Run
from simtune.tuner.certificate.search_certificate import Certificate, PlanFate

CHOSEN, MET, MISSED, TWIN, CANNOT, OPEN = (
    "chosen", "met the SLO, worth no more", "simulated, missed the SLO", "does what another plan does",
    "cannot do what is asked", "not looked at: better by the gap at most",
)  # fmt: skip


class FateGroup(NamedTuple):
    """Plans of the same fate, and the most that the best of them could reach; None if none could meet the SLO."""

    fate: str
    plans: tuple[PlanFate, ...]
    best: float | None


def fate_of(plan: PlanFate, certificate: Certificate) -> str:
    """Return the fate of a plan, in words."""
    if plan.plan == certificate.incumbent.plan:
        return CHOSEN
    if plan.same_as:
        return TWIN
    if plan.simulated:
        return MET if any(simulation.met for simulation in plan.simulated) else MISSED
    if plan.best is None:
        return CANNOT
    beyond = plan.best - certificate.incumbent.value
    return OPEN if (beyond if more_is_better(certificate) else -beyond) > 0 else f"ruled out by {plan.by}"


def groups(certificate: Certificate, more_is_better: bool) -> list[FateGroup]:
    """Return all plans of the space by their fate, the chosen one first, then the most numerous."""
    by_fate: dict[str, list[PlanFate]] = {}
    for plan in certificate.plans:
        by_fate.setdefault(fate_of(plan, certificate), []).append(plan)
    fates = []
    for fate, plans in by_fate.items():
        bounds = [plan.best for plan in plans if plan.best is not None]
        fates.append(FateGroup(fate, tuple(plans), (max if more_is_better else min)(bounds) if bounds else None))
    return sorted(fates, key=lambda group: (group.fate != CHOSEN, -len(group.plans), group.fate))


DRAWN = 1000
"""Most plans of a fate in the figure, evenly taken: of fifty thousand it would be sixteen megabytes."""


def more_is_better(certificate: Certificate) -> bool:
    """True if higher values are better, so that bounds are above the values that are reached."""
    return certificate.bound >= certificate.incumbent.value


def course_figure(course: Sequence[CourseRow], unit: str) -> Figure:
    """The best plan and the bound over the simulations of the search; what lies between them is not ruled out yet."""

    def line(name: str, values: list[float | None], colour: str, **more: object) -> Figure:
        return {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [point.simulations for point in course],
            "y": values,
            "line": {"color": colour, "width": 2.5, "shape": "hv"},
            "hovertemplate": f"%{{y:,.4~g}} {escape(unit)} after %{{x}} simulations<extra>{name}</extra>",
            **more,
        }

    between = {"fill": "tonexty", "fillcolor": "rgba(138,144,155,0.16)"}
    return {
        "data": [
            line("bound: no plan is beyond it", [point.bound for point in course], figures.COLOURS[1]),
            line("best plan so far", [point.value for point in course], figures.COLOURS[0], **between),
        ],
        "layout": figures.layout(
            figures.axis("simulations", rangemode="tozero"), figures.axis(escape(unit)), hovermode="closest"
        ),
    }


def fates_figure(certificate: Certificate, fates: Sequence[FateGroup]) -> Figure:
    """Figure of the most that each plan could reach, best first, coloured by its fate; the line is the chosen plan."""
    ranked = _ranked(certificate)
    place = {plan.plan: i for i, plan in enumerate(ranked, 1)}
    data: list[Figure] = []
    for i, group in enumerate(fates):
        plans = sorted((plan for plan in group.plans if plan.best is not None), key=lambda plan: place[plan.plan])
        plans = plans[:: -(-len(plans) // DRAWN) or 1]
        if plans:
            data.append(
                {
                    "type": "scattergl" if len(plans) > figures.MANY else "scatter",
                    "mode": "markers",
                    "name": escape(group.fate),
                    "x": [place[plan.plan] for plan in plans],
                    "y": [plan.best for plan in plans],
                    "marker": {
                        "color": figures.series_colour(i),
                        "size": 16 if group.fate == CHOSEN else 7,
                        "symbol": "star" if group.fate == CHOSEN else "circle",
                    },
                    "hovertext": [f"{figures.plan_hover(plan.plan)}<br>{escape(plan.by)}" for plan in plans],
                    "hovertemplate": "%{hovertext}<br>at most %{y:,.4~g}<extra></extra>",
                }
            )
    value = certificate.incumbent.value
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "reached by the chosen plan",
            "x": [1, max(len(ranked), 2)],
            "y": [value, value],
            "line": {"color": figures.GREY, "width": 1.5, "dash": "dash"},
            "hoverinfo": "skip",
        }
    )
    return {
        "data": data,
        "layout": figures.layout(
            figures.axis("plans, the most promising first"),
            figures.axis(escape(f"{certificate.unit} at most")),
            hovermode="closest",
        ),
    }


def _ranked(certificate: Certificate) -> list[PlanFate]:
    """Return the plans that could meet the SLO, by the value they could reach, best first."""
    sign = -1 if more_is_better(certificate) else 1
    bounded = [(sign * plan.best, plan.plan, plan) for plan in certificate.plans if plan.best is not None]
    return [plan for *_, plan in sorted(bounded, key=lambda item: item[:2])]


def rows(fates: Sequence[FateGroup]) -> list[tuple[str, str, str]]:
    """fate, how many plans, what the best of them could reach at most."""
    return [(group.fate, info.number(len(group.plans)), info.number(group.best)) for group in fates]


def section(run: Run) -> str | None:
    """Return HTML of the proof; None if nothing was searched."""
    from markupsafe import Markup

    certificate = run.certificate
    if certificate is None:
        return None
    fates = groups(certificate, more_is_better(certificate))
    pictures = {"proof-fates": figures.fragment(fates_figure(certificate, fates), "proof-fates", 420)}
    if len(run.course) > 1:
        pictures["proof-course"] = figures.fragment(course_figure(run.course, certificate.unit), "proof-course", 380)
    return fill(
        "proof.html.j2",
        certificate=certificate,
        proof=verdict.proof(run.summary),
        rows=rows(fates),
        number=info.number,
        most=DRAWN,
        thinned=any(len(group.plans) > DRAWN for group in fates),
        simulations=run.course[-1].simulations if run.course else None,
        figures={name: Markup(html) for name, html in pictures.items()},
    )
