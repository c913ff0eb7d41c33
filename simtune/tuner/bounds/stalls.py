"""Rates at which ranks that step together hold one another up by prompts: an assumption, and no proof.

Ranks of data-parallel attention step together, and a step with a prompt on any of them takes as long as that prompt. An
engine that begins every prompt with the next step has such a step whenever a request came during the step before. Let
requests come to a group at random (Poisson) at a rate r, let a step of decodes alone take d0 and one with a prompt d1
on the mean, and a prompt n steps. After a step of decodes a prompt begins with probability a = 1 - exp(-r d0); after
the last step of a prompt none begins with probability e = exp(-r d1). Of all steps

    q = (n / e) / (n / e + 1 / a)

have a prompt or more, since prompts that begin before another has ended only add steps. So the mean time between
tokens is at least d0 + q (d1 - d0), which grows with r. d0 is that of the decodes under way by Little's law, where the
mean step takes what the limit allows.

Taken for granted: that requests come at random, that prompts begin with the next step, and that what holds of all steps
holds of the mean TPOT, but for MARGIN: a run begins with empty ranks and ends with no prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from simtune.costs.compiled import CompiledCosts
from simtune.costs.drafting import CompiledRounds
from simtune.costs.protocol import GroupCosts, RoundCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.run_statistics import objectives
from simtune.sim.deployment import Deployment
from simtune.sim.pools import DeployedPool
from simtune.specs.workload import Slo
from simtune.tuner.bounds.bounded_requests import BoundLoad
from simtune.tuner.bounds.limits import limits_the_mean
from simtune.workload.requests import RequestStream

MARGIN = 0.1
"""Share by which the mean step exceeds a limit that is missed."""
SAMPLED = 24
"""Prompts, evenly chosen by their length, that stand for all."""
MOST_RPS = 1e6
"""Requests per second above which nothing is looked for."""
CLOSE = 1e-3
"""Relative width at which the bisection of the rate stops."""


def stalled_rps(deployment: Deployment, stream: RequestStream, slo: Slo) -> float:
    """Return the requests per second above which a deployment is taken to miss a limit of TPOT because the ranks of its
    groups hold one another up; infinite where nothing is assumed.

    The caller knows that requests come at random, each for itself.
    """
    pool, limit_s = deployment.pools[0], _limit_s(stream, slo)
    plan, compiled = deployment.plan, isinstance(pool.costs, CompiledCosts | CompiledRounds)
    alone = len(deployment.pools) == 1 and not plan.events and plan.control is None and not plan.autoscales
    # Servers in front even out how requests arrive.
    alone = alone and not plan.stages
    if not alone or not compiled or limit_s is None or stream.hash_ids is not None or not _begins_at_once(pool):
        return math.inf
    load = BoundLoad(stream, deployment.max_model_len)
    if not load.fits.all() or not (load.decodes > 0).any():
        return math.inf
    return _Group(pool, load, limit_s).highest_rps() * pool.spec.instances


def _limit_s(stream: RequestStream, slo: Slo) -> float | None:
    """Return the least limit of TPOT that the mean of all requests is within if it is kept; None without one."""
    limits = [
        limit_s
        for index, _, objective in objectives(stream, slo)
        for metric, statistic, limit_s in objective.limits()
        if index is None and metric == "tpot" and limits_the_mean(statistic)
    ]
    return min(limits, default=None)


def _begins_at_once(pool: DeployedPool) -> bool:
    """True if the ranks of a pool step together and begin a prompt with the next step."""
    spec = pool.spec
    batching = spec.batching
    return (
        spec.role == "mixed"
        and spec.parallelism.attention_dp > 1
        and spec.parallelism.pp == 1
        and batching.policy == "vllm-fcfs"
        and (batching.prefill_schedule_interval or 1) == 1
        and not batching.long_prefill_token_threshold
        and spec.encoder is None
        and spec.lora is None
        and (
            spec.speculation is None
            or (spec.speculation.scheme.shape.in_turn and spec.speculation.scheme.shape.replicas <= 1)
        )
    )


def mean_step(rate: float, plain: float, prompt: float, steps: float) -> float:
    """Return a lower bound on the mean step of a group to which requests come at a `rate`, if a step takes `plain`
    without and `prompt` with a prompt, and a prompt takes `steps` steps; all in one unit of time."""
    begins, ends = -math.expm1(-rate * plain), math.exp(-min(rate * prompt, 50.0))
    with_prompts = steps / ends
    return plain + (prompt - plain) * with_prompts / (with_prompts + 1 / max(begins, 1e-300))


class _Group:
    """Ranks that step together, of a pool under a load and a limit of the mean TPOT."""

    def __init__(self, pool: DeployedPool, load: BoundLoad, limit_s: float) -> None:
        spec = pool.spec
        self._costs, self._ranks = pool.costs, spec.parallelism.attention_dp
        self._drafts = 0 if spec.speculation is None else spec.speculation.scheme.shape.depth
        self._step = limit_s * (1 + MARGIN) * (self._drafts + 1) * TICKS_PER_SECOND
        """Ticks of the mean step above which the limit is missed."""
        self._seats = spec.batching.max_num_seqs
        self._rounds = float(load.decodes.mean()) / (self._drafts + 1)
        self._context = float(load.context.sum() / load.decodes.sum())
        self._budget = longest = spec.batching.max_num_batched_tokens
        prompts = np.sort(load.prompt)[(np.arange(SAMPLED) * 2 + 1) * len(load.prompt) // (2 * SAMPLED)]
        self._chunks = [
            (past, min(longest, tokens - past))
            for tokens in prompts.astype(int).tolist()
            for past in range(0, tokens, longest)
        ]

    def highest_rps(self) -> float:
        """Return the requests per second of a group at which its mean step takes what the limit allows."""
        low, high = 0.0, 1.0
        while self._mean_step(high) <= self._step:
            low, high = high, high * 2
            if high > MOST_RPS:
                return math.inf
        while high - low > high * CLOSE:
            middle = (low + high) / 2
            low, high = (low, middle) if self._mean_step(middle) > self._step else (middle, high)
        return high

    def _mean_step(self, rps: float) -> float:
        """Return the least ticks of the mean step at a rate, if it takes what the limit allows."""
        per_tick = rps / TICKS_PER_SECOND
        decodes = max(1, min(self._seats - 1, int(per_tick * self._rounds * self._step / self._ranks)))
        plain = self._ticks(decodes, ())
        if plain > self._step:
            return plain
        room = max(1, self._budget - decodes * (self._drafts + 1))
        chunks = [((past, min(new, room)),) for past, new in self._chunks]
        beside = sum(self._ticks(decodes, chunk) for chunk in chunks) / len(chunks)
        return mean_step(per_tick, plain, max(plain, beside), len(self._chunks) / SAMPLED)

    def _ticks(self, decodes: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the ticks of a step of a rank with these chunks, while all ranks have as many decodes."""
        costs, tokens = self._costs, decodes * (self._drafts + 1)
        context, new = int(decodes * self._context), sum(chunk for _, chunk in chunks)
        if self._drafts:
            assert isinstance(costs, RoundCosts)
            ticks = costs.round(decodes, tokens, self._drafts, context + tokens, chunks, len(chunks))
        elif chunks:
            ticks = costs.mixed(decodes, context, chunks, decodes + len(chunks))
        else:
            ticks = costs.decode(decodes, context)[0]
        if not isinstance(costs, GroupCosts):
            return ticks
        everybodys = tokens * self._ranks + new
        return costs.together(ticks, tokens + new, decodes + len(chunks), everybodys, bool(chunks))
