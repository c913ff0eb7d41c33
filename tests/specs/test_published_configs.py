"""Configs of today's models as published: layers, formats, parameters and KV bytes that their publishers state."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from simtune.costs.memory import kv_bytes_per_token, weights_bytes
from simtune.errors import SpecError
from simtune.specs import yamlfile
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hf import ARCHITECTURES, from_config
from simtune.specs.model import LayerGroup, Model
from simtune.specs.pool import Parallelism
from tests.specs.published.base import INDEX, META
from tests.specs.published.configs import PUBLISHED
from tests.specs.published.new_families import HAND

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> Model:
    return from_config(yamlfile.parse(json.dumps(PUBLISHED[name].config), "config.json"), name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    """Within half a percent of rounded ones, and equal where the checkpoint's own index counts them."""
    published = PUBLISHED[name]
    counted = read(name).parameters
    assert counted == pytest.approx(published.parameters, rel=0.005)
    if published.source == INDEX:
        assert counted == published.parameters
    if published.source.startswith((META, HAND)):
        assert counted == pytest.approx(published.parameters, rel=0.0001)


@pytest.mark.parametrize("name", [name for name, published in PUBLISHED.items() if published.active])
def test_active_parameters_are_the_published_ones(name: str) -> None:
    """The publishers of Llama 4 and Qwen count embeddings, and round to billions."""
    published = PUBLISHED[name]
    model = read(name)
    counted = model.active_parameters + model.vocab_size * model.hidden_size * name.startswith(("Llama-4", "Qwen"))
    assert counted == pytest.approx(published.active, rel=0.025)


@pytest.mark.parametrize("name", PUBLISHED)
def test_kv_bytes_per_token_are_exact(name: str) -> None:
    model = read(name)
    cached = kv_bytes_per_token(model, Parallelism(), 0, model.kv_dtype or model.dtype)
    assert cached == PUBLISHED[name].kv_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_come_in_their_order(name: str) -> None:
    model = read(name)
    runs = ", ".join(f"{g.count} {g.attention.kind} {g.feed_forward.kind}" for g in model.layers)
    assert runs == PUBLISHED[name].layers
    config = PUBLISHED[name].config
    config = {**config, **config.get("text_config", {})}
    kinds = config.get("hybrid_override_pattern") or config.get("layers_block_type") or ()
    counted = next((config[key] for key in ("num_hidden_layers", "n_layer") if key in config), None)
    assert model.num_layers == (counted or len(kinds))


@pytest.mark.parametrize("name", PUBLISHED)
def test_formats_are_those_of_the_checkpoint(name: str) -> None:
    model = read(name)
    modules = {"attention": model.attention_dtype, "experts": model.expert_dtype, "cache": model.kv_dtype}
    told = [model.weight_dtype, *(f"{module} {dtype}" for module, dtype in modules.items() if dtype)]
    assert ", ".join(told) == PUBLISHED[name].formats


@pytest.mark.parametrize("name", PUBLISHED)
def test_memory_counts_the_same_parameters(name: str) -> None:
    """Of 16-bit checkpoints every parameter is two bytes on a single device, whatever its layers are."""
    model = read(name)
    plain = {"weight_dtype": "bf16", "dtype": "bf16", "expert_dtype": None, "attention_dtype": None}
    assert weights_bytes(model.model_copy(update=plain), Parallelism(), 0) == 2 * model.parameters


def test_expert_weights_of_gpt_oss_take_the_bytes_of_its_checkpoint() -> None:
    """60.8 GiB and 12.8 GiB, gpt-oss model card, table 1."""
    for name, gib in (("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)):
        assert weights_bytes(read(name), Parallelism(), 0) / (1 << 30) == pytest.approx(gib, rel=0.005)
    assert DTYPE_BYTES["mxfp4"] == (4 + 8 / 32) / 8


def test_parameters_of_glm_4_5() -> None:
    """355B: its report (arXiv 2508.06471) counts the layer that predicts a token further, and no embeddings."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 3,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 92,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vocab_size": 151552,
    }
    model = from_config(yamlfile.parse(json.dumps(config), "config.json"), "glm-4.5")
    shipped = Model.from_file(ROOT / "simtune/models" / "glm-4.5.yaml")
    assert model.model_copy(update={"hf": shipped.hf, "source": shipped.source}) == shipped
    assert model.mtp_layers == 1
    further = one_layer(model.layers[-1]).matrices(5120) + 2 * 5120**2  # with the product of two inputs
    assert model.parameters + further - 2 * 151552 * 5120 == pytest.approx(355e9, rel=0.005)
    assert kv_bytes_per_token(model, Parallelism(), 0, "bf16") == 92 * 2 * 8 * 128 * 2


def test_parameters_of_deepseek_v3_2() -> None:
    """685B: its page counts all tensors, with the further layer and that layer's own tables of embeddings and head."""
    indexer = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    config = {**PUBLISHED["DeepSeek-V3"].config, **indexer, "architectures": ["DeepseekV32ForCausalLM"]}
    model = from_config(yamlfile.parse(json.dumps(config), "config.json"), "deepseek-v3.2")
    further = one_layer(model.layers[-1]).matrices(7168) + 2 * 7168**2 + 2 * 129280 * 7168
    assert model.parameters + further == pytest.approx(685e9, rel=0.005)
    assert kv_bytes_per_token(model, Parallelism(), 0, "bf16") == 61 * (576 * 2 + 132)


def one_layer(group: LayerGroup) -> LayerGroup:
    return group.model_copy(update={"count": 1})


def _language_part(config: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = config.get("text_config", {})
    return part


def test_every_family_has_a_published_config() -> None:
    """All but those that are another name of a family here, or a mixture of its parts."""
    parts = [part for published in PUBLISHED.values() for part in (published.config, _language_part(published.config))]
    read_here = {part["architectures"][0] for part in parts if "architectures" in part}
    families = {ARCHITECTURES[name].attention for name in read_here if name in ARCHITECTURES}
    missing = {a.attention.__name__ for a in ARCHITECTURES.values() if a.attention not in families}
    assert missing == {"granite_hybrid"}


DAMAGES: tuple[Any, ...] = (None, 0, -1, 3, "x", [1], {}, True, 1.5, [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_damaged_config_is_read_or_told_what_is_wrong(name: str) -> None:
    """Whatever stands under any of its keys."""
    config = PUBLISHED[name].config
    inside = [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]
    for at, path in enumerate([*((key,) for key in config), *inside]):
        damaged = json.loads(json.dumps(config))
        part = damaged if len(path) == 1 else damaged[path[0]]
        part[path[-1]] = DAMAGES[at % len(DAMAGES)]
        with contextlib.suppress(SpecError):
            assert from_config(yamlfile.parse(json.dumps(damaged), "config.json"), name).num_layers > 0


SHIPPED = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.3-70b": "Llama-3.3-70B-Instruct",
    "llama-4-scout": "Llama-4-Scout-17B-16E",
    "llama-4-maverick": "Llama-4-Maverick-17B-128E",
    "gemma-3-27b": "gemma-3-27b-it",
    "qwen2.5-7b": "Qwen2.5-7B-Instruct",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "qwen3-next-80b-a3b": "Qwen3-Next-80B-A3B",
    "mistral-small-24b": "Mistral-Small-24B-Instruct-2501",
    "mixtral-8x7b": "Mixtral-8x7B-v0.1",
    "phi-4": "phi-4",
    "deepseek-v3": "DeepSeek-V3",
    "deepseek-r1": "DeepSeek-V3",
    "kimi-k2": "Kimi-K2-Instruct",
    "glm-5": "GLM-5",
    "gpt-oss-120b": "gpt-oss-120b",
    "gpt-oss-20b": "gpt-oss-20b",
    "minimax-m2": "MiniMax-M2",
    "nemotron-nano-9b-v2": "NVIDIA-Nemotron-Nano-9B-v2",
}


@pytest.mark.parametrize("shipped", SHIPPED)
def test_a_shipped_model_is_its_published_config(shipped: str) -> None:
    model = Model.from_file(ROOT / "simtune/models" / f"{shipped}.yaml")
    of_config = read(SHIPPED[shipped]).model_copy(update={"name": model.name, "hf": model.hf, "source": model.source})
    assert model == of_config
