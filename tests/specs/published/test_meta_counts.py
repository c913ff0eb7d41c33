"""Parameters that transformers counts in a model of the same config, where it is installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.specs.published.base import META
from tests.specs.published.configs import PUBLISHED

COUNTED = [name for name, published in PUBLISHED.items() if published.source == META]
OTHER_PARTS = ("vision", "visual", "audio", "multi_modal", "projector", "patch_merge", "perception")
"""Parts of names that parameters outside the language model have."""


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_transformers_counts_as_many(name: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    torch = pytest.importorskip("torch")
    assert language_parameters(transformers, torch, PUBLISHED[name].config) == PUBLISHED[name].parameters


def language_parameters(transformers: Any, torch: Any, config: dict[str, Any]) -> int:
    data = {key: copy.deepcopy(value) for key, value in config.items() if key != "quantization_config"}
    data["sliding_window_pattern"] = {"LLLG": 4}.get(data.get("sliding_window_pattern", ""), 6)
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    with torch.device("meta"):
        of_config = mapping[data["model_type"]].from_dict(data)
        try:
            model = transformers.AutoModelForCausalLM.from_config(of_config)
        except ValueError:
            model = transformers.AutoModelForImageTextToText.from_config(of_config)
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in OTHER_PARTS))
