"""Tokens that processors make of recordings, beside those of the processors themselves; audio encoders of configs.

The table was made with vLLM 0.32 and transformers 5.19 on a processor, with noise at 16 kHz: frames by
`WhisperFeatureExtractor` called as each family's processor calls it, tokens by `_get_feat_extract_output_lengths` of
vllm/model_executor/models/qwen2_audio.py and qwen3_omni_moe_thinker.py, stretches that attend to themselves by
`get_audio_cu_seqlens` of transformers, and for Voxtral padding and tokens by vLLM's `MistralCommonFeatureExtractor`
with the settings of Voxtral Mini (12.5 tokens a second, chunks of 30 s).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.errors import SpecError
from simtune.specs.audio import Audio
from simtune.specs.catalog import load_model
from tests.specs.test_hf_config import read
from tests.specs.test_vision import EXPERTS, TEXT

QWEN2 = ("Qwen2AudioForConditionalGeneration", "qwen2", {"d_model": 1280})
VOXTRAL = ("VoxtralForConditionalGeneration", "llama", {"hidden_size": 1280, "intermediate_size": 5120})
OMNI25 = ("Qwen2_5OmniModel", "qwen2_5_omni_text", {"d_model": 1280, "output_dim": 3584})
OMNI3 = ("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe_text", {"d_model": 1280, "output_dim": 2048})

# seconds; tokens for Qwen2-Audio; patches, longest stretch and tokens for Qwen2.5-Omni; tokens for Qwen3-Omni, Voxtral
TABLE = [
    (0.025, 1, (2, 2, 1), 1, 375),
    (0.1, 2, (5, 5, 2), 2, 375),
    (0.5, 12, (25, 25, 12), 7, 375),
    (1.0, 25, (50, 50, 25), 13, 375),
    (2.0, 50, (100, 100, 50), 26, 375),
    (3.337, 83, (167, 100, 83), 44, 375),
    (10.0, 250, (500, 100, 250), 130, 375),
    (12.5, 312, (625, 100, 312), 163, 375),
    (29.99, 750, (1500, 100, 750), 390, 375),
    (30.0, 750, (1500, 100, 750), 390, 375),
    (30.01, 750, (1501, 100, 750), 391, 750),
    (61.3, 750, (3065, 100, 1532), 797, 1125),
    (100.0, 750, (5000, 100, 2500), 1300, 1500),
    (290.0, 750, (14500, 100, 7250), 3770, 3750),
]


def audio(architecture: str, model_type: str, block: dict[str, Any], **more: Any) -> Audio:
    """Read the encoder of a config; those of the Omni families are in a part of their own."""
    experts = EXPERTS if "Moe" in architecture else {}
    parts = {"text_config": {"model_type": model_type, **TEXT, **experts}, "audio_config": {**block, **more}}
    parts = {"thinker_config": parts} if "Omni" in architecture else parts
    model = read({"architectures": [architecture], **parts})
    assert model.source is not None
    assert model.source.endswith(", language and audio parts")
    assert model.audio is not None
    return model.audio


@pytest.mark.parametrize(("seconds", "of_qwen2", "of_omni25", "of_omni3", "of_voxtral"), TABLE)
def test_tokens_of_a_recording_are_those_of_its_processor(
    seconds: float, of_qwen2: int, of_omni25: tuple[int, int, int], of_omni3: int, of_voxtral: int
) -> None:
    """Two tokens more are around a recording, one before it for Voxtral; silence fills chunks of 30 s for Whisper's
    encoders."""
    qwen2, omni25, omni3, voxtral = (audio(*of).shape(seconds) for of in (QWEN2, OMNI25, OMNI3, VOXTRAL))
    assert qwen2 == (1, 1500, of_qwen2, of_qwen2 + 2)
    patches, stretch, tokens = of_omni25
    assert omni25 == (1, patches, tokens, tokens + 2)
    assert min(patches, audio(*OMNI25).window or 0) == stretch
    assert omni3 == (1, of_omni3, of_omni3, of_omni3 + 2)
    assert voxtral == (of_voxtral // 375, 1500, of_voxtral, of_voxtral + 1)


def test_parameters_of_encoders_are_the_published_ones() -> None:
    """Voxtral: an encoder of 640 M, which is Whisper's, and an adapter of 25 M (arXiv 2507.13264, table 1). Qwen3-Omni:
    650 M with its projector (arXiv 2509.17765)."""
    voxtral, omni3 = load_model("voxtral-mini-3b").audio, audio(*OMNI3)
    assert voxtral is not None
    adapter = sum(n * k for n, k in voxtral.projector_products)
    assert adapter / 1e6 == pytest.approx(25, abs=0.5)
    assert (voxtral.parameters - adapter) / 1e6 == pytest.approx(640, abs=5)
    assert omni3.parameters / 1e6 == pytest.approx(650, abs=5)


WHISPER = {
    # matrices and tables of WhisperEncoder of transformers 5.24, made of the published sizes without memory; with
    # biases and norms the largest one has 636,968,960 parameters
    "openai/whisper-large-v3-turbo": 636_472_320, "openai/whisper-medium": 306_917_376,
    "openai/whisper-small": 88_040_448,
}  # fmt: skip
ULTRAVOX: dict[str, Any] = {
    "architectures": ["UltravoxModel"], "model_type": "ultravox", "audio_model_id": "openai/whisper-large-v3-turbo",
    "hidden_size": 4096, "projector_act": "swiglu", "projector_ln_mid": True, "stack_factor": 8,
    "text_config": {"model_type": "llama", **TEXT},
}  # fmt: skip


def ultravox(**changes: Any) -> Audio | None:
    return read({**ULTRAVOX, **changes}).audio


@pytest.mark.parametrize(
    ("seconds", "of_chunks"),
    [
        # ceil(frames / 16) of each chunk of 3,000 frames, as ultravox_processing.py counts them
        (0.05, [1]), (1.0, [7]), (2.0, [13]), (29.99, [188]), (30.0, [188]), (30.01, [188, 1]), (61.3, [188, 188, 9]),
        (100.0, [188, 188, 188, 63]),
    ],
)  # fmt: skip
def test_tokens_of_ultravox(seconds: float, of_chunks: list[int]) -> None:
    encoder = ultravox()
    assert encoder is not None
    shape = encoder.shape(seconds)
    assert (shape.sequences, shape.vectors, shape.tokens) == (len(of_chunks), sum(of_chunks), sum(of_chunks))
    # a short recording is encoded as it is; of a long one every chunk is filled up
    assert shape.patches == (1500 if len(of_chunks) > 1 else -(-round(seconds * 100) // 2))
    assert encoder.largest_recording(16384) == (16, 1500, 16 * 188, 16 * 188)


@pytest.mark.parametrize(("name", "parameters"), WHISPER.items())
def test_parameters_of_ultravox_are_those_of_transformers_and_its_projector(name: str, parameters: int) -> None:
    encoder = ultravox(audio_model_id=name)
    assert encoder is not None
    first, second = encoder.projector_products
    assert (first, second) == ((4096, 8 * encoder.hidden_size), (4096, 2048))
    of_projector = 4096 * (8 * encoder.hidden_size + 2048)
    assert encoder.parameters - of_projector == parameters
    plain = ultravox(projector_act="gelu")
    assert plain is not None
    assert plain.projector_products == [(4096, 8 * 1280), (4096, 4096)]


def test_ultravox_around_other_encoders() -> None:
    small = ultravox(audio_model_id="openai/whisper-small")
    assert small is not None
    assert (small.hidden_size, small.layers, small.heads, small.mel_bins) == (768, 12, 12, 80)
    assert ultravox(audio_config={"model_type": "whisper", "d_model": 1024, "encoder_attention_heads": 16}) is not None
    assert ultravox(num_projector_layers=2) is None
    assert ultravox(audio_model_id="facebook/wav2vec2-base") is None


def test_a_language_part_that_is_elsewhere_is_named() -> None:
    elsewhere = {key: value for key, value in ULTRAVOX.items() if key != "text_config"}
    with pytest.raises(SpecError, match=r"meta-llama/L, is not in this file; add its config\.json as text_config"):
        read({**elsewhere, "text_model_id": "meta-llama/L"})


def test_convolutions_of_sound() -> None:
    """Whisper: two patches' worth of frames pass the first one. Qwen3-Omni: 128 bins and 100 frames become 16 and
    13, by three halvings, 480 channels wide."""
    assert audio(*QWEN2).stem == [(2, 1280, 3 * 128), (1, 1280, 3 * 1280)]
    rows = [64 * 50 / 13, 32 * 25 / 13, 16.0]
    assert audio(*OMNI3).stem == [
        (rows[0], 480, 9), (rows[1], 480, 9 * 480), (rows[2], 480, 9 * 480), (1, 1280, 480 * 16),
    ]  # fmt: skip
    assert audio(*OMNI3).window == 13 * 8


def test_ranks_that_share_an_encoder() -> None:
    """20 heads: vLLM runs transformers' encoders whole on every rank; that of Qwen3-Omni if they cannot be divided."""
    assert [audio(*of).sharing(4) for of in (QWEN2, OMNI25, OMNI3, VOXTRAL)] == [1, 1, 4, 4]
    assert [audio(*of).sharing(8) for of in (QWEN2, OMNI25, OMNI3, VOXTRAL)] == [1, 1, 1, None]


def test_room_for_a_recording_is_that_of_vllm() -> None:
    """Qwen's families: 30 s by the formula of Qwen2-Audio; Voxtral: a prompt of nothing but sound."""
    assert [audio(*of).largest_recording(16384).vectors for of in (QWEN2, OMNI25, OMNI3)] == [750] * 3
    assert audio(*VOXTRAL).largest_recording(16384)[:3] == (44, 1500, 16384)


@pytest.mark.parametrize("of", [QWEN2, OMNI25, OMNI3, VOXTRAL], ids=lambda of: of[0])
@given(seconds=st.floats(0.03, 500), more=st.floats(0, 50))
def test_longer_recordings_have_no_fewer_tokens(
    of: tuple[str, str, dict[str, Any]], seconds: float, more: float
) -> None:
    encoder = audio(*of)
    shorter, longer = encoder.shape(seconds), encoder.shape(seconds + more)
    assert all(a <= b for a, b in zip(shorter, longer, strict=True))
    assert shorter.tokens == shorter.vectors + encoder.markers


def test_a_recording_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a recording of 0\.005 s has 1 frames, too few for a token"):
        audio(*QWEN2).shape(0.005)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 7}, r"hidden_size \(1280\) must be a multiple of heads \(7\)"),
        ({"pool": 7}, r"a padded chunk has 1500 patches; pool \(7\) must divide them"),
        ({"window": 10}, "remove window"),
        ({"whole_tokens": True}, "remove padded, window and max_frames"),
        ({"chunk": 0}, "greater than or equal to 1"),
        ({"ranks": "one"}, "'share', 'share_if_even' or 'repeat'"),
    ],
)
def test_an_impossible_encoder_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Audio.model_validate({**audio(*VOXTRAL).model_dump(), **change})


def test_a_config_whose_encoder_is_unknown_or_damaged_is_read_for_its_language() -> None:
    text = {"model_type": "llama", **TEXT}
    for architecture, block in (
        ("VoxtralForConditionalGeneration", {"num_attention_heads": 7}),
        ("LlavaForConditionalGeneration", {}),
    ):
        model = read({"architectures": [architecture], "text_config": text, "audio_config": block})
        assert model.audio is None
        assert model.hidden_size == 4096
