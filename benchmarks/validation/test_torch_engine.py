"""Kernels alone, measured by `simtune profile --device cpu`, against the torch engine under the simulator's scheduler.

    pip install torch
    python -m pytest benchmarks/validation -m benchmark_only -s

A model of narrow layers is profiled; nothing of the engine is fitted. Three loads are served for real after each sixth
of the profile, by the processor time of the thread that serves them, so that kernels and steps meet the same machine.
How much slower neighbours make it is divided out by the gauge; its reference is what it took around the profile's
parts.
Asked for, and printed: predicted and measured means, and the repeat noise; and, by the shape of steps, what the kernels
and the host are said to take beside what the steps took.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

import pytest

from benchmarks.results import Recorder
from benchmarks.validation.loads import METRICS, at_once, errors, three_loads
from simtune.costs.calibration import TimedStep
from simtune.costs.iteration import StepModel
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Hardware
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.validation.servers import torch_engine as engine
from simtune.validation.servers.engine_clocks import ProcessorClock

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
REPEATS, REQUESTS = 6, 30
BUDGET_S = 240
LOOKS = 9
MOST = 0.1
"""Target of every mean; twice the repeat noise counts as met."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, list[Result]]]:
    """Predicted, and measured again and again, by load."""
    pytest.importorskip("torch")
    from simtune.validation.servers.gauge import Gauge

    folder = tmp_path_factory.mktemp("kernels")
    model, out = folder / "model.yaml", folder / "cpu"
    model.write_text(MODEL.to_yaml())
    command = [sys.executable, "-m", "simtune", "profile", "--device", "cpu", "--model", str(model), "--out", str(out)]
    measured: dict[str, list[Result]] = {}
    steps: list[TimedStep] = []
    gauge, looks = Gauge(), list[float]()
    for part in range(1, REPEATS + 1):
        budget = f"{part * BUDGET_S // REPEATS}s"
        looks += [gauge.look() for _ in range(LOOKS)]
        subprocess.run([*command, "--budget", budget, "--quiet"], check=True, stdout=subprocess.DEVNULL)
        looks += [gauge.look() for _ in range(LOOKS)]
        gauge.reference_s = median(looks)
        print(f"\ngauge: {1e3 * looks[-LOOKS]:.2f} ms, reference {1e3 * gauge.reference_s:.2f} ms", flush=True)
        deployment = deployed(load_hardware(str(out)))
        if part == 1:
            kernels = json.loads((out / "measurements.jsonl").read_text().splitlines()[0])["kernels"]
            executor = engine.executor(deployment, attention=kernels["decode_attention.bf16"])
            loads = three_loads(deployment, at_once(REQUESTS, 0, (32, 384), (8, 64)), 1)
            engine.serve(deployment, at_once(3, 5, (32, 100), (4, 8)), executor)
        for name, stream in loads.items():
            serving = engine.serve(deployment, stream, executor, clock=ProcessorClock(gauge))
            measured.setdefault(name, []).append(serving.result)
            steps += [step.timed() for step in serving.steps]
    print(f"\nkernels: {kernels}")
    show_steps(deployment, steps)
    return {name: (deployment.simulate(stream), measured[name]) for name, stream in loads.items()}


def deployed(hardware: Hardware) -> Deployment:
    """One instance of the model with room for all."""
    pool = Pool(
        hardware=hardware.name,
        instances=1,
        batching=Batching(max_num_seqs=8, max_num_batched_tokens=256),
        kv_cache=KvCache(num_blocks=520),
        max_model_len=1024,
        async_scheduling=False,
        cuda_graphs=False,
    )
    return deploy(Plan(name="narrow", model=MODEL.name, pools=(pool,)), MODEL, hardware)


def show_steps(deployment: Deployment, steps: Sequence[TimedStep]) -> None:
    """By decodes and prompt tokens, in octaves: how many steps, what they took, and what each kind of kernel and the
    host are said to take."""
    pool = deployment.pools[0]
    costs = StepModel(MODEL, pool.hardware, pool.spec)
    groups: dict[tuple[int, int], list[TimedStep]] = {}
    for step in steps:
        shape = step.batch.num_decodes, step.batch.num_tokens - step.batch.num_decodes
        groups.setdefault((shape[0].bit_length(), shape[1].bit_length()), []).append(step)
    print("decodes  prompt tokens  steps  measured ms  predicted ms    off")
    for key, group in sorted(groups.items()):
        decodes, tokens = (f"{1 << bits >> 1}-{(1 << bits) - 1}" for bits in key)
        parts: dict[str, float] = {}
        for step in group:
            said = {**costs.breakdown(step.batch), "host": costs.host.seconds(step.batch.num_seqs)}
            for kind, seconds in said.items():
                parts[kind] = parts.get(kind, 0.0) + 1e3 * seconds / len(group)
        found, said_ms = 1e3 * sum(s.seconds for s in group) / len(group), sum(parts.values())
        by_kind = ", ".join(f"{kind} {ms:.2f}" for kind, ms in parts.items())
        print(f"{decodes:>7}  {tokens:>13}  {len(group):5}  {found:11.2f}  {said_ms:12.2f}  {said_ms / found - 1:+.1%}")
        print(f"{'':9}{by_kind}")


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
