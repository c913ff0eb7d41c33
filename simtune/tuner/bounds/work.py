"""Lower bounds on the time that requests take on one pool: alone (floors), and of the time of a core (works).

Per request P prompt tokens of which p are to be computed, n = O - 1 decode tokens, g context tokens read over them, and
(c0, c1) a line below the step time, c2 and h the least attention and sampling take. All steps that a set of requests
has a part in take, however they are scheduled, preempted, chunked and batched,

    sum of c0 x steps + c1 x (p + n) + c2 g + prefill attention + h O,

and of steps there are at least, each of these by itself (their per-request maximum would count a step twice),

    W1, W3   (p + n) / T      T tokens in a step
    W3       n / S            S seats
    W3       g' / M           M tokens of KV cache, g' without what a prefix cache may share
    W2       n / B            where the TPOT of all is within s2: B = (s2 - c0) / (c1 + c2 min P + h)

The last because the limits add up to sum B_k t_k <= s2 sum B_k over the steps, of B_k decodes and t_k seconds each, and
t_k >= c0 + (c1 + c2 min P + h) B_k rises with B_k: so the mean step has at most B decodes. A recomputed prompt
yields a token without its decode attention, so that c2 is at most what it takes instead, c1 and prefill attention.

With drafts of K tokens in turn a round emits up to K + 1: n, g and the steps count as in `Capacity`.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.costs.bounds import LeastCosts
from simtune.sim.plan_parts import POLICY
from simtune.sim.pools import DeployedPool
from simtune.tuner.bounds.bounded_requests import BoundLoad

CUTTING_LAST = ("vllm-fcfs", "vllm-priority", "sglang")
"""Policies that cut only the last prompt of a step, if it exceeds what is left of the budget."""


class Rounds(NamedTuple):
    """Draft rounds of a pool: the most tokens that one round emits, and the number of replicas that verify in turn."""

    most: int
    replicas: int

    @classmethod
    def of(cls, pool: DeployedPool) -> Rounds:
        """Return the rounds of a pool; one token and one replica without drafts."""
        if pool.spec.speculation is None:
            return cls(1, 1)
        shape = pool.spec.speculation.scheme.shape
        return cls(shape.depth + 1, max(1, shape.replicas))


class CostLine(NamedTuple):
    """A step of m tokens and C context tokens takes at least start_s + token_s m + context_s C."""

    start_s: float
    token_s: float
    context_s: float


class PoolWork:
    """Floors and works of the requests of a load on one pool."""

    def __init__(self, pool: DeployedPool, least: LeastCosts, load: BoundLoad) -> None:
        spec, parallelism = pool.spec, pool.spec.parallelism
        self.pool, self.least, self.load = pool, least, load
        self.rounds = Rounds.of(pool)
        self.speed = float(pool.most_cores * self.rounds.replicas)
        self.prefills = spec.role != "decode"
        self.seats = max(1, spec.batching.max_num_seqs // parallelism.pp)
        self.budget = max(spec.batching.max_num_batched_tokens, spec.kv_cache.block_size)
        self.kv_tokens = max(1, pool.memory.num_blocks // parallelism.pp * spec.kv_cache.block_size)
        self.stages = parallelism.pp if pool.chunks_follow else 1
        """Stages among which the chunks of one prompt are divided at a time."""
        # Chunks of a prompt that is computed again follow one another as well.
        anew_s, token_s = (share / self.stages for share in self._recomputed())
        self.lines = [
            CostLine(c0 + least.after_s, c1, min(least.context_s, anew_s + c1 * token_s)) for c0, c1 in least.lines
        ]

    def _recomputed(self) -> tuple[float, float]:
        """Return the extra cost of a recomputed prompt per token, in place of the decode attention that it spares.

        The result is (seconds of prefill attention, share of the linear part); infinite if nothing is recomputed.
        """
        kv_cache, stream = self.pool.spec.kv_cache, self.load.stream
        if kv_cache.preemption == "swap":
            return float("inf"), 0.0
        longest = int((stream.prompt_tokens + stream.output_tokens).max())
        at = np.unique(np.geomspace(1, longest, 40).astype(np.int64))
        # A preempted request may find its own blocks in the prefix cache, as they were when it was preempted.
        cached = at - 1 if kv_cache.prefix_caching else 0 * at
        to = np.append(at[1:], longest)
        return float((self.least.prefill_s(at, cached) / to).min()), 0.0 if kv_cache.prefix_caching else 0.5

    @cached_property
    def hits(self) -> Ints:
        """Prompt tokens that may be cached and need not be computed, per request."""
        return self.load.could_hit if self.pool.spec.kv_cache.prefix_caching else 0 * self.load.could_hit

    @cached_property
    def attention_s(self) -> Array:
        """Least seconds of prefill attention and the sampling of the first token, per request."""
        seconds: Array = self.least.prefill_s(self.load.stream.prompt_tokens, self.hits) + self.least.head_s
        return seconds

    # --- floors -----------------------------------------------------------------------------------------------

    def _linear_s(self, steps: Array, tokens: Array) -> Array:
        """Return the linear part of `steps` steps with `tokens` tokens: the highest line at the tokens per step."""
        start_s, token_s, _ = np.array(self.lines).T
        meet = np.maximum.accumulate((start_s[:-1] - start_s[1:]) / (token_s[1:] - token_s[:-1]))
        highest = np.searchsorted(meet, tokens / np.maximum(steps, 1))
        linear: Array = start_s[highest] * steps + token_s[highest] * tokens
        return linear

    @cached_property
    def prefill_floor_s(self) -> Array:
        """Least seconds from arrival to first token of a request that is alone."""
        tokens, least = self.load.prompt - self.hits, self.least
        # A long_prefill_token_threshold does not cut the prompt of a request that is alone.
        chunks = np.ceil(tokens / self.budget)
        gpu = self._linear_s(chunks, tokens) + self.attention_s - least.head_s + least.least_head_s
        shortest_s = least.shortest_s + least.after_s
        floor: Array = np.maximum(gpu, chunks * shortest_s)
        return floor if self.stages == 1 else self._over_stages(floor, chunks, shortest_s)

    def _over_stages(self, floor_s: Array, chunks: Array, shortest_s: float) -> Array:
        """Return the floors of prompts whose chunks follow one another: the first stage takes a share of all chunks,
        and the others theirs of the last one."""
        followed: Array = (floor_s + (self.stages - 1) * shortest_s) / self.stages
        spec = self.pool.spec
        batching = spec.batching
        # These policies cut a prompt that fits a step only where it shares one with decodes or ends of other prompts.
        # No other step follows the latter, and the former with some policies.
        mixes = spec.role != "prefill" and POLICY.find(batching.policy).decodes_followed
        uncut = (
            batching.policy in CUTTING_LAST
            and not mixes
            and batching.chunk_pipeline != "dynamic"
            and not batching.long_prefill_token_threshold
            and (batching.prefill_schedule_interval or 1) == 1
            and spec.speculation is None
        )
        return np.where((chunks <= 1) & uncut, floor_s, followed)

    @cached_property
    def decode_floor_s(self) -> Array:
        """Least seconds from first to last token of a request that is alone."""
        least, load = self.least, self.load
        rounds = np.ceil(load.decodes / self.rounds.most)
        one_token = np.ones(1, dtype=np.int64)
        # A round may recompute the request instead: take the smaller of both attention times.
        shortest = min(least.attention_s, float(least.prefill_s(one_token, one_token - 1)[0]))
        steepest: dict[float, float] = {}
        for line in self.lines:
            steepest[line.context_s] = max(steepest.get(line.context_s, 0.0), line.start_s + line.token_s)
        linear = np.max(
            [
                round_s * rounds + np.maximum(shortest * rounds, context_s * self._context)
                for context_s, round_s in steepest.items()
            ],
            axis=0,
        )
        gpu = linear + least.least_head_s * rounds
        floor: Array = np.maximum(gpu, rounds * (least.shortest_s + least.after_s)) / self.rounds.replicas
        return floor

    @cached_property
    def _context(self) -> Array:
        """Return the context tokens that the rounds of each request read at least, as if each round read only what its
        first token reads."""
        load, most = self.load, self.rounds.most
        read: Array = np.maximum(load.context - load.decodes * (most - 1) / 2, load.decodes * load.prompt) / most
        return read

    # --- works ------------------------------------------------------------------------------------------------

    @cached_property
    def prefill_s(self) -> Array:
        """W1: seconds of a core that each prompt takes. A token is cheapest in the fullest step."""
        per_token = max(line.start_s / self.budget + line.token_s for line in self.lines)
        work: Array = (self.load.prompt - self.hits) * per_token + self.attention_s
        return work

    def total_s(self, counted: NDArray[np.bool_], tpot_s: float) -> list[Array]:
        """Return W2 and W3: seconds of a core that each request takes, one array for each way to count the steps.

        The work is that of its decode tokens and, if the pool prefills, of its prompt. The lines are chosen for the
        `counted` requests. `tpot_s` is the largest limit on their TPOT, infinite if a request has none.
        """
        load, most = self.load, self.rounds.most
        decodes = load.decodes / most
        tokens = load.decodes + (load.prompt - self.hits) if self.prefills else load.decodes
        private = np.maximum(self._context - decodes * self._shared, 0.0)
        fixed = self.least.head_s * load.decodes + (self.attention_s if self.prefills else 0.0)
        counts = [tokens / self.budget, decodes / self.seats, private / self.kv_tokens]
        of_tokens, of_context = float(tokens[counted].sum()), float(self._context[counted].sum())
        token_costs = [(line, line.token_s * of_tokens + line.context_s * of_context) for line in self.lines]
        # Every line below the step time gives a valid bound: take the one whose sum over the requests is largest.
        works = []
        for steps in counts:
            of_steps = float(steps[counted].sum())
            _, at = max((line.start_s * of_steps + more, at) for at, (line, more) in enumerate(token_costs))
            works.append(self._along(self.lines[at], steps, tokens))
        if np.isfinite(tpot_s) and counted.any():
            of_decodes = float(decodes[counted].sum())
            step_s, shortest = tpot_s * most * self.rounds.replicas, float(load.prompt[counted].min())
            shares = [self._share(line, step_s, shortest) for line in self.lines]
            _, at = max(
                (line.start_s * (share * of_decodes if of_decodes else 0.0) + more, at)
                for at, (share, (line, more)) in enumerate(zip(shares, token_costs, strict=True))
            )
            decoding = np.where(decodes > 0, decodes, 0.0)
            steps = shares[at] * decoding if np.isfinite(shares[at]) else np.where(decodes > 0, np.inf, 0.0)
            works.append(self._along(self.lines[at], steps, tokens))
        return [fixed + work for work in works]

    @property
    def _shared(self) -> Ints:
        return self.load.could_share if self.pool.spec.kv_cache.prefix_caching else 0 * self.load.could_share

    def _along(self, line: CostLine, steps: Array, tokens: Array) -> Array:
        work: Array = line.start_s * steps + line.token_s * tokens + line.context_s * self._context
        return work

    def _share(self, line: CostLine, step_s: float, shortest: float) -> float:
        """Return the share of a step that a decode takes at least (W2), if the mean step takes no longer than `step_s`
        and no prompt is shorter than `shortest`; infinite if no step is fast enough."""
        per_decode = line.token_s + line.context_s * shortest + self.least.head_s
        decode_s = step_s - line.start_s
        return per_decode / decode_s if decode_s > 0 else float("inf")
