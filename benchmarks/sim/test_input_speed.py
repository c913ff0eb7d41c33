"""How long the inputs of a simulation take: reading a published trace, drawing requests, loading a profile.

python -m pytest benchmarks/sim/test_input_speed.py -m benchmark_only
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from simtune.sim.requests import build_stream
from simtune.specs.catalog import load_hardware, load_workload
from simtune.specs.traces import read_trace

pytestmark = pytest.mark.benchmark_only


@pytest.mark.parametrize("name", ["azure_2023_conv.csv.gz", "mooncake_conversation.jsonl.gz"])
def test_reading_a_trace(name: str, data_dir: Path, benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(read_trace, data_dir / "traces" / name)) >= 7000


def test_drawing_20_000_requests(benchmark: BenchmarkFixture) -> None:
    workload, _ = load_workload("chat")
    assert len(benchmark(build_stream, workload, None, requests=20_000, seed=0)) == 20_000


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm-80g"])
def test_loading_a_profile_with_its_arrays(name: str, benchmark: BenchmarkFixture) -> None:
    assert benchmark(lambda: len(load_hardware(name).arrays)) > 0
