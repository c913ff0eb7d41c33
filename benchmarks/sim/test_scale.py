"""Large loads: CPU seconds and memory of a million requests, and of Vidur's own example as a whole process.

Each load runs in a process of its own, so that its memory is its own. Cost per request at 1e4, 1e5 and 1e6 requests
shows that it grows linearly. CPU seconds depend on the machine: figures beside them are those of the other simulator
where it was measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark_only

LOADS = {
    # name: (workload, plan, model, hardware, requests per second)
    "chat 900/250": ("lognormal", "one", 900, 250, 13.0),
    "reasoning 600/4000": ("lognormal", "one", 600, 4000, 1.6),
    "Mooncake x 64, prefix-aware": ("mooncake", "64", 0, 0, 64 * 1.0),
}

SCRIPT = """
import json, resource, sys, time
from simtune.sim.deployment import deploy
from simtune.sim.requests import build_stream
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.plan import Batching, KvCache, Plan, Pool, PrefixAware, RoundRobin
from simtune.specs.workload import Lognormal, Poisson, Workload

kind, instances, prompt, output, rate, requests, trace = json.loads(sys.argv[1])
model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
if kind == "mooncake":
    workload, rows = load_workload(trace)
    router, cache, longest = PrefixAware(), KvCache(prefix_caching=True), 131072
else:
    def lengths(mean):
        return Lognormal(mean_tokens=mean, sigma=0.6, max_tokens=8 * mean)

    workload, rows = Workload(name="w", arrivals=Poisson(rate_rps=rate), prompt=lengths(prompt), output=lengths(output)), None
    router, cache, longest = RoundRobin(), KvCache(), 65536
pool = Pool(
    hardware="h100-sxm",
    instances=instances,
    batching=Batching(max_num_seqs=256, max_num_batched_tokens=2048),
    kv_cache=cache,
    max_model_len=longest,
)
deployment = deploy(Plan(name="p", model="llama-3.1-8b", pools=(pool,), router=router), model, hardware)
stream = build_stream(workload, rows, requests=requests, seed=0).at_rate(rate)
began = time.process_time()
result = deployment.simulate(stream)
cpu_s = time.process_time() - began
busy = sum(lane.busy for lane in result.outcome.lanes) / len(result.outcome.lanes) / result.outcome.finish.max()
print(json.dumps({
    "cpu_s": cpu_s,
    "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "steps": result.outcome.steps,
    "events": result.outcome.events,
    "busy": float(busy),
    "saturated": result.saturated,
    "completed": int(result.completed.sum()),
    "mean batch": float(stream.output_tokens[result.completed].sum() / result.outcome.steps),
}))
"""


def run(
    kind: str, instances: int, prompt: int, output: int, rate: float, requests: int, trace: str
) -> dict[str, float]:
    given = json.dumps([kind, instances, prompt, output, rate, requests, trace])
    out = subprocess.run([sys.executable, "-c", SCRIPT, given], check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("name", "instances", "prompt", "output", "rate"),
    [("chat", 1, 900, 250, 19.0), ("reasoning", 1, 600, 4000, 1.9)],
)
def test_a_million_requests_on_one_instance(name: str, instances: int, prompt: int, output: int, rate: float) -> None:
    print(f"\n{name} {prompt}/{output} at {rate} requests/s")
    for requests in (10_000, 100_000, 1_000_000):
        line(requests, run("lognormal", instances, prompt, output, rate, requests, ""))


def test_a_million_requests_that_share_prefixes_on_64_instances(data_dir: Path) -> None:
    print("\nMooncake conversations, repeated, 64 instances, prefix-aware routing")
    for requests in (10_000, 100_000, 1_000_000):
        trace = str(data_dir / "traces" / "mooncake_conversation.jsonl.gz")
        line(requests, run("mooncake", 64, 0, 0, 64 * 0.55, requests, trace))


def line(requests: int, found: dict[str, float]) -> None:
    print(
        f"  {requests:9,}: {found['cpu_s']:6.2f} CPU-s, {found['cpu_s'] / requests * 1e6:5.1f} us a request, "
        f"{found['mib']:5.0f} MiB, {found['events'] / requests:.2f} events and {found['steps'] / requests:.1f} steps a "
        f"request, mean batch {found['mean batch']:.0f}, busy {found['busy']:.0%}, saturated {found['saturated']}"
    )
    assert found["completed"] == requests
