"""`simtune profile` on the command line, on a pretended device and without torch."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from simtune.cli.profile import INSTALL, _table, profile
from simtune.costs.iteration import StepModel
from simtune.errors import UsageError
from simtune.profiling.measurement_journal import FILE
from simtune.profiling.run import LiveStatus, OperatorProgress
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import Model
from simtune.specs.pool import Batching, Pool
from tests.cli.conftest import call as typed
from tests.profiling.pretended import PretendedRig, model

ROOT = Path(__file__).resolve().parents[2]


class Rig(PretendedRig):
    """As the command makes one; a run stops by itself once it has spent its pretended time."""

    def __init__(self, device: str | None, models: list[Model]) -> None:
        super().__init__()
        self.models = models

    def close(self) -> None:
        return None


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[Rig]:
    """Instead of torch: rigs whose clock is that of the run."""
    from simtune.profiling import run

    made: list[Rig] = []

    def make(device: str | None, models: list[Model]) -> Rig:
        made.append(Rig(device, models))
        return made[-1]

    module = ModuleType("simtune.profiling.rig")
    module.TorchRig = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "simtune.profiling.rig", module)
    whole = run.profile

    def on_its_clock(rig: Any, *arguments: Any, **named: Any) -> run.Profiled:
        return whole(rig, *arguments, **{**named, "clock": rig.clock, "started": 0.0})

    monkeypatch.setattr(run, "profile", on_its_clock)
    return made


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(model().to_yaml())
    return str(path)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(profile, arguments)


def test_a_run_leaves_profile_points_page_and_summary(pretended: list[Rig], tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    done = call("--model", tiny, "--budget", "30s", "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["written"] == str(out / "profile.yaml")
    assert {p.name for p in out.iterdir()} == {
        "measurements.jsonl", "facts.yaml", "profile.yaml", "arrays.npz", "profile.html", "summary.json",
    }  # fmt: skip
    hardware = load_hardware(str(out))
    assert hardware.device.name == "Pretended P1"
    assert hardware.device.price_per_hour_usd is None
    assert {o.provenance.kind for o in hardware.operators.values()} == {"measured"}
    page = (out / "profile.html").read_text()
    for words in ("Whole steps", "Points measured for checking", "Noise", "Drift", "the fits extrapolate"):
        assert words in page
    assert "<script src" not in page


def test_the_same_command_goes_on_and_says_so(pretended: list[Rig], tiny: str, tmp_path: Path) -> None:
    arguments = ("--model", tiny, "--out", str(tmp_path / "mine"), "--budget")
    call(*arguments, "25s")
    before = (tmp_path / "mine" / FILE).read_text()
    done = call(*arguments, "30s")
    assert "going on after" in done.stderr
    after = (tmp_path / "mine" / FILE).read_text()
    assert after.startswith(before)
    assert len(after) > len(before)


def test_dtypes_instead_of_the_models_own(pretended: list[Rig], tiny: str, tmp_path: Path) -> None:
    call("--model", tiny, "--budget", "25s", "--out", str(tmp_path / "a"), "--dtype", "fp32")
    call("--model", tiny, "--budget", "25s", "--out", str(tmp_path / "b"), "--dtype", "bf16", "--dtype", "fp8")
    (one,), two = (rig.models for rig in pretended)
    assert (one.dtype, one.weight_dtype) == ("fp32", "fp32")
    assert [(m.name, m.dtype, m.weight_dtype) for m in two] == [
        ("tiny-bf16", "bf16", "bf16"),
        ("tiny-fp8", "bf16", "fp8"),
    ]


def test_an_interrupted_run_says_that_the_points_are_kept(
    pretended: list[Rig], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Rig, task: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rig, "measure", interrupted)
    done = CliRunner().invoke(profile, ["--model", tiny, "--out", str(tmp_path / "mine")], standalone_mode=False)
    assert done.return_value == 130
    assert "the same command goes on from there" in done.stderr


def test_without_torch_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("rig", "kernels", "decoder", "collectives"):
        monkeypatch.delitem(sys.modules, f"simtune.profiling.{name}", raising=False)
    done = call("--model", "llama-3.2-1b", "--out", str(tmp_path / "mine"))
    assert isinstance(done.exception, UsageError)
    assert done.exception.exit_code == 2
    assert str(done.exception) == INSTALL
    assert "\n" not in INSTALL
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "soon"], "write it as 90s, 3m or 1h"),
        (["--budget", "5s"], "from 20 seconds"),
        (["--target", "500%"], "write it as 5%"),
        (["--tp", "1;2"], "write it as 1,2,4"),
        (["--dtype", "int4"], "'int4' is not one of"),
    ],
)
def test_bad_options_are_named(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = call("--model", "llama-3.2-1b", "--out", str(tmp_path / "mine"), *arguments)
    assert done.exit_code == 2
    assert words in done.stderr.replace("\n", " ")


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = call("--model", "llama-3.2-1b", "--out", str(tmp_path / "file"))
    assert "is a file; name a folder" in str(done.exception)


def test_errors_are_shown_as_a_table_and_a_target_ends_it_sooner(
    pretended: list[Rig], tiny: str, tmp_path: Path
) -> None:
    arguments = ("--model", tiny, "--budget", "30s", "--out")
    done = call(*arguments, str(tmp_path / "mine"))
    assert done.exit_code == 0, done.output
    hardware = load_hardware(str(tmp_path / "mine"))
    words = " ".join(done.stdout.split())
    assert f"{hardware.name}: errors on points measured for checking" in words
    for column in ("points", "median %", "p90 %", "in 90 % interval %"):
        assert column in words
    assert f"wrote {tmp_path / 'mine' / 'profile.yaml'}" in words
    call(*arguments, str(tmp_path / "soon"), "--target", "90%")
    points = [len((tmp_path / name / FILE).read_text().splitlines()) for name in ("mine", "soon")]
    assert points[1] < points[0]


def test_the_live_table_says_how_far_each_operator_is() -> None:
    rows = [OperatorProgress("gemm", 1200, 3400, 0.0312), OperatorProgress("embedding", 0, 12, None)]
    console = Console(file=io.StringIO(), width=100)
    console.print(_table(LiveStatus("measuring", rows, 71.6)))
    title, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert title.strip() == "measuring, 72 s left"
    (gemm,), (embedding,) = ([line for line in lines if name in line] for name in ("gemm", "embedding"))
    assert [word for word in gemm.split() if word != "│"] == ["gemm", "1,200", "3,400", "3.1"]
    assert [word for word in embedding.split() if word != "│"] == ["embedding", "0", "12"]


def test_the_line_of_the_readme_writes_a_profile_of_every_operator_of_its_model(
    pretended: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = re.findall(r"^simtune profile .*?(?= +#|$)", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = shlex.split(line)[2:]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(profile, [*words, "--quiet"])
    assert result.exit_code == 0, result.output
    assert [rig.models[0].name for rig in pretended] == [words[words.index("--model") + 1]]
    written = words[words.index("--out") + 1]
    said = typed("show", written)
    assert said.code == 0, said.err
    assert "Pretended P1" in said.out
    pool = Pool(hardware=written, instances=1, batching=Batching(max_num_seqs=8, max_num_batched_tokens=512))
    assert StepModel(load_model("llama-3.2-1b"), load_hardware(written), pool).estimated == set()
