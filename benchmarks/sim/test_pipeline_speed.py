"""What a simulation of a pipeline takes beside one of a single stage, in one process.

    python -m pytest benchmarks/sim/test_pipeline_speed.py -m benchmark_only -s

Prints the CPU seconds of 8,000 chat requests at two rates on one instance with 1, 2 and 4 stages, the best of three.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.results import Recorder
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.workload.requests import RequestStream, build_stream

pytestmark = pytest.mark.benchmark_only


def deployed(pp: int) -> Deployment:
    pool = Pool(
        hardware="h100-sxm",
        instances=1,
        batching=Batching(max_num_seqs=256, max_num_batched_tokens=8192),
        parallelism=Parallelism(pp=pp),
        max_model_len=8192,
    )
    plan = Plan(name="p", model="llama-3.1-8b", pools=(pool,))
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))


def cpu_s(deployment: Deployment, stream: RequestStream) -> float:
    taken = []
    for _ in range(3):
        begun = time.process_time()
        deployment.simulate(stream)
        taken.append(time.process_time() - begun)
    return min(taken)


@pytest.mark.parametrize("rate_rps", [8, 20])
def test_stages_cost_a_few_times_one(rate_rps: float, record: Recorder) -> None:
    workload, _ = load_workload("chat")
    stream = build_stream(workload, None, requests=8000, seed=1).at_rate(rate_rps)
    taken = {pp: cpu_s(deployed(pp), stream) for pp in (1, 2, 4)}
    for pp, seconds in taken.items():
        if pp > 1:
            record(f"{rate_rps:g} requests/s, pp {pp}", seconds / taken[1], "x pp 1", "lower")
        print(f"{rate_rps} requests/s, pp {pp}: {seconds:.3f} s CPU, {seconds / taken[1]:.1f} x pp 1")
    assert taken[4] < 4 * taken[1]
