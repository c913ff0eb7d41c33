"""Mistakes put into the engine and the simulator, one at a time: how many do the tests catch?

    python -m tests.mutants.campaign --mutants 300 --first 0

Mutant n is the same on every machine: a file of simtune/engine or simtune/sim, chosen by how many lines it has, and a
mistake in it. It is made in a copy of the tree, and tests run until the first failure, those first that name most of
what its file defines; a mutant that they all pass has survived. A run of no end counts as caught.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.mutants.mutations import mutant

ROOT = Path(__file__).resolve().parents[2]
MUTATED = ("simtune/engine", "simtune/sim")
TESTS = ("tests/engine", "tests/sim", "tests/worlds", "tests/speculation")
COPIED = ("simtune", "tuner", "hwprofiles", "models", "workloads", "examples", "benchmarks", "tests", "pyproject.toml")
CPU_S = 1200
"""Of the processor, for all tests: on a busy machine they take longer and are not caught by that."""
WALL_S = 6 * CPU_S


def files(root: Path) -> list[Path]:
    """Files that are mutated, those with many lines more often."""
    found = sorted(path for folder in MUTATED for path in (root / folder).rglob("*.py"))
    return [path for path in found for _ in range(len(path.read_text().splitlines()) // 20)]


def ordered_for(root: Path, path: Path) -> list[str]:
    """All test files, those first that name most of what a module defines; of equals the smallest."""
    nodes = ast.parse(path.read_text()).body
    names = [path.stem, *(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))]
    found = [file for folder in TESTS for file in (root / folder).rglob("test_*.py")]
    words = {file: set(re.findall(r"\w+", file.read_text())) for file in found}
    found.sort(key=lambda file: (-len(words[file].intersection(names)), file.stat().st_size, file))
    return [str(file.relative_to(root)) for file in found]


def caught(root: Path, tests: Sequence[str] = TESTS) -> bool:
    """Whether tests fail in a tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S)),
    )  # fmt: skip
    try:
        return process.wait(WALL_S) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def main() -> int:
    """Try mutants, and print what became of each."""
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
            text, tests = path.read_text(), ordered_for(root, path)
            made = mutant(text, random)
            if made is None:
                continue
            source_, line, before, after = made
            path.write_text(source_)
            tried += 1
            begun_one, is_caught = time.monotonic(), caught(root, tests)
            survived += not is_caught
            fate = "caught" if is_caught else "SURVIVES"
            took = f"{fate} ({time.monotonic() - begun_one:.0f} s)"
            print(f"{number}: {path.relative_to(root)}:{line}: {before} -> {after}: {took}", flush=True)
            path.write_text(text)
    print(f"{tried} mutants, {tried - survived} caught ({(tried - survived) / max(1, tried):.0%}), {survived} survive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
