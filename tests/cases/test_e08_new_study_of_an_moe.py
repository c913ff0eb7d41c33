"""A new study of a model with experts searches whole experts on ranks, and prefill and decode pools apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.specs.catalog import load_study
from simtune.specs.study import Study
from tests.cli.conftest import call

ASKED = ("--hardware", "h200-sxm", "--workload", "chat", "--ttft", 2000, "--tpot", 40)
BOTH = ("mixed", "prefill-decode")


def new(*options: object) -> Study:
    said = call("new", "s.yaml", "--force", *ASKED, *options)
    assert said.code == 0, said
    return load_study("s.yaml")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_experts_and_both_layouts_are_searched() -> None:
    study = new("--model", "minimax-m2", "--devices", 8)
    assert (study.engine, study.search.layouts, study.search.expert_parallel) == ("vllm-0.24", BOTH, (False, True))
    assert call("optimize", "s.yaml", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("model", "devices", "engine", "layouts", "experts"),
    [
        ("llama-3.1-8b", 8, "vllm-0.24", BOTH, (False,)),
        ("minimax-m2", 8, "sglang-0.5", BOTH, (False, True)),
        ("mixtral-8x7b", 1, "vllm-0.24", ("mixed",), (False,)),
        ("mixtral-8x7b", 2, "llamacpp", ("mixed",), (False,)),
        ("mixtral-8x7b", 2, "transformers", ("mixed",), (False,)),
    ],
)
def test_only_what_model_cards_and_engine_have(
    model: str, devices: int, engine: str, layouts: tuple[str, ...], experts: tuple[bool, ...]
) -> None:
    study = new("--model", model, "--devices", devices, "--engine", engine)
    assert (study.engine, study.search.layouts, study.search.expert_parallel) == (engine, layouts, experts)


def test_an_engine_that_is_not_there_is_refused() -> None:
    said = call("new", "s.yaml", *ASKED, "--engine", "vllm-0.99")
    assert said.code == 2
    assert "did you mean vllm-0." in said.err
    assert not Path("s.yaml").exists()


def test_an_engine_of_ones_own_is_found_from_the_study() -> None:
    Path("engines").mkdir()
    preset = Path(__file__).parents[2] / "simtune" / "presets" / "vllm-0.24.yaml"
    Path("engines/mine.yaml").write_text(preset.read_text())
    said = call("new", "deep/s.yaml", *ASKED, "--engine", "engines/mine.yaml")
    assert said.code == 0, said
    assert load_study("deep/s.yaml").engine == "../engines/mine.yaml"
    assert call("optimize", "deep/s.yaml", "--dry-run").code == 0
