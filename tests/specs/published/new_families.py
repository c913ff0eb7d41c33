"""Configs of families with attention and experts of kinds of their own, as published in 2026.

Parameters are those of the same config's model in transformers 5.24, which `test_meta_counts.py` counts again, unless a
`source` is another one.
"""

from __future__ import annotations

from typing import Any

from tests.specs.published.base import META, Published

STEP = f"{META}: its text model, and a head of 128,896 tokens"
HAND = "products of SGLang 0.5.23, models/kimi_k3.py, multiplied out below"
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def modelopt_nvfp4(*left_out: str) -> dict[str, Any]:
    """Return the block that modelopt writes into config.json, with an 8-bit KV cache."""
    four_bits = {"num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": group},
        "ignore": list(left_out),
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }


def _kimi_k3() -> int:
    hidden, inner, rank = 7168, 96 * 128, 128
    mixing = 5 * hidden * inner + hidden * (96 + rank) + rank * inner + 3 * inner * 4 + inner + 96 + rank
    queries = hidden * 1536 + 1536 + 1536 * 96 * (128 + 64)
    latent = queries + hidden * (512 + 64) + 512 + 512 * 96 * (128 + 128) + 2 * inner * hidden
    experts = hidden * 896 + 896 * 3 * 3584 * 3072 + 3 * hidden * 2 * 3072 + 2 * hidden * 3584 + 3584
    dense, norms = 3 * hidden * 33792, 93 * (2 + 4) * hidden + hidden
    return 69 * mixing + 24 * latent + 92 * experts + dense + norms + 2 * 163840 * hidden


NEW_FAMILIES: dict[str, Published] = {
    "Gemma-4-26B-A4B": Published(
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "dtype": "bfloat16",
            "model_type": "gemma4",
            "text_config": {
                "attention_bias": False,
                "attention_k_eq_v": True,
                "dtype": "bfloat16",
                "enable_moe_block": True,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_size": 2816,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 2112,
                "layer_types": 5 * (5 * ["sliding_attention"] + ["full_attention"]),
                "max_position_embeddings": 262144,
                "model_type": "gemma4_text",
                "moe_intermediate_size": 704,
                "num_attention_heads": 16,
                "num_experts": 128,
                "num_global_key_value_heads": 2,
                "num_hidden_layers": 30,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
                "tie_word_embeddings": True,
                "top_k_experts": 8,
                "use_double_wide_mlp": False,
                "vocab_size": 262144,
            },
            "tie_word_embeddings": True,
        },
        25_233_141_760,
        (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) * 2,
        META,
        ", ".join(5 * (["5 sliding moe", "1 full moe"])),
    ),
    "Gemma-4-31B-IT-NVFP4": Published(
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "dtype": "bfloat16",
            "model_type": "gemma4",
            "text_config": {
                "attention_bias": False,
                "attention_k_eq_v": True,
                "dtype": "bfloat16",
                "enable_moe_block": False,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_size": 5376,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 21504,
                "layer_types": 10 * (5 * ["sliding_attention"] + ["full_attention"]),
                "max_position_embeddings": 262144,
                "model_type": "gemma4_text",
                "num_attention_heads": 32,
                "num_global_key_value_heads": 4,
                "num_hidden_layers": 60,
                "num_key_value_heads": 16,
                "sliding_window": 1024,
                "tie_word_embeddings": True,
                "use_double_wide_mlp": False,
                "vocab_size": 262144,
            },
            "tie_word_embeddings": True,
            "quantization_config": modelopt_nvfp4(
                "lm_head", "model.embed_vision*", *(f"model.language_model.layers.{i}.self_attn*" for i in range(60))
            ),
        },
        30_697_345_280,
        50 * 2 * 16 * 256 + 10 * 2 * 4 * 512,
        META,
        ", ".join(10 * (["5 sliding dense", "1 full dense"])),
        "nvfp4, attention bf16, cache fp8",
    ),
    "MiMo-V2-Flash": Published(
        {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 48,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "intermediate_size": 16384,
            "vocab_size": 152576,
            "max_position_embeddings": 262144,
            "sliding_window": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "hybrid_layer_pattern": [0] + 7 * (4 * [1] + [0] + [1]) + 4 * [1] + [0],
            "moe_layer_freq": [0] + 47 * [1],
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "attention_bias": False,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "quantization_config": BLOCK_FP8,
        },
        308_778_768_832,
        (9 * 4 + 39 * 8) * (192 + 128) * 2,
        META,
        ", ".join(["1 full dense"] + ["4 sliding moe"] + 7 * (["1 full moe", "5 sliding moe"]) + ["1 full moe"]),
        "fp8_block",
    ),
    "Step-3.7-Flash": Published(
        {
            "architectures": ["Step3p7FlashForCausalLM"],
            "model_type": "step3p7",
            "num_hidden_layers": 45,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128896,
            "max_position_embeddings": 65536,
            "torch_dtype": "bfloat16",
            "intermediate_size": 11264,
            "sliding_window": 512,
            "layer_types": 11 * (["full_attention"] + 3 * ["sliding_attention"]) + ["full_attention"],
            "first_k_dense_replace": 3,
            "num_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "num_nextn_predict_layers": 3,
        },
        195_844_496_640,
        45 * 2 * 8 * 128 * 2,
        STEP,
        ", ".join(
            ["1 full dense"]
            + ["2 sliding dense"]
            + ["1 sliding moe"]
            + 10 * (["1 full moe", "3 sliding moe"])
            + ["1 full moe"]
        ),
    ),
    "DeepSeek-V4-Flash": Published(
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "expert_dtype": "fp4",
            "hc_mult": 4,
            "head_dim": 512,
            "hidden_size": 4096,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 512,
            "max_position_embeddings": 1048576,
            "model_type": "deepseek_v4",
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 64,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 43,
            "num_nextn_predict_layers": 1,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "sliding_window": 128,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 129280,
            "compress_ratios": 2 * [0] + 20 * ([4, 128]) + [4] + [0],
            "quantization_config": BLOCK_FP8,
        },
        284_332_230_231,
        21 * (584 + 132) / 4 + 20 * 584 / 128,
        META,
        ", ".join(["2 compressed moe"] + 41 * ["1 compressed moe"]),
        "fp8_block, experts mxfp4_mxfp8, cache fp8",
    ),
    "DeepSeek-V4-Pro": Published(
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "expert_dtype": "fp4",
            "hc_mult": 4,
            "head_dim": 512,
            "hidden_size": 7168,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 1024,
            "max_position_embeddings": 1048576,
            "model_type": "deepseek_v4",
            "moe_intermediate_size": 3072,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "o_groups": 16,
            "o_lora_rank": 1024,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "sliding_window": 128,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 129280,
            "compress_ratios": [128] + 30 * ([128, 4]) + [0],
            "quantization_config": BLOCK_FP8,
        },
        1_572_997_179_491,
        30 * (584 + 132) / 4 + 31 * 584 / 128,
        META,
        ", ".join(["2 compressed moe"] + 59 * ["1 compressed moe"]),
        "fp8_block, experts mxfp4_mxfp8, cache fp8",
    ),
    "MiniMax-M3": Published(
        {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "text_config": {
                "dtype": "bfloat16",
                "hidden_size": 6144,
                "intermediate_size": 3072,
                "num_hidden_layers": 60,
                "num_attention_heads": 64,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "vocab_size": 200064,
                "max_position_embeddings": 1048576,
                "attention_output_gate": False,
                "use_qk_norm": True,
                "tie_word_embeddings": False,
                "dense_intermediate_size": 12288,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "n_shared_experts": 1,
                "moe_layer_freq": 3 * [0] + 57 * [1],
                "num_mtp_modules": 1,
                "sparse_attention_config": {
                    "use_sparse_attention": True,
                    "sparse_index_dim": 128,
                    "sparse_num_index_heads": 4,
                    "sparse_topk_blocks": 16,
                    "sparse_block_size": 128,
                    "sparse_disable_index_value": 3 * [0] + 57 * [1],
                    "sparse_score_type": "max",
                    "sparse_init_block": 0,
                    "sparse_local_block": 1,
                    "sparse_attention_freq": 3 * [0] + 57 * [1],
                },
                "architectures": ["MiniMaxM3SparseForCausalLM"],
            },
            "torch_dtype": "bfloat16",
        },
        426_174_565_632,
        60 * 2 * 4 * 128 * 2 + 57 * 128 * 2,
        META,
        "3 full dense, 57 block_sparse moe",
    ),
    "GLM-5.3": Published(
        {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "dtype": "bfloat16",
            "first_k_dense_replace": 3,
            "hidden_size": 6144,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 2048,
            "indexer_types": 2 * ["full"] + 19 * (["full"] + 3 * ["shared"]),
            "intermediate_size": 12288,
            "kv_lora_rank": 512,
            "max_position_embeddings": 1048576,
            "model_type": "glm_moe_dsa",
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 78,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "tie_word_embeddings": False,
            "v_head_dim": 256,
            "vocab_size": 154880,
        },
        743_377_000_704,
        78 * 576 * 2 + 21 * (128 + 4),
        META,
        ", ".join(["3 mla dense"] + 18 * (["3 mla moe", "1 mla moe"]) + ["3 mla moe"]),
    ),
    "GLM-5.3-Flash": Published(
        {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "text_config": {
                "dtype": "bfloat16",
                "first_k_dense_replace": 3,
                "hc_mult": 4,
                "hidden_size": 4096,
                "index_head_dim": 128,
                "index_kpool": 4,
                "index_n_heads": 32,
                "index_topk": 2048,
                "indexer_types": 45 * ["full"],
                "intermediate_size": 12288,
                "kv_lora_rank": 512,
                "layer_types": 11 * (3 * ["linear_attention"] + ["deepseek_sparse_attention"]) + ["linear_attention"],
                "linear_attn_config": {
                    "num_heads": 64,
                    "gate_lower_bound": -5.0,
                    "head_dim": 128,
                    "short_conv_kernel_size": 4,
                    "kda_layers": [
                        0,
                        1,
                        2,
                        4,
                        5,
                        6,
                        8,
                        9,
                        10,
                        12,
                        13,
                        14,
                        16,
                        17,
                        18,
                        20,
                        21,
                        22,
                        24,
                        25,
                        26,
                        28,
                        29,
                        30,
                        32,
                        33,
                        34,
                        36,
                        37,
                        38,
                        40,
                        41,
                        42,
                        44,
                    ],
                    "full_attn_layers": [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43],
                },
                "max_position_embeddings": 1048576,
                "model_type": "glm5_next_text",
                "moe_intermediate_size": 2048,
                "n_routed_experts": 288,
                "n_shared_experts": 1,
                "num_attention_heads": 64,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 45,
                "num_nextn_predict_layers": 1,
                "q_lora_rank": 1536,
                "qk_nope_head_dim": 256,
                "qk_rope_head_dim": 0,
                "tie_word_embeddings": False,
                "v_head_dim": 256,
                "vocab_size": 154880,
            },
            "tie_word_embeddings": False,
            "model_type": "glm5_next",
        },
        313_326_799_870,
        11 * (512 * 2 + (128 + 4) / 4),
        META,
        ", ".join(["3 kda dense"] + 10 * (["1 mla moe", "3 kda moe"]) + ["1 mla moe"] + ["1 kda moe"]),
    ),
    "Kimi-K3": Published(
        {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "model_type": "kimi_k3",
            "text_config": {
                "architectures": ["KimiLinearForCausalLM"],
                "attn_res_block_size": 12,
                "dtype": "bfloat16",
                "first_k_dense_replace": 1,
                "hidden_size": 7168,
                "intermediate_size": 33792,
                "kv_lora_rank": 512,
                "linear_attn_config": {
                    "full_attn_layers": [
                        4,
                        8,
                        12,
                        16,
                        20,
                        24,
                        28,
                        32,
                        36,
                        40,
                        44,
                        48,
                        52,
                        56,
                        60,
                        64,
                        68,
                        72,
                        76,
                        80,
                        84,
                        88,
                        92,
                        93,
                    ],
                    "gate_lower_bound": -5.0,
                    "head_dim": 128,
                    "kda_layers": [
                        1,
                        2,
                        3,
                        5,
                        6,
                        7,
                        9,
                        10,
                        11,
                        13,
                        14,
                        15,
                        17,
                        18,
                        19,
                        21,
                        22,
                        23,
                        25,
                        26,
                        27,
                        29,
                        30,
                        31,
                        33,
                        34,
                        35,
                        37,
                        38,
                        39,
                        41,
                        42,
                        43,
                        45,
                        46,
                        47,
                        49,
                        50,
                        51,
                        53,
                        54,
                        55,
                        57,
                        58,
                        59,
                        61,
                        62,
                        63,
                        65,
                        66,
                        67,
                        69,
                        70,
                        71,
                        73,
                        74,
                        75,
                        77,
                        78,
                        79,
                        81,
                        82,
                        83,
                        85,
                        86,
                        87,
                        89,
                        90,
                        91,
                    ],
                    "num_heads": 96,
                    "short_conv_kernel_size": 4,
                    "use_full_rank_gate": True,
                },
                "max_position_embeddings": 1048576,
                "mla_use_output_gate": True,
                "model_type": "kimi_linear",
                "moe_intermediate_size": 3072,
                "moe_layer_freq": 1,
                "num_attention_heads": 96,
                "num_experts": 896,
                "num_experts_per_token": 16,
                "num_hidden_layers": 93,
                "num_nextn_predict_layers": 0,
                "num_shared_experts": 2,
                "q_lora_rank": 1536,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "routed_expert_hidden_size": 3584,
                "tie_word_embeddings": False,
                "v_head_dim": 128,
                "vocab_size": 163840,
            },
            "tie_word_embeddings": False,
        },
        _kimi_k3(),
        24 * (512 + 64) * 2,
        HAND,
        ", ".join(["1 kda dense"] + ["2 kda moe"] + 22 * (["1 mla moe", "3 kda moe"]) + ["2 mla moe"]),
    ),
    "Nemotron-3-Super-120B-A12B": Published(
        {
            "architectures": ["NemotronHForCausalLM"],
            "attention_bias": False,
            "conv_kernel": 4,
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_size": 4096,
            "hybrid_override_pattern": "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "max_position_embeddings": 262144,
            "mlp_bias": False,
            "model_type": "nemotron_h",
            "moe_intermediate_size": 2688,
            "moe_latent_size": 1024,
            "moe_shared_expert_intermediate_size": 5376,
            "n_groups": 8,
            "n_routed_experts": 512,
            "num_attention_heads": 32,
            "num_experts_per_tok": 22,
            "num_key_value_heads": 2,
            "num_nextn_predict_layers": 1,
            "ssm_state_size": 128,
            "tie_word_embeddings": False,
            "vocab_size": 131072,
        },
        120_668_687_360,
        8 * 2 * 2 * 128 * 2,
        META,
        ", ".join(
            3 * (["1 linear none", "1 none moe"])
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
        ),
    ),
    "Nemotron-3-Ultra-550B-A55B": Published(
        {
            "architectures": ["NemotronHForCausalLM"],
            "attention_bias": False,
            "conv_kernel": 4,
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_size": 8192,
            "layers_block_type": ["mamba"]
            + 2 * (["moe", "mamba", "moe", "mamba", "moe", "mamba", "attention"])
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["attention"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"]
            + ["mamba"]
            + ["moe"],
            "mamba_head_dim": 64,
            "mamba_num_heads": 256,
            "max_position_embeddings": 262144,
            "mlp_bias": False,
            "model_type": "nemotron_h",
            "moe_intermediate_size": 5120,
            "moe_latent_size": 2048,
            "moe_shared_expert_intermediate_size": 10240,
            "n_groups": 8,
            "n_routed_experts": 512,
            "num_attention_heads": 64,
            "num_experts_per_tok": 22,
            "num_key_value_heads": 2,
            "num_nextn_predict_layers": 1,
            "ssm_state_size": 128,
            "tie_word_embeddings": False,
            "vocab_size": 131072,
        },
        549_308_968_960,
        12 * 2 * 2 * 128 * 2,
        META,
        ", ".join(
            ["1 linear none"]
            + 2
            * (
                [
                    "1 none moe",
                    "1 linear none",
                    "1 none moe",
                    "1 linear none",
                    "1 none moe",
                    "1 linear none",
                    "1 full none",
                ]
            )
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 full none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
            + ["1 linear none"]
            + ["1 none moe"]
        ),
    ),
    "Kimi-Linear-48B-A3B": Published(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 1024,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "vocab_size": 163840,
            "max_position_embeddings": 1048576,
            "tie_word_embeddings": False,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "head_dim": 128,
                "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "dtype": "bfloat16",
        },
        49_122_675_072,
        7 * (512 + 64) * 2,
        META,
        ", ".join(
            ["1 kda dense"]
            + ["2 kda moe"]
            + 5 * (["1 mla moe", "3 kda moe"])
            + ["1 mla moe"]
            + ["2 kda moe"]
            + ["1 mla moe"]
        ),
    ),
}
