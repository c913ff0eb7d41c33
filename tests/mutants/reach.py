"""Lines of the mutated files that each test reaches, and its duration."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.mutants.forked import as_in, in_fork, run_pytest

IMPORT = "import"
"""Name of the row of lines that run while modules are imported, which are not seen again when a test reaches them."""
TEST_S = 300.0
"""CPU time after which a test is given up: no mutant meets it."""


@dataclass(frozen=True)
class ReachingTest:
    """A test and the lines that it reaches if nothing is mutated."""

    name: str
    """As pytest has it."""
    seconds: float
    """CPU time, with fixtures."""
    lines: dict[str, str]
    """By mutated file: a hexadecimal number, bit n of which is line n."""

    @property
    def file(self) -> str:
        """The test file."""
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        """The name without parameters."""
        return self.name.partition("[")[0]

    @cached_property
    def num_lines(self) -> int:
        """Number of lines that the test reaches."""
        return sum(int(mask, 16).bit_count() for mask in self.lines.values())

    def reaches(self, file: str, first: int, last: int) -> bool:
        """Return True if the test reaches one of some lines of a file."""
        return bool(int(self.lines.get(file, "0"), 16) >> first & ((1 << last - first + 1) - 1))


class _Counter:
    """Lines of mutated files that this process reaches."""

    def __init__(self, root: Path, mutated: tuple[str, ...]) -> None:
        import slipcover  # not needed by who only reads what was counted

        self._root, self._mutated = root, mutated
        self._counter = slipcover.Slipcover(d_miss_threshold=1_000_000)
        slipcover.ImportManager(self._counter, slipcover.FileMatcher([str(root / "simtune")])).__enter__()
        self._before: dict[str, int] = {}

    def import_all(self) -> dict[str, str]:
        """Import the mutated modules; return the lines that this reaches."""
        for folder in self._mutated:
            for path in sorted((self._root / folder).rglob("*.py")):
                name = path.relative_to(self._root).with_suffix("").as_posix().replace("/", ".")
                importlib.import_module(name.removesuffix(".__init__"))
        self._before = self._reached()
        return {name: f"{mask:x}" for name, mask in self._before.items()}

    def lines(self) -> dict[str, str]:
        """Return the lines that were reached since."""
        new = {name: mask & ~self._before.get(name, 0) for name, mask in self._reached().items()}
        return {name: f"{mask:x}" for name, mask in new.items() if mask}

    def _reached(self) -> dict[str, int]:
        masks: dict[str, int] = {}
        for noted in (self._counter.all_seen, self._counter.newly_seen):
            for path, numbers in noted.items():
                name = Path(path).relative_to(self._root).as_posix()
                if name.startswith(self._mutated):
                    masks[name] = masks.get(name, 0) | sum(1 << number for number in set(numbers))
        return dict(sorted(masks.items()))


class _EachInFork:
    """Plugin that runs each test in a fork of its own, which writes the lines that the test reached."""

    def __init__(self, counter: _Counter, into: Path) -> None:
        self._counter, self._into = counter, into

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        in_fork(lambda: self._run(item), TEST_S)
        return True

    def _run(self, item: pytest.Item) -> int:
        began = time.process_time()
        reports = runtestprotocol(item, log=False, nextitem=None)
        seconds = round(time.process_time() - began, 4)
        if all(report.passed for report in reports):
            _add(self._into, item.nodeid, seconds, self._counter.lines())
        return 0


def _add(path: Path, name: str, seconds: float, lines: dict[str, str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "seconds": seconds, "lines": lines}) + "\n")


def count(root: Path, files: Sequence[str], options: Sequence[str], mutated: tuple[str, ...], into: Path) -> None:
    """Run the tests of a tree one by one, and write the lines that each reaches, a file for each test file.

    Tests that fail or are skipped are left out. Files that an earlier call has written stay.
    """
    into.mkdir(exist_ok=True)
    rows = [(name, into / (name.replace("/", ".") + ".jsonl")) for name in files]
    if all(part.exists() for _, part in rows):
        return

    def work() -> int:
        as_in(root, write_bytecode=True)
        counter = _Counter(root, mutated)
        imported = into / IMPORT
        imported.unlink(missing_ok=True)
        _add(imported, IMPORT, 0.0, counter.import_all())
        for name, part in rows:
            if not part.exists():
                half = part.with_suffix(".half")
                half.write_text("")
                plugin = _EachInFork(counter, half)
                in_fork(lambda name=name, plugin=plugin: run_pytest([*options, name], [plugin]), 1e6)  # type: ignore[misc]
                half.rename(part)
        return 0

    if in_fork(work, 1e6):
        raise RuntimeError("lines were not counted; install slipcover, with the extra dev")


def counted(into: Path) -> tuple[ReachingTest, list[ReachingTest]]:
    """Return the lines that importing reaches, and the tests that `count` has written."""
    (imported,) = _read(into / IMPORT)
    return imported, [test for part in sorted(into.glob("*.jsonl")) for test in _read(part)]


def _read(path: Path) -> Iterator[ReachingTest]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        yield ReachingTest(**row)
