"""Sound of the videos of a trace: the same as that of videos that a spec draws, between their frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.errors import UsageError
from simtune.specs.model import Model
from simtune.specs.tower import MEDIA_KINDS
from simtune.specs.trace_media import TraceItem
from simtune.specs.trace_write import trace_text
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import Workload
from simtune.workload.requests import RequestStream, build_stream
from simtune.workload.trace_media import check_media
from tests.sim.test_images import same
from tests.sim.test_media import MODEL, SEES, deployed, in_turns, load
from tests.specs.test_traces import problems, written

OMNI = in_turns()
REPLAYED = {"arrivals": {"kind": "trace"}, "prompt": {"kind": "trace"}, "output": {"kind": "trace"}, "trace": "t"}
CLIPS: dict[str, Any] = {
    "sizes": [{"width": 320, "height": 240}, {"width": 640, "height": 360}],
    "seconds": {"levels": [0, 1], "seconds": [1, 20]},
    "per_request": [1, 2],
    "share": 0.8,
    "repeats": {"share": 0.6, "items": 3},
    "sound": True,
}
CLIP = {"width": 640, "height": 360, "seconds": 10, "sound": True}
SOUND = MEDIA_KINDS.index("audio")


def streams(number: int, videos: dict[str, Any]) -> tuple[RequestStream, RequestStream]:
    """Return requests that a spec draws, and those of a trace with the same lengths and videos."""
    alone = build_stream(load(videos=videos), None, requests=number, seed=0)
    from_spec = build_stream(load(videos=videos), None, requests=number, seed=0, towers=OMNI.towers)
    assert alone.media is not None
    assert alone.arrival_s is not None
    rows: list[tuple[TraceItem, ...]] = []
    for first, end in zip(alone.media.begin[:-1], alone.media.begin[1:], strict=True):
        videos_of_request = [at for at in range(first, end) if alone.media.kind[at] != SOUND]
        items = []
        for at in videos_of_request:
            (width, height, seconds), name = alone.media.size[at].tolist(), str(alone.media.name[at])
            items.append(TraceItem("video", name, int(width), int(height), seconds, fps=videos.get("fps"), sound=True))
        rows.append(tuple(items))
    trace = Trace("t", "0" * 64, alone.arrival_s, alone.prompt_tokens, alone.output_tokens, media=tuple(rows))
    return from_spec, build_stream(load(**REPLAYED), trace, requests=number, seed=0, towers=OMNI.towers)


@pytest.mark.parametrize("caching", [True, False])
def test_videos_with_sound_are_simulated_as_those_of_a_spec(caching: bool) -> None:
    """Equal to the tick, with repeated videos and a budget that cuts prompts within them."""
    from_spec, from_trace = streams(60, CLIPS)
    assert from_trace.prompt_tokens.tolist() == from_spec.prompt_tokens.tolist()
    batching = {"max_num_batched_tokens": 2048, "max_num_seqs": 32}
    more: dict[str, Any] = {"batching": batching, "kv_cache": {"num_blocks": 8000, "prefix_caching": caching}}
    deployment = deployed({"max_batched_embeds": 8192, "cache_size": 8192}, model=OMNI, **more)
    first, second = deployment.simulate(from_spec), deployment.simulate(from_trace)
    assert first.completed.all()
    assert same(first, second)
    assert first.summary().encoders == second.summary().encoders
    assert first.summary().encoders[0].cache_hits > 0 or caching
    assert same(second, deployment.simulate(from_trace, single_steps=True))


def test_turns_are_those_of_the_frames_of_each_video() -> None:
    """A client may state fps for one video and not for the next: each has the turns of a load with its fps."""
    clips = tuple(TraceItem("video", None, 640, 360, 10.0, fps=fps, sound=True) for fps in (None, 4.0))
    lengths = np.array([100])
    trace = Trace("t", "0" * 64, np.zeros(1), lengths, lengths, media=(clips,))
    stream = build_stream(load(**REPLAYED), trace, requests=1, seed=0, towers=OMNI.towers)
    assert stream.media is not None
    items = stream.media.of(0)
    assert [item.kind for item in items] == ["video", "audio", "video", "audio"]
    for number, fps in enumerate((None, 4.0)):
        spec = {"sizes": [{"width": 640, "height": 360}], "seconds": 10, "sound": True, "fps": fps}
        drawn_items = build_stream(load(videos=spec), None, requests=1, seed=0, towers=OMNI.towers).media
        assert drawn_items is not None
        pair = items[2 * number : 2 * number + 2]
        assert [item.runs for item in pair] == [item.runs for item in drawn_items.of(0)]
        assert [item.start for item in pair] == [number * items[0].tokens] * 2


def test_blocks_behind_a_video_with_sound_are_named_by_both() -> None:
    """The text around it is shared as far as its named blocks, and nothing is without the sound."""
    clip = TraceItem("video", "clip", 640, 360, 10.0, at=64, sound=True)
    silent, lengths = clip._replace(sound=False), np.full(4, 256)
    media = ((clip,), (clip,), (silent,), (silent,))
    names = tuple((1, 2, last) for last in (3, 4, 3, 4))
    trace = Trace("t", "0" * 64, np.arange(4.0), lengths, lengths, names, 64, media=media)
    stream = build_stream(load(**REPLAYED), trace, requests=4, seed=0, towers=OMNI.towers)
    assert stream.media is not None
    assert stream.hash_ids is not None
    assert stream.block_tokens == 16
    rows = [*stream.hash_ids]
    tokens = [stream.media.of(number)[0].tokens for number in range(4)]
    assert [len(row) for row in rows] == [(3 * 64 + length) // 16 for length in tokens]
    for a, b, shared in ((0, 1, 128 + tokens[0]), (2, 3, 128 + tokens[2]), (0, 2, 64), (1, 3, 64)):
        common = next(i for i, (x, y) in enumerate(zip(rows[a], rows[b], strict=False)) if x != y)
        assert common == shared // 16


def test_turns_with_sound_are_written_and_read_again(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 100, "output_length": 20, "videos": [CLIP]},
        {"session_id": "a", "delay": 1000, "input_length": 50, "output_length": 30},
    ]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl"))
    clip = TraceItem("video", "line 1, 0", 640, 360, 10, sound=True)
    assert trace.media == ((clip,), (clip,))
    assert read_trace(written(tmp_path, trace_text(trace, "a.jsonl"), "a.jsonl")).media == trace.media
    lengths = np.full(1, 9)
    with pytest.raises(UsageError, match=r"sound is read, .*; end the name in \.jsonl"):
        trace_text(Trace("t", "0" * 64, None, lengths, lengths, media=((clip,),)), "t.csv")
    stream = build_stream(load(**REPLAYED), trace, requests=1, seed=0, towers=OMNI.towers)
    assert stream.media is not None
    assert [item.name for item in stream.media.of(0)] == [item.name for item in stream.media.of(1)]
    (work,) = deployed({}, model=OMNI).simulate(stream).summary().encoders
    assert work.encoded_images == 2, "the second turn finds both"


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 9, "output_length": 9, "videos": [{**CLIP, "sound": 1}]}
    assert problems(tmp_path, json.dumps(row), "t.jsonl") == ["1: videos[0].sound: must be true or false, not 1"]
    row = {"timestamp": 0, "input_length": 9, "output_length": 9, "audio": [{"seconds": 3, "sound": True}]}
    (why,) = problems(tmp_path, json.dumps(row), "t.jsonl")
    assert why.startswith("1: audio[0].sound: unknown key")


@pytest.mark.parametrize("model", [MODEL, SEES, OMNI.model_copy(update={"audio": None})])
def test_models_without_sound_in_turns_are_refused(model: Model) -> None:
    """They have encoders of sound alone, or none, or turns without an encoder."""
    clip, lengths = TraceItem("video", None, 640, 360, 10.0, sound=True), np.full(2, 9)
    trace = Trace("t.jsonl", "0" * 64, np.arange(2.0), lengths, lengths, media=((), (clip,)))
    workload: Workload = load(**REPLAYED)
    with pytest.raises(
        UsageError, match=r"t\.jsonl: videos\.sound of request 2 needs .*list the sound under audio, or"
    ):
        check_media(model.towers, workload, trace, model.name)
    check_media(OMNI.towers, workload, trace, OMNI.name)
