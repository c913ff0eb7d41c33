"""Turns of frames and sound in videos of Omni models, beside the processors of transformers."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.specs.tower import MediaShape
from simtune.specs.video import SoundTurns
from simtune.workload.media import PromptItem, VideoTurns

CHUNKS, TIMES = SoundTurns(positions_per_s=25, chunk_s=2), SoundTurns(positions_per_s=13, fps=1.0)
"""Turns of Qwen2.5-Omni, by chunks of two seconds, and of Qwen3-Omni, by the time of each token."""
FAMILIES = {"qwen2_5_omni": CHUNKS, "qwen3_omni_moe": TIMES}

# groups of frames, tokens of each, tokens of sound, frames per second of the processor; the prompt by
# `replace_multimodal_special_tokens` of transformers 4.57.3: v for a video's token, s for one of its sound
TABLE = [
    (CHUNKS, (3, 4, 75, 2.0), "8v 50s 4v 25s"),
    (CHUNKS, (1, 3, 32, 3.0), "3v 32s"),
    (CHUNKS, (1, 4, 75, 1.0), "4v 75s"),
    (CHUNKS, (18, 2, 300, 3.0), "6v 50s 6v 50s 6v 50s 6v 50s 6v 50s 6v 50s"),
    (CHUNKS, (4, 12, 75, 3.0), "36v 50s 12v 25s"),
    (TIMES, (1, 6, 13, 3.0), "6v 13s"),
    (TIMES, (4, 3, 50, 3.0), "3v 9s 3v 9s 3v 8s 3v 24s"),
    (TIMES, (6, 16, 39, 4.0), "16v 7s 16v 6s 16v 7s 16v 6s 16v 7s 16v 6s"),
    (TIMES, (3, 4, 39, 2.0), "4v 13s 4v 13s 4v 13s"),
    (TIMES, (10, 12, 36, 3.0), "12v 9s 12v 9s 12v 8s 12v 9s 12v 1s 60v"),
]


def in_words(turns: SoundTurns, groups: int, vectors: int, sound: int, fps: float) -> str:
    """Return runs of equal tokens, made of the places of the tokens of both items."""
    video = PromptItem(7, 0, MediaShape(groups, 4 * vectors, groups * vectors, groups * vectors + 2), "video", 0)
    recording = PromptItem(7, 1, MediaShape(1, sound, sound, sound + 2), "audio", 0)
    items = VideoTurns(turns, 2 / fps).of(video, recording)
    assert [item.tokens for item in items] == [groups * vectors + sound + 4] * 2
    prompt = ["."] * items[0].tokens
    for letter, item in zip("vs", items, strict=True):
        for first, last in item.runs:
            assert set(prompt[first:last]) == {"."}
            prompt[first:last] = letter * (last - first)
    assert "".join(prompt).strip(".") == "".join(prompt[2:-2])
    return " ".join(f"{len([*run])}{letter}" for letter, run in groupby(prompt[2:-2]))


@pytest.mark.parametrize(("turns", "clip", "expected"), TABLE)
def test_turns_are_those_of_the_processors(turns: SoundTurns, clip: tuple[int, int, int, float], expected: str) -> None:
    assert in_words(turns, *clip) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_random_clips_are_those_of_the_processors(family: str) -> None:
    """Below a frame per second transformers and vLLM differ on chunks without frames, so clips have at least one."""
    transformers = pytest.importorskip("transformers", minversion="4.57")
    name = {"qwen2_5_omni": "Qwen2_5OmniProcessor", "qwen3_omni_moe": "Qwen3OmniMoeProcessor"}[family]
    processor = getattr(transformers, name)

    @given(
        clip=st.tuples(
            st.integers(1, 20), st.integers(1, 9), st.integers(1, 200), st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0])
        )
    )
    @settings(max_examples=200, deadline=None)
    def check(clip: tuple[int, int, int, float]) -> None:
        assert in_words(FAMILIES[family], *clip) == by_processor(processor, FAMILIES[family], *clip)

    check()


def by_processor(processor: Any, turns: SoundTurns, groups: int, vectors: int, sound: int, fps: float) -> str:
    sides = SimpleNamespace(merge_size=2)
    names = ("audio", "image", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    fake: Any = SimpleNamespace(image_processor=sides, video_processor=sides)
    for name, letter in zip(names, "siv<>()", strict=True):
        setattr(fake, f"{name}_token", letter)
    fake.get_chunked_index = lambda *values: processor.get_chunked_index(fake, *values)
    (text,) = processor.replace_multimodal_special_tokens(
        fake,
        ["<v>"],
        iter([sound]),
        iter([]),
        iter([np.array([groups, 2, 2 * vectors])]),
        video_second_per_grid=iter([2 / fps]),
        use_audio_in_video=True,
        position_id_per_seconds=turns.positions_per_s,
        seconds_per_chunk=2.0,
    )
    assert (text[:2], text[-2:]) == ("<(", ")>")
    return " ".join(f"{len([*run])}{letter}" for letter, run in groupby(text[2:-2]))


@given(
    clip=st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 300), st.floats(0.2, 8)),
    turns=st.sampled_from([CHUNKS, TIMES]),
)
def test_all_tokens_stand_in_some_turn(clip: tuple[int, int, int, float], turns: SoundTurns) -> None:
    groups, vectors, sound, fps = clip
    runs = turns.turns(groups, vectors, sound, 2 / fps)
    assert (sum(v for v, _ in runs), sum(s for _, s in runs)) == (groups * vectors, sound)
    assert min(min(run) for run in runs) >= 0
