"""Fit of a workload spec to a vLLM server's Prometheus metrics: rates between scrapes, lengths from histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from simtune.errors import UsageError
from simtune.specs.scrapes import OUTPUT, PROMPT, TOTALS, TPOT, TTFT, BetweenScrapes, Histogram, Scrape, intervals
from simtune.specs.workload import Arrivals, Piecewise, Poisson, Quantiles, Segment, Workload
from simtune.workload.load import Agreement
from simtune.workload.requests import build_stream

LEAST = 8
"""Mean number of requests between two scrapes from which each interval gets a rate of its own."""
DRAWN = 8000
SEED = 0
APART = 0.05
"""Share by which tokens of ended requests may differ from all tokens before a note is made."""
STATISTICS = (("mean", None), ("p50", 0.5), ("p99", 0.99))


class ScrapedLoad(NamedTuple):
    """A spec, its numbers beside the server's own, the latencies that users saw, and notes for the reader."""

    workload: Workload
    agreements: tuple[Agreement, ...]
    latencies: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Mean, p50 and p99 of each metric, in seconds."""
    notes: tuple[str, ...]


def fit_scrapes(
    scrapes: Sequence[Scrape], name: str, *, span_s: float | None = None, rate_rps: float | None = None
) -> ScrapedLoad:
    """Return the load that one server had between its first and last scrape, or up to its only one.

    `span_s` is the time over which it came, if the scrapes do not state it; `rate_rps` replaces the rate.
    Raises UsageError if no rate follows, or there was no request.
    """
    pieces = intervals(scrapes)
    prompt, output = (_added(pieces, metric) for metric in (PROMPT, OUTPUT))
    files = " ".join(scrape.file for scrape in scrapes)
    if not (prompt.count and output.count):
        raise UsageError(f"{files}: no request ended between these scrapes")
    seconds = span_s if span_s is not None else _seconds(pieces)
    if seconds is None and rate_rps is None:
        span_name = "since the server began" if len(scrapes) == 1 else "between the first and the last scrape"
        raise UsageError(
            f"{files}: the duration is not stated; give the time {span_name} with --span 30m, or set --rate"
        )
    arrivals = _arrivals(pieces, prompt.count, seconds, rate_rps, timed=span_s is None)
    workload = Workload(
        name=name,
        source=f"scraped from vLLM: {prompt.count:,.0f} requests of {files}",
        requests=max(1, min(DRAWN, round(prompt.count))),
        arrivals=arrivals,
        prompt=_lengths(prompt),
        output=_lengths(output),
    )
    rate = None if seconds is None else prompt.count / seconds
    latencies = tuple(
        (label, _seen(_added(pieces, metric)))
        for label, metric in (("TTFT", TTFT), ("TPOT", next((x for x in TPOT if _in_all(pieces, x)), TPOT[0])))
        if _in_all(pieces, metric)
    )
    return ScrapedLoad(
        workload, _agreements(workload, rate, prompt, output), latencies, _notes(scrapes, pieces, prompt)
    )


def _in_all(pieces: Sequence[BetweenScrapes], metric: str) -> bool:
    return all(metric in piece.histograms for piece in pieces)


def _added(pieces: Sequence[BetweenScrapes], metric: str) -> Histogram:
    def plus(a: Histogram, b: Histogram) -> Histogram:
        return Histogram(a.edges, tuple(x + y for x, y in zip(a.below, b.below, strict=True)), a.total + b.total)

    return reduce(plus, [piece.histograms[metric] for piece in pieces])


def _seconds(pieces: Sequence[BetweenScrapes]) -> float | None:
    seconds = [piece.seconds for piece in pieces if piece.seconds is not None]
    return sum(seconds) if len(seconds) == len(pieces) and sum(seconds) > 0 else None


def _arrivals(
    pieces: Sequence[BetweenScrapes], count: float, seconds: float | None, rate_rps: float | None, *, timed: bool
) -> Arrivals:
    """Return Poisson arrivals, at a rate per interval if there are several with enough requests."""
    if rate_rps is not None or seconds is None:
        return Poisson(rate_rps=rate_rps or 1.0)
    timed_counts = [(p.seconds, p.histograms[PROMPT].count) for p in pieces if p.seconds]
    if timed and len(timed_counts) == len(pieces) > 1 and count >= LEAST * len(timed_counts):
        return Piecewise(segments=tuple(Segment(for_s=s, rate_rps=n / s) for s, n in timed_counts))
    return Poisson(rate_rps=count / seconds)


def _lengths(histogram: Histogram) -> Quantiles:
    """Return the distribution whose quantiles at the edges of buckets are the histogram's, with its mean: each bucket
    has a knot in its middle, at the same share of the width of all. Between the edges 5 and 10 are 6 to 10 tokens."""
    cells, before, low = [], 0.0, 0.0
    for edge, below in zip(histogram.edges, histogram.below, strict=True):
        high = low if math.isinf(edge) else edge
        if below > before:
            cells.append((before / histogram.count, below / histogram.count, max(1.0, low + 0.5), high + 0.5))
        before, low = below, high
    flat = sum((b - a) * low for a, b, low, _ in cells)
    width = sum((b - a) * (high - low) for a, b, low, high in cells)
    mean = histogram.mean or 0.0
    # The distribution below has the mean flat + (tilt / 2 + 1 / 4) * width; solve that for tilt.
    tilt = min(1.0, max(0.0, 2 * ((mean - flat) / width - 0.25))) if width else 0.5
    knots = [(0.0, cells[0][2])]
    for a, b, low, high in cells:
        knots += [((a + b) / 2, low + tilt * (high - low)), (b, high)]
    levels, tokens = zip(*knots, strict=True)
    return Quantiles(levels=(*levels[:-1], 1.0), tokens=tokens)


def _seen(histogram: Histogram) -> tuple[float | None, ...]:
    return tuple(histogram.mean if level is None else histogram.quantile(level) for _, level in STATISTICS)


def _agreements(workload: Workload, rate: float | None, prompt: Histogram, output: Histogram) -> tuple[Agreement, ...]:
    """Return the numbers that the server counted, beside those that the spec draws."""
    stream = build_stream(workload, None, requests=DRAWN, seed=SEED)
    rows = [Agreement("requests/s", rate, stream.offered_rate_rps)]
    for side, histogram in (("prompt", prompt), ("output", output)):
        tokens = getattr(stream, f"{side}_tokens")
        rows.append(Agreement(f"{side} tokens, mean", histogram.mean, float(tokens.mean())))
        for edge, below in _inner(histogram):
            rows.append(Agreement(f"{side} tokens, share up to {edge:,.0f}", below, float((tokens <= edge).mean())))
    return tuple(rows)


def _inner(histogram: Histogram) -> list[tuple[float, float]]:
    """Return (edge, share of requests up to it) near the quartiles and at the tail."""
    shares = [(e, b / histogram.count) for e, b in zip(histogram.edges, histogram.below, strict=True) if e < math.inf]
    near = {min(shares, key=lambda x: abs(x[1] - level)) for level in (0.25, 0.5, 0.75, 0.99)}
    return sorted(near)


def _notes(scrapes: Sequence[Scrape], pieces: Sequence[BetweenScrapes], prompt: Histogram) -> tuple[str, ...]:
    notes = [f"read as {'a scrape' if len(scrapes) == 1 else f'{len(scrapes)} scrapes'} of vLLM: rates are of answers"]
    models = list(dict.fromkeys(model for scrape in scrapes for model in scrape.models))
    if len(models) > 1:
        notes.append(f"{len(models)} models are added up: {', '.join(models)}")
    if anew := sum(piece.anew for piece in pieces):
        notes.append(f"the server began anew {anew} times: what came between the scrape before and then is missing")
    if beyond := prompt.count - prompt.below[-2]:
        notes.append(f"{beyond:,.0f} prompts are longer than the last bucket, and are taken to be as long as it")
    for metric, total in TOTALS.items():
        counted, ended = scrapes[-1].totals.get(total), scrapes[-1].histograms[metric].total
        if counted is not None and ended and abs(counted / ended - 1) > APART:
            notes.append(f"{total} is {counted:,.0f}, and requests that ended had {ended:,.0f}: not all of them ended")
    return tuple(notes)
