"""What processes reached is counted in all of them, and summed up as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("slipcover")

from tests.coverage.begin.sitecustomize import ROOT
from tests.coverage.report import Reached, main, missing, reached, statements, table

FORKS = """
import os
from simtune.parallel import executor, ordered_map

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
    of = found["simtune/parallel.py"]
    in_workers, in_parent, in_fork = (
        lines_of("simtune/parallel.py", words)
        for words in ("signal.signal(", "pool = ProcessPoolExecutor(", "yield from map(")
    )
    assert len(in_workers) == len(in_parent) == len(in_fork) == 1
    assert in_workers | in_parent | in_fork <= of.statements_reached < of.statements
    assert not lines_of("simtune/parallel.py", "say_alone(lost)") & of.statements_reached
    assert found["simtune/api.py"].percent == 0, "what nobody imported counts too"


def test_a_statement_counts_once_and_a_docstring_not() -> None:
    assert statements('"""Words."""\nx = (\n    1,\n)\nif x:\n    pass\n') == {2, 5, 6}


def test_the_table_adds_up_and_names_what_is_low() -> None:
    half = Reached({1, 2, 3}, {(1, 2)}, {1, 2}, set())
    full = Reached({1, 2, 3}, {(1, 2), (1, 0)}, {1, 2, 3}, {(1, 2), (1, 0)})
    said, percent = table({"a.py": half, "b.py": full}, 3)
    assert percent == pytest.approx(100 * 7 / 9)
    assert [line.split() for line in said[1:]] == [
        ["statements", "5", "of", "6", "83.3", "%"],
        ["branches", "2", "of", "3", "66.7", "%"],
        ["both", "7", "of", "9", "77.8", "%"],
        ["50.0", "%", "a.py"],
    ]
    assert missing("a.py", half) == "a.py: 3, 1->2"


def test_below_the_floor_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str((ROOT / "simtune/errors.py").resolve())
    (tmp_path / "1.json").write_text(json.dumps({name: [list(range(1, 200)), []]}))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--floor", "50"])
    assert main() == 1
    assert "below the floor of 50 %" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    assert main() == 0
