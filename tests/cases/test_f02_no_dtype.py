"""A config.json without a dtype is taken as engines take it; `show` and `check` take --set."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.specs.catalog import load_model
from tests.cli.conftest import call

CONFIG = Path(__file__).parent / "data" / "f02-no-dtype" / "config.json"


def test_activations_are_bf16_and_a_note_says_so() -> None:
    model = load_model(str(CONFIG))
    assert (model.dtype, model.weight_dtype) == ("bf16", "fp8_block")
    assert model.parameters / 1e9 == pytest.approx(228.69, abs=0.005)
    assert model.active_parameters / 1e9 == pytest.approx(10.42, abs=0.005)
    assert [note for note in model.notes if "config.json has no dtype" in note] == list(model.notes)
    assert "note: config.json has no dtype" in call("check", CONFIG).out


@pytest.mark.parametrize("verb", ["show", "check"])
def test_settings_are_taken(verb: str) -> None:
    said = call(verb, CONFIG, "--set", "model.dtype=float16")
    assert said.code == 0
    assert "activations fp16" in said.out
    assert "no dtype" not in said.out


@pytest.mark.parametrize("verb", ["show", "check"])
def test_settings_of_another_kind_are_refused(verb: str) -> None:
    said = call(verb, CONFIG, "--set", "workload.requests=3")
    assert said.code == 2
    assert "begin with one of model." in said.err


def test_each_file_has_the_settings_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text(call("show", "chat").out)
    settings = ("--set", "model.dtype=float16", "--set", "workload.requests=77")
    said = call("check", CONFIG, tmp_path / "load.yaml", *settings)
    assert said.code == 0
    assert "activations fp16" in said.out
    assert "77 requests" in said.out
    wrong = call("check", tmp_path / "load.yaml", "--set", "workload.requests=-1")
    assert wrong.code == 2
    assert "--set: requests: " in wrong.err
