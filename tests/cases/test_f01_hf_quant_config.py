"""An hf_quant_config.json beside a config.json is read, as engines read it; without one a note says what is assumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from simtune.costs.memory import kv_bytes_per_token, weights_bytes
from simtune.errors import SpecError
from simtune.specs.catalog import load_model
from simtune.specs.pool import Parallelism
from tests.cli.conftest import call

CASE = Path(__file__).parent / "data" / "f01-hf-quant-config"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with the config.json of the case and nothing else."""
    shutil.copy(CASE / "config.json", tmp_path)
    return tmp_path


def add_formats(folder: Path, **changes: Any) -> None:
    data = json.loads((CASE / "hf_quant_config.json").read_text())
    data["quantization"].update(changes)
    (folder / "hf_quant_config.json").write_text(json.dumps(data))


def test_formats_beside_the_config_are_read() -> None:
    model = load_model(str(CASE / "config.json"))
    assert (model.weight_dtype, model.kv_dtype, model.dtype) == ("nvfp4", "fp8", "bf16")
    assert kv_bytes_per_token(model, Parallelism(), 0, "fp8") == 64 * 1024
    # Matrices of the layers at 4.5 bits, embedding and head at 16.
    tables = 2 * 128256 * 4096 * 2
    layers = (model.parameters - 2 * 128256 * 4096) * 0.5625
    assert weights_bytes(model, Parallelism(), 0) == pytest.approx(tables + layers, rel=0.001)
    assert weights_bytes(model, Parallelism(), 0) / 2**30 == pytest.approx(5.6, abs=0.05)


def test_show_says_where_the_formats_come_from() -> None:
    said = call("show", CASE / "config.json")
    assert "formats: nvfp4" in said.out
    assert "5.6 GiB" in said.out
    assert "64.0 KiB per token in fp8" in said.out
    assert "number formats from the hf_quant_config.json beside it" in said.out


def test_a_config_that_names_its_formats_outranks_its_neighbour(checkpoint: Path) -> None:
    add_formats(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    model = load_model(str(checkpoint))
    assert model.weight_dtype == "fp8"
    assert model.source == "Hugging Face config.json of a LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "weights", "cache"),
    [
        ({"quant_algo": "FP8"}, "fp8", "fp8"),
        ({"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": None}, "fp8_block", None),
        ({"quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": None}, "int4", None),
        ({"quant_algo": None}, "bf16", "fp8"),
    ],
)
def test_algorithms(checkpoint: Path, changes: dict[str, Any], weights: str, cache: str | None) -> None:
    add_formats(checkpoint, **changes)
    model = load_model(str(checkpoint))
    assert (model.weight_dtype, model.kv_dtype) == (weights, cache)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo MIXED_PRECISION is not modelled"),
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo INT8 is not modelled"),
        ({"exclude_modules": ["model.layers.*.new_part"]}, "which is no module that is known here"),
    ],
)
def test_formats_that_are_not_modelled_are_refused_with_their_file(
    checkpoint: Path, changes: dict[str, Any], said: str
) -> None:
    add_formats(checkpoint, **changes)
    with pytest.raises(SpecError, match=f"hf_quant_config.json: quantization: .*{said}"):
        load_model(str(checkpoint))


def test_a_file_without_the_block_is_refused(checkpoint: Path) -> None:
    (checkpoint / "hf_quant_config.json").write_text("[]")
    with pytest.raises(SpecError, match=r"hf_quant_config.json: quantization: must be a mapping with quant_algo"):
        load_model(str(checkpoint))


def test_a_note_says_that_nothing_tells_whether_a_lone_config_is_quantised(checkpoint: Path) -> None:
    lone = "nothing says whether the checkpoint is quantised"
    assert lone in call("show", checkpoint / "config.json").out
    assert lone in call("check", checkpoint / "config.json").out
    run = ("simulate", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "20", "--rate", "1", "-q")
    assert f"note: {lone}" in call(*run, "--model", checkpoint / "config.json").err
    assert lone not in call("show", checkpoint / "config.json", "--set", "model.weight_dtype=fp8").out
    (checkpoint / "model.safetensors").touch()
    assert lone not in call("show", checkpoint / "config.json").out
    assert load_model(str(checkpoint)).weight_dtype == "bf16"


def test_a_shown_model_is_read_again_with_its_notes(checkpoint: Path) -> None:
    (checkpoint / "model.yaml").write_text(call("show", checkpoint / "config.json").out)
    assert load_model(str(checkpoint / "model.yaml")) == load_model(str(checkpoint / "config.json"))
