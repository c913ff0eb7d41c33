"""Compiled costs of Llama-3.1-8B on one H100: time to build, time per question, and their own error.

pytest benchmarks/costs -m benchmark_only
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.machine import per_call
from benchmarks.results import Recorder
from simtune.costs.compiled import CompiledCosts, compile_costs
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, Pool

pytestmark = pytest.mark.benchmark_only

MODEL, HARDWARE, LONGEST = load_model("llama-3.1-8b"), load_hardware("h100-sxm"), 131072
POOL = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=256, max_num_batched_tokens=8192))


def build() -> CompiledCosts:
    return compile_costs(MODEL, HARDWARE, POOL, LONGEST)


def timed(what: str, work: Callable[[], Any], record: Recorder, rounds: int = 5) -> None:
    found = per_call(work, rounds)
    print(f"\n{what}: {1e6 * statistics.median(found.seconds):,.2f} us")
    record.samples(what, [1e6 * s for s in found.scaled], "scaled us", "lower")


def test_building_the_tables(record: Recorder) -> None:
    timed("building the tables", build, record)


def test_building_one_row(record: Recorder) -> None:
    costs, numbers = build(), itertools.cycle(range(1, 257))
    timed("building one row", lambda: costs.tables.alone.make(next(numbers)), record)


def test_a_decode_step(record: Recorder) -> None:
    costs = build()
    costs.decode(128, 128 * 1000)
    timed("a decode step", lambda: costs.decode(128, 128 * 1000), record)


def test_a_step_with_two_chunks(record: Recorder) -> None:
    costs, chunks = build(), ((0, 700), (2048, 1024))
    costs.mixed(128, 128 * 1000, chunks, 129)
    timed("a step with two chunks", lambda: costs.mixed(128, 128 * 1000, chunks, 129), record)


def test_error_against_the_step_model(record: Recorder) -> None:
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
            batch = StepWork(count, context, chunks, count or 1)
            ticks = costs.mixed(count, context, chunks, batch.num_samples)
            errors.append(abs(ticks / TICKS_PER_SECOND / step_model.seconds(batch) - 1))
        print(f"{what}: median {np.median(errors):.2e} p90 {np.quantile(errors, 0.9):.2e} max {max(errors):.2e}")
        record(f"{what}: error of the tables, p90", 1e4 * np.quantile(errors, 0.9), "per 10,000", "lower")
        assert np.quantile(errors, 0.9) < 3e-3
