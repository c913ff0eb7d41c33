"""The feed-forward block of each layer that a config.json describes."""

from __future__ import annotations

from typing import Any

from simtune.specs.hf.architecture import Architecture, Layers
from simtune.specs.hf.attention_layers import NONE, one_sublayer_kinds
from simtune.specs.hf.config_reader import ALIASES, Config


def dense_or_experts(config: Config, architecture: Architecture) -> Layers:
    """Return dense blocks if the architecture has no experts; else experts, with dense layers as its keys state."""
    num_layers = config.count("num_hidden_layers")
    if architecture.expert_size is None:
        if config.get(*ALIASES["experts"]):
            config.problem(config.key(*ALIASES["experts"]), "experts are not known for this dense architecture")
        return [_dense(config, architecture)] * num_layers
    is_dense = [i < config.count("first_k_dense_replace", default=0, minimum=0) for i in range(num_layers)]
    if architecture.dense_first:
        step = config.count("moe_layer_freq", default=1)
        is_dense = [first or i % step != 0 for i, first in enumerate(is_dense)]
    else:
        step, listed = config.count("decoder_sparse_step", default=1), config.layer_numbers("mlp_only_layers") or []
        is_dense = [i in listed or (i + 1) % step != 0 for i in range(num_layers)]
    return _mixed(config, architecture, is_dense)


def _dense(config: Config, architecture: Architecture, key: str = "intermediate_size") -> dict[str, Any]:
    hidden = config.get("hidden_size")
    default = 4 * hidden if architecture.four_times_wide and type(hidden) is int else None
    width = config.count(key, default=default)
    bias = config.switch(architecture.feed_forward_bias)
    return {"kind": "dense", "intermediate_size": width, "gated": architecture.gated, "bias": bias}


_COUNTED = ("n_shared_experts", "num_shared_experts")
"""Keys that contain the number of shared experts, not their width."""


def _experts(config: Config, architecture: Architecture) -> dict[str, Any]:
    size = config.count(architecture.expert_size or "intermediate_size")
    shared = config.count(architecture.shared_size, default=0, minimum=0)
    return {
        "kind": "moe",
        "experts": config.count(*ALIASES["experts"]),
        "experts_per_token": config.count(*ALIASES["experts_per_token"]),
        "intermediate_size": size,
        # Where shared experts are counted, they are as wide as the others.
        "shared_intermediate_size": shared * (size if architecture.shared_size in _COUNTED else 1),
        "latent_size": _latent(config, architecture),
        "gated": architecture.gated,
        "bias": config.switch(architecture.feed_forward_bias),
    }


def _latent(config: Config, architecture: Architecture) -> int | None:
    key = architecture.latent_size
    return None if key is None or config.get(key) is None else config.count(key)


def by_list(config: Config, architecture: Architecture) -> Layers:
    """Experts in the layers that have a 1 in moe_layer_freq; dense blocks may have a width of their own."""
    num_layers, flags = config.count("num_hidden_layers"), config.layer_numbers("moe_layer_freq") or []
    if len(flags) != num_layers:
        config.problem("moe_layer_freq", f"must be a list of {num_layers} numbers, not of {len(flags)}")
        flags = [1] * num_layers
    experts = _experts(config, architecture)
    width = "intermediate_size" if config.get("dense_intermediate_size") is None else "dense_intermediate_size"
    dense = experts if all(flags) else _dense(config, architecture, width)
    return [experts if has else dense for has in flags]


def beside_experts(config: Config, architecture: Architecture) -> Layers:
    """Return the blocks of Gemma 4: dense ones, with experts beside if enable_moe_block."""
    num_layers, dense = config.count("num_hidden_layers"), _dense(config, architecture)
    if not config.flag("enable_moe_block"):
        return [dense] * num_layers
    return [{**_experts(config, architecture), "shared_intermediate_size": dense["intermediate_size"]}] * num_layers


def only_experts(config: Config, architecture: Architecture) -> Layers:
    """Return experts in every layer."""
    return [_experts(config, architecture)] * config.count("num_hidden_layers")


def _mixed(config: Config, architecture: Architecture, is_dense: list[bool]) -> Layers:
    experts = _experts(config, architecture)
    dense = _dense(config, architecture) if any(is_dense) else experts
    return [dense if d else experts for d in is_dense]


def alternating(config: Config, architecture: Architecture) -> Layers:
    """Llama 4: experts in every interleave_moe_layer_step-th layer, each with a shared one of the same width."""
    num_layers, step = config.count("num_hidden_layers"), config.count("interleave_moe_layer_step")
    of_experts = config.layer_numbers("moe_layers")
    if of_experts is None:
        of_experts = list(range(step - 1, num_layers, step))
    experts = _experts(config, architecture)
    experts["shared_intermediate_size"] = experts["intermediate_size"]
    dense = _dense(config, architecture, "intermediate_size_mlp") if len(of_experts) < num_layers else experts
    return [experts if i in of_experts else dense for i in range(num_layers)]


def by_block(config: Config, architecture: Architecture) -> Layers:
    """Return the blocks of models from architecture search (DeciLM): each layer has a width of its own, or none.

    A width is 2/3 of ffn_mult hidden sizes, rounded up to a multiple of 256.
    """
    hidden = config.count("hidden_size")
    layers: Layers = []
    bias = config.switch(architecture.feed_forward_bias)
    for block in config.blocks("ffn", config.count("num_hidden_layers")):
        factor, width = block.get("ffn_mult"), block.get("intermediate_size")
        if isinstance(factor, int | float) and not isinstance(factor, bool):
            width = -(-int(2 * factor * hidden / 3) // 256) * 256
        if block.get("no_op"):
            layers.append(NONE)
        elif type(width) is int and width > 0:
            layers.append({"kind": "dense", "intermediate_size": width, "gated": architecture.gated, "bias": bias})
        else:
            config.problem("block_configs", "ffn without ffn_mult or intermediate_size")
            layers.append(NONE)
    return layers


def one_sublayer(config: Config, architecture: Architecture) -> Layers:
    """Nemotron-H: dense or experts in the layers that are nothing else."""
    kinds = one_sublayer_kinds(config)
    dense = _dense(config, architecture) if "mlp" in kinds else NONE
    experts = _experts(config, architecture) if "moe" in kinds else NONE
    return [{"mlp": dense, "moe": experts}.get(kind, NONE) for kind in kinds]


def shared_and_experts(config: Config, architecture: Architecture) -> Layers:
    """Return the blocks of Granite 4: a dense block of shared_intermediate_size in every layer, beside experts if there
    are any.
    """
    num_layers = config.count("num_hidden_layers")
    if config.get(*ALIASES["experts"]):
        return [_experts(config, architecture)] * num_layers
    return [_dense(config, architecture, "shared_intermediate_size")] * num_layers
