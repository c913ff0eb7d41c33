"""How long the inputs of a simulation take: reading a published trace, drawing requests, loading a profile.

python -m pytest benchmarks/sim/test_input_speed.py -m benchmark_only
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.machine import SCALED, per_call
from benchmarks.results import Recorder
from simtune.specs.catalog import load_hardware, load_workload
from simtune.specs.traces import read_trace
from simtune.workload.requests import build_stream

pytestmark = pytest.mark.benchmark_only


@pytest.mark.parametrize("name", ["azure_2023_conv.csv.gz", "mooncake_conversation.jsonl.gz"])
def test_reading_a_trace(name: str, data_dir: Path, record: Recorder) -> None:
    path = data_dir / "traces" / name
    assert len(read_trace(path)) >= 7000
    record.samples(f"reading {name}", per_call(lambda: read_trace(path)).scaled, SCALED, "lower")


def test_drawing_20_000_requests(record: Recorder) -> None:
    workload, _ = load_workload("chat")
    drawn = per_call(lambda: build_stream(workload, None, requests=20_000, seed=0))
    record.samples("drawing 20,000 requests", drawn.scaled, SCALED, "lower")


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm-80g"])
def test_loading_a_profile_with_its_arrays(name: str, record: Recorder) -> None:
    assert len(load_hardware(name).arrays) > 0
    loaded = per_call(lambda: len(load_hardware(name).arrays))
    record.samples(f"loading {name}", loaded.scaled, SCALED, "lower")
