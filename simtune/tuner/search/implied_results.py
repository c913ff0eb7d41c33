"""Results that one simulation implies for other plans: plans that must do exactly the same, or must miss the SLO too.

Seats, token budgets and KV blocks can only refuse. If a simulation never reached the limits of a pool, another pool
that allows at least as much as was used takes every decision alike, step by step, and need not be simulated; limits
that are the same in both may have been reached. What was reached is counted from above, so that some equal plans are
simulated anyway, and every plan that could differ is simulated. Drafts count as if all were made, for all requests that
are present, and as if the scheduler took those of two steps for accepted.

TensorRT-LLM and SGLang (without drafts) reserve room for whole answers, and look at requests that they do not start:

* A request is refused room because those that run, those started before it in the same step, and itself may need more
  blocks than there are. So what it may need counts besides what all that run at the same time may need, answers
  included: while that is below the limit no request was refused.
* Whole prompts follow one another until one does not fit the budget. So the longest prompt counts besides the tokens of
  the largest step. Prompts that are cut leave less than a block of the budget, which counts instead.
* SGLang notices that no seat is free when it looks at one more request; so a seat for that one counts. TensorRT-LLM
  lists those that have a seat and room, and starts the first of them that fit the budget: the list of another number of
  seats has the same beginning, up to the seats that were taken and one more. If it cuts prompts, all of the list share
  a budget that binds; then all limits count as reached.
* The rest follows from these refusals, from blocks that a decode does not find (preemptions count as all blocks), and
  from steps that are alike: SGLang's `_full`, its ratio and its polls, and the requests that are paused.

A prefill pool does not depend on the pool that decodes, unless KV caches that wait for it take all the room. If no
request found it full, no prompt could have ended sooner, whatever pool decodes; and if the ends of prompts alone miss a
limit of TTFT, no plan with the same prefill pool meets it.

A decode pool gets its requests from the prefill pool, later and more evenly than they arrive. While steps grow
linearly with the requests in them, the time of a token hardly depends on that: of Poisson arrivals it is
(t0 + a) / (1 - rho), of even ones t0 / (1 - rho), where a step takes t0 and a for each of its requests. So if the mean
time per token, counted from the arrival of each KV cache, exceeds the limit by DECODE_MARGIN, no plan with the same
decode pool is taken to keep it at this rate. That is an assumption, which `docs/tuning.md` states, and no proof.

Nor is one whose decode pool differs in seats, token budget and KV blocks. With fewer of them requests that have come
are served no faster, so none leaves sooner on the mean: the time from the arrival of the KV cache is no shorter, of
which the limit of TTFT leaves room for some where first tokens come with the first decode (`DecodeMiss.lower`). With
more of them steps hold no fewer requests, so tokens come no faster once decoding has begun, if no request lost its
blocks (`DecodeMiss.higher`).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.result import Result
from simtune.results.run_statistics import objectives
from simtune.sim.deployment import Deployment
from simtune.sim.drafting import drafter_share
from simtune.sim.kv_links import first_token_of
from simtune.sim.plan_parts import ROUTER
from simtune.sim.pools import DeployedPool
from simtune.specs.pool import Pool
from simtune.specs.routing import RoundRobinRouting
from simtune.specs.workload import Slo
from simtune.tuner.bounds.limits import limits_the_mean
from simtune.tuner.bounds.windows import ROUNDING

NO_END = 1 << 62
DECODE_MARGIN = 0.05
"""Share by which the mean time per token of a decode pool exceeds a limit that it misses whatever pool prefills."""
ENOUGH_DECODED = 100
"""Fewest requests of such a mean."""
POLICIES = ("vllm-fcfs", "vllm-priority", "tensorrt-llm", "sglang")
"""Policies whose decisions depend on limits only when a limit is reached."""
RESERVING = ("tensorrt-llm", "sglang")
"""Policies among POLICIES that reserve room for whole answers."""


@dataclass(frozen=True)
class Allowed:
    """Limits of one engine core of a pool: seats, tokens of a step, KV blocks."""

    seats: int
    tokens: int
    blocks: int

    @classmethod
    def of(cls, pool: DeployedPool) -> Allowed:
        """Return the share of one core of an instance."""
        batching, pp = pool.spec.batching, pool.spec.parallelism.pp
        return cls(pool.core_seats, batching.max_num_batched_tokens, pool.memory.num_blocks // pp)


@dataclass(frozen=True)
class Use:
    """Limits of an engine core of a pool, and an upper bound on their use in a simulation."""

    allowed: Allowed
    reached: Allowed

    def tells(self, other: Allowed) -> bool:
        """True if cores with other limits would have done the same: each limit is equal, or was not reached and would
        not have been reached."""
        limits = zip(astuple(self.allowed), astuple(self.reached), astuple(other), strict=True)
        return all(limit == rival or (most < limit and most <= rival) for limit, most, rival in limits)


@dataclass(frozen=True)
class DraftRoom:
    """Largest use of a pool's limits by its drafts; the defaults are those of a pool that does not draft."""

    width: int = 1
    """Tokens of a decode in a step."""
    extra_slots: int = 0
    """Tokens of the budget that each request takes besides its own tokens."""
    ahead: int = 0
    """Tokens beyond those of its answer for which a request may hold blocks."""

    @classmethod
    def of(cls, pool: Pool) -> DraftRoom:
        """Return the room that the drafts of a pool need, if its drafts are verified in turn."""
        if pool.speculation is None:
            return cls()
        drafts, drafter = pool.speculation.scheme.shape.drafts, pool.speculation.drafter
        # A step may start while all drafts of the step before count as accepted, and one more step may follow the last
        # token of an answer.
        share = drafter_share(pool)
        assert share is not None
        return cls(1 + drafts, share.extra_slots, 4 * (1 + drafts) + drafter.lookahead(drafts))

    def budget(self, seats: int, most_tokens: int) -> int:
        """Return an upper bound on the tokens of a step that were requested while `seats` seats were taken.

        `most_tokens` are those of a step with prompts, without drafts. A request that found no room for itself and its
        drafts counts as having reached the limit.
        """
        tokens = max(most_tokens, seats)
        if self.width == 1:
            return tokens
        return tokens + seats * (self.width - 1) + (seats + 2) * self.extra_slots + self.width


class DecodeMiss(NamedTuple):
    """A decode pool that by itself takes too long for a token, whatever pool prefills."""

    lower: bool
    """True if pools with lower limits take too long as well."""
    higher: bool
    """True if pools with higher limits take too long as well."""

    def tells(self, simulated: Allowed, other: Allowed) -> bool:
        """True if a pool that differs from the simulated one in limits alone takes too long as well."""
        pairs = [*zip(astuple(simulated), astuple(other), strict=True)]
        lower, higher = any(rival < limit for limit, rival in pairs), any(rival > limit for limit, rival in pairs)
        return (self.lower or not lower) and (self.higher or not higher)


def uses(deployment: Deployment, result: Result) -> tuple[Use, ...] | None:
    """Return the use of each pool in a simulation; None if limits matter even when they are not reached."""
    shared = result.stream.hash_ids is not None
    if not all(_asks_only(pool, shared=shared) for pool in deployment.pools):
        return None
    dealt = _dealt_alone(deployment)
    return tuple(Use(Allowed.of(pool), _reached(pool, result, dealt=dealt)) for pool in deployment.pools)


def first_tokens_miss(deployment: Deployment, result: Result) -> bool:
    """True if the ends of prompts alone miss the SLO, and would miss it whatever pool decodes."""
    pool, plan = deployment.pools[0], deployment.plan
    shared = result.stream.hash_ids is not None
    if pool.spec.role != "prefill" or len(deployment.pools) != 2 or plan.prefills_locally:
        return False
    if not _asks_only(pool, shared=shared) or not _dealt_alone(deployment):
        return False
    return _prompts_are_late(result) and _never_full(pool, result)


def decodes_miss(deployment: Deployment, result: Result) -> DecodeMiss | None:
    """Return of which decode pools it follows that they take too long for a token, by so much that it does not matter
    which pool prefills; None if not even of the simulated one."""
    stream, outcome = result.stream, result.outcome
    plan = deployment.plan
    if len(deployment.pools) != 2 or deployment.pools[1].spec.role != "decode" or plan.events or plan.prefills_locally:
        return None
    decoded = np.isfinite(result.decode_s) & (outcome.transferred >= 0) & (stream.output_tokens > 1)
    for index, _, objective in objectives(stream, result.slo):
        counted = decoded if index is None else decoded & (stream.class_index == index)
        if int(counted.sum()) >= ENOUGH_DECODED and (miss := _decode_miss(deployment, result, objective, counted)):
            return miss
    return None


def _decode_miss(
    deployment: Deployment, result: Result, objective: Slo, counted: NDArray[np.bool_]
) -> DecodeMiss | None:
    """Return what follows from the time per token of some requests, all of which have an objective."""
    limits = dict.fromkeys(("ttft", "tpot"), math.inf)
    for metric, statistic, limit_s in objective.limits():
        if metric in limits and limits_the_mean(statistic):
            limits[metric] = min(limits[metric], limit_s)
    tokens, widest = result.stream.output_tokens[counted] - 1, 1 + DECODE_MARGIN
    mean_s = float((result.decode_s[counted] / tokens).mean())
    if mean_s <= limits["tpot"] * widest:
        return None
    pool = deployment.pools[1]
    late_first = first_token_of(deployment.plan) == "decode"
    waits_s = limits["ttft"] * float((1 / tokens).mean()) if late_first else 0.0
    # Once decoding has begun: TPOT counts from the first token.
    decoding_s = float(result.tpot_s[counted].mean()) if late_first or _never_full(pool, result) else 0.0
    return DecodeMiss(
        lower=mean_s > (limits["tpot"] + waits_s) * widest,
        higher=decoding_s > limits["tpot"] * widest and not bool(result.outcome.preemptions.any()),
    )


def _dealt_alone(deployment: Deployment) -> bool:
    """True if each core of the first pool gets its turn whatever happens elsewhere."""
    plan = deployment.plan
    weighted = isinstance(plan.router, RoundRobinRouting) and bool(plan.router.weights)
    return ROUTER.find(plan.router.kind).deals_in_turn and not weighted and not plan.events


def _never_full(pool: DeployedPool, result: Result) -> bool:
    """True if no request found the seats or blocks of a pool taken, so that it could not have been faster had others
    left sooner."""
    allowed, reached = Allowed.of(pool), _reached(pool, result, dealt=True)
    return reached.seats < allowed.seats and reached.blocks < allowed.blocks


def _prompts_are_late(result: Result) -> bool:
    """True if the time from arrival to the end of a prompt, which TTFT is at least, misses the SLO.

    Of a run that was given up the time that a request had waited by then counts.
    """
    stream, outcome = result.stream, result.outcome
    if result.refused or result.num_rejected():
        return False
    prompts = outcome.prompt_done
    end = max(int(prompts.max(initial=0)), int(outcome.finish.max(initial=0)))
    came = (outcome.arrival >= 0) & (outcome.arrival <= end)
    least_s = np.where(came, np.where(prompts >= 0, prompts, end) - outcome.arrival, 0) / TICKS_PER_SECOND
    for index, _, objective in objectives(stream, result.slo):
        of_class = np.ones(len(stream), dtype=bool) if index is None else stream.class_index == index
        n = int(of_class.sum())
        for metric, statistic, limit_s in objective.limits():
            if metric != "ttft":
                continue
            # A miss that is only rounding must not rule out other plans.
            widest = limit_s * (1 + ROUNDING)
            if statistic == "mean":
                late = float(least_s[of_class].sum()) > n * widest
            else:
                enough = n - math.floor((n - 1) * float(statistic[1:]) / 100)
                late = int((least_s[of_class] > widest).sum()) >= enough
            if late:
                return True
    return False


def tell_apart(deployment: Deployment, used: tuple[Use, ...]) -> bool:
    """True if a deployment that differs from the simulated one in its limits alone could have done anything else.

    That a prefix cache is of no use to the requests was checked by `uses`.
    """
    pools = zip(deployment.pools, used, strict=True)
    return not all(_asks_only(pool, shared=False) and use.tells(Allowed.of(pool)) for pool, use in pools)


def _asks_only(pool: DeployedPool, *, shared: bool) -> bool:
    """True if limits of a pool matter only when they are reached; `shared` if prompts may share blocks."""
    kv_cache, speculation = pool.spec.kv_cache, pool.spec.speculation
    # A prefix cache keeps blocks until others need them, so that hits depend on the number of blocks. Prompts without
    # names of their blocks find nothing in it but their own after a preemption, and preemptions count as a limit
    # that was reached.
    plain = not (kv_cache.prefix_caching and shared) and not kv_cache.watermark
    # An encoder has limits of its own, which follow from the budget of a step. Requests that find no slot for their
    # adapter are passed over, whatever the other limits.
    plain = plain and pool.encoder is None and pool.spec.lora is None
    batching = pool.spec.batching
    if batching.policy in RESERVING:
        # Prompts that wait for a fuller step compare it with the budget, those of balanced ranks requests with seats.
        options = batching.options or {}
        waits = options.get("batch_wait_timeout_iters") or options.get("attention_dp_enable_balance")
        return plain and speculation is None and not pool.chunks_follow and not waits
    in_turn = speculation is None or speculation.scheme.shape.in_turn
    return plain and in_turn and batching.policy in POLICIES


def _reached(pool: DeployedPool, result: Result, *, dealt: bool) -> Allowed:
    """Return an upper bound on the use of the limits of a pool; `dealt` says that its cores get requests in turn."""
    outcome, stream, role = result.outcome, result.stream, pool.spec.role
    begin = outcome.prompt_done if role == "decode" else outcome.scheduled
    end = outcome.finish if role != "prefill" else outcome.transferred
    came = begin >= 0
    begin, end = begin[came], end[came]
    drafts = DraftRoom.of(pool.spec)
    # A finished request may hold its seat until the step after the next one has been scheduled; if an accepted draft
    # completed it, one step longer.
    steps = 2 if pool.spec.speculation is None else 3
    end = np.where(end < 0, NO_END, end + steps * _longest_step(outcome.intervals))
    reserves = pool.spec.batching.policy in RESERVING
    # The client's limit on an answer is at least its length; a prefill instance delivers one token.
    answers = np.maximum(stream.output_tokens, (stream.max_tokens or 0) if reserves else 0)
    tokens = (stream.prompt_tokens + (int(reserves) if role == "prefill" else answers) + drafts.ahead)[came]
    blocks = -(-tokens // pool.spec.kv_cache.block_size) + 1
    if role == "prefill":
        # The core of a request is not recorded: if it is not known, all count on one core, which is an upper bound.
        core = np.flatnonzero(came) % (pool.num_cores if dealt else 1)
    else:
        core = outcome.core[came]
    seats = _most_at_once(core, begin, end, np.ones(len(begin), dtype=np.int64))
    most_tokens = max((use.most_tokens for use in outcome.cores if use.pool == pool.spec.name), default=0)
    short = bool(outcome.preemptions.any())
    most_blocks = NO_END if short else _most_at_once(core, begin, end, blocks)
    if not reserves and not short:
        # A request that was refused asked for the blocks of its tokens in that step.
        of_a_step = -(-pool.spec.batching.max_num_batched_tokens // pool.spec.kv_cache.block_size) + 1
        most_blocks = min(most_blocks + min(int(blocks.max(initial=0)), of_a_step), _taken(pool, result, blocks))
    reached = Allowed(seats, drafts.budget(seats, most_tokens), most_blocks)
    return _with_refused(pool, result, reached, int(blocks.max(initial=0)), short=short) if reserves else reached


def _taken(pool: DeployedPool, result: Result, blocks: Ints) -> int:
    """Return the most KV blocks that a core of a pool had taken at one time, with those of one more request, which it
    may have refused; NO_END if that was not counted. `blocks` are those of each request."""
    cores = [use for use in result.outcome.cores if use.pool == pool.spec.name]
    counts = [use.most_blocks for use in cores if use.most_blocks is not None]
    return max(counts) + int(blocks.max(initial=0)) if counts and len(counts) == len(cores) else NO_END


def _with_refused(pool: DeployedPool, result: Result, reached: Allowed, largest: int, *, short: bool) -> Allowed:
    """Return what was reached of the limits of a pool that reserves room, with what a request may have been refused:
    `largest` is the most blocks that one may need, and `short` says that some lost theirs."""
    batching, kv_cache, stream = pool.spec.batching, pool.spec.kv_cache, result.stream
    seats, blocks = reached.seats + 1, min(reached.blocks + largest, NO_END)
    if batching.chunked_prefill:
        tokens = reached.tokens + kv_cache.block_size
        if batching.policy == "tensorrt-llm" and tokens >= batching.max_num_batched_tokens:
            return Allowed(NO_END, NO_END, NO_END)
        return Allowed(seats, tokens, blocks)
    if short and kv_cache.prefix_caching:
        # A prompt that comes back is asked for as a whole, and computed but for what is still in the cache.
        return Allowed(seats, NO_END, blocks)
    # What a request had delivered is computed again after it lost its blocks.
    prompts = stream.prompt_tokens + (stream.output_tokens if short else 0)
    longest = 0 if pool.spec.role == "decode" and not short else int(prompts.max(initial=0))
    return Allowed(seats, reached.tokens + longest, blocks)


def _longest_step(intervals: Ints) -> int:
    """Return the ticks of the longest step in which any request decoded; rows as in `Outcome.intervals`."""
    if not len(intervals):
        return 0
    first, slope, steps, _ = intervals.T
    return int(np.maximum(first, first + slope * (steps - 1)).max())


def _most_at_once(core: Ints, begin: Ints, end: Ints, weight: Ints) -> int:
    """Return the largest sum of weights that overlap on one core."""
    at, change = np.concatenate([begin, end]), np.concatenate([weight, -weight])
    cores = np.concatenate([core, core])
    # At one instant those that come are counted before those that go: an upper bound.
    order = np.lexsort((-change, at, cores))
    # The sum is back at zero after each core.
    return int(change[order].cumsum().max(initial=0))
