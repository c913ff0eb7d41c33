"""The Python examples run as they stand, are as short as they are said to be, and pass the suites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.own_cost_model import H100, seconds
from examples.own_policy import LeastAttainedService
from examples.own_router import LeastSentLately
from simtune.testing import CostSuite, PolicySuite, RouterSuite

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_anywhere(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == (5 if script == "placement.py" else 2), "two are compared, or five asked"
    left = [path.name for path in tmp_path.iterdir()]
    assert left == (["sweep.html"] if script == "sweep_with_plot.py" else [])


def test_they_are_all_there_and_short() -> None:
    lines = {name: len((ROOT / "examples" / name).read_text().splitlines()) for name in SCRIPTS}
    assert lines.keys() == {"own_cost_model.py", "own_policy.py", "own_router.py", "placement.py", "sweep_with_plot.py"}
    assert lines["own_policy.py"] < 40
    assert lines["own_router.py"] < 40


class TestOwnPolicy(PolicySuite):
    policy = LeastAttainedService
    options = {"quantum": 4}  # noqa: RUF012
    conserves_work = True


class TestOwnRouter(RouterSuite):
    router = LeastSentLately


class TestOwnCosts(CostSuite):
    costs = H100


class TestOwnFunction(CostSuite):
    costs = seconds
