"""Meaning of the keys of a config for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from simtune.specs.hf.config_reader import Config

Layers = list[dict[str, Any]]
"""Attention or feed-forward block of each layer, as in a model spec."""
LayerReader = Callable[[Config, Any], Layers]
"""Function that reads layers from a config, for an architecture."""


def _plain_sum(config: Config) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Architecture:
    """Reader of the configs of one architecture: the attention and the feed-forward block of each layer.

    window: what an integer `sliding_window` means without `layer_types`: nothing this architecture knows, every layer,
    the layers from max_window_layers on if use_sliding_window, or all but every sliding_window_pattern-th. expert_size:
    the key of an expert's width; None is a dense model. shared_size: the key of that of shared experts, or of their
    number. latent_size: the key of the width that experts read. dense_first: first_k_dense_replace and moe_layer_freq
    say which layers are dense. Switches that are text are the keys that hold them. names: its own words for the usual
    keys. defaults: of absent keys. positions: rows of a table of positions beyond max_position_embeddings, None without
    a table. residual: how sublayers are joined, if not by a sum. kv_dtype: format in which engines keep the KV cache
    whatever the checkpoint states. modules: names of its products in checkpoints, by kind, if not the usual ones.
    knows: keys of `NOT_MODELLED` it gives a meaning.
    """

    attention: LayerReader
    feed_forward: LayerReader
    window: Literal["unknown", "every", "switched", "patterned"] = "unknown"
    expert_size: str | None = None
    shared_size: str = "shared_expert_intermediate_size"
    dense_first: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    feed_forward_bias: bool | str = False
    qk_norm: bool | str = False
    wide_qk_norm: bool = False
    output_gate: bool | str = False
    head_gate: bool = False
    sinks: bool = False
    indexed: bool = False
    gated: bool = True
    four_times_wide: bool = False
    norms_per_sublayer: int = 1
    norm_bias: bool = False
    positions: int | None = None
    mtp: str = "num_nextn_predict_layers"
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    latent_size: str | None = None
    residual: Callable[[Config], dict[str, Any] | None] = _plain_sum
    kv_dtype: str | None = None
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    knows: tuple[str, ...] = ()

    def with_defaults(self, **defaults: Any) -> Architecture:
        """The same with further defaults."""
        return replace(self, defaults={**self.defaults, **defaults})
