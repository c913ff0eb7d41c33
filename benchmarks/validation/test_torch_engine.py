"""Kernels alone, measured by `simtune profile --device cpu`, against the torch engine under the simulator's scheduler.

    pip install torch
    python -m pytest benchmarks/validation -m benchmark_only -s

A model of narrow layers is profiled for 80 seconds; nothing of the engine is fitted. Then three loads are served for
real, three times each in turns, by the engine's own processor time, from which a gauge divides out how much slower the
machine is than it was around the profile. Asked for, and printed: predicted and measured means, and the repeat noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from benchmarks.results import Recorder
from benchmarks.validation.loads import METRICS, at_once, errors, three_loads
from simtune.sim.deployment import deploy
from simtune.sim.result import Result
from simtune.specs.catalog import load_hardware
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model
from simtune.specs.plan import Batching, KvCache, Plan, Pool
from simtune.validation.engines import torch as engine
from simtune.validation.engines.clocks import ProcessorClock

pytestmark = pytest.mark.benchmark_only

MODEL = Model(
    name="narrow-llama",
    hidden_size=2048,
    vocab_size=16384,
    max_position=4096,
    layers=(
        LayerGroup(
            count=4,
            attention=FullAttention(heads=32, kv_heads=8, head_dim=64),
            feed_forward=DenseFeedForward(intermediate_size=8192),
        ),
    ),
)
REPEATS, REQUESTS = 3, 30
MOST = 0.1
"""Target of every mean; twice the repeat noise counts as met."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, list[Result]]]:
    """Predicted, and measured three times, by load."""
    pytest.importorskip("torch")
    from simtune.validation.engines.gauge import Gauge

    folder = tmp_path_factory.mktemp("kernels")
    model, out = folder / "model.yaml", folder / "cpu"
    model.write_text(MODEL.to_yaml())
    before = Gauge()
    command = [sys.executable, "-m", "simtune", "profile", "--device", "cpu", "--model", str(model), "--budget", "80s"]
    subprocess.run([*command, "--out", str(out), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    gauge = Gauge(median([before.reference_s, Gauge().reference_s]))
    hardware = load_hardware(str(out))
    pool = Pool(
        hardware=hardware.name,
        instances=1,
        batching=Batching(max_num_seqs=8, max_num_batched_tokens=256),
        kv_cache=KvCache(num_blocks=520),
        max_model_len=1024,
        async_scheduling=False,
        cuda_graphs=False,
    )
    deployment = deploy(Plan(name="narrow", model=MODEL.name, pools=(pool,)), MODEL, hardware)
    header = json.loads(Path(out / "measurements.jsonl").read_text().splitlines()[0])
    print(f"\nkernels: {header['kernels']}")
    executor = engine.executor(deployment, attention="sdpa_grouped")
    loads = three_loads(deployment, at_once(REQUESTS, 0, (32, 384), (8, 64)), 1)
    engine.serve(deployment, at_once(3, 5, (32, 100), (4, 8)), executor)
    measured: dict[str, list[Result]] = {name: [] for name in loads}
    for _ in range(REPEATS):
        for name, stream in loads.items():
            clock = ProcessorClock(gauge)
            measured[name].append(engine.serve(deployment, stream, executor, clock=clock).result)
    return {name: (deployment.simulate(stream), measured[name]) for name, stream in loads.items()}


def test_kernels_alone_foretell_the_engine(served: dict[str, tuple[Result, list[Result]]], record: Recorder) -> None:
    missed = []
    for load, (predicted, measured) in served.items():
        table = errors(predicted, measured)
        for metric in METRICS:
            said, found, error, noise = table[metric]
            print(f"{load:9} {metric:5} {1e3 * said:8.1f} ms, measured {1e3 * found:8.1f}: {error:+.1%} ± {noise:.1%}")
            record(f"torch engine, {load}: {metric} mean", 100 * abs(error), "% off", "lower", noise=100 * noise)
            if abs(error) > max(MOST, 2 * noise):
                missed.append(f"{load} {metric} {error:+.1%}")
    assert not missed
