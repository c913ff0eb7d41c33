"""Deployment: a plan with memory and compiled step costs, ready to be simulated under any load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simtune.costs.adapters import AdapterCosts
from simtune.costs.compiled import CompiledCosts, compile_costs
from simtune.costs.drafting import CompiledRounds
from simtune.costs.iteration import StepModel
from simtune.costs.memory import GIB, Memory
from simtune.costs.protocol import StepCosts
from simtune.costs.share import share_of
from simtune.costs.step_files import read_costs
from simtune.errors import Infeasible, PartError, UsageError
from simtune.results.result import MissBudget, PartBudgets, Result, parts_of
from simtune.sim import plan_parts
from simtune.sim.audit import audit, wanted
from simtune.sim.cascade import CascadeRule
from simtune.sim.drafting import Drafting, useful_replicas
from simtune.sim.encode_stages import EncodeWork, encode_works
from simtune.sim.encoding import PoolEncoder, check_media
from simtune.sim.feasibility import check
from simtune.sim.pool_power import power_of
from simtune.sim.pools import DeployedPool, kv_block_bytes
from simtune.sim.rank_changes import terms_by_ranks
from simtune.sim.stations import Passed, passed
from simtune.sim.watch import StopWhen, Watch, watched
from simtune.sim.wiring import transfer_terms, wire
from simtune.specs.hardware import Device, Hardware, Host, Provenance
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.preset import EnginePreset, merged
from simtune.specs.workload import Slo
from simtune.workload.requests import RequestStream


@dataclass(frozen=True)
class Deployment:
    """A plan whose pools are all deployed. `simulate` may be called many times."""

    plan: Plan
    model: Model
    pools: tuple[DeployedPool, ...]

    @property
    def hardware(self) -> Hardware:
        """Hardware of the first pool."""
        return self.pools[0].hardware

    @property
    def profiles(self) -> dict[str, Hardware]:
        """Hardware profile of every pool by the pool's name; whole devices, before any share is taken."""
        return {pool.spec.name: pool.whole or pool.hardware for pool in self.pools}

    @property
    def several_engines(self) -> bool:
        """True if the pools run under several engines: one profile then has other kernels in each."""
        return len({pool.spec.engine for pool in self.pools}) > 1

    @property
    def profile_labels(self) -> dict[str, str]:
        """Name of every pool's hardware profile by the pool's name, with the engine if there are several."""
        return {
            pool.spec.name: _under(pool.spec) if self.several_engines else pool.hardware.name for pool in self.pools
        }

    @property
    def memory(self) -> Memory:
        """Memory of one instance of the first pool."""
        return self.pools[0].memory

    @property
    def costs(self) -> StepCosts:
        """Step costs of the first pool."""
        return self.pools[0].costs

    @property
    def max_model_len(self) -> int:
        """Longest request that at least one instance accepts, in tokens."""
        return max(pool.max_model_len for pool in self.pools)

    @property
    def estimated(self) -> list[str]:
        """Operators that no table covers; their times are estimated from the data sheet."""
        modelled = [pool for pool in self.pools if not isinstance(pool.costs, plan_parts.OwnCosts)]
        return sorted({name for pool in modelled for name in self.step_model(pool).estimated})

    def step_model(self, pool: DeployedPool) -> StepModel:
        """Return the model of the steps of a pool; a pool with costs of its own has none that is used."""
        return StepModel(self.model, pool.hardware, pool.spec)

    @property
    def drafting(self) -> dict[str, Drafting]:
        """Loaded parts of the speculation of each pool that speculates, by the pool's name."""
        return {pool.spec.name: pool.drafting for pool in self.pools if pool.drafting is not None}

    @property
    def num_cores(self) -> int:
        """Number of engine cores in all pools."""
        return sum(pool.num_cores for pool in self.pools)

    @property
    def cores_apart(self) -> bool:
        """True if instances do not disturb each other, so that some of them can stand for all."""
        router = plan_parts.ROUTER.find(self.plan.router.kind)
        return len(self.pools) == 1 and router.deals_in_turn and not (self.plan.events or self.plan.autoscales)

    def simulate(
        self,
        stream: RequestStream,
        slo: Slo | None = None,
        *,
        cores: int | None = None,
        until_lost: int | None = None,
        record: bool = False,
        single_steps: bool = False,
        seed: int = 0,
        watch: Watch | None = None,
    ) -> Result:
        """Run one stream of requests through the deployment. Raise UsageError if no request fits max_model_len, and
        PartError if a policy, router or cost model from outside the package fails.

        `cores` runs only that number of cores (in whole instances), on their share of an open-loop stream, and scales
        up: under round robin instances do not disturb each other, and only the number of requests observed differs.
        If they do (closed loops, other routers, several pools, instances that fail), all are run. `until_lost` ends
        the run once the SLO cannot be met by all requests, or by an equal part of that number or more
        (`simtune.results.result.parts_of`; WHOLE: by all alone). `seed` seeds routers and predictors. `watch` is called
        with progress.
        """
        slo, scale, offered_rate_rps = slo or Slo(), 1.0, stream.target_rate_rps
        instances = self.enough_instances(stream, cores)
        if instances is not None:
            all_instances = self.pools[0].spec.instances
            scale, stream = all_instances / instances, stream.share_of(instances, all_instances)
        # Stages do not depend on the engines, so all requests pass the stages before the world begins.
        through, works = self._through_stages(stream)
        stream = through.stream
        brought = plan_parts.brought(self.plan, [pool.costs for pool in self.pools])
        with plan_parts.blamed(brought):
            wiring = wire(self.plan, self.model, self.pools, stream, slo, seed, instances)
            outcome = through.written(
                wiring.world(
                    stream,
                    single_steps=single_steps,
                    record=record,
                    stop_when=watched(watch, len(stream), _lost(stream, slo, until_lost)),
                ).run()
            )
        # A run that was stopped early leaves requests waiting without any fault of a policy.
        if brought and not outcome.aborted:
            plan_parts.check_nobody_waits(self.plan, wiring.cores)
        power = power_of(self.pools, self.plan.stages, stream, works)
        result = Result(stream, outcome, self.plan.num_devices, slo, offered_rate_rps, scale, power)
        self._check_answered(result)
        if wanted():
            audit(self.plan, self.model, wiring.cores, result)
        return result

    def _through_stages(self, stream: RequestStream) -> tuple[Passed, Mapping[str, EncodeWork]]:
        """Return the requests behind the stages of the plan, and the work of stages that encode images. Raise
        UsageError if nothing encodes the media of a load."""
        check_media(self.plan, self.model, stream)
        works = encode_works(self.plan, self.model, self.pools, stream)
        return passed(self.plan, stream, works), works

    def enough_instances(self, stream: RequestStream, cores: int | None) -> int | None:
        """Return the number of instances that have `cores` cores, if these can stand for all and are fewer; see
        `simulate`."""
        # A batch is these very requests on these very instances: the busiest instance ends it.
        alone = stream.arrival_s is not None and stream.families is None and not stream.batch and not self.plan.stages
        if cores is None or not (alone and self.cores_apart):
            return None
        instances = -(-cores // self.pools[0].cores_each)
        return instances if instances < self.pools[0].spec.instances else None

    def _check_answered(self, result: Result) -> None:
        """Raise UsageError if the plan answers no request at all."""
        if result.completed.any():
            return
        if result.unserved:
            raise UsageError(f"plan {self.plan.name}: its events leave no instance that could answer any request")
        raise UsageError(
            f"every request is longer than max_model_len ({self.max_model_len} tokens); raise it in the plan, "
            "or use a model with a longer context"
        )


def _lost(stream: RequestStream, slo: Slo, part: int | None) -> StopWhen | None:
    """Return the condition that ends the run early, checked at every finished request; None for no part."""
    if part is None:
        return None
    parts = parts_of(len(stream), part)
    return PartBudgets(stream, slo, parts) if len(parts) > 1 else MissBudget(stream, slo)


def deploy(
    plan: Plan,
    model: Model,
    hardware: Hardware | Mapping[str, Hardware],
    costs: StepCosts | Mapping[str, StepCosts] | None = None,
    *,
    factors: Mapping[str, float] | None = None,
    drafting: Drafting | Mapping[str, Drafting] | None = None,
) -> Deployment:
    """Check that the plan is possible and compile its costs, unless compiled ones are given.

    `hardware` is that of all pools, or of each pool by its name. `factors` multiply the times of operator
    kinds (`simtune.costs.iteration.KINDS`), for a world in which they are off. `drafting` holds the loaded parts of the
    speculation of all pools, or of each pool by its name. `costs` are those of all pools, or of each pool by its name;
    missing ones are compiled. One cost model for all pools serves pools that speculate only if it comes from outside.

    Raises Infeasible if the model does not fit or the plan contradicts itself, and PartError if a part that the plan
    names cannot be used.
    """
    wrong = [f"plan {plan.name}: {'.'.join(map(str, at))}: {why}" for at, why in plan_parts.problems(plan)]
    if wrong:
        raise PartError("\n".join(wrong))
    with plan_parts.blamed(plan_parts.brought(plan, [])):
        pools = [
            _deployed(pool, plan, model, hardware, _costs_of(pool, costs), factors, drafting) for pool in plan.pools
        ]
    return Deployment(plan, model, tuple(pools))


def _under(pool: Pool) -> str:
    return f"{pool.hardware} under {pool.engine or 'no engine'}"


def _costs_of(pool: Pool, costs: StepCosts | Mapping[str, StepCosts] | None) -> StepCosts | None:
    """Return the costs among those given that serve a pool; None if the pool's costs are to be compiled."""
    if isinstance(costs, Mapping):
        return costs.get(pool.name)
    return None if pool.speculation is not None and not isinstance(costs, plan_parts.OwnCosts) else costs


def compiled_costs(
    pool: Pool,
    model: Model,
    hardware: Hardware,
    max_model_len: int,
    drafts: Drafting | None = None,
    factors: Mapping[str, float] | None = None,
) -> CompiledCosts | CompiledRounds:
    """Return the step costs of a pool; those of rounds if it drafts. They serve all pools that differ only in the
    number of instances, or that have fewer seats or smaller budgets."""
    if pool.speculation is None or drafts is None:
        return compile_costs(model, hardware, pool, max_model_len, factors=factors)
    pool = _as_run(pool, model, hardware, max_model_len, drafts, factors)
    assert pool.speculation is not None
    drafter, shape = pool.speculation.drafter, pool.speculation.scheme.shape
    return CompiledRounds(model, hardware, pool, max_model_len, drafter, shape, drafts.model, factors)


def _deployed(
    pool: Pool,
    plan: Plan,
    model: Model,
    hardware: Hardware | Mapping[str, Hardware],
    costs: StepCosts | None,
    factors: Mapping[str, float] | None,
    drafting: Drafting | Mapping[str, Drafting] | None,
) -> DeployedPool:
    device = hardware if isinstance(hardware, Hardware) else hardware[pool.name]
    hardware_of_pool = device if pool.share is None else share_of(device, pool.share.processors, pool.share.bandwidth)
    max_model_len = pool.max_model_len or model.max_position
    drafts = drafting if drafting is None or isinstance(drafting, Drafting) else drafting.get(pool.name)
    # Counted before `_as_run` may drop a drafter with GPUs of its own: these stay idle, and have a price.
    devices = pool.devices
    memory = check(pool, model, hardware_of_pool, drafts)
    if costs is None and pool.costs is not None:
        costs = plan_parts.OwnCosts(read_costs(Path(pool.costs)))
    if isinstance(costs, plan_parts.OwnCosts):
        costs.check_for(pool)
    # `drafting` may be given for all pools, also for those that do not speculate.
    if pool.speculation is None:
        drafts = None
    if drafts is not None and not isinstance(costs, plan_parts.OwnCosts):
        pool = _as_run(pool, model, hardware_of_pool, max_model_len, drafts, factors)

    def costs_of(some: Pool) -> StepCosts:
        return compiled_costs(some, model, hardware_of_pool, max_model_len, drafts, factors)

    compiled = costs_of(pool) if costs is None else costs
    deployed = DeployedPool(
        pool,
        hardware_of_pool,
        memory,
        compiled,
        max_model_len,
        kv_block_bytes(model, pool),
        drafts,
        device,
        cascade=CascadeRule.of(model, pool, hardware_of_pool) if pool.cascade_attention else None,
        encoder=PoolEncoder.of(pool, model, hardware_of_pool, factors),
        adapters=AdapterCosts.of(model, pool, hardware_of_pool, factors),
        idle_devices=devices - pool.devices,
        by_ranks=terms_by_ranks(plan.events, pool, model, hardware_of_pool, compiled, costs_of),
    )
    if pool.role == "prefill":
        _check_ways(plan, model, deployed)
    return deployed


def _check_ways(plan: Plan, model: Model, pool: DeployedPool) -> None:
    """Raise Infeasible if the hardware of a prefill pool lacks a link that the plan uses from it."""
    for target in plan.pools:
        if target.role == "decode":
            transfer_terms([model], pool, plan.way(pool.spec.name, target.name))


def _as_run(
    pool: Pool,
    model: Model,
    hardware: Hardware,
    max_model_len: int,
    drafts: Drafting,
    factors: Mapping[str, float] | None,
) -> Pool:
    """Return a pool that speculates with only the replicas of a target that are worth using for one sequence of half
    the longest length."""
    assert pool.speculation is not None
    drafter, scheme = pool.speculation.drafter, pool.speculation.scheme
    if scheme.shape.replicas < 2 or "replicas" not in type(scheme).model_fields:
        return pool

    def round_s(replicas: int) -> int:
        shape = scheme.shape._replace(replicas=replicas)
        rounds = CompiledRounds(model, hardware, pool, max_model_len, drafter, shape, drafts.model, factors)
        return rounds.round(1, depth, depth, context)

    depth, context = scheme.shape.depth, max(max_model_len // 2, 2 * scheme.shape.ahead)
    replicas_worth_using = useful_replicas(scheme, drafts.acceptance.rates, round_s)
    fewer = pool.speculation.model_copy(update={"scheme": scheme.model_copy(update={"replicas": replicas_worth_using})})
    return pool.model_copy(update={"speculation": fewer})


def vllm_batching(hardware: Hardware) -> Batching:
    """Return the defaults of vLLM's server (release 0.32): larger on devices of 70 GiB and more, except A100."""
    large = hardware.device.memory_bytes >= 70 * GIB and "a100" not in hardware.device.name.lower()
    return Batching(max_num_seqs=1024 if large else 256, max_num_batched_tokens=8192 if large else 2048)


NO_HARDWARE = Hardware(
    name="unbound",
    engine="none",
    device=Device(
        name="none",
        vendor="none",
        memory_bytes=2.0**60,
        memory_bytes_per_s=1.0,
        processors=1,
        flops_per_s={},
        source="none",
    ),
    host=Host(step_s=0.0, per_sequence_s=0.0, provenance=Provenance(kind="assumed", source="none")),
    operators={},
)
"""Placeholder hardware for steps whose times the user states and for memory that does not bind."""


def unbound_plan(model: Model, stream: RequestStream) -> Plan:
    """Return a plan of one instance with vLLM's defaults for large devices, whose KV cache fits the longest request on
    every seat."""
    batching, longest = vllm_batching(NO_HARDWARE), length_limit(model, stream)
    blocks = 1 + batching.max_num_seqs * -(-longest // KvCache().block_size)
    pool = Pool(
        hardware=NO_HARDWARE.name,
        instances=1,
        batching=batching,
        kv_cache=KvCache(num_blocks=blocks),
        max_model_len=longest,
    )
    return Plan(name="default", model=model.name, pools=(pool,))


def length_limit(model: Model, stream: RequestStream) -> int:
    """Return a max_model_len for a load: its longest request rounded up to a multiple of 256 tokens, within the model's
    limit.

    Raises UsageError if that is below every request.
    """
    return max_model_len_for(model, *shortest_and_longest(stream))


def shortest_and_longest(stream: RequestStream) -> tuple[int, int]:
    """Return the tokens of the shortest and of the longest request, prompt and output."""
    tokens = stream.prompt_tokens + stream.output_tokens
    return int(tokens.min()), int(tokens.max())


def max_model_len_for(model: Model, shortest: int, longest: int) -> int:
    """Return a max_model_len for requests of `shortest` to `longest` tokens, as `length_limit` does."""
    if shortest > model.max_position:
        raise UsageError(
            f"every request is longer than max_model_len ({model.max_position} tokens), the longest of model "
            f"{model.name}: shorten the requests, or use a model with a longer context"
        )
    return min(model.max_position, -(-longest // 256) * 256)


def default_plan(model: Model, hardware: Hardware, stream: RequestStream, engine: EnginePreset | None = None) -> Plan:
    """Return a plan of one instance on the fewest GPUs that fit, with an engine's settings or vLLM's batching. Raise
    Infeasible if a node is too small."""
    batching = vllm_batching(hardware).model_dump()
    settings: dict[str, Any] = {"batching": batching}
    encoder: dict[str, Any] = {} if stream.media is None else {"encoder": {}}
    if engine is not None:
        left_open = {"batching": {key: batching[key] for key in ("max_num_seqs", "max_num_batched_tokens")}}
        settings = {"engine": engine.name, **merged(engine.settings(hardware.device, model), left_open)}
    refusal: Infeasible | None = None
    tp = 1
    while tp <= hardware.device.devices_per_node:
        placement = {"hardware": hardware.name, "instances": 1, "parallelism": {"tp": tp}, **encoder}
        pool = Pool.model_validate({**placement, **settings, "max_model_len": length_limit(model, stream)})
        plan = Plan(name="default", model=model.name, pools=(pool,))
        try:
            check(pool, model, hardware)
            return plan
        except Infeasible as error:
            refusal = error
        tp *= 2
    assert refusal is not None
    raise refusal
