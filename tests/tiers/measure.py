"""Measures every test of `make check` and stores what decides its tier: `make durations`.

    python -m tests.tiers.measure

pytest loads this module as a plugin in each of its processes, where it writes the CPU-seconds of each test, of the
processes that the test started included, and times a known loop now and then, by which durations are scaled.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers import STORED, UNIT_S, shortest, tests_by_file

ROOT = Path(__file__).resolve().parents[2]
INTO = "SIMTUNE_DURATIONS_INTO"
KEPT_S = 0.15
"""Shorter tests are not stored: half of `FULL_S`, so that the file changes little from one machine to the next."""
BETWEEN_UNITS = 400
"""Tests of one process between two timings of the loop."""


class _Count:
    tests = 0


def _cpu_s() -> float:
    import resource  # not on Windows

    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _unit_s() -> float:
    began = time.process_time()
    s = 0
    for i in range(10_000_000):
        s += i * i
    return time.process_time() - began


def _write(name: str, seconds: float) -> None:
    with open(Path(os.environ[INTO]) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps([name, seconds]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure one test with its fixtures."""
    if _Count.tests % BETWEEN_UNITS == 0:
        _write("unit", _unit_s())
    _Count.tests += 1
    began = _cpu_s()
    result = yield
    _write(item.nodeid, _cpu_s() - began)
    return result


def store(folder: Path) -> None:
    """Write `durations.json` from what the processes of a run left in a folder."""
    rows = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    scale = UNIT_S / statistics.median(seconds for name, seconds in rows if name == "unit")
    durations = {name: round(scale * seconds, 2) for name, seconds in rows if name != "unit"}
    document = {
        "cpu_s": round(sum(durations.values())),
        "durations": {name: durations[name] for name in sorted(durations) if durations[name] >= KEPT_S},
        "files": {file: len(tests) for file, tests in sorted(tests_by_file(durations).items())},
        "shortest": shortest(durations),
        "tests": len(durations),
    }
    STORED.write_text(json.dumps(document, indent=0, ensure_ascii=True) + "\n", encoding="utf-8")


def main() -> int:
    """Run all tests of `make check`, measured."""
    with tempfile.TemporaryDirectory() as folder:
        shared = ["-n", "auto", "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-v", *shared, "-p", "tests.tiers.measure"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, INTO: folder}, check=False)
        if done.returncode in (0, 1):  # failures are as long as they are
            store(Path(folder))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
