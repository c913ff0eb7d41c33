"""What of simtune the tests reached: `python -m tests.coverage.report FOLDER` sums what processes counted.

A branch is a way on from an if, a loop or a match; a statement counts once, however many lines it has. What cannot be
imported without torch counts apart, since tests skip it where torch is not installed. Exit code 1 where less than
`--floor` percent of the statements, or of the branches, were reached: of everything else, and, where torch is
installed, of everything.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import slipcover

from tests.coverage.begin.sitecustomize import COUNTED, ROOT

Branch = tuple[int, int]
LOW = 80.0
WITHOUT, TORCH, ALL = "all but what needs torch", "what needs torch", "all"
NEEDS_TORCH = (
    "simtune/profiling/collectives.py",
    "simtune/profiling/decoder.py",
    "simtune/profiling/kernels.py",
    "simtune/profiling/operands.py",
    "simtune/profiling/rig.py",
    "simtune/profiling/torch_device.py",
    "simtune/validation/servers/cached_decoder.py",
    "simtune/validation/servers/decode_graphs.py",
)
"""Files that import torch at their top, all of them."""
NEVER = [r"^if TYPE_CHECKING:", r"^\s*raise (AssertionError|NotImplementedError)\b"]
"""Lines that no run is to reach, with what is below them: for mypy alone, and after a case that cannot be."""


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
        return Sum.of([self]).percent


@dataclass(frozen=True)
class Sum:
    """Over files: how many were reached, and how many there are."""

    statements: tuple[int, int]
    branches: tuple[int, int]

    @classmethod
    def of(cls, files: Iterable[Reached]) -> Sum:
        """Of these files."""
        files = list(files)
        return cls(
            (sum(len(f.statements_reached) for f in files), sum(len(f.statements) for f in files)),
            (sum(len(f.branches_reached) for f in files), sum(len(f.branches) for f in files)),
        )

    @property
    def percent(self) -> float:
        """Of both together."""
        return share(self.statements[0] + self.branches[0], self.statements[1] + self.branches[1])

    @property
    def least(self) -> float:
        """The smaller percentage of the two."""
        return min(share(*self.statements), share(*self.branches))

    def __str__(self) -> str:
        (s, of_s), (b, of_b) = self.statements, self.branches
        return (
            f"{s:>7,} of {of_s:>6,} statements {share(s, of_s):5.1f} %"
            f"  {b:>6,} of {of_b:>6,} branches {share(b, of_b):5.1f} %"
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
    counter = slipcover.Slipcover(branch=True, source=[str(ROOT / name) for name in COUNTED], exclude_lines=NEVER)
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


def table(files: dict[str, Reached], processes: int) -> tuple[list[str], dict[str, Sum]]:
    """Lines to print, and what the floors are for, by what it is of."""
    packages: dict[str, list[Reached]] = defaultdict(list)
    for name, f in files.items():
        if name not in NEEDS_TORCH:
            packages["/".join(name.split("/")[:-1][:2])].append(f)
    sums = {
        WITHOUT: Sum.of(f for name, f in files.items() if name not in NEEDS_TORCH),
        TORCH: Sum.of(f for name, f in files.items() if name in NEEDS_TORCH),
        ALL: Sum.of(files.values()),
    }
    said = [f"coverage of {' and '.join(COUNTED)}, by {processes} processes"]
    said += [f"  {name:<28}{Sum.of(inside)}" for name, inside in sorted(packages.items())]
    said += [f"  {what:<28}{reached}" for what, reached in sums.items()]
    low = sorted((f.percent, name) for name, f in files.items() if f.percent < LOW)
    said += [f"  {percent:5.1f} %  {name}" for percent, name in low]
    return said, sums


def below(sums: dict[str, Sum], floor: float, *, torch: bool) -> list[str]:
    """What to print where less than `floor` percent were reached; `torch` says whether it is installed."""
    held = (WITHOUT, ALL) if torch else (WITHOUT,)
    return [f"  {what}: below the floor of {floor:g} %" for what in held if sums[what].least < floor]


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
    said, sums = table(files, len(list(given.folder.glob("*.json"))))
    if given.missing:
        said = [*(missing(name, f) for name, f in files.items() if f.percent < 100), *said]
    failed = below(sums, given.floor, torch=find_spec("torch") is not None)
    print("\n".join([*said, *failed]))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
