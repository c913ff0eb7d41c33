"""Estimate P(SLO met) for the chosen plan, reusing the sweep of rates that the report simulates anyway.

A world in which everything takes e^u times as long is the predicted one played more slowly: at a rate r it does what
the predicted one does at e^u r, and each of its latencies is e^u times as long. So if rates are searched, the sweep of
rates around the chosen one (`simtune.tuner.search.rate_sweep`) gives the latencies as steps take longer or less, and
little more is simulated. If the load is given, a few worlds are simulated in which all operators take e^u times as
long. Between such knots logarithms of latencies are interpolated.

In a drawn world (`simtune.sim.drawn_worlds`) each kind of operator is off by an error of its own. For a metric it
counts as the world that is stretched by

    u = log sum_k w_k exp(s_k z_k)

w_k the share of kind k in the steps that the metric is made of: those that decode, each as often as it decodes
requests, for TPOT; those with prompt tokens for TTFT; both for E2EL and families. Time that is neither kernel nor
collective has its share, and no error. Two worlds with the same sum may differ in which kinds take longer, and then in
their latencies; this doubt is stated with the probability, and so is that of the interpolation. The estimate is
compared with a simulation of every world by `benchmarks/tuner/test_slo_probability.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from pydantic import Field

from simtune.arrays import Array
from simtune.costs.basis import KindBasis
from simtune.costs.iteration import REDRAWN_KINDS
from simtune.results.outcome import SampledStep
from simtune.results.result import Result, statistic_of
from simtune.results.summary import SimulationSummary, SloLimit
from simtune.sim.deployment import Deployment
from simtune.sim.drawn_worlds import Blueprint, DrawnWorlds, PerturbedWorld, widest
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.run_basis import timed_steps
from simtune.sim.uncertainty import LEVEL, interval
from simtune.specs.base import Count, NonNegative, Positive, Record, Seq, Share
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.tuner.doubt.draw_spread import CAPACITY
from simtune.tuner.objectives import RateObjective
from simtune.tuner.question import SAMPLED_CORES
from simtune.tuner.search.rate_sweep import RateSweep
from simtune.tuner.trial import Tuned
from simtune.workload.requests import RequestStream

WORLDS = 200
"""Number of worlds that are drawn; they are not simulated."""
SAFE = 0.9
"""Share of worlds in which the SLO holds at the safer rate."""
RANK = 0.1
"""Share of the spread of worlds by which a world may behave as if it were longer or shorter than its sum."""
BETWEEN = 0.15
"""Share of the distance between two knots by which the place at which a limit is reached between them may be off."""
_ENDLESS = math.log(1e3)
"""Logarithm of the factor on the rate beyond which limits count as kept at any rate: short simulations show no end."""
_LARGEST = 1e24
"""Largest value that a record takes; more is unbounded."""
_FLAT = 1e-9
"""Slope below which a latency counts as constant while everything takes longer."""
ONE_INSTANCE = 1
"""Cores to simulate if instances do not disturb each other: only the change of latencies is needed, not their
values."""


class LimitInterval(Record):
    """Interval of a limited latency over the worlds, in the order of `slo`."""

    low_s: NonNegative | None = Field(description="null is unbounded")
    high_s: NonNegative | None = Field(description="null is unbounded")


class SloProbability(Record):
    """Probability that the chosen plan keeps its SLO if operators are off, estimated without simulating every world."""

    worlds: Count = Field(description="drawn")
    simulations: int = Field(ge=0, description="done for this alone")
    level: Share = Field(description="share of worlds that the intervals hold")
    probability: Share = Field(description="that all limits hold")
    low: Share = Field(description="simulating all of these worlds would hardly find less")
    high: Share = Field(description="nor more")
    limits: Seq[LimitInterval]
    value: Seq[NonNegative | None] | None = Field(
        description="[low, high] of the objective where rates are searched: the highest rate within the SLO"
    )
    safe_probability: Share = Field(description="of the SLO at safe_rate_rps, where it is as low as it may be")
    safe_rate_rps: Positive | None = Field(description="null where the load is given, or no rate is that safe")


# --- how latencies change as everything takes longer ------------------------------------------------------


@dataclass(frozen=True)
class StretchCurve:
    """A limited latency over the logarithm u of the factor on all times: logarithms at knots, inf if requests pile
    up."""

    stretch: Array
    latency: Array

    @classmethod
    def of(cls, knots: Mapping[float, float]) -> StretchCurve:
        """Return the curve through latencies in seconds by u.

        Noise that makes latencies fall is smoothed away, since more time is no gain. A knot at which requests seem to
        pile up, as a short run may show, is dropped if they do not at a larger u.
        """
        last = max((u for u, seconds in knots.items() if math.isfinite(seconds)), default=math.inf)
        at = [u for u in sorted(knots) if u >= last or math.isfinite(knots[u])]
        seconds = np.maximum.accumulate([knots[u] for u in at])
        return cls(np.array(at), np.log(np.maximum(seconds, 1e-12)))

    def at(self, u: Array) -> Array:
        """Return logarithms of latencies; above the knots extrapolated from the last two, below them in proportion."""
        x, y, end = self._known()
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 1.0
        inside = np.interp(u, x, y)
        beyond = np.where(u < x[0], y[0] + u - x[0], np.where(u > x[-1], y[-1] + slope * (u - x[-1]), inside))
        return np.where(u > end, np.inf, beyond)

    def reached(self, limit: Array, less: float = 0.0) -> Array:
        """Return the largest u at which the latency over e^(less u) is within a limit, given by its logarithm.

        Beyond the knots it is extrapolated as in `at`.
        """
        x, y, end = self._known()
        y = np.maximum.accumulate(y - less * x) + 1e-12 * np.arange(len(y))
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 1.0 - less
        after = np.minimum(end, x[-1] + (limit - y[-1]) / slope) if slope > _FLAT else end
        before = x[0] + (limit - y[0]) / (1.0 - less) if less < 1.0 else -np.inf
        return np.where(limit < y[0], before, np.where(limit >= y[-1], after, np.interp(limit, y, x)))

    def gap(self, u: float) -> float:
        """Return the distance between the knots on both sides of u."""
        at = int(np.clip(np.searchsorted(self.stretch, u), 1, len(self.stretch) - 1))
        return float(self.stretch[at] - self.stretch[at - 1]) if len(self.stretch) > 1 else 0.0

    def with_knot(self, u: float, log_latency: float) -> StretchCurve:
        """Return the curve with one more knot, at which the latency is known to be at least this long."""
        if float(self.at(np.array(u))) >= log_latency:
            return self
        before = self.stretch < u
        x = np.concatenate([self.stretch[before], [u], self.stretch[~before & (self.stretch > u)]])
        y = np.concatenate([self.latency[before], [log_latency], self.latency[~before & (self.stretch > u)]])
        return StretchCurve(x, np.maximum.accumulate(y))

    def _known(self) -> tuple[Array, Array, float]:
        """Return the knots and latencies that are finite, and the u from which requests pile up.

        The latter is half way to the first knot at which they do; infinite if there is none.
        """
        finite = np.isfinite(self.latency)
        x, y = self.stretch[finite], self.latency[finite]
        return x, y, math.inf if finite.all() else float(x[-1] + self.stretch[~finite][0]) / 2


# --- how long worlds are ----------------------------------------------------------------------------------

_MADE_OF: dict[str, Callable[[SampledStep], float]] = {
    "ttft": lambda step: float(bool(step.chunks)),
    "tpot": lambda step: float(step.num_decodes),
    "e2el": lambda step: float(step.num_decodes + len(step.chunks)),
    "family": lambda step: float(step.num_decodes + len(step.chunks)),
    "family_active": lambda step: float(step.num_decodes + len(step.chunks)),
}
"""Weight of a step in a metric."""


def stretches(
    deployment: Deployment,
    result: Result,
    log_sd: Mapping[str, float],
    metrics: Sequence[str],
    drawn_worlds: DrawnWorlds,
) -> Array:
    """Return u of each of the worlds (columns) for each of the metrics (rows), by the steps of a run and the standard
    deviation of the log error of each kind in them (`simtune.sim.drawn_worlds.widest`)."""
    steps = [*timed_steps(deployment, result)]
    rows = []
    for metric in metrics:
        shares = _shares(steps, _MADE_OF[metric]) or _shares(steps, lambda step: 1.0)
        rows.append(np.log(drawn_worlds.stretch(shares, log_sd, steady=1 - sum(shares.values()))))
    return np.array(rows)


def _shares(
    steps: Sequence[tuple[SampledStep, Mapping[str, float], float]], often: Callable[[SampledStep], float]
) -> dict[str, float]:
    """Return the share of each kind in the time of steps, weighted by `often`; less than 1 in total if other work takes
    time."""
    shares: dict[str, float] = {}
    total = sum(step.ticks * often(step) for step, _, _ in steps)
    for step, by_kind, seconds in steps if total else ():
        for kind, of_kind in by_kind.items():
            shares[kind] = shares.get(kind, 0.0) + step.ticks * often(step) / total * of_kind / seconds
    return shares


# --- what is said -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretched:
    """Limits of a plan, the change of each latency as everything takes longer, and the lengths of the worlds."""

    limits: Sequence[SloLimit]
    curves: Sequence[StretchCurve]
    worlds: Array
    """u of the worlds, a row for each limit."""
    spread: float
    """Standard deviation of u over draws of the requests (`simtune.tuner.doubt.draw_spread`)."""
    fortune: float = 0.0
    """Amount of u by which a limit is reached sooner in other worlds than in the one in which the plan was chosen."""

    def slack(self, longer: float = 0.0) -> Array:
        """Return the logarithm of the rate, over the chosen one, up to which each world keeps all limits.

        Worlds count as `longer` times their doubt longer than they are, and limits as reached sooner by `fortune`.
        """
        slack = np.full(self.worlds.shape[1], np.inf)
        for limit, curve, u in zip(self.limits, self.curves, self.worlds, strict=True):
            off = self.fortune + longer * self._doubt(limit, curve, u)
            slack = np.minimum(slack, curve.reached(math.log(limit.limit_s) - u - off, less=1.0) - u - off)
        return np.where(slack > _ENDLESS, np.inf, slack)

    def kept(self, longer: float = 0.0) -> float:
        """Return the share of worlds that keep all limits."""
        keeps = np.ones(self.worlds.shape[1], dtype=bool)
        for limit, curve, u in zip(self.limits, self.curves, self.worlds, strict=True):
            border = float(curve.reached(np.array(math.log(limit.limit_s))))
            keeps &= u + self.fortune + longer * self._doubt(limit, curve, u) <= border
        return float(keeps.mean())

    def intervals(self) -> tuple[LimitInterval, ...]:
        """Return the interval of each limited latency."""
        ends = (interval(np.exp(curve.at(u)).tolist()) for curve, u in zip(self.curves, self.worlds, strict=True))
        return tuple(LimitInterval(low_s=_short(low), high_s=_short(high)) for low, high in ends)

    def _doubt(self, limit: SloLimit, curve: StretchCurve, u: Array) -> float:
        """Return the amount of u by which a world may behave as if it were longer, or a limit be reached sooner."""
        border = float(curve.reached(np.array(math.log(limit.limit_s))))
        between = BETWEEN * curve.gap(border) if math.isfinite(border) else 0.0
        return math.hypot(RANK * float(u.std()), between, self.spread)


def slo_probability(
    tuned: Tuned, sweep: RateSweep, bases: Mapping[str, Mapping[str, KindBasis]]
) -> SloProbability | None:
    """Estimate the probability for the chosen plan, given its sweep of rates and the errors of its kinds of operators
    (`simtune.sim.run_basis.pool_bases`).

    Return None if the plan has no limits, if a pool has step costs of its own, if the search was interrupted, or if a
    share of requests must be within all limits at once: what is known is how each latency changes by itself.
    """
    limits, seed = tuned.result.limits, tuned.question.study.seed
    if tuned.question.study.slo.attainment is not None:
        return None
    if tuned.interrupted or not limits or any(isinstance(pool.costs, OwnCosts) for pool in tuned.deployment.pools):
        return None
    drawn_worlds = DrawnWorlds.of(WORLDS, seed)
    worlds = stretches(tuned.deployment, tuned.result, widest(bases), [limit.metric for limit in limits], drawn_worlds)
    rate = tuned.chosen.rate_rps if tuned.question.searches_rate else None
    few = _FewWorlds(tuned, rate)
    simulated_curves = _curves(few, sweep, worlds, limits)
    curves = simulated_curves if rate is None else _not_above_missed(few, limits, simulated_curves)
    confirmed = tuned.confirmed
    # The highest rate that met the SLO on the draw of the search is biased upwards; a confirmed rate met it on other
    # draws as well.
    of_draws = CAPACITY.spread(len(tuned.result.stream) if confirmed is None else confirmed.draws * confirmed.requests)
    fortune = 0.0 if rate is None or confirmed is not None else of_draws
    of_draw = of_draws * np.random.default_rng(seed).standard_normal(WORLDS)
    plan = Stretched(limits, curves, worlds + of_draw + _of_acceptance(few, curves, drawn_worlds), of_draws, fortune)
    # If short runs do not show the miss that the search saw, the upper end uses the curves without that miss.
    most = replace(plan, curves=simulated_curves) if _unfelt(curves, simulated_curves, limits) else plan
    return SloProbability(
        worlds=WORLDS,
        simulations=few.simulations,
        level=LEVEL,
        probability=plan.kept(),
        low=plan.kept(longer=1.0),
        high=max(plan.kept(longer=-1.0), most.kept(longer=-1.0)),
        limits=plan.intervals(),
        value=_value(tuned, plan.slack()),
        safe_probability=SAFE,
        safe_rate_rps=None if rate is None else _safe_rps(rate, plan.slack(longer=1.0)),
    )


def _value(tuned: Tuned, slack: Array) -> tuple[float | None, ...] | None:
    """Return the interval of an objective that is a rate over its weight; None for any other objective."""
    if not isinstance(tuned.question.objective, RateObjective):
        return None
    return tuple(map(_short, interval((tuned.value * np.exp(slack)).tolist())))


def _safe_rps(rate: float, slack: Array) -> float | None:
    """Return the rate at which a share SAFE of worlds keeps the SLO; None if there is none, or if it is unbounded."""
    at = float(np.sort(slack)[math.floor(len(slack) * (1 - SAFE) + 1e-9)])
    return _short(rate * math.exp(at)) if math.isfinite(at) else None


def _short(value: float | None) -> float | None:
    """Return a value to six significant digits, because the last bits depend on the processor; None if it is
    unbounded."""
    return None if value is None or value > _LARGEST else float(f"{value:.6g}")


# --- the few simulations ----------------------------------------------------------------------------------


def _seconds(limits: Sequence[SloLimit]) -> list[float]:
    """Return the seconds of each limited latency; infinite if requests pile up."""
    return [math.inf if limit.value_s is None else limit.value_s for limit in limits]


def _logs(limits: Sequence[SloLimit]) -> list[float]:
    return [math.log(limit.limit_s) for limit in limits]


class _FewWorlds:
    """Simulations of the chosen plan in selected worlds.

    If some of its instances can stand for all, one instance is simulated, and only the change of latencies is used.
    """

    def __init__(self, tuned: Tuned, rate_rps: float | None) -> None:
        """Prepare simulations at `rate_rps`, the chosen rate; None if the load is given."""
        self.tuned, self.rate_rps, self.simulations = tuned, rate_rps, 0

    @cached_property
    def capacity(self) -> float:
        """u from which the rate is above what the plan sustains, so that requests pile up even if a short run does not
        show it."""
        result = self.tuned.result
        offered = result.stream.offered_rate_rps if self.rate_rps is None else self.rate_rps
        if offered is None or result.stream.batch:
            return math.inf
        stream = self.tuned.question.capacity_stream(self.tuned.chosen.candidate)
        return math.log(sustained_rps(self.tuned.deployment, stream) / offered)

    @property
    def piling_up(self) -> dict[float, list[float]]:
        """Knot at which requests pile up by the capacity of the plan; empty if the load has no rate or is already
        above."""
        ends = math.isfinite(self.capacity) and self.capacity > 0
        return {self.capacity: [math.inf] * len(self.tuned.result.limits)} if ends else {}

    def stretched(self, u: float) -> list[float]:
        """Return the seconds of the limited latencies if everything takes e^u times as long."""
        longer, stream = math.exp(u), self.tuned.result.stream
        if self.rate_rps is not None:
            slowed = self._simulated(self.tuned.deployment, stream.at_rate(self.rate_rps * longer))
            return [longer * latency for latency in slowed]
        factors = dict.fromkeys(REDRAWN_KINDS, longer)
        return self._simulated(Blueprint.of(self.tuned.deployment).deploy(PerturbedWorld(factors)), stream)

    def fewer_kept(self) -> list[float] | None:
        """Return the same if drafts are kept less often by a standard error; None if no such error is known."""
        drafting = self.tuned.deployment.drafting.values()
        if all(item.acceptance.shifted(-1.0) == item.acceptance for item in drafting):
            return None
        fewer = Blueprint.of(self.tuned.deployment).deploy(PerturbedWorld(acceptance_errors=-1.0))
        return self._simulated(fewer, self.tuned.result.stream)

    def swept(self, point: SimulationSummary) -> list[float]:
        """Return the same for a point of the sweep, at its own rate."""
        return self._of_all(_seconds(point.slo), SAMPLED_CORES)

    def _simulated(self, deployment: Deployment, stream: RequestStream) -> list[float]:
        self.simulations += 1
        study = self.tuned.question.study
        result = deployment.simulate(stream, study.slo, cores=ONE_INSTANCE, seed=study.seed)
        return self._of_all(_seconds(result.limits), ONE_INSTANCE)

    def _of_all(self, seconds: Sequence[float], cores: int) -> list[float]:
        """Scale latencies of some cores to those of all, by their ratio in the prediction."""
        return [latency * ratio for latency, ratio in zip(seconds, self._all_over_seen(cores), strict=True)]

    def _all_over_seen(self, cores: int) -> list[float]:
        """Return the predicted limited latencies of all requests over those of the requests that `cores` cores receive.

        Nothing is simulated: if some cores stand for all, instances do not disturb each other.
        """
        result, deployment = self.tuned.result, self.tuned.deployment
        instances = deployment.enough_instances(result.stream, cores)
        if instances is None:
            return [1.0] * len(result.limits)
        in_sample = np.arange(len(result.stream)) % deployment.pools[0].spec.instances < instances
        ratios = []
        for limit in result.limits:
            column: Array = getattr(result, f"{limit.metric}_s")
            counted = np.isfinite(column)
            if limit.request_class is not None:
                counted &= result.stream.class_index == result.stream.class_names.index(limit.request_class)
            some = (counted & in_sample).any() and statistic_of(column[counted & in_sample], limit.statistic)
            ratios.append(statistic_of(column[counted], limit.statistic) / some if some else 1.0)
        return ratios


def _curves(few: _FewWorlds, sweep: RateSweep, worlds: Array, limits: Sequence[SloLimit]) -> list[StretchCurve]:
    """Return the curve of each limit, from the known latencies and a few simulations that cover the range of the
    worlds."""
    low, high = (float(np.quantile(worlds, level)) for level in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    knots, end = {0.0: _seconds(few.tuned.result.limits)}, few.capacity
    if few.rate_rps is None:
        knots |= {u: few.stretched(u) for u in (low, high) if u < end}
        knots |= few.piling_up
        border = _border(_drawn(knots), limits)
        if 0 < border < min(high, end) and high - border > BETWEEN * high:
            knots[border] = few.stretched(border)
        return _drawn(knots)
    for rate, summary in sweep.points:
        u = math.log(rate / few.rate_rps)
        if rate != few.rate_rps and u < end:
            knots[u] = [math.exp(u) * seconds for seconds in few.swept(summary)]
    if max(knots) < high < end and all(map(math.isfinite, knots[max(knots)])):
        knots[high] = few.stretched(high)
    knots |= few.piling_up
    return _drawn(knots)


def _drawn(knots: Mapping[float, Sequence[float]]) -> list[StretchCurve]:
    by_limit = zip(*(knots[u] for u in sorted(knots)), strict=True)
    return [StretchCurve.of(dict(zip(sorted(knots), seconds, strict=True))) for seconds in by_limit]


def _border(curves: Sequence[StretchCurve], limits: Sequence[SloLimit]) -> float:
    """Return the u at which the first limit is reached."""
    return min(float(curve.reached(np.array(at))) for curve, at in zip(curves, _logs(limits), strict=True))


def _not_above_missed(
    few: _FewWorlds, limits: Sequence[SloLimit], curves: Sequence[StretchCurve]
) -> list[StretchCurve]:
    """Raise the limit that is reached first at rates at which the search saw the plan miss its SLO."""
    assert few.rate_rps is not None
    if few.tuned.question.study.slo.confidence is not None:
        # The search judged with a margin, so its misses are not those of the predicted plan.
        return [*curves]
    missed = [
        attempt.rate_rps for attempt in few.tuned.chosen.tried if not attempt.met and attempt.rate_rps is not None
    ]
    above = [math.log(rate / few.rate_rps) for rate in missed if rate > few.rate_rps]
    if not above:
        return [*curves]
    borders = [float(curve.reached(np.array(at))) for curve, at in zip(curves, _logs(limits), strict=True)]
    first, u = int(np.argmin(borders)), min(above)
    return [
        curve.with_knot(u, at + u) if number == first else curve
        for number, (curve, at) in enumerate(zip(curves, _logs(limits), strict=True))
    ]


def _unfelt(curves: Sequence[StretchCurve], drawn: Sequence[StretchCurve], limits: Sequence[SloLimit]) -> bool:
    """True if a run of this length keeps its limits beyond the rate at which the search saw the plan miss them:
    requests pile up there, but the run ends before a limit is missed."""
    missed = {
        float(u) for curve, before in zip(curves, drawn, strict=True) for u in set(curve.stretch) - set(before.stretch)
    }
    later = [float(u) for u in drawn[0].stretch if missed and u > min(missed)]
    return bool(later) and _border(drawn, limits) >= min(later)


def _of_acceptance(few: _FewWorlds, curves: Sequence[StretchCurve], drawn_worlds: DrawnWorlds) -> Array:
    """Return the amount to add to u of each world (columns), for each limit (rows), for drafts that are kept more or
    less often."""
    fewer = few.fewer_kept()
    if fewer is None:
        return np.zeros((len(curves), WORLDS))
    longer = [
        float(np.clip(curve.reached(np.array(math.log(seconds))), 0.0, curve.stretch[-1]))
        for curve, seconds in zip(curves, fewer, strict=True)
    ]
    return np.outer(longer, -drawn_worlds.acceptance)
