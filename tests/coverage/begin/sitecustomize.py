"""Counts the lines and branches that this process reaches, where COVERAGE_INTO names a folder for what was counted.

Python imports a module of this name before anything else, so with this folder on PYTHONPATH the workers of pytest, the
commands that tests start and what those fork are all counted, each into a file of its own. What is killed leaves none.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

COUNTED = ("simtune",)
ROOT = Path(__file__).resolve().parents[3]


def begin(into: Path) -> None:
    """Count from here on, until the process ends by itself."""
    try:
        import slipcover
    except ModuleNotFoundError:
        return  # an interpreter of another environment

    counter = slipcover.Slipcover(branch=True)
    counter._filter_excluded_lines = lambda files: (
        None
    )  # reads sources as the locale has it; the report leaves them out
    slipcover.ImportManager(counter, slipcover.FileMatcher([str(ROOT / name) for name in COUNTED])).__enter__()

    def save() -> None:
        files = {name: [f["executed_lines"], f["executed_branches"]] for name, f in _files(counter).items()}
        seen = {name: reached for name, reached in files.items() if any(reached)}
        name = f"{os.getpid()}-{time.time_ns()}"
        part = into / f".{name}"
        part.write_text(json.dumps(seen))
        part.rename(into / f"{name}.json")  # whole or not at all

    def save_and_exit(leave: Any, status: int) -> None:
        try:
            save()
        finally:
            leave(status)

    atexit.register(save)
    os._exit = functools.partial(save_and_exit, os._exit)  # type: ignore[assignment]
    os.register_at_fork(after_in_child=counter.signal_child_process)


def _files(counter: Any) -> dict[str, Any]:
    """By absolute name: tests go to folders of their own, and some of those are gone in the end."""
    os.chdir(ROOT)
    return {str((ROOT / name).resolve()): f for name, f in counter.get_coverage()["files"].items()}


if os.environ.get("COVERAGE_INTO"):
    begin(Path(os.environ["COVERAGE_INTO"]))
