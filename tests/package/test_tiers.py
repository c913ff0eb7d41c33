"""The quick tier is quick, leaves out no file of tests, and its stored durations are of tests that exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests import tiers
from tests.docs.reading import ROOT, parsed

MOST_QUICK_CPU_S = 320
"""Of all stored durations in the quick tier and a fortieth of a second for each test below them: with the collection
of two processes less than 180 s on two cores."""

DURATIONS: dict[str, float] = tiers.stored()["durations"]


def quick() -> dict[str, float]:
    """Return the stored durations of tests in the quick tier, those with a marker apart."""
    return {test: seconds for test, seconds in DURATIONS.items() if not tiers.is_full(test, marked_quick=False)}


def test_a_test_is_full_from_a_duration_on() -> None:
    full = {test for test in set(DURATIONS) - set(quick()) if test.partition("[")[0] not in tiers.LONG_BESIDES}
    assert len(full) > 300
    assert min(DURATIONS[test] for test in full) >= tiers.FULL_S
    assert not tiers.is_full(next(iter(full)), marked_quick=True)
    assert not tiers.is_full("tests/new.py::test_without_a_duration", marked_quick=False)


def test_no_quick_test_is_long() -> None:
    assert max(quick().values()) <= tiers.LONGEST_QUICK_S


def test_the_quick_tier_fits_its_time() -> None:
    short = tiers.stored()["tests"] - len(DURATIONS)
    assert sum(quick().values()) + 0.025 * short <= MOST_QUICK_CPU_S


def test_every_file_has_a_quick_test() -> None:
    """`shortest` names one where all are long, if that takes less than five seconds; the marker `quick` others."""
    full: dict[str, list[str]] = {}
    for test in set(DURATIONS) - set(quick()):
        full.setdefault(test.partition("::")[0], []).append(test)
    without = {file for file, tests in full.items() if len(tests) == tiers.stored()["files"][file]}
    marked = {file for file in without if "pytest.mark.quick" in text(file)}
    # Each test of the first runs a verb seven times (tests/cli/test_interrupt.py is quick), the second runs one in two
    # checkouts (tests/package/test_wheel.py is quick), those of the third simulate many random clusters
    # (tests/sim/test_router.py is quick).
    allowed = {"tests/kills/test_kills.py", "tests/package/test_checkout.py", "tests/sim/test_cluster.py"}
    assert without - marked <= allowed


def text(file: str) -> str:
    """Return the source of a test file."""
    return (ROOT / file).read_text(encoding="utf-8")


def test_stored_durations_are_of_tests_that_exist() -> None:
    gone = []
    for test in [*DURATIONS, *tiers.stored()["shortest"]]:
        file, _, name = test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        if not (ROOT / file).exists() or function not in defined(ROOT / file):
            gone.append(test)
    assert gone == [], "measure again: make durations"


@cache
def defined(file: Path) -> set[str]:
    """Return the names of functions in a test file and, for suites that are inherited, in simtune.testing."""
    suites = sorted((ROOT / "simtune" / "testing").glob("*.py"))
    trees = [parsed(path) for path in (file, *suites)]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_shortest_of_a_file_stays_quick() -> None:
    durations = {"a::x": 0.2, "a::y": 3.0, "b::x": 0.9, "b::y": 0.6, "c::x": 7.0}
    assert tiers.shortest(durations) == ["b::y"]


class Item:
    """The part of a pytest item that its tier depends on."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self.markers = nodeid, [*markers]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.append(marker.name)


def test_tests_of_the_full_tier_are_marked(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    stored = {"durations": {"a.py::long": 2.0, "a.py::kept": 2.0, "a.py::short": 0.2}, "shortest": []}
    monkeypatch.setattr(tiers, "stored", lambda: stored)
    items = [Item("a.py::long"), Item("a.py::kept", "quick"), Item("a.py::short"), Item("a.py::new")]
    for plugin in pytestconfig.pluginmanager.get_plugins():
        if getattr(plugin, "NEEDS_DATA", None):  # tests/conftest.py
            plugin.pytest_collection_modifyitems(items)
    assert [item.markers for item in items] == [["full"], ["quick"], [], []]
