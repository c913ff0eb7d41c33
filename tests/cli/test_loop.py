"""`simtune loop` on the command line, with an engine that only pretends: what is printed, kept and gone on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from simtune.errors import UsageError
from simtune.validation.servers import driven_engines
from tests.cli.conftest import ROOT, Desk, Said, call
from tests.validation.driven_engine import PretendedDriver

EXAMPLE = ROOT / "examples" / "closed-loop"
QUICK = ("--budget", 1, "--requests", 12, "--rounds", 1)


class Engines(list[PretendedDriver]):
    """What the command starts instead of an engine: the first for the profile, later ones for replays."""

    def __init__(self, profiled: float = 1.0) -> None:
        super().__init__()
        self.profiled = profiled
        """What the first one says that its steps take, over what they take."""
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, engine: str, model: Any, size: driven_engines.EngineSize, **options: Any) -> PretendedDriver:
        self.asked.append((engine, options))
        self.append(PretendedDriver(size, slower=1.0 if self else self.profiled))
        return self[-1]


@pytest.fixture
def looped(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """The command on the example's study, with a search of one plan."""
    for name in ("model.yaml", "workload.yaml"):
        shutil.copy(EXAMPLE / name, desk.folder)
    text = (EXAMPLE / "study.yaml").read_text()
    text = text.replace("[4, 8, 16]", "[4]").replace("[64, 256]", "[64]")
    desk.write("study.yaml", text + "  requests: 60\n  confirm: {draws: 0}\n")

    def run(engines: Engines, *more: object) -> Said:
        monkeypatch.setattr(driven_engines, "driver", engines)
        return call("loop", "study.yaml", "--out", "out", *QUICK, *more)

    return run


def test_each_round_is_a_table_and_the_run_directory_is_whole(looped: Callable[..., Said], desk: Desk) -> None:
    engines = Engines()
    said = looped(engines, "--clock", "wall")
    assert said.code == 0, said
    assert said.err.split("\n")[:-1] == ["profile", "optimize 1", "replay 1", "compare 1"]
    (done,) = json.loads((desk.folder / "out" / "report.json").read_text())["rounds"]
    assert f"round 1: {done['plan']} at {done['rate_rps']:.3g} requests/s, means" in " ".join(said.out.split())
    for verdict in done["verdicts"]:
        (line,) = [line for line in said.out.splitlines() if verdict["metric"].upper() in line]
        assert "within" in line
        assert f"{100 * verdict['error']:+.1f}" in line
    assert {"manifest.json", "plan.yaml", "report.html"} <= {
        p.name for p in (desk.folder / "out/round-1/run").iterdir()
    }
    assert [engine for engine, _ in engines.asked] == ["torch", "torch"]
    assert engines.asked[1][1] == {"reference_s": 0.5}, "the replay goes by the gauge of the profile"


def test_an_engine_that_is_slower_than_its_profile_ends_with_4(looped: Callable[..., Said], desk: Desk) -> None:
    said = looped(Engines(profiled=0.5), "--json")
    assert said.code == 4
    assert said.json["within"] is False
    assert said.json["rounds"] == json.loads((desk.folder / "out" / "report.json").read_text())["rounds"]
    (tpot,) = [v for v in said.json["rounds"][0]["verdicts"] if v["metric"] == "tpot"]
    assert tpot["error"] == pytest.approx(1 / 2 - 1, abs=0.05), "steps take twice as long as predicted"
    again = Engines()
    table = looped(again)
    assert (table.code, again.asked, table.err) == (4, [], ""), "what is done is not done again"
    assert "OUTSIDE" in table.out


@pytest.mark.parametrize(
    ("text", "said"), [("[]", "is of another study"), ('{"inputs": NaN}', "not valid JSON"), ("{", "not valid JSON")]
)
def test_a_state_that_is_damaged_is_named(looped: Callable[..., Said], desk: Desk, text: str, said: str) -> None:
    (desk.folder / "out").mkdir()
    desk.write("out/state.json", text)
    found = looped(Engines())
    assert found.code == 2
    assert "out/state.json:" in found.err
    assert said in found.err


def test_an_interrupted_loop_says_how_it_goes_on(looped: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: PretendedDriver, *arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    engines = Engines()
    monkeypatch.setattr(PretendedDriver, "run", interrupted)
    said = looped(engines)
    assert (said.code, said.out) == (130, "")
    assert "the same command goes on from where it was, in out" in said.err
    assert all(engine.closed for engine in engines)


def test_the_interpreter_of_vllm_is_handed_on(looped: Callable[..., Said]) -> None:
    class Absent(Engines):
        def __call__(self, engine: str, model: Any, size: Any, **options: Any) -> PretendedDriver:
            self.asked.append((engine, options))
            raise UsageError("no vLLM there")

    engines = Absent()
    said = looped(engines, "--engine", "vllm", "--vllm-python", "some/python")
    assert said.code == 2
    assert "no vLLM there" in said.err
    assert engines.asked == [("vllm", {"reference_s": None, "python": "some/python"})]


@pytest.mark.parametrize("options", [("--engine", "vllm"), ("--vllm-python", "some/python")])
def test_an_interpreter_is_of_vllm_alone(looped: Callable[..., Said], desk: Desk, options: tuple[str, ...]) -> None:
    said = looped(Engines(), *options)
    assert said.code == 2
    assert "--engine vllm needs --vllm-python" in said.err
    assert not (desk.folder / "out").exists()
