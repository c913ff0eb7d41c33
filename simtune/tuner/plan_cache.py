"""Memory, drafting, step costs and bounds of candidates, each computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_

from simtune.costs.compiled import CompiledCosts
from simtune.costs.drafting import CompiledRounds
from simtune.costs.elastic_experts import with_ranks
from simtune.costs.iteration import REDRAWN_KINDS, StepModel
from simtune.costs.memory import Memory
from simtune.errors import Infeasible
from simtune.sim.deployment import Deployment, compiled_costs
from simtune.sim.encoding import PoolEncoder
from simtune.sim.feasibility import check
from simtune.sim.plan_parts import POLICY
from simtune.sim.pools import DeployedPool
from simtune.specs.pool import Pool, Role
from simtune.specs.speculation import Speculation
from simtune.tuner.bounds import RateBound
from simtune.tuner.bounds.best_case import PoolCapacity
from simtune.tuner.bounds.encoding import least_encoding_s, stage_rates
from simtune.tuner.doubt.margin import MEAN_OF, margin
from simtune.tuner.drafting import Draft, DraftContexts, DraftGrid, RoundCost, round_costs
from simtune.tuner.question import Question
from simtune.tuner.space.candidates import Candidate, PoolChoice, PoolShape
from simtune.workload.requests import RequestStream

DIGITS = 4
"""Significant digits of a router's weights."""


@dataclass(frozen=True)
class Refused:
    """Reason why a pool or a plan is not simulated."""

    status: str
    reason: str


class NoCosts:
    """Step costs of a deployment that is never run."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def with_ranks(self, ranks: int) -> NoCosts:
        """Return these costs: none are known of any number of ranks."""
        return self


class DraftCache:
    """Speculation of pools, chosen once for all that differ in nothing that the choice depends on."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._round_costs: dict[object, RoundCost] = {}
        self._contexts: dict[int, DraftContexts] = {}
        self._speculations: dict[tuple[object, DraftGrid], Speculation | None] = {}

    def speculation(self, choice: PoolChoice, draft: Draft, pool: Pool, stream: RequestStream) -> Speculation | None:
        """Return the best speculation of a pool for a load, as vLLM offers it, computed once for all pools of its cut
        that have the same batches; None if drafting pays at no batch size.

        The scheme is the study's own if it has one, else a chain whose length follows the batch. Raise Infeasible if
        the drafter does not work with the pool."""
        if draft.choice.scheme is not None:
            return draft.speculation(draft.choice.scheme)
        model, hardware = self._question.model_of(choice.shape), self._question.shared_hardware(choice)
        contexts = self._contexts.get(len(stream)) or self._contexts.setdefault(len(stream), DraftContexts.of(stream))
        grid = DraftGrid.of(draft, model, hardware, pool, contexts)
        key = (replace(choice.shape, role="mixed"), choice.drafter, choice.fixed)
        if key not in self._round_costs:
            self._round_costs[key] = round_costs(draft, model, hardware, pool)
        if (key, grid) not in self._speculations:
            self._speculations[key, grid] = grid.speculation(draft, self._round_costs[key])
        return self._speculations[key, grid]


class ServerRates:
    """Rates of encoder servers in front of pools, computed once for each shape of these."""

    def __init__(self, question: Question, max_model_len: int) -> None:
        self._question, self._max_model_len = question, max_model_len
        self._rates: dict[tuple[PoolShape, int], float] = {}

    def bound(self, candidate: Candidate, pools: Sequence[DeployedPool], stream: RequestStream) -> RateBound:
        """Return the requests per second that the encoder servers of a candidate with these pools serve at most,
        infinite without any."""
        front = candidate.pools[0].shape
        if not front.encoder_devices:
            return RateBound(math.inf, "nothing")
        key = front, len(stream)
        if key not in self._rates:
            plan = self._question.plan(candidate, self._max_model_len)
            deployed = [replace(pool, spec=spec) for pool, spec in zip(pools, plan.pools, strict=True)]
            self._rates[key] = min(stage_rates(plan, self._question.model_of(front), deployed, stream).values())
        return RateBound(self._rates[key], "capacity of the encoder servers")


class PlanCache:
    """Memory, costs and bounds of each pool of a space, computed once, however many candidates share the pool."""

    def __init__(self, question: Question, candidates: Iterable[Candidate]) -> None:
        self.question = question
        every = list(candidates)
        self.max_model_len = question.length_limit(every)
        limited = any(pool.shape.max_model_len for candidate in every for pool in candidate.pools)
        self._longest = question.longest_request(every) if limited else 0
        """Tokens of the longest request; 0 unless max_model_len is searched."""
        self._widest = _widest(pool for candidate in every for pool in candidate.pools)
        self._settled: dict[PoolChoice, PoolChoice | Refused] = {}
        self._settled_objects: dict[int, tuple[PoolChoice, PoolChoice | Refused]] = {}
        self._memories: dict[PoolChoice, Memory] = {}
        self._sustained: dict[tuple[PoolChoice, Role | None, int], float] = {}
        self._ways: dict[PoolShape, str] = {}
        self._streams: dict[int, RequestStream] = {}
        self._long_streams: dict[int, RequestStream] = {}
        self._costs: dict[tuple[object, ...], CompiledCosts | CompiledRounds] = {}
        self._drafts = DraftCache(question)
        self._capacities: dict[tuple[object, ...], PoolCapacity] = {}
        self._servers = ServerRates(question, self.max_model_len)
        self._known: dict[PoolChoice, DeployedPool] = {}
        """Pools that were deployed before: another number of instances shares everything but that number."""

    def stream(self, candidate: Candidate) -> RequestStream:
        """Return the requests of a candidate, at the workload's own rate."""
        requests = self.question.num_requests(candidate)
        if requests not in self._streams:
            self._streams[requests] = self.question.stream(candidate)
        return self._streams[requests]

    def _capacity_stream(self, candidate: Candidate) -> RequestStream:
        """Return the requests that the capacity of a candidate is of (`Question.capacity_stream`)."""
        requests = self.question.num_requests(candidate)
        if requests not in self._long_streams:
            self._long_streams[requests] = self.question.capacity_stream(candidate)
        return self._long_streams[requests]

    # --- whether it fits --------------------------------------------------------------------------------------

    def settled(self, candidate: Candidate) -> Candidate | Refused:
        """Return the candidate with its drafts settled, or why an engine would refuse it or why drafting would not
        pay."""
        pools = []
        for choice in candidate.pools:
            settled = self._settled_as(choice, candidate)
            if isinstance(settled, Refused):
                return settled
            pools.append(settled)
        with_drafts = candidate if all(map(is_, pools, candidate.pools)) else candidate.with_pools(pools)
        refusal = _unsettled(self.question, with_drafts, self.pool) or self._no_way(with_drafts)
        if refusal:
            return Refused("does_not_fit", refusal)
        return self._weighted(with_drafts) if with_drafts.of_kinds else with_drafts

    def unfit(self, choice: PoolChoice, candidate: Candidate) -> str:
        """Return why a pool of a candidate cannot be, or why drafting would not pay there; empty if it can."""
        settled = self._settled_as(choice, candidate)
        return settled.reason if isinstance(settled, Refused) else ""

    def _settled_as(self, choice: PoolChoice, candidate: Candidate) -> PoolChoice | Refused:
        """Return a pool as it is settled; cached by the object, which the plans of a space share."""
        cached_pool = self._settled_objects.get(id(choice))
        if cached_pool is not None:
            return cached_pool[1]
        settled = self._settled_alone(choice.alone, candidate)
        if not isinstance(settled, Refused):
            settled = choice if settled.speculation is None else replace(choice, speculation=settled.speculation)
        self._settled_objects[id(choice)] = choice, settled
        return settled

    def _settled_alone(self, alone: PoolChoice, candidate: Candidate) -> PoolChoice | Refused:
        if alone not in self._settled:
            self._settled[alone] = self._settle(alone, candidate)
        return self._settled[alone]

    def _weighted(self, candidate: Candidate) -> Candidate:
        """Return the candidate with a weight for each pool.

        A weight is the requests per second that one core of the pool sustains, over those of the first pool's.
        """
        stream, rps_per_core = self._capacity_stream(candidate), []
        for choice in candidate.pools:
            rps_per_core.append(self.sustains(choice, stream) / (choice.shape.pp * choice.shape.attention_dp))
        weights = [float(f"{rps / rps_per_core[0]:.{DIGITS}g}") for rps in rps_per_core]
        pools = zip(candidate.pools, weights, strict=True)
        return candidate.with_pools(replace(choice, weight=weight) for choice, weight in pools)

    def _settle(self, choice: PoolChoice, candidate: Candidate) -> PoolChoice | Refused:
        q, hardware, draft = self.question, self.question.shared_hardware(choice), self.question.draft(choice.drafter)
        model = q.model_of(choice.shape)
        # A plan that was settled before, such as the chosen plan of a day, has its drafts already.
        choice = choice if choice.speculation is None else replace(choice, speculation=None)
        try:
            pool = self.pool(choice)
            # A pool that does not fit without drafts does not fit with them; check first, for choosing drafts is slow.
            self._memories[choice] = check(pool, model, hardware, q.drafting_of(choice) if draft is None else None)
            for ranks in _fewer_ranks(choice):
                with_ranks(pool, model, ranks)  # they may have no room for all experts
            refusal = _too_short(choice, self._longest) or _too_small_a_budget(pool, self.stream(candidate))
            if refusal:
                return Refused("does_not_fit", refusal)
            if choice.changes and draft is None:
                # Settings of a variant may need what a profile lacks, such as a link to the host.
                self.costs(choice)
            if draft is None:
                return choice
            stream = self.stream(candidate)
            speculation = self._drafts.speculation(choice, draft, pool, stream)
            if speculation is None:
                return Refused("pruned", f"drafting with {choice.drafter} pays at no batch size")
            choice = replace(choice, speculation=speculation)
            # Once more with the drafter: its weights and states take memory of the KV cache.
            self._memories[choice] = check(self.pool(choice), model, hardware, draft.drafting)
            return choice
        except Infeasible as error:
            return Refused("does_not_fit", str(error))

    def _length(self, choice: PoolChoice) -> int:
        """Return the max_model_len of a pool."""
        return choice.shape.max_model_len or self.max_model_len

    def _no_way(self, candidate: Candidate) -> str:
        """Return why KV caches could not be sent from a prefill pool, or why the profile has no costs of a pool; empty
        if neither. Computed once for each shape that prefills."""
        if candidate.prefilling is None:
            return ""
        shape = candidate.prefilling.shape
        if shape not in self._ways:
            try:
                # Compiling step costs takes the most time of a deployment, and the plan may never be simulated.
                costs = {self.pool(choice).name: NoCosts() for choice in candidate.pools}
                for pool in self.question.deploy(candidate, self.max_model_len, costs).pools:
                    StepModel(self.question.model_of(shape), pool.hardware, pool.spec)
                self._ways[shape] = ""
            except Infeasible as error:
                self._ways[shape] = str(error)
        return self._ways[shape]

    def pool(self, choice: PoolChoice) -> Pool:
        """Return the pool of a choice."""
        study = self.question.study
        return choice.pool(study, self.max_model_len, self.question.settings_of(choice.shape))

    # --- what it costs, and could reach -----------------------------------------------------------------------

    def costs(self, choice: PoolChoice, ranks: int | None = None) -> CompiledCosts | CompiledRounds:
        """Return the step costs of a pool: compiled once for all pools of its cut that draft alike and have the
        same settings, whatever their role, for the most seats and the largest budget among them. `ranks` are the
        data-parallel ranks, all of them unless given."""
        shape = replace(choice.shape, role="mixed")
        key = (shape, choice.drafter, choice.speculation, choice.fixed, choice.changed, ranks)
        if key not in self._costs:
            seats, tokens = self._widest[shape]
            q, pool = self.question, self.pool(choice)
            if ranks is not None:
                pool = with_ranks(pool, q.model_of(choice.shape), ranks)
            # Tables for the widest pool of the cut serve all narrower ones: they only read less of them.
            wide = pool.batching.model_copy(update={"max_num_seqs": seats, "max_num_batched_tokens": tokens})
            pool = pool.model_copy(update={"batching": wide})
            factors = self._margins(pool, choice)
            self._costs[key] = compiled_costs(
                pool, q.model_of(choice.shape), q.shared_hardware(choice), self._length(choice), q.drafting_of(choice),
                factors,
            )  # fmt: skip
        return self._costs[key]

    def _margins(self, pool: Pool, choice: PoolChoice) -> Mapping[str, float] | None:
        """Return the factors on operator times with which a pool is judged, by kind; None if it is judged as
        predicted."""
        q, confidence = self.question, self.question.study.slo.confidence
        if confidence is None:
            return None
        model, hardware = q.model_of(choice.shape), q.shared_hardware(choice)
        blocks = self._memories[choice.alone].num_blocks if choice.alone in self._memories else None
        factor = margin(confidence, model, hardware, pool, q.draws.stream(MEAN_OF), blocks, q.study.seed)
        return dict.fromkeys(REDRAWN_KINDS, factor)

    def deployment(self, candidate: Candidate) -> Deployment:
        """Return the deployment of a settled candidate, with step costs that other candidates share."""
        deployed = [self._known.get(choice.alone) for choice in candidate.pools]
        pools = [pool for pool in deployed if pool is not None]
        if len(pools) == len(deployed):
            plan = self.question.plan(candidate, self.max_model_len)
            deployed_pools = (replace(pool, spec=spec) for pool, spec in zip(pools, plan.pools, strict=True))
            return Deployment(plan, self.question.model_of(candidate.decoding.shape), tuple(deployed_pools))
        costs = {self.pool(choice).name: self.costs(choice) for choice in candidate.pools}
        deployment = self.question.deploy(candidate, self.max_model_len, costs)
        for choice, pool in zip(candidate.pools, deployment.pools, strict=True):
            if choice.speculation is None and choice.fixed is None:
                self._known[choice.alone] = pool
        return deployment

    def judged_deployment(self, candidate: Candidate, max_model_len: int) -> Deployment:
        """Return the deployment of a settled candidate for requests of up to `max_model_len` tokens, with the margins
        with which it is judged."""
        q, costs = self.question, None
        if q.study.slo.confidence is not None:
            pools = {choice: self.pool(choice) for choice in candidate.pools}
            costs = {
                pool.name: compiled_costs(
                    pool, q.model_of(choice.shape), q.shared_hardware(choice), max_model_len, q.drafting_of(choice),
                    self._margins(pool, choice),
                )
                for choice, pool in pools.items()
            }  # fmt: skip
        return q.deploy(candidate, max_model_len, costs)

    def memory(self, choice: PoolChoice) -> Memory:
        """Return the memory of an instance of a settled pool."""
        return self._memories[choice.alone]

    def capacity(self, candidate: Candidate) -> RateBound:
        """Return the requests per second that no schedule of a settled candidate exceeds."""
        stream = self._capacity_stream(candidate)
        pools = [self._deployed(choice.alone) for choice in candidate.pools]
        return min(_pools_capacity(self, candidate, stream), self._servers.bound(candidate, pools, stream))

    def instance_rate(self, choice: PoolChoice, candidate: Candidate) -> tuple[int, float] | None:
        """Return (GPUs of an instance of one of a candidate's pools, requests per second that it could sustain at
        most); None if an engine would refuse it."""
        settled = self._settled_alone(choice.alone, candidate)
        if isinstance(settled, Refused):
            return None
        return settled.devices, self.sustains(settled, self._capacity_stream(candidate))

    def sustains(self, choice: PoolChoice, stream: RequestStream, as_role: Role | None = None) -> float:
        """Return the requests per second that an instance could sustain at most, in its own role unless given."""
        alone, key = choice.alone, (choice.alone, as_role, len(stream))
        if key not in self._sustained:
            self._sustained[key] = self._capacity(alone, stream, as_role).rps(self._deployed(alone)) / alone.instances
        return self._sustained[key]

    def _deployed(self, choice: PoolChoice) -> DeployedPool:
        pool, hardware = self.pool(choice), self.question.shared_hardware(choice)
        return DeployedPool(pool, hardware, self._memories[choice], self.costs(choice), self._length(choice), 0)

    def _capacity(self, choice: PoolChoice, stream: RequestStream, as_role: Role | None = None) -> PoolCapacity:
        caches, role = self.pool(choice).kv_cache.prefix_caching, as_role or choice.shape.role
        key = (choice.shape, role, choice.drafter, choice.speculation, choice.fixed, caches, len(stream))
        if key not in self._capacities:
            tables, *fewer_ranks = [self.costs(choice, ranks).tables for ranks in (None, *_fewer_ranks(choice))]
            encoder = _encoder(self.question, choice, self.pool(choice), self._widest)
            self._capacities[key] = PoolCapacity(
                tables, stream, role, self._length(choice), caches=caches, fewer_ranks=fewer_ranks,
                encoding_s=least_encoding_s(encoder, stream),
            )  # fmt: skip
        return self._capacities[key]


def _pools_capacity(plan_cache: PlanCache, candidate: Candidate, stream: RequestStream) -> RateBound:
    """Return the requests per second that no schedule on the pools of a settled candidate exceeds."""
    rates = [plan_cache.sustains(choice, stream) * choice.instances for choice in candidate.pools]
    bounds = [RateBound(rps, _capacity_of(c.shape.role)) for rps, c in zip(rates, candidate.pools, strict=True)]
    if candidate.prefills_locally:
        # Whoever computes its prompt, each request decodes on a decode instance.
        alone_rps = plan_cache.sustains(candidate.decoding, stream, "mixed") * candidate.decoding.instances
        return min(bounds[1], RateBound(bounds[0].rps + alone_rps, "capacity"))
    return RateBound(sum(bound.rps for bound in bounds), "capacity") if candidate.of_kinds else min(bounds)


def _encoder(
    question: Question, choice: PoolChoice, pool: Pool, widest: Mapping[object, tuple[int, int]]
) -> PoolEncoder | None:
    """Return the encoder in the steps of a pool with the largest token budget of its cut; None without one."""
    _, budget = widest[replace(choice.shape, role="mixed")]
    wide = pool.batching.model_copy(update={"max_num_batched_tokens": budget})
    wide_pool = pool.model_copy(update={"batching": wide})
    return PoolEncoder.of(wide_pool, question.model_of(choice.shape), question.shared_hardware(choice))


def _capacity_of(role: Role) -> str:
    """Return the name of the bound by the capacity of a pool."""
    return "capacity" if role == "mixed" else f"capacity of the {role} pool"


def _unsettled(question: Question, candidate: Candidate, pool_of: Callable[[PoolChoice], Pool]) -> str:
    """Return why there are too few devices for a candidate, or which settings of autoscaled pools, or of pools on the
    same GPUs, contradict each other; empty if none do."""
    if candidate.scales or candidate.shares:
        try:
            pools = [pool_of(choice) for choice in candidate.pools]
        except Infeasible as error:
            return str(error)
        if candidate.shares and len({pool.kv_cache.memory_utilization for pool in pools}) > 1:
            return "share: both pools are one process; set the same kv_cache.memory_utilization for both"
        if candidate.shares and any(pool.devices > pool.model_devices for pool in pools):
            return "share: a drafter with GPUs of its own cannot be beside pools that share GPUs"
    return _too_many(question, candidate)


def _fewer_ranks(choice: PoolChoice) -> range:
    """Return the numbers of ranks below all of them that instances of a pool may have; none if ranks do not come and
    go."""
    most, scaling = choice.shape.attention_dp, choice.scaling
    return range(most if scaling is None else scaling.min_ranks or most, most)


def _too_short(choice: PoolChoice, longest: int) -> str:
    """Return why a pool would refuse a request of `longest` tokens, the longest of the load; empty if it would not."""
    limit = choice.shape.max_model_len
    if not limit or limit >= longest:
        return ""
    return f"max_model_len ({limit}) is less than the longest request of the load ({longest:,} tokens)"


def _too_small_a_budget(pool: Pool, stream: RequestStream) -> str:
    """Return why no step has room for the longest prompt of a load, if the engine does not cut prompts."""
    batching, longest = pool.batching, int(stream.prompt_tokens.max())
    cuts = batching.chunked_prefill and POLICY.find(batching.policy).cuts_prompts != "never"
    if pool.role == "decode" or cuts or longest <= batching.max_num_batched_tokens:
        return ""
    return (
        f"without chunked prefill max_num_batched_tokens ({batching.max_num_batched_tokens}) must be at least the "
        f"longest prompt of the load ({longest:,} tokens)"
    )


def _too_many(question: Question, candidate: Candidate) -> str:
    """Return of which hardware a candidate takes more than there is; empty if of none."""
    if all(pool.speculation is None and pool.fixed is None for pool in candidate.pools):
        # Instances were counted such that they fit.
        return ""
    for entry in question.study.hardware:
        devices = sum(pool.devices for pool in candidate.pools if pool.shape.gpu == entry.profile)
        if devices > entry.devices:
            return f"needs {devices} {entry.profile}, of which there are {entry.devices}"
    return ""


def _widest(choices: Iterable[PoolChoice]) -> dict[object, tuple[int, int]]:
    """Return the most seats and the largest budget of the pools of each cut."""
    widest: dict[object, tuple[int, int]] = {}
    for choice in {id(choice): choice for choice in choices}.values():
        cut = replace(choice.shape, role="mixed")
        seats, tokens = widest.get(cut, (0, 0))
        widest[cut] = max(seats, choice.max_num_seqs), max(tokens, choice.max_num_batched_tokens)
    return widest
