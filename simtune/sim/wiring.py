"""Wiring of a whole plan: fresh engine cores, routers, links for KV caches, and the events of the plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from simtune.costs.kv_transfer_times import read_transfer_fit
from simtune.costs.predict import Profile
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine.policy_traits import Hint
from simtune.errors import Infeasible, UsageError
from simtune.sim.adapter_rules import check_adapters
from simtune.sim.admission import check_clients_wait
from simtune.sim.autoscaler import Autoscaler, PoolScaler, Scaler, states_tokens
from simtune.sim.availability import Change
from simtune.sim.core import EngineCore, KvConnector
from simtune.sim.families import check_graph_runs
from simtune.sim.front_end import FrontEnd
from simtune.sim.kv_links import ForkedConnector, Links, bootstrap_s, first_token_of, merges
from simtune.sim.plan_parts import POLICY, make_router
from simtune.sim.pools import DeployedPool, kv_block_bytes
from simtune.sim.rank_changes import changes_of_ranks
from simtune.sim.rank_scaler import rank_scalers
from simtune.sim.role_controller import Controller, RoleController, RoleCores
from simtune.sim.router import Router
from simtune.sim.world import World
from simtune.specs.model import Model
from simtune.specs.plan import FirstToken, KvLink, LocalPrefill, Plan
from simtune.specs.plan_events import Event, Failure, RankFailure, Start, Switch, changes_ranks
from simtune.specs.pool import Pool, Role
from simtune.specs.routing import LeastTokensRouting
from simtune.specs.workload import Slo
from simtune.workload.requests import RequestStream

ByPool = Mapping[str, Sequence[EngineCore]]
"""Cores by the name of their pool."""


@dataclass(frozen=True)
class Wiring:
    """All parts of a world except its requests. Serves one run."""

    cores: Sequence[EngineCore]
    router: Router
    decode_router: Router | None
    front_end: FrontEnd | None
    changes: Sequence[Change]
    control: Controller | None
    first_token: FirstToken
    local_prefill: LocalPrefill | None
    predicted_tokens: Sequence[int] | None
    """Predicted output tokens of every request; None if no policy uses them."""
    deadlines: Sequence[float] | None
    """Deadline of every request; None if no policy uses them."""

    def world(self, stream: RequestStream, **how: Any) -> World:
        """Return the world under a stream of requests; `how` are further arguments of `World`."""
        return World(
            self.cores,
            stream,
            router=self.router,
            decode_router=self.decode_router,
            front_end=self.front_end,
            changes=self.changes,
            control=self.control,
            first_token=self.first_token,
            local_prefill=self.local_prefill,
            predicted_tokens=self.predicted_tokens,
            deadlines=self.deadlines,
            **how,
        )


def wire(
    plan: Plan,
    model: Model,
    pools: Sequence[DeployedPool],
    stream: RequestStream,
    slo: Slo,
    seed: int,
    instances: int | None = None,
) -> Wiring:
    """Create the cores of a plan; if `instances` is given, only those of the first `instances` instances of each pool.

    Raises UsageError if the plan needs data that the requests do not have.
    """
    if stream.graph is not None:
        check_graph_runs(plan)
    check_clients_wait(plan.pools, stream)
    check_adapters(plan.pools, stream)
    block_tokens = _hash_block_tokens(pools, stream)
    # Instances that may join a pool later have cores from the beginning, which `_changes` marks as down.
    joining = _joining(plan)
    by_pool = {
        p.spec.name: p.cores(
            (instances or _ever_up(plan, p.spec)) + joining[p.spec.name], block_tokens, p.speculation(stream, seed)
        )
        for p in pools
    }
    for number, core in enumerate(core for cores in by_pool.values() for core in cores):
        core.number = number
    changes = _changes(plan, by_pool)
    for pool in pools:
        changes += changes_of_ranks(plan.events, pool.spec, pool.by_ranks, by_pool[pool.spec.name])
    decode_router = None
    if receiving := _of_roles(by_pool, pools, "decode"):
        _connect(plan, model, pools, by_pool)
        decode_router = make_router(plan.decode_router or LeastTokensRouting(), receiving, stream, seed)
    front_end = FrontEnd.of((pool.spec, instances or pool.spec.instances) for pool in pools)
    return Wiring(
        cores=_of_roles(by_pool, pools, "mixed", "prefill", "decode"),
        router=make_router(plan.router, _of_roles(by_pool, pools, "mixed", "prefill"), stream, seed),
        decode_router=decode_router,
        front_end=front_end,
        changes=changes,
        control=_autoscaler(plan, pools, by_pool, front_end) if plan.autoscales else _controller(plan, by_pool),
        first_token=first_token_of(plan) if receiving else "prefill",
        local_prefill=plan.local_prefill,
        predicted_tokens=_predicted_tokens(pools, stream, seed),
        deadlines=_deadlines(stream, slo) if _reading(pools, "deadline") else None,
    )


def _of_roles(by_pool: ByPool, pools: Sequence[DeployedPool], *roles: Role) -> list[EngineCore]:
    """Return the cores of the pools with one of these roles, in order of the pools."""
    return [core for pool in pools if pool.spec.role in roles for core in by_pool[pool.spec.name]]


def _hash_block_tokens(pools: Sequence[DeployedPool], stream: RequestStream) -> int | None:
    """Return the tokens per block of shared prompts, if a pool caches prefixes and the load names blocks; else None."""
    caching = [pool.spec for pool in pools if pool.spec.kv_cache.prefix_caching]
    if stream.hash_ids is None or not caching:
        return None
    for pool in caching:
        size = pool.kv_cache.block_size
        if stream.block_tokens % size and size % stream.block_tokens:
            raise UsageError(
                f"the workload names what prompts share in blocks of {stream.block_tokens} tokens, which must "
                f"be a multiple of the KV block size of pool {pool.name} ({size}), or divide it; change either"
            )
    return stream.block_tokens


def _reading(pools: Sequence[DeployedPool], hint: Hint) -> list[DeployedPool]:
    """Return the pools whose policy reads a field that is filled on demand."""
    return [pool for pool in pools if hint in POLICY.find(pool.spec.batching.policy).reads]


def _predicted_tokens(pools: Sequence[DeployedPool], stream: RequestStream, seed: int) -> list[int] | None:
    """Return the predicted output tokens of every request, with the error of the last pool that uses predictions."""
    reading = _reading(pools, "predicted_tokens")
    if not reading:
        return None
    predicted: list[int] = stream.predicted_tokens(reading[-1].spec.batching.prediction_sigma, seed).tolist()
    return predicted


def _deadlines(stream: RequestStream, slo: Slo) -> list[float]:
    """Return each request's deadline for its first token in seconds: arrival plus the tightest TTFT limit that applies.

    Infinite without a limit. In a closed loop arrivals are not known in advance, so the deadline is the limit alone.
    """
    tightest = []
    for class_slo in stream.slos:
        limits = [limit for metric, _, limit in (class_slo or slo).limits() if metric == "ttft"]
        tightest.append(min(limits, default=math.inf))
    due = np.array(tightest)[stream.class_index]
    times_s = stream.arrival_s if stream.due_s is None else stream.due_s
    deadlines: list[float] = (due if times_s is None else due + times_s).tolist()
    return deadlines


# --- between prefill and decode instances -----------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """Terms of sending KV caches from a prefill instance."""

    bytes_per_s: float
    """Bytes per second, summed over all GPUs."""
    setup_s: float
    block_s: float
    """Seconds per block for its descriptors, besides the time of its bytes."""


def transfer_terms(sent: Sequence[Model], pool: DeployedPool, link: KvLink) -> Transfer:
    """Return the numbers of the plan; those that it lacks come from its log of transfers, or else from the profile's
    operator. `sent` are the models whose keys and values are sent, the target first.

    For merged blocks the descriptors count once per request, in its setup: as if all of its blocks were
    neighbours on both sides, which is too fast if caches are fragmented. Raises Infeasible if the
    hardware has no link of that name, and SpecError for an invalid log.
    """
    pieces = 1 if link.packed else sum(_vectors(model) for model in sent)
    if link.costs is not None:
        fit = read_transfer_fit(Path(link.costs))
        setup_s = fit.setup_s if link.setup_s is None else link.setup_s
        return Transfer(link.bytes_per_s or fit.bytes_per_s, setup_s, pieces * (link.descriptor_s or 0.0))
    bytes_per_s, setup_s, pieces_s = _rated(sent, pool, link, pieces)
    if merges(link, pool.spec):
        return Transfer(bytes_per_s, setup_s + pieces_s, 0.0)
    return Transfer(bytes_per_s, setup_s, pieces_s)


def _rated(sent: Sequence[Model], pool: DeployedPool, link: KvLink, pieces: int) -> tuple[float, float, float]:
    """Return (bytes per second, seconds of setup, seconds for the pieces of a block) of a link without a log."""
    if link.bytes_per_s is not None and link.setup_s is not None and link.descriptor_s is not None:
        # Nothing is left to the profile, which need not have the link.
        return link.bytes_per_s, link.setup_s, pieces * link.descriptor_s
    kv_dtype = pool.spec.kv_cache.dtype or sent[0].kv_dtype or sent[0].dtype
    try:
        base = Profile(pool.hardware).predictor("kv_transfer", kv_dtype, variant=link.path).operator.base
    except Infeasible:
        if link.path in pool.hardware.links:
            raise
        raise Infeasible(
            f"hardware {pool.hardware.name}: no link {link.path} carries KV caches from prefill to decode pools; "
            f"write link: {{path: intra_node}} if they are in one node, or add links.{link.path} to its profile"
        ) from None
    pieces_s = pieces * (base.block_s if link.descriptor_s is None else link.descriptor_s)
    setup_s = base.overhead_s + bootstrap_s(pool.spec) if link.setup_s is None else link.setup_s
    return link.bytes_per_s or base.bytes_per_s * pool.spec.model_devices, setup_s, pieces_s


def _vectors(model: Model) -> int:
    """Return the pieces of memory that a KV block lies in: keys and values of every layer, and keys of an indexer, or
    the one vector of latent attention; a linear layer has no blocks."""
    pieces = {"mla": 1, "compressed": 1, "block_sparse": 3, "linear": 0, "kda": 0, "none": 0}
    return sum(group.count * pieces.get(group.attention.kind, 2) for group in model.layers)


def _connect(plan: Plan, model: Model, pools: Sequence[DeployedPool], by_pool: ByPool) -> None:
    """Give every prefill instance its connector: one to all decode pools, or one per pool if the plan lists links."""
    links = Links()
    for pool in pools:
        if pool.spec.role != "prefill":
            continue
        sent = _sent(plan, model, pool)
        block_bytes, layers = sum(kv_block_bytes(m, pool.spec) for m in sent), sum(m.num_layers for m in sent)
        ways = {target.name: plan.way(pool.spec.name, target.name) for target in plan.pools if target.role == "decode"}
        terms = {to: transfer_terms(sent, pool, way) for to, way in ways.items()}
        shares = {to: _rate_share(sent, pool.spec, plan.pool(to), way) for to, way in ways.items()}
        for core in by_pool[pool.spec.name]:
            by_target = {
                to: KvConnector(
                    links.out_of(
                        core, way, terms[to].bytes_per_s * shares[to], by_rank=_has_rates_by_rank(pool.spec, way)
                    ),
                    block_bytes=block_bytes,
                    setup=round(terms[to].setup_s * TICKS_PER_SECOND),
                    descriptors=round(terms[to].block_s * TICKS_PER_SECOND),
                    layers=layers if way.layerwise else 1,
                )
                for to, way in ways.items()
            }
            core.connector = next(iter(by_target.values())) if plan.links is None else ForkedConnector(by_target)


def _rate_share(sent: Sequence[Model], source: Pool, target: Pool, way: KvLink) -> float:
    """Return the rate at which a KV cache is sent over that of all GPUs of a prefill instance.

    A cache is sent by the GPUs that have it, those of one data-parallel rank and of one of the groups that divide
    prompts, each of which has all of it, at most as many as receive it. Of latent
    attention every GPU has the whole vector, so each GPU of the receiving rank gets it whole: `needSendCache` in
    cpp/tensorrt_llm/batch_manager/mlaCacheFormatter.cpp of TensorRT-LLM, `required_dst_info_num` in
    srt/disaggregation/common/conn.py of SGLang. A rate that is stated, measured or of a shared link counts as it is.
    """
    if way.bytes_per_s is not None or way.costs is not None or way.shared:
        return 1.0
    senders, receivers = (pool.model_devices // pool.parallelism.expert_groups for pool in (source, target))
    kinds = {group.attention.kind for model in sent for group in model.layers}
    copies = target.parallelism.tp if kinds <= _LATENT else 1
    return min(senders, receivers) / (copies * source.model_devices)


def _has_rates_by_rank(pool: Pool, way: KvLink) -> bool:
    """True if each data-parallel rank sends over links of its own GPUs."""
    return pool.parallelism.attention_dp > 1 and way.bytes_per_s is None and way.costs is None


_LATENT = {"mla", "compressed", "none"}


def _sent(plan: Plan, model: Model, pool: DeployedPool) -> list[Model]:
    """Return the models whose keys and values a prefill pool sends: the target, and the drafter of the pool if it is
    also that of some decode pool.

    A drafter that only the decode pool has is assumed to know the prompt without having read it.
    """
    speculation = pool.spec.speculation
    drafters = [p.speculation.drafter for p in plan.pools if p.role == "decode" and p.speculation is not None]
    if speculation is None or pool.drafting is None or speculation.drafter not in drafters:
        return [model]
    network = speculation.drafter.network(model, pool.drafting.model)
    return [model] if network is None else [model, network]


# --- what happens to instances ----------------------------------------------------------------------------


def _joining(plan: Plan) -> Counter[str]:
    """Return the number of instances that each pool may get from others, by its name."""
    if plan.control is not None:
        first, second = plan.pools
        return Counter({first.name: second.instances, second.name: first.instances})
    return Counter(event.to for event in plan.events if isinstance(event, Switch))


def _controller(plan: Plan, by_pool: ByPool) -> RoleController | None:
    """Return the controller that lets instances take the other role; the places that a pool has beyond its own
    instances belong to those of the other pool."""
    control = plan.control
    if control is None:
        return None
    prefill, decode = (next(pool for pool in plan.pools if pool.role == role) for role in ("prefill", "decode"))
    num_places = prefill.instances + decode.instances
    prefilling = [_of_instance(by_pool[prefill.name], place) for place in range(num_places)]
    decoding = [
        _of_instance(by_pool[decode.name], (place - prefill.instances) % num_places) for place in range(num_places)
    ]
    return RoleController(
        RoleCores(control.prefill, prefilling),
        RoleCores(control.decode, decoding),
        every=round(control.every_s * TICKS_PER_SECOND),
        patience=control.patience,
        delay=round(control.switch_s * TICKS_PER_SECOND),
    )


def _autoscaler(plan: Plan, pools: Sequence[DeployedPool], by_pool: ByPool, front_end: FrontEnd | None) -> Autoscaler:
    """Return the controllers of the plan's autoscaled pools."""
    scalers: list[Scaler] = []
    for deployed in pools:
        pool = deployed.spec
        if pool.autoscaling is None:
            continue
        cores = by_pool[pool.name]
        if pool.autoscaling.rule.reads_tokens and not states_tokens(cores):
            raise UsageError(
                f"plan {plan.name}: pool {pool.name}: autoscaling reads the tokens of running requests, which policy "
                f"{pool.batching.policy} does not state; watch waiting, under_way or prompt_tokens, or use rule rate"
            )
        places = [_of_instance(cores, place) for place in range(pool.most_instances)]
        if pool.autoscaling.scales_ranks:
            scalers += rank_scalers(pool, places, deployed.by_ranks)
        else:
            scalers.append(PoolScaler(pool, places, front_end))
    return Autoscaler(scalers)


def _ever_up(plan: Plan, pool: Pool) -> int:
    """Return the number of instances of a pool that a run may need; none that stand by, if none can fail."""
    return pool.most_instances if plan.events else pool.most_instances - pool.spare


def _changes(plan: Plan, by_pool: ByPool) -> list[Change]:
    """Return the changes of cores that the plan's events cause. Targets of a switch, instances that start later, and
    those that stand by begin down."""
    changes: list[Change] = []
    next_places = {pool.name: pool.instances for pool in plan.pools}
    for pool in plan.pools:
        for core in by_pool[pool.name]:
            core.up = core.instance < pool.instances
        if pool.spare:
            changes += _replacements(pool, [event for event in plan.events if event.pool == pool.name], by_pool)
    for event in plan.events:
        pool = plan.pool(event.pool)
        # Those of ranks of an instance that goes on follow from `simtune.sim.rank_changes`.
        if pool.spare or changes_ranks(event, pool):
            continue
        cores = _of_instance(by_pool[event.pool], event.instance)
        tick = round(event.at_s * TICKS_PER_SECOND)
        match event:
            case Start(delay_s=delay_s):
                for core in cores:
                    core.up = False
                changes.append(Change(tick + round(delay_s * TICKS_PER_SECOND), cores, up=True))
            case Failure(recover_s=recover_s) | RankFailure(recover_s=recover_s):
                changes.append(Change(tick, cores, up=False, lost=True))
                if recover_s is not None:
                    changes.append(Change(tick + round(recover_s * TICKS_PER_SECOND), cores, up=True))
            case Switch(to=to, delay_s=delay_s):
                # An instance that changes pools takes the next place after the instances that the pool begins with.
                then = _of_instance(by_pool[to], next_places[to])
                next_places[to] += 1
                changes.append(Change(tick, cores, up=False, then=then, delay=round(delay_s * TICKS_PER_SECOND)))
    return changes


def _replacements(pool: Pool, events: Sequence[Event], by_pool: ByPool) -> Iterator[Change]:
    """Yield the changes of a pool with instances that stand by.

    The first of them takes the place of one that fails, at once. An instance that recovers stands by, unless fewer than
    `instances` are up.
    """
    turns: list[tuple[int, bool, int]] = []
    for event in events:
        assert isinstance(event, Failure)  # no others are allowed there
        tick = round(event.at_s * TICKS_PER_SECOND)
        turns.append((tick, False, event.instance))
        if event.recover_s is not None:
            turns.append((tick + round(event.recover_s * TICKS_PER_SECOND), True, event.instance))
    up, standing_by = set(range(pool.instances)), [*range(pool.instances, pool.most_instances)]
    for tick, recovers, instance in sorted(turns, key=itemgetter(0)):
        cores = _of_instance(by_pool[pool.name], instance)
        if recovers and len(up) < pool.instances:
            up.add(instance)
            yield Change(tick, cores, up=True)
        elif recovers:
            standing_by.append(instance)
        elif instance in up:
            up.remove(instance)
            if standing_by:
                replacement = standing_by.pop(0)
                up.add(replacement)
                yield Change(tick, _of_instance(by_pool[pool.name], replacement), up=True)
            yield Change(tick, cores, up=False, lost=True)
        elif instance in standing_by:
            standing_by.remove(instance)


def _of_instance(cores: Sequence[EngineCore], instance: int) -> list[EngineCore]:
    return [core for core in cores if core.instance == instance]
