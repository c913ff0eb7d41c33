"""Families whose layers have windows and full attention of different shapes: Gemma 4, MiMo V2, Step 3.7."""

from __future__ import annotations

from typing import Any

from simtune.specs.hf import feed_forward
from simtune.specs.hf.architecture import Architecture, Layers
from simtune.specs.hf.attention_layers import head_shape
from simtune.specs.hf.config_reader import Config

KINDS = ("full_attention", "sliding_attention")


def gemma4(config: Config, architecture: Architecture) -> Layers:
    """Return windows, and full attention with wider and fewer KV heads, whose values are the projected keys."""
    num_layers = config.count("num_hidden_layers")
    if config.get("hidden_size_per_layer_input"):
        config.problem("hidden_size_per_layer_input", "embeddings of every layer: not modelled")
    if config.flag("use_double_wide_mlp"):
        config.problem("use_double_wide_mlp", "wider blocks in layers that share a cache: not modelled")
    shape = head_shape(config, architecture)
    sliding = {"kind": "sliding", "window": config.count("sliding_window"), **shape}
    full = {"kind": "full", **shape, "head_dim": config.count("global_head_dim")}
    if config.flag("attention_k_eq_v"):
        full["kv_heads"] = config.count("num_global_key_value_heads", default=full["kv_heads"])
        full["values_from_keys"] = True
    kinds = config.layer_kinds(num_layers, KINDS)
    if kinds is None:
        kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)]
    return [sliding if kind == "sliding_attention" else full for kind in kinds]


def mimo_v2(config: Config, architecture: Architecture) -> Layers:
    """Return full attention, and windows with sinks where hybrid_layer_pattern has a 1; values narrower than keys."""
    num_layers, flags = config.count("num_hidden_layers"), config.layer_numbers("hybrid_layer_pattern") or []
    if len(flags) != num_layers:
        config.problem("hybrid_layer_pattern", f"must be a list of {num_layers} numbers, not of {len(flags)}")
        flags = [0] * num_layers
    return [_mimo(config, architecture, "swa_" if slides else "") for slides in flags]


def _mimo(config: Config, architecture: Architecture, prefix: str) -> dict[str, Any]:
    sizes = {
        "heads": config.count(f"{prefix}num_attention_heads"),
        "kv_heads": config.count(f"{prefix}num_key_value_heads"),
        "head_dim": config.count(f"{prefix}head_dim"),
        "v_dim": config.count(f"{prefix}v_head_dim"),
    }
    where = "swa" if prefix else "full"
    sinks = config.flag(f"add_{where}_attention_sink_bias", default=bool(prefix))
    kind = {"kind": "sliding", "window": config.count("sliding_window")} if prefix else {"kind": "full"}
    return {**kind, **sizes, "qkv_bias": config.switch(architecture.qkv_bias), "sinks": sinks}


def step(config: Config, architecture: Architecture) -> Layers:
    """Return windows and full attention by layer_types, with a gate for each head."""
    if config.get("attention_other_setting"):
        config.problem("attention_other_setting", "heads of sliding layers in words of their own: not modelled")
    shape, num_layers = head_shape(config, architecture), config.count("num_hidden_layers")
    kinds = config.layer_kinds(num_layers, KINDS) or ["full_attention"] * num_layers
    window = config.count("sliding_window") if "sliding_attention" in kinds else None
    sliding, full = {"kind": "sliding", "window": window, **shape}, {"kind": "full", **shape}
    return [sliding if kind == "sliding_attention" else full for kind in kinds]


_GEMMA4 = Architecture(
    attention=gemma4,
    feed_forward=feed_forward.beside_experts,
    expert_size="moe_intermediate_size",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=True,
    norms_per_sublayer=2,
    defaults={"tie_word_embeddings": True, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512},
    modules={
        "shared": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        "experts": ("experts.gate_up_proj", "experts.down_proj", "moe.gate_up_proj", "experts.0.gate_proj"),
    },
)

WINDOWED: dict[str, Architecture] = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "MiMoV2FlashForCausalLM": Architecture(
        attention=mimo_v2,
        feed_forward=feed_forward.by_list,
        expert_size="moe_intermediate_size",
        shared_size="n_shared_experts",
        qkv_bias="attention_bias",
        knows=("attention_chunk_size", "n_shared_experts"),
    ),
    "Step3p7FlashForCausalLM": Architecture(
        attention=step,
        feed_forward=feed_forward.dense_or_experts,
        expert_size="moe_intermediate_size",
        shared_size="share_expert_dim",
        dense_first=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        feed_forward_bias="mlp_bias",
        qk_norm=True,
        head_gate=True,
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        knows=("first_k_dense_replace", "n_shared_experts"),
    ),
}
