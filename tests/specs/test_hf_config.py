"""A Hugging Face config.json is read as it is; what simtune does not model is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simtune.errors import SpecError
from simtune.specs import yamlfile
from simtune.specs.hf import ALIASES, ARCHITECTURES, NOT_MODELLED, from_config
from simtune.specs.model import (
    DenseFeedForward,
    FullAttention,
    LinearAttention,
    MlaAttention,
    Model,
    MoeFeedForward,
    SlidingAttention,
)

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
MOE = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def read(config: dict[str, Any]) -> Model:
    return from_config(yamlfile.parse(json.dumps(config, indent=1), "config.json"), "tiny")


def refusal(config: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as error:
        read(config)
    return str(error.value).splitlines()


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


def attention(model: Model) -> FullAttention:
    """Attention of the first layers."""
    first = model.layers[0].attention
    assert isinstance(first, FullAttention)
    return first


def windows(model: Model) -> list[int | None]:
    """The window of every layer in order."""
    return [
        group.attention.window if isinstance(group.attention, SlidingAttention) else None
        for group in model.layers
        for _ in range(group.count)
    ]


# --- keys and their meaning -------------------------------------------------------------------------------


def test_head_dim_is_derived_only_when_it_is_not_given() -> None:
    assert read(TINY).layers[0].attention == FullAttention(heads=4, kv_heads=2, head_dim=16)
    assert attention(read({**TINY, "head_dim": 48})).head_dim == 48
    assert attention(read({**TINY, "head_dim": None})).head_dim == 16
    qwen = {**TINY, "architectures": ["Qwen3ForCausalLM"]}  # its default is 128, not hidden_size / heads
    assert read(qwen).layers[0].attention == FullAttention(heads=4, kv_heads=2, head_dim=128, qk_norm=True)
    assert "66 is no multiple of 4 heads; give head_dim" in refusal({**TINY, "hidden_size": 66})[0]


@pytest.mark.parametrize(
    ("architecture", "kv_heads"),
    [("LlamaForCausalLM", 16), ("Phi3ForCausalLM", 16), ("MistralForCausalLM", 8), ("Gemma2ForCausalLM", 4)],
)
def test_kv_heads_that_are_not_told_are_those_of_the_architecture(architecture: str, kv_heads: int) -> None:
    """As `transformers` fills them in: one for each query head, or a number of its own."""
    config = without({**TINY, "architectures": [architecture], "num_attention_heads": 16}, "num_key_value_heads")
    assert attention(read(config)).kv_heads == kv_heads


@pytest.mark.parametrize("experts", ALIASES["experts"])
@pytest.mark.parametrize("per_token", ALIASES["experts_per_token"])
def test_experts_go_by_many_names(experts: str, per_token: str) -> None:
    config = without(without(MOE, "num_experts"), "num_experts_per_tok")
    model = read({**config, experts: 16, per_token: 4})
    assert model.layers[0].feed_forward == MoeFeedForward(experts=16, experts_per_token=4, intermediate_size=48)
    assert attention(model).head_dim == 32


def test_two_names_that_disagree_are_refused() -> None:
    assert refusal({**MOE, "num_local_experts": 9})[0].endswith(
        "num_experts: 8 contradicts num_local_experts, which is 9"
    )
    assert read({**MOE, "num_local_experts": 8}).num_layers == 4


@pytest.mark.parametrize(("word", "dtype"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_dtype_has_two_names_and_is_bf16_with_a_note_without_either(word: str, dtype: str) -> None:
    config = without(TINY, "torch_dtype")
    for key in ("dtype", "torch_dtype"):
        model = read({**config, key: word})
        assert (model.dtype, model.weight_dtype) == (dtype, dtype)
    without_either = read(config)
    assert (without_either.dtype, without_either.weight_dtype) == ("bf16", "bf16")
    assert "config.json has no dtype" in without_either.notes[0]
    assert (
        "torch_dtype: must be one of bfloat16, float16, float32, not 'int4'"
        in refusal({**config, "torch_dtype": "int4"})[0]
    )


def test_embeddings_are_tied_as_the_architecture_would_have_it() -> None:
    gemma = {**TINY, "architectures": ["GemmaForCausalLM"], "head_dim": 16}
    assert [read(c).tie_embeddings for c in (TINY, gemma)] == [False, True]
    assert read({**TINY, "tie_word_embeddings": True}).tie_embeddings
    assert not read({**gemma, "tie_word_embeddings": False}).tie_embeddings
    assert "must be true or false, not 'no'" in refusal({**TINY, "tie_word_embeddings": "no"})[0]


def test_a_mixture_of_experts_may_have_dense_layers_and_a_shared_expert() -> None:
    model = read({**MOE, "mlp_only_layers": [0], "shared_expert_intermediate_size": 96})
    moe = MoeFeedForward(experts=8, experts_per_token=2, intermediate_size=48, shared_intermediate_size=96)
    assert [(g.count, g.feed_forward) for g in model.layers] == [
        (1, DenseFeedForward(intermediate_size=160)),
        (3, moe),
    ]
    every_second = read({**MOE, "decoder_sparse_step": 2})
    assert [g.feed_forward.kind for g in every_second.layers] == ["dense", "moe", "dense", "moe"]


def test_the_language_part_of_a_multimodal_config_is_read_and_said() -> None:
    nested = without(TINY, "architectures")
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": nested,
        "vision_config": {},
    }
    model = read(config)
    assert model.source == "Hugging Face config.json of a Mistral3ForConditionalGeneration, language part only"
    assert model.layers == read(TINY).layers
    assert refusal({**config, "text_config": {**nested, "vocab_size": 0}}) == [
        "config.json:11:3: text_config.vocab_size: must be a whole number of at least 1, not 0"
    ]


# --- sliding windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("MistralForCausalLM", {}, [None] * 4),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 4),
        ("MistralForCausalLM", {"sliding_window": 32}, [32] * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 32}, [None] * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "use_sliding_window": False}, [None] * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 32],
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"] * 2},
            [None, 32, None, 32],
        ),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"] * 4}, [None] * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "use_sliding_window": True}, [None] * 4),
        ("Gemma2ForCausalLM", {"sliding_window": 32}, [32, None, 32, None]),
        ("Gemma3ForCausalLM", {}, [4096] * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 32, "sliding_window_pattern": 3}, [32, 32, None, 32]),
    ],
)
def test_which_layers_slide(architecture: str, keys: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read({**TINY, **keys, "architectures": [architecture]})) == expected


def test_equal_neighbours_are_one_group_and_order_is_kept() -> None:
    kinds = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"]
    model = read({**TINY, "architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": kinds})
    assert [(g.count, g.attention.kind) for g in model.layers] == [
        (2, "sliding"),
        (1, "full"),
        (1, "sliding"),
    ]


@pytest.mark.parametrize(
    ("architecture", "keys", "told"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, "sliding_window: is not known for this architecture"),
        (
            "Gemma3ForCausalLM",
            {"sliding_window_pattern": "every sixth"},
            "sliding_window_pattern: must be a whole number of at least 1",
        ),
        (
            "MistralForCausalLM",
            {"sliding_window": "8"},
            "sliding_window: must be a whole number of at least 1",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["full_attention"]},
            "must be a list of 4 layer kinds, not 1 kinds",
        ),
        (
            "Qwen3ForCausalLM",
            {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
            "layer_types: the layer kind linear_attention is not modelled; modelled: full_attention,",
        ),
        (
            "MistralForCausalLM",
            {"layer_types": ["sliding_attention"] * 4},
            "sliding_window: is required and missing",
        ),
    ],
)
def test_windows_that_cannot_be_told_are_refused(architecture: str, keys: dict[str, Any], told: str) -> None:
    (line,) = refusal({**TINY, **keys, "architectures": [architecture]})
    assert told in line


# --- latent and linear attention --------------------------------------------------------------------------

LATENT = {
    **{key: value for key, value in TINY.items() if key != "num_key_value_heads"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
HYBRID = {
    **MOE,
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}


def test_a_latent_model_has_dense_layers_first_and_shared_experts_counted() -> None:
    mla = MlaAttention(heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    moe = MoeFeedForward(experts=8, experts_per_token=2, intermediate_size=48, shared_intermediate_size=96)
    model = read(LATENT)
    assert [(g.count, g.attention, g.feed_forward) for g in model.layers] == [
        (1, mla, DenseFeedForward(intermediate_size=160)),
        (3, mla, moe),
    ]
    assert read({**LATENT, "q_lora_rank": 24}).layers[0].attention == mla.model_copy(update={"q_lora_rank": 24})
    (group,) = read({**LATENT, "first_k_dense_replace": 0, "n_shared_experts": None}).layers
    assert group.feed_forward == moe.model_copy(update={"shared_intermediate_size": 0})
    every_second = read({**LATENT, "num_hidden_layers": 5, "moe_layer_freq": 2})
    assert [g.feed_forward.kind for g in every_second.layers] == ["dense", "moe", "dense", "moe"]
    assert [g.count for g in every_second.layers] == [2, 1, 1, 1], "the layers whose number is a multiple of two"


def test_a_hybrid_model_says_which_layers_are_linear() -> None:
    linear = LinearAttention(heads=4, key_heads=2, key_dim=8, value_dim=16, conv_width=4)
    full = FullAttention(heads=4, kv_heads=2, head_dim=32, output_gate=True, qk_norm=True)
    by_interval = read({**HYBRID, "full_attention_interval": 2})
    assert [(g.count, g.attention) for g in by_interval.layers] == [(1, linear), (1, full)] * 2
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    by_list = read({**HYBRID, "layer_types": kinds, "full_attention_interval": 2})
    assert [(g.count, g.attention) for g in by_list.layers] == [(2, linear), (1, full), (1, linear)]
    (told,) = refusal({**HYBRID, "layer_types": [*kinds[:3], "sliding_attention"]})
    assert told.endswith("sliding_attention is not modelled; modelled: full_attention, linear_attention")
    assert [g.attention.kind for g in read(HYBRID).layers] == ["linear", "full"], "every fourth unless told"


def test_sparse_attention_of_a_latent_model_is_still_refused() -> None:
    (told,) = refusal({**LATENT, "index_topk": 2048})
    assert told.endswith("index_topk: sparse attention: not modelled")


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_a_latent_model_lacking_a_size_is_refused(key: str) -> None:
    assert f"{key}: is required and missing" in refusal(without(LATENT, key))[0]


# --- refusals ---------------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_named_with_the_known_ones_and_no_relative_is_suggested() -> None:
    (told,) = refusal({**TINY, "architectures": ["LlamaForCasualLM"]})
    assert told.startswith("config.json:2:2: architectures: LlamaForCasualLM is not modelled; write a model spec")
    assert "`simtune schema model`" in told
    assert "; modelled: LlamaForCausalLM, Mistral" in told
    assert told.endswith(", ".join(ARCHITECTURES))
    assert "did you mean" not in told
    for wrong in (None, [], "LlamaForCausalLM", ["A", "B"]):
        assert "must be a list with the one architecture" in refusal({**TINY, "architectures": wrong})[0]
    assert "must be a list with the one architecture" in refusal(without(TINY, "architectures"))[0]
    assert refusal([]) == ["config.json:1:1: a Hugging Face config.json was expected: a JSON object"]  # type: ignore[arg-type]


@pytest.mark.parametrize("key", NOT_MODELLED)
def test_a_layer_kind_that_is_not_modelled_is_refused_by_its_key(key: str) -> None:
    (told,) = refusal({**TINY, key: 3})
    assert told == f"config.json:13:2: {key}: {NOT_MODELLED[key]}: not modelled"
    empty: tuple[Any, ...] = (None, 0, False, [])
    for nothing in empty:
        assert read({**TINY, key: nothing}) == read(TINY)


def test_experts_in_a_dense_architecture_are_refused() -> None:
    (told,) = refusal({**TINY, "num_local_experts": 8})
    assert told.endswith("num_local_experts: experts are not known for this dense architecture")


def test_every_problem_of_a_config_is_told_at_once_in_file_order() -> None:
    config = {**without(TINY, "vocab_size"), "hidden_size": -1, "num_key_value_heads": 0, "kv_lora_rank": 512}
    assert refusal(config) == [
        "config.json:1:1: vocab_size: is required and missing",
        "config.json:5:2: hidden_size: must be a whole number of at least 1, not -1",
        "config.json:9:2: num_key_value_heads: must be a whole number of at least 1, not 0",
        "config.json:12:2: kv_lora_rank: latent attention (MLA): not modelled",
    ]


def test_sizes_that_do_not_fit_each_other_are_told_in_the_spec_s_words() -> None:
    assert refusal({**TINY, "num_key_value_heads": 3}) == [
        "config.json: layers.0.attention: heads (4) must be a multiple of kv_heads (3)"
    ]
    assert refusal({**MOE, "num_experts_per_tok": 9}) == [
        "config.json: layers.0.feed_forward: experts_per_token (9) exceeds experts (8)"
    ]


@pytest.mark.parametrize("key", sorted(set(TINY) - {"architectures", "num_key_value_heads", "torch_dtype"}))
@pytest.mark.parametrize("wrong", [0, -4, 2.5, "64", True, [64], {"a": 1}])
def test_a_size_that_is_no_positive_whole_number_is_refused(key: str, wrong: object) -> None:
    assert any(f" {key}: must be a whole number of at least 1, not " in line for line in refusal({**TINY, key: wrong}))
    assert any(f" {key}: is required and missing" in line for line in refusal(without(TINY, key)))


# --- quantisation -----------------------------------------------------------------------------------------

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None, **block: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **block}


EIGHT = {"num_bits": 8, "type": "float", "dynamic": True}


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": False}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8_wo"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "nvfp4"),
        (compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, EIGHT), "fp8"),
        (
            compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, EIGHT),
            "fp8_block",
        ),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "int"}), "int8"),
        (compressed({"num_bits": 4, "type": "int", "group_size": 128}, None, ignore=["lm_head"]), "int4"),
        (compressed({"num_bits": 8, "type": "int", "group_size": 128}, None), "int8_wo"),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 4, "type": "float"}), "nvfp4"),
    ],
)
def test_a_quantisation_block_says_what_weights_are_kept_in(block: dict[str, Any], dtype: str) -> None:
    model = read({**TINY, "quantization_config": block})
    assert (model.dtype, model.weight_dtype, model.kv_dtype) == ("bf16", dtype, None)
    assert {model.dtype_of(module) for module in ("attention", "dense", "experts")} == {dtype}
    assert model.dtype_of("head") == "bf16", "the head is never quantised"


EXPERTS_ALONE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"]


@pytest.mark.parametrize(
    ("left_out", "dtypes"),
    [
        (["lm_head", "model.layers.*.self_attn*"], ("bf16", "nvfp4", "nvfp4")),
        ([f"model.layers.{i}.self_attn" for i in range(4)], ("bf16", "nvfp4", "nvfp4")),
        (["self_attn"], ("bf16", "nvfp4", "nvfp4")),
        (EXPERTS_ALONE, ("bf16", "bf16", "nvfp4")),
        (["gate", "e_score_correction_bias", "lm_head"], ("nvfp4", "nvfp4", "nvfp4")),
        (["re:.*mlp.experts.*"], ("nvfp4", "nvfp4", "bf16")),
    ],
)
def test_modules_that_are_left_out_stay_in_sixteen_bits(left_out: list[str], dtypes: tuple[str, ...]) -> None:
    """The router's name is the beginning of others and means none of them."""
    block = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": left_out, "kv_cache_quant_algo": "FP8"}
    model = read({**LATENT, "quantization_config": block})
    assert (model.dtype_of("attention"), model.dtype_of("dense"), model.dtype_of("experts")) == dtypes
    assert model.kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ({"quant_method": "hqq"}, "the method hqq is not modelled; modelled: fp8,"),
        ({"quant_method": "awq", "bits": 3}, "the method awq with 3 bits is not modelled"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*q_proj": {}}}, "gptq with rules by module (dynamic)"),
        (
            {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["q_proj"]]},
            "(modules_in_block_to_quantize)",
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "for each block of [64, 64] weights"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo MIXED_PRECISION is not modelled"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors without config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"num_bits": 8, "type": "int"}},
                    "b": {"weights": {"num_bits": 4, "type": "int"}},
                },
            },
            "formats of parts of model.layers.0.self_attn.q_proj differ (int4, int8_wo): not modelled",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": []}}}, "a group without weights: {"),
        (compressed({"num_bits": 4, "type": "int"}, EIGHT), "weights of 4 bits (int) and activations of 8 bits"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp"]},
            "dense is quantised in some layers and not in others",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "transformer.h.0.attn"]},
            "it names transformer.h.0.attn, which is no module that is known here",
        ),
    ],
)
def test_quantisation_that_cannot_be_read_is_refused_with_the_reason(block: dict[str, Any], why: str) -> None:
    (line,) = refusal({**TINY, "quantization_config": block})
    assert "quantization_config: " in line
    assert why in line


def test_a_group_may_be_about_experts_alone() -> None:
    """As its targets say; layers and modules that they do not name stay in sixteen bits."""
    group = {"targets": ["re:.*mlp.experts.*"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
    block = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    model = read({**LATENT, "quantization_config": block})
    assert [model.dtype_of(module) for module in ("attention", "dense", "experts")] == ["bf16", "bf16", "int4"]
    group["targets"] = ["re:.*layers\\.1\\.mlp\\.experts.*"]
    assert "experts is quantised in some layers" in refusal({**LATENT, "quantization_config": block})[0]


FOUR = {"num_bits": 4, "type": "float", "group_size": 16}


@pytest.mark.parametrize(
    "targets", [["Linear"], ["re:.*self_attn.*", "re:.*mlp\\.(gate|up|down)_proj", "re:.*shared_experts.*"]]
)
def test_groups_of_different_formats_are_of_their_modules(targets: list[str]) -> None:
    """Experts in four bits, all else in eight: a group that names its modules outranks one of all products."""
    eight = {"targets": targets, "weights": {"num_bits": 8, "type": "float"}, "input_activations": EIGHT}
    four = {"targets": ["re:.*mlp\\.experts.*"], "weights": FOUR}
    block = {"quant_method": "compressed-tensors", "config_groups": {"a": eight, "b": four}, "ignore": ["lm_head"]}
    model = read({**LATENT, "quantization_config": block})
    assert [model.dtype_of(module) for module in ("attention", "dense", "experts", "head")] == [
        *("fp8", "fp8", "nvfp4", "bf16")
    ]
    block["ignore"] = ["lm_head", "re:.*self_attn.*"]
    assert read({**LATENT, "quantization_config": block}).dtype_of("attention") == "bf16"
    four["targets"] = ["re:.*layers\\.1\\.mlp\\.experts.*"]
    if targets == ["Linear"]:
        assert (
            "formats of experts differ between layers (fp8, nvfp4)"
            in refusal({**LATENT, "quantization_config": block})[0]
        )


def test_modelopt_states_mixed_formats_module_by_module() -> None:
    """As in hf_quant_config.json: every expert of every layer is named; what is not named stays in sixteen bits."""
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{name}_proj"
        for i in range(1, 4)
        for e in range(8)
        for name in ("up", "down")
    ]
    layers: dict[str, Any] = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    layers |= {f"model.layers.{i}.mlp.shared_experts.up_proj": {"quant_algo": "FP8"} for i in range(1, 4)}
    layers |= {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}}
    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model = read({**LATENT, "quantization_config": {**block, "kv_cache_quant_algo": "FP8"}})
    assert [model.dtype_of(module) for module in ("attention", "dense", "experts")] == ["bf16", "fp8", "nvfp4"]
    assert model.kv_dtype == "fp8"
    layers["model.layers.0.mlp.down_proj"] = "FP8"
    assert (
        "quantized_layers: model.layers.0.mlp.down_proj must be a mapping"
        in refusal({**LATENT, "quantization_config": block})[0]
    )


def test_a_linear_layer_has_names_of_its_own() -> None:
    """Of a hybrid model whose small projections are left out, all products are quantised."""
    small = [f"model.layers.{i}.linear_attn.{name}" for i in (0, 1, 2) for name in ("conv1d", "in_proj_ba")]
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [*small, "mtp.fc"]}
    assert read({**HYBRID, "quantization_config": block}).dtype_of("attention") == "fp8_block"
    block["modules_to_not_convert"] = ["re:.*linear_attn.*"]
    model = read({**HYBRID, "quantization_config": block})
    formats = {group.attention.kind: model.of_group(group).dtype_of("attention") for group in model.layers}
    assert formats == {"linear": "bf16", "full": "fp8_block"}


def test_experts_of_gpt_oss_alone_are_in_mxfp4() -> None:
    block = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    model = read({**MOE, "architectures": ["GptOssForCausalLM"], "intermediate_size": 48, "quantization_config": block})
    assert (model.weight_dtype, model.expert_dtype) == ("bf16", "mxfp4")


# --- settings ---------------------------------------------------------------------------------------------


def test_a_setting_is_of_the_config_or_of_the_model_that_was_read() -> None:
    document = yamlfile.parse(json.dumps({**MOE, "sliding_window": None}), "config.json")
    settings = [
        "num_hidden_layers=2",
        "head_dim=64",
        "dtype=fp16",
        "weight_dtype=fp8",
        "name=mine",
        "sliding_window=8",
        "use_sliding_window=true",
        "max_window_layers=1",
    ]
    model = from_config(document, "tiny", settings)
    assert (model.num_layers, model.dtype, model.weight_dtype, model.name) == (2, "fp16", "fp8", "mine")
    assert attention(model).head_dim == 64
    assert windows(model) == [None, 8]
    assert from_config(document, "tiny", ["layers.0.count=7"]).num_layers == 7


def test_a_setting_of_the_language_part_is_put_there() -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": without(TINY, "architectures")}
    document = yamlfile.parse(json.dumps(config), "config.json")
    assert from_config(document, "tiny", ["num_hidden_layers=3"]).num_layers == 3


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("num_hiden_layers=2", "num_hiden_layers: unknown key"),
        ("n_layers=2", "n_layers: unknown key"),
        ("num_hidden_layers=few", "--set: num_hidden_layers: must be a whole number of at least 1, not 'few'"),
        ("weight_dtype=int3", "weight_dtype: must be one of fp32"),
        ("kv_lora_rank=64", "kv_lora_rank: unknown key"),
    ],
)
def test_a_setting_that_means_nothing_is_an_error(setting: str, why: str) -> None:
    with pytest.raises(SpecError) as error:
        from_config(yamlfile.parse(json.dumps(TINY), "config.json"), "tiny", [setting])
    assert why in str(error.value)


# --- multimodal wrappers and families ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "part"),
    [
        ("LlavaForConditionalGeneration", {"text_config": {"model_type": "llama"}}),
        ("InternVLChatModel", {"llm_config": {"architectures": ["LlamaForCausalLM"]}}),
    ],
)
def test_a_wrapper_is_read_for_the_language_model_inside(wrapper: str, part: dict[str, dict[str, Any]]) -> None:
    ((key, inside),) = part.items()
    nested = {**without(TINY, "architectures"), **inside}
    model = read({"architectures": [wrapper], key: nested, "vision_config": {"hidden_size": 8}})
    assert model.layers == read(TINY).layers
    assert model.source == "Hugging Face config.json of a LlamaForCausalLM, language part only"
    nested["model_type"] = "mamba"
    (line,) = refusal({"architectures": [wrapper], key: without(nested, "architectures")})
    assert line.endswith(f"the language part of this {wrapper}, of model_type mamba, is not modelled")


def test_a_config_without_architectures_goes_by_its_model_type() -> None:
    assert read({**without(TINY, "architectures"), "model_type": "llama"}) == read(TINY)


def test_chunks_and_experts_of_llama_4_alternate_with_full_and_dense_layers() -> None:
    config = {**MOE, "architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 16, "intermediate_size_mlp": 320}
    model = read({**config, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2})
    assert windows(model) == [16, None, 16, None]
    assert [g.feed_forward.kind for g in model.layers] == ["dense", "moe", "dense", "moe"]
    dense, moe, *_ = (group.feed_forward for group in model.layers)
    assert isinstance(dense, DenseFeedForward)
    assert isinstance(moe, MoeFeedForward)
    assert dense.intermediate_size == 320
    assert moe.shared_intermediate_size == 160
    by_list = read({**config, "moe_layers": [0], "no_rope_layers": [1, 1, 1, 0]})
    assert windows(by_list) == [16, 16, 16, None]
    assert [g.feed_forward.kind for g in by_list.layers] == ["moe", "dense", "dense"]
    (line,) = refusal({**config, "no_rope_layers": [1, 1, 0]})
    assert line.endswith("no_rope_layers: must be a list of 4 numbers, not of 3")


def test_nemotron_h_has_layers_of_one_sublayer() -> None:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}
    config = {**TINY, **sizes, "architectures": ["NemotronHForCausalLM"]}
    model = read({**config, "hybrid_override_pattern": "MM*-"})
    assert [(g.count, g.attention.kind, g.feed_forward.kind) for g in model.layers] == [
        (2, "linear", "none"),
        (1, "full", "none"),
        (1, "none", "dense"),
    ]
    assert model.layers[0].attention == LinearAttention(
        heads=4, key_heads=2, key_dim=16, value_dim=8, conv_width=4, gates=1
    )
    assert model.layers[2].feed_forward == DenseFeedForward(intermediate_size=160, gated=False)
    kinds = ["linear_attention", "linear_attention", "full_attention", "mlp"]
    assert read({**config, "layers_block_type": kinds}) == model
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    moe = read({**config, **experts, "hybrid_override_pattern": "ME", "moe_shared_expert_intermediate_size": 32})
    assert moe.layers[1].feed_forward == MoeFeedForward(
        experts=8, experts_per_token=2, intermediate_size=24, shared_intermediate_size=32, gated=False
    )
    assert "the layer kind X is not modelled" in refusal({**config, "hybrid_override_pattern": "MX"})[0]
    assert "hybrid_override_pattern: is required" in refusal(config)[0]


def test_granite_4_mixes_mamba_and_attention() -> None:
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
    kinds = ["mamba", "mamba", "attention", "mamba"]
    config = {**TINY, **sizes, "architectures": ["GraniteMoeHybridForCausalLM"], "shared_intermediate_size": 96}
    dense = read({**config, "layer_types": kinds, "num_local_experts": 0})
    assert [g.attention.kind for g in dense.layers] == ["linear", "full", "linear"]
    assert dense.layers[0].feed_forward == DenseFeedForward(intermediate_size=96)
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    (moe, *_) = read({**config, **experts, "layer_types": kinds}).layers
    assert moe.feed_forward == MoeFeedForward(
        experts=8, experts_per_token=2, intermediate_size=160, shared_intermediate_size=96
    )
    assert "layer_types: is required and missing" in refusal(config)[0]


def test_falcon_shares_one_kv_head_or_as_many_as_it_says() -> None:
    falcon = {**without(TINY, "num_key_value_heads"), "architectures": ["FalconForCausalLM"]}
    assert attention(read(falcon)).kv_heads == 1
    assert attention(read({**falcon, "multi_query": False})).kv_heads == 4
    assert attention(read({**falcon, "new_decoder_architecture": True, "num_kv_heads": 2})).kv_heads == 2


def test_sparse_attention_is_told_by_the_architecture_that_has_it() -> None:
    indexer = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}
    model = read({**LATENT, **indexer, "architectures": ["DeepseekV32ForCausalLM"]})
    attention = model.layers[0].attention
    assert isinstance(attention, MlaAttention)
    assert (attention.index_topk, attention.index_heads, attention.index_head_dim) == (64, 2, 16)
    kinds = {**indexer, "q_lora_rank": 24, "indexer_types": ["full", "shared", "shared", "full"]}
    layers = read({**LATENT, **kinds, "architectures": ["GlmMoeDsaForCausalLM"]}).layers
    own, reusing = layers[0].attention, layers[1].attention
    assert isinstance(own, MlaAttention)
    assert isinstance(reusing, MlaAttention)
    assert own.matrices(64) - reusing.matrices(64) == 2 * 16 * 24 + (16 + 2) * 64
    assert (own.index_bytes, reusing.index_bytes) == (20, 0)
    first = {**indexer, "indexer_types": ["shared", "full", "full", "full"]}
    assert (
        "the first layer must have an indexer"
        in refusal({**LATENT, **first, "architectures": ["GlmMoeDsaForCausalLM"]})[0]
    )


def test_embeddings_narrower_than_the_model_are_refused() -> None:
    opt = {**TINY, "architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 32}
    assert "word_embed_proj_dim: embeddings narrower than the hidden size" in refusal(opt)[0]
