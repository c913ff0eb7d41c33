"""The machine as a unit of time, and what else to say of it beside a figure.

CPU seconds of one machine mean nothing on another, and on a busy one little an hour later. So each timed run is
followed by the same loop of plain Python, and what is kept is their ratio, in seconds of a machine whose loop takes
half a second.
"""

from __future__ import annotations

import datetime
import math
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import Circumstances

ROOT = Path(__file__).resolve().parent.parent

UNIT_TURNS = 10_000_000
UNIT_S = 0.5
"""What the unit loop is taken to last."""
SCALED = "scaled s"
"""The unit of CPU seconds that are scaled so."""


def unit_loop() -> int:
    """Ten million turns of what an interpreter does most: add and multiply small numbers."""
    s = 0
    for i in range(UNIT_TURNS):
        s += i * i
    return s


def unit_s() -> float:
    """CPU seconds of the unit loop, now."""
    start = time.process_time()
    unit_loop()
    return time.process_time() - start


def scaled(seconds: float) -> float:
    """CPU seconds just measured, as on a machine whose unit loop takes `UNIT_S`."""
    return seconds / unit_s() * UNIT_S


class Timed(NamedTuple):
    """CPU seconds of some repeats, as they were and scaled."""

    seconds: list[float]
    scaled: list[float]


def repeated(work: Callable[[], Any], rounds: int = 5, clock: Callable[[], float] = time.process_time) -> Timed:
    """Run `work` some times, each followed by the unit loop."""
    timed = Timed([], [])
    for _ in range(rounds):
        start = clock()
        work()
        timed.seconds.append(clock() - start)
        timed.scaled.append(scaled(timed.seconds[-1]))
    return timed


def per_call(work: Callable[[], Any], rounds: int = 5, at_least_s: float = 0.2) -> Timed:
    """Of one call of something quick: each round calls it until `at_least_s` of CPU have gone."""
    calls = 1
    while (took := _calls_s(work, calls)) < at_least_s:
        calls = math.ceil(calls * min(10.0, 1.2 * at_least_s / max(took, 1e-9)))
    timed = repeated(lambda: _calls_s(work, calls), rounds)
    return Timed(*([seconds / calls for seconds in column] for column in timed))


def _calls_s(work: Callable[[], Any], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        work()
    return time.process_time() - start


def children_s() -> float:
    """CPU seconds of all processes that were started here and have ended: the clock of whole commands."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def circumstances(root: Path) -> Circumstances:
    """Of this moment, this machine and the checkout at `root`."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True, text=True, check=False
    )
    return Circumstances(
        commit=described.stdout.strip() or "unknown",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        processor=_processor(),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
