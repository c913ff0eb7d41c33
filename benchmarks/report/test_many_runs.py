"""A folder of 500 runs: the page of them all, and all side by side.

    python -m pytest benchmarks/report/test_many_runs.py -m benchmark_only -s

Whole commands, in processor time; the runs are copies of one of 500 requests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import SCALED, children_s, scaled
from benchmarks.results import Recorder

pytestmark = pytest.mark.benchmark_only

RUNS = 500
MOST_BYTES = 20_000_000
RUN = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "500", "--rate", "4")


def _command(folder: Path, *words: str) -> float:
    """CPU seconds of a command in a folder, scaled."""
    before = children_s()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "simtune", *words]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return scaled(children_s() - before)


def test_five_hundred_runs(tmp_path: Path, record: Recorder) -> None:
    _command(tmp_path, "simulate", *RUN, "--out", "run-0", "--quiet")
    names = [f"run-{number}" for number in range(RUNS)]
    for name in names[1:]:
        shutil.copytree(tmp_path / "run-0", tmp_path / name)
    for what, words in (
        ("index", ("report", ".", "--out", "page.html")),
        ("side by side", ("report", *names, "--out", "page.html")),
    ):
        seconds = _command(tmp_path, *words)
        size = (tmp_path / "page.html").stat().st_size
        (tmp_path / "page.html").unlink()
        print(f"{RUNS} runs, {what}: {seconds:.1f} {SCALED}, {size / 1e6:.1f} MB")
        record(f"{RUNS} runs, {what}: CPU", seconds, SCALED, "lower", noise=0.2 * seconds)
        record(f"{RUNS} runs, {what}: size", size / 1e6, "MB", "lower")
        assert size <= MOST_BYTES
