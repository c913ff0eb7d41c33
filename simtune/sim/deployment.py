"""From a plan to things that run: memory, cost tables and fresh cores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simtune.costs.compiled import compile_costs
from simtune.costs.drafting import DraftMemory, draft_memory, drafting_model, drafting_parallelism
from simtune.costs.estimate import link_of
from simtune.costs.iteration import StepModel
from simtune.costs.memory import Memory, kv_bytes_per_token, kv_capacity
from simtune.costs.predict import Profile
from simtune.costs.protocol import UNBOUNDED, StepCosts
from simtune.costs.rounds import CompiledRounds
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import POLICIES, DraftingTerms
from simtune.errors import Infeasible, UsageError
from simtune.sim import router
from simtune.sim.core import EngineCore, KvConnector, Pipeline
from simtune.sim.link import Link
from simtune.sim.requests import RequestStream
from simtune.sim.result import MissBudget, Result
from simtune.sim.speculation import AcceptanceSampler, Drafting, check_drafting, counts_ahead, drafting_terms
from simtune.sim.world import Change, World
from simtune.specs import plan as spec
from simtune.specs.drafts import shape_of
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Batching, Failure, KvLink, Parallelism, Plan, Pool, Start, Switch
from simtune.specs.workload import Slo

VLLM_POLICIES = ("vllm-fcfs", "vllm-priority")
NEVER_CHUNKED = ("static", "orca")
ALWAYS_CHUNKED = ("transformers-fifo", "transformers-prefill-first")
PREDICTING = "shortest-predicted-first"
"""The policy that looks at predicted output lengths."""
DEADLINES = "earliest-deadline-first"
"""The policy that looks at deadlines."""

GIB = 2**30


@dataclass(frozen=True)
class DeployedPool:
    """A pool whose memory adds up, with its step costs compiled."""

    spec: Pool
    hardware: Hardware
    memory: Memory
    costs: StepCosts
    max_model_len: int
    kv_block_bytes: int
    """One KV block, all GPUs of an instance together."""
    drafting: Drafting | None = None
    """What its speculation names; None where it does not speculate."""

    @property
    def num_cores(self) -> int:
        return self.spec.instances * self.cores_each

    @property
    def cores_each(self) -> int:
        """Cores of an instance: its virtual engines, or its groups of ranks under data-parallel attention."""
        return self.spec.parallelism.pp * self.spec.parallelism.attention_dp

    def speculation(self, stream: RequestStream, seed: int) -> DraftingTerms | None:
        """How its schedulers draft, and how many drafts are accepted of each request of a stream."""
        if self.spec.speculation is None:
            return None
        assert self.drafting is not None
        sampler = AcceptanceSampler(self.spec.speculation.scheme, self.drafting.acceptance, stream, seed)
        return drafting_terms(self.spec.speculation, sampler)

    def cores(
        self, instances: int, hash_block_tokens: int | None, speculation: DraftingTerms | None = None
    ) -> list[EngineCore]:
        """Fresh cores of the first `instances` instances, ordered so that a round robin is one over instances first.

        An instance with pp pipeline stages runs pp cores ("virtual engines") that share the stages, each with its own
        batch, its share of the seats and of the KV blocks; a core's step takes the time of all stages. With
        data-parallel attention each group of tp ranks is a core with seats and blocks of its own; all step together.
        """
        own, batching, pp = self.spec, self.spec.batching, self.spec.parallelism.pp
        policy = POLICIES[batching.policy]
        num_blocks = self.memory.num_blocks // pp
        settings: dict[str, Any] = {
            "watermark_blocks": int(own.kv_cache.watermark * num_blocks),
            "num_blocks": num_blocks,
            "block_size": own.kv_cache.block_size,
            "max_num_seqs": batching.max_num_seqs // pp,
            "max_num_batched_tokens": batching.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "chunked_prefill": batching.chunked_prefill,
        }
        if batching.policy in VLLM_POLICIES:
            settings |= {
                "async_scheduling": own.schedules_async
                and (own.speculation is None or counts_ahead(own.speculation.scheme)),
                "preemption": own.kv_cache.preemption,
                "speculation": speculation,
            }
            if own.kv_cache.prefix_caching and hash_block_tokens is not None:
                settings |= {"prefix_caching": True, "hash_block_tokens": hash_block_tokens}
        if batching.safety_margin is not None:
            settings["safety_margin"] = batching.safety_margin
        swap = 0
        if own.kv_cache.preemption == "swap":
            host = link_of(self.hardware, "host").bytes_per_s * own.parallelism.devices
            swap = round(self.kv_block_bytes / host * TICKS_PER_SECOND)
        pipelines = [Pipeline(pp) if pp > 1 else None for _ in range(instances)]
        found = [
            EngineCore(policy(**settings), self.costs, instance, own.name, pipeline=pipelines[instance], swap=swap)
            for _ in range(self.cores_each)
            for instance in range(instances)
        ]
        for core in found:
            if core.pipeline is not None:
                core.pipeline.cores.append(core)
        if own.parallelism.attention_dp > 1:
            for instance in range(instances):
                dp_group = _of_instance(found, instance)
                for core in dp_group:
                    core.dp_group = dp_group
        return found


@dataclass(frozen=True)
class Deployment:
    """A plan whose pools all stand. `simulate` may be called many times."""

    plan: Plan
    model: Model
    pools: tuple[DeployedPool, ...]

    @property
    def hardware(self) -> Hardware:
        """Of the first pool."""
        return self.pools[0].hardware

    @property
    def memory(self) -> Memory:
        """Of an instance of the first pool."""
        return self.pools[0].memory

    @property
    def costs(self) -> StepCosts:
        """Of the first pool."""
        return self.pools[0].costs

    @property
    def max_model_len(self) -> int:
        """The longest request that some instance takes."""
        return max(pool.max_model_len for pool in self.pools)

    @property
    def estimated(self) -> list[str]:
        """Operators that no table covers: their times are estimated from the data sheet."""
        return sorted({name for p in self.pools for name in StepModel(self.model, p.hardware, p.spec).estimated})

    @property
    def drafting(self) -> dict[str, Drafting]:
        """What the speculation of each pool that has one names, by the pool's name."""
        return {pool.spec.name: pool.drafting for pool in self.pools if pool.drafting is not None}

    @property
    def num_cores(self) -> int:
        return sum(pool.num_cores for pool in self.pools)

    @property
    def cores_apart(self) -> bool:
        """Whether instances do not disturb each other, so that some of them can stand for all."""
        return len(self.pools) == 1 and isinstance(self.plan.router, spec.RoundRobin) and not self.plan.events

    def simulate(
        self,
        stream: RequestStream,
        slo: Slo | None = None,
        *,
        cores: int | None = None,
        stop_when_lost: bool = False,
        record: bool = False,
        single_steps: bool = False,
        seed: int = 0,
    ) -> Result:
        """Run one stream of requests through the deployment. Raises UsageError if no request fits max_model_len.

        `cores` runs only so many cores (in whole instances), on their share of an open-loop stream, and lets them stand
        for all: under round robin instances do not disturb each other and see the same kind of load, so this differs
        from simulating all of them only in how many requests are watched. Where they do disturb each other (closed
        loops, other routers, several pools, instances that fail) all are run.
        `stop_when_lost` ends the run once a percentile of the SLO cannot be met any more. `seed` is that of routers and
        length predictors that draw.
        """
        slo, scale, offered_rate_rps = slo or Slo(), 1.0, stream.offered_rate_rps
        some: int | None = None
        first = self.pools[0].spec
        if cores is not None and stream.arrival_s is not None and self.cores_apart:
            some = -(-cores // self.pools[0].cores_each)
            if some < first.instances:
                scale = first.instances / some
                stream = stream.share_of(some, first.instances)
            else:
                some = None
        stop_when = MissBudget(stream, slo) if stop_when_lost else None
        world = self._world(stream, slo, some, seed, stop_when, record, single_steps)
        outcome = world.run()
        result = Result(stream, outcome, self.plan.num_devices, slo, offered_rate_rps, scale)
        if result.unserved and not result.completed.any():
            raise UsageError(f"plan {self.plan.name}: its events leave no instance that could answer any request")
        if not result.completed.any():
            raise UsageError(
                f"every request is longer than max_model_len ({self.max_model_len} tokens); raise it in the plan, "
                "or use a model with a longer context"
            )
        return result

    def _world(
        self,
        stream: RequestStream,
        slo: Slo,
        some: int | None,
        seed: int,
        stop_when: MissBudget | None,
        record: bool,
        single_steps: bool,
    ) -> World:
        hash_block_tokens = None
        if stream.hash_ids is not None and any(pool.spec.kv_cache.prefix_caching for pool in self.pools):
            hash_block_tokens = stream.block_tokens
            for pool in self.pools:
                size = pool.spec.kv_cache.block_size
                if pool.spec.kv_cache.prefix_caching and hash_block_tokens % size:
                    raise UsageError(
                        f"the workload names what prompts share in blocks of {hash_block_tokens} tokens, which must "
                        f"be a multiple of the KV block size of pool {pool.spec.name} ({size}); change it"
                    )
        joining = Counter(event.to for event in self.plan.events if isinstance(event, Switch))
        by_pool = {
            p.spec.name: p.cores(
                (some or p.spec.instances) + joining[p.spec.name], hash_block_tokens, p.speculation(stream, seed)
            )
            for p in self.pools
        }
        cores = [core for pool in self.pools for core in by_pool[pool.spec.name]]
        for number, core in enumerate(cores):
            core.number = number
        changes = self._changes(by_pool)
        front = [core for p in self.pools if p.spec.role != "decode" for core in by_pool[p.spec.name]]
        back = [core for p in self.pools if p.spec.role == "decode" for core in by_pool[p.spec.name]]
        decode_router = None
        if back:
            self._connector(by_pool)
            decode_router = _router(self.plan.decode_router or spec.LeastTokens(), back, stream, seed)
        predicted = deadlines = None
        for batching in (pool.spec.batching for pool in self.pools):
            if batching.policy == PREDICTING:
                predicted = stream.predicted_tokens(batching.prediction_sigma, seed).tolist()
            elif batching.policy == DEADLINES:
                deadlines = _deadlines(stream, slo)
        return World(
            cores,
            stream,
            router=_router(self.plan.router, front, stream, seed),
            decode_router=decode_router,
            changes=changes,
            predicted_tokens=predicted,
            deadlines=deadlines,
            single_steps=single_steps,
            record=record,
            stop_when=stop_when,
        )

    def _connector(self, by_pool: Mapping[str, Sequence[EngineCore]]) -> None:
        """Give every prefill instance its way out."""
        way, number = self.plan.link, 0
        assert way is not None
        common: Link | None = None
        for pool in self.pools:
            if pool.spec.role != "prefill":
                continue
            sent = self._sent(pool)
            kv = transfer_terms(sent, pool, way)
            links: dict[int, Link] = {}
            for core in by_pool[pool.spec.name]:
                if core.instance not in links:
                    link = common if way.shared and common is not None else Link(kv.bytes_per_s, number)
                    number += link is not common
                    common = link
                    links[core.instance] = link
                core.connector = KvConnector(
                    links[core.instance],
                    block_bytes=sum(_kv_block_bytes(model, pool.spec) for model in sent),
                    setup=round(kv.setup_s * TICKS_PER_SECOND),
                    descriptors=round(kv.block_s * TICKS_PER_SECOND),
                    layers=sum(model.num_layers for model in sent) if way.layerwise else 1,
                )

    def _sent(self, pool: DeployedPool) -> list[Model]:
        """Models whose keys and values a prefill pool sends: the target, and the drafter of the pool if it is also that
        of some decode pool.

        A drafter that only the decode pool has is taken to know the prompt without having read it.
        """
        own = pool.spec.speculation
        others = [p.speculation.drafter for p in self.plan.pools if p.role == "decode" and p.speculation is not None]
        if own is None or pool.drafting is None or own.drafter not in others:
            return [self.model]
        network = drafting_model(own.drafter, self.model, pool.drafting.model)
        return [self.model] if network is None else [self.model, network]

    def _changes(self, by_pool: Mapping[str, Sequence[EngineCore]]) -> list[Change]:
        """What the plan's events do to cores. Targets of a switch, and instances that start later, begin down."""
        changes: list[Change] = []
        spare = {p.spec.name: p.spec.instances for p in self.pools}
        for pool in self.pools:
            for core in by_pool[pool.spec.name]:
                core.up = core.instance < pool.spec.instances
        for event in self.plan.events:
            mine = _of_instance(by_pool[event.pool], event.instance)
            tick = round(event.at_s * TICKS_PER_SECOND)
            match event:
                case Start(delay_s=delay_s):
                    for core in mine:
                        core.up = False
                    changes.append(Change(tick + round(delay_s * TICKS_PER_SECOND), mine, up=True))
                case Failure(recover_s=recover_s):
                    changes.append(Change(tick, mine, up=False, lost=True))
                    if recover_s is not None:
                        changes.append(Change(tick + round(recover_s * TICKS_PER_SECOND), mine, up=True))
                case Switch(to=to, delay_s=delay_s):
                    then = _of_instance(by_pool[to], spare[to])
                    spare[to] += 1
                    changes.append(Change(tick, mine, up=False, then=then, delay=round(delay_s * TICKS_PER_SECOND)))
        return changes


def _of_instance(cores: Sequence[EngineCore], instance: int) -> list[EngineCore]:
    return [core for core in cores if core.instance == instance]


@dataclass(frozen=True)
class Transfer:
    """What sending KV caches from a prefill instance takes."""

    bytes_per_s: float
    """Of all GPUs together."""
    setup_s: float
    block_s: float
    """Per block besides its bytes: its descriptors."""


def _kv_block_bytes(model: Model, pool: Pool) -> int:
    """Of one KV block of a model, all GPUs of an instance together."""
    kv_dtype = pool.kv_cache.dtype or model.dtype
    return round(pool.kv_cache.block_size * kv_bytes_per_token(model, Parallelism(), 0, kv_dtype))


def transfer_terms(sent: Sequence[Model], pool: DeployedPool, link: KvLink) -> Transfer:
    """The plan's own numbers, and those of the profile's KV transfer operator where it gives none; for the keys and
    values of so many models, the target first.

    Raises Infeasible when the hardware has no link of that name.
    """
    kv_dtype = pool.spec.kv_cache.dtype or sent[0].dtype
    base = Profile(pool.hardware).predictor("kv_transfer", kv_dtype, variant=link.path).operator.base
    each = 1 if link.packed else 2 * sum(model.num_layers for model in sent)
    return Transfer(
        bytes_per_s=link.bytes_per_s or base.bytes_per_s * pool.spec.parallelism.devices,
        setup_s=base.overhead_s if link.setup_s is None else link.setup_s,
        block_s=each * (base.block_s if link.descriptor_s is None else link.descriptor_s),
    )


def _router(chosen: spec.Router, cores: Sequence[EngineCore], stream: RequestStream, seed: int) -> router.Router:
    stale = round(getattr(chosen, "stale_s", 0.0) * TICKS_PER_SECOND)
    match chosen:
        case spec.RoundRobin(weights=weights):
            if not weights:
                return router.RoundRobin(cores)
            return router.WeightedRoundRobin(cores, [weights.get(core.pool, 1.0) for core in cores])
        case spec.LeastOutstanding():
            return router.LeastOutstanding(cores, stale)
        case spec.LeastTokens():
            return router.LeastTokens(cores, stale)
        case spec.PowerOfTwo():
            return router.PowerOfTwo(cores, stale, seed)
        case spec.SessionAffinity():
            if stream.session is None:
                raise UsageError(
                    "the session_affinity router needs sessions, and the workload names none; "
                    "give it a shared_prefix, or choose another router"
                )
            return router.SessionAffinity(cores, stream.session.tolist())
        case spec.PrefixAware():
            if stream.hash_ids is None:
                raise UsageError(
                    "the prefix_aware router needs prompts that say what they share; use a trace with hash_ids, give "
                    "the workload a shared_prefix, or choose another router"
                )
            return router.PrefixAware(
                cores,
                block_tokens=stream.block_tokens,
                memory_blocks=max(1, chosen.memory_tokens // stream.block_tokens),
                load_weight=chosen.load_weight,
                stale=stale,
            )


def _deadlines(stream: RequestStream, slo: Slo) -> list[float]:
    """When each request should have its first token, in seconds: its arrival plus the tightest TTFT limit it is under.

    Without one, never. In a closed loop, where nobody knows when a request will come, the limit alone.
    """
    limits = []
    for own in stream.slos:
        found = [limit for metric, _, limit in (own or slo).limits() if metric == "ttft"]
        limits.append(min(found, default=math.inf))
    due = np.array(limits)[stream.class_index]
    deadlines: list[float] = (due if stream.arrival_s is None else due + stream.arrival_s).tolist()
    return deadlines


def deploy(
    plan: Plan,
    model: Model,
    hardware: Hardware | Mapping[str, Hardware],
    costs: StepCosts | None = None,
    *,
    factors: Mapping[str, float] | None = None,
    drafting: Drafting | Mapping[str, Drafting] | None = None,
) -> Deployment:
    """Check that the plan is possible and compile its costs, unless compiled ones are given.

    `hardware` is that of all pools, or of each pool by the name the plan gives. `factors` multiply the times of
    operator kinds (`simtune.costs.iteration.KINDS`), to draw a world in which they are off. `drafting` is what the
    speculation of all pools, or of each by the pool's name, names; costs of pools that speculate are always compiled
    here. Raises Infeasible, saying what is missing, when the model does not fit or the plan contradicts itself.
    """
    pools = []
    for pool in plan.pools:
        its = hardware if isinstance(hardware, Hardware) else hardware[pool.hardware]
        max_model_len = pool.max_model_len or model.max_position
        drafts = drafting if drafting is None or isinstance(drafting, Drafting) else drafting.get(pool.name)
        memory = check(pool, model, its, drafts)
        given = {} if factors is None else {"factors": factors}
        if pool.speculation is not None and drafts is not None:
            drafter, shape = pool.speculation.drafter, shape_of(pool.speculation.scheme)
            compiled: StepCosts = CompiledRounds(model, its, pool, max_model_len, drafter, shape, drafts.model, factors)
        else:
            compiled, drafts = costs or compile_costs(model, its, pool, max_model_len, **given), None
        block_bytes = _kv_block_bytes(model, pool)
        pools.append(DeployedPool(pool, its, memory, compiled, max_model_len, block_bytes, drafts))
        if pool.role == "prefill":
            assert plan.link is not None
            transfer_terms([model], pools[-1], plan.link)
    return Deployment(plan, model, tuple(pools))


def check(pool: Pool, model: Model, hardware: Hardware, drafting: Drafting | None = None) -> Memory:
    """The memory of one instance of a pool, a drafter's included. Raises Infeasible when the engine would refuse the
    pool's settings.
    """
    batching, pp = pool.batching, pool.parallelism.pp
    max_model_len = pool.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise Infeasible(
            f"max_model_len ({max_model_len}) exceeds the longest context of {model.name} ({model.max_position})"
        )
    others = _refused(pool)
    if others is not None:
        raise Infeasible(f"pool {pool.name}: {others}")
    if batching.max_num_seqs < pp:
        raise Infeasible(f"max_num_seqs ({batching.max_num_seqs}) must be at least pp ({pp})")
    if batching.max_num_batched_tokens < batching.max_num_seqs:
        raise Infeasible(
            f"max_num_batched_tokens ({batching.max_num_batched_tokens}) must be at least max_num_seqs "
            f"({batching.max_num_seqs}); vLLM refuses it too"
        )
    never = batching.policy in NEVER_CHUNKED
    if (never or not batching.chunked_prefill) and batching.max_num_batched_tokens < max_model_len:
        why = f"policy {batching.policy} never cuts prompts: " if never else "without chunked prefill "
        raise Infeasible(
            f"{why}max_num_batched_tokens ({batching.max_num_batched_tokens}) must be at least max_model_len "
            f"({max_model_len})"
        )
    extra, most = DraftMemory(0.0, 0.0), UNBOUNDED
    if pool.speculation is not None:
        if drafting is None:
            raise ValueError(f"pool {pool.name} speculates: what its speculation names must be given")
        check_drafting(pool, drafting, max_model_len)
        extra = draft_memory(pool.speculation.drafter, model, pool, drafting.model)
        if pool.devices > pool.parallelism.devices:
            most, extra = _alone(drafting.model, pool, hardware).num_blocks, DraftMemory(0.0, 0.0)
    memory = kv_capacity(model, hardware, pool, *extra)
    memory = replace(memory, num_blocks=min(memory.num_blocks, most))
    blocks, needed = memory.num_blocks // pp, -(-max_model_len // pool.kv_cache.block_size)
    if blocks < needed:
        missing = (needed - blocks) * pool.kv_cache.block_size * memory.kv_bytes_per_token * pp / GIB
        raise Infeasible(
            f"{model.name} fits {hardware.name} with tp={pool.parallelism.tp} pp={pp}, but its KV cache holds {blocks} "
            f"blocks and one request of max_model_len ({max_model_len}) needs {needed}: {missing:.1f} GiB per device "
            "are missing; raise tp or pp, or lower max_model_len"
        )
    return memory


def _alone(draft: Model | None, pool: Pool, hardware: Hardware) -> Memory:
    """The memory of the pool's draft model on devices of its own."""
    assert draft is not None
    assert pool.speculation is not None
    parallelism = drafting_parallelism(pool.speculation.drafter, pool)
    return kv_capacity(draft, hardware, pool.model_copy(update={"parallelism": parallelism, "speculation": None}))


def _refused(pool: Pool) -> str | None:
    """Settings that the pool's policy does not have, or not together."""
    policy, kv_cache = pool.batching.policy, pool.kv_cache
    if policy not in VLLM_POLICIES:
        for asked, what in (
            (kv_cache.prefix_caching, "prefix_caching"),
            (kv_cache.preemption == "swap", "swap"),
            (pool.speculation is not None, "speculation"),
        ):
            if asked:
                return f"policy {policy} has no {what}; leave it out, or choose {' or '.join(VLLM_POLICIES)}"
    elif kv_cache.prefix_caching and kv_cache.preemption == "swap":
        return "prefix_caching and preemption by swap do not go together; choose one"
    if pool.role == "decode" and policy == "static":
        return "static batches are formed of prompts; a decode pool needs another policy"
    if not pool.batching.chunked_prefill and policy in ALWAYS_CHUNKED:
        return f"policy {policy} always cuts prompts at the token budget; leave chunked_prefill out"
    if pool.batching.safety_margin is not None and policy not in ALWAYS_CHUNKED:
        return f"policy {policy} has no safety_margin; leave it out, or choose {' or '.join(ALWAYS_CHUNKED)}"
    if kv_cache.watermark and policy in ALWAYS_CHUNKED:
        return f"policy {policy} keeps blocks free by safety_margin; leave kv_cache.watermark out"
    return None


def vllm_batching(hardware: Hardware) -> Batching:
    """vLLM's own defaults for its server (release 0.32): larger on devices of 70 GiB and more, A100 excepted."""
    large = hardware.device.memory_bytes >= 70 * GIB and "a100" not in hardware.device.name.lower()
    return Batching(max_num_seqs=1024 if large else 256, max_num_batched_tokens=8192 if large else 2048)


def length_limit(model: Model, stream: RequestStream) -> int:
    """A max_model_len for a load: its longest request rounded up to whole 256 tokens, within the model's limit."""
    longest = int((stream.prompt_tokens + stream.output_tokens).max())
    return min(model.max_position, -(-longest // 256) * 256)


def default_plan(model: Model, hardware: Hardware, stream: RequestStream) -> Plan:
    """One instance on the fewest GPUs that fit, with vLLM's defaults. Raises Infeasible when a node is too small."""
    refusal: Infeasible | None = None
    tp = 1
    while tp <= hardware.device.devices_per_node:
        pool = Pool(
            hardware=hardware.name,
            instances=1,
            parallelism=Parallelism(tp=tp),
            batching=vllm_batching(hardware),
            max_model_len=length_limit(model, stream),
        )
        plan = Plan(name="default", model=model.name, pools=(pool,))
        try:
            check(pool, model, hardware)
            return plan
        except Infeasible as error:
            refusal = error
        tp *= 2
    assert refusal is not None
    raise refusal
