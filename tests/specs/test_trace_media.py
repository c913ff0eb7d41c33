"""Images, videos and recordings in traces: read, written, cut, joined, replayed; every wrong item is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import SpecError, UsageError
from simtune.specs.catalog import load_model
from simtune.specs.media import LoadImages
from simtune.specs.trace_cut import merged, scaled
from simtune.specs.trace_media import TraceItem
from simtune.specs.trace_write import trace_text
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import Workload
from simtune.workload.load_fit import fit_workload
from simtune.workload.requests import build_stream
from tests.specs.test_traces import problems, written

SEES = load_model("qwen2.5-vl-7b")
PIXELS, NAMES = st.integers(1, 4000), st.none() | st.sampled_from(["a", "b", "c d"])
SECONDS = st.floats(0.5, 60).map(lambda x: round(x, 3))
PLACES = st.sampled_from([0, 0, 0, 1])
ITEMS = st.one_of(
    st.builds(lambda w, h, n, at: TraceItem("image", n, w, h, at=at), PIXELS, PIXELS, NAMES, PLACES),
    st.builds(lambda w, h, s, f, n: TraceItem("video", n, w, h, s, fps=f), PIXELS, PIXELS, SECONDS, st.none() | SECONDS,
              NAMES),
    st.builds(lambda s, n, at: TraceItem("audio", n, seconds=s, at=at), SECONDS, NAMES, PLACES),
)  # fmt: skip


def made(rows: list[list[TraceItem]]) -> Trace:
    kinds = ["image", "video", "audio"]
    media = tuple(tuple(sorted(items, key=lambda item: (item.at, kinds.index(item.kind)))) for items in rows)
    lengths = np.arange(1, len(rows) + 1)
    return Trace("t", "0" * 64, np.arange(len(rows)) / 4, lengths, lengths * 2, media=media)


@given(rows=st.lists(st.lists(ITEMS, max_size=3), min_size=1, max_size=5).filter(any))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, rows: list[list[TraceItem]]) -> None:
    trace = made(rows)
    folder = tmp_path_factory.mktemp("t")
    names = ["t.jsonl", "t.csv"]
    if any(item.fps is not None or item.name == "c d" or item.at for items in rows for item in items):
        with pytest.raises(UsageError, match=r"or names with spaces; end the name in \.jsonl"):
            trace_text(trace, names.pop())
    for name in names:
        assert read_trace(written(folder, trace_text(trace, name), name)).media == trace.media


def test_cells_of_a_table(tmp_path: Path) -> None:
    text = (
        "arrival_s,prompt_tokens,output_tokens,audio,images,videos\n"
        "0,10,5,3.5#hi,1280x720#logo 800x600,\n0.5,20,6,,1280x720#logo,640x360@12.5\n1,30,7,,,\n"
    )
    trace = read_trace(written(tmp_path, text))
    logo = TraceItem("image", "logo", 1280, 720)
    assert trace.media == (
        (logo, TraceItem("image", None, 800, 600), TraceItem("audio", "hi", seconds=3.5)),
        (logo, TraceItem("video", None, 640, 360, 12.5)),
        (),
    )
    assert trace.notes[-1] == "3 images, 1 videos, 1 audio in 2 of 3 requests"


def test_lines_without_a_key_have_no_items(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 0, "input_length": 10, "output_length": 5}',
        '{"timestamp": 9, "input_length": 10, "output_length": 5, "videos": [{"width": 64, "height": 32, "seconds": 4, '
        '"frames": 8}]}',
    ]
    trace = read_trace(written(tmp_path, "\n".join(lines), "t.jsonl"))
    assert trace.media == ((), (TraceItem("video", None, 64, 32, 4, frames=8),))


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("1280*720", "2: images[0]: must have width and height, not '1280*720'; write 1280x720 or 1280x720#name"),
        ("800x600 0x9", "2: images[1].width: must be a whole number from 1 to 100,000, not 0"),
        (" ".join(["1x1"] * 1001), "2: images: must have at most 1,000 items, not 1,001"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, cell: str, why: str) -> None:
    assert problems(tmp_path, f"arrival_s,prompt_tokens,output_tokens,images\n0,10,5,{cell}\n") == [why]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("3", "1: videos: must be a list of objects with width and height and seconds, not 3"),
        ("[4]", "1: videos[0]: must have width and height and seconds, not 4"),
        ('[{"width": 4, "height": 4}]', "1: videos[0].seconds: is missing; a video has width, height, seconds"),
        ('[{"width": 4, "height": 4, "seconds": 0}]',
         "1: videos[0].seconds: must be above 0 and at most 100,000, not 0"),
        ('[{"width": 4, "height": 4, "seconds": true}]',
         "1: videos[0].seconds: must be above 0 and at most 100,000, not True"),
        ('[{"width": 4, "height": 4, "seconds": 1, "depth": 2}]',
         "1: videos[0].depth: unknown key of a video; its keys are width, height, seconds, name, frame_rate, fps, "
         "frames, at, sound"),
        ('[{"width": 4, "height": 4, "seconds": 1, "at": -1}]',
         "1: videos[0].at: must be tokens of text from 0, not -1"),
        ('[{"width": 4, "height": 4, "seconds": 1, "at": 11}]',
         "1: videos: at (11) exceeds the 10 tokens of text; lower it"),
        ('[{"width": 4, "height": 4, "seconds": 1, "name": 7}]', "1: videos[0].name: must be a text, not 7"),
        ('[{"width": 4, "height": 4, "seconds": 1, "fps": 2, "frames": 3}]',
         "1: videos[0].fps: frames that clients send are not sampled again; remove fps, or frames"),
    ],
)  # fmt: skip
def test_a_wrong_item_is_named(tmp_path: Path, value: str, why: str) -> None:
    line = f'{{"timestamp": 0, "input_length": 10, "output_length": 5, "videos": {value}}}'
    assert problems(tmp_path, line, "t.jsonl") == [why]


def test_problems_of_a_recording_name_it(tmp_path: Path) -> None:
    row = '{"prompt_tokens": 10, "output_tokens": 5, "arrival_s": 0, "audio": [{"length": 4}]}\n'
    path = tmp_path / "trace.jsonl"
    path.write_text(row)
    with pytest.raises(SpecError) as error:
        read_trace(path)
    assert "audio[0].seconds: is missing; a recording has seconds" in str(error.value)
    assert "audio[0].length: unknown key of a recording; its keys are seconds, name, at" in str(error.value)


def test_cuts_take_the_items_along_and_files_share_none() -> None:
    logo = [TraceItem("image", "logo", 100, 100)]
    trace = made([logo, [], logo])
    assert scaled(trace, 2.0).media == trace.media
    names = [[item.name for item in items] for items in merged([trace, trace]).media or ()]
    assert sorted(names) == sorted([["0:logo"], ["1:logo"], [], [], ["0:logo"], ["1:logo"]])


def test_a_fitted_spec_says_that_it_has_no_items() -> None:
    trace = made([[TraceItem("image", None, 28, 28)] for _ in range(40)])
    assert "40 images in 40 of 40 requests; replay the trace itself" in fit_workload(trace, "t").lost


# --- replayed ---------------------------------------------------------------------------------------------

REPLAYED: dict[str, Any] = {
    "name": "w", "trace": "t", "arrivals": {"kind": "trace"}, "prompt": {"kind": "trace"}, "output": {"kind": "trace"},
}  # fmt: skip
LOGO, OTHER = TraceItem("image", "logo", 560, 560), TraceItem("image", None, 280, 560)


def test_tokens_stand_before_the_text_and_names_are_shared_within_a_round() -> None:
    """Qwen2.5-VL makes a vector of 28 x 28 pixels, and two markers around an image."""
    trace = made([[LOGO, OTHER], [], [LOGO]])
    stream = build_stream(Workload.model_validate(REPLAYED), trace, requests=6, seed=0, towers=SEES.towers)
    assert stream.media is not None
    logo, second = 20 * 20 + 2, 10 * 20 + 2
    assert stream.prompt_tokens.tolist() == 2 * [1 + logo + second, 2, 3 + logo]
    first, _, third, fourth, _, _ = (stream.media.of(i) for i in range(6))
    assert [item.start for item in first] == [0, logo]
    assert first[0].name == third[0].name != first[1].name
    assert fourth[0].name not in {item.name for item in (*first, *third)}
    assert stream.hash_ids is not None
    assert stream.block_tokens == 16
    blocks = [stream.hash_ids[i] for i in range(6)]
    # the second image of the first request is new, so its blocks have no names
    assert blocks[0] == blocks[2]
    assert len(blocks[0]) == logo // 16
    assert not set(blocks[0]) & set(blocks[3])
    assert blocks[1] == ()


def test_items_of_the_trace_and_of_the_load_are_refused_together() -> None:
    load = Workload.model_validate({**REPLAYED, "images": {"sizes": [{"width": 28, "height": 28}]}})
    with pytest.raises(UsageError, match="t: the trace names media already; remove images"):
        build_stream(load, made([[LOGO]]), requests=1, seed=0, towers=SEES.towers)


def test_a_video_without_a_token_names_the_file() -> None:
    short = made([[TraceItem("video", None, 64, 64, 0.01)]])
    with pytest.raises(UsageError, match=r"^t: a video of 0\.01 s .* raise seconds or frame_rate"):
        build_stream(Workload.model_validate(REPLAYED), short, requests=1, seed=0, towers=SEES.towers)


def test_numbers_of_images_have_the_sizes_of_the_load(tmp_path: Path) -> None:
    """Azure's multimodal trace states how many images each request has, and nothing of them."""
    text = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00,2,500,20\n"
        "2024-10-15 00:00:01,0,300,21\n2024-10-15 00:00:03,5,200,22\n"
    )
    trace = read_trace(written(tmp_path, text))
    assert trace.notes == (
        "7 images in 2 of 3 requests, without their sizes: a workload with this trace and with images: {sizes: ...} "
        "has them, others leave them out",
    )
    images = LoadImages.model_validate({"sizes": [{"width": {"levels": [0, 1], "pixels": [28, 900]}, "height": 280}]})
    load = Workload.model_validate({**REPLAYED, "images": images})
    stream = build_stream(load, trace, requests=7, seed=0, towers=SEES.towers)
    assert stream.media is not None
    assert stream.media.per_request.tolist() == [2, 0, 5, 2, 0, 5, 2]
    fewer = build_stream(load, trace, requests=3, seed=0, towers=SEES.towers)
    assert fewer.media is not None
    assert np.array_equal(fewer.media.size, stream.media.size[:7]), "an item depends on its number alone"
    without = build_stream(Workload.model_validate(REPLAYED), trace, requests=3, seed=0, towers=SEES.towers)
    assert without.media is None
    assert without.prompt_tokens.tolist() == [500, 300, 200]


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00,-1,500,20\n"
    assert problems(tmp_path, text) == ["2: NumImages: must be a whole number of images from 0 to 1,000, not -1"]
