"""Tokens that processors make of videos, beside those of the processors themselves.

The table was made with vLLM 0.32 and transformers 5.19 on a processor: frames by `compute_frames_index_to_sample` of
the loader that vLLM chooses for the family, sides by `smart_resize` of transformers with the limits of the checkpoint's
preprocessor config, patches by `patchify` of its video processor, timestamps by `_calculate_timestamps` of
`Qwen3VLProcessor`, and the tokens of a prompt by `Qwen3VLMultiModalProcessor.get_video_repl` with Qwen's tokenizer.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.specs.video import Clip, VideoSizing, timestamp_tokens
from simtune.specs.vision import Vision
from tests.specs.test_vision import QWEN3, QWEN25, vision

# width, height, seconds, frames per second of the file and sampled; groups, patches of each and embeddings for
# Qwen2.5-VL; the same for Qwen3-VL, and all tokens of its replacement
TABLE = [
    ((1280, 720, 10.0, 30.0, 2.0), (10, 4784, 11960), (10, 3520, 8800, 8880)),
    ((640, 360, 3.7, 25.0, 2.0), (3, 1196, 897), (4, 880, 880, 912)),
    ((1920, 1080, 60.0, 30.0, 2.0), (60, 10764, 161460), (60, 760, 11400, 11930)),
    ((320, 240, 1.0, 24.0, 2.0), (2, 396, 198), (2, 320, 160, 176)),
    ((1920, 1080, 600.0, 30.0, 2.0), (384, 10764, 1033344), (384, 112, 10752, 14521)),
    ((224, 224, 0.2, 30.0, 2.0), (2, 256, 128), (2, 196, 98, 114)),
    ((1080, 1920, 12.345, 29.97, 1.0), (6, 10764, 16146), (6, 8160, 12240, 12289)),
    ((480, 270, 130.0, 30.0, 4.0), (260, 680, 44200), (260, 180, 11700, 14080)),
    ((100, 60, 5.5, 30.0, 2.0), (5, 32, 40), (6, 24, 36, 84)),
    ((3840, 2160, 100.0, 60.0, 2.0), (100, 42196, 1054900), (100, 448, 11200, 12090)),
    ((854, 480, 0.1, 30.0, 2.0), (1, 2040, 510), (2, 1620, 810, 826)),
    ((28, 2000, 8.0, 30.0, 2.0), (8, 284, 568), (8, 284, 568, 632)),
]


@pytest.mark.parametrize(("clip", "of_qwen25", "of_qwen3"), TABLE)
def test_tokens_of_a_video_are_those_of_its_processor(
    clip: tuple[int, int, float, float, float], of_qwen25: tuple[int, int, int], of_qwen3: tuple[int, int, int, int]
) -> None:
    """Two more tokens are around a video in both families."""
    older, newer = (vision(*of).clip_shape(Clip(*clip)) for of in (QWEN25, QWEN3))
    assert older == (*of_qwen25, of_qwen25[2] + 2)
    assert newer == (*of_qwen3[:3], of_qwen3[3] + 2)


def test_frames_that_clients_send_are_not_sampled() -> None:
    """Seven frames over 14 s are four groups, as the last one is repeated; times are 1.0, 5.0, 9.0 and 12.0 s."""
    sent = Clip(640, 640, 14.0, 30.0, frames=7)
    groups, patches, vectors, tokens = vision(*QWEN3).clip_shape(sent)
    assert (groups, patches, vectors) == (4, 1600, 1600)
    assert tokens == vectors + 2 + 4 * 2 + 6 + 6 + 6 + 7
    assert vision(*QWEN25).clip_shape(sent).sequences == 4


def test_times_are_written_digit_by_digit() -> None:
    assert [timestamp_tokens(seconds) for seconds in (0.25, 9.94, 9.96, 123.4)] == [6, 6, 7, 8]


@pytest.mark.parametrize("of", [QWEN25, QWEN3], ids=lambda of: of[0])
def test_a_file_without_a_group_of_frames_is_refused(of: tuple[str, dict[str, Any], str]) -> None:
    with pytest.raises(ValueError, match=r"a video of 0\.03 s at 30 frames per second has 1 of the 2 frames"):
        vision(*of).clip_shape(Clip(640, 360, 0.03, 30.0))


def room(encoder: Vision, max_model_len: int) -> int:
    return encoder.largest_video(max_model_len).vectors


def test_room_for_a_video_is_that_of_vllm() -> None:
    """`get_max_video_tokens`, worked out by hand: Qwen2.5-VL has 16,384 embeddings in a group of two frames of the
    largest size; of them as many as a prompt has room for, at least one group and at most 14 frames. Qwen3-VL: one
    group of 25,165,824 / 2 pixels."""
    older, newer = vision(*QWEN25), vision(*QWEN3)
    assert [room(older, length) for length in (8192, 16384, 32768, 40000, 128000, 10**6)] == [
        16384, 16384, 2 * 16384, 2 * 16384, 7 * 16384, 7 * 16384,
    ]  # fmt: skip
    assert room(newer, 262144) == 25_165_824 // 2 // 32**2 == 12288


@given(
    width=st.integers(64, 4000),
    height=st.integers(64, 4000),
    seconds=st.floats(0.2, 400),
    rate=st.sampled_from([10.0, 24.0, 29.97, 60.0]),
)
def test_a_clip_keeps_to_its_limits(width: int, height: int, seconds: float, rate: float) -> None:
    """Frames stay within their number; pixels within the limits: of every frame, or of all frames of an even number."""
    if max(width, height) > 20 * min(width, height):
        return
    clip = Clip(width, height, seconds, rate)
    for of, limits in ((QWEN25, "frame"), (QWEN3, "clip")):
        encoder = vision(*of)
        sizing = encoder.video
        assert sizing is not None
        assert sizing.limits == limits
        frames = len(sizing.sampled(clip, 2))
        assert frames <= min(768, round(seconds * rate))
        shape = encoder.clip_shape(clip)
        assert shape.sequences == -(-frames // 2)
        if frames % 2 == 0:
            pixels = shape.patches * encoder.patch**2 * (frames if limits == "clip" else 1)
            # no side is below one token, whatever the limit is
            assert pixels <= sizing.max_pixels or shape.patches == 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"min_pixels": 10**9}, "exceeds max_pixels"),
        ({"min_frames": 1000}, r"min_frames \(1000\) exceeds max_frames \(768\)"),
        ({"fps": 0}, "greater than 0"),
        ({"limits": "pair"}, "'frame' or 'clip'"),
    ],
)
def test_impossible_rules_are_refused(change: dict[str, Any], why: str) -> None:
    sizes = {"limits": "frame", "min_pixels": 3136, "max_pixels": 12845056, **change}
    with pytest.raises(ValidationError, match=why):
        VideoSizing.model_validate(sizes)


def test_a_patch_of_more_frames_than_are_sampled_is_refused() -> None:
    sizes = vision(*QWEN25).model_dump()
    with pytest.raises(ValidationError, match=r"video\.max_frames \(1\) is below frames \(2\)"):
        Vision.model_validate({**sizes, "video": {**sizes["video"], "min_frames": 1, "max_frames": 1}})


@pytest.mark.parametrize(
    ("groups", "vectors", "rate", "retained"),
    [
        # compute_retained_tokens_count of vllm/multimodal/video_prune/evs.py (0.33), called with these numbers
        (10, 100, 0.0, 1000), (10, 100, 0.5, 500), (10, 100, 0.95, 100), (1, 100, 0.5, 100), (7, 299, 0.3, 1465),
        (10, 880, 0.7, 2640), (3, 17, 0.9, 17),
    ],
)  # fmt: skip
def test_embeddings_that_stay_of_a_pruned_video(groups: int, vectors: int, rate: float, retained: int) -> None:
    assert pruned(rate, QWEN25).retained(groups, vectors) == retained


def pruned(rate: float, of: tuple[str, dict[str, Any], str]) -> VideoSizing:
    video = vision(*of).video
    assert video is not None
    return video.model_copy(update={"pruning_rate": rate})


@pytest.mark.parametrize("of", [QWEN25, QWEN3], ids=lambda of: of[0])
def test_a_pruned_video_is_encoded_whole(of: tuple[str, dict[str, Any], str]) -> None:
    """Its prompt has fewer tokens; times and marks of frames stay."""
    whole, clip = vision(*of), Clip(1280, 720, 10.0, 30.0)
    half = whole.model_copy(update={"video": pruned(0.5, of)})
    before, after = whole.clip_shape(clip), half.clip_shape(clip)
    assert (after.sequences, after.patches) == (before.sequences, before.patches)
    assert after.vectors == before.vectors // 2
    assert after.tokens - after.vectors == before.tokens - before.vectors
    # the projector makes all embeddings
    assert half.projected(after.sequences * after.patches, after.vectors) == before.vectors
    assert half.largest_video(32768) == whole.largest_video(32768)
