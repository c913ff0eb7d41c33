"""The attention of each layer that a config.json describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simtune.specs.hf.architecture import Architecture, Layers
from simtune.specs.hf.config_reader import Config

NONE = {"kind": "none"}


def softmax(config: Config, architecture: Architecture) -> Layers:
    """Full, or over a sliding window."""
    shape = head_shape(config, architecture)
    return [
        {**({"kind": "full"} if window is None else {"kind": "sliding", "window": window}), **shape}
        for window in _windows(config, architecture, config.count("num_hidden_layers"))
    ]


def head_shape(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return heads, their width, and the switches of softmax attention."""
    heads = config.count("num_attention_heads")
    # Without a default of its own, an architecture takes one KV head per query head.
    kv_heads = config.count("num_key_value_heads", default=heads)
    flags = {
        "output_gate": config.switch(architecture.output_gate),
        "head_gate": architecture.head_gate,
        "qkv_bias": config.switch(architecture.qkv_bias),
        "output_bias": config.switch(architecture.output_bias),
        "qk_norm": config.switch(architecture.qk_norm),
        "wide_qk_norm": architecture.wide_qk_norm,
        "sinks": architecture.sinks,
    }
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": _head_dim(config, heads), **flags}


def _head_dim(config: Config, heads: int) -> int:
    if config.get("head_dim") is not None:
        return config.count("head_dim")
    hidden_size = config.get("hidden_size")
    if type(hidden_size) is int and hidden_size > 0 and hidden_size % heads:
        config.problem("hidden_size", f"{hidden_size} is no multiple of {heads} heads; give head_dim")
    return max(1, hidden_size // heads) if type(hidden_size) is int else 1


def _windows(config: Config, architecture: Architecture, num_layers: int) -> Sequence[int | None]:
    """Return the sliding window of each layer in tokens; None is full attention."""
    kinds = config.layer_kinds(num_layers, ("full_attention", "sliding_attention"))
    full: list[int | None] = [None] * num_layers
    if kinds is None and architecture.window == "patterned":
        every = config.count("sliding_window_pattern")
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    if kinds is not None:
        window = config.count("sliding_window") if "sliding_attention" in kinds else None
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if config.get("sliding_window") is None or not config.flag("use_sliding_window", architecture.window != "switched"):
        return full
    window = config.count("sliding_window")
    if architecture.window == "every":
        return [window] * num_layers
    if architecture.window == "switched":
        first = config.count("max_window_layers", minimum=0)
        return [window if i >= first else None for i in range(num_layers)]
    config.problem("sliding_window", "is not known for this architecture; set it to null or give layer_types")
    return full


def by_pattern(config: Config, architecture: Architecture) -> Layers:
    """Return the layers of EXAONE 4: a sliding window by layer_types, or by a pattern of letters, of which L slides."""
    pattern = config.get("sliding_window_pattern")
    if config.get("layer_types") is not None or not isinstance(pattern, str) or config.get("sliding_window") is None:
        return softmax(config, architecture)
    shape, window = head_shape(config, architecture), config.count("sliding_window")
    num_layers = config.count("num_hidden_layers")
    # the last layer is full, wherever the pattern ends
    slides = [pattern[i % len(pattern)] == "L" and i < num_layers - 1 for i in range(num_layers)]
    return [
        {"kind": "sliding", "window": window, **shape} if sliding else {"kind": "full", **shape} for sliding in slides
    ]


def by_block(config: Config, architecture: Architecture) -> Layers:
    """Return the layers of models from architecture search (DeciLM): each with its own number of KV heads, or none."""
    num_layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    shape = head_shape(config, architecture)
    layers: Layers = []
    for block in config.blocks("attention", num_layers):
        in_group = block.get("n_heads_in_group")
        if block.get("no_op"):
            layers.append(NONE)
        elif type(in_group) is int and in_group > 0 and heads % in_group == 0:
            layers.append({"kind": "full", **shape, "kv_heads": heads // in_group})
        else:
            config.problem("block_configs", f"n_heads_in_group must divide {heads} heads, not {in_group!r}")
            layers.append(NONE)
    return layers


def falcon(config: Config, architecture: Architecture) -> Layers:
    """Return the attention of Falcon: with the new decoder architecture the stated number of KV heads, else one, or one
    per query head.
    """
    shape = {**head_shape(config, architecture), "kind": "full"}
    if not config.flag("new_decoder_architecture"):
        shape["kv_heads"] = 1 if config.flag("multi_query", True) else shape["heads"]
    return [shape] * config.count("num_hidden_layers")


def chunked(config: Config, architecture: Architecture) -> Layers:
    """Llama 4: attention in chunks in layers with rotary embeddings, full in every no_rope_layer_interval-th."""
    num_layers = config.count("num_hidden_layers")
    kinds = config.layer_kinds(num_layers, ("full_attention", "chunked_attention"))
    if kinds is None:
        every = config.count("no_rope_layer_interval")
        # Of each layer, whether it has rotary embeddings.
        rotary = config.layer_numbers("no_rope_layers") or [(i + 1) % every for i in range(num_layers)]
        if len(rotary) != num_layers:
            config.problem("no_rope_layers", f"must be a list of {num_layers} numbers, not of {len(rotary)}")
            rotary = [0] * num_layers
        kinds = ["chunked_attention" if has else "full_attention" for has in rotary]
    shape = head_shape(config, architecture)
    local = {"kind": "sliding", "window": config.count("attention_chunk_size"), "chunked": True, **shape}
    return [local if kind == "chunked_attention" else {"kind": "full", **shape} for kind in kinds]


def latent(config: Config, architecture: Architecture) -> Layers:
    """DeepSeek V2 and later. A q_lora_rank of null projects queries directly."""
    layer: dict[str, Any] = {
        "kind": "mla",
        "heads": config.count("num_attention_heads"),
        "q_lora_rank": None if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
        **{key: config.count(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    }
    num_layers = config.count("num_hidden_layers")
    if not architecture.indexed:
        return [layer] * num_layers
    layer["index_topk"] = config.count("index_topk")
    reusing = {**layer, "index_reused": True}
    layer["index_heads"] = config.count("index_n_heads")
    layer["index_head_dim"] = config.count("index_head_dim")
    kinds = config.layer_kinds(num_layers, ("full", "shared"), "indexer_types") or ["full"]
    if kinds[0] == "shared":
        config.problem("indexer_types", "the first layer must have an indexer, not share one")
    return [layer] * num_layers if len(kinds) == 1 else [reusing if kind == "shared" else layer for kind in kinds]


def delta_nets(config: Config, architecture: Architecture) -> Layers:
    """Return the attention of Qwen3-Next and Qwen 3.5: gated delta nets, and full attention by layer_types or by an
    interval of layers.
    """
    num_layers = config.count("num_hidden_layers")
    full = {"kind": "full", **head_shape(config, architecture)}
    linear = {
        "kind": "linear",
        "heads": config.count("linear_num_value_heads"),
        "key_heads": config.count("linear_num_key_heads"),
        "key_dim": config.count("linear_key_head_dim"),
        "value_dim": config.count("linear_value_head_dim"),
        "conv_width": config.count("linear_conv_kernel_dim"),
    }
    kinds = config.layer_kinds(num_layers, ("full_attention", "linear_attention"))
    if kinds is None:
        interval = config.count("full_attention_interval")
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    return [linear if kind == "linear_attention" else full for kind in kinds]


PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's hybrid_override_pattern."""
_RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}


def one_sublayer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer of Nemotron-H: mamba, attention, mlp or moe."""
    pattern, kinds = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if isinstance(kinds, list):
        kinds = [_RENAMED.get(str(kind), str(kind)) for kind in kinds]
    elif isinstance(pattern, str):
        kinds = [PATTERN.get(letter, letter) for letter in pattern]
    else:
        config.problem("hybrid_override_pattern", "is required and missing: one letter for each layer")
        kinds = []
    for kind in sorted(set(kinds) - set(PATTERN.values())):
        config.problem("hybrid_override_pattern", f"the layer kind {kind} is not modelled; modelled: M, *, - and E")
    return kinds


def one_sublayer(config: Config, architecture: Architecture) -> Layers:
    """Return the layers of Nemotron-H: Mamba2, attention only, or a feed-forward block only."""
    kinds = one_sublayer_kinds(config)
    full = {"kind": "full", **head_shape(config, architecture)} if "attention" in kinds else NONE
    mamba = {
        "kind": "linear",
        "heads": config.count("mamba_num_heads"),
        "key_heads": config.count("n_groups"),
        "key_dim": config.count("ssm_state_size"),
        "value_dim": config.count("mamba_head_dim"),
        "conv_width": config.count("conv_kernel"),
        "gates": 1,
    }
    return [{"attention": full, "mamba": mamba}.get(kind, NONE) for kind in kinds]


def granite_hybrid(config: Config, architecture: Architecture) -> Layers:
    """Granite 4: Mamba2 or full attention, by layer_types."""
    full = {"kind": "full", **head_shape(config, architecture)}
    mamba = {
        "kind": "linear",
        "heads": config.count("mamba_n_heads"),
        "key_heads": config.count("mamba_n_groups"),
        "key_dim": config.count("mamba_d_state"),
        "value_dim": config.count("mamba_d_head"),
        "conv_width": config.count("mamba_d_conv"),
        "gates": 1,
    }
    num_layers = config.count("num_hidden_layers")
    kinds = config.layer_kinds(num_layers, ("attention", "mamba"))
    if kinds is None:
        config.problem("layer_types", "is required and missing: attention or mamba for each layer")
    return [full if kind == "attention" else mamba for kind in kinds or ["mamba"] * num_layers]
