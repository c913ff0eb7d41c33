"""pytest in forks of a process that has imported what simtune and the tests import, but nothing of simtune.

An interpreter that begins anew imports numpy, scipy, hypothesis and pytest first, which takes longer than most tests.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

IMPORTED = (
    "click",
    "hypothesis",
    "jinja2",
    "numpy",
    "plotly",
    "pulp",
    "pydantic",
    "rich",
    "scipy.stats",
    "simpy",
    "yaml",
)
OURS = ("simtune", "tests", "examples", "benchmarks")
MEMORY_BYTES = 8 << 30
"""Limit of a fork: a mistake may ask for any amount."""
WALL = 6.0
"""Seconds by the clock for each of the processor: the machine may be busy."""
FAILED = 70
"""Exit status of a fork that was killed or raised."""


def import_others() -> None:
    """Import the packages that forks share."""
    for name in IMPORTED:
        importlib.import_module(name)


def in_fork(work: Callable[[], int], cpu_s: float) -> int:
    """Return the exit status of work that is done in a fork, in a session of its own and without output.

    A fork that takes more CPU time, or `WALL` times as long by the clock, is killed with what it started: `FAILED`.
    """
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = FAILED
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 1))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            status = work()
        finally:
            os._exit(status)
    end, pause_s = time.monotonic() + WALL * cpu_s + 10.0, 0.001
    try:
        while True:
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(code) if os.WIFEXITED(code) else FAILED
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return FAILED
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    finally:
        _end_started(pid)


def _end_started(group: int) -> None:
    """Kill processes that a fork has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def as_in(root: Path, write_bytecode: bool = False) -> None:
    """Let this process import simtune and the tests from a tree, as if it had imported nothing of them."""
    os.chdir(root)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    checkout = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", checkout))]
    importlib.invalidate_caches()
    sys.dont_write_bytecode = not write_bytecode
    written = {} if write_bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.update({"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"} | written)


def run_pytest(arguments: Sequence[str], plugins: Sequence[Any]) -> int:
    """Return the exit status of pytest in this process."""
    plugged = [word for name in ("cacheprovider", "slipcover", "xdist") for word in ("-p", f"no:{name}")]
    options = [
        "-x",
        "-q",
        "--rootdir",
        os.getcwd(),
        *plugged,
        "-W",
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    ]
    return int(pytest.main([*options, *arguments], plugins=list(plugins)))


class Selection:
    """Plugin that leaves only tests of these names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the others out."""
        items[:] = [item for item in items if item.nodeid in self._names]
