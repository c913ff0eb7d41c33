"""CPU seconds of four loads: chat, code completion, reasoning, and chat with a chain of three drafts.

    python -m pytest benchmarks/sim/test_four_loads.py -m benchmark_only -s
    make bench-against REV=HEAD~1

The second runs this tree and another revision of it in turns, each in a process of its own, and fails where a load
takes more than 3 % longer (medians of nine pairs). Turns are of pairs in changing order, so that a machine that is busy
for a while is busy for both.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.machine import ROOT, SCALED, scaled
from benchmarks.results import Recorder, middle

pytestmark = pytest.mark.benchmark_only

PAIRS = 9
ALONE = 5
MOST = 1.03

WORKLOAD = """
schema: simtune/workload@1
name: reasoning
requests: 8000
arrivals: {kind: poisson, rate_rps: 2}
prompt: {kind: lognormal, mean_tokens: 300, sigma: 0.8, max_tokens: 4000}
output: {kind: lognormal, mean_tokens: 3000, sigma: 0.7, max_tokens: 16000}
"""
PLAN = """
schema: simtune/plan@1
name: chain
model: llama-3.1-8b
pools:
- name: mixed
  hardware: h100-sxm
  instances: 1
  batching: {max_num_seqs: 256, max_num_batched_tokens: 8192}
  max_model_len: 16384
  speculation:
    drafter: {kind: eagle, method: eagle3, draft_vocab_size: 32000}
    scheme: {kind: chain, tokens: 3}
    acceptance: eagle3-llama-3.1-8b
"""


class Load(NamedTuple):
    """A built-in workload or a file beside the script, a plan or none, and how much of it."""

    workload: str
    plan: str | None
    rate_rps: float
    requests: int


LOADS = {
    "chat": Load("chat", None, 12, 30_000),
    "code": Load("code", None, 8, 40_000),
    "reasoning": Load("workload.yaml", None, 2, 8_000),
    "chain": Load("chat", "plan.yaml", 12, 20_000),
}

SCRIPT = """
import json, sys, time
import simtune

workload, plan, rate, requests = json.loads(sys.argv[1])

def run(requests):
    served = {"model": "llama-3.1-8b", "hardware": "h100-sxm"}
    return simtune.simulate(workload, plan=plan, rate_rps=rate, requests=requests, **served)

run(50)
start = time.process_time()
result = run(requests)
print(json.dumps({"cpu_s": time.process_time() - start, "answer": float(result.e2el_s.sum())}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the loads run: with the files they name, and no checkout around."""
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


@pytest.fixture(scope="session")
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The revision to compare with, unpacked."""
    revision = request.config.getoption("against")
    if revision is None:
        pytest.skip("no revision to compare with: make bench-against REV=HEAD~1")
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    out: Path = tmp_path_factory.mktemp("against")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(out, filter="data")
    return out


def run(load: Load, package: Path, folder: Path) -> tuple[float, float]:
    """(CPU seconds of the simulation, an answer to know it by) with the package of that checkout."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(load)]
    environment = {**os.environ, "PYTHONPATH": str(package), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return found["cpu_s"], found["answer"]


def in_turns(one: Callable[[], float], two: Callable[[], float], pairs: int) -> list[float]:
    """two() / one() of so many pairs, each of them first in every second pair."""
    ratios = []
    for number in range(pairs):
        if number % 2:
            after = two()
            ratios.append(after / one())
        else:
            before = one()
            ratios.append(two() / before)
    return ratios


@pytest.mark.parametrize("load", LOADS)
def test_cpu_seconds(load: str, folder: Path, record: Recorder, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("against") is not None:
        pytest.skip("only the comparison is asked for")
    found = [scaled(run(LOADS[load], ROOT, folder)[0]) for _ in range(ALONE)]
    print(f"\n{load}: {LOADS[load].requests:,} requests in {statistics.median(found):.2f} scaled CPU s")
    record.samples(load, found, SCALED, "lower")


@pytest.mark.parametrize("load", LOADS)
def test_against_another_revision(load: str, other: Path, folder: Path, pytestconfig: pytest.Config) -> None:
    answers: dict[Path, float] = {}

    def cpu_s(package: Path) -> float:
        seconds, answers[package] = run(LOADS[load], package, folder)
        return seconds

    ratios = in_turns(lambda: cpu_s(other), lambda: cpu_s(ROOT), PAIRS)
    ratio, noise = middle(ratios)
    same = "the same" if answers[ROOT] == answers[other] else "ANOTHER"
    print(
        f"\n{load}: this tree takes {ratio:.3f} ± {noise:.3f} x {pytestconfig.getoption('against')} "
        f"({len(ratios)} pairs, at least {min(ratios):.3f}); {same} answer"
    )
    assert ratio <= MOST
