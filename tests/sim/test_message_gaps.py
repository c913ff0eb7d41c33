"""Times between the messages of an engine that sends several tokens at a time (`Pool.stream_interval`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.arrays import Ints
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.sim.message_gaps import MessageGaps
from simtune.sim.pools import DeployedPool
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.workload import FixedLength, Lognormal, Poisson, Workload
from simtune.workload.requests import RequestStream, build_stream

LOAD = Workload(
    name="w",
    arrivals=Poisson(rate_rps=40.0),
    prompt=Lognormal(mean_tokens=300, sigma=1.0, max_tokens=1500),
    output=Lognormal(mean_tokens=60, sigma=0.7, max_tokens=300),
)


def run(
    stream: RequestStream, policy: str = "vllm-fcfs", *, apart: bool = False, num_blocks: int = 160, **more: Any
) -> Result:
    batching = Batching.model_validate(
        {"policy": policy, "max_num_seqs": 16, "max_num_batched_tokens": 2048}, strict=False
    )
    cache = KvCache(num_blocks=num_blocks)
    pool = Pool(hardware="h100-sxm", instances=1, batching=batching, max_model_len=2048, kv_cache=cache, **more)
    pools: tuple[Pool, ...] = (pool,)
    if apart:
        pools = tuple(pool.model_copy(update={"name": role, "role": role}) for role in ("prefill", "decode"))
    plan = Plan(name="p", model="llama-3.1-8b", pools=pools, link=KvLink() if apart else None)
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm")).simulate(stream)


def gaps(result: Result) -> Ints:
    """All times between tokens or messages in ticks, sorted."""
    first, slope, steps, decodes = result.outcome.intervals.T
    times = [np.repeat(f + s * np.arange(n), d) for f, s, n, d in zip(first, slope, steps, decodes, strict=True)]
    return np.sort(np.concatenate(times))


def test_a_request_alone_gets_its_first_token_at_once_and_then_as_many_as_the_interval() -> None:
    load = LOAD.model_copy(update={"prompt": FixedLength(tokens=100), "output": FixedLength(tokens=26)})
    stream = build_stream(load, None, requests=1, seed=0)
    each, tens = run(stream), run(stream, stream_interval=10)
    tokens = gaps(each)
    assert len(tokens) == 25
    assert gaps(tens).tolist() == sorted([tokens[:10].sum(), tokens[10:20].sum(), tokens[20:].sum()])
    assert tens.outcome.first_token.tolist() == each.outcome.first_token.tolist()
    assert tens.outcome.finish.tolist() == each.outcome.finish.tolist()


WORLDS = [("vllm-fcfs", False), ("vllm-fcfs", True), ("sglang", False), ("tensorrt-llm", False), ("sarathi", True)]


@pytest.mark.parametrize(("policy", "apart"), WORLDS)
def test_messages_of_one_token_are_tokens(policy: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = build_stream(LOAD, None, requests=50, seed=1)
    tokens = run(stream, policy, apart=apart)
    assert tokens.outcome.preemptions.any() or policy in ("sglang", "tensorrt-llm")
    cores = DeployedPool.cores

    def sending(pool: DeployedPool, *args: Any) -> Any:
        made = cores(pool, *args)
        for core in made:
            core.gaps = MessageGaps(1)
        return made

    monkeypatch.setattr(DeployedPool, "cores", sending)
    assert gaps(run(stream, policy, apart=apart)).tolist() == gaps(tokens).tolist()


@pytest.mark.parametrize(("policy", "apart"), WORLDS)
def test_messages_divide_the_time_of_each_answer(policy: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMTUNE_AUDIT", "1")
    stream = build_stream(LOAD, None, requests=50, seed=1)
    result = run(stream, policy, apart=apart, stream_interval=7)
    found = gaps(result)
    assert len(found) == sum(-(-(tokens - 1) // 7) for tokens in stream.output_tokens.tolist())
    assert found.sum() == (result.outcome.finish - result.outcome.first_token).sum()
