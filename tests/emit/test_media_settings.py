"""Settings of media that are those of the model here: written for vLLM, and named where a command has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import engine_files
from simtune.emit.importing import ImportRequest, import_plan
from simtune.errors import UsageError
from simtune.specs.catalog import load_model
from simtune.specs.model import Model
from tests.emit.test_import_round_trip import plan_of

NAME = "qwen2.5-vl-7b"


def pruned(rate: float) -> Model:
    return load_model(NAME, [f"vision.video.pruning_rate={rate}"])


def settings(folder: Path, model: Model, engine: str = "vllm-0.33", **pool: Any) -> dict[str, Any]:
    files = engine_files(plan_of(folder, engine, pool, model=NAME), model, 8, {})
    read: dict[str, Any] = yaml.safe_load(files["engine/vllm-mixed.yaml"])
    return read


def test_pruned_videos_are_written_for_pools_that_take_them(tmp_path: Path) -> None:
    assert settings(tmp_path, pruned(0.5), encoder={})["video-pruning-rate"] == 0.5
    assert "video-pruning-rate" not in settings(tmp_path, pruned(0.5))
    assert "video-pruning-rate" not in settings(tmp_path, pruned(0.0), encoder={})
    with pytest.raises(UsageError, match=r"pruning_rate: was not checked in vLLM 0\.28; take release 0\.33"):
        settings(tmp_path, pruned(0.5), "vllm-0.28", encoder={})


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (NAME, "set it there: --set model.vision.video.pruning_rate=0.5"),
        ("gemma-3-27b", "the model reads no videos here"),
    ],
)
def test_a_command_that_prunes_names_the_key_of_the_model(model: str, why: str) -> None:
    command = f"vllm serve {model} --video-pruning-rate 0.5"
    notes = import_plan(ImportRequest("h100-sxm", command, engine="vllm-0.33", model=model)).notes
    assert any("--video-pruning-rate" in note and why in note for note in notes)
