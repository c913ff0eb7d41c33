"""Least times of requests that are alone on a plan: no schedule is faster, whatever else runs."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array
from simtune.costs.bounds import LeastCosts, least_costs, least_of_all
from simtune.costs.protocol import StepCosts
from simtune.results.result import statistic_of
from simtune.sim.deployment import Deployment
from simtune.sim.kv_links import first_token_of
from simtune.sim.pools import DeployedPool
from simtune.specs.workload import FAMILY_METRICS, Slo
from simtune.tuner.bounds.bounded_requests import BoundLoad
from simtune.tuner.bounds.kv_transfers import PlanWay, ways_of
from simtune.tuner.bounds.limits import MeanLimit, SloLimits
from simtune.tuner.bounds.windows import ROUNDING
from simtune.tuner.bounds.work import PoolWork
from simtune.workload.requests import RequestStream


def costs_of_ranks(pool: DeployedPool) -> list[StepCosts]:
    """Return the step costs of a pool, then those of the other numbers of ranks that its instances may have."""
    return [pool.costs, *(terms.costs for terms in pool.by_ranks.values() if terms.costs is not pool.costs)]


def _least_costs(pool: DeployedPool) -> LeastCosts | None:
    """Return costs below those of every step of a pool; None if nothing is known of some."""
    least = [least_costs(costs) for costs in costs_of_ranks(pool)]
    bounded = [of_one for of_one in least if of_one is not None]
    return least_of_all(bounded) if len(bounded) == len(least) else None


class LoneRequests:
    """Least times of the requests of a stream on a plan, and the limits that they miss even so."""

    def __init__(self, deployment: Deployment, stream: RequestStream) -> None:
        self.deployment, self.stream = deployment, stream
        self.load = BoundLoad(stream, deployment.max_model_len)
        self.front: list[PoolWork] = []
        self.back: list[PoolWork] = []
        """`front`: the pools that requests enter; `back`: the pools that only decode."""
        plan = deployment.plan
        # A prompt that a decode instance computes is on other cores than bounds take it to be.
        self.known = not plan.events and plan.control is None and not plan.prefills_locally
        for pool in deployment.pools:
            least = _least_costs(pool)
            if least is None:
                # Costs from outside without lower bounds: any claim about them could be wrong.
                self.known = False
            else:
                (self.back if pool.spec.role == "decode" else self.front).append(PoolWork(pool, least, self.load))

    @cached_property
    def needed(self) -> NDArray[np.bool_]:
        """True for each request that is answered to the end (`RequestStream.needed`)."""
        return self.stream.needed

    @cached_property
    def ttft_s(self) -> Array:
        """Least TTFT of each request (seconds) if it were alone, on the pool that serves it fastest.

        The transfer of its KV cache is included if a decode instance delivers the first token.
        """
        return self.prompt_s + (np.where(self.load.decodes > 0, self.way_s, 0.0) if self.first_after_way else 0.0)

    @cached_property
    def prompt_s(self) -> Array:
        """Least seconds until the prompt of each request is computed, if it were alone, on the fastest pool."""
        floor: Array = np.min([pool.prefill_floor_s for pool in self.front], axis=0)
        return floor

    @cached_property
    def first_after_way(self) -> bool:
        """True if a decode instance delivers the first token."""
        return bool(self.back) and first_token_of(self.deployment.plan) != "prefill"

    @cached_property
    def decode_s(self) -> Array:
        """Least seconds from the first to the last token of each request, if it were alone, on the fastest pool.

        The transfer of its KV cache is included if it comes between them.
        """
        way_s = np.where(self.load.decodes > 0, self.way_s, 0.0) if self.back and not self.first_after_way else 0.0
        return self.steps_s + way_s

    @cached_property
    def steps_s(self) -> Array:
        """Least seconds that the decode steps of each request take, without the transfer of its KV cache."""
        pools = self.back or self.front
        floor = np.min([pool.decode_floor_s for pool in pools], axis=0)
        alone: Array = np.where(self.load.decodes > 0, floor, 0.0)
        return alone

    @cached_property
    def ways(self) -> list[PlanWay]:
        """Transfers of KV caches from prefill to decode instances; empty unless one link serves all of them."""
        plan = self.deployment.plan
        if not self.back or plan.link is None or plan.links is not None:
            return []
        return ways_of(self.deployment.model, plan.link, self.front)

    @cached_property
    def way_s(self) -> Array:
        """Least seconds that each KV cache takes on an idle link; zero if pairs of pools have links of their own."""
        if not self.ways:
            return np.zeros(len(self.load.decodes))
        alone: Array = np.min([way.alone_s for way in self.ways], axis=0)
        return alone

    def late_alone(self, limits: SloLimits) -> NDArray[np.bool_]:
        """Return True for each request that misses a limit even though it is alone."""
        slack = 1 + ROUNDING
        late: NDArray[np.bool_] = (
            (self.ttft_s > limits.ttft_s * slack)
            | (self.decode_s > limits.tpot_s * np.maximum(self.load.decodes, 1) * slack)
            | (self.ttft_s + self.decode_s > limits.e2el_s * slack)
        )
        return late

    def mean_missed(self, mean: MeanLimit, ttft_s: Array | None = None) -> bool:
        """True if a mean is above its limit even though every request takes its least time."""
        if not mean.which.any():
            return False
        ttft = self.ttft_s if ttft_s is None else ttft_s
        least = {
            "ttft": ttft,
            "tpot": self.decode_s / np.maximum(self.load.decodes, 1),
            "e2el": ttft + self.decode_s,
        }[mean.metric]
        return float(least[mean.which].mean()) > mean.limit_s * (1 + ROUNDING)

    @cached_property
    def family_s(self) -> Array:
        """Least seconds from the arrival of each family until its last node is over."""
        families = self.stream.families
        assert families is not None
        return families.longest_s(self.ttft_s + self.decode_s) * (1 - ROUNDING)

    @cached_property
    def family_active_s(self) -> Array:
        """Least seconds in which requests of each family are under way: those that wait for one another are never under
        way at the same time."""
        families = self.stream.families
        assert families is not None
        return families.longest_s(self.ttft_s + self.decode_s, pauses=False) * (1 - ROUNDING)

    def families_late(self, slo: Slo) -> bool:
        """True if families miss a limit even though each of their requests is alone."""
        limits = [limit for limit in slo.limits() if limit[0] in FAMILY_METRICS]
        if not limits or self.stream.families is None:
            return False
        counted = slice(self.stream.warm_up_arrivals, None)
        least_s = {"family": self.family_s[counted], "family_active": self.family_active_s[counted]}
        return any(statistic_of(least_s[metric], statistic) > limit_s for metric, statistic, limit_s in limits)
