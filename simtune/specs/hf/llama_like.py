"""Dense architectures that differ from Llama in biases, norms, activation or windows only.

Defaults are those of the configuration classes of `transformers` 5.24.
"""

from __future__ import annotations

from functools import partial

from simtune.specs.hf import attention_layers, feed_forward
from simtune.specs.hf.architecture import Architecture

_like = partial(Architecture, attention=attention_layers.softmax, feed_forward=feed_forward.dense_or_experts)

_OLMO2 = _like(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, wide_qk_norm=True)
_MINISTRAL = {"num_key_value_heads": 8}

LLAMA_LIKE: dict[str, Architecture] = {
    "SeedOssForCausalLM": _like(
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        feed_forward_bias="mlp_bias",
        defaults={"head_dim": 128, "attention_bias": True, "num_key_value_heads": 8},
    ),
    "Ernie4_5ForCausalLM": _like(
        qkv_bias="use_bias",
        output_bias="use_bias",
        feed_forward_bias="use_bias",
        defaults={"head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "HunYuanDenseV1ForCausalLM": _like(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True),
    "SmolLM3ForCausalLM": _like(
        window="every",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        feed_forward_bias="mlp_bias",
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "use_sliding_window": False},
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _like(
        window="patterned",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        wide_qk_norm=True,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "ArceeForCausalLM": _like(
        qkv_bias="attention_bias", output_bias="attention_bias", feed_forward_bias="mlp_bias", gated=False
    ),
    "Exaone4ForCausalLM": _like(
        attention=attention_layers.by_pattern,
        window="patterned",
        qk_norm=True,
        defaults={"sliding_window_pattern": 4, "num_key_value_heads": 32},
    ),
    "MinistralForCausalLM": _like(window="every", defaults=_MINISTRAL),
    "Ministral3ForCausalLM": _like(window="every", defaults={**_MINISTRAL, "head_dim": 128}),
    "ApertusForCausalLM": _like(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, gated=False),
    "StableLmForCausalLM": _like(
        qkv_bias="use_qkv_bias",
        qk_norm="qk_layernorm",
        wide_qk_norm=True,
        norm_bias=True,
        defaults={"num_key_value_heads": 32},
    ),
    "Starcoder2ForCausalLM": _like(
        window="every",
        qkv_bias="use_bias",
        output_bias="use_bias",
        feed_forward_bias="use_bias",
        gated=False,
        norm_bias=True,
        defaults={"use_bias": True, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "MiMoForCausalLM": _like(
        window="switched",
        qkv_bias="attention_bias",
        defaults={"attention_bias": True, "num_key_value_heads": 32, "max_window_layers": 28},
    ),
    "MuseGlimmerForConditionalGeneration": _like(
        output_gate=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        norms_per_sublayer=2,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "sliding_window": 2048},
    ),
    "DeciLMForCausalLM": _like(
        attention=attention_layers.by_block,
        feed_forward=feed_forward.by_block,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        feed_forward_bias="mlp_bias",
        knows=("block_configs",),
    ),
}
"""Readers of these architectures. Olmo 2 and 3 and EXAONE 4 norm after each sublayer and not before, Apertus has two
weights of its activation a layer, and the queries and keys of Muse Glimmer are normed without weights: none of it
counts."""
