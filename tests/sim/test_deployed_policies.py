"""Every policy that a plan can name runs from a plan, and its settings reach it."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.costs.estimate import link_of
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import POLICIES
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import FirstToken, KvLink, Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.workload import FixedLength, Lognormal, Poisson, SharedPrefix, Slo, Workload
from simtune.workload.requests import build_stream

LOAD = Workload(
    name="w",
    arrivals=Poisson(rate_rps=6.0),
    prompt=Lognormal(mean_tokens=300, sigma=1.0, max_tokens=1500),
    output=FixedLength(tokens=40),
)


def deployed(
    policy: str,
    *,
    apart: bool = False,
    kv_cache: KvCache | None = None,
    first_token: FirstToken | None = None,
    **more: Any,
) -> Deployment:
    batching = Batching.model_validate(
        {"policy": policy, "max_num_seqs": 16, "max_num_batched_tokens": 2048} | more, strict=False
    )
    pool = Pool(hardware="h100-sxm", instances=1, batching=batching, max_model_len=2048, kv_cache=kv_cache or KvCache())
    pools: tuple[Pool, ...] = (pool,)
    if apart:
        pools = tuple(pool.model_copy(update={"name": role, "role": role}) for role in ("prefill", "decode"))
    plan = Plan(name="p", model="llama-3.1-8b", pools=pools, link=KvLink(first_token=first_token) if apart else None)
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("apart", [False, True])
def test_a_policy_of_a_plan(policy: str, apart: bool) -> None:
    if apart and policy == "static":
        return  # refused: static batches are formed of prompts
    stream = build_stream(LOAD, None, requests=200, seed=2)
    slo = Slo(ttft_s={"p99": 0.2})
    result = deployed(policy, apart=apart).simulate(stream, slo)
    assert result.completed.all()
    assert (result.outcome.transferred_bytes > 0) is apart
    again = deployed(policy, apart=apart).simulate(stream, slo, single_steps=True)
    assert again.outcome.finish.tolist() == result.outcome.finish.tolist()


def test_settings_reach_the_scheduler() -> None:
    (core,) = deployed("transformers-fifo", safety_margin=0.4).pools[0].cores(1, None)
    assert core.scheduler.safety_margin == 0.4  # type: ignore[attr-defined]
    (core,) = deployed("transformers-fifo").pools[0].cores(1, None)
    assert core.scheduler.safety_margin == 0.15  # type: ignore[attr-defined]
    cache = KvCache(num_blocks=1001, watermark=0.05)
    (core,) = deployed("vllm-fcfs", kv_cache=cache).pools[0].cores(1, None)
    assert core.scheduler.watermark_blocks == 50
    options: dict[str, Any] = {"long_prefill_token_threshold": 64, "scheduler_reserve_full_isl": False}
    (core,) = deployed("vllm-priority", **options).pools[0].cores(1, None)
    assert {name: getattr(core.scheduler, name) for name in options} == options


def test_swapped_blocks_go_over_the_host_link() -> None:
    """Too little memory for everyone: with swap the steps wait for the host link, with recompute they compute again."""
    load = LOAD.model_copy(update={"arrivals": Poisson(rate_rps=60.0), "output": FixedLength(tokens=500)})
    stream = build_stream(load, None, requests=120, seed=2)
    runs = {
        preemption: deployed("vllm-fcfs", kv_cache=KvCache(num_blocks=400, preemption=preemption)).simulate(stream)
        for preemption in ("recompute", "swap")
    }
    assert all(run.completed.all() and run.outcome.preemptions.sum() > 10 for run in runs.values())
    swapping = deployed("vllm-fcfs", kv_cache=KvCache(num_blocks=400, preemption="swap"))
    (core,) = swapping.pools[0].cores(1, None)
    host = link_of(load_hardware("h100-sxm"), "host")
    assert core.swap == round(16 * 131_072 / host.bytes_per_s * TICKS_PER_SECOND)
    stepped = swapping.simulate(stream, single_steps=True)
    assert stepped.outcome.finish.tolist() == runs["swap"].outcome.finish.tolist()


CACHING = [name for name, policy in POLICIES.items() if "prefix_caching" in policy.offers]


@pytest.mark.parametrize("policy", CACHING)
def test_a_policy_with_a_prefix_cache_finds_what_prompts_share(policy: str) -> None:
    """All prompts begin with the same 96 tokens, which lie in KV blocks of 32: all requests but the first find them."""
    load = LOAD.model_copy(
        update={
            "prompt": FixedLength(tokens=97),
            "arrivals": Poisson(rate_rps=0.2),
            "shared_prefix": SharedPrefix(groups=1, tokens=96),
        }
    )
    cache = KvCache(prefix_caching=True, block_size=32)
    summary = deployed(policy, kv_cache=cache).simulate(build_stream(load, None, requests=20, seed=0)).summary()
    if policy.startswith("transformers"):
        assert not summary.prefix_cache, "its block sharing counts a candidate each time that it is looked up"
        return
    (use,) = summary.prefix_cache or ()
    assert (use.queried_tokens, use.hit_tokens) == (20 * 97, 19 * 96)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang@0.5.14", "trtllm"])
def test_a_plain_plan_of_an_engine_caches_prefixes(engine: str) -> None:
    assert load_engine(engine).pool["kv_cache"]["prefix_caching"] is True
