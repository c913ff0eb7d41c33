"""Random small plans by number: whole deployments under whole loads, as files describe them.

A number stands for one plan, one load and one seed. Jumps equal single steps, and a run violates no law of the audit.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError

from simtune.costs.compiled import LinearCosts
from simtune.engine import POLICIES
from simtune.errors import Infeasible, PartError, UsageError
from simtune.results.outcome import Outcome
from simtune.results.result import Result
from simtune.sim.audit import AUDIT
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.router import ROUTERS
from simtune.sim.stations import passed
from simtune.sim.wiring import wire
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.plan_events import changes_ranks
from simtune.specs.workload import Slo, Workload
from simtune.testing.clusters import COLUMNS
from simtune.workload.requests import RequestStream, build_stream
from tests.sim.test_speculative_world import AHEAD, SCHEMES, acceptance, drafter_for
from tests.sim.worlds import ByRanks, Kinked
from tests.worlds import newer
from tests.worlds.fragments import Draws, varied

PAST = Path(__file__).with_name("plans.jsonl")
"""Worlds that failed once, one on each line: the number that it had, why it failed, and its recipe."""
LONGEST = 240
"""Most tokens of a request."""
Block = dict[str, Any]
TRIES = 200
"""Draws among which some plan and load go together; most do."""
OPTIONS: dict[str, tuple[Block, ...]] = {
    "layered-prefill": ({"group_tokens": 64}, {"group_tokens": 512}),
    "sglang": ({}, {"schedule_conservativeness": 0.3}, {"smooth_factor": 0.7}),
    "tensorrt-llm": ({}, {"capacity_scheduler_policy": "MAX_UTILIZATION"}),
}
"""Options of policies."""


class Recipe(NamedTuple):
    """Parts of a world, as JSON has them: it stays the same world if drawing changes what a number stands for."""

    plan: Block
    load: Block
    requests: int
    stream_seed: int
    costs: Block
    schemes: dict[str, str]
    """Scheme of drafts (`SCHEMES`) of each pool that drafts, by the pool's name."""
    seed: int
    fragments: int = 0
    """Number of fragments that a study has put into the plan."""


class World(NamedTuple):
    """A plan that is deployed, and its load."""

    recipe: Recipe
    deployment: Deployment
    stream: RequestStream
    outcome: Outcome | None = None
    """The events of its run; None before it, or if all instances leave."""


@functools.cache
def _model(name: str) -> Model:
    return load_model(name)


@functools.cache
def _hardware() -> Hardware:
    return load_hardware("h100-sxm")


def drawn(number: int) -> World:
    """Return the world of a number: the first draw whose plan and load go together."""
    random = Random(number)
    refused = ""
    for _ in range(TRIES):
        try:
            return _world(random)
        except (Infeasible, PartError, UsageError, ValidationError) as error:
            refused = str(error)
    raise AssertionError(f"no plan of {TRIES} goes with its load; the last: {refused}")


def _world(random: Random) -> World:
    apart = random.random() < 0.4
    plan_block, schemes = _plan(random, apart)
    plan = Plan.model_validate(plan_block, strict=False)
    load_block = _load(random)
    load = Workload.model_validate(load_block, strict=False)
    of_study, fragments = varied(plan_block, LONGEST, _draws(plan_block)), 0
    if of_study is not None:
        plan, fragments = of_study
        scheme = next(iter(schemes.values()), None)
        schemes = {pool.name: scheme for pool in plan.pools if scheme is not None and pool.speculation is not None}
        plan_block = plan.model_dump(mode="json", exclude_unset=True)
    elif not load.graph and _scale(plan_block):
        plan = Plan.model_validate(plan_block, strict=False)
    requests, stream_seed = random.randint(1, 14), random.randint(0, 10**6)
    stream = build_stream(load, None, requests=requests, seed=stream_seed)
    costs = _costs(random, with_drafts=bool(schemes))
    recipe = Recipe(plan_block, load_block, requests, stream_seed, costs, schemes, random.randint(0, 99), fragments)
    return _newer(_deployed(recipe, plan, stream))


def _newer(world: World) -> World:
    """Return a world with the features of `tests.worlds.newer` that go with it."""
    for change in newer.changes(world.recipe.plan, world.recipe.load):
        plan, load = change(world.recipe.plan, world.recipe.load)
        try:
            world = made(world.recipe._replace(plan=plan, load=load))
        except (Infeasible, PartError, UsageError, ValidationError):
            continue
    return world


def made(recipe: Recipe) -> World:
    """Return the world of a recipe."""
    load = Workload.model_validate(recipe.load, strict=False)
    stream = build_stream(load, None, requests=recipe.requests, seed=recipe.stream_seed)
    return _deployed(recipe, Plan.model_validate(recipe.plan, strict=False), stream)


def _deployed(recipe: Recipe, plan: Plan, stream: RequestStream) -> World:
    base = LinearCosts(**{key: value for key, value in recipe.costs.items() if key != "kinks"})
    kinks = recipe.costs["kinks"]
    drafting = {
        name: Drafting(acceptance(SCHEMES[scheme][1]), _model("llama-3.2-1b"))
        for name, scheme in recipe.schemes.items()
    }
    costs = OwnCosts(ByRanks(base if kinks is None else Kinked(base, kinks)))
    deployment = deploy(plan, _model(plan.model), _hardware(), costs, drafting=drafting)
    # Raise if the load lacks what a stage, a router or a policy reads.
    wire(plan, deployment.model, deployment.pools, passed(plan, stream, {}).stream, Slo(), recipe.seed)
    if not (stream.prompt_tokens + stream.output_tokens <= deployment.max_model_len).any():
        raise UsageError("no request fits")
    return World(recipe, deployment, stream)


def _draws(plan: Block) -> Draws:
    """Return the functions that draw parts of a plan for fragments."""
    return {
        "pool": lambda random: _pool(random, plan["model"]),
        "router": lambda random: _router(random, []),
        "link": _link,
    }


def _costs(random: Random, with_drafts: bool) -> Block:
    costs: Block = {
        "step_s": random.choice((1e-3, 7e-3)),
        "per_token_s": random.choice((0.0, 2e-5)),
        "per_context_s": random.choice((0.0, 3e-7)),
        "per_pair_s": random.choice((0.0, 1e-8)),
    }
    return costs | {"kinks": None if with_drafts or random.random() < 0.7 else random.choice((7, 64))}


# --- plans ----------------------------------------------------------------------------------------------------------


def _plan(random: Random, apart: bool) -> tuple[Block, dict[str, str]]:
    """Return a plan, and the scheme of drafts of each pool that drafts, by its name."""
    roles = ["prefill", "decode"] if apart else ["mixed"] * random.choice((1, 1, 2))
    names = [f"{role[0]}{i}" for i, role in enumerate(roles)]
    model = random.choice(("llama-3.1-8b", "llama-3.1-8b", "llama-3.2-1b", "qwen3-30b-a3b", "deepseek-v3"))
    drafts = random.choice(list(SCHEMES)) if random.random() < 0.2 and "llama" in model else None
    alike = _pool(random, model)
    pools = []
    for name, role in zip(names, roles, strict=True):
        pool = alike if random.random() < 0.5 else _pool(random, model)
        if drafts is not None and role != "prefill":
            pool = _drafting(random, pool, drafts)
        pools.append({**pool, "name": name, "role": role, "instances": random.choice((1, 2, 3))})
    plan: Block = {"name": "drawn", "model": model, "pools": pools, "router": _router(random, names[:1])}
    if apart:
        plan |= _link(random)
    if random.random() < 0.25:
        plan["events"] = _events(random, pools)
    elif apart and random.random() < 0.3:
        plan["control"] = _control(random)
        pools[1].update({key: pools[0][key] for key in ("parallelism", "instances")})
    if random.random() < 0.15 and sum(role != "decode" for role in roles) == 1:
        plan["stages"] = _stages(random, names[0])
    return plan, {pool["name"]: drafts for pool in pools if drafts is not None and "speculation" in pool}


def _pool(random: Random, model: str) -> Block:
    policy = random.choice(list(POLICIES))
    offers, cuts = POLICIES[policy].offers, POLICIES[policy].cuts_prompts
    chunked = cuts == "always" or (cuts == "if asked" and random.random() < 0.85)
    batching: Block = {"policy": policy, "max_num_seqs": random.choice((3, 4, 8)), "chunked_prefill": chunked}
    batching["max_num_batched_tokens"] = random.choice((8, 24, 64)) if chunked else LONGEST
    batching["options"] = random.choice(OPTIONS.get(policy, ({},)))
    for feature, key, values in (
        ("long_prefills", "long_prefill_token_threshold", (5, 16)),
        ("prefill_interval", "prefill_schedule_interval", (2, 5)),
        ("active_seqs", "max_num_active_seqs", (3,)),
        ("reserve_full_isl", "scheduler_reserve_full_isl", (False,)),
        ("self_preemption", "self_preemption_ends_step", (False,)),
        ("safety_margin", "safety_margin", (0.0, 0.2)),
    ):
        if feature in offers and random.random() < 0.2:
            batching[key] = random.choice(values)
    if "long_prefill_token_threshold" in batching and random.random() < 0.5:
        batching["long_prefill_token_threshold_adaptive"] = True
    parallelism = _parallelism(random, model)
    if parallelism.get("pp", 1) > 1:
        dynamic = "dynamic_chunks" in offers
        ways = ("fixed", "dynamic", "dynamic", None) if dynamic else ("one", "fixed", None)
        batching["chunk_pipeline"] = random.choice(ways)
    return {
        "hardware": "h100-sxm",
        "batching": batching,
        "parallelism": parallelism,
        "max_model_len": LONGEST,
        "kv_cache": _kv_cache(random, policy, parallelism),
        "async_scheduling": random.random() < 0.5,
        "stream_interval": random.choice((None, None, 4)),
    }


def _parallelism(random: Random, model: str) -> Block:
    kind = random.choice(("one", "one", "pp", "dp", "dcp", "cp"))
    tp = 16 if model == "deepseek-v3" else 1
    if kind == "pp":
        return {"tp": tp, "pp": random.choice((2, 3))}
    if kind == "dp" and "llama" not in model:
        return {"tp": tp, "attention_dp": random.choice((2, 3)), "expert_parallel": True}
    if kind == "dcp":
        return {"tp": 16, "decode_context_parallel": 2}
    return {"tp": tp, "cp": 2} if kind == "cp" and "llama" in model else {"tp": tp}


def _kv_cache(random: Random, policy: str, parallelism: Block) -> Block:
    """Return a cache that holds a few requests, and at least one in each part of a pipeline."""
    offers, size = POLICIES[policy].offers, random.choice((1, 4, 16))
    blocks = (LONGEST // size + random.choice((1, 20, 200))) * parallelism.get("pp", 1)
    cache: Block = {"block_size": size, "num_blocks": blocks}
    feature = random.choice(("plain", "swap", "prefix_caching", "prefix_caching"))
    if feature == "prefix_caching" and "prefix_caching" in offers:
        cache["prefix_caching"] = True
        if POLICIES[policy].extends_cache and random.random() < 0.6:
            cache["tiers"] = [_tier(random, name) for name in ("host", "disk", "store")[: random.randint(1, 3)]]
    elif feature == "swap" and "swap" in offers:
        cache["preemption"] = "swap"
    if "watermark" in offers and random.random() < 0.3:
        cache["watermark"] = random.choice((0.02, 0.1))
    return cache


def _tier(random: Random, name: str) -> Block:
    return {
        "name": name,
        "bytes": random.choice((None, 0, 5e6, 3e7)),
        "bytes_per_s": random.choice((1e8, 1e10)),
        "latency_s": random.choice((0.0, 1e-3)),
        "shared": random.random() < 0.4,
        "written": random.choice(("computed", "evicted")),
        "fetched": random.choice(("before", "beside")),
    }


def _drafting(random: Random, pool: Block, name: str) -> Block:
    """Return the pool with drafts, under a policy that has them."""
    scheme = SCHEMES[name][0]
    drafter = drafter_for(scheme)
    batching = {key: pool["batching"][key] for key in ("max_num_seqs", "max_num_batched_tokens")}
    batching["max_num_batched_tokens"] = max(64, batching["max_num_batched_tokens"])
    batching["policy"] = random.choice(("vllm-fcfs", "vllm-priority", "sglang"))
    if batching["policy"] != "sglang" and batching["max_num_seqs"] == 4:  # no draw, which would change all worlds
        batching["draft_rules"] = "vllm-0.33"
    cache = {key: value for key, value in pool["kv_cache"].items() if key in ("block_size", "num_blocks")}
    return {
        **pool,
        "batching": batching,
        "kv_cache": cache | {"prefix_caching": random.random() < 0.5},
        "async_scheduling": name in AHEAD and random.random() < 0.5,
        "speculation": {
            "drafter": drafter.model_dump(exclude_none=True),
            "scheme": scheme.model_dump(exclude_none=True),
            "acceptance": "assumed",
        },
    }


def _router(random: Random, names: list[str]) -> Block:
    kind = random.choice(list(ROUTERS))
    if kind == "by_length":
        return {"kind": kind, "longest": {name: random.choice((30, 90)) for name in names if random.random() < 0.5}}
    stale = {"stale_s": 0.01} if kind in ("least_outstanding", "least_tokens", "power_of_two", "prefix_aware") else {}
    return {"kind": kind, **(stale if random.random() < 0.4 else {})}


def _link(random: Random) -> Block:
    link = {
        "bytes_per_s": random.choice((1e8, 1e10)),
        "setup_s": random.choice((0.0, 2e-3)),
        "descriptor_s": random.choice((0.0, 1e-6)),
        "layerwise": random.random() < 0.3,
        "shared": random.random() < 0.5,
        "merged": random.choice((None, True, False)),
        "first_token": random.choice((None, "prefill", "transfer", "decode")),
    }
    plan: Block = {"link": link}
    if random.random() < 0.5:
        plan["decode_router"] = _router(random, [])
    if random.random() < 0.4:
        rule = {"below_tokens": random.choice((0, 20, 80, 10**6)), "queue_above": random.choice((None, 0, 2))}
        plan["local_prefill"] = rule | ({"below_share": 0.5} if random.random() < 0.3 else {})
    return plan


def _events(random: Random, pools: list[Block]) -> list[Block]:
    """Return at most one event for each instance."""
    places = [(pool["name"], pool["role"], i) for pool in pools for i in range(pool["instances"])]
    events = []
    for name, role, instance in random.sample(places, min(len(places), random.randint(1, 2))):
        event: Block = {"pool": name, "instance": instance, "at_s": random.choice((0.0, 4e-3, 0.0211, 0.05))}
        kind = random.choice(("start", "failure", "switch"))
        if kind == "switch" and role != "mixed":
            event |= {"to": next(p["name"] for p in pools if p["name"] != name), "delay_s": 0.01}
        elif kind == "start":
            event["delay_s"] = random.choice((0.0, 0.03))
        else:
            kind, event["recover_s"] = "failure", random.choice((1e-3, 0.03, 0.5))
        events.append({**event, "kind": kind})
    return events


def _control(random: Random) -> Block:
    def pressure() -> Block:
        return {
            "watch": random.choice(("waiting", "under_way")),
            "low": random.choice((0.0, 1.0)),
            "high": random.choice((1.5, 3.0)),
        }

    return {
        "every_s": random.choice((1e-3, 0.017)),
        "patience": random.randint(1, 2),
        "switch_s": random.choice((0.0, 4e-3)),
        "prefill": pressure(),
        "decode": pressure(),
    }


def _scale(plan: Block) -> bool:
    """Let pools of a few plans scale, and return True if any does. It is drawn by the plan itself, so that other plans
    keep their numbers."""
    random = Random(f"grows {plan}")
    if random.random() > 0.2 or not plan.keys().isdisjoint(("events", "control", "local_prefill")):
        return False
    for pool in plan["pools"]:
        if random.random() < 0.7:
            tokens = () if "speculation" in pool else ("kv_cache", "kv_demand")
            watch = random.choice(("waiting", "under_way", "prompt_tokens", *tokens))
            size = 40.0 if watch == "prompt_tokens" else 0.2 if watch in tokens else 1.5
            rules: list[Block] = [
                {"kind": "rate", "requests_per_s": random.choice((20.0, 100.0))},
                {"kind": "thresholds", "watch": watch, "up": size, "down": random.choice((0.0, size / 2))},
                {"kind": "target", "watch": watch, "load": size, "tolerance": random.choice((0.0, 0.1))},
            ]
            if tokens:
                rules.append({"kind": "saturation", "kv_cache": 0.3, "waiting": 1.5, "waiting_spare": 1.0})
                rules.append({"kind": "sla", "ttft_s": random.choice((0.01, 0.05)), "tpot_s": 0.01})
            pool["autoscaling"] = {
                "rule": random.choice(rules),
                "every_s": random.choice((1e-3, 0.017, 0.1)),
                "startup_s": random.choice((0.0, 4e-3, 0.06)),
                "max_instances": pool["instances"] + random.randint(0, 2),
                "stabilise_s": random.choice((0.0, 0.05)),
            }
    return any("autoscaling" in pool for pool in plan["pools"])


def _stages(random: Random, pool: str) -> list[Block]:
    parts = random.choice((1, 1, 3))
    return [
        {
            "name": name,
            "pool": pool,
            "place": random.choice(("before", "beside")),
            "after": ["a"] if name == "b" and random.random() < 0.5 else [],
            "instances": random.randint(1, 2),
            "seconds": random.choice((1e-3, 0.02)),
            "parts": parts,
        }
        for name in "ab"[: random.randint(1, 2)]
    ]


# --- loads ----------------------------------------------------------------------------------------------------------


def _lengths(random: Random, most: int) -> Block:
    if random.random() < 0.3:
        return {"kind": "fixed", "tokens": random.randint(1, most)}
    return {"kind": "lognormal", "mean_tokens": random.choice((4.0, most / 3)), "sigma": 1.0, "max_tokens": most}


def _load(random: Random) -> Block:
    kind = random.choice(("plain", "plain", "prefix", "prefix", "sessions", "sessions", "turns", "graph"))
    rate = random.choice((5.0, 60.0, 400.0))
    arrivals = random.choice(
        (
            {"kind": "poisson", "rate_rps": rate},
            {"kind": "gamma", "rate_rps": rate, "cv": 3.0},
            {"kind": "fixed", "rate_rps": rate},
            {"kind": "closed_loop", "users": random.randint(1, 6), "think_s": random.choice((0.0, 4e-3))},
        )
    )
    load: Block = {
        "name": "drawn",
        "arrivals": arrivals,
        "prompt": _lengths(random, 120),
        "output": _lengths(random, 60),
    }
    if random.random() < 0.4:
        load["classes"] = [{"name": "a", "share": 2, "priority": 1}, {"name": "b", "slo": {"ttft_s": {"p99": 0.05}}}]
    block = {"block_tokens": 16}
    if kind == "prefix":
        load["shared_prefix"] = {"groups": random.randint(1, 3), "tokens": random.choice((16, 90)), **block}
    elif kind == "turns":
        load["sessions"] = {"follow": "arrivals", "concurrent": random.randint(1, 3), "turns": 2, **block}
    elif kind == "sessions":
        load |= {"prompt": _lengths(random, 30), "output": _lengths(random, 20), "sessions": _sessions(random) | block}
    elif kind == "graph":
        load["graph"] = _graph(random)
        load |= {"prompt": _lengths(random, 40), "output": _lengths(random, 20)}
        load.pop("classes", None)
    return load


def _sessions(random: Random) -> Block:
    sessions: Block = {"turns": random.randint(1, 3), "pause_s": random.choice((0.0, 1e-3, 0.3))}
    if random.random() < 0.5:
        sessions["subagents"] = {
            "share": 0.6,
            "count": random.randint(1, 2),
            "turns": random.randint(1, 2),
            "pause_s": random.choice((0.0, 2e-3)),
            "inherits": random.random() < 0.5,
        }
    return sessions


def _graph(random: Random) -> list[Block]:
    nodes: list[Block] = [{"name": "a", "from_s": random.choice((0.0, 0.01))}]
    for i, name in enumerate("bc"[: random.randint(0, 2)]):
        count = random.choice((1, 2, 3))
        after = [node["name"] for node in nodes if random.random() < 0.7]
        node = {"name": name, "after": after, "count": count, "delay_s": random.choice((0.0, 2e-3))}
        if count > 1 and random.random() < 0.5:
            node["first"] = 1
        if after and i == 0 and random.random() < 0.6:
            node["inherits"] = "a"
        nodes.append(node)
    return nodes


# --- what must hold -------------------------------------------------------------------------------------------------


def check(number: int) -> World:
    """Check the world of a number. Raise AssertionError if jumps and single steps differ or a law is violated."""
    return check_world(drawn(number), f"plan {number}")


def check_world(world: World, name: str) -> World:
    """Check a world, and return it with its outcome; `name` begins the messages. Raise AssertionError if jumps and
    single steps differ or a law is violated."""
    try:
        stepped = _run(world, single_steps=True)
    except UsageError as error:  # all instances leave, so that nothing is answered
        with pytest.raises(UsageError, match=re.escape(str(error))):
            _run(world, single_steps=False)
        return world
    jumped = _run(world, single_steps=False)
    for column in COLUMNS:
        in_steps, in_jumps = (getattr(run.outcome, column).tolist() for run in (stepped, jumped))
        assert in_steps == in_jumps, f"{name}: {column} differs between single steps {in_steps} and jumps {in_jumps}"
    for number, of in SAME.items():
        in_steps, in_jumps = of(stepped.outcome), of(jumped.outcome)
        assert in_steps == in_jumps, f"{name}: {number} differs between single steps {in_steps} and jumps {in_jumps}"
    jumped.summary(noise=False)
    return world._replace(outcome=jumped.outcome)


def stored(number: int, why: str) -> str:
    """Return the line of plans.jsonl for the world of a number that failed."""
    return json.dumps({"number": number, "why": why, **drawn(number).recipe._asdict()})


def past(path: Path = PAST) -> dict[int, Recipe]:
    """Return the worlds that failed once, by the numbers that they had then."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["number"]: Recipe(**{key: row[key] for key in Recipe._fields}) for row in rows}


SAME: dict[str, Any] = {
    "requests that were stopped": lambda outcome: outcome.stopped,
    "number of steps": lambda outcome: outcome.steps,
    "bytes of KV caches": lambda outcome: outcome.transferred_bytes,
    "tokens found in caches": lambda outcome: [(core.hit_tokens, core.tier_tokens) for core in outcome.cores],
    "ticks in which cores were busy": lambda outcome: [core.busy for core in outcome.cores],
    "drafts": lambda outcome: [core.drafting for core in outcome.cores],
    "loads of adapters": lambda outcome: [core.adapters for core in outcome.cores],
    "switches of roles": lambda outcome: outcome.role_switches,
    "instances of autoscaled pools": lambda outcome: outcome.scaled,
    "ticks between messages": lambda outcome: _between(outcome),
}
"""Numbers of an outcome that jumps and single steps must agree on, beside its columns."""


def features(world: World) -> set[str]:
    """Return what a plan and its load have, by the names of the tests."""
    plan, stream = world.deployment.plan, world.stream
    pools = plan.pools
    caches, parallel = [pool.kv_cache for pool in pools], [pool.parallelism for pool in pools]
    outcome = world.outcome
    found = {
        "sessions": stream.turns is not None,
        "families": stream.graph is not None,
        "prefix caching": stream.hash_ids is not None and any(cache.prefix_caching for cache in caches),
        "fragments": world.recipe.fragments > 0 and "-v-" in plan.name,
        "combined fragments": world.recipe.fragments > 1,
        # A study names the pools that it searches by their roles.
        "drafts of a study": world.recipe.fragments > 0 and any(pool.speculation for pool in pools),
        "fixed pools": world.recipe.fragments > 0 and any(pool.name != pool.role for pool in pools),
        "tiers": any(cache.tiers for cache in caches),
        "drafts": any(pool.speculation for pool in pools),
        "draft rules": any(pool.speculation and pool.batching.draft_rules for pool in pools),
        "apart": len(pools) > 1 and pools[0].role == "prefill",
        "local prefill": plan.prefills_locally,
        "control": plan.control is not None,
        "autoscaling": plan.autoscales,
        "started": outcome is not None and any(of.starts for of in outcome.scaled),
        "drained": outcome is not None and any(of.drains for of in outcome.scaled),
        "scaled ranks": outcome is not None and any(of.ranks and of.starts for of in outcome.scaled),
        "events": bool(plan.events),
        "stages": bool(plan.stages),
        "pipelines": any(of_pool.pp > 1 for of_pool in parallel),
        "followed chunks": any(pool.chunks_follow for pool in world.deployment.pools),
        "dynamic chunks": any(pool.batching.chunk_pipeline == "dynamic" for pool in pools),
        "attention_dp": any(of_pool.attention_dp > 1 for of_pool in parallel),
        "cp": any(of_pool.context_ranks > 1 for of_pool in parallel),
        "decode_context_parallel": any(of_pool.decode_ranks > 1 for of_pool in parallel),
        "prefill_context_parallel": any(of_pool.prompt_groups > 1 for of_pool in parallel),
        "prompt groups and drafts": any(pool.speculation and pool.parallelism.prompt_groups > 1 for pool in pools),
        "prompt groups and tiers": any(pool.kv_cache.tiers and pool.parallelism.prompt_groups > 1 for pool in pools),
        "async": any(pool.schedules_async for pool in pools),
        "swap": any(cache.preemption == "swap" for cache in caches),
        "adapters": stream.adapter is not None,
        "adapters and drafts": stream.adapter is not None and any(pool.speculation for pool in pools),
        "adapters apart": stream.adapter is not None and pools[0].role == "prefill",
        "adapters in pipelines": stream.adapter is not None and any(of_pool.pp > 1 for of_pool in parallel),
        "images": stream.media is not None,
        "ranks": any(changes_ranks(event, plan.pool(event.pool)) for event in plan.events),
        "spares": any(pool.spare for pool in pools),
        "ahead": any(tier.fetched == "ahead" for cache in caches for tier in cache.tiers or ()),
        "messages": any(pool.message_tokens > 1 for pool in pools),
        "preempted": outcome is not None and bool(outcome.preemptions.any()),
        "resent": outcome is not None and bool(outcome.resent.any()),
    }
    return {name for name, is_there in found.items() if is_there}


def _between(outcome: Outcome) -> tuple[int, int]:
    """Return the number of messages after the first ones, and the ticks between them."""
    if not len(outcome.intervals):
        return 0, 0
    first, slope, steps, decodes = outcome.intervals.T
    return int((steps * decodes).sum()), int(((steps * first + slope * (steps * (steps - 1) // 2)) * decodes).sum())


def _run(world: World, *, single_steps: bool) -> Result:
    """Simulate a world, and audit it."""
    deployment, stream = world.deployment, world.stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(AUDIT, "1")
        return deployment.simulate(stream, single_steps=single_steps, seed=world.recipe.seed)
