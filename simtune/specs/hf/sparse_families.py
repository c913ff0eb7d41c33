"""Families with sparse attention of kinds of their own: MiniMax M3 (blocks), DeepSeek V4 (compressed entries)."""

from __future__ import annotations

from typing import Any

from simtune.specs.hf import feed_forward
from simtune.specs.hf.architecture import Architecture, Layers
from simtune.specs.hf.attention_layers import head_shape
from simtune.specs.hf.config_reader import Config


def block_sparse(config: Config, architecture: Architecture) -> Layers:
    """Return the attention of MiniMax M3: full, or to the best blocks where sparse_attention_freq has a 1."""
    num_layers, shape = config.count("num_hidden_layers"), head_shape(config, architecture)
    block = config.get("sparse_attention_config")
    if not isinstance(block, dict):
        config.problem("sparse_attention_config", "is required and missing: a mapping with sparse_attention_freq")
        return [{"kind": "full", **shape}] * num_layers
    flags = block.get("sparse_attention_freq")
    if not isinstance(flags, list) or len(flags) != num_layers:
        config.problem("sparse_attention_config", f"sparse_attention_freq must be a list of {num_layers} numbers")
        flags = [0] * num_layers
    sizes = {name: block.get(key) for name, key in _BLOCK_KEYS.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            config.problem("sparse_attention_config", f"{_BLOCK_KEYS[name]} must be a whole number, not {size!r}")
    sparse, full = {"kind": "block_sparse", **shape, **sizes}, {"kind": "full", **shape}
    return [sparse if has else full for has in flags]


_BLOCK_KEYS = {
    "index_heads": "sparse_num_index_heads",
    "index_dim": "sparse_index_dim",
    "block": "sparse_block_size",
    "topk_blocks": "sparse_topk_blocks",
}


def compressed(config: Config, architecture: Architecture) -> Layers:
    """Return the attention of DeepSeek V4: a window, and entries of 4 tokens, some selected, or of 128, all seen."""
    num_layers = config.count("num_hidden_layers")
    ratios = config.layer_numbers("compress_ratios") or []
    if len(ratios) < num_layers:
        config.problem("compress_ratios", f"must be a list of at least {num_layers} numbers, not of {len(ratios)}")
        ratios = [0] * num_layers
    # numbers beyond the layers are those of layers that predict further tokens
    ratios = ratios[:num_layers]
    for ratio in sorted(set(ratios) - {0, _SELECTED, _WHOLE}):
        config.problem("compress_ratios", f"entries of {ratio} tokens are not modelled; modelled: 0, 4 and 128")
    layer: dict[str, Any] = {
        "kind": "compressed",
        "heads": config.count("num_attention_heads"),
        "head_dim": config.count("head_dim"),
        "rope_dim": config.count("qk_rope_head_dim"),
        **{key: config.count(key) for key in ("q_lora_rank", "o_groups", "o_lora_rank")},
        "window": config.count("sliding_window"),
    }
    indexer = {
        "index_topk": config.count("index_topk"),
        "index_heads": config.count("index_n_heads"),
        "index_head_dim": config.count("index_head_dim"),
    }
    kinds = {0: layer, _SELECTED: {**layer, "ratio": _SELECTED, "overlapping": True, **indexer}}
    return [kinds.get(ratio, {**layer, "ratio": max(1, ratio)}) for ratio in ratios]


_SELECTED, _WHOLE = 4, 128
"""Tokens of entries that an indexer selects, and of those that are all attended to."""


def hyper_connections(config: Config) -> dict[str, Any]:
    """Return the residual streams of `hc_mult`."""
    return {"kind": "hyper", "streams": config.count("hc_mult", minimum=2)}


_M3 = Architecture(
    attention=block_sparse,
    feed_forward=feed_forward.by_list,
    expert_size="intermediate_size",
    shared_size="n_shared_experts",
    qk_norm="use_qk_norm",
    output_gate="attention_output_gate",
    mtp="num_mtp_modules",
    modules={
        "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        "experts": ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w2", "block_sparse_moe.experts.0.w3"),
        "shared": (
            "block_sparse_moe.shared_experts.gate_proj",
            "block_sparse_moe.shared_experts.up_proj",
            "block_sparse_moe.shared_experts.down_proj",
        ),
    },
    knows=("sparse_attention_config", "n_shared_experts", "first_k_dense_replace"),
)

SPARSE_FAMILIES: dict[str, Architecture] = {
    "MiniMaxM3ForCausalLM": _M3,
    "MiniMaxM3SparseForCausalLM": _M3,
    "DeepseekV4ForCausalLM": Architecture(
        attention=compressed,
        feed_forward=feed_forward.only_experts,
        expert_size="moe_intermediate_size",
        shared_size="n_shared_experts",
        residual=hyper_connections,
        # vLLM 0.33 has kernels for this cache only (models/deepseek_v4/attention.py)
        kv_dtype="fp8",
        modules={
            "attention": ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b"),
            "experts": ("ffn.experts.0.w1", "ffn.experts.0.w2", "ffn.experts.0.w3"),
            "shared": ("ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3"),
        },
        knows=("index_topk", "compress_ratios", "n_shared_experts"),
    ),
}
