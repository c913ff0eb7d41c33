"""The page of `simtune workload`: the facts of a trace, and how well a spec reproduces it."""

from __future__ import annotations

from collections.abc import Sequence

from simtune import __version__
from simtune.report import figures
from simtune.report.info import number, percent
from simtune.report.templates import fill, template
from simtune.specs.trace_cut import in_words
from simtune.workload.load import LengthFacts, LoadFacts
from simtune.workload.load_fit import FittedLoad


def load_rows(load: LoadFacts) -> list[tuple[str, str]]:
    """Return the facts of a load in words: (what, how much)."""
    rows = [("requests", number(load.requests))]
    unit = "requests" if load.arrivals is None else "arrivals"
    if load.span_s is not None and load.rate_rps is not None:
        rows.append(("over", in_words(load.span_s)))
        rows.append(("mean rate", f"{number(load.rate_rps)} {unit}/s"))
    if load.peak_rps is not None and load.bin_s is not None:
        rows.append(("busiest", f"{number(load.peak_rps)} {unit}/s in {in_words(load.bin_s)}"))
    if load.gap_cv is not None:
        rows.append(("burstiness", f"gaps vary by {number(load.gap_cv)} of their mean (1 is Poisson)"))
    if load.users is not None:
        rows.append(("closed loop", f"{number(load.users)} users"))
    if load.max_in_flight is not None:
        rows.append(("under way", f"{number(load.max_in_flight)} requests at most; others are held back"))
    for title, lengths in (("prompt tokens", load.prompt_tokens), ("output tokens", load.output_tokens)):
        rows.append((title, _lengths(lengths)))
    if load.shared_prompt_share is not None:
        rows.append(
            ("seen before", f"{percent(load.shared_prompt_share)} of prompt tokens, by an endless prefix cache")
        )
    if load.sessions is not None:
        rows.append(("conversations", f"{number(load.sessions)}, {number(load.requests / load.sessions)} turns each"))
    return rows


def _lengths(lengths: LengthFacts) -> str:
    parts = (("mean", lengths.mean), ("p50", lengths.p50), ("p90", lengths.p90), ("p99", lengths.p99))
    return ", ".join(f"{label} {value:,.0f}" for label, value in (*parts, ("max", lengths.max)))


def agreement_rows(fitted: FittedLoad) -> list[tuple[str, str, str]]:
    """(what, recorded, drawn) of every number compared."""
    return [(a.what, number(a.recorded), number(a.drawn)) for a in fitted.agreements]


def load_figures(load: LoadFacts) -> dict[str, str]:
    """Return HTML by figure name: rates over time, and the two histograms."""
    pictures = {
        "load-prompt": figures.lengths_figure(load.prompt_tokens, "prompt tokens"),
        "load-output": figures.lengths_figure(load.output_tokens, "output tokens", 1),
    }
    if load.rates_rps:
        pictures = {"load-rates": figures.rates_figure(load), **pictures}
    return {name: figures.fragment(figure, name, 260) for name, figure in pictures.items()}


def render(name: str, load: LoadFacts, notes: Sequence[str], fitted: FittedLoad | None) -> str:
    """The page; the same bytes for the same load."""
    from markupsafe import Markup

    return fill(
        "load.html.j2",
        title=name,
        rows=load_rows(load),
        notes=notes,
        fitted=fitted,
        agreements=agreement_rows(fitted) if fitted else (),
        number=number,
        version=__version__,
        figures={name: Markup(html) for name, html in load_figures(load).items()},
        style=Markup(template("style.j2")),
        plotly_js=Markup(figures.plotly_js()),
    )
