"""Videos as processors sample and size them.

A file is sampled to frames, frames are padded to whole groups (`frames` of the vision encoder, as many as a patch is
made of), and every group is encoded apart from the others. Formulas are those of transformers: `sample_frames` and
`smart_resize` in models/qwen2_vl/video_processing_qwen2_vl.py and models/qwen3_vl/video_processing_qwen3_vl.py, with
which the loaders in vllm/multimodal/video.py (release 0.32) agree; tokens beside the frames are those of
`replace_video_token` in models/qwen3_vl/processing_qwen3_vl.py.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from simtune.specs.base import Part, Positive
from simtune.specs.tower import Markers, MediaShape

Frames = Annotated[int, Field(ge=1, le=100_000)]
VideoArea = Annotated[int, Field(ge=1, le=10**12)]


class Clip(NamedTuple):
    """A video file, and how its client has it sampled."""

    width: int
    height: int
    seconds: float
    rate: float
    """Frames per second of the file."""
    fps: float | None = None
    """Frames per second that are sampled; the processor's unless given."""
    frames: int | None = None
    """Frames that the client sends in place of the file, evenly spread over its time; none are sampled then."""


class SoundTurns(Part):
    """Turns in which tokens of a video and of its sound follow one another, if clients have the sound read as well.

    With `chunk_s` all frames of a stretch of time come before all sound of as many seconds (Qwen2.5-Omni:
    `omni_get_updates_use_audio_in_video` of vllm/model_executor/models/qwen2_5_omni_thinker.py); without it every group
    of frames comes before the first token of sound that is not earlier (Qwen3-Omni: `get_updates_use_audio_in_video` of
    qwen3_omni_moe_thinker.py; release 0.33). Processors of transformers do the same in
    `replace_multimodal_special_tokens`.
    """

    positions_per_s: Positive = Field(description="positions of one second; a token of sound takes one")
    chunk_s: Positive | None = Field(None, description="seconds of one turn; each group of frames is one unless given")
    fps: Positive = Field(2.0, description="frames per second by which turns are counted, unless a client states fps")

    def turns(self, groups: int, vectors: int, sound: int, seconds: float) -> list[tuple[int, int]]:
        """Return the tokens of frames and of sound in each turn, of `groups` groups of frames of `seconds` each, with
        `vectors` tokens in a group, and of `sound` tokens of sound."""
        at = [group * seconds * self.positions_per_s for group in range(groups)]
        if self.chunk_s is None:
            ends = [min(sound, math.ceil(position)) for position in at[1:]] + [sound]
            return [(vectors, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
        chunk = int(self.positions_per_s * self.chunk_s)
        of_chunks = [0] * (int(at[-1]) // chunk + 1)
        for position in at:
            of_chunks[int(position) // chunk] += vectors
        sounds = [max(0, min(chunk, sound - number * chunk)) for number in range(len(of_chunks))]
        sounds[-1] += sound - sum(sounds)
        return [*zip(of_chunks, sounds, strict=True)]


class VideoSizing(Part):
    """Rules of a processor for videos.

    With `limits: frame` the limits on pixels are those of each frame (Qwen2-VL, Qwen2.5-VL); with `clip` those of all
    sampled frames together (Qwen3-VL, Qwen3.5).
    """

    limits: Literal["frame", "clip"]
    min_pixels: VideoArea
    max_pixels: VideoArea
    fps: Positive = Field(2.0, description="frames per second that are sampled")
    min_frames: Frames = Field(4, description="fewest frames that are sampled, if the file has them")
    max_frames: Frames = Field(768, description="most frames that are sampled")
    timestamps: bool = Field(False, description="the time of each group of frames is written before it")
    group_markers: Markers = Field(0, description="tokens around each group of frames")
    markers: Markers = Field(2, description="tokens around a video")
    pruning_rate: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the embeddings of a video that an engine drops once they are made (vLLM's "
        "video-pruning-rate); those of one group of frames stay",
    )

    sound: SoundTurns | None = Field(
        None, description="turns of frames and sound, of videos whose sound is read; it stands behind them unless given"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) exceeds max_pixels ({self.max_pixels}); lower it")
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames ({self.min_frames}) exceeds max_frames ({self.max_frames}); lower it")
        return self

    def group_s(self, fps: float | None, group: int) -> float:
        """Return the seconds of a group of `group` frames by which turns of frames and sound are counted, if a client
        states `fps`."""
        assert self.sound is not None
        return group / (fps or self.sound.fps)

    def sampled(self, clip: Clip, group: int) -> list[float]:
        """Return the seconds at which frames of a clip are taken; empty if it makes no frame.

        Raises ValueError if the file is too short for a group of `group` frames, which processors refuse.
        """
        if clip.frames is not None:
            return [clip.seconds * number / clip.frames for number in range(clip.frames)]
        total = round(clip.seconds * clip.rate)
        if total < group:
            raise ValueError(
                f"a video of {clip.seconds:g} s at {clip.rate:g} frames per second has {total} of the {group} frames "
                "that one patch needs; raise seconds or frame_rate"
            )
        fps = self.fps if clip.fps is None else clip.fps
        if self.limits == "frame":
            most = min(self.max_frames, total) // group * group
            number = min(max(total / clip.rate * fps, self.min_frames), most, total)
            number = math.floor(number / group) * group
            return [math.floor(total / number * frame) / clip.rate for frame in range(number)]
        number = min(max(int(total / clip.rate * fps), self.min_frames), self.max_frames, total)
        step = (total - 1) / max(1, number - 1)
        return [round(step * frame) / clip.rate for frame in range(number)]

    def grid(self, width: int, height: int, frames: int, unit: int, group: int) -> tuple[int, int]:
        """Return the (columns, rows) of tokens of `unit` pixels a side in each frame of a clip."""
        volume = exact = 1
        if self.limits == "clip":
            volume, exact = round(frames / group) * group, frames
            scale = max(1.0, unit / width, unit / height)
            width, height = int(width * scale), int(height * scale)
        columns, rows = (round(side / unit) for side in (width, height))
        area = volume * columns * rows * unit**2
        if area > self.max_pixels:
            beta = math.sqrt(exact * width * height / self.max_pixels)
            columns, rows = (max(1, math.floor(side / beta / unit)) for side in (width, height))
        elif area < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (exact * width * height))
            columns, rows = (math.ceil(side * beta / unit) for side in (width, height))
        return columns, rows

    def shape(self, clip: Clip, patch: int, merge: int, group: int) -> MediaShape:
        """Return the sizes of a clip whose patches of `patch` pixels are made of `group` frames. Raises ValueError as
        `sampled` does."""
        times = self.sampled(clip, group)
        columns, rows = self.grid(clip.width, clip.height, len(times), patch * merge, group)
        # only now: the size follows from the frames before they are padded
        times += times[-1:] * (-len(times) % group)
        starts, ends = times[::group], times[group - 1 :: group]
        groups, vectors = len(starts), columns * rows
        beside = self.group_markers * groups + self.markers
        if self.timestamps:
            beside += sum(timestamp_tokens((start + end) / 2) for start, end in zip(starts, ends, strict=True))
        retained = self.retained(groups, vectors)
        return MediaShape(groups, vectors * merge**2, retained, retained + beside)

    def retained(self, groups: int, vectors: int) -> int:
        """Return the embeddings that stay of a clip of groups of frames with `vectors` each.

        `compute_retained_tokens_count` of vllm/multimodal/video_prune/evs.py (release 0.33).
        """
        return max(vectors, int(groups * vectors * (1 - self.pruning_rate))) if self.pruning_rate else groups * vectors

    def most_vectors(self, of_image: int, unit: int, group: int, max_model_len: int) -> int:
        """Return the embeddings of the video for which vLLM keeps room, given those of the largest image.

        `get_max_video_tokens` of vllm/model_executor/models/qwen2_vl.py and qwen3_vl.py: under limits on frames as
        many of the largest ones as a prompt has room for, up to 14; under limits on clips one group at the limit.
        """
        if self.limits == "clip":
            return max(1, self.max_pixels // group // unit**2)
        return max(1, min(max_model_len // of_image, 14 // group)) * of_image


def timestamp_tokens(seconds: float) -> int:
    """Return the tokens of a time as Qwen's processors write it, `<12.5 seconds>`: its tokenizers make a token of every
    digit, and one each of the four other parts."""
    return 4 + len(f"{seconds:.1f}") - 1
