"""What of simtune and tuner the tests reached: `python -m tests.coverage.report FOLDER` sums what processes counted.

A branch is a way on from an if, a loop or a match; a statement counts once, however many lines it has. Exit code 1
where less than `--floor` percent of both together were reached.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slipcover

from tests.coverage.begin.sitecustomize import COUNTED, ROOT

Branch = tuple[int, int]
LOW = 80.0


@dataclass(frozen=True)
class Reached:
    """Of one file: its statements, by line, and its branches, and which of them were reached."""

    statements: set[int]
    branches: set[Branch]
    statements_reached: set[int]
    branches_reached: set[Branch]

    @property
    def percent(self) -> float:
        """Of both together."""
        return share(
            len(self.statements_reached) + len(self.branches_reached), len(self.statements) + len(self.branches)
        )


def share(part: int, whole: int) -> float:
    """In percent; all of nothing."""
    return 100.0 * part / whole if whole else 100.0


def statements(source: str) -> set[int]:
    """Lines where a statement begins, docstrings left out."""
    return {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }


@functools.cache
def everything() -> dict[str, Any]:
    """Lines and branches of every file, none of them reached, but for what no test is to reach."""
    counter = slipcover.Slipcover(branch=True, source=[str(ROOT / name) for name in COUNTED])
    files: dict[str, Any] = counter.get_coverage()["files"]
    return files


def reached(folder: Path) -> dict[str, Reached]:
    """Of every file of the packages, one that nothing imported too, what the processes of a folder reached."""
    lines: dict[str, set[int]] = defaultdict(set)
    branches: dict[str, set[Branch]] = defaultdict(set)
    for part in folder.glob("*.json"):
        for name, (some_lines, some_branches) in json.loads(part.read_text()).items():
            lines[name].update(some_lines)
            branches[name].update((a, b) for a, b in some_branches)
    found = {}
    for name, f in sorted(everything().items()):
        path = (ROOT / name).resolve()
        begun = statements(path.read_text()) & set(f["missing_lines"])
        ways = {(a, b) for a, b in f["missing_branches"]}
        found[str(path.relative_to(ROOT))] = Reached(begun, ways, begun & lines[str(path)], ways & branches[str(path)])
    return found


def table(files: dict[str, Reached], processes: int) -> tuple[list[str], float]:
    """Lines to print, and the percentage of statements and branches together."""
    counts = {
        "statements": (
            sum(len(f.statements_reached) for f in files.values()),
            sum(len(f.statements) for f in files.values()),
        ),
        "branches": (
            sum(len(f.branches_reached) for f in files.values()),
            sum(len(f.branches) for f in files.values()),
        ),
    }
    counts["both"] = (sum(c[0] for c in counts.values()), sum(c[1] for c in counts.values()))
    said = [f"coverage of {' and '.join(COUNTED)}, by {processes} processes"]
    said += [
        f"  {what:<11}{part:>7,} of {whole:>7,}  {share(part, whole):5.1f} %" for what, (part, whole) in counts.items()
    ]
    low = sorted((f.percent, name) for name, f in files.items() if f.percent < LOW)
    said += [f"  {percent:5.1f} %  {name}" for percent, name in low]
    return said, share(*counts["both"])


def missing(name: str, f: Reached) -> str:
    """What of a file nobody reached, in words of one line."""
    ways = [f"{a}->{b or 'exit'}" for a, b in sorted(f.branches - f.branches_reached)]
    return f"{name}: " + ", ".join([*map(str, sorted(f.statements - f.statements_reached)), *ways])


def main() -> int:
    """Print the table; with --missing, also the lines and branches of each file that were not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--missing", action="store_true")
    given = parser.parse_args()
    files = reached(given.folder)
    said, percent = table(files, len(list(given.folder.glob("*.json"))))
    if given.missing:
        said = [*(missing(name, f) for name, f in files.items() if f.percent < 100), *said]
    print("\n".join(said))
    if percent < given.floor:
        print(f"  below the floor of {given.floor:g} %")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
