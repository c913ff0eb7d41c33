"""Tokens that processors make of images, worked out by hand from their formulas; and vision encoders of configs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.specs.catalog import load_model
from simtune.specs.tower import MediaShape
from simtune.specs.video import Clip, SoundTurns
from simtune.specs.vision import NativeSizing, Vision
from tests.specs.published.configs import PUBLISHED
from tests.specs.test_hf_config import read

TEXT = {
    "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def vision(architecture: str, block: dict[str, Any], model_type: str = "qwen3", **more: Any) -> Vision:
    model = read(
        {
            "architectures": [architecture],
            "text_config": {"model_type": model_type, **TEXT},
            "vision_config": block,
            **more,
        }
    )
    assert model.vision is not None
    return model.vision


QWEN25 = ("Qwen2_5_VLForConditionalGeneration", {"depth": 32, "hidden_size": 1280}, "qwen2_5_vl_text")
QWEN3 = ("Qwen3VLForConditionalGeneration", {"depth": 27, "hidden_size": 1152}, "qwen3_vl_text")
MISTRAL = ("Mistral3ForConditionalGeneration", {"hidden_size": 1024, "image_size": 1540}, "mistral")
INTERN = ("InternVLChatModel", {"hidden_size": 1024}, "qwen3")
KIMI = ("KimiVLForConditionalGeneration", {"hidden_size": 1152}, "llama")
LLAMA4 = ("Llama4ForConditionalGeneration", {"hidden_size": 1408}, "llama4_text")
OMNI25 = ("Qwen2_5OmniModel", {"hidden_size": 1280, "out_hidden_size": 3584}, "qwen2_5_omni_text")
OMNI3 = (
    "Qwen3OmniMoeForConditionalGeneration",
    {"hidden_size": 1152, "out_hidden_size": 2048},
    "qwen3_omni_moe_text",
)
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 128,
}  # fmt: skip
GEMMA3 = ("Gemma3ForConditionalGeneration", {"hidden_size": 1152}, "gemma3_text")


@pytest.mark.parametrize(
    ("of", "sides", "shape"),
    [
        # 1024 / 28 = 36.6 -> 37 tokens a side, four patches each; two tokens around them
        (QWEN25, (1024, 1024), MediaShape(1, 4 * 37 * 37, 37 * 37, 37 * 37 + 2)),
        # 1280 / 28 = 45.7 -> 46, 720 / 28 = 25.7 -> 26
        (QWEN25, (1280, 720), MediaShape(1, 4 * 46 * 26, 46 * 26, 46 * 26 + 2)),
        # too large: sides over sqrt(48e6 / 12,845,056) = 1.933: 8000 / 1.933 / 28 = 147.8 -> 147, 6000: 110.8 -> 110
        (QWEN25, (8000, 6000), MediaShape(1, 4 * 147 * 110, 147 * 110, 147 * 110 + 2)),
        # too small: sides times sqrt(3136 / 300) = 3.233: 30 x 3.233 / 28 = 3.46 -> 4, 10 x 3.233 / 28 = 1.15 -> 2
        (QWEN25, (30, 10), MediaShape(1, 4 * 4 * 2, 8, 10)),
        # patches of 16: 1024 / 32 = 32, 768 / 32 = 24
        (QWEN3, (1024, 768), MediaShape(1, 4 * 32 * 24, 32 * 24, 32 * 24 + 2)),
        # every row of 37 ends with a token: 1024 / 28 = 36.6 -> 37, 768 / 28 = 27.4 -> 28
        (MISTRAL, (1024, 768), MediaShape(1, 4 * 37 * 28, 37 * 28, 38 * 28)),
        # halved to 1540 x 770: 55 x 28
        (MISTRAL, (3080, 1540), MediaShape(1, 4 * 55 * 28, 55 * 28, 56 * 28)),
        # 4 x 3 tiles of 448 have its ratio, and one more for the whole image; 256 tokens each
        (INTERN, (1024, 768), MediaShape(13, 1024, 13 * 256, 13 * 256 + 2)),
        (INTERN, (448, 448), MediaShape(1, 1024, 256, 258)),
        # 2 x 2 of ratio 1, as 800 x 800 fills more than half of it, and not half of 3 x 3
        (INTERN, (800, 800), MediaShape(5, 1024, 5 * 256, 5 * 256 + 2)),
        # 73 x 54 = 3,942 patches fit 4,096; padded to 37 x 28 tokens
        (KIMI, (1024, 768), MediaShape(1, 4 * 37 * 28, 37 * 28, 37 * 28 + 4)),
        # only 4 x 4 tiles of 336 do not shrink it; each is followed by a token, three are around them
        (LLAMA4, (1024, 1024), MediaShape(17, 576, 17 * 144, 17 * 144 + 16 + 3)),
        (LLAMA4, (300, 200), MediaShape(1, 576, 144, 144 + 3)),
        # always one square of 64 x 64 patches, in 256 tokens, between four others
        (GEMMA3, (300, 200), MediaShape(1, 4096, 256, 260)),
        (GEMMA3, (3000, 200), MediaShape(1, 4096, 256, 260)),
    ],
)  # fmt: skip
def test_tokens_of_an_image_are_those_of_its_processor(
    of: tuple[str, dict[str, Any], str], sides: tuple[int, int], shape: MediaShape
) -> None:
    assert vision(*of).shape(*sides) == shape


@pytest.mark.parametrize("of", [QWEN25, QWEN3, MISTRAL, INTERN, KIMI, LLAMA4, GEMMA3], ids=lambda of: of[0])
@given(width=st.integers(1, 6000), height=st.integers(1, 6000))
def test_no_image_has_more_vectors_than_the_largest(
    of: tuple[str, dict[str, Any], str], width: int, height: int
) -> None:
    """What engines reserve for the largest image is enough; sides of extreme ratio, which Qwen's processor refuses, and
    padding of narrow ones, are left out."""
    if max(width, height) <= 20 * min(width, height) and of[0] != KIMI[0]:
        encoder = vision(*of)
        assert encoder.shape(width, height).vectors <= encoder.largest.vectors


def test_parameters_of_encoders_are_the_published_ones() -> None:
    """Gemma 3: 417 M of the encoder (technical report, table 1), without its projector. Llama 4: as the index of the
    checkpoint has them besides its language part."""
    gemma, llama = (load_model(name).vision for name in ("gemma-3-27b", "llama-4-scout"))
    assert gemma is not None
    assert llama is not None
    assert (gemma.parameters - 1152 * 5376) / 1e6 == pytest.approx(417, abs=1)
    matrices = 34 * 12 * 1408**2 + 5632 * 4096 + 4096 * 4096 + 4096 * 5120
    assert llama.parameters == matrices + 1408 * (3 * 14 * 14 + 577)


@pytest.mark.parametrize(
    ("of", "parameters"),
    [
        # transformers 5.24, modules made of the published sizes without memory: all parameters, biases and norms too
        (OMNI25, 676_550_144),
        (OMNI3, 538_631_408),
    ],
)  # fmt: skip
def test_parameters_of_omni_encoders_are_those_of_transformers(
    of: tuple[str, dict[str, Any], str], parameters: int
) -> None:
    assert omni(*of).parameters == pytest.approx(parameters, rel=1e-3)


def omni(architecture: str, block: dict[str, Any], model_type: str) -> Vision:
    """Read the vision encoder of the thinker of an Omni model."""
    text = {"model_type": model_type, **TEXT, **(EXPERTS if "Moe" in architecture else {})}
    model = read({"architectures": [architecture], "thinker_config": {"text_config": text, "vision_config": block}})
    assert model.vision is not None
    assert model.source is not None
    assert model.source.endswith(", language and vision parts")
    return model.vision


@pytest.mark.parametrize(
    ("sides", "of_older", "of_newer"),
    [
        # tokens of an image, and of one group of frames of a video, by `smart_resize` of transformers 5.8.1
        ((1280, 720), (1196, 720), (880, 720)),
        ((640, 360), (299, 299), (220, 220)),
        ((1920, 1080), (2691, 720), (2040, 720)),
        ((320, 240), (99, 140), (80, 140)),
        ((224, 224), (64, 144), (49, 144)),
        ((100, 60), (8, 135), (6, 135)),
        ((3840, 2160), (10549, 720), (8160, 720)),
    ],
)
def test_tokens_of_omni_models(sides: tuple[int, int], of_older: tuple[int, int], of_newer: tuple[int, int]) -> None:
    """Videos have limits of their own, and no times before their frames: 10 s at two frames a second are ten groups."""
    for of, (image, group) in ((OMNI25, of_older), (OMNI3, of_newer)):
        encoder = omni(*of)
        assert encoder.shape(*sides) == (1, 4 * image, image, image + 2)
        assert encoder.clip_shape(Clip(*sides, 10.0, 30.0)) == (10, 4 * group, 10 * group, 10 * group + 2)
    assert omni(*OMNI3).projectors == 4


def test_turns_of_omni_models() -> None:
    older, newer = (of.video.sound for of in (omni(*OMNI25), omni(*OMNI3)) if of.video is not None)
    assert (older, newer) == (SoundTurns(positions_per_s=25, chunk_s=2), SoundTurns(positions_per_s=13, fps=1.0))


def test_windows_of_qwen() -> None:
    """112 pixels are 8 patches a side; four of 32 layers attend to all."""
    encoder = vision(*QWEN25)
    assert (encoder.window, encoder.full_layers, encoder.layers, encoder.gated) == (64, 4, 32, True)
    assert vision(*QWEN3).projectors == 4


def test_a_config_whose_encoder_is_unknown_or_damaged_is_read_for_its_language() -> None:
    config = PUBLISHED["gemma-3-27b-it"].config
    assert read(config).vision is not None
    for damaged in ({}, {"hidden_size": 8}, {"hidden_size": "1152"}, {"hidden_size": 1152, "patch_size": 0.5}):
        model = read({**config, "vision_config": damaged})
        # a size that is no number has the default of the family
        assert (model.vision is None) == ("patch_size" not in damaged)
        assert model.layers == read(config).layers
    unknown = read({**config, "architectures": ["Gemma3ForCausalLM"]})
    assert unknown.vision is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 7}, "hidden_size (1280) must be a multiple of heads (7)"),
        ({"full_layers": 33}, "full_layers (33) exceeds layers (32)"),
        ({"window": None}, "full_layers requires a window"),
        ({"projector": []}, "at least 1"),
    ],
)
def test_an_impossible_encoder_is_refused(change: dict[str, Any], why: str) -> None:
    sizes = {**vision(*QWEN25).model_dump(), **change}
    with pytest.raises(ValidationError) as error:
        Vision.model_validate(sizes)
    assert why in str(error.value)


def test_limits_of_the_area_are_in_order() -> None:
    with pytest.raises(ValidationError, match="exceeds max_pixels"):
        NativeSizing(min_pixels=10, max_pixels=9)
