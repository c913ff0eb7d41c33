"""The page of a hardware profile: its fits, beside the data sheet, and their errors.

As in the report, small tuples are computed first and drawn after. No row of a table is in a profile, so none is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from simtune import __version__
from simtune.costs import calibration
from simtune.costs.accuracy_record import accuracy_record, base_name
from simtune.costs.operators import OPERATORS, Chip
from simtune.costs.predict import LEVEL, OUTSIDE, Z90, Predictor, typical_log_sd
from simtune.costs.releases import release_profiles
from simtune.costs.software import engine_of, release_text
from simtune.errors import plural
from simtune.report import figures, info
from simtune.report.figures import Figure
from simtune.report.labels import briefs, escape
from simtune.report.templates import fill, template
from simtune.specs.hardware import Hardware, Link, Operator, OperatorKind

POINTS = 49

_EXCHANGE = {"row_bytes": 14336.0, "experts_per_token": 8, "experts": 256, "ep": 8, "nodes": 1}

SLICES: dict[OperatorKind, tuple[str, tuple[dict[str, float], ...]]] = {
    "gemm": ("m", ({"n": 4096, "k": 4096}, {"n": 28672, "k": 8192})),
    "prefill_attention": ("tokens", ({"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128},)),
    "decode_attention": (
        "context",
        tuple({"batch": b, "heads": 32, "kv_heads": 8, "head_dim": 128} for b in (1.0, 64.0)),
    ),
    "mla_context_block": ("tokens", ({"batch": 1, "heads": 16},)),
    "dsa_context_block": ("tokens", ({"batch": 1, "heads": 16},)),
    "moe": (
        "tokens",
        ({"hidden": 4096, "intermediate": 14336, "experts_per_token": 2, "experts": 8, "ep": 1, "skew": 0},),
    ),
    "elementwise": ("rows", ({"width": 8192}, {"width": 24576})),
    "all_reduce": ("bytes", tuple({"devices": n} for n in (2.0, 4.0, 8.0))),
    "all_gather": ("bytes", tuple({"devices": n} for n in (2.0, 4.0, 8.0))),
    "reduce_scatter": ("bytes", tuple({"devices": n} for n in (2.0, 4.0, 8.0))),
    "all_to_all": ("bytes", tuple({"devices": n} for n in (2.0, 4.0, 8.0))),
    "moe_dispatch": ("tokens", (_EXCHANGE,)),
    "moe_combine": ("tokens", (_EXCHANGE,)),
}
"""Along which shape parameter a kind is drawn, and at which values of the others, moved into the measured box."""

_FOLLOWS = {
    "prefill_attention": {"context": "tokens", "window": "tokens"},
    "decode_attention": {"window": "context"},
    "mla_context_block": {"context": "tokens"},
    "dsa_context_block": {"context": "tokens"},
}
"""Whole prompts, and no sliding window."""


class Line(NamedTuple):
    """Predicted seconds along one line of shapes inside the measured box, with the 90 % interval."""

    label: str
    x: tuple[float, ...]
    seconds: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class Fit(NamedTuple):
    """An operator as the page shows it."""

    key: str
    along: str
    lines: tuple[Line, ...]
    row: tuple[str, ...]
    note: str


class Section(NamedTuple):
    """Something to put before the fits: a figure, a table, or both."""

    title: str
    words: str
    figure: Figure | None
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def headline(hardware: Hardware) -> str:
    """Return a sentence on the origin of the operators."""
    counts: dict[str, int] = {}
    for operator in hardware.operators.values():
        counts[operator.origin] = counts.get(operator.origin, 0) + 1
    words = {
        "measured": "measured by simtune",
        "published-tables": "fitted to published tables",
        "transferred": "scaled by its data sheet from those of another device",
        "other-engine": "of another engine's kernels",
        "data-sheet": "taken from its data sheet",
        "assumed": "assumed",
    }
    parts = [f"{count} operators {words[kind]}" for kind, count in sorted(counts.items())]
    return f"{hardware.device.name}: {', '.join(parts)}"


class KernelRate(NamedTuple):
    """A fitted rate over that of the data sheet; None if the operator has none."""

    key: str
    flops: float | None
    bytes: float | None


def fits(hardware: Hardware) -> list[Fit]:
    """Return for every operator the lines to draw, the row of the table, and a note on its tables."""
    return [_fit(hardware, key, operator) for key, operator in hardware.operators.items()]


def _fit(hardware: Hardware, key: str, operator: Operator) -> Fit:
    predictor = Predictor(operator, hardware.device.processors, hardware.arrays, Chip.of(hardware.device))
    along, slices = SLICES.get(operator.kind, (_widest(operator), ({},)))
    lines = tuple(dict.fromkeys(_line(predictor, operator, along, fixed) for fixed in slices))
    base, p = operator.base, operator.provenance
    row = (
        key,
        _tera(base.flops_per_s) if OPERATORS[operator.kind].computes else "-",
        f"{base.bytes_per_s / 1e12:.2f}",
        f"{1e6 * base.overhead_s:.1f}",
        f"× or ÷ {np.exp(Z90 * typical_log_sd(operator)):.2f}",
        "-" if operator.interval is None or operator.interval.coverage is None else f"{operator.interval.coverage:.0%}",
        f"{p.points or 0:,}",
        operator.origin,
    )
    return Fit(key, along, lines, row, f"{p.source} ({p.licence or 'own'}). {p.note or ''}")


def _widest(operator: Operator) -> str:
    """The shape parameter whose box spans the most."""
    return max(OPERATORS[operator.kind].shape, key=lambda n: _box(operator, n)[1] / max(_box(operator, n)[0], 1e-9))


def _box(operator: Operator, name: str) -> tuple[float, float]:
    low, high = operator.box.get(name, (1.0, 1024.0))
    return low, high


def _line(predictor: Predictor, operator: Operator, along: str, fixed: dict[str, float]) -> Line:
    low, high = _box(operator, along)
    x = np.unique(np.round(np.geomspace(max(low, 1), max(high, 2), POINTS)))
    follows = _FOLLOWS.get(operator.kind, {})
    shape: dict[str, Any] = {}
    label = []
    for name in OPERATORS[operator.kind].shape:
        if name == along or name in follows:
            shape[name] = x
            continue
        smallest, largest = _box(operator, name)
        middle = fixed.get(name, round(float(np.sqrt(max(smallest, 1e-9) * max(largest, 1e-9)))))
        value = float(np.clip(middle, smallest, largest))
        shape[name] = np.full(len(x), value)
        if smallest < largest:
            label.append(f"{name} {value:,.6g}")
    seconds = predictor.seconds(**shape)
    below, above = predictor.interval(level=LEVEL, **shape)
    return Line(", ".join(label), *(tuple(v.tolist()) for v in (x, seconds, below, above)))


def rates(hardware: Hardware) -> list[KernelRate]:
    """Return the fitted rates as shares of the data sheet's rates. Collectives are judged by the link inside a node."""
    shares = []
    for key, operator in hardware.operators.items():
        terms, device = OPERATORS[operator.kind], hardware.device
        sheet: float | None = device.memory_bytes_per_s
        if terms.link:
            sheet = hardware.links["intra_node"].bytes_per_s if "intra_node" in hardware.links else None
        peak = device.flops_per_s.get("bf16" if operator.dtype == "int4" else operator.dtype)
        shares.append(
            KernelRate(
                key,
                operator.base.flops_per_s / peak if terms.computes and peak else None,
                operator.base.bytes_per_s / sheet if sheet else None,
            )
        )
    return shares


def facts(hardware: Hardware) -> list[tuple[str, str]]:
    """The device's data sheet in words."""
    d = hardware.device
    rows = [
        ("kernels of", _kernels(hardware)),
        *_further_releases(hardware),
        ("architecture", d.architecture or "-"),
        ("memory an engine sees", f"{info.gib(d.memory_bytes)}, {d.memory_bytes_per_s / 1e12:.3g} TB/s"),
        ("processors", f"{d.processors:,}"),
        ("dense peak, TFLOP/s", ", ".join(f"{dtype} {_tera(rate)}" for dtype, rate in d.flops_per_s.items())),
        ("source", d.source),
    ]
    rows += [(f"link {name}", _link(link)) for name, link in hardware.links.items()]
    if d.price_per_hour_usd is not None:
        rows.append(("price per hour", f"{d.price_per_hour_usd:.2f} USD ({d.price_source})"))
    host = hardware.host
    words = f"{1e3 * host.step_s:.2f} ms a step + {1e6 * host.per_sequence_s:.1f} us a sequence; {host.provenance.kind}"
    rows.append(("host", f"{words} ({host.provenance.source}; {host.provenance.note or 'no note'})"))
    if hardware.calibration is not None:
        rows.append(("corrected by an engine's own log", calibration.words(hardware.calibration)))
    rows += [("validated", str(note)) for note in hardware.validations or ()] or [("validated", "never")]
    rows += [
        ("published runs", f"{group}: {accuracy.words}")
        for group, accuracy in accuracy_record().of_card(base_name(hardware.name))
    ] or [("published runs", "none of this card")]
    return rows


def _kernels(hardware: Hardware) -> str:
    """The engine of the profile, and how many operators are another's."""
    foreign = [operator.other_engine for operator in hardware.operators.values() if operator.other_engine is not None]
    if not foreign:
        return hardware.engine
    counted = ", ".join(f"{plural(foreign.count(name), 'operator')} of {name}" for name in sorted(set(foreign)))
    return f"{hardware.engine}; kernels of another engine, in wider intervals: {counted}"


def _further_releases(hardware: Hardware) -> list[tuple[str, str]]:
    """Return a row on the profiles with kernels of further releases of the same engine, if there are any."""
    family = engine_of(hardware.engine)
    further = [] if family is None else release_profiles(hardware.name, family)
    if not further:
        return []
    operators = [operator for profile in further for operator in profile.operators.values()]
    releases = Counter(release_text(operator.provenance.software) for operator in operators)
    counted = ", ".join(f"{plural(count, 'operator')} of {release}" for release, count in sorted(releases.items()))
    rule = "a plan gets of each operator the release nearest to its engine's, in a wider interval where it is another"
    return [("and by release", f"{counted}; {rule}")]


def _link(link: Link) -> str:
    stated = ", stated: outranks measured collectives" if "bytes_per_s" in (link.stated or ()) else ""
    return f"{link.bytes_per_s / 1e9:,.0f} GB/s{stated} ({link.source})"


def _tera(rate: float) -> str:
    """Return a rate in units of 1e12, with two digits at least."""
    return f"{rate / 1e12:,.0f}" if rate >= 1e13 else f"{rate / 1e12:.2g}"


def line_figure(fit: Fit) -> Figure:
    """Time against size, each line within its band."""
    data: list[Figure] = []
    for i, line in enumerate(fit.lines):
        colour = figures.series_colour(i)
        band = {"x": line.x, "mode": "lines", "hoverinfo": "skip", "showlegend": False, "line": {"width": 0}}
        data += [
            {**band, "y": _us(line.low)},
            {**band, "y": _us(line.high), "fill": "tonexty", "fillcolor": colour + "33"},
            {
                "x": line.x,
                "y": _us(line.seconds),
                "name": escape(line.label),
                "mode": "lines",
                "line": {"color": colour, "width": 2},
                "hovertemplate": f"%{{x:,}} {escape(fit.along)}: %{{y:,.4g}} us<extra></extra>",
            },
        ]
    sizes = figures.axis(fit.along, type="log", dtick=1, tickformat="~s" if fit.along == "bytes" else ",")
    axes = (sizes, figures.axis("time, us", type="log", dtick=1))
    return {"data": data, "layout": figures.layout(*axes, showlegend=len(fit.lines) > 1)}


def _us(seconds: Sequence[float]) -> list[float]:
    return [float(f"{1e6 * s:.5g}") for s in seconds]


def rate_figure(rates: Sequence[KernelRate]) -> Figure:
    """Figure of fitted rates as shares of the data sheet."""
    from_bottom = list(reversed(rates))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [escape(r.key) for r in from_bottom],
            "x": [None if value is None else round(100 * value, 1) for value in values],
            "name": name,
            "marker": {"color": colour},
            "hovertemplate": "%{y}: %{x:.0f} %<extra></extra>",
        }
        for name, values, colour in (
            ("memory or link rate", [r.bytes for r in from_bottom], figures.COLOURS[0]),
            ("flops", [r.flops for r in from_bottom], figures.COLOURS[1]),
        )
    ]
    line = {"type": "line", "xref": "x", "yref": "paper", "x0": 100, "x1": 100, "y0": 0, "y1": 1}
    shapes = [{**line, "line": {"color": figures.GREY, "dash": "dot"}}]
    x = figures.axis("% of the data sheet", rangemode="tozero")
    y = figures.axis("", tickformat="", tickfont=SMALL)
    return {"data": data, "layout": figures.layout(x, y, barmode="group", shapes=shapes, legend=_legend_above())}


SMALL = {"size": 9}
"""Font that leaves room on a phone beside the names of operators."""
ABOVE = 56
"""Characters of such a name above its row."""
SHOWN = (1, 10, 100)
"""Ticks of errors that have a number, as many as there is room for on a phone."""


def error_figure(hardware: Hardware) -> Figure | None:
    """Figure of median and p90 of every hold-out; None if no operator has one."""
    rows = [(key, h) for key, o in hardware.operators.items() for h in o.hold_out]
    if not rows:
        return None
    # Plotly draws categories from the bottom up.
    rows.reverse()
    names = [escape(f"{key}: {h.split}") for key, h in rows]
    data = [
        {
            "y": names,
            "x": [round(100 * getattr(h, field), 2) for _, h in rows],
            "name": name,
            "mode": "markers",
            "marker": {"color": figures.COLOURS[i], "size": 9, "symbol": symbol},
            "hovertemplate": f"%{{y}}: {name} %{{x:.1f}} %<extra></extra>",
        }
        for i, (field, name, symbol) in enumerate(
            (("median", "median", "circle"), ("p90", "90th percentile", "diamond"))
        )
    ]
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
    x = figures.axis(
        "error on unseen rows, %",
        type="log",
        tickvals=ticks,
        ticktext=[f"{t:g}" if t in SHOWN else "" for t in ticks],
    )
    titles = [f"{key}: {h.split}" for key, h in rows]
    labels = briefs(titles, ABOVE)
    # Names above their rows: beside them they would leave no room on a phone.
    y = figures.axis(
        "", tickformat="", type="category", ticklabelposition="inside top", ticklabelshift=-2, ticks="", tickfont=SMALL,
        tickvals=names, ticktext=[labels[title] for title in titles],
    )  # fmt: skip
    return {"data": data, "layout": figures.layout(x, y, legend=_legend_above())}


def _legend_above() -> Figure:
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.01, "yanchor": "bottom"}


def render(hardware: Hardware, sections: Sequence[Section] = ()) -> str:
    """Return a page that opens offline, with the same bytes for the same profile; `sections` come before the fits."""
    from markupsafe import Markup

    operator_fits, errors = fits(hardware), error_figure(hardware)
    pictures = {f"fit-{i}": figures.fragment(line_figure(f), f"fit-{i}", 300) for i, f in enumerate(operator_fits)}
    pictures["rates"] = figures.fragment(rate_figure(rates(hardware)), "rates", 120 + 30 * len(operator_fits))
    for i, section in enumerate(sections):
        if section.figure is not None:
            # On a phone the legend has a line for each series.
            height = 340 + 24 * max(3, len(section.figure["data"]))
            pictures[f"section-{i}"] = figures.fragment(section.figure, f"section-{i}", height)
    if errors is not None:
        splits = sum(len(o.hold_out) for o in hardware.operators.values())
        pictures["errors"] = figures.fragment(errors, "errors", 120 + 30 * splits)
    return fill(
        "hardware.html.j2",
        style=Markup(template("style.j2")),
        hardware=hardware,
        headline=headline(hardware),
        facts=facts(hardware),
        fits=operator_fits,
        sections=sections,
        kinds=sorted({o.origin for o in hardware.operators.values()}),
        outside=OUTSIDE,
        version=__version__,
        figures={name: Markup(html) for name, html in pictures.items()},
        plotly_js=Markup(figures.plotly_js()),
    )
