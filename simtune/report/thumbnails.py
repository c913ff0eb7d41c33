"""Thumbnails of runs for an index: small inline SVGs, one line each, with words for those who do not see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from simtune.report.info import ms, number
from simtune.runs.schema import Summary
from simtune.validation.judge.comparison import Validation

WIDTH, HEIGHT, MARGIN = 96, 28, 2
MOST_POINTS = 40

AxisSpan = tuple[float, float]


def e2el_span(summaries: Iterable[Summary]) -> AxisSpan | None:
    """Return the shortest and the longest E2EL of all runs that have one, in seconds: the axis of all thumbnails."""
    seconds = [x for s in summaries for x in _e2el(s)]
    return (min(seconds), max(seconds)) if seconds else None


def of_run(s: Summary, span: AxisSpan | None) -> str:
    """Return the front of a search for one, else the distribution of E2EL on the logarithmic axis `span`; empty if
    there is neither, as for a saturated run.
    """
    if s.front:
        line = sorted((p.output_tokens_per_s_per_user, p.output_tokens_per_s_per_gpu) for p in s.front)
        fastest = number(line[-1][0])
        return drawn(line, f"front of {len(line)} points, up to {fastest} tokens/s per user")
    seconds = _e2el(s)
    if not seconds or span is None:
        return ""
    levels = [i / (len(seconds) - 1) for i in range(len(seconds))]
    description = f"distribution of E2EL: median {ms(seconds[len(seconds) // 2])} ms, longest {ms(seconds[-1])} ms"
    logs = [math.log(x) for x in seconds]
    return drawn([*zip(logs, levels, strict=True)], description, (math.log(span[0]), math.log(span[1])))


def of_validation(v: Validation) -> str:
    """Draw every latency as a dot, predicted over measured, on one logarithmic scale with the line on which they are
    equal; empty if no latency has both.
    """
    pairs = [
        (math.log(c.measured), math.log(c.predicted))
        for load in v.loads
        for c in load.comparisons
        if c.unit == "s" and c.measured and c.predicted
    ]
    if not pairs:
        return ""
    ends = [x for pair in pairs for x in pair]
    low, high = min(ends), max(ends)
    dots = "".join(
        f'<circle cx="{_place(x, low, high, WIDTH):.1f}" cy="{HEIGHT - _place(y, low, high, HEIGHT):.1f}" r="1.5"/>'
        for x, y in pairs[:: math.ceil(len(pairs) / MOST_POINTS)]
    )
    description = f"predicted over measured: {len(pairs)} {'latency' if len(pairs) == 1 else 'latencies'}"
    line = f"{MARGIN},{HEIGHT - MARGIN} {WIDTH - MARGIN},{MARGIN}"
    return _svg(f'<polyline class="equal" points="{line}"/>{dots}', description)


def drawn(points: Sequence[tuple[float, float]], said: str, span: AxisSpan | None = None) -> str:
    """A line through these points, which fill the height, and the width unless a span of x is given."""
    every = math.ceil(len(points) / MOST_POINTS)
    thinned = [*points[:-1:every], points[-1]]
    x0, x1 = span or (min(x for x, _ in points), max(x for x, _ in points))
    y0, y1 = min(y for _, y in points), max(y for _, y in points)
    places = " ".join(f"{_place(x, x0, x1, WIDTH):.1f},{HEIGHT - _place(y, y0, y1, HEIGHT):.1f}" for x, y in thinned)
    return _svg(f'<polyline points="{places}"/>', said)


def _svg(inside: str, said: str) -> str:
    words = escape(said)
    return (
        f'<svg class="thumbnail" role="img" aria-label="{words}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"><title>{words}</title>{inside}</svg>'
    )


def _place(x: float, low: float, high: float, room: int) -> float:
    """Return the position on an axis of `room` pixels; the middle if all values are equal."""
    share = (x - low) / (high - low) if high > low else 0.5
    return MARGIN + share * (room - 2 * MARGIN)


def _e2el(s: Summary) -> tuple[float, ...]:
    """Return E2EL in seconds at evenly spaced levels; empty for a saturated run, whose E2EL shows only its length."""
    seconds = () if s.saturated or s.quantiles is None else s.quantiles.e2el_s
    return seconds if len(seconds) > 1 and seconds[0] > 0 else ()
