"""A Hugging Face config.json is read as it is; what simtune does not model is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtune.costs.memory import weights_bytes
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
from simtune.specs.plan import Parallelism

ROOT = Path(__file__).resolve().parents[2]

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


def windows(model: Model) -> list[int | None]:
    """The window of every layer in order."""
    return [
        group.attention.window if isinstance(group.attention, SlidingAttention) else None
        for group in model.layers
        for _ in range(group.count)
    ]


# --- published models -------------------------------------------------------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "max_position_embeddings": 40960,
        "max_window_layers": 64,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
}


PUBLISHED["deepseek-v3"] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_shipped_model(name: str) -> None:
    shipped = Model.from_file(ROOT / "models" / f"{name}.yaml")
    model = from_config(yamlfile.parse(json.dumps(PUBLISHED[name]), "config.json"), name)
    assert model.source == f"Hugging Face config.json of a {PUBLISHED[name]['architectures'][0]}"
    assert model.model_copy(update={"hf": shipped.hf, "source": shipped.source}) == shipped


def test_the_published_config_of_qwen3_next_gives_80_billion_parameters() -> None:
    model = read(QWEN3_NEXT)
    assert [g.attention.kind for g in model.layers] == ["linear", "full"] * 12
    assert [g.count for g in model.layers] == [3, 1] * 12
    assert weights_bytes(model, Parallelism(), 0) / 2 == pytest.approx(80e9, rel=0.01)


# --- keys and their meaning -------------------------------------------------------------------------------


def test_head_dim_is_derived_only_when_it_is_not_given() -> None:
    assert read(TINY).layers[0].attention == FullAttention(heads=4, kv_heads=2, head_dim=16)
    assert read({**TINY, "head_dim": 48}).layers[0].attention.head_dim == 48
    assert read({**TINY, "head_dim": None}).layers[0].attention.head_dim == 16
    qwen = {**TINY, "architectures": ["Qwen3ForCausalLM"]}  # its default is 128, not hidden_size / heads
    assert refusal(qwen) == ["config.json:1:1: head_dim: is required and missing"]
    assert "66 is no multiple of 4 heads; give head_dim" in refusal({**TINY, "hidden_size": 66})[0]


def test_llama_without_kv_heads_is_multi_head_attention_and_others_must_say() -> None:
    assert read(without(TINY, "num_key_value_heads")).layers[0].attention.kv_heads == 4
    mistral = without({**TINY, "architectures": ["MistralForCausalLM"]}, "num_key_value_heads")
    assert refusal(mistral) == ["config.json:1:1: num_key_value_heads: is required and missing"]


@pytest.mark.parametrize("experts", ALIASES["experts"])
@pytest.mark.parametrize("per_token", ALIASES["experts_per_token"])
def test_experts_go_by_many_names(experts: str, per_token: str) -> None:
    config = without(without(MOE, "num_experts"), "num_experts_per_tok")
    model = read({**config, experts: 16, per_token: 4})
    assert model.layers[0].feed_forward == MoeFeedForward(experts=16, experts_per_token=4, intermediate_size=48)
    assert model.layers[0].attention.head_dim == 32


def test_two_names_that_disagree_are_refused() -> None:
    assert refusal({**MOE, "num_local_experts": 9})[0].endswith(
        "num_experts: 8 contradicts num_local_experts, which is 9"
    )
    assert read({**MOE, "num_local_experts": 8}).num_layers == 4


@pytest.mark.parametrize(("word", "dtype"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_dtype_has_two_names_and_none_is_guessed(word: str, dtype: str) -> None:
    config = without(TINY, "torch_dtype")
    for key in ("dtype", "torch_dtype"):
        model = read({**config, key: word})
        assert (model.dtype, model.weight_dtype) == (dtype, dtype)
    assert "dtype: is required and missing (also read: torch_dtype): one of bfloat16," in refusal(config)[0]
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


def test_fp8_weights_are_read_and_other_quantisation_is_refused_by_name() -> None:
    fp8 = read({**TINY, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    assert (fp8.dtype, fp8.weight_dtype) == ("bf16", "fp8")
    for method in ("awq", "gptq"):
        four = read({**TINY, "quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}})
        assert (four.dtype, four.weight_dtype) == ("bf16", "int4")
        (told,) = refusal({**TINY, "quantization_config": {"quant_method": method, "bits": 8}})
        assert f"quantization_config: the method {method} with 8 bits is not modelled" in told
    for method in ("awq", "mxfp4", "compressed-tensors"):
        (told,) = refusal({**TINY, "quantization_config": {"quant_method": method}})
        assert f"quantization_config: the method {method} is not modelled; modelled: fp8, awq and gptq with" in told


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
        ("LlamaForCausalLM", {"sliding_window": 8}, "sliding_window: is not known for a LlamaForCausalLM"),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 8, "head_dim": 8},
            "layer_types: is missing: which layers use",
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True},
            "max_window_layers: is required",
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
    full = FullAttention(heads=4, kv_heads=2, head_dim=32, output_gate=True)
    by_interval = read({**HYBRID, "full_attention_interval": 2})
    assert [(g.count, g.attention) for g in by_interval.layers] == [(1, linear), (1, full)] * 2
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    by_list = read({**HYBRID, "layer_types": kinds, "full_attention_interval": 2})
    assert [(g.count, g.attention) for g in by_list.layers] == [(2, linear), (1, full), (1, linear)]
    (told,) = refusal({**HYBRID, "layer_types": [*kinds[:3], "sliding_attention"]})
    assert told.endswith("sliding_attention is not modelled; modelled: full_attention, linear_attention")
    assert "full_attention_interval: is required and missing" in refusal(HYBRID)[0]


def test_sparse_attention_of_a_latent_model_is_still_refused() -> None:
    (told,) = refusal({**LATENT, "index_topk": 2048})
    assert told.endswith("index_topk: sparse attention: not modelled")


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_a_latent_model_lacking_a_size_is_refused(key: str) -> None:
    assert f"{key}: is required and missing" in refusal(without(LATENT, key))[0]


# --- refusals ---------------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    (told,) = refusal({**TINY, "architectures": ["LlamaForCasualLM"]})
    assert told.startswith(
        "config.json:2:2: architectures: LlamaForCasualLM is not modelled, did you mean LlamaForCausalLM?"
    )
    assert told.endswith(", ".join(ARCHITECTURES))
    for wrong in (None, [], "LlamaForCausalLM", ["A", "B"]):
        assert "must be a list with the one architecture" in refusal({**TINY, "architectures": wrong})[0]
    assert "must be a list with the one architecture" in refusal(without(TINY, "architectures"))[0]
    assert refusal([]) == ["config.json:1:1: a Hugging Face config.json was expected: a JSON object"]  # type: ignore[arg-type]


@pytest.mark.parametrize("key", NOT_MODELLED)
def test_a_layer_kind_that_is_not_modelled_is_refused_by_its_key(key: str) -> None:
    (told,) = refusal({**TINY, key: 3})
    assert told == f"config.json:13:2: {key}: {NOT_MODELLED[key]}: not modelled"
    for nothing in (None, 0, False, []):
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
