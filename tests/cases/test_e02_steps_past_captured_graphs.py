"""Steps larger than vLLM's largest CUDA graph are launched kernel by kernel: the gain of prefix caching and chunking.

Source: kubernetes-sigs/inference-perf, demos/kubecon-na-2025, folders `vllm` and `vllm+chunking_and_prefix_caching`:
vLLM 0.11, Llama-3.1-8B on an H100, 100 distinct prompts of 201 to 204 tokens, 62.4 output tokens, at most 440 requests
under way. Prompts have here the length that was sent.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simtune.api import load_specs, set_up
from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.specs.workload import Workload
from simtune.workload.requests import build_stream

DATA = Path(__file__).parent / "data"
PLANS = {"plain": "e02-steps-past-captured-graphs", "cached": "e01-host-time-synchronous"}
E2EL_S = {
    "plain": {31.4: 0.547, 61.8: 0.680, 92.2: 1.021},
    "cached": {1.0: 0.480, 43.2: 0.524, 85.5: 0.579, 127.8: 0.666},
}
SATURATED_RPS = {"plain": 102.0, "cached": 173.0}


@cache
def deployment(plan: str, *settings: str) -> Deployment:
    path = str(DATA / PLANS[plan] / "plan.yaml")
    return set_up(load_specs(None, None, "chat", path, {"plan": list(settings)})).deployment


def result(plan: str, requests: int, arrivals: dict[str, Any], *settings: str) -> Result:
    fields = {
        "prompt": {"kind": "fixed", "tokens": 203},
        "output": {"kind": "quantiles", "levels": [0, 1], "tokens": [61, 64]},
        "shared_prefix": {"groups": 100, "tokens": 192},
    }
    load = Workload.model_validate({"name": "field", "requests": requests, "arrivals": arrivals, **fields})
    return deployment(plan, *settings).simulate(build_stream(load, None, requests=requests, seed=0))


def saturated_rps(plan: str, *settings: str) -> float:
    run = result(plan, 1760, {"kind": "fixed", "rate_rps": 254.0, "max_in_flight": 440}, *settings)
    finish_s = sorted(run.finish_s)[440:-440]
    return float((len(finish_s) - 1) / (finish_s[-1] - finish_s[0]))


@pytest.mark.parametrize(("plan", "rate"), [(plan, rate) for plan in E2EL_S for rate in E2EL_S[plan]])
def test_latency_is_within_ten_per_cent(plan: str, rate: float) -> None:
    requests = 60 + round(10 * rate)
    steady = result(plan, requests, {"kind": "fixed", "rate_rps": rate}).e2el_s[requests // 2 :]
    assert steady.mean() == pytest.approx(E2EL_S[plan][rate], rel=0.10)


@pytest.mark.parametrize("plan", SATURATED_RPS)
def test_saturated_throughput_is_within_ten_per_cent(plan: str) -> None:
    assert saturated_rps(plan) == pytest.approx(SATURATED_RPS[plan], rel=0.10)


def test_the_gain_of_caching_and_chunking_is_within_fifteen_points() -> None:
    assert saturated_rps("cached") / saturated_rps("plain") - 1 == pytest.approx(0.69, abs=0.15)


def test_graphs_reach_to_twice_the_seats_and_to_512_tokens() -> None:
    (pool,) = deployment("plain").plan.pools
    assert pool.graph_sizes is not None
    assert pool.graph_sizes.largest(pool.batching.max_num_seqs) == 256
    assert pool.graph_sizes.largest(1024) == 512


def test_without_launches_a_busy_server_would_be_a_fifth_too_fast() -> None:
    arrivals = {"kind": "fixed", "rate_rps": 92.2}
    free = "pools.0.graph_sizes.launch_s=0"
    assert result("plain", 900, arrivals, free).e2el_s[450:].mean() < 0.82 * E2EL_S["plain"][92.2]
