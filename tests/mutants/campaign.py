"""Mistakes put into the engine and the simulator, one at a time: how many do the tests catch?

    python -m tests.mutants.campaign --mutants 300 --first 0 --journal runs/mutants

Mutant n is the same on every machine: a file of simtune/engine or simtune/sim, chosen by how many lines it has, and a
mistake in it. It is made in a copy of the tree. Each test file is run once before, to see how long it takes and which
lines it reaches; a mutant meets those that reach its line, short ones and those that name what its file defines first,
until one fails. A mutant that they all pass has survived. A run of no end counts as caught. A campaign with a journal
goes on where it was; the copy and what was counted are kept there, so that it goes on with the same code.

To run every test file once takes as long as all tests. With --by-name that is left out: a mutant meets the quick tests
(tests/tiers) of the files that name what its module defines, those that name most of it first, and the random worlds.

Most of the time goes into mutants that no test catches. With --within S, a mutant meets tests that take S seconds
together and is open where they do not catch it, which counts as not caught; the campaign goes on with more seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from tests.mutants.mutations import mutant
from tests.mutants.survivors import SURVIVORS

ROOT = Path(__file__).resolve().parents[2]
UNMUTATED = ("simtune/sim/parallel.py",)
"""Worker processes: a mistake there may hang, and its tests are in tests/package."""
MUTATED = (
    "simtune/engine", "simtune/sim", "simtune/workload", "simtune/results", "simtune/tuner", "simtune/costs",
)  # fmt: skip
TESTS = (
    "tests/engine", "tests/sim", "tests/worlds", "tests/speculation", "tests/golden", "tests/workloads", "tests/api",
    "tests/testing", "tests/costs", "tests/specs", "tests/tuner",
)  # fmt: skip
COPIED = ("simtune", "examples", "benchmarks", "tests", "pyproject.toml")
CPU_S = 1200
"""Of the processor, for a batch of tests: on a busy machine they take longer and are not caught by that."""
WALL_S = 6 * CPU_S
BATCHES_S = (5.0, 30.0)
"""Tests meet a mutant in batches that take so long, and a last one: each begins an interpreter."""
PASS = (0, 5)
"""Ends of pytest: all pass; there are none, as where all of a file's are slow ones."""
LAST_S = 10.0
"""Added to the seconds of files that name nothing, so that they come last."""
QUICK_S, WORLDS = 0.3, "tests/worlds/test_worlds.py"
QUICK = ("-m", "not full and not slow and not nightly and not benchmark_only")
CAUGHT, SURVIVES, OPEN = "caught", "survives", "open"
"""By a test; all tests pass; those pass that it met so far."""


@dataclass(frozen=True)
class TestFile:
    """A test file as it is without mistakes."""

    __test__ = False
    name: str
    seconds: float
    """Of the processor."""
    lines: dict[str, list[int]]
    """Of each mutated file, those that it reaches."""


def files(root: Path) -> list[Path]:
    """Files that are mutated, those with many lines more often."""
    found = sorted(path for folder in MUTATED for path in (root / folder).rglob("*.py"))
    found = [path for path in found if path.relative_to(root).as_posix() not in UNMUTATED]
    return [path for path in found for _ in range(len(path.read_text().splitlines()) // 20)]


def test_files(root: Path) -> list[str]:
    """All whose tests are to catch mutants."""
    return sorted(str(file.relative_to(root)) for folder in TESTS for file in (root / folder).rglob("test_*.py"))


def statement(source: str, line: int) -> tuple[int, int]:
    """The first and last line of the smallest statement that a line belongs to."""
    found = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return min(found, key=lambda lines: lines[1] - lines[0])


def ordered_for(root: Path, tests: Sequence[TestFile], path: Path, line: int) -> list[TestFile]:
    """Test files that reach the statement of a line, those first that take little and name what the module defines."""
    source, name = path.read_text(), str(path.relative_to(root))
    begin, end = statement(source, line)
    nodes = ast.parse(source).body
    names = {path.stem, *(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))}
    reaching = [test for test in tests if any(begin <= n <= end for n in test.lines.get(name, ()))]
    named = {t.name: len(names.intersection(re.findall(r"\w+", (root / t.name).read_text()))) for t in reaching}
    return sorted(reaching, key=lambda test: (test.seconds / (1 + named[test.name]), test.name))


def naming(root: Path, path: Path) -> list[TestFile]:
    """Test files that name what a module defines, those first that name much of it in little time, as the tiers have
    it; then the others of its package, and the worlds, which run most of the engine and the simulator."""
    stored = json.loads((root / "tests/tiers/durations.json").read_text())["durations"]
    seconds: defaultdict[str, float] = defaultdict(float)
    for test, cpu_s in stored.items():
        seconds[test.partition("::")[0]] += cpu_s if cpu_s < QUICK_S else 0.0
    nodes = ast.parse(path.read_text()).body
    names = {path.stem, *(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))}
    found = []
    for name in test_files(root):
        shared = len(names.intersection(re.findall(r"\w+", (root / name).read_text())))
        if shared or name == WORLDS or name.startswith(f"tests/{path.relative_to(root).parts[1]}/"):
            found.append(
                (seconds[name] / (1 + shared) + LAST_S * (not shared), TestFile(name, 0.5 + seconds[name], {}))
            )
    return [test for _, test in sorted(found, key=lambda item: (item[0], item[1].name))]


def first_of(tests: Sequence[TestFile], within: float) -> int:
    """How many of the first tests take so many seconds together; at least one."""
    return max(1, sum(1 for seconds in accumulate(test.seconds for test in tests) if seconds <= within))


def batches(tests: Sequence[TestFile]) -> Iterator[list[str]]:
    """Their names: first what takes few seconds together, then some more, then all that is left."""
    left = list(tests)
    for most in BATCHES_S:
        batch: list[str] = []
        seconds = 0.0
        while left and (not batch or seconds + left[0].seconds <= most):
            seconds += left[0].seconds
            batch.append(left.pop(0).name)
        yield batch
    yield [test.name for test in left]


def passes(root: Path, tests: Sequence[str], **environment: str) -> bool:
    """Whether no test fails in a tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:slipcover", *tests]
    given = {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    process = subprocess.Popen(
        command, cwd=root, env=os.environ | given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S)),
    )  # fmt: skip
    try:
        return process.wait(WALL_S) in PASS
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def tried(root: Path, name: str) -> TestFile:
    """What a test file takes and reaches. Ends the campaign where it fails."""
    with tempfile.TemporaryDirectory() as counted:
        path = os.pathsep.join([str(root / "tests/coverage/begin"), str(root)])
        before = _children_s()
        if not passes(root, [name], COVERAGE_INTO=counted, PYTHONPATH=path):
            sys.exit(f"{name} fails before anything is mutated")
        lines: dict[str, set[int]] = {}
        for part in Path(counted).glob("*.json"):
            for file, (reached, _) in json.loads(part.read_text()).items():
                if (relative := os.path.relpath(file, root)).startswith(MUTATED):
                    lines.setdefault(relative, set()).update(reached)
    return TestFile(name, _children_s() - before, {file: sorted(reached) for file, reached in lines.items()})


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def caught(root: Path, tests: Sequence[TestFile], options: Sequence[str] = ()) -> bool:
    """Whether one of the tests fails in a tree."""
    return any(not passes(root, [*options, *batch]) for batch in batches(tests) if batch)


def copied(root: Path) -> None:
    """Make a copy of the tree."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, root / name)


def counted(folder: Path, root: Path) -> list[TestFile]:
    """Every test file as it is without mistakes, from the journal where it is known."""
    known = folder / "tests.jsonl"
    seen = [TestFile(**json.loads(line)) for line in _lines(known)]
    for name in test_files(root):
        if all(test.name != name for test in seen):
            seen.append(test := tried(root, name))
            _add(known, vars(test))
            print(f"{name}: {test.seconds:.0f} s", flush=True)
    if not any(test.lines for test in seen):
        sys.exit("slipcover counted no line; install it, with the extra dev")
    return seen


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _add(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _undone(undo: Path) -> None:
    """The file that holds a mistake is again as it was."""
    for line in _lines(undo):
        was = json.loads(line)
        Path(was["path"]).write_text(was["text"])
    undo.unlink(missing_ok=True)


def run(folder: Path, numbers: range, seconds: float, within: float, by_name: bool = False) -> list[dict[str, Any]]:
    """Try mutants whose fate the journal does not know, and say what became of each; all that it knows then."""
    begun, root, journal = time.monotonic(), folder / "tree", folder / "mutants.jsonl"
    if not root.exists():
        copied(folder / "half")
        (folder / "half").rename(root)
    undo = folder / "undo.jsonl"
    _undone(undo)  # of a campaign that was killed
    tests = [] if by_name else counted(folder, root)
    fates = {row["number"]: row for row in map(json.loads, _lines(journal))}
    for number in numbers:
        if time.monotonic() - begun > seconds:
            break
        known = fates.get(number, {"fate": OPEN, "within": 0.0})
        if known["fate"] != OPEN or known["within"] >= within:
            continue
        random = Random(number)
        path = random.choice(files(root))
        text = path.read_text()
        made = mutant(text, random)
        if made is None:
            continue
        source, line, before, after = made
        begun_one = time.monotonic()
        reaching = naming(root, path) if by_name else ordered_for(root, tests, path, line)
        passed, most = first_of(reaching, known["within"]) if known["within"] else 0, first_of(reaching, within)
        _add(undo, {"path": str(path), "text": text})
        path.write_text(source)
        options = QUICK if by_name else ()
        fate = CAUGHT if caught(root, reaching[passed:most], options) else OPEN if most < len(reaching) else SURVIVES
        _undone(undo)
        where = f"{path.relative_to(root)}:{line}"
        row = {"number": number, "where": where, "before": before, "after": after, "fate": fate, "within": within}
        fates[number] = row
        _add(journal, row)
        took = time.monotonic() - begun_one
        met = f"{len(reaching[:most])} of {len(reaching)} test files"
        print(f"{number}: {where}: {before} -> {after}: {fate}, {met} ({took:.0f} s)", flush=True)
    return [fates[number] for number in numbers if number in fates]


def reason(root: Path, row: dict[str, Any]) -> str | None:
    """Why a mutant survives, where somebody has found out."""
    file, _, number = row["where"].rpartition(":")
    line = (root / file).read_text().splitlines()[int(number) - 1].strip()
    known = {survivor[:4]: survivor.reason for survivor in SURVIVORS}
    return known.get((file, line, row["before"], row["after"]))


def main() -> int:
    """Try mutants, and print what became of each."""
    options = argparse.ArgumentParser()
    options.add_argument("--mutants", type=int, default=300)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no further mutant after these")
    options.add_argument("--within", type=float, default=float("inf"), help="seconds of tests that each mutant meets")
    options.add_argument("--journal", type=Path, help="folder to go on from")
    options.add_argument("--by-name", action="store_true", help="quick tests of files that name what was mutated")
    given = options.parse_args()
    keeping: AbstractContextManager[str | Path]
    keeping = nullcontext(given.journal) if given.journal else tempfile.TemporaryDirectory()
    with keeping as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        numbers = range(given.first, given.first + given.mutants)
        rows = run(Path(folder).resolve(), numbers, given.seconds, given.within, given.by_name)
        survivors = [(row, reason(Path(folder) / "tree", row)) for row in rows if row["fate"] != CAUGHT]
    for row, why in survivors:
        print(f"{row['fate']}: {row['where']}: {row['before']} -> {row['after']}: {why or 'nobody knows why'}")
    caught, explained = len(rows) - len(survivors), sum(why is not None for _, why in survivors)
    share = caught / max(1, len(rows))
    print(f"{len(rows)} mutants, {caught} caught ({share:.0%}), {len(survivors)} not, {explained} with a reason")
    return 0


if __name__ == "__main__":
    sys.exit(main())
