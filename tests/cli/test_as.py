"""An architecture that nobody described may be read as another one, on the user's word, which every output states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import SpecError, UsageError
from simtune.specs.catalog import kind_of, load_model, load_plan
from simtune.specs.references import beside
from tests.cli.conftest import call
from tests.specs.test_hf_config import TINY

WORD = "read as LlamaForCausalLM on the user's word (--as): config.json states NewForCausalLM"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {**TINY, "architectures": ["NewForCausalLM"], "model_type": "new", "of_its_own": 7})
    return tmp_path


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


LOAD = """\
schema: simtune/workload@1
name: short
requests: 4
arrivals: {kind: poisson, rate_rps: 4}
prompt: {kind: fixed, tokens: 30}
output: {kind: fixed, tokens: 4}
"""


def test_a_refusal_names_both_remedies(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"NewForCausalLM is not modelled; write a model spec.*--as LlamaForCausalLM"):
        load_model(str(folder / "config.json"))


def test_a_model_read_on_word_is_that_architecture_and_says_so(folder: Path) -> None:
    model = load_model(f"{folder / 'config.json'} as LlamaForCausalLM")
    assert model.notes[0].startswith(WORD)
    write(folder, TINY)
    stated = load_model(str(folder / "config.json"))
    assert model.model_copy(update={"notes": stated.notes}) == stated


def test_a_language_part_is_read_on_word_too(folder: Path) -> None:
    inner = {**TINY, "architectures": ["InnerForCausalLM"]}
    write(folder, {"architectures": ["OuterForConditionalGeneration"], "text_config": inner})
    model = load_model(f"{folder} as LlamaForCausalLM")
    assert model.num_layers == TINY["num_hidden_layers"]


def test_layers_that_nothing_describes_stay_refused(folder: Path) -> None:
    write(folder, {**TINY, "architectures": ["NewForCausalLM"], "kv_lora_rank": 16})
    with pytest.raises(SpecError, match=r"kv_lora_rank: latent attention \(MLA\): not modelled"):
        load_model(f"{folder} as LlamaForCausalLM")


def test_a_word_that_means_nothing_is_an_error(folder: Path) -> None:
    with pytest.raises(SpecError, match="--as: architectures: Lama is not modelled; modelled: LlamaForCausalLM"):
        load_model(f"{folder} as Lama")
    with pytest.raises(UsageError, match=r"of a Hugging Face config\.json only, not of a spec"):
        load_model("llama-3.1-8b as LlamaForCausalLM")


def test_a_plan_may_carry_the_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = {"name": "all", "engine": "vllm-0.24", "hardware": "h100-sxm", "instances": 1}
    plan = {"schema": "simtune/plan@1", "name": "p", "model": "./config.json as LlamaForCausalLM", "pools": [pool]}
    (folder / "plan.json").write_text(json.dumps(plan))
    assert kind_of(f"{folder / 'config.json'} as LlamaForCausalLM") == "model"
    assert beside(folder, "./config.json as LlamaForCausalLM") == f"{folder / 'config.json'} as LlamaForCausalLM"
    monkeypatch.chdir(folder)
    assert load_plan("plan.json").model == "config.json as LlamaForCausalLM"


def test_show_states_it(folder: Path) -> None:
    answer = call("show", str(folder / "config.json"), "--as", "LlamaForCausalLM")
    assert answer.code == 0
    assert f"# note: {WORD}" in answer.out


def test_notes_summary_and_report_state_it(folder: Path) -> None:
    (folder / "load.yaml").write_text(LOAD)
    given = ["--model", str(folder / "config.json"), "--as", "LlamaForCausalLM", "--hardware", "h100-sxm", "--quiet"]
    answer = call("simulate", *given, "--workload", str(folder / "load.yaml"), "--out", str(folder / "run"))
    assert answer.code == 0, answer.err
    assert f"note: {WORD}" in answer.err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["model_notes"][0].startswith(WORD)
    assert "config.json states NewForCausalLM" in (folder / "run" / "report.html").read_text()


def test_a_word_without_a_model_is_an_error() -> None:
    answer = call("simulate", "--as", "LlamaForCausalLM", "--hardware", "h100-sxm", "--workload", "chat")
    assert answer.code == 2
    assert "give the model whose config.json it is: --model" in answer.err


def test_a_release_that_was_chosen_is_stated(folder: Path) -> None:
    (folder / "load.yaml").write_text(LOAD)
    given = ["--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--engine", "vllm@0.31", "--quiet"]
    answer = call("simulate", *given, "--workload", str(folder / "load.yaml"), "--out", str(folder / "run"))
    assert answer.code == 0, answer.err
    stated = "engine vllm@0.31: preset vllm-0.28 is used"
    assert f"note: {stated}" in answer.err
    (pool,) = json.loads((folder / "run" / "summary.json").read_text())["plan"]["pools"]
    assert (pool["engine"], pool["engine_asked"]) == ("vllm-0.28", "vllm@0.31")
    assert stated in (folder / "run" / "report.html").read_text()
