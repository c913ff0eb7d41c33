"""Large loads: CPU seconds and memory of a million requests, and of Vidur's own example as a whole process.

Each load runs in a process of its own, so that its memory is its own. Cost per request at 1e4, 1e5 and 1e6 requests
shows that it grows linearly. CPU seconds depend on the machine: figures beside them are those of the other simulator
where it was measured.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.machine import SCALED, children_s, repeated, scaled
from benchmarks.results import Recorder
from simtune import api

pytestmark = pytest.mark.benchmark_only

SCRIPT = """
import json, resource, sys, time
from simtune.sim.deployment import deploy
from simtune.workload.requests import build_stream
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.routing import PrefixAwareRouting, RoundRobinRouting
from simtune.specs.workload import Lognormal, Poisson, Workload

kind, instances, prompt, output, rate, requests, trace = json.loads(sys.argv[1])
model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
if kind == "mooncake":
    workload, rows = load_workload(trace)
    router, cache, longest = PrefixAwareRouting(), KvCache(prefix_caching=True), 131072
else:
    def lengths(mean):
        return Lognormal(mean_tokens=mean, sigma=0.6, max_tokens=8 * mean)

    workload = Workload(name="w", arrivals=Poisson(rate_rps=rate), prompt=lengths(prompt), output=lengths(output))
    rows = None
    router, cache, longest = RoundRobinRouting(), KvCache(), 65536
pool = Pool(
    hardware="h100-sxm",
    instances=instances,
    batching=Batching(max_num_seqs=256, max_num_batched_tokens=8192),
    kv_cache=cache,
    max_model_len=longest,
)
deployment = deploy(Plan(name="p", model="llama-3.1-8b", pools=(pool,), router=router), model, hardware)
stream = build_stream(workload, rows, requests=requests, seed=0).at_rate(rate)
began = time.process_time()
result = deployment.simulate(stream)
cpu_s = time.process_time() - began
busy = sum(core.busy for core in result.outcome.cores) / len(result.outcome.cores) / result.outcome.finish.max()
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


VIDUR_LOOP_S, VIDUR_PROCESS_S, VIDUR_MIB = 0.87, 3.7, 948
"""Vidur on this load, measured on two shared cores: its event loop, the whole process, and its memory."""


def test_the_load_of_vidurs_own_example(tmp_path: Path, record: Recorder) -> None:
    """1,000 requests of 700/180 tokens (lognormal), Poisson 2/s, Llama-2-7B on an A100, chunks of 512, 128 seats."""
    (tmp_path / "load.yaml").write_text(
        "schema: simtune/workload@1\nname: load\nrequests: 1000\narrivals: {kind: poisson, rate_rps: 2.0}\n"
        "prompt: {kind: lognormal, mean_tokens: 700, sigma: 0.6, max_tokens: 3000}\n"
        "output: {kind: lognormal, mean_tokens: 180, sigma: 0.6, max_tokens: 1000}\n"
    )
    (tmp_path / "plan.yaml").write_text(
        "schema: simtune/plan@1\nname: plan\nmodel: llama-2-7b\npools:\n- hardware: a100-sxm-80g\n  instances: 1\n"
        "  batching: {max_num_seqs: 128, max_num_batched_tokens: 512}\n  max_model_len: 4096\n"
    )
    given = ["simulate", "--workload", "load.yaml", "--plan", "plan.yaml", "--json"]
    walls = []

    def command() -> None:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "simtune", *given], cwd=tmp_path, capture_output=True, check=True)
        walls.append(time.perf_counter() - began)
        assert json.loads(done.stdout)["completed"] == 1000

    cpus = repeated(command, clock=children_s)
    mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    vidur = api.set_up(api.load_specs(None, None, str(tmp_path / "load.yaml"), str(tmp_path / "plan.yaml")))
    loops, steps = repeated(vidur.run), vidur.run().outcome.steps
    loop, process = statistics.median(loops.seconds), statistics.median(cpus.seconds)
    record.samples("load of Vidur's example, loop", loops.scaled, SCALED, "lower")
    record.samples("load of Vidur's example, process", cpus.scaled, SCALED, "lower")
    print(
        f"\nVidur's load, {steps:,} steps: loop {loop:.3f} CPU-s (Vidur {VIDUR_LOOP_S}, "
        f"{VIDUR_LOOP_S / loop:.0f} x), process {process:.2f} CPU-s, {statistics.median(walls):.2f} s wall (Vidur "
        f"{VIDUR_PROCESS_S}, {VIDUR_PROCESS_S / process:.1f} x), at most {mib:.0f} MiB (Vidur {VIDUR_MIB})"
    )


@pytest.mark.parametrize(
    ("name", "prompt", "output", "rate"), [("chat", 900, 250, 20.0), ("reasoning", 600, 4000, 0.88)]
)
def test_a_million_requests_on_one_instance(name: str, prompt: int, output: int, rate: float, record: Recorder) -> None:
    """Llama-3.1-8B on one H100, near 80 % of the rate it can sustain: saturated from about 25 and 1.1 requests/s."""
    print(f"\n{name} {prompt}/{output} at {rate} requests/s")
    for requests in (10_000, 100_000, 1_000_000):
        line(name, requests, run("lognormal", 1, prompt, output, rate, requests, ""), record)


def test_a_million_requests_that_share_prefixes_on_64_instances(data_dir: Path, record: Recorder) -> None:
    print("\nMooncake conversations, repeated, 64 instances, prefix-aware routing")
    for requests in (10_000, 100_000, 1_000_000):
        trace = str(data_dir / "traces" / "mooncake_conversation.jsonl.gz")
        line("mooncake", requests, run("mooncake", 64, 0, 0, 64 * 0.55, requests, trace), record)


def line(name: str, requests: int, found: dict[str, float], record: Recorder) -> None:
    own_s = scaled(found["cpu_s"])
    record(f"{name}, {requests:,} requests, each", 1e6 * own_s / requests, "scaled us", "lower")
    record(f"{name}, {requests:,} requests, memory", found["mib"], "MiB", "lower")
    print(
        f"  {requests:9,}: {found['cpu_s']:6.2f} CPU-s, {found['cpu_s'] / requests * 1e6:5.1f} us a request, "
        f"{found['mib']:5.0f} MiB, {found['events'] / requests:.2f} events and {found['steps'] / requests:.1f} steps a "
        f"request, mean batch {found['mean batch']:.0f}, busy {found['busy']:.0%}, saturated {found['saturated']}"
    )
    assert found["completed"] == requests
