"""Bounds of a whole plan on the very requests that a simulation of it would receive.

Every bound is on the report of `Deployment.simulate` for the same stream, so none of them claims more than that. Bounds
by floors and windows hold under every policy and router; the bound by the order of arrival if first tokens come in
order (`Scheduler.first_come`) and requests are dealt in turn. Costs without lower bounds (`least_costs`) give none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.sim.deployment import Deployment
from simtune.sim.plan_parts import POLICY, ROUTER
from simtune.specs.plan import Plan
from simtune.specs.routing import RoundRobinRouting
from simtune.specs.workload import Slo
from simtune.tuner.bounds.limits import MeanLimit, SloLimits, of_one_request, of_statistics
from simtune.tuner.bounds.lone_requests import LoneRequests
from simtune.tuner.bounds.windows import ROUNDING, WindowJobs, first_come, first_come_seated, of_each
from simtune.workload.requests import RequestStream

CLOSE = 1e-4
"""Relative width at which the bisection of the highest rate stops."""


class RateBound(NamedTuple):
    """The request rate above which no plan meets the objective, and the bound that proves it."""

    rps: float
    by: str
    """`floor`, `order of arrival`, `prefill`, `resources`, `link`, `length` (a request is refused) or `nothing`: the
    rate is infinite, for example because the objective sets no time by which anything must be done."""


def rate_bound(
    deployment: Deployment, stream: RequestStream, slo: Slo, *, below_rps: float = float("inf")
) -> RateBound:
    """Return the highest rate at which `deployment` could meet every line of `slo` on these requests.

    The rate is infinite if it is not below `below_rps`, another bound that is known.
    """
    return PlanBounds(deployment, stream).rate(slo, below_rps)


def attainment_bound(deployment: Deployment, stream: RequestStream, slo: Slo) -> float:
    """Return the largest share of the finished requests that could be answered within their limits, at the stream's
    rate."""
    return PlanBounds(deployment, stream).attainment(slo)


class PlanBounds(LoneRequests):
    """Bounds of one plan on one stream."""

    # --- the answers ------------------------------------------------------------------------------------------

    def rate(self, slo: Slo, below_rps: float = float("inf")) -> RateBound:
        """See `rate_bound`."""
        if not self.load.fits.all():
            return RateBound(0.0, "length")
        offered = self.stream.offered_rate_rps
        if not self.known:
            return RateBound(float("inf"), "nothing")
        if self.families_late(slo):
            return RateBound(0.0, "floor")
        if not self.needed.all():
            return RateBound(float("inf"), "nothing")
        lines, means = of_statistics(self.stream, slo)
        late = [self.late_alone(line) for line in lines]
        missed = (int(alone.sum()) > line.allowed for alone, line in zip(late, lines, strict=True))
        if any(missed) or any(map(self.mean_missed, means)):
            return RateBound(0.0, "floor")
        if offered is None or not self.timed:
            return RateBound(float("inf"), "nothing")
        best = RateBound(below_rps, "nothing")
        for line, alone in zip(lines, late, strict=True):
            for by, jobs in self._jobs(line, ~alone):
                factor = jobs.highest_rate(line.allowed - int(alone.sum()), below=best.rps / offered)
                best = min(best, RateBound(float(offered * factor), by))
        if self.first_come:
            best = self._lower_by_order(best, offered, lines, means)
        return best if best.rps < below_rps else RateBound(float("inf"), "nothing")

    def attainment(self, slo: Slo) -> float:
        """See `attainment_bound`."""
        fits = self.load.fits
        if (
            not self.known
            or not fits.any()
            or not self.needed.all()
            or len({pool.max_model_len for pool in self.deployment.pools}) > 1
        ):
            return 1.0
        limits = of_one_request(self.stream, slo)
        alone = self.late_alone(limits) & fits
        missed = int(alone.sum())
        if self.timed:
            windows = [jobs.must_miss() for _, jobs in self._jobs(limits, ~alone & fits)]
            missed += max(windows, default=0)
            if self.first_come and fits.all():
                late = self._ttft_in_order(1.0) > limits.ttft_s * (1 + ROUNDING) + ROUNDING
                missed = max(missed, int((alone | late).sum()))
        return 1 - missed / int(fits.sum())

    @property
    def timed(self) -> bool:
        """True if the stream states when each request arrives, and not only when its family or its user does."""
        return self.stream.arrival_s is not None and self.stream.families is None

    # --- windows ----------------------------------------------------------------------------------------------

    def _jobs(self, limits: SloLimits, kept: NDArray[np.bool_]) -> Iterator[tuple[str, WindowJobs]]:
        """Yield each resource by name, with the work on it of the kept requests and the time limits that they must
        meet."""
        if not self.timed:
            return
        tpot_s = np.where(self.load.decodes > 0, limits.tpot_s, 0.0) * np.maximum(self.load.decodes, 1)
        finish_s = np.minimum(limits.ttft_s + tpot_s, limits.e2el_s)
        # A limit on the last token leaves the first one what decoding alone does not take.
        first = np.minimum(limits.ttft_s, finish_s - self.decode_s)
        nothing = np.zeros(len(self.stream))
        counted = kept & np.isfinite(first)
        if counted.any():
            speeds = [pool.speed for pool in self.front]
            shared = combined(speeds, [[pool.prefill_s] for pool in self.front], counted)
            yield "prefill", self._competing(counted, nothing, first, *shared)
        counted = kept & np.isfinite(finish_s) & (self.load.decodes > 0) if self.back else kept & np.isfinite(finish_s)
        if counted.any():
            tpot = limits.tpot_s[counted & (self.load.decodes > 0)]
            longest = float(tpot.max(initial=0.0)) or float("inf")
            pools = self.back or self.front
            # A decode pool begins a request only once the prompt is computed and sent.
            lead = self.prompt_s + self.way_s if self.back else nothing
            totals = [pool.total_s(counted, longest) for pool in pools]
            shared = combined([pool.speed for pool in pools], totals, counted)
            yield "resources", self._competing(counted, lead, finish_s, *shared)
            if self.ways:
                shared = combined([way.links for way in self.ways], [[way.sending_s] for way in self.ways], counted)
                transfer_slack_s = finish_s - self.steps_s
                yield "link", self._competing(counted, self.prompt_s, transfer_slack_s, *shared)

    def _competing(
        self, counted: NDArray[np.bool_], lead_s: Array, slack_s: Array, works: Sequence[Array], speed: float
    ) -> WindowJobs:
        assert self.stream.arrival_s is not None
        arrival_s = self.stream.arrival_s[counted]
        return WindowJobs(arrival_s, lead_s[counted], slack_s[counted], [work[counted] for work in works], speed)

    # --- order of arrival -------------------------------------------------------------------------------------

    @cached_property
    def first_come(self) -> bool:
        """True if first tokens come in order of arrival on each core, and the core that gets each request is known."""
        in_order = (
            POLICY.find(pool.pool.spec.batching.policy).first_come
            and not pool.pool.spec.batching.long_prefill_token_threshold
            and (pool.pool.spec.batching.prefill_schedule_interval or 1) == 1
            # A core computes several chunks at a time then.
            and not pool.pool.chunks_follow
            # Requests that are rejected leave their place to those behind them.
            and not pool.pool.spec.queue_limits
            # A chunk that ends before an image leaves its place in the step to those behind it.
            and pool.pool.encoder is None
            # Requests whose adapter finds no slot are passed over.
            and pool.pool.spec.lora is None
            for pool in self.front
        )
        return self.known and _dealt_in_turn(self.deployment.plan) and self.timed and all(in_order)

    @cached_property
    def _cores(self) -> tuple[list[Ints], Array, Array]:
        """Return the requests that each core is dealt, the work of each prompt on its core, and the earliest time
        (seconds after the first arrival) at which the requests before it leave it a seat."""
        n = len(self.stream)
        turns = np.arange(n) % sum(pool.pool.num_cores for pool in self.front)
        prompts, totals, seats, before = np.zeros(n), np.zeros((3, n)), np.zeros(n), 0
        all_requests = np.ones(n, dtype=bool)
        for pool in self.front:
            in_pool = (turns >= before) & (turns < before + pool.pool.num_cores)
            prompts[in_pool] = pool.prefill_s[in_pool]
            seats[in_pool] = pool.seats
            if not self.back:
                totals[:, in_pool] = np.array(pool.total_s(all_requests, np.inf))[:, in_pool] / pool.rounds.replicas
            before += pool.pool.num_cores
        dealt = of_each(turns)
        return dealt, prompts, first_come_seated([*totals], dealt, seats)

    def _ttft_in_order(self, stretched: float) -> Array:
        """Return the least TTFT of each request (seconds) with all gaps between arrivals multiplied by `stretched`."""
        assert self.stream.arrival_s is not None
        arrival_s = self.stream.arrival_s * stretched
        dealt, prompts, seated_s = self._cores
        done_s = np.maximum(first_come(arrival_s, prompts, dealt), arrival_s[0] + seated_s)
        least: Array = np.maximum(self.ttft_s, done_s - arrival_s)
        return least

    def _lower_by_order(
        self, best: RateBound, offered: float, lines: list[SloLimits], means: list[MeanLimit]
    ) -> RateBound:
        """Return the bound by first come, first served, if it is lower. Waiting grows with the rate, so it is
        bisected."""

        # Requests that are late for other reasons than their first token: the same at every rate.
        apart = [self.late_alone(replace(line, ttft_s=np.full(len(self.stream), np.inf))) for line in lines]

        def fails(rps: float) -> bool:
            return self._fails_in_order(self._ttft_in_order(offered / rps), lines, apart, means)

        high = best.rps if np.isfinite(best.rps) else offered * 2.0**40
        return _bisected(fails, min(offered, high), high, best)

    def _fails_in_order(
        self, ttft_s: Array, lines: list[SloLimits], apart: list[NDArray[np.bool_]], means: list[MeanLimit]
    ) -> bool:
        """True if these first tokens miss a line; `apart` marks the requests that are late whenever their first tokens
        come."""
        for line, late in zip(lines, apart, strict=True):
            late = late | (ttft_s > line.ttft_s * (1 + ROUNDING) + ROUNDING)
            if np.isfinite(line.e2el_s).any():
                late = late | (ttft_s + self.decode_s > line.e2el_s * (1 + ROUNDING) + ROUNDING)
            if int(late.sum()) > line.allowed:
                return True
        return any(self.mean_missed(mean, ttft_s) for mean in means)


def _dealt_in_turn(plan: Plan) -> bool:
    """True if cores get requests in turn, in order of arrival."""
    weighted = isinstance(plan.router, RoundRobinRouting) and bool(plan.router.weights)
    if plan.autoscales or plan.stages:
        # Instances that start and drain change whose turn it is, and requests leave stages in another order.
        return False
    return ROUTER.find(plan.router.kind).deals_in_turn and not weighted


def _bisected(fails: Callable[[float], bool], start: float, high: float, best: RateBound) -> RateBound:
    """Return the lowest rate known to fail; all rates above a failing one fail. Return `best` if `high` does not
    fail."""
    if not fails(high):
        return best
    low = start
    while fails(low):
        high, low = low, low / 2
        if high < 1e-12:
            return RateBound(0.0, "order of arrival")
    while low * 2 < high and not fails(low * 2):
        low *= 2
    high = min(high, low * 2)
    while high > low * (1 + CLOSE):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fails(middle) else (middle, high)
    return RateBound(high, "order of arrival")


def combined(
    speeds: Sequence[float], works: Sequence[Sequence[Array]], counted: NDArray[np.bool_]
) -> tuple[Sequence[Array], float]:
    """Combine works and speeds of several pools into those of one.

    With any weights u each request takes at least min over pools of u w of the sum of u x speed; with these each pool
    would take the same time for everything, so that each counts for what it can do.
    """
    if len(speeds) == 1:
        return works[0], speeds[0]
    weights = [1 / max(float(work[0][counted].sum()), 1e-30) for work in works]
    kinds = [
        np.min([u * work[min(kind, len(work) - 1)] for u, work in zip(weights, works, strict=True)], axis=0)
        for kind in range(max(map(len, works)))
    ]
    return kinds, sum(u * speed for u, speed in zip(weights, speeds, strict=True))
