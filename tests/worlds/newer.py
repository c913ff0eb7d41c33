"""Features that are added to drawn worlds: adapters, images, spare instances, loads ahead of admission, groups of
ranks that divide prompts, pipelines whose chunks follow one another, lost ranks.

What is added depends on the world alone, so that all other worlds keep their numbers; a feature that does not go with
the world is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from simtune.engine import POLICIES

Block = dict[str, Any]
VISION = "qwen2.5-vl-7b"
Feature = Callable[[Random, Block, Block], None]
"""Adds a feature to a plan and its load."""


def changes(plan: Block, load: Block) -> Iterator[Callable[[Block, Block], tuple[Block, Block]]]:
    """Yield functions that return a plan and its load with one more feature."""
    random = Random(f"newer {plan} {load}")
    for share, feature in (
        (0.4, _adapters),
        (0.2, _images),
        (0.2, _spares),
        (0.8, _ahead),
        (0.2, _groups),
        (0.15, _pipelines),
        (0.8, _ranks),
        (0.8, _scaled_ranks),
    ):
        if random.random() < share:
            seed = random.random()

            def change(plan: Block, load: Block, feature: Feature = feature, seed: float = seed) -> tuple[Block, Block]:
                plan, load = copy.deepcopy(plan), copy.deepcopy(load)
                feature(Random(seed), plan, load)
                return plan, load

            yield change


def _adapters(random: Random, plan: Block, load: Block) -> None:
    """Let requests ask for adapters, of which a few fit the devices."""
    for pool in plan["pools"]:
        if "lora" not in POLICIES[pool["batching"]["policy"]].offers:
            pool["batching"] |= {"policy": random.choice(("vllm-fcfs", "vllm-priority", "sglang")), "options": {}}
        lora: Block = {"rank": random.choice((1, 8, 64)), "slots": random.choice((1, 2, 4))}
        if random.random() < 0.5:
            lora |= {"host_slots": 4, "storage_bytes_per_s": random.choice((1e9, 1e12))}
        pool["lora"] = lora
    count = random.choice((1, 2, 5))
    base_share = random.choice((0.0, 0.3))
    load["adapters"] = {"count": count, "zipf": random.choice((0.0, 1.0)), "base_share": base_share}


def _images(random: Random, plan: Block, load: Block) -> None:
    """Let requests have images, and the pools encoders for them."""
    plan["model"] = VISION
    for pool in plan["pools"]:
        pool["parallelism"] = {"tp": random.choice((1, 2)), "pp": pool["parallelism"].get("pp", 1)}
        if "images" in POLICIES[pool["batching"]["policy"]].offers:
            encoder: Block = {"disable_chunked_mm_input": random.random() < 0.3}
            if random.random() < 0.5:
                encoder |= {"cache_size": random.choice((8, 40, 200)), "max_batched_embeds": random.choice((8, 64))}
            pool["encoder"] = encoder
    sizes = [{"width": random.choice((28, 84, 140)), "height": random.choice((28, 112))} for _ in range(2)]
    images: Block = {"share": random.choice((0.4, 1.0)), "per_request": random.choice(([1], [1, 2, 3])), "sizes": sizes}
    if random.random() < 0.5:
        images["repeats"] = {"share": 0.6, "images": 2}
    load["images"] = images
    if random.random() < 0.5:
        videos: Block = {"share": random.choice((0.3, 0.7)), "sizes": sizes, "seconds": random.choice((0.5, 2.0))}
        if random.random() < 0.5:
            videos["repeats"] = {"share": 0.6, "items": 2}
        load["videos"] = videos


def _spares(random: Random, plan: Block, load: Block) -> None:
    """Let instances stand by, and others fail."""
    pool = random.choice(plan["pools"])
    pool["instances"] = max(2, pool["instances"])
    pool["spare"] = random.randint(1, pool["instances"] - 1)
    failure = {"kind": "failure", "pool": pool["name"], "recover_s": random.choice((1e-3, 0.03, 0.5))}
    times = sorted(random.sample((0.0, 4e-3, 0.0211, 0.05, 0.2), random.randint(1, 3)))
    failing = random.sample(range(pool["instances"]), min(len(times), pool["instances"]))
    plan["events"] = [{**failure, "instance": i, "at_s": at_s} for i, at_s in zip(failing, times, strict=False)]


def _ahead(random: Random, plan: Block, load: Block) -> None:
    """Let requests load from host memory ahead of their admission, if there are tiers."""
    for pool in plan["pools"]:
        if pool["kv_cache"].get("tiers") and POLICIES[pool["batching"]["policy"]].loads_ahead:
            tier = {"name": "host", "fetched": "ahead", "bytes": random.choice((0, 5e6, 3e7, 1e9))}
            pool["kv_cache"]["tiers"] = [tier | {"bytes_per_s": random.choice((1e7, 1e8, 1e10)), "latency_s": 1e-4}]


def _groups(random: Random, plan: Block, load: Block) -> None:
    """Let groups of ranks divide prompts, in all pools; heads that draft are MTP heads."""
    for pool in plan["pools"]:
        speculation = pool.get("speculation") or {"drafter": {"kind": "none"}}
        if speculation["drafter"]["kind"] == "eagle":
            pool["speculation"]["drafter"] = {"kind": "eagle", "method": "mtp"}
        pool["parallelism"] = {**pool["parallelism"], "prefill_context_parallel": random.choice((2, 4))}


def _pipelines(random: Random, plan: Block, load: Block) -> None:
    """Let chunks follow one another beside decodes, in pipelines of all pools and few tokens of a step."""
    for pool in plan["pools"]:
        stages, batching = random.choice((2, 3)), pool["batching"]
        pool["batching"] = {
            "policy": random.choice(("vllm-fcfs", "vllm-priority")),
            "max_num_seqs": batching["max_num_seqs"],
            "max_num_batched_tokens": max(batching["max_num_seqs"], random.choice((8, 24))),
        }
        pool["parallelism"] = {"tp": pool["parallelism"].get("tp", 1), "pp": stages}
        cache = pool["kv_cache"]
        if "num_blocks" in cache:
            pool["kv_cache"] = {**cache, "num_blocks": cache["num_blocks"] * stages}


def _ranks(random: Random, plan: Block, load: Block) -> None:
    """Let ranks of instances with data-parallel attention fail, or leave and join, beside other events."""
    events = plan.setdefault("events", [])
    for pool in plan["pools"]:
        ranks = pool["parallelism"].get("attention_dp", 1)
        if ranks == 1:
            continue
        # Enough for a single rank: as many experts on each as there are.
        elastic = random.random() < 0.85
        pool["parallelism"] |= {"expert_replicas": 256 * ranks * pool["parallelism"]["tp"], "elastic_experts": elastic}
        for instance in range(pool["instances"]):
            place = {"pool": pool["name"], "instance": instance}
            if elastic and not any((event["pool"], event["instance"]) == tuple(place.values()) for event in events):
                events += [place | event for event in _rank_events(random, ranks)]


def _scaled_ranks(random: Random, plan: Block, load: Block) -> None:
    """Let ranks come and go with the load, unless something happens to instances at stated times."""
    if plan.get("events"):
        return
    for pool in plan["pools"]:
        ranks = pool["parallelism"].get("attention_dp", 1)
        if ranks == 1:
            continue
        first, size = random.randint(1, ranks), random.choice((0.5, 1.0, 3.0))
        rules: list[Block] = [
            {"kind": "rate", "requests_per_s": random.choice((20.0, 100.0))},
            {"kind": "thresholds", "watch": "under_way", "up": size, "down": size / 2},
            {"kind": "target", "watch": "under_way", "load": size, "tolerance": 0.0},
        ]
        pool["autoscaling"] = {
            "rule": random.choice(rules),
            "every_s": random.choice((1e-3, 0.017, 0.1)),
            "startup_s": random.choice((0.0, 4e-3, 0.06)),
            "min_ranks": random.randint(1, first),
            "initial_ranks": first,
            "pause_s": random.choice((0.0, 1e-3, 0.02)),
            "stabilise_s": random.choice((0.0, 0.05)),
        }
        pool["parallelism"] |= {
            "expert_replicas": 256 * ranks * pool["parallelism"]["tp"], "elastic_experts": True,
        }  # fmt: skip


def _rank_events(random: Random, ranks: int) -> list[Block]:
    """Return events of the ranks of one instance, of one kind, in order of time."""
    times = sorted(random.choice((0.0, 2e-3, 0.0105, 0.03, 0.08, 0.3)) for _ in range(random.randint(1, 3)))
    pauses = (0.0, 1e-3, 0.02, 0.2)
    if random.random() < 0.5:
        return [
            {"kind": "scale", "at_s": at_s, "ranks": random.randint(1, ranks), "pause_s": random.choice(pauses)}
            for at_s in times
        ]
    return [
        {"kind": "rank_failure", "at_s": at_s, "rank": rank, "pause_s": random.choice(pauses)}
        | ({"recover_s": random.choice((1e-3, 0.03, 0.5))} if random.random() < 0.7 else {})
        for at_s, rank in zip(times, random.sample(range(ranks), ranks - 1), strict=False)
    ]
