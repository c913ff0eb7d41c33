"""From an engine's profile to a plan that was run and compared; killed anywhere, it goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from simtune.cli.loop import loop as command
from simtune.errors import UsageError
from simtune.validation import closed_loop
from simtune.validation.closed_loop import REPORT, STATE, LoopRound, MetricVerdict, TuningLoop
from simtune.validation.servers.driven_engines import EngineSize
from tests.validation.driven_engine import PretendedDriver
from tests.validation.pretended_loop import SETTINGS, STUDY, loop

ROOT = Path(__file__).parents[2]


class Made:
    """Makes engines and remembers them."""

    def __init__(self) -> None:
        self.engines: list[PretendedDriver] = []

    def __call__(self, size: EngineSize, reference_s: float | None) -> PretendedDriver:
        self.engines.append(PretendedDriver(size))
        return self.engines[-1]


def stages(out: Path) -> list[str]:
    return list(json.loads((out / STATE).read_text())["done"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoopRound], list[PretendedDriver]]:
    """A loop that nobody disturbed: its folder, its rounds and its engines."""
    out, made = tmp_path_factory.mktemp("whole"), Made()
    return out, loop(out, made), made.engines


def test_one_round_suffices_where_the_engine_is_as_profiled(
    whole: tuple[Path, list[LoopRound], list[PretendedDriver]],
) -> None:
    out, (found,), engines = whole
    assert stages(out) == ["profile", "optimize 1", "replay 1", "compare 1"]
    assert [v.metric for v in found.verdicts] == ["ttft", "tpot", "e2el"]
    assert all(abs(v.error) < 0.03 for v in found.verdicts)
    assert all(engine.closed for engine in engines)
    report = json.loads((out / REPORT).read_text())
    assert report["rounds"][0]["plan"] == found.plan
    assert report["rounds"][0]["verdicts"][0]["measured_s"] == found.verdicts[0].measured_s


def test_it_fits_again_where_it_was_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    compare = TuningLoop._compare

    def counting(self: TuningLoop, number: int, found: dict[str, object]) -> dict[str, object]:
        seen.append(len(self._log(number)))
        return compare(self, number, found)

    monkeypatch.setattr(TuningLoop, "_compare", counting)
    found = loop(tmp_path, Made(), replace(SETTINGS, tolerance=-1.0))
    assert len(found) == 2 == SETTINGS.rounds
    assert seen[1] > seen[0], "the second round knows the steps of the first replay"
    assert all(abs(v.error) < 0.03 for v in found[1].verdicts)


@pytest.mark.parametrize("stage", ["profile", "optimize 1", "replay 1", "compare 1"])
def test_a_stage_that_is_cut_off_is_done_again_and_no_other(
    tmp_path: Path,
    stage: str,
    whole: tuple[Path, list[LoopRound], list[PretendedDriver]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish = closed_loop._LoopState.finish

    class CutOffError(BaseException):
        pass

    def cut(self: closed_loop._LoopState, name: str, result: dict[str, object]) -> None:
        if name == stage:
            raise CutOffError  # its output is there, its name is not
        finish(self, name, result)

    monkeypatch.setattr(closed_loop._LoopState, "finish", cut)
    with pytest.raises(CutOffError):
        loop(tmp_path / "cut", Made())
    monkeypatch.setattr(closed_loop._LoopState, "finish", finish)
    before = stages(tmp_path / "cut") if (tmp_path / "cut" / STATE).exists() else []
    assert stage not in before
    made = Made()
    again = loop(tmp_path / "cut", made)
    assert [r.plan for r in again] == [r.plan for r in whole[1]]
    assert stages(tmp_path / "cut") == stages(whole[0])
    if stage == "compare 1":
        assert not made.engines, "nothing is measured again"


@pytest.mark.parametrize("stage", ["profile", "replay"])
def test_a_loop_that_is_killed_goes_on(tmp_path: Path, stage: str) -> None:
    script = ROOT / "tests" / "validation" / "pretended_loop.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script), str(tmp_path), stage], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    begun = (tmp_path / "profile" / "sessions.jsonl").read_text().splitlines()
    assert len(begun) > 5
    made = Made()
    (found,) = loop(tmp_path, made)
    assert (tmp_path / "profile" / "sessions.jsonl").read_text().splitlines()[: len(begun)] == begun
    assert all(abs(v.error) < 0.03 for v in found.verdicts)
    assert len(made.engines) == (2 if stage == "profile" else 1)


def test_a_folder_is_one_studys(whole: tuple[Path, list[LoopRound], list[PretendedDriver]]) -> None:
    with pytest.raises(UsageError, match="name another folder"):
        loop(whole[0], Made(), replace(SETTINGS, requests=13))


def test_twice_the_noise_is_within() -> None:
    assert MetricVerdict("ttft", 1.2, 1.0, 0.11).within(0.1)
    assert not MetricVerdict("ttft", 1.2, 1.0, 0.05).within(0.1)
    assert MetricVerdict("ttft", 1.05, 1.0, 0.0).within(0.1)


def test_vllm_needs_an_interpreter(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(STUDY), "--out", str(tmp_path), "--engine", "vllm"])
    assert "needs --vllm-python" in str(done.exception)


@pytest.mark.slow
def test_the_example_closes_its_loop_with_the_torch_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = CliRunner().invoke(command, [str(STUDY), "--out", str(tmp_path / "loop"), "--budget", "30", "--json"])
    assert done.exit_code in (0, 4), done.output
    assert (tmp_path / "loop" / "round-1" / "run" / "report.html").exists()
