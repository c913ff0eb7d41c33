"""Media of traces whose prompts share text: later turns read them again, and names of blocks beside the tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.encoder import EncoderCosts, Work
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.trace_media import TraceItem
from simtune.specs.trace_write import trace_text, written_names
from simtune.specs.traces import MAX_HASH_ID, Trace, read_trace
from simtune.specs.workload import Workload
from simtune.validation.next_measurement import mooncake_text
from simtune.workload.media_blocks import MediaBlocks
from simtune.workload.requests import RequestStream, build_stream
from simtune.workload.session_fit import fit_sessions
from tests.sim.test_images import same
from tests.specs.test_traces import problems, written

SEES, H100 = load_model("qwen2.5-vl-7b"), load_hardware("h100-sxm")
LENGTHS = {"prompt": {"kind": "trace"}, "output": {"kind": "trace"}}
REPLAYED: dict[str, Any] = {"name": "w", "trace": "t", "arrivals": {"kind": "fixed", "rate_rps": 20.0}, **LENGTHS}
CHART = 20 * 20 + 2
"""Tokens of an image of 560 x 560 pixels: a vector of 28 x 28 pixels each, and two markers."""
TURNS = [
    {"session_id": "a", "timestamp": 0, "input_length": 100, "output_length": 20, "hash_ids": [7],
     "images": [{"width": 560, "height": 560}]},
    {"session_id": "a", "delay": 1000, "input_length": 50, "output_length": 30},
    {"session_id": "a", "delay": 1000, "input_length": 40, "output_length": 10,
     "images": [{"width": 280, "height": 280, "name": "logo", "at": 5}]},
]  # fmt: skip


def read(folder: Path, rows: list[dict[str, Any]]) -> Trace:
    return read_trace(written(folder, "\n".join(map(json.dumps, rows)), "t.jsonl"))


def replayed(trace: Trace, requests: int, **more: Any) -> RequestStream:
    load = Workload.model_validate({**REPLAYED, **more})
    return build_stream(load, trace, requests=requests, seed=0, towers=SEES.towers)


# --- turns ------------------------------------------------------------------------------------------------


def test_a_turn_reads_the_items_of_the_turns_before_it_again(tmp_path: Path) -> None:
    trace = read(tmp_path, TURNS)
    chart, logo = TraceItem("image", "line 1, 0", 560, 560), TraceItem("image", "logo", 280, 280, at=205)
    assert trace.media == ((chart,), (chart,), (chart, logo))
    assert trace.prompt_tokens.tolist() == [100, 170, 240]
    stream = replayed(trace, 2)
    assert stream.media is not None
    assert stream.turns is not None
    first = 10 * 10 + 2
    assert stream.prompt_tokens.tolist() == 2 * [100 + CHART, 170 + CHART, 240 + CHART + first]
    assert [[item.start for item in stream.media.of(i)] for i in range(3)] == [[0], [0], [0, 205 + CHART]]
    assert len({stream.media.of(i)[0].name for i in range(3)}) == 1
    assert stream.media.of(3)[0].name != stream.media.of(0)[0].name, "a repeated session has items of its own"
    assert stream.hash_ids is not None
    assert stream.block_tokens == 16
    rows = [stream.hash_ids[i] for i in range(4)]
    # prompt and answer of a turn, of which 16 * n tokens of text are named
    assert [len(row) for row in rows[:2]] == [(CHART + 112) // 16, (CHART + 192) // 16]
    assert rows[1][: len(rows[0])] == rows[0]
    assert rows[2][: len(rows[1])] == rows[1]
    assert not set(rows[0]) & set(rows[3])


def test_turns_that_are_written_are_the_same_when_read_again(tmp_path: Path) -> None:
    trace = read(tmp_path, TURNS)
    again = read_trace(written(tmp_path, trace_text(trace, "again.jsonl"), "again.jsonl"))
    assert again.media == trace.media
    assert again.turns is not None
    first, second = replayed(trace, 2), replayed(again, 2)
    assert first.prompt_tokens.tolist() == second.prompt_tokens.tolist()
    assert first.hash_ids is not None
    assert second.hash_ids is not None
    assert [*first.hash_ids] == [*second.hash_ids]


def test_a_name_of_the_file_is_not_given_to_another_item(tmp_path: Path) -> None:
    turn = {**TURNS[1], "images": [{"width": 560, "height": 560, "name": "line 1, 0"}]}
    trace = read(tmp_path, [TURNS[0], turn])
    assert trace.media is not None
    assert [item.name for item in trace.media[1]] == ["line 1, 0'", "line 1, 0"]


def test_a_fitted_spec_says_that_it_has_no_items(tmp_path: Path) -> None:
    trace = read(tmp_path, TURNS)
    fitted = fit_sessions(trace, "t", Workload.model_validate({"name": "a", **LOADED}).arrivals)
    assert "4 images in 3 of 3 requests; replay the trace itself" in fitted.lost


LOADED = {
    "arrivals": {"kind": "poisson", "rate_rps": 1.0},
    "prompt": {"kind": "fixed", "tokens": 9},
    "output": {"kind": "fixed", "tokens": 9},
}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"images": [{"width": 4, "height": 4, "at": 51}]},
         "2: images: at (51) exceeds the 50 tokens of text; lower it"),
        ({"videos": 3}, "2: videos: must be a list of objects with width and height and seconds, not 3"),
    ],
)  # fmt: skip
def test_a_wrong_item_of_a_turn_is_named(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    rows = [TURNS[0], {**TURNS[1], **row}]
    assert problems(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl") == [why]


@pytest.mark.parametrize(
    ("turns", "more", "why"),
    [
        (True, {"images": {"sizes": [{"width": 28, "height": 28}]}}, "replayed as they are; remove images"),
        (False, {"sessions": {"follow": "arrivals", "concurrent": 2, "turns": 2}}, "remove sessions"),
        (False, {"shared_prefix": {"groups": 1, "tokens": 32, "block_tokens": 16}},
         "the trace names media within its text; remove shared_prefix"),
    ],
)  # fmt: skip
def test_loads_with_text_of_their_own_are_refused(turns: bool, more: dict[str, Any], why: str) -> None:
    items = ((TraceItem("image", "a", 28, 28, at=3),), ())
    rows = np.array([20, 20])
    trace = Trace("t", "0" * 64, np.array([0.0, 1.0]), rows, rows, media=items)
    if turns:
        from simtune.specs.trace_turns import TraceTurns

        waits = TraceTurns(np.array([0, 2]), ((), (0,)), np.zeros(2))
        trace = Trace("t", "0" * 64, np.array([0.0, 0.0]), rows, rows, media=items, turns=waits)
    with pytest.raises(UsageError, match=why):
        replayed(trace, 2, **more)


# --- simulated --------------------------------------------------------------------------------------------


def deployed(prefix_caching: bool, **more: Any) -> Deployment:
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 4096},
        "kv_cache": {"num_blocks": 8001, "prefix_caching": prefix_caching},
        "max_model_len": 16384,
        "encoder": {},
        **more,
    }
    return deploy(Plan.model_validate({"name": "p", "model": "m", "pools": [pool]}), SEES, H100)


def test_an_item_is_encoded_once_for_all_turns(tmp_path: Path) -> None:
    """Without a prefix cache its embeddings are found; with one its tokens are, all but those of the last block."""
    trace = read(tmp_path, TURNS)
    for caching, hits in ((False, 2), (True, 0)):
        result = deployed(caching).simulate(replayed(trace, 1))
        (work,) = result.summary().encoders
        assert (work.encoded_images, work.cache_hits) == (2, hits)
    first, second = (deployed(True).simulate(replayed(trace, n)) for n in (1, 2))
    assert second.summary().encoders[0].encoded_images == 2 * first.summary().encoders[0].encoded_images


def test_the_second_turn_computes_what_the_first_did_not(tmp_path: Path) -> None:
    """In closed form: the image and the first text are found in whole blocks of 16, and nothing is encoded again."""
    rows = [{**TURNS[0], "input_length": 110}, TURNS[1]]
    deployment = deployed(True, async_scheduling=False)
    result = deployment.simulate(replayed(read(tmp_path, rows), 1))
    outcome, costs = result.outcome, EncoderCosts(SEES, H100, deployment.plan.pools[0])
    assert outcome.first_token[0] - outcome.arrival[0] == pytest.approx(
        deployment.costs.mixed(0, 0, [(0, CHART + 110)], 1) + costs.seconds([Work(1, 1600, 400)]) * 2**40, abs=1
    )
    # the last token of an answer is not computed before the next turn
    hit = (CHART + 110 + 19) // 16 * 16
    second = deployment.costs.mixed(0, 0, [(hit, CHART + 180 - hit)], 1)
    assert outcome.first_token[1] - outcome.arrival[1] == second


@pytest.mark.parametrize("caching", [True, False])
def test_jumps_beside_turns_with_media_are_exact_to_the_tick(tmp_path: Path, caching: bool) -> None:
    sessions = [{**row, "session_id": f"s{n}", **({"timestamp": 40 * n} if "timestamp" in row else {})}
                for n in range(12) for row in TURNS]  # fmt: skip
    deployment = deployed(caching, max_model_len=2048, kv_cache={"num_blocks": 200, "prefix_caching": caching})
    stream = replayed(read(tmp_path, sessions), 24)
    result: Result = deployment.simulate(stream)
    assert result.completed.all()
    assert same(result, deployment.simulate(stream, single_steps=True))


# --- written ----------------------------------------------------------------------------------------------


def named_streams(folder: Path) -> dict[str, RequestStream]:
    """Return loads whose names of blocks exceed what a file may have, by their source."""
    sizes = {"sizes": [{"width": 560, "height": 560}, {"width": 280, "height": 280}]}
    load = {
        "name": "w",
        "arrivals": REPLAYED["arrivals"],
        "prompt": {"kind": "fixed", "tokens": 40},
        "output": {"kind": "fixed", "tokens": 9},
        "images": {**sizes, "repeats": {"share": 0.9, "images": 3}},
    }
    prefix = {"shared_prefix": {"groups": 2, "tokens": 32, "block_tokens": 16}}
    chart = {"width": 560, "height": 560, "name": "chart"}
    rows = [
        {"timestamp": 50 * n, "input_length": 1030, "output_length": 9, "hash_ids": [5, 6 + n % 2],
         "images": [{**chart, "at": 64 * (n % 3)}]}
        for n in range(6)
    ]  # fmt: skip
    drawn_loads = {"drawn": load, "prefixed": load | prefix, "adapters": load | {"adapters": {"count": 40}}}
    streams = {
        name: build_stream(Workload.model_validate(spec), None, requests=30, seed=1, towers=SEES.towers)
        for name, spec in drawn_loads.items()
    }
    return streams | {"trace": replayed(read(folder, rows), 12)}


def test_names_of_blocks_with_items_are_read_again(tmp_path: Path) -> None:
    """`simtune measure` writes such loads: the prompts that are read share what those that were written share."""
    for source, stream in named_streams(tmp_path).items():
        rows = stream.hash_ids
        assert rows is not None
        assert max(map(max, filter(None, rows))) > MAX_HASH_ID, source
        again = read_trace(written(tmp_path, mooncake_text(stream), f"{source}.jsonl"))
        assert again.hash_ids is not None
        assert again.block_tokens == stream.block_tokens
        assert again.prompt_tokens.tolist() == stream.prompt_tokens.tolist()
        assert [*map(len, again.hash_ids)] == [*map(len, rows)]
        pairs = {pair for names in zip(rows, again.hash_ids, strict=True) for pair in zip(*names, strict=True)}
        assert len(pairs) == len(dict(pairs)) == len({name for _, name in pairs}), f"{source}: names are distinct"
        assert sum(map(len, rows)) > len(pairs), f"{source}: prompts share something"


@given(
    rows=st.lists(st.lists(st.one_of(st.integers(0, 9), st.integers(MAX_HASH_ID + 1, MAX_HASH_ID + 9)))),
    more=st.lists(st.lists(st.integers(0, 2 * MAX_HASH_ID))),
)
def test_written_names_depend_on_the_rows_before_alone(rows: list[list[int]], more: list[list[int]]) -> None:
    names = written_names(rows)
    if max((max(row, default=0) for row in rows), default=0) <= MAX_HASH_ID:
        assert names == rows
    else:
        assert written_names([*rows, *more])[: len(rows)] == names


def test_largest_names_that_a_file_may_have_are_written_as_they_are() -> None:
    assert written_names([(MAX_HASH_ID, 3), ()]) == [[MAX_HASH_ID, 3], []]
    assert written_names([(MAX_HASH_ID + 1, 3), (), (3,)]) == [[0, 1], [], [1]]


# --- names beside tokens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """Text of named blocks, more text of its own, and items: (at, name, side in units of 28 pixels)."""

    text: tuple[int, ...]
    more: int
    items: tuple[tuple[int, str | None, int], ...]


def tokens_of(prompt: Prompt, number: int, block: int) -> list[Any]:
    """Return what stands at each place of a prompt, so that equal tokens are the same ones."""
    # a name of a block stands for all text before it
    text: list[Any] = [("text", name, place) for name in prompt.text for place in range(block)]
    text += [("own", number, place) for place in range(prompt.more)]
    out: list[Any] = []
    past = 0
    for order, (at, name, side) in enumerate(sorted(prompt.items, key=by_place)):
        out += text[past:at]
        past = at
        identity = (name, side) if name is not None else (number, order)
        out += [("item", identity, place) for place in range(side * side + 2)]
    return out + text[past:]


def common(a: list[Any], b: list[Any]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


BLOCK = 48
SIDES = {"a": 2, "b": 5, "c": 9}
"""Sides of items by name, in units of 28 pixels; those without a name have that of b."""
# names form a tree, so that each stands for the text before it as well
PATHS = st.lists(st.integers(0, 1), max_size=3).map(
    lambda path: tuple(int("1" + "".join(map(str, path[: n + 1])), 2) for n in range(len(path)))
)
PROMPTS = st.builds(
    lambda text, more, items: Prompt(
        text, more, tuple((min(at, len(text) * BLOCK + more), name, SIDES[name or "b"]) for at, name in items)
    ),
    PATHS,
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.sampled_from(["a", "b", "c", None])), max_size=3),
)


@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=4).filter(lambda ps: any(p.items for p in ps)),
    round_=st.integers(0, 1),
)
def test_prompts_share_the_blocks_whose_tokens_are_the_same(prompts: list[Prompt], round_: int) -> None:
    """An item that stands once in a file is shared with none, so that names end before it; tokens agree on that."""
    lengths = np.array([len(p.text) * BLOCK + p.more for p in prompts])
    media = tuple(
        tuple(TraceItem("image", name, 28 * side, 28 * side, at=at) for at, name, side in sorted(p.items, key=by_place))
        for p in prompts
    )
    count = len(prompts)
    trace = Trace(
        "t", "0" * 64, np.arange(count) / 4, lengths, lengths, tuple(p.text for p in prompts), BLOCK, media=media
    )
    rows = replayed(trace, 2 * count).hash_ids
    assert isinstance(rows, MediaBlocks)
    rows = rows[round_ * count : (round_ + 1) * count]
    tokens = [tokens_of(p, number, BLOCK) for number, p in enumerate(prompts)]
    for a in range(count):
        assert len(rows[a]) <= len(tokens[a]) // 16, "a block is named if all of it is"
        for b in range(a):
            assert common(list(rows[a]), list(rows[b])) == common(tokens[a], tokens[b]) // 16


def by_place(item: tuple[int, str | None, int]) -> int:
    return item[0]


@given(prompts=st.lists(PROMPTS, min_size=2, max_size=3))
def test_parts_of_names_are_the_names_of_parts(prompts: list[Prompt]) -> None:
    lengths = np.array([len(p.text) * BLOCK + p.more for p in prompts])
    media = tuple(tuple(TraceItem("image", "a", 56, 56) for _ in p.items) for p in prompts)
    texts = tuple(p.text for p in prompts)
    trace = Trace("t", "0" * 64, np.arange(len(prompts)) / 4, lengths, lengths, texts, BLOCK, media=media)
    stream = replayed(trace, 2 * len(prompts))
    odd = np.arange(len(stream)) % 2 == 1
    rows, part = stream.hash_ids, stream.kept(odd).hash_ids
    assert rows is not None
    assert part is not None
    assert [*part] == [row for row, keep in zip(rows, odd.tolist(), strict=True) if keep]
