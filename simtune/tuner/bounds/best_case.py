"""Upper bounds on the rate of a plan: necessary conditions, safe to prune with.

The rate of a plan is the highest at which it meets its SLO and which its cores could sustain for ever. So it has two
bounds: that of the SLO on the very requests that are simulated (`simtune.tuner.bounds`), and the capacity of each of
its pools, beyond which requests pile up without end. A short run may end before that is felt; no such rate is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simtune.arrays import Array
from simtune.costs.bounds import BoundsOfAll
from simtune.costs.compiled import CompiledCosts, StepTables
from simtune.costs.drafting import CompiledRounds
from simtune.sim.deployment import Deployment
from simtune.sim.pools import DeployedPool
from simtune.specs.pool import Role
from simtune.specs.workload import Slo
from simtune.tuner.bounds import Capacity, PlanBounds, RateBound, rate_bound
from simtune.tuner.bounds.bounded_requests import BoundLoad
from simtune.tuner.bounds.encoding import least_encoding_s, stage_rates
from simtune.tuner.bounds.floors import FLOORS, Floor
from simtune.tuner.bounds.lone_requests import costs_of_ranks
from simtune.tuner.bounds.windows import ROUNDING
from simtune.workload.requests import RequestStream


class PoolCapacity:
    """Requests per second that pools with given costs sustain in one role; those beyond max_model_len cost nothing.

    With `caches` a prefix cache may have what other requests of the stream begin with as well. `fewer_ranks`
    are the tables of the other numbers of ranks on which steps may run, and `encoding_s` the seconds of each request in
    which its media are encoded in steps.
    """

    def __init__(
        self,
        tables: StepTables,
        stream: RequestStream,
        role: Role,
        max_model_len: int,
        *,
        caches: bool,
        fewer_ranks: Sequence[StepTables] = (),
        encoding_s: Array | float = 0.0,
    ) -> None:
        self._role, self._costs = role, BoundsOfAll([tables, *fewer_ranks])
        self._size = len(stream) / stream.arrivals
        if role != "decode":
            one_token = replace(stream, output_tokens=np.ones_like(stream.output_tokens))
            answered = one_token if role == "prefill" else stream
            self._capacity = Capacity(
                tables, answered, max_model_len, caches=caches, fewer_ranks=fewer_ranks, encoding_s=encoding_s
            )
            return
        self._lines, self._context_s = self._costs.linear_minorants(), self._costs.context_cost_s()
        load = BoundLoad(stream, max_model_len)
        self._decodes, self._context = load.mean(load.decodes), load.mean(load.context)
        self._private = load.mean(load.private) if caches else self._context

    def rps(self, pool: DeployedPool) -> float:
        """Return the arrivals per second, of requests or of families, that no schedule on the cores of a pool can
        exceed."""
        rps = self._capacity.rps(pool) if self._role != "decode" else self._decode_rps(pool)
        return rps / self._size

    def _decode_rps(self, pool: DeployedPool) -> float:
        """Return the same for a decode pool, whose only work on prompts is to read their KV caches (see `Capacity`)."""
        batching, pp = pool.spec.batching, pool.spec.parallelism.pp
        shape = None if pool.spec.speculation is None else pool.spec.speculation.scheme.shape
        drafts, replicas = (0, 1) if shape is None else (shape.depth, max(1, shape.replicas))
        steps = self._decodes / (drafts + 1)
        context, private = (
            max(0.0, tokens - self._decodes * drafts / 2) / (drafts + 1) for tokens in (self._context, self._private)
        )
        kv_tokens = pool.memory.num_blocks // pp * pool.spec.kv_cache.block_size
        iterations = max(steps / (batching.max_num_seqs // pp), private / kv_tokens)
        busy_s = max(c0 * iterations + c1 * self._decodes for c0, c1 in self._lines)
        busy_s += self._context_s * context + self._decodes * self._costs.head_cost_s()
        return replicas * pool.most_cores / busy_s if busy_s > 0 else float("inf")


def sustained_rps(deployment: Deployment, stream: RequestStream) -> float:
    """Return the requests per second beyond which they pile up without end, if the costs of the deployment are
    compiled.

    Rates of pools that share the requests add up; if each request passes several pools, the slowest pool limits the
    rate, as do the stages that all requests pass.
    """
    stages = stage_rates(deployment.plan, deployment.model, deployment.pools, stream)
    return min(_pools_rps(deployment, stream), *stages.values(), math.inf)


def _pools_rps(deployment: Deployment, stream: RequestStream) -> float:
    """Return the requests per second that the pools of a deployment sustain."""
    rates = [_pool_rps(pool, stream, pool.spec.role) for pool in deployment.pools]
    if deployment.plan.prefills_locally:
        # Whoever computes its prompt, each request decodes on a decode instance.
        serving_alone = [_pool_rps(pool, stream, "mixed") for pool in deployment.pools if pool.spec.role == "decode"]
        by_role = {pool.spec.role: rate for pool, rate in zip(deployment.pools, rates, strict=True)}
        return min(by_role["decode"], by_role["prefill"] + sum(serving_alone))
    return sum(rates) if all(pool.spec.role == "mixed" for pool in deployment.pools) else min(rates)


def _pool_rps(pool: DeployedPool, stream: RequestStream, role: Role) -> float:
    """Return the requests per second that a pool sustains in a role."""
    tables, *fewer_ranks = [
        costs.tables for costs in costs_of_ranks(pool) if isinstance(costs, CompiledCosts | CompiledRounds)
    ]
    caches = pool.spec.kv_cache.prefix_caching
    encoding_s = least_encoding_s(pool.encoder, stream)
    return PoolCapacity(
        tables, stream, role, pool.max_model_len, caches=caches, fewer_ranks=fewer_ranks, encoding_s=encoding_s
    ).rps(pool)


def slo_bound(
    deployment: Deployment,
    stream: RequestStream,
    slo: Slo,
    cores: int | None = None,
    *,
    below_rps: float = float("inf"),
) -> RateBound:
    """Return the highest rate at which a simulation of a deployment could meet its SLO.

    With `cores`, the simulation samples the cores as `Deployment.simulate` does. The rate is infinite if it is not
    below `below_rps`, another bound that is known.
    """
    sampled, simulated_stream = _as_simulated(deployment, stream, cores)
    offered, of_seen = stream.offered_rate_rps, simulated_stream.offered_rate_rps
    if simulated_stream is stream or offered is None or of_seen is None:
        return rate_bound(sampled, simulated_stream, slo, below_rps=below_rps)
    bound = rate_bound(sampled, simulated_stream, slo, below_rps=below_rps / offered * of_seen)
    return bound._replace(rps=bound.rps / of_seen * offered)


def least_s(floor: Floor, deployment: Deployment, stream: RequestStream, cores: int | None = None) -> float:
    """Return a lower bound on a latency of a deployment (seconds); 0 if nothing is known of its costs."""
    bounds = PlanBounds(*_as_simulated(deployment, stream, cores))
    return FLOORS[floor](bounds) if bounds.known else 0.0


def least_tpot_s(deployment: Deployment, stream: RequestStream, cores: int | None = None) -> float:
    """Return the mean TPOT (seconds) of requests that each have the deployment to themselves."""
    bounds = PlanBounds(*_as_simulated(deployment, stream, cores))
    decodes = bounds.load.decodes
    if not bounds.known or not (decodes > 0).any():
        return 0.0
    return float((bounds.decode_s[decodes > 0] / decodes[decodes > 0]).mean()) * (1 - ROUNDING)


def _as_simulated(deployment: Deployment, stream: RequestStream, cores: int | None) -> tuple[Deployment, RequestStream]:
    """Return the deployment with the instances that are simulated, and the requests that they receive."""
    instances = deployment.enough_instances(stream, cores)
    if instances is None:
        return deployment, stream
    (pool,) = deployment.pools
    fewer = pool.spec.model_copy(update={"instances": instances})
    plan = deployment.plan.model_copy(update={"pools": (fewer,)})
    return replace(deployment, plan=plan, pools=(replace(pool, spec=fewer),)), stream.share_of(
        instances, pool.spec.instances
    )


def most_favourable(deployments: Sequence[Deployment]) -> Deployment:
    """Return a deployment with the most seats, the largest budget and the most KV blocks of several deployments.

    The deployments differ in these limits alone. Bounds that no larger limit lowers are, for the result, at least as
    favourable as for the best of the deployments.
    """
    first = deployments[0]
    pools = []
    for at, pool in enumerate(first.pools):
        same = [deployment.pools[at] for deployment in deployments]
        limits = {
            "max_num_seqs": max(same_pool.spec.batching.max_num_seqs for same_pool in same),
            "max_num_batched_tokens": max(same_pool.spec.batching.max_num_batched_tokens for same_pool in same),
        }
        spec = pool.spec.model_copy(update={"batching": pool.spec.batching.model_copy(update=limits)})
        blocks = max(same_pool.memory.num_blocks for same_pool in same)
        pools.append(replace(pool, spec=spec, memory=replace(pool.memory, num_blocks=blocks)))
    plan = first.plan.model_copy(update={"pools": tuple(pool.spec for pool in pools)})
    return replace(first, plan=plan, pools=tuple(pools))
