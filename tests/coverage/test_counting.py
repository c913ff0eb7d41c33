"""What processes reached is counted in all of them, and summed up as it is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("slipcover")

from tests.coverage.begin.sitecustomize import COUNTED, ROOT
from tests.coverage.report import (
    ALL,
    NEEDS_TORCH,
    TORCH,
    WITHOUT,
    Reached,
    Sum,
    below,
    everything,
    main,
    missing,
    reached,
    statements,
    table,
)

FORKS = """
import os
from simtune.sim.parallel import executor, ordered_map

def end(_):
    return os.getpid()

if __name__ == "__main__":
    with executor(2, 2) as pool:
        list(ordered_map(pool, end, range(2)))
    if os.fork() == 0:
        list(ordered_map(None, end, range(2)))
        os._exit(0)
    os.wait()
    os.chdir("gone")
    os.rmdir(os.getcwd())
"""


def lines_of(name: str, *words: str) -> set[int]:
    """Where these words stand in a file."""
    return {n for n, line in enumerate((ROOT / name).read_text().splitlines(), 1) if line.strip().startswith(words)}


@pytest.mark.slow
def test_workers_forks_and_their_parent_are_counted(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "gone").mkdir()
    (tmp_path / "forks.py").write_text(FORKS)
    env = {
        **os.environ,
        "COVERAGE_INTO": str(tmp_path / "into"),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "tests/coverage/begin"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
    }
    subprocess.run([sys.executable, "-W", "error", "forks.py"], cwd=tmp_path, env=env, check=True)
    assert len(list((tmp_path / "into").glob("*.json"))) == 4
    found = reached(tmp_path / "into")
    of = found["simtune/sim/parallel.py"]
    in_workers, in_parent, in_fork = (
        lines_of("simtune/sim/parallel.py", words)
        for words in ("signal.signal(", "pool = _Workers(", "yield from map(")
    )
    assert len(in_workers) == len(in_parent) == len(in_fork) == 1
    assert in_workers | in_parent | in_fork <= of.statements_reached < of.statements
    assert not lines_of("simtune/sim/parallel.py", "say_alone(lost)") & of.statements_reached
    assert found["simtune/api.py"].percent == 0, "what nobody imported counts too"


def test_a_statement_counts_once_and_a_docstring_not() -> None:
    assert statements('"""Words."""\nx = (\n    1,\n)\nif x:\n    pass\n') == {2, 5, 6}


def test_what_is_said_to_need_torch_imports_it_at_its_top_and_nothing_else_does() -> None:
    def imports(path: Path) -> set[str]:
        found = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
        return {name.partition(".")[0] for name in found}

    paths = [path for name in COUNTED for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(paths) > 300
    needing = [str(path.relative_to(ROOT)) for path in paths if "torch" in imports(path)]
    assert tuple(needing) == NEEDS_TORCH


def test_the_table_adds_up_by_package_and_names_what_is_low() -> None:
    half = Reached({1, 2, 3}, {(1, 2)}, {1, 2}, set())
    full = Reached({1, 2, 3}, {(1, 2), (1, 0)}, {1, 2, 3}, {(1, 2), (1, 0)})
    said, sums = table({"simtune/a/b/c.py": half, "simtune/a/d.py": full, NEEDS_TORCH[0]: half}, 3)
    assert sums == {WITHOUT: Sum((5, 6), (2, 3)), TORCH: Sum((2, 3), (0, 1)), ALL: Sum((7, 9), (2, 4))}
    assert sums[ALL].percent == pytest.approx(100 * 9 / 13)
    assert sums[ALL].least == 50
    assert [" ".join(line.split()) for line in said[1:]] == [
        "simtune/a 5 of 6 statements 83.3 % 2 of 3 branches 66.7 %",
        "all but what needs torch 5 of 6 statements 83.3 % 2 of 3 branches 66.7 %",
        "what needs torch 2 of 3 statements 66.7 % 0 of 1 branches 0.0 %",
        "all 7 of 9 statements 77.8 % 2 of 4 branches 50.0 %",
        "50.0 % simtune/a/b/c.py",
        f"50.0 % {NEEDS_TORCH[0]}",
    ]
    assert missing("a.py", half) == "a.py: 3, 1->2"


@pytest.mark.parametrize(
    ("without", "everything", "torch", "named"),
    [
        (((95, 100), (95, 100)), ((95, 110), (95, 110)), False, []),
        (((95, 100), (95, 100)), ((95, 110), (95, 110)), True, [ALL]),
        (((99, 100), (94, 100)), ((99, 100), (95, 100)), True, [WITHOUT]),
        (((94, 100), (99, 100)), ((99, 100), (99, 100)), False, [WITHOUT]),
    ],
)
def test_statements_and_branches_are_held_each_and_all_of_them_where_torch_is(
    without: Any, everything: Any, torch: bool, named: list[str]
) -> None:
    sums = {WITHOUT: Sum(*without), TORCH: Sum((0, 10), (0, 10)), ALL: Sum(*everything)}
    assert below(sums, 95, torch=torch) == [f"  {what}: below the floor of 95 %" for what in named]


def test_what_no_run_is_to_reach_does_not_count() -> None:
    found = everything()
    lines = lines_of("simtune/engine/settling.py", 'raise AssertionError("no request has ended")')
    assert len(lines) == 1
    assert not lines & set(found["simtune/engine/settling.py"]["missing_lines"])
    only_for_mypy = lines_of("simtune/cli/fit.py", "if TYPE_CHECKING:")
    assert not any(a in only_for_mypy for a, _ in found["simtune/cli/fit.py"]["missing_branches"])


def test_below_the_floor_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str((ROOT / "simtune/errors.py").resolve())
    (tmp_path / "1.json").write_text(json.dumps({name: [list(range(1, 200)), []]}))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--floor", "50"])
    assert main() == 1
    assert f"{WITHOUT}: below the floor of 50 %" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    assert main() == 0
