"""Mistakes put into the engine and the simulator, one at a time: how many do the tests catch?

    python -m tests.mutants.campaign --mutants 300 --first 0 --journal runs/mutants

Mutant n is the same on every machine: a file of `MUTATED`, chosen by its number of lines, and a mistake in it. The
mistake is made in a copy of the tree. Each test is run once before, to measure its duration and the lines that it
reaches (tests/mutants/reach.py); a mutant meets the tests that reach its line, in forks (tests/mutants/forked.py),
until one fails. Short tests come first, those that reach little else, and those whose file names what the mutated
module defines. A mutant that passes them all has survived. A run without an end counts as caught. A campaign with a
journal continues; the copy and the counted lines are in its folder, so that it continues with the same code.

With --quick, tests of the quick tier (tests/tiers) alone are counted and met.

Most of the time goes into mutants that no test catches. With --within S, a mutant meets tests that take S seconds
together and is open if they do not catch it, which counts as not caught; a campaign with more seconds continues there.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from tests.mutants.forked import Selection, as_in, import_others, in_fork, run_pytest
from tests.mutants.mutations import mutant
from tests.mutants.reach import ReachingTest, count, counted
from tests.mutants.survivors import SURVIVORS

ROOT = Path(__file__).resolve().parents[2]
UNMUTATED = ("simtune/sim/parallel.py",)
"""Worker processes: a mistake there may hang, and its tests are in tests/package."""
MUTATED = (
    "simtune/engine", "simtune/sim", "simtune/workload", "simtune/results", "simtune/tuner", "simtune/costs",
)  # fmt: skip
TESTS = (
    "tests/engine", "tests/sim", "tests/worlds", "tests/speculation", "tests/golden", "tests/workloads", "tests/api",
    "tests/testing", "tests/costs", "tests/specs", "tests/tuner", "tests/cases",
)  # fmt: skip
COPIED = ("simtune", "examples", "benchmarks", "tests", "pyproject.toml")
BATCHES_S = (1.0, 5.0, 30.0)
"""Seconds of the first batches of tests that a mutant meets; a last one has all others."""
FILE_S = 0.1
"""Rough time of importing a test file."""
LONGER, LONGER_S = 5.0, 15.0
"""A batch whose CPU time is beyond LONGER times its seconds, and LONGER_S more, does not end."""
PASS = (0, 5)
"""Exit statuses of pytest: all tests pass; there are none."""
QUICK = ("-m", "not full and not slow and not nightly and not benchmark_only")
CAUGHT, SURVIVES, OPEN = "caught", "survives", "open"
"""Fates of a mutant: a test fails; all pass; those pass that it met until now."""


def files(root: Path) -> list[Path]:
    """Return the files that are mutated, those with many lines more often."""
    found = sorted(path for folder in MUTATED for path in (root / folder).rglob("*.py"))
    found = [path for path in found if path.relative_to(root).as_posix() not in UNMUTATED]
    return [path for path in found for _ in range(len(path.read_text().splitlines()) // 20)]


def test_files(root: Path) -> list[str]:
    """Return the files whose tests are to catch mutants."""
    return sorted(str(file.relative_to(root)) for folder in TESTS for file in (root / folder).rglob("test_*.py"))


def statement(source: str, line: int) -> tuple[int, int]:
    """Return the first and last line of the smallest statement that a line belongs to."""
    found = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return min(found, key=lambda lines: lines[1] - lines[0])


def ordered_for(
    root: Path, imported: ReachingTest, tests: Sequence[ReachingTest], path: Path, line: int
) -> list[ReachingTest]:
    """Return the tests that reach the statement of a line, in the order in which a mutant meets them.

    If importing reaches it, these are the tests that reach anything of the file. First come tests that are short, reach
    few lines and whose file names what the module defines; of a test with parameters, each case comes later than the
    one before.
    """
    source, name = path.read_text(), str(path.relative_to(root))
    begin, end = statement(source, line)
    if imported.reaches(name, begin, end):
        reaching = [test for test in tests if name in test.lines]
    else:
        reaching = [test for test in tests if test.reaches(name, begin, end)]
    nodes = ast.parse(source).body
    names = {path.stem, *(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))}
    naming = {
        file: len(names.intersection(re.findall(r"\w+", (root / file).read_text())))
        for file in {test.file for test in reaching}
    }
    ranked = sorted((test.seconds * test.num_lines / (1 + naming[test.file]), test.name, test) for test in reaching)
    cases: Counter[str] = Counter()
    again = []
    for rank, test_name, test in ranked:
        cases[test.function] += 1
        again.append((rank * cases[test.function], test_name, test))
    return [test for _, _, test in sorted(again)]


def costs(tests: Sequence[ReachingTest]) -> list[float]:
    """Return the seconds of tests that are run in this order, with the import of their files."""
    imported: set[str] = set()
    seconds = []
    for test in tests:
        seconds.append(test.seconds + FILE_S * (test.file not in imported))
        imported.add(test.file)
    return seconds


def first_of(tests: Sequence[ReachingTest], within: float) -> int:
    """Return the number of first tests that take at most some seconds together; at least one."""
    return max(1, sum(1 for seconds in accumulate(costs(tests)) if seconds <= within))


def batches(tests: Sequence[ReachingTest]) -> Iterator[list[ReachingTest]]:
    """Yield tests in batches: first those that take few seconds together, then more, then all others."""
    begin, remaining = 0, list(tests)
    for most in BATCHES_S:
        if remaining:
            begin = first_of(remaining, most)
            yield remaining[:begin]
            remaining = remaining[begin:]
    if remaining:
        yield remaining


def passes(root: Path, tests: Sequence[ReachingTest]) -> bool:
    """Return True if no test fails in a tree."""

    def work() -> int:
        as_in(root)
        return run_pytest([*dict.fromkeys(test.file for test in tests)], [Selection([test.name for test in tests])])

    return in_fork(work, LONGER_S + LONGER * sum(costs(tests))) in PASS


def caught(root: Path, tests: Sequence[ReachingTest]) -> bool:
    """Return True if one of the tests fails in a tree."""
    return any(not passes(root, batch) for batch in batches(tests))


def copied(root: Path) -> None:
    """Make a copy of the tree."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, root / name)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _add(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _mutate(undo: Path, path: Path, source: str) -> None:
    """Write a mistake, with another time of change than bytecode of the file has."""
    changed = path.stat().st_mtime_ns
    _add(undo, {"path": str(path), "text": path.read_text(), "changed": changed})
    path.write_text(source)
    os.utime(path, ns=(changed + 10**10, changed + 10**10))


def _undo(undo: Path) -> None:
    """Restore the file that holds a mistake."""
    for line in _lines(undo):
        before = json.loads(line)
        Path(before["path"]).write_text(before["text"])
        os.utime(before["path"], ns=(before["changed"], before["changed"]))
    undo.unlink(missing_ok=True)


def prepared(folder: Path, quick: bool) -> tuple[ReachingTest, list[ReachingTest]]:
    """Copy the tree and count lines, unless that is done; return the lines that importing reaches, and the tests."""
    root = folder / "tree"
    if not root.exists():
        copied(folder / "half")
        (folder / "half").rename(root)
    _undo(folder / "undo.jsonl")  # of a campaign that was killed
    count(root, test_files(root), QUICK if quick else (), MUTATED, folder / "counted")
    compileall.compile_dir(root / "simtune", quiet=2)
    imported, tests = counted(folder / "counted")
    if not tests or not passes(root, tests[:1]):
        sys.exit("no test passes before anything is mutated")
    return imported, tests


def run(folder: Path, numbers: range, seconds: float, within: float, quick: bool = False) -> list[dict[str, Any]]:
    """Try mutants whose fate is not in the journal; return all of these numbers that are in it then."""
    begun, root, journal = time.monotonic(), folder / "tree", folder / "mutants.jsonl"
    imported, tests = prepared(folder, quick)
    fates = {row["number"]: row for row in map(json.loads, _lines(journal))}
    for number in numbers:
        if time.monotonic() - begun > seconds:
            break
        before = fates.get(number, {"fate": OPEN, "within": 0.0})
        if before["fate"] != OPEN or before["within"] >= within:
            continue
        random = Random(number)
        path = random.choice(files(root))
        mistake = mutant(path.read_text(), random)
        if mistake is None:
            continue
        source, line, old, new = mistake
        begun_mutant = time.monotonic()
        reaching = ordered_for(root, imported, tests, path, line)
        passed, most = first_of(reaching, before["within"]) if before["within"] else 0, first_of(reaching, within)
        _mutate(folder / "undo.jsonl", path, source)
        fate = CAUGHT if caught(root, reaching[passed:most]) else OPEN if most < len(reaching) else SURVIVES
        _undo(folder / "undo.jsonl")
        where = f"{path.relative_to(root)}:{line}"
        row = {"number": number, "where": where, "before": old, "after": new, "fate": fate, "within": within}
        fates[number] = row
        _add(journal, row)
        took = time.monotonic() - begun_mutant
        met = f"{len(reaching[:most])} of {len(reaching)} tests"
        print(f"{number}: {where}: {old} -> {new}: {fate}, {met} ({took:.0f} s)", flush=True)
    return [fates[number] for number in numbers if number in fates]


def reason(root: Path, row: dict[str, Any]) -> str | None:
    """Return why a mutant survives, if that is explained."""
    file, _, number = row["where"].rpartition(":")
    line = (root / file).read_text().splitlines()[int(number) - 1].strip()
    reasons = {survivor[:4]: survivor.reason for survivor in SURVIVORS}
    return reasons.get((file, line, row["before"], row["after"]))


def main() -> int:
    """Try mutants, and print what became of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further mutant after these")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds of tests that each mutant meets")
    parser.add_argument("--journal", type=Path, help="folder to go on from")
    parser.add_argument("--quick", action="store_true", help="tests of the quick tier alone")
    options = parser.parse_args()
    import_others()
    holding: AbstractContextManager[str | Path]
    holding = nullcontext(options.journal) if options.journal else tempfile.TemporaryDirectory()
    with holding as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        numbers = range(options.first, options.first + options.mutants)
        rows = run(Path(folder).resolve(), numbers, options.seconds, options.within, options.quick)
        survivors = [(row, reason(Path(folder) / "tree", row)) for row in rows if row["fate"] != CAUGHT]
    for row, why in survivors:
        print(f"{row['fate']}: {row['where']}: {row['before']} -> {row['after']}: {why or 'not explained'}")
    caught, explained = len(rows) - len(survivors), sum(why is not None for _, why in survivors)
    share = caught / max(1, len(rows))
    print(f"{len(rows)} mutants, {caught} caught ({share:.0%}), {len(survivors)} not, {explained} with a reason")
    return 0


if __name__ == "__main__":
    sys.exit(main())
