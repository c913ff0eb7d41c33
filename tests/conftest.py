"""Where the published data and the oracles are, and one way to run the command line."""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import tiers

# Before numpy is loaded: on busy machines the threads of small matrix products only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The same examples on every machine, and no time limit on shared ones; HYPOTHESIS_PROFILE=explore looks further.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SIMTUNE_DATA", ROOT.parent / "shared" / "data"))


NEEDS_DATA = "set SIMTUNE_DATA to the folder of published data"

# They fork, or limit a process, which Windows does not know.
collect_ignore = ["coverage", "fuzz", "kills", "mutants", "soak"] if sys.platform == "win32" else []


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the full tier."""
    for item in items:
        if tiers.is_full(item.nodeid, item.get_closest_marker("quick") is not None):
            item.add_marker(pytest.mark.full)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in one line what the tests need that were skipped for want of data."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NEEDS_DATA in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were skipped: {NEEDS_DATA} to run them")


def _there(path: Path) -> Path:
    if not path.is_dir():
        pytest.skip(f"{path} is absent: {NEEDS_DATA} to run this test")
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of published traces and tables; the test is skipped where it is absent."""
    return _there(DATA)


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """The folder of checked answers, beside the data; the test is skipped where it is absent."""
    return _there(DATA.parent / "oracles")


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> Iterator[None]:
    """Keep what earlier modules left out of the collector: a collection, which every load client makes once, would take
    a second of CPU in a process that has run thousands of tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def own_code_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission to import modules that files name."""
    monkeypatch.setenv("SIMTUNE_ALLOW_CODE", "1")


@pytest.fixture
def no_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every import of pyarrow fail, as without the extra."""
    real = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
