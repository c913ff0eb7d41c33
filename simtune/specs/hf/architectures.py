"""The architectures whose configs are read, and what each takes its keys for.

Defaults are those of the configuration classes of `transformers`, for the keys that published configs leave out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from simtune.specs.hf import attention_layers, feed_forward
from simtune.specs.hf.architecture import Architecture
from simtune.specs.hf.kda_families import KDA_FAMILIES
from simtune.specs.hf.llama_like import LLAMA_LIKE
from simtune.specs.hf.sparse_families import SPARSE_FAMILIES
from simtune.specs.hf.windowed_families import WINDOWED

_like = partial(Architecture, attention=attention_layers.softmax, feed_forward=feed_forward.dense_or_experts)

_LLAMA = _like(qkv_bias="attention_bias", output_bias="attention_bias", feed_forward_bias="mlp_bias")
_MISTRAL = _like(window="every", defaults={"num_key_value_heads": 8})
_QWEN2 = _like(window="switched", qkv_bias=True, defaults={"num_key_value_heads": 32, "max_window_layers": 28})
_QWEN3 = replace(
    _QWEN2,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=True,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "max_window_layers": 28},
)
_DEEPSEEK = _like(
    expert_size="moe_intermediate_size",
    shared_size="n_shared_experts",
    dense_first=True,
    attention=attention_layers.latent,
    knows=("kv_lora_rank", "first_k_dense_replace", "n_shared_experts"),
)
_SPARSE = replace(_DEEPSEEK, indexed=True, knows=(*_DEEPSEEK.knows, "index_topk", "indexer_types"))
_DELTA_NETS = _like(
    attention=attention_layers.delta_nets,
    qk_norm=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    output_gate=True,
    mtp="mtp_num_hidden_layers",
    knows=("linear_num_value_heads", "full_attention_interval"),
    defaults={
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_DELTA_NET_EXPERTS = replace(_DELTA_NETS, expert_size="moe_intermediate_size")
_GEMMA = _like(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    defaults={"tie_word_embeddings": True, "head_dim": 256},
)
_GEMMA2 = replace(
    _GEMMA,
    window="patterned",
    norms_per_sublayer=2,
    defaults={
        **_GEMMA.defaults,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    },
)
_GEMMA3 = replace(_GEMMA2, qk_norm=True).with_defaults(
    vocab_size=262208, max_position_embeddings=131072, sliding_window_pattern=6, num_attention_heads=8
)
_LLAMA4 = _like(
    expert_size="intermediate_size",
    attention=attention_layers.chunked,
    feed_forward=feed_forward.alternating,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    knows=("attention_chunk_size",),
    defaults={
        "vocab_size": 202048,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
    },
)
_GPT_OSS = _like(
    window="patterned",
    expert_size="intermediate_size",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    feed_forward_bias=True,
    sinks=True,
    # Its published configs name no dtype; its kernels want bf16.
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "dtype": "bfloat16",
    },
)
_GLM4_EXPERTS = _like(
    expert_size="moe_intermediate_size",
    shared_size="n_shared_experts",
    dense_first=True,
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    defaults={"num_key_value_heads": 8, "first_k_dense_replace": 1, "n_shared_experts": 1},
    knows=("first_k_dense_replace", "n_shared_experts"),
)
_MINIMAX_M2 = _like(
    expert_size="intermediate_size",
    qk_norm="use_qk_norm",
    wide_qk_norm=True,
    mtp="num_mtp_modules",
    defaults={"head_dim": 128, "num_key_value_heads": 8, "use_qk_norm": True},
)
_NEMOTRON_H = _like(
    expert_size="moe_intermediate_size",
    shared_size="moe_shared_expert_intermediate_size",
    attention=attention_layers.one_sublayer,
    feed_forward=feed_forward.one_sublayer,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    feed_forward_bias="mlp_bias",
    gated=False,
    names={"head_dim": ("attention_head_dim",), "n_groups": ("mamba_n_groups",), "conv_kernel": ("mamba_d_conv",)},
    defaults={"conv_kernel": 4, "n_groups": 8, "ssm_state_size": 128, "head_dim": 128},
    latent_size="moe_latent_size",
    knows=("hybrid_override_pattern", "layers_block_type", "n_shared_experts", "moe_latent_size"),
)
_GRANITE = replace(_LLAMA, defaults={"tie_word_embeddings": False})
_GRANITE_HYBRID = replace(
    _GRANITE,
    expert_size="intermediate_size",
    shared_size="shared_intermediate_size",
    attention=attention_layers.granite_hybrid,
    feed_forward=feed_forward.shared_and_experts,
    knows=("mamba_d_state", "layers_block_type"),
)
_OLDER = _like(
    qkv_bias=True, output_bias=True, feed_forward_bias=True, gated=False, four_times_wide=True, norm_bias=True
)
"""Architectures of the time when layer norms and biases were used everywhere."""
_FALCON = replace(
    _OLDER,
    attention=attention_layers.falcon,
    qkv_bias="bias",
    output_bias="bias",
    feed_forward_bias="bias",
    names={
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
        "intermediate_size": ("ffn_hidden_size",),
    },
    defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
)
_GPT2_NAMES = {
    "hidden_size": ("n_embd", "n_embed"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "seq_length"),
    "intermediate_size": ("n_inner",),
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "MixtralForCausalLM": replace(_MISTRAL, expert_size="intermediate_size"),
    "Phi3ForCausalLM": _like(window="every"),
    "PhiMoEForCausalLM": replace(
        _LLAMA, window="every", expert_size="intermediate_size", norm_bias=True, feed_forward_bias=False
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": replace(_QWEN2, expert_size="moe_intermediate_size"),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": replace(_QWEN3, expert_size="moe_intermediate_size"),
    "Qwen3NextForCausalLM": _DELTA_NET_EXPERTS,
    "Qwen3_5ForCausalLM": _DELTA_NETS,
    "Qwen3_5ForConditionalGeneration": _DELTA_NETS,
    "Qwen3_5MoeForCausalLM": _DELTA_NET_EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _DELTA_NET_EXPERTS,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "Glm4MoeForCausalLM": _GLM4_EXPERTS,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "GptOssForCausalLM": _GPT_OSS,
    "MiniMaxM2ForCausalLM": _MINIMAX_M2,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": replace(_GRANITE, expert_size="intermediate_size"),
    "GraniteMoeHybridForCausalLM": _GRANITE_HYBRID,
    "FalconForCausalLM": _FALCON,
    "RWForCausalLM": _FALCON,
    "BloomForCausalLM": replace(
        _OLDER, names=_GPT2_NAMES, defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048}
    ),
    "GPT2LMHeadModel": replace(
        _OLDER,
        positions=0,
        names=_GPT2_NAMES,
        # Its published configs name no dtype and its weights are in 32 bits.
        defaults={"tie_word_embeddings": True, "dtype": "float32"},
    ),
    "OPTForCausalLM": replace(
        _OLDER,
        positions=2,
        qkv_bias="enable_bias",
        output_bias="enable_bias",
        feed_forward_bias="enable_bias",
        names={"intermediate_size": ("ffn_dim",)},
        defaults={"tie_word_embeddings": True, "enable_bias": True},
    ),
    "GPTNeoXForCausalLM": replace(
        _OLDER, qkv_bias="attention_bias", output_bias="attention_bias", defaults={"attention_bias": True}
    ),
    **LLAMA_LIKE,
    **WINDOWED,
    **SPARSE_FAMILIES,
    **KDA_FAMILIES,
}

REFUSED = {
    "DeepseekV41ForCausalLM": "every token reads rows of n-gram tables of 196 G values (engram), which engines keep in "
    "host memory, and layers attend to keys and candidates of other layers (kv_source_layer_ids)",
}
"""Architectures that nothing here describes, and what in them is missing."""

LANGUAGE_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
}
"""Architectures of the language part of multimodal models, by its model_type."""

WRAPPERS = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "NemotronH_Nano_VL_V2",
    "KimiK3ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "VoxtralForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "UltravoxModel",
)
"""Multimodal models around any of these language models."""

FLAT_WRAPPERS = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
}
"""Architectures whose older configs have the keys of the language model beside those of the encoder."""

NOT_MODELLED = {
    "kv_lora_rank": "latent attention (MLA)",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "compress_ratios": "compressed attention",
    "first_k_dense_replace": "dense first layers of a mixture of experts",
    "n_shared_experts": "shared experts counted in units",
    "full_attention_interval": "linear attention between full layers",
    "linear_num_value_heads": "linear attention",
    "attention_chunk_size": "chunked attention",
    "hybrid_override_pattern": "layers of mixed kinds",
    "layers_block_type": "layers of mixed kinds",
    "block_configs": "layers of differing shapes",
    "attn_layer_period": "state-space layers",
    "mamba_d_state": "state-space layers",
    "ssm_cfg": "state-space layers",
    "conv_L_cache": "convolution layers",
    "num_kv_shared_layers": "layers that share a KV cache",
    "moe_latent_size": "experts behind a projection",
    "cross_attention_layers": "cross attention to an image",
}
"""Keys whose presence (not null, 0, false or empty) means a layer kind that costs differently."""
