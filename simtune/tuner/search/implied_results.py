"""What one simulation tells of other plans: which must do exactly what another one did, or miss what it missed.

Seats, token budgets and KV blocks only ever say no. Where a simulation never came to what a pool allows, another pool
that allows at least as much as was reached takes every decision alike, step by step, and need not be simulated; limits
that are the same in both may have been reached. What was reached is counted from above, so that some equal plans are
simulated all the same, and none that could differ is not. Drafts count as if all were made, for all who are here, and
as if the scheduler took those of two steps for accepted.

Prompts that have a pool of their own know nothing of the pool that decodes, unless that leaves them so many KV caches
that there is no room for others. Where all that came would have found room beside each other, first tokens come at the
same time whatever decodes; and what they miss alone, no plan with the same prefill pool meets.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np

from simtune.arrays import Ints
from simtune.results.result import Result, objectives
from simtune.sim.deployment import Deployment
from simtune.sim.plan_parts import ROUTER
from simtune.sim.pools import DeployedPool
from simtune.specs.pool import Pool
from simtune.specs.routing import RoundRobinRouting
from simtune.tuner.bounds.windows import ROUNDING

NO_END = 1 << 62
POLICIES = ("vllm-fcfs", "vllm-priority")
"""Those that ask for their limits only whether they are reached."""


@dataclass(frozen=True)
class Allowed:
    """What an engine core of a pool has: seats, tokens of a step, KV blocks."""

    seats: int
    tokens: int
    blocks: int

    @classmethod
    def of(cls, pool: DeployedPool) -> Allowed:
        """The share of one core of an instance."""
        batching, pp = pool.spec.batching, pool.spec.parallelism.pp
        return cls(batching.max_num_seqs // pp, batching.max_num_batched_tokens, pool.memory.num_blocks // pp)


@dataclass(frozen=True)
class Use:
    """What an engine core of a pool had of each limit, and came to in a simulation: so much or less."""

    allowed: Allowed
    reached: Allowed

    def tells(self, other: Allowed) -> bool:
        """Whether cores with other limits would have done the same: each limit is the same, or was not reached and
        would not have been."""
        limits = zip(astuple(self.allowed), astuple(self.reached), astuple(other), strict=True)
        return all(own == its or (most < own and most <= its) for own, most, its in limits)


@dataclass(frozen=True)
class DraftRoom:
    """What the drafts of a pool take of its limits at most; nothing where it makes none."""

    width: int = 1
    """Tokens of a decode in a step."""
    extra_slots: int = 0
    """What each request takes of the token budget besides its tokens."""
    ahead: int = 0
    """Tokens beyond those of its answer for which a request may hold blocks."""

    @classmethod
    def of(cls, pool: Pool) -> DraftRoom:
        """Of a pool whose drafts are verified in turn."""
        if pool.speculation is None:
            return cls()
        drafts, drafter = pool.speculation.scheme.shape.drafts, pool.speculation.drafter
        # A step may begin with all drafts of the one before taken for accepted, and another follow an answer's last.
        return cls(1 + drafts, drafter.extra_slots(drafts), 4 * (1 + drafts) + drafter.lookahead(drafts))

    def budget(self, seats: int, most_tokens: int) -> int:
        """Tokens of a step that were asked for at most, where so many seats were taken. `most_tokens` are those of a
        step with prompts, drafts left out. Whoever found no room for itself and its drafts came to the limit."""
        tokens = max(most_tokens, seats)
        if self.width == 1:
            return tokens
        return tokens + seats * (self.width - 1) + (seats + 2) * self.extra_slots + self.width


def uses(deployment: Deployment, result: Result) -> tuple[Use, ...] | None:
    """What each pool came to in a simulation; None where limits matter though they are not reached."""
    if not all(map(_asks_only, deployment.pools)):
        return None
    return tuple(Use(Allowed.of(pool), _reached(pool, result)) for pool in deployment.pools)


def first_tokens_miss(deployment: Deployment, result: Result) -> bool:
    """Whether first tokens alone miss the SLO, and would miss it whatever pool decodes."""
    pool = deployment.pools[0]
    if pool.spec.role != "prefill" or len(deployment.pools) != 2 or not _asks_only(pool):
        return False
    lost = _lost_by(result)
    return lost is not None and _dealt_alone(deployment) and _holds_all(pool, result, lost)


def _dealt_alone(deployment: Deployment) -> bool:
    """Whether each core of the first pool gets its turn whatever happens elsewhere."""
    plan = deployment.plan
    weighted = isinstance(plan.router, RoundRobinRouting) and bool(plan.router.weights)
    return ROUTER.find(plan.router.kind).deals_in_turn and not weighted and not plan.events


def _holds_all(pool: DeployedPool, result: Result, until: int) -> bool:
    """Whether the cores of a prefill pool had room for all that came by a tick, if nobody had ever left."""
    arrival = result.outcome.arrival
    came = np.flatnonzero((arrival >= 0) & (arrival <= until))
    core, allowed = came % pool.num_cores, Allowed.of(pool)
    blocks = -(-result.stream.prompt_tokens[came] // pool.spec.kv_cache.block_size) + 1
    return bool(
        np.bincount(core).max(initial=0) <= allowed.seats
        and np.bincount(core, weights=blocks).max(initial=0) <= allowed.blocks
    )


def _lost_by(result: Result) -> int | None:
    """The tick of the first token with which a line of the SLO was lost, whenever the others come; None where none
    was."""
    stream, outcome = result.stream, result.outcome
    came = np.argsort(outcome.first_token, kind="stable")
    came = came[outcome.first_token[came] >= 0]
    ttft_s, lost = result.ttft_s[came], []
    for index, _, objective in objectives(stream, result.slo):
        which = np.ones(len(stream), dtype=bool) if index is None else stream.class_index == index
        n, counted = int(which.sum()), which[came]
        for metric, statistic, limit_s in objective.limits():
            if metric != "ttft":
                continue
            widest = limit_s * (1 + ROUNDING)
            if statistic == "mean":
                over = np.cumsum(np.where(counted, ttft_s, 0)) > n * widest
            else:
                enough = n - math.floor((n - 1) * float(statistic[1:]) / 100)
                over = np.cumsum(counted & (ttft_s > widest)) >= enough
            if over.any():
                lost.append(int(outcome.first_token[came[int(over.argmax())]]))
    return min(lost, default=None)


def tell_apart(deployment: Deployment, used: tuple[Use, ...]) -> bool:
    """Whether a deployment that differs from the one simulated in its limits alone could have done anything else."""
    pools = zip(deployment.pools, used, strict=True)
    return not all(_asks_only(pool) and there.tells(Allowed.of(pool)) for pool, there in pools)


def _asks_only(pool: DeployedPool) -> bool:
    """Whether limits of a pool matter only where they are reached."""
    kv_cache, speculation = pool.spec.kv_cache, pool.spec.speculation
    plain = not kv_cache.prefix_caching and not kv_cache.watermark
    in_turn = speculation is None or speculation.scheme.shape.in_turn
    return plain and in_turn and pool.spec.batching.policy in POLICIES


def _reached(pool: DeployedPool, result: Result) -> Allowed:
    outcome, stream, role = result.outcome, result.stream, pool.spec.role
    begin = outcome.prompt_done if role == "decode" else outcome.scheduled
    end = outcome.finish if role != "prefill" else outcome.transferred
    came = begin >= 0
    begin, end = begin[came], end[came]
    drafts = DraftRoom.of(pool.spec)
    # Whoever has finished may hold a seat until the step after the next one has been scheduled; where it was complete
    # by a draft that was accepted, until one more has.
    steps = 2 if pool.spec.speculation is None else 3
    end = np.where(end < 0, NO_END, end + steps * _longest_step(outcome.intervals))
    tokens = (stream.prompt_tokens + (0 if role == "prefill" else stream.output_tokens) + drafts.ahead)[came]
    blocks = -(-tokens // pool.spec.kv_cache.block_size) + 1
    # Of a prefill pool it is not known which core had a request: as if one had had all of them.
    core = np.zeros(len(begin), dtype=np.int64) if role == "prefill" else outcome.core[came]
    seats = _most_at_once(core, begin, end, np.ones(len(begin), dtype=np.int64))
    most_tokens = max((use.most_tokens for use in outcome.cores if use.pool == pool.spec.name), default=0)
    short = bool(outcome.preemptions.any())
    return Allowed(
        seats, drafts.budget(seats, most_tokens), NO_END if short else _most_at_once(core, begin, end, blocks)
    )


def _longest_step(intervals: Ints) -> int:
    """Ticks of the longest step in which anybody decoded; rows as in `Outcome.intervals`."""
    if not len(intervals):
        return 0
    first, slope, steps, _ = intervals.T
    return int(np.maximum(first, first + slope * (steps - 1)).max())


def _most_at_once(core: Ints, begin: Ints, end: Ints, weight: Ints) -> int:
    """The largest sum of weights of what overlaps on one core."""
    at, change = np.concatenate([begin, end]), np.concatenate([weight, -weight])
    cores = np.concatenate([core, core])
    order = np.lexsort((-change, at, cores))
    # The sum is back at zero after each core.
    return int(change[order].cumsum().max(initial=0))
