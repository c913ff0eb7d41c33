"""Certainty of a headline: the probability that the SLO holds and 90 % intervals, or that nothing is known of them."""

from __future__ import annotations

import math

from simtune.costs.predict import Z90
from simtune.report.info import METRIC_NAMES, ms, number, percent
from simtune.results.summary import CostBasis, SloLimit, Uncertainty
from simtune.runs.schema import Summary
from simtune.tuner.doubt.slo_probability import SloProbability


def certainty(s: Summary) -> str | None:
    """Return the sentence that belongs to the headline of a run with limits; None if there are no limits, or the errors
    of step times are unknown.
    """
    if not s.slo:
        return None
    if s.uncertainty is not None:
        return _drawn(s, s.uncertainty)
    if s.slo_probability is not None:
        return " ".join(filter(None, (_stated(s, s.slo_probability), _safer(s, s.slo_probability))))
    return None if s.cost_basis is None else _not_drawn(s.cost_basis)


def _drawn(s: Summary, u: Uncertainty) -> str:
    """State what redrawn worlds show of the limits, of the nearest limit, and of the rate."""
    probability = f"P(SLO holds) is {percent(u.slo_probability)} over {u.worlds:,} redrawn worlds"
    intervals = [text for text in (_nearest_limit(s, u), _worth(s)) if text]
    return (
        f"{probability}; in {u.level * 100:.0f} % of them {' and '.join(intervals)}."
        if intervals
        else f"{probability}."
    )


def _nearest_limit(s: Summary, u: Uncertainty) -> str | None:
    """`p99 TPOT is 24.0–34.7 ms` of the limit that is used up most."""
    at = max(range(len(s.slo)), key=lambda i: _used(s, i))
    limits = u.intervals.get("slo")
    if not limits or limits[at] is None:
        return None
    return _ends(s.slo[at], *limits[at]["value_s"])


def _ends(one: SloLimit, low_s: float | None, high_s: float | None) -> str:
    low, high = ("unbounded" if x is None else ms(x) for x in (low_s, high_s))
    of_class = "" if one.request_class is None else f" of {one.request_class}"
    return f"{one.statistic} {METRIC_NAMES[one.metric]}{of_class} is {low}–{high} ms"


def _stated(s: Summary, o: SloProbability) -> str:
    """State what drawn worlds show without simulating them all: of every limit, and of the rate."""
    sentence = f"P(SLO holds) is {percent(o.probability)} ({percent(o.low)} to {percent(o.high)})"
    intervals = [_ends(slo_limit, ends.low_s, ends.high_s) for slo_limit, ends in zip(s.slo, o.limits, strict=True)]
    if o.value is not None and s.objective is not None:
        low, high = ("any number of" if x is None else number(x) for x in o.value)
        intervals.append(f"{low}–{high} {s.objective.unit} are served inside the limits")
    *most, last = intervals
    listed = f"{', '.join(most)} and {last}" if most else last
    confidence = None if s.study is None else s.study.slo.confidence
    sentence += "" if confidence is None else f", of {percent(confidence)} asked for,"
    lasting = "" if s.lifetimes is None else f" Runs last {number(s.lifetimes)} lifetimes of a request."
    return f"{sentence} over {o.worlds:,} drawn worlds; in {o.level * 100:.0f} % of them {listed}.{lasting}"


def _safer(s: Summary, o: SloProbability) -> str | None:
    """State a rate at which the plan is surer; None if it is sure, or the load is given."""
    if s.objective is None or s.offered_rate_rps is None or o.value is None or o.probability >= o.safe_probability:
        return None
    edge = "The highest rate was looked for, so it lies at the edge of the limits"
    if o.safe_rate_rps is None:
        return f"{edge}; no rate keeps them in {o.safe_probability * 100:.0f} % of these worlds."
    return (
        f"{edge}; {number(o.safe_rate_rps)} requests/s keep them in {o.safe_probability * 100:.0f} % of these worlds."
    )


def _used(s: Summary, at: int) -> float:
    value = s.slo[at].value_s
    return math.inf if value is None else value / s.slo[at].limit_s


def _worth(s: Summary) -> str | None:
    """State the interval of the rate within the limits; None unless rates were searched and the choice was judged."""
    if s.confidence is None or s.objective is None or not s.objective.unit.startswith("requests/"):
        return None
    chosen, outside = s.confidence.quantiles[0], (1 - s.confidence.level) / 2
    low, high = (number(chosen.at(level)) for level in (outside, 1 - outside))
    return f"{low}–{high} {s.objective.unit} are served inside the limits"


def _step_error(basis: CostBasis) -> tuple[float, float]:
    """Return the relative error of steps in 90 % of cases, to first order: kinds of operator err independently, each by
    one factor.
    """
    log_sd = math.hypot(*(kind.share * kind.log_sd for kind in basis.operators))
    return math.expm1(-Z90 * log_sd), math.expm1(Z90 * log_sd)


def _not_drawn(basis: CostBasis) -> str:
    low, high = _step_error(basis)
    return (
        "No worlds were drawn, so P(SLO holds) is not known; by the cost model's own errors steps may take "
        f"{percent(-low)} less to {percent(high)} more time (90 % of cases)."
    )


# --- in one line ------------------------------------------------------------------------------------------


def in_one_line(s: Summary) -> str | None:
    """Return probability, interval and gap in one line; None if a run has none of them."""
    parts = [*_probability(s), *_gap(s)]
    return "; ".join(parts) if parts else None


def _probability(s: Summary) -> list[str]:
    if not s.slo:
        return [] if s.cost_basis is None else [_steps(s.cost_basis)]
    if s.uncertainty is not None:
        parts = [f"P(SLO holds) {percent(s.uncertainty.slo_probability)}", _nearest_limit(s, s.uncertainty), _worth(s)]
        stated, level, worlds = [part for part in parts if part], s.uncertainty.level, s.uncertainty.worlds
    elif s.slo_probability is not None:
        o = s.slo_probability
        ends = f" ({percent(o.low)} to {percent(o.high)})" if o.low < o.high else ""
        stated = [f"P(SLO holds) {percent(o.probability)}{ends}"]
        if o.value is not None and s.objective is not None:
            low, high = ("any number of" if x is None else number(x) for x in o.value)
            stated.append(f"{low}–{high} {s.objective.unit}")
        level, worlds = o.level, o.worlds
    else:
        return [] if s.cost_basis is None else ["P(SLO holds) is not known", _steps(s.cost_basis)]
    if len(stated) > 1:
        stated[-1] += f" in {level * 100:.0f} % of {worlds:,} worlds"
    return stated


def _steps(basis: CostBasis) -> str:
    """State how far off the times of steps may be."""
    low, high = _step_error(basis)
    return f"steps may take {percent(-low)} less to {percent(high)} more time (90 % of cases)"


def _gap(s: Summary) -> list[str]:
    """State how much better another plan of the space could be."""
    if s.objective is None or s.objective.gap is None:
        return []
    same = s.objective.gap_on_draw
    on_same = "" if same is None else f" ({percent(same)} on the same requests)"
    better = (
        f"another plan is at most {percent(s.objective.gap)}{on_same} better"
        if s.objective.gap
        else "no plan is better"
    )
    return [f"{better} under this cost model"]
