"""Benchmarks find the published data as the tests do, record their main figures, and are compared with stored ones."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.machine import ROOT, circumstances
from benchmarks.results import Figure, Recorder, Stored
from tests.conftest import data_dir

__all__ = ["data_dir"]

FOUND = pytest.StashKey[dict[str, Figure]]()
KEPT = pytest.StashKey[bool]()
FAILED = pytest.StashKey[bool]()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """`record(name, value, unit, better, noise)`; figures of a test that fails are forgotten."""
    figures: dict[str, Figure] = {}
    yield Recorder(request.path, figures)
    if not request.node.stash.get(FAILED, False):
        request.config.stash[FOUND].update(figures)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = not report.passed
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simtune benchmarks")
    group.addoption("--store", action="store_true", help="keep what was found in the file of results")
    default = ROOT / "benchmarks" / "results.json"
    group.addoption("--results", metavar="FILE", type=Path, default=default, help="the file of results")
    group.addoption("--against", metavar="REV", help="run the four loads in turns with this git revision")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FOUND] = {}
    config.stash[KEPT] = False


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A regression fails the session, so that `make bench` does; nothing is stored of a session with failures."""
    config = session.config
    found, file = config.stash[FOUND], config.getoption("results")
    stored = results.read(file)
    if not found or session.exitstatus != pytest.ExitCode.OK:
        return
    if config.getoption("store"):
        here = circumstances(ROOT)
        results.write(file, stored | {name: Stored(figure, here) for name, figure in found.items()})
        config.stash[KEPT] = True
    elif results.failed(results.compare(stored, found)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was stored beside what was found now; shown also where a test failed."""
    found, file, say = config.stash[FOUND], config.getoption("results"), terminalreporter.write_line
    if not found:
        return
    terminalreporter.section("benchmarks")
    if config.stash[KEPT]:
        say(f"{len(found)} figures are stored in {file}")
        return
    stored, here = results.read(file), circumstances(ROOT)
    rows = results.compare(stored, found)
    for line in results.table(rows):
        say(line)
    for line in results.elsewhere(stored, found, here):
        say(line)
    for row in results.failed(rows):
        say(f"{row.verdict}: {row.name}", red=True, bold=True)
