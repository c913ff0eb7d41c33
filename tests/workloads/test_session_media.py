"""Media that a spec draws into sessions whose turns follow answers, beside a trace and beside their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.errors import UsageError
from simtune.specs.media import LoadImages
from simtune.specs.tower import MEDIA_KINDS
from simtune.specs.trace_media import TraceItem
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import Workload
from simtune.workload.requests import RequestStream, build_stream
from simtune.workload.session_draws import Layout, layout_of
from tests.sim.test_images import same
from tests.sim.test_media import MODEL, deployed, in_turns
from tests.specs.test_traces import written

IMAGES: dict[str, Any] = {
    "share": 0.6,
    "per_request": [1, 2],
    "sizes": [{"width": 560, "height": 560}, {"width": 280, "height": 280}],
    "repeats": {"share": 0.4, "images": 3},
}
CLIPS: dict[str, Any] = {"share": 0.3, "sizes": [{"width": 320, "height": 240}], "seconds": 3}
LOAD: dict[str, Any] = {
    "name": "w",
    "arrivals": {"kind": "fixed", "rate_rps": 2.0},
    "prompt": {"kind": "lognormal", "mean_tokens": 50, "sigma": 0.8, "max_tokens": 200},
    "output": {"kind": "lognormal", "mean_tokens": 20, "sigma": 0.5, "max_tokens": 60},
    "sessions": {"turns": {"kind": "lognormal", "mean": 3, "sigma": 0.6, "max": 6}, "pause_s": 0.5},
    "images": IMAGES,
    "videos": CLIPS,
}


def drawn_sessions(count: int, **more: Any) -> RequestStream:
    load = Workload.model_validate({**LOAD, **more})
    return build_stream(load, None, requests=count, seed=3, towers=MODEL.towers)


def as_rows(stream: RequestStream) -> list[dict[str, Any]]:
    """Return sessions in Mooncake's keys, where each turn states the text and the items that it adds."""
    assert stream.turns is not None
    assert stream.media is not None
    assert stream.arrival_s is not None
    rows = []
    text = stream.prompt_tokens - stream.media.added_tokens()
    for session, (begin, end) in enumerate(zip(stream.turns.first[:-1], stream.turns.first[1:], strict=True)):
        before = items = 0
        for turn in range(begin, end):
            row: dict[str, Any] = {"session_id": f"s{session}", "input_length": int(text[turn]) - before,
                                   "output_length": int(stream.output_tokens[turn])}  # fmt: skip
            row |= {"delay": 500} if turn > begin else {"timestamp": 1e3 * float(stream.arrival_s[begin])}
            first, last = stream.media.begin[turn : turn + 2].tolist()
            for at in range(first + items, last):
                (width, height, seconds), kind = stream.media.size[at].tolist(), MEDIA_KINDS[stream.media.kind[at]]
                item = {"width": int(width), "height": int(height), "name": str(stream.media.name[at])}
                item |= {"seconds": seconds} if kind == "video" else {}
                row.setdefault(f"{kind}s", []).append(item)
            rows.append(row)
            before, items = int(text[turn] + stream.output_tokens[turn]), last - first
    return rows


@pytest.mark.parametrize("caching", [True, False])
def test_sessions_are_simulated_as_a_trace_that_states_them(tmp_path: Path, caching: bool) -> None:
    """Equal to the tick: later turns read the items of earlier ones again."""
    stream = drawn_sessions(40)
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, as_rows(stream))), "t.jsonl"))
    load = {"name": "t", "trace": "t", "arrivals": {"kind": "trace"}, "prompt": {"kind": "trace"},
            "output": {"kind": "trace"}}  # fmt: skip
    replayed = build_stream(Workload.model_validate(load), trace, requests=40, seed=0, towers=MODEL.towers)
    assert replayed.prompt_tokens.tolist() == stream.prompt_tokens.tolist()
    kv_cache = {"num_blocks": 3000, "prefix_caching": caching}
    first, second = (deployed({}, kv_cache=kv_cache).simulate(requests) for requests in (stream, replayed))
    assert first.completed.all()
    assert same(first, second)
    assert first.summary().encoders == second.summary().encoders
    assert same(first, deployed({}, kv_cache=kv_cache).simulate(stream, single_steps=True))


# --- beside tokens ----------------------------------------------------------------------------------------


def tokens_of(stream: RequestStream, layout: Layout, groups: list[Any]) -> list[list[Any]]:
    """Return what stands at each place of prompt and answer of each turn, so that equal tokens are the same ones.

    `groups` are the texts of 32 tokens that the first prompts of sessions begin with."""
    assert stream.media is not None
    out: list[list[Any]] = []
    session = 0
    for turn, (parent, reads) in enumerate(zip(layout.continues, layout.reads, strict=True)):
        items = stream.media.of(turn)
        context = [] if parent < 0 else stream.media.of(parent)
        assert [(item.name, item.start) for item in items[: len(context)]] == [(i.name, i.start) for i in context]
        prompt = [] if parent < 0 else [*out[parent]]
        prompt += [("answer", turn, node, place) for node in reads for place in range(32)]
        num_text = 48 if parent >= 0 else 96
        if turn in layout.first:
            prompt += [(groups[session], place) for place in range(32)]
            num_text, session = 64, session + 1
        for item in items[len(context) :]:
            assert item.start == len(prompt)
            prompt += [("item", item.name, place) for place in range(item.tokens)]
        prompt += [("text", turn, place) for place in range(num_text)]
        assert len(prompt) == stream.prompt_tokens[turn]
        out.append(prompt + [("out", turn, place) for place in range(32)])
    return out


@pytest.mark.parametrize("inherits", [True, False])
def test_turns_and_agents_share_the_blocks_whose_tokens_are_the_same(inherits: bool) -> None:
    agents = {
        "share": 0.5,
        "count": 2,
        "turns": 2,
        "inherits": inherits,
        "first_prompt": {"kind": "fixed", "tokens": 96},
    }
    if inherits:
        agents["first_prompt"] = {"kind": "fixed", "tokens": 48}
    lengths = {
        "prompt": {"kind": "fixed", "tokens": 48},
        "output": {"kind": "fixed", "tokens": 32},
        "shared_prefix": {"groups": 2, "tokens": 32, "block_tokens": 16},
        "sessions": {"turns": 3, "pause_s": 0.5, "first_prompt": {"kind": "fixed", "tokens": 96}, "subagents": agents},
    }
    load = Workload.model_validate({**LOAD, **lengths})
    assert load.sessions is not None
    stream, layout = drawn_sessions(8, **lengths), layout_of(load.sessions, 8, 3)
    text_alone = build_stream(load.model_copy(update={"images": None, "videos": None}), None, requests=8, seed=3)
    assert text_alone.hash_ids is not None
    groups = [text_alone.hash_ids[turn][0] for turn in layout.first[:-1]]
    tokens, rows = tokens_of(stream, layout, groups), stream.hash_ids
    assert rows is not None
    assert len(set(groups)) == 2
    for a in range(len(stream)):
        assert len(rows[a]) <= len(tokens[a]) // 16
        for b in range(a):
            assert common(rows[a], rows[b]) == common(tokens[a], tokens[b]) // 16


def common(a: Any, b: Any) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


def test_more_sessions_append_and_text_alone_is_the_same() -> None:
    few, many, silent = drawn_sessions(10), drawn_sessions(30), drawn_sessions(10, images=None, videos=None)
    assert few.media is not None
    assert many.media is not None
    assert many.prompt_tokens[: len(few)].tolist() == few.prompt_tokens.tolist()
    assert [many.media.of(turn) for turn in range(len(few))] == [few.media.of(turn) for turn in range(len(few))]
    assert (few.prompt_tokens - few.media.added_tokens()).tolist() == silent.prompt_tokens.tolist()
    unsized = build_stream(Workload.model_validate(LOAD), None, requests=10, seed=3)
    assert unsized.prompt_tokens.tolist() == silent.prompt_tokens.tolist()


def test_sound_of_videos_goes_with_them() -> None:
    load = Workload.model_validate({**LOAD, "images": None, "videos": {**CLIPS, "sound": True, "share": 1.0}})
    stream = build_stream(load, None, requests=4, seed=3, towers=in_turns().towers)
    assert stream.media is not None
    for turn in range(len(stream)):
        items = stream.media.of(turn)
        assert [item.kind for item in items] == ["video", "audio"] * (len(items) // 2)
        assert [item.start for item in items[::2]] == [item.start for item in items[1::2]]


def test_media_of_a_trace_do_not_go_into_drawn_sessions() -> None:
    lengths = np.full(2, 20)
    trace = Trace("t.csv", "0" * 64, np.arange(2.0), lengths, lengths, media=((TraceItem("image", None, 28, 28),), ()))
    load = {**LOAD, "trace": "t.csv", "prompt": {"kind": "trace"}, "output": {"kind": "trace"}, "videos": None}
    for images in (IMAGES, None):
        assert images is None or LoadImages.model_validate(images).share < 1
        with pytest.raises(UsageError, match=r"t\.csv: the trace names media, .* remove sessions"):
            build_stream(Workload.model_validate({**load, "images": images}), trace, requests=2, seed=0)
