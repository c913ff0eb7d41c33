"""Fit of a compact workload spec to a trace: the closest kind of arrivals, and the lengths."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array, Ints
from simtune.errors import UsageError
from simtune.specs.trace_media import media_note
from simtune.specs.traces import Trace
from simtune.specs.workload import (
    Arrivals,
    FixedInterval,
    FixedLength,
    Gamma,
    Piecewise,
    Poisson,
    Segment,
    Workload,
)
from simtune.workload.length_fit import fit_lengths
from simtune.workload.load import Agreement, dispersion, kolmogorov_distance, rates_over_time, shared_share
from simtune.workload.requests import RequestStream, build_stream
from simtune.workload.session_fit import arrivals_without_times, fit_sessions

WINDOWS = (1.0, 10.0, 100.0)
"""Lengths of the windows over which burstiness is compared, in mean gaps."""
GRAIN = 0.01
"""Share of the mean gap: gaps that differ by less count as equal, because times are written with a limited number of
digits."""
EVEN = 0.01
"""Dispersion below which arrivals count as those of a clock."""
LEAST_CV = 1e-3
"""Relative deviation of gaps below which they count as a clock's; the spec allows no smaller one in a gamma
distribution."""
FITS = ((0.2, "close"), (0.5, "rough"))
"""Largest error of arrivals for each verdict; beyond the last one the fit is poor."""
SEED = 0


class FittedLoad(NamedTuple):
    """A fitted spec, its agreement with the trace, the error of each kind of arrivals (0 is best), and what was
    lost."""

    workload: Workload
    agreements: tuple[Agreement, ...]
    arrivals: tuple[tuple[str, float], ...]
    lost: tuple[str, ...]

    @property
    def fit(self) -> str | None:
        """Closeness of the spec's arrivals to those of the trace: `close`, `rough` or `poor`; None if the trace has no
        times to compare with."""
        off = dict(self.arrivals).get(self.workload.arrivals.kind)
        return None if off is None else next((word for most, word in FITS if off <= most), "poor")


def fit_workload(trace: Trace, name: str, rate_rps: float | None = None) -> FittedLoad:
    """Return the spec that is nearest to a trace, judged by the load it draws.

    `rate_rps` is that of Poisson arrivals for a trace without times. Raises UsageError if neither is known.
    """
    if trace.turns is not None:
        return _fit_agents(trace, name, rate_rps)
    arrival_s, rate = trace.arrival_s, rate_rps or trace.rate_rps
    if rate is None:
        raise UsageError(f"{trace.file}: a spec needs a rate, and this trace has no arrival times; set one with --rate")
    prompt, output = fit_lengths(trace.prompt_tokens), fit_lengths(trace.output_tokens)
    timed = arrival_s is not None and trace.rate_rps is not None and len(trace) > 2
    kinds = _kinds(arrival_s, rate) if timed and arrival_s is not None else [Poisson(rate_rps=rate)]
    scored = []
    for arrivals in kinds:
        workload = Workload(
            name=name,
            source=f"fitted to {len(trace):,} requests of {trace.file} (sha256 {trace.sha256[:12]})",
            requests=len(trace),
            arrivals=arrivals,
            prompt=prompt,
            output=output,
        )
        stream = build_stream(workload, None, requests=len(trace), seed=SEED)
        distance = _distance(arrival_s, stream) if timed and arrival_s is not None else 0.0
        scored.append((distance, workload, stream))
    _, workload, stream = min(scored, key=lambda x: x[0])
    distances = tuple((w.arrivals.kind, d) for d, w, _ in scored) if timed else ()
    return FittedLoad(workload, _agreements(trace, stream), distances, _lost(trace))


def _fit_agents(trace: Trace, name: str, rate_rps: float | None) -> FittedLoad:
    """Return the spec of sessions that is nearest to a trace of agents, under the nearest kind of arrivals."""
    arrival_s, rate = trace.arrivals_s, rate_rps or trace.rate_rps
    if arrival_s is None or trace.rate_rps is None or rate is None or trace.num_arrivals < 3:
        fitted = fit_sessions(trace, name, arrivals_without_times(trace, rate), SEED)
        return FittedLoad(fitted.workload, fitted.agreements, (), fitted.lost)
    count, length = trace.num_arrivals, FixedLength(tokens=1)
    scored = []
    for arrivals in _kinds(arrival_s, rate):
        one_by_one = Workload(name=name, arrivals=arrivals, prompt=length, output=length)
        stream = build_stream(one_by_one, None, requests=count, seed=SEED)
        scored.append((_distance(arrival_s, stream), arrivals))
    fitted = fit_sessions(trace, name, min(scored, key=lambda x: x[0])[1], SEED)
    distances = tuple((arrivals.kind, distance) for distance, arrivals in scored)
    return FittedLoad(fitted.workload, fitted.agreements, distances, fitted.lost)


def _kinds(arrival_s: Array, rate_rps: float) -> list[Arrivals]:
    """Return candidate arrivals: a clock, Poisson, gamma with the burstiness of the gaps, and rates that change with
    time."""
    kinds: list[Arrivals] = [FixedInterval(rate_rps=rate_rps), Poisson(rate_rps=rate_rps)]
    gaps = np.diff(arrival_s)
    cv = float(gaps.std() / gaps.mean())
    if cv > LEAST_CV:
        kinds.append(Gamma(rate_rps=rate_rps, cv=round(cv, 3)))
    rates, width = rates_over_time(arrival_s)
    if len(rates) > 3:
        kinds.append(Piecewise(segments=tuple(Segment(for_s=width, rate_rps=float(r)) for r in rates)))
    return kinds


def _distance(arrival_s: Array, stream: RequestStream) -> float:
    """Return the distance of two patterns of arrivals: the largest difference of the distributions of gaps, averaged
    with log ratios of the dispersion of counts over windows of several lengths."""
    drawn_s = stream.arrival_s
    assert drawn_s is not None
    grain_s = GRAIN * float(np.diff(arrival_s).mean())
    unlike = [kolmogorov_distance(*(np.rint(np.diff(x) / grain_s) for x in (arrival_s, drawn_s)))]
    for window_s in _windows_s(arrival_s):
        recorded, as_drawn = dispersion(arrival_s, window_s), dispersion(drawn_s, window_s)
        if recorded is not None and as_drawn is not None:
            unlike.append(abs(math.log(max(EVEN, recorded) / max(EVEN, as_drawn))))
    return float(np.mean(unlike))


def _windows_s(arrival_s: Array) -> list[float]:
    gap_s = float(arrival_s[-1] - arrival_s[0]) / (len(arrival_s) - 1)
    return [gaps * gap_s for gaps in WINDOWS]


def _agreements(trace: Trace, stream: RequestStream) -> tuple[Agreement, ...]:
    """Return the numbers of a load, as recorded and as drawn."""
    recorded, drawn_s = trace.arrival_s, stream.arrival_s
    rows = [Agreement("requests/s", trace.rate_rps, stream.offered_rate_rps)]
    if recorded is not None and drawn_s is not None and trace.rate_rps is not None and len(trace) > 2:
        rows.append(Agreement("peak requests/s", *(float(rates_over_time(x)[0].max()) for x in (recorded, drawn_s))))
        rows.append(
            Agreement("cv of gaps", *(float(np.diff(x).std() / np.diff(x).mean()) for x in (recorded, drawn_s)))
        )
        rows.extend(
            Agreement(f"dispersion over {gaps:g} gaps", dispersion(recorded, window_s), dispersion(drawn_s, window_s))
            for gaps, window_s in zip(WINDOWS, _windows_s(recorded), strict=True)
        )
    for side in ("prompt", "output"):
        a, b = (getattr(x, f"{side}_tokens") for x in (trace, stream))
        rows.append(Agreement(f"{side} tokens, mean", float(a.mean()), float(b.mean())))
        rows.append(Agreement(f"{side} tokens, p99", float(np.quantile(a, 0.99)), float(np.quantile(b, 0.99))))
        rows.append(Agreement(f"{side} tokens, largest gap of distributions", 0.0, kolmogorov_distance(a, b)))
    return tuple(rows)


def _ranks(lengths: Ints) -> Array:
    """Return the rank of each length; equal lengths have the mean of theirs, not the order in which they came."""
    _, at, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts + 1) / 2)[at]
    return ranks


def _lost(trace: Trace) -> tuple[str, ...]:
    """Return what the trace has and a compact spec lacks."""
    lost = []
    prompt, output = _ranks(trace.prompt_tokens), _ranks(trace.output_tokens)
    varied = len(trace) > 2 and np.ptp(prompt) > 0 and np.ptp(output) > 0
    together = float(np.corrcoef(prompt, output)[0, 1]) if varied else 0.0
    if abs(together) > 0.1:
        lost.append(
            f"prompt and output lengths go together (rank correlation {together:.2f}); the spec draws them apart"
        )
    shared = shared_share(trace.hash_ids, trace.block_tokens, trace.prompt_tokens)
    if shared:
        lost.append(f"{shared:.1%} of prompt tokens were seen before; the spec shares nothing")
    if trace.session is not None:
        lost.append(f"{len(np.unique(trace.session)):,} conversations; the spec has none")
    if trace.media is not None and any(trace.media):
        lost.append(f"{media_note(trace.media)}; replay the trace itself")
    return tuple(lost)
