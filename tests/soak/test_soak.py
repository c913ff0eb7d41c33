"""Work that lasts: does the memory of any process grow?

`make soak SOAK_S=3600` simulates a week's trace with a failure every hour and ten million requests, and searches 2,000
candidates on two workers again and again for so many seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOAK_S = float(os.environ.get("SIMTUNE_SOAK_S", "3600"))
HOURS, RATE_RPS = 7 * 24, 1.0
MANY = 10**7
MIB = 2**20
SLACK_MIB, SLACK = 8, 0.05
"""What may come and go: of a process, in MiB and as a share of it."""
BYTES = 450
"""What a request may take where all are kept."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory of processes is looked up in /proc")

PLAN = """\
schema: simtune/plan@1
name: week
model: llama-3.1-8b
pools:
  - hardware: l40s
    instances: 3
    max_model_len: 8192
    batching: {max_num_seqs: 64, max_num_batched_tokens: 2048}
    kv_cache: {prefix_caching: true}
events:
"""
LOAD = """\
schema: simtune/workload@1
name: short
requests: 1000
arrivals: {kind: poisson, rate_rps: 100}
prompt: {kind: lognormal, mean_tokens: 100, sigma: 0.6, max_tokens: 800}
output: {kind: fixed, tokens: 4}
"""
STUDY = """\
schema: simtune/study@1
name: soak
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 8}
workload: chat
slo: {ttft_s: {p99: 1.0}, tpot_s: {p99: 0.030}}
search:
  tp: [1, 2, 4, 8]
  pp: [1, 2]
  prefix_caching: [false, true]
  max_num_seqs: [16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512]
  max_num_batched_tokens: [512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288]
  requests: 200
  confirm: {draws: 0}
"""
SEARCHES = """\
import itertools, multiprocessing, os, sys, time
import simtune

peaks = []  # of workers, in MiB, as they end

def waitpid(pid, options):
    ended, status, usage = os.wait4(pid, options)
    if ended:
        peaks.append(usage.ru_maxrss / 2**10)
    return ended, status

os.waitpid = waitpid
begun = time.monotonic()
for turn in itertools.count():
    for seed in range(int(sys.argv[3])):
        peaks.clear()
        tuned = simtune.optimize(sys.argv[1], settings=(f"seed={seed}",), jobs=2)
        for worker in multiprocessing.active_children():
            worker.join()
        pages = int(open("/proc/self/statm").read().split()[1])
        mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        print(len(tuned.rows), sum(row.simulations for row in tuned.rows), mib, max(peaks), flush=True)
    if turn > 1 and time.monotonic() - begun > float(sys.argv[2]):
        break
"""

WORKER = """\
import pickle, sys
import simtune
from simtune.tuner.search import evaluator

class Enough(Exception):
    pass

def kept(self, key, task, expected, of=evaluator.Evaluator.finding):
    tasks.append(pickle.dumps(task))
    if len(tasks) == 60:
        raise Enough
    return of(self, key, task, expected)

tasks, evaluator.Evaluator.finding = [], kept
try:
    simtune.optimize(sys.argv[1], settings=("seed=8",), jobs=1)
except Enough:
    pass
for turn in range(20):
    for task in tasks:
        pickle.loads(task).run()
print(len(tasks))
"""

SEEDS = 16
"""Of a round of searches, each with workers of its own. Some end after six simulations and some after thousands, so the
process that searches is compared after a whole round with itself after an earlier one, and the workers of a search with
those of the same search in earlier rounds."""

Course = dict[int, list[float]]
"""Memory in MiB of every process, once a second."""


def resident(session: int) -> Mapping[int, float]:
    """Memory in MiB of all processes of a session."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) == session:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                found[int(pid)] = pages * os.sysconf("SC_PAGE_SIZE") / MIB
        except (OSError, ValueError):
            continue
    return found


def watched(command: list[str], folder: Path) -> tuple[Course, str, float]:
    """Run a command to its end: memory, what it printed, and how many seconds it took."""
    begun, course = time.monotonic(), Course()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, env=environment, start_new_session=True)
        while process.poll() is None:
            for pid, mib in resident(process.pid).items():
                course.setdefault(pid, []).append(mib)
            time.sleep(1)
    assert process.returncode == 0
    return course, (folder / "out").read_text(), time.monotonic() - begun


def growth(course: list[float]) -> tuple[float, float]:
    """The median of memory in the second quarter of its time, and in the last: the first is where it is filled."""
    quarter = max(1, len(course) // 4)
    return statistics.median(course[quarter : 2 * quarter]), statistics.median(course[-quarter:])


def halves(rounds: list[float]) -> tuple[float, float]:
    """The median of the first half of the rounds, and of the other. What a worker needs at most depends on which of a
    search's plans it is given, so the most of many is more than the most of a few."""
    half = len(rounds) // 2
    return statistics.median(rounds[:half]), statistics.median(rounds[half:])


def grown(course: Course) -> list[tuple[int, float, float]]:
    """Processes of a minute and more whose memory grew, with how much they had and have."""
    told = [(pid, *growth(course[pid])) for pid in course if len(course[pid]) >= 60]
    return [(pid, early, late) for pid, early, late in told if late - early > SLACK_MIB + SLACK * early]


def write_week(folder: Path) -> int:
    """A trace with busy days and quiet nights, and a plan that loses an instance every hour; how many requests."""
    random = np.random.default_rng(19)
    hour = np.arange(HOURS)
    counts = random.poisson(3600 * RATE_RPS * (1 + 0.8 * np.sin(2 * np.pi * hour / 24)))
    arrival = np.sort(np.repeat(hour, counts) * 3600 + random.random(counts.sum()) * 3600)
    prompt = np.clip(random.lognormal(5.5, 0.8, counts.sum()), 1, 6000).astype(int)
    output = np.clip(random.lognormal(5, 0.7, counts.sum()), 1, 1000).astype(int)
    rows = [f"{a:.3f},{p},{o}" for a, p, o in zip(arrival, prompt, output, strict=True)]
    (folder / "week.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows, ""]))
    lost = [f"  - {{kind: failure, pool: mixed, instance: {h % 3}, at_s: {3600 * h + 1800}, recover_s: 600}}"
            for h in range(HOURS)]  # fmt: skip
    (folder / "week.yaml").write_text(PLAN + "\n".join([*lost, ""]))
    return int(counts.sum())


def simulated(folder: Path, requests: int, *words: str) -> tuple[Mapping[str, Any], float, Course]:
    """The summary of a simulation of so many requests, its memory at most, and the course of it."""
    command = [sys.executable, "-m", "simtune", "simulate", "--json", "--requests", str(requests), *words]
    course, out, took = watched(command, folder)
    (only,) = course.values()
    print(f"{requests:,} requests in {took:.0f} s, at most {max(only):.0f} MiB, early and late {growth(only)}: {words}")
    return json.loads(out), max(only), course


def check_both_ways(folder: Path, requests: int, *words: str) -> Mapping[str, Any]:
    """Streamed, memory stays as it is; whole, it is so many bytes a request. What both come to is the same."""
    streamed, low, course = simulated(folder, requests, *words, "--stream")
    assert not grown(course)
    whole, high, _ = simulated(folder, requests, *words)
    print(f"{(high - low) * MIB / requests:.0f} bytes a request")
    assert high - low < requests * BYTES / MIB
    assert streamed["completed"] == whole["completed"] == requests
    assert streamed["duration_s"] == pytest.approx(whole["duration_s"], rel=1e-12)
    return streamed


@pytest.mark.nightly
def test_a_weeks_trace_with_a_failure_every_hour(tmp_path: Path) -> None:
    found = check_both_ways(tmp_path, write_week(tmp_path), "--plan", "week.yaml", "--workload", "week.csv")
    assert found["duration_s"] == pytest.approx(3600 * HOURS, rel=0.01)
    assert found["resent"] > HOURS / 2


@pytest.mark.nightly
def test_ten_million_requests_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text(LOAD)
    named = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm")
    check_both_ways(tmp_path, MANY, *named, "--workload", "load.yaml")


@pytest.mark.nightly
def test_searches_of_two_thousand_candidates_for_an_hour(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    _, out, took = watched([sys.executable, "-c", SEARCHES, "study.yaml", str(SOAK_S), str(SEEDS)], tmp_path)
    found = [[float(word) for word in line.split()] for line in out.splitlines()]
    print(f"{len(found)} searches in {took:.0f} s; candidates, simulations, MiB, most of a worker of it: {found}")
    assert found[0][0] >= 2000
    early, late = (statistics.median(line[2] for line in found[at:][:SEEDS]) for at in (SEEDS, len(found) - SEEDS))
    assert late < early * (1 + SLACK) + SLACK_MIB, "what searches have is kept when they are over"
    for seed in range(SEEDS):
        early, late = halves([line[3] for line in found[seed::SEEDS]])
        assert late < early * (1 + SLACK) + SLACK_MIB, f"workers of the search with seed {seed} take more and more"


@pytest.mark.nightly
def test_a_worker_keeps_nothing_of_what_it_did(tmp_path: Path) -> None:
    """The same simulations, sent as to a worker, again and again in one process."""
    (tmp_path / "study.yaml").write_text(STUDY)
    course, out, _ = watched([sys.executable, "-c", WORKER, "study.yaml"], tmp_path)
    (only,) = course.values()
    print(f"early and late {growth(only)} MiB")
    assert out.split() == ["60"]
    assert len(only) >= 20
    assert growth(only)[1] < growth(only)[0] + SLACK_MIB / 2


def test_growth_is_seen() -> None:
    level, leak = [100.0 + second % 3 for second in range(400)], [100.0 + second / 10 for second in range(400)]
    assert grown({1: level, 2: leak}) == [(2, *growth(leak))]
