"""The worlds of the study that the bounds come from: 136 plans on 8 GPUs with costs linear in all that a step has.

The same draws in the same order, so that its counts can be compared (`SCENARIOS` of them, from seed 42).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from simtune.costs.compiled import LinearCosts
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

GPUS, KV_BYTES, WEIGHT_BYTES, LONGEST = 8, 131072, 16e9, 23040
MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")


class World(NamedTuple):
    """A load and its limits, which all requests are held to."""

    stream: RequestStream
    slo: Slo
    rate_rps: int


def costs_on(tp: int) -> LinearCosts:
    """Of an instance of so many GPUs."""
    e = tp**0.92
    step_s = 1.2e-3 + 5.2e-3 / e + (2.0e-4 if tp > 1 else 0)
    return LinearCosts(step_s, per_token_s=28e-6 / e, per_context_s=4.5e-8 / e, per_pair_s=2.5e-9 / e)


def _pool(role: Any, tp: int, instances: int, budget: int, seats: int) -> Pool:
    return Pool(
        name=role,
        role=role,
        hardware="h100-sxm",
        instances=instances,
        batching=Batching(max_num_seqs=seats, max_num_batched_tokens=budget),
        kv_cache=KvCache(num_blocks=int((72e9 * tp - WEIGHT_BYTES) / KV_BYTES) // 16 + 1),
        max_model_len=LONGEST,
        async_scheduling=False,
    )


def _deployed(name: str, tps: tuple[int, ...], *pools: Pool, **given: Any) -> Deployment:
    made = deploy(Plan(name=name, model=MODEL.name, pools=pools, **given), MODEL, HARDWARE, costs_on(1))
    own = (replace(pool, costs=costs_on(tp)) for pool, tp in zip(made.pools, tps, strict=True))
    return replace(made, pools=tuple(own))


def plans() -> Iterator[Deployment]:
    """Mixed ones, then those with prefill and decode apart."""
    for tp in (1, 2, 4, 8):
        for budget in (256, 512, 1024, 2048, 4096):
            for seats in (32, 64, 128, 256):
                yield _deployed(f"tp{tp}-t{budget}-s{seats}", (tp,), _pool("mixed", tp, GPUS // tp, budget, seats))
    link = KvLink(bytes_per_s=50e9, setup_s=0.0, descriptor_s=0.0)
    for ahead in (1, 2, 4):
        for behind in (1, 2, 4):
            for n in range(1, GPUS // ahead + 1):
                rest = (GPUS - n * ahead) // behind
                for budget in (2048, 8192) if rest else ():
                    pools = _pool("prefill", ahead, n, budget, 256), _pool("decode", behind, rest, budget, 256)
                    yield _deployed(f"tp{ahead}-x{n}-tp{behind}-t{budget}", (ahead, behind), *pools, link=link)


def worlds(seed: int) -> Iterator[World]:
    """One after the other, without end."""
    draw = random.Random(seed)
    while True:
        rate, mean_prompt = draw.choice([3, 8, 15, 30, 60, 100]), draw.choice([200, 1000, 3000, 6000])
        mean_output = draw.choice([20, 150, 400])
        now, arrivals, prompts, outputs = 0.0, [], [], []
        for _ in range(300):
            now += draw.expovariate(rate)
            arrivals.append(now)
            prompts.append(max(8, min(20000, int(draw.lognormvariate(math.log(mean_prompt) - 0.32, 0.8)))))
            outputs.append(max(2, min(3000, int(draw.lognormvariate(math.log(mean_output) - 0.32, 0.8)))))
        ttft, tpot = draw.choice([0.15, 0.4, 1.0, 3.0]), draw.choice([0.006, 0.010, 0.02, 0.05])
        yield World(stream_of(arrivals, prompts, outputs), Slo(ttft_s={"p90": ttft}, tpot_s={"p90": tpot}), rate)
