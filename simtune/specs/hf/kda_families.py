"""Families that mix Kimi delta attention (KDA) with latent attention: Kimi Linear and K3, GLM 5.3 Flash."""

from __future__ import annotations

from typing import Any

from simtune.specs.hf import feed_forward
from simtune.specs.hf.architecture import Architecture, Layers
from simtune.specs.hf.config_reader import Config
from simtune.specs.hf.sparse_families import hyper_connections

_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")


def _kda(heads: int, head_dim: int, conv_width: int, full_rank_gate: bool) -> dict[str, Any]:
    return {
        "kind": "kda",
        "heads": heads,
        "key_heads": heads,
        "key_dim": head_dim,
        "value_dim": head_dim,
        "conv_width": conv_width,
        "decay_rank": head_dim,
        "gate_rank": None if full_rank_gate else head_dim,
    }


def _latent(config: Config) -> dict[str, Any]:
    return {
        "kind": "mla",
        "heads": config.count("num_attention_heads"),
        "q_lora_rank": None if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
        **{key: config.count(key) for key in _LATENT},
        "qk_rope_head_dim": _or_zero(config, "qk_rope_head_dim"),
    }


def _or_zero(config: Config, key: str) -> int:
    return 0 if config.get(key) == 0 else config.count(key)


def _kda_of_block(config: Config) -> tuple[dict[str, Any], list[Any]]:
    """Return KDA of the sizes in linear_attn_config, and the numbers of its layers as they are listed."""
    block = config.get("linear_attn_config")
    block = block if isinstance(block, dict) else {}
    listed = block.get("kda_layers")
    if not isinstance(listed, list):
        config.problem("linear_attn_config", "is required and missing: a mapping with kda_layers")
        listed = []
    sizes = [block.get(key) for key in ("num_heads", "head_dim", "short_conv_kernel_size")]
    dimensions = [size for size in sizes if type(size) is int and size > 0]
    if len(dimensions) != len(sizes):
        config.problem("linear_attn_config", f"num_heads, head_dim and short_conv_kernel_size must be sizes: {sizes!r}")
        dimensions = [1, 1, 1]
    return _kda(dimensions[0], dimensions[1], dimensions[2], bool(block.get("use_full_rank_gate"))), listed


def kimi(config: Config, architecture: Architecture) -> Layers:
    """Return KDA in the layers that linear_attn_config counts from 1, latent attention in the others."""
    delta, listed = _kda_of_block(config)
    latent = {**_latent(config), "output_gate": config.flag("mla_use_output_gate")}
    return [delta if i + 1 in listed else latent for i in range(config.count("num_hidden_layers"))]


def kimi_residual(config: Config) -> dict[str, Any] | None:
    """Return the blocks of layers of `attn_res_block_size` that sublayers attend to; None if they are summed."""
    if config.get("attn_res_block_size") is None:
        return None
    return {"kind": "attention", "blocks": -(-config.count("num_hidden_layers") // config.count("attn_res_block_size"))}


def glm(config: Config, architecture: Architecture) -> Layers:
    """Return KDA, and sparse attention whose indexer scores pooled keys, by layer_types."""
    num_layers = config.count("num_hidden_layers")
    kinds = config.layer_kinds(num_layers, ("deepseek_sparse_attention", "linear_attention"))
    if kinds is None:
        config.problem("layer_types", "is required and missing: one kind for each layer")
    if config.get("linear_num_heads") is None:
        delta, _ = _kda_of_block(config)
    else:
        sizes = [config.count(f"linear_{key}") for key in ("num_heads", "head_dim", "conv_kernel_dim")]
        delta = _kda(sizes[0], sizes[1], sizes[2], False)
    sparse = {
        **_latent(config),
        "index_topk": config.count("index_topk"),
        "index_heads": config.count("index_n_heads"),
        "index_head_dim": config.count("index_head_dim"),
        "index_pool": config.count("index_kpool", default=1),
    }
    # layers of KDA have no indexer, whatever they list
    shared = config.layer_kinds(num_layers, ("full", "shared"), "indexer_types") or []
    if any(kind == "shared" for kind in shared):
        config.problem("indexer_types", "pooled indexers shared between layers: not modelled")
    return [delta if kind == "linear_attention" else sparse for kind in kinds or ["linear_attention"] * num_layers]


KDA_FAMILIES: dict[str, Architecture] = {
    "KimiLinearForCausalLM": Architecture(
        attention=kimi,
        feed_forward=feed_forward.dense_or_experts,
        expert_size="moe_intermediate_size",
        shared_size="num_shared_experts",
        latent_size="routed_expert_hidden_size",
        dense_first=True,
        residual=kimi_residual,
        knows=("kv_lora_rank", "first_k_dense_replace"),
    ),
    "Glm5NextForConditionalGeneration": Architecture(
        attention=glm,
        feed_forward=feed_forward.dense_or_experts,
        expert_size="moe_intermediate_size",
        shared_size="n_shared_experts",
        dense_first=True,
        residual=hyper_connections,
        knows=("kv_lora_rank", "index_topk", "indexer_types", "first_k_dense_replace", "n_shared_experts"),
    ),
}
