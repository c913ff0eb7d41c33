"""Mistakes put into the engine and the simulator, one at a time: how many do the tests catch?

    python -m tests.mutants.campaign --mutants 300 --first 0

Mutant n is the same on every machine: a file of simtune/engine or simtune/sim, chosen by how many lines it has, and a
mistake in it. It is made in a copy of the tree, and its tests run until the first failure; a mutant that they all pass
has survived. A run of no end counts as caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.mutants.mutations import mutant

ROOT = Path(__file__).resolve().parents[2]
MUTATED = ("simtune/engine", "simtune/sim")
TESTS = ("tests/engine", "tests/sim", "tests/worlds", "tests/speculation")
COPIED = ("simtune", "tuner", "hwprofiles", "models", "workloads", "examples", "benchmarks", "tests", "pyproject.toml")
LIMIT_S = 1200


def files(root: Path) -> list[Path]:
    """Files that are mutated, those with many lines more often."""
    found = sorted(path for folder in MUTATED for path in (root / folder).rglob("*.py"))
    return [path for path in found for _ in range(len(path.read_text().splitlines()) // 20)]


def caught(root: Path) -> bool:
    """Whether the tests fail in a tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
    environment = os.environ | {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=LIMIT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def main() -> int:
    """Try mutants, and print those that survive."""
    options = argparse.ArgumentParser()
    options.add_argument("--mutants", type=int, default=300)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no further mutant after these")
    given = options.parse_args()
    begun, tried, survived = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, root / name, **({"symlinks": True} if source.is_dir() else {}))  # type: ignore[operator]
        if caught(root):
            sys.exit("the tests fail before anything is mutated")
        for number in range(given.first, given.first + given.mutants):
            if time.monotonic() - begun > given.seconds:
                break
            random = Random(number)
            path = random.choice(files(root))
            text = path.read_text()
            made = mutant(text, random)
            if made is None:
                continue
            source_, line, before, after = made
            path.write_text(source_)
            tried += 1
            if not caught(root):
                survived += 1
                print(f"{number}: {path.relative_to(root)}:{line}: {before} -> {after}", flush=True)
            path.write_text(text)
    print(f"{tried} mutants, {tried - survived} caught ({(tried - survived) / max(1, tried):.0%}), {survived} survive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
