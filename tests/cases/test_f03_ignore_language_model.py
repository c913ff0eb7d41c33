"""Modules that a compressed-tensors block ignores may have the prefix of a multimodal wrapper, in some layers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.costs.iteration import StepModel
from simtune.costs.memory import weights_bytes
from simtune.sim.deployment import vllm_batching
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import Model
from simtune.specs.pool import Parallelism, Pool
from tests.cli.conftest import call

CONFIG = Path(__file__).parent / "data" / "f03-ignore-language-model" / "config.json"


def ignoring(folder: Path, names: list[str]) -> Model:
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    config["quantization_config"]["ignore"] = names
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return load_model(str(path))


def of_layers(model: Model) -> list[str]:
    return [model.of_group(group).dtype_of("attention") for group in model.layers for _ in range(group.count)]


def test_the_named_layers_keep_their_attention() -> None:
    model = load_model(str(CONFIG))
    assert (model.dtype_of("experts"), model.dtype_of("dense"), model.dtype_of("head")) == ("fp8", "fp8", "bf16")
    assert of_layers(model) == ["bf16"] * 2 + ["fp8"] * 46
    assert "attention of 2 layers bf16" in call("show", CONFIG).out


def test_their_bytes_are_counted(tmp_path: Path) -> None:
    """Two layers of attention in 16 bits take a byte more a weight, and their outputs have no scales."""
    some, none = load_model(str(CONFIG)), ignoring(tmp_path, ["language_model.lm_head"])
    queries, keys, hidden = 40 * 128, 8 * 128, 5120
    weights = (queries + 2 * keys) * hidden + hidden * queries
    scales = 4 * (queries + 2 * keys + hidden)
    more = weights_bytes(some, Parallelism(), 0) - weights_bytes(none, Parallelism(), 0)
    assert more == 2 * (weights - scales)


@pytest.mark.parametrize(
    "names",
    [
        ["re:.*self_attn.*", "language_model.lm_head"],
        ["re:^language_model\\..*self_attn.*"],
        ["language_model.model.layers.*.self_attn*"],
        ["model.language_model.layers.*.self_attn.v_proj"],
        [f"language_model.model.layers.{i}.self_attn.k_proj" for i in range(48)],
    ],
)
def test_ways_to_name_all_attention(tmp_path: Path, names: list[str]) -> None:
    model = ignoring(tmp_path, names)
    assert (model.attention_dtype, model.weight_dtype, of_layers(model)) == ("bf16", "fp8", ["bf16"] * 48)


def test_other_weights_take_their_formats_from_all_layers_alike(tmp_path: Path) -> None:
    model = load_model(str(CONFIG)).with_weights("bf16")
    assert model.layer_dtypes == {"bf16"}
    assert load_model(str(CONFIG)).layer_dtypes == {"bf16", "fp8"}
    shown = tmp_path / "model.yaml"
    shown.write_text(call("show", CONFIG).out)
    assert load_model(str(shown)) == load_model(str(CONFIG))


def test_their_time_is_that_of_their_formats(tmp_path: Path) -> None:
    """Products of 2 of 48 layers in 16 bits change a step by 2 of 48 parts of what all of them would."""
    hardware = load_hardware("h200-sxm")
    pool = Pool(hardware="h200-sxm", instances=1, parallelism=Parallelism(tp=2), batching=vllm_batching(hardware))
    names = {0: ["language_model.lm_head"], 48: ["re:.*self_attn.*"]}
    models = {layers: ignoring(tmp_path, ignored) for layers, ignored in names.items()} | {2: load_model(str(CONFIG))}
    tokens = np.array([16.0, 256.0])
    seconds = {n: sum(StepModel(model, hardware, pool).linear(tokens).values()) for n, model in models.items()}
    assert np.all(np.abs(seconds[48] / seconds[0] - 1) > 1e-4)
    assert seconds[2] - seconds[0] == pytest.approx((seconds[48] - seconds[0]) * 2 / 48, rel=1e-6)
