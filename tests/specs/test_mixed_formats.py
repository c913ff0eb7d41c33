"""Checkpoints whose modules are kept in different formats, in the words of their quantisation blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simtune.errors import SpecError
from simtune.specs import yamlfile
from simtune.specs.hf import from_config
from simtune.specs.model import Model
from tests.specs.published.configs import PUBLISHED
from tests.specs.published.new_families import BLOCK_FP8, modelopt_nvfp4


def read(name: str, block: dict[str, Any] | None = None, **keys: Any) -> Model:
    config = {key: value for key, value in PUBLISHED[name].config.items() if key != "quantization_config"}
    stated = {} if block is None else {"quantization_config": block}
    return from_config(yamlfile.parse(json.dumps({**config, **stated, **keys}), "config.json"), "tiny")


def beside(name: str, block: dict[str, Any]) -> Model:
    """Read the block from the hf_quant_config.json of modelopt."""
    config = {key: value for key, value in PUBLISHED[name].config.items() if key != "quantization_config"}
    modelopt = yamlfile.parse(json.dumps({"quantization": block}), "hf_quant_config.json")
    return from_config(yamlfile.parse(json.dumps(config), "config.json"), "tiny", modelopt=modelopt)


def mixed(layers: dict[str, str], **keys: Any) -> dict[str, Any]:
    quantized = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": quantized, **keys}


def formats(model: Model) -> dict[str, str]:
    modules = ("dense", "attention", "experts", "shared", "head")
    return {module: model.dtype_of(module) for module in modules}  # type: ignore[arg-type]


def test_four_bit_weights_beside_eight_bit_attention_and_a_quantised_head() -> None:
    """As in Qwen3.6: weights alone are in 4 bits, and the head is one of the modules."""
    name = next(name for name, p in PUBLISHED.items() if "linear moe" in p.layers)
    prefix = "model.layers"
    num_layers = read(name).num_layers
    products = {}
    for i in range(num_layers):
        full = i % 4 == 3
        for product in ("q_proj", "k_proj", "v_proj", "o_proj") if full else ("in_proj_qkv", "in_proj_z", "out_proj"):
            products[f"{prefix}.{i}.{'self' if full else 'linear'}_attn.{product}"] = "FP8"
        products[f"{prefix}.{i}.mlp.experts"] = "W4A16_NVFP4"
        for product in ("gate_proj", "up_proj", "down_proj"):
            products[f"{prefix}.{i}.mlp.shared_expert.{product}"] = "W4A16_NVFP4"
    model = beside(name, mixed({**products, "lm_head": "W4A16_NVFP4"}, exclude_modules=["mtp*"]))
    four = dict.fromkeys(("dense", "experts", "shared", "head"), "nvfp4_wo")
    assert formats(model) == {**four, "attention": "fp8"}


def test_mamba_in_some_layers_in_sixteen_bits() -> None:
    """As in Nemotron 3: layers before attention are left out."""
    model = beside(
        "Nemotron-3-Super-120B-A12B",
        {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "backbone.layers.6.mixer.in_proj", "backbone.layers.6.mixer.out_proj"],
        },
    )
    assert (model.weight_dtype, model.kv_dtype) == ("nvfp4", "fp8")
    assert [group.attention_dtype for group in model.layers if group.attention_dtype] == ["bf16"]


def test_experts_in_four_bits_beside_blocks_of_eight() -> None:
    """DeepSeek V4: the config states the format of experts beside its block, or the block that they have another."""
    published = read("DeepSeek-V4-Flash", BLOCK_FP8, expert_dtype="fp4")
    assert formats(published) == {
        **dict.fromkeys(("dense", "attention", "shared"), "fp8_block"),
        "experts": "mxfp4_mxfp8",
        "head": "bf16",
    }
    block = {**BLOCK_FP8, "moe_quant_algo": "NVFP4", "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]}
    again = read("DeepSeek-V4-Flash", block, expert_dtype="fp4")
    assert formats(again) == {**formats(published), "experts": "nvfp4"}
    without = {k: v for k, v in PUBLISHED["DeepSeek-V4-Flash"].config.items() if k != "expert_dtype"}
    plain = from_config(yamlfile.parse(json.dumps({**without, "quantization_config": BLOCK_FP8}), "c.json"), "tiny")
    assert plain.dtype_of("experts") == "fp8_block"


def test_shared_experts_may_be_kept_in_another_format_than_dense_blocks() -> None:
    """As in GLM 5.3 Flash: dense layers in 4 bits, shared experts and attention in 16."""
    names = [f"model.language_model.layers.{i}.self_attn*" for i in range(45)]
    names += [f"model.language_model.layers.{i}.mlp.shared_experts*" for i in range(3, 45)]
    model = read("GLM-5.3-Flash", modelopt_nvfp4("lm_head", *names))
    of = formats(model)
    assert (of["dense"], of["experts"], of["shared"], of["attention"]) == ("nvfp4", "nvfp4", "bf16", "bf16")


def test_eight_bits_in_groups_of_32_beside_experts_in_four() -> None:
    """As in MiniMax M3: names of indexers and of gates are small modules."""
    products = {}
    for i in range(60):
        inner = f"language_model.model.layers.{i}"
        for product in ("q_proj", "k_proj", "v_proj", "o_proj", "index_q_proj", "index_k_proj"):
            products[f"{inner}.self_attn.{product}"] = "MXFP8"
        for product in ("gate_proj", "up_proj", "down_proj"):
            part = "mlp" if i < 3 else "block_sparse_moe.shared_experts"
            products[f"{inner}.{part}.{product}"] = "MXFP8"
        if i >= 3:
            products |= {f"{inner}.block_sparse_moe.experts.{e}.w{w}": "NVFP4" for e in (0, 1) for w in (1, 2, 3)}
    of = formats(read("MiniMax-M3", mixed(products, exclude_modules=["lm_head", "patch_merge_mlp"])))
    assert of == {**dict.fromkeys(("dense", "attention", "shared"), "mxfp8"), "experts": "nvfp4", "head": "bf16"}


@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "MiniMax-M3", "Kimi-K3", "GLM-5.3-Flash"])
def test_a_model_of_a_new_family_is_read_back_from_its_text(name: str) -> None:
    model = read(name)
    assert Model.from_text(model.to_yaml()) == model


def test_what_cannot_be_read_of_a_family_states_the_reason() -> None:
    with pytest.raises(SpecError, match=r"n-gram tables.*kv_source_layer_ids"):
        from_config(yamlfile.parse('{"architectures": ["DeepseekV41ForCausalLM"]}', "config.json"), "tiny")
