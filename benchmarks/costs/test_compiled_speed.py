"""Compiled costs of Llama-3.1-8B on one H100: time to build, time per question, and their own error.

pytest benchmarks/costs -m benchmark_only
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from simtune.costs.compiled import CompiledCosts, compile_costs
from simtune.costs.iteration import Batch, StepModel
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Batching, Pool

pytestmark = pytest.mark.benchmark_only

MODEL, HARDWARE, LONGEST = load_model("llama-3.1-8b"), load_hardware("h100-sxm"), 131072
POOL = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=256, max_num_batched_tokens=8192))


def build() -> CompiledCosts:
    return compile_costs(MODEL, HARDWARE, POOL, LONGEST)


def test_building_the_tables(benchmark: BenchmarkFixture) -> None:
    benchmark(build)


def test_building_one_row(benchmark: BenchmarkFixture) -> None:
    costs, numbers = build(), itertools.cycle(range(1, 257))
    benchmark(lambda: costs._alone.make(next(numbers)))


def test_a_decode_step(benchmark: BenchmarkFixture) -> None:
    costs = build()
    costs.decode(128, 128 * 1000)
    benchmark(costs.decode, 128, 128 * 1000)


def test_a_step_with_two_chunks(benchmark: BenchmarkFixture) -> None:
    costs, chunks = build(), ((0, 700), (2048, 1024))
    costs.mixed(128, 128 * 1000, chunks, 129)
    benchmark(costs.mixed, 128, 128 * 1000, chunks, 129)


def test_error_against_the_step_model() -> None:
    """Decode steps, prompts in one chunk, and chunks of long prompts beside decodes."""
    costs, step_model, rng = build(), StepModel(MODEL, HARDWARE, POOL), np.random.default_rng(0)
    for what in ("decode", "prefill", "mixed"):
        errors = []
        for _ in range(1000):
            count = 0 if what == "prefill" else int(np.exp(rng.uniform(0, np.log(256))))
            context = int(count * np.exp(rng.uniform(0, np.log(LONGEST))))
            new = int(np.exp(rng.uniform(0, np.log(7900))))
            past = int(rng.uniform(0, LONGEST - new)) if what == "mixed" else 0
            chunks = () if what == "decode" else ((past, new),)
            batch = Batch(count, context, chunks, count or 1)
            ticks = costs.mixed(count, context, chunks, batch.num_samples)
            errors.append(abs(ticks / TICKS_PER_SECOND / step_model.seconds(batch) - 1))
        print(f"{what}: median {np.median(errors):.2e} p90 {np.quantile(errors, 0.9):.2e} max {max(errors):.2e}")
        assert np.quantile(errors, 0.9) < 3e-3
