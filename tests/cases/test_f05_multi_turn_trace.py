"""A multi-turn trace in Mooncake's keys as aiperf replays it: turns follow answers, prompts grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.errors import SpecError
from simtune.specs.columns import replay
from simtune.specs.trace_write import trace_text
from simtune.specs.traces import Trace, read_trace
from simtune.workload.requests import build_stream
from tests.sim.test_agent_sessions import deployed

ROWS: list[dict[str, Any]] = [
    row
    for i in range(3)
    for row in (
        {"session_id": f"sess-{i}", "input_length": 2000, "output_length": 300, "hash_ids": [0, 1, 2, 100 * i + 3],
         "timestamp": 1000.0 * i, "group_id": i % 2},
        {"session_id": f"sess-{i}", "input_length": 500, "output_length": 200, "hash_ids": [100 * i + 5],
         "delay": 1500.0},
        {"session_id": f"sess-{i}", "input_length": 900, "output_length": 100, "hash_ids": [6, 7], "delay": 700.0},
    )
]  # fmt: skip


def read(folder: Path, rows: list[dict[str, Any]]) -> Trace:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(file)


def test_nine_requests_in_three_sessions_that_wait(tmp_path: Path) -> None:
    trace = read(tmp_path, ROWS)
    assert (len(trace), trace.num_arrivals) == (9, 3)
    assert trace.prompt_tokens.tolist() == [2000, 2800, 3900] * 3
    assert trace.rate_rps == 1.0
    result = deployed(instances=4).simulate(build_stream(replay(trace, "t"), trace, requests=3, seed=0))
    assert result.arrival_s[::3] == pytest.approx([0.0, 1.0, 2.0])
    for turn, pause_s in ((1, 1.5), (2, 0.7)):
        assert result.arrival_s[turn::3] == pytest.approx(result.finish_s[turn - 1 :: 3] + pause_s)


def test_turns_go_on_from_their_session_and_first_prompts_share_their_blocks(tmp_path: Path) -> None:
    trace = read(tmp_path, ROWS)
    assert trace.hash_ids is not None
    assert trace.block_tokens == 16
    first, second, third = trace.hash_ids[:3]
    assert [len(x) for x in (first, second, third)] == [2300 // 16, 3000 // 16, 4000 // 16]
    assert third[: len(second)] == second
    assert second[: len(first)] == first
    other = trace.hash_ids[3]
    assert other[:96] == first[:96], "three blocks of 512 tokens"
    assert not set(other[96:]) & set(first[96:])
    assert first[96:125] == tuple(range(3 * 32, 3 * 32 + 29)), "the fourth as far as the prompt fills it"


def test_a_trace_of_turns_is_written_cut_repeated_and_read_again(tmp_path: Path) -> None:
    trace = read(tmp_path, ROWS)
    again = tmp_path / "again.jsonl"
    again.write_text(trace_text(trace, again.name))
    back = read_trace(again)
    assert back.turns is not None
    assert trace.turns is not None
    assert tuple(back.hash_ids or ()) == tuple(trace.hash_ids or ())
    assert back.turns.after == trace.turns.after
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "session"):
        assert getattr(back, name).tolist() == getattr(trace, name).tolist()
    stream = build_stream(replay(trace, "t"), trace, requests=7, seed=0)
    assert len(stream) == 21
    assert stream.hash_ids is not None
    assert not set(stream.hash_ids[0]) & set(stream.hash_ids[9]), "a repeat shares nothing"
    assert stream.arrival_s is not None
    assert np.diff(stream.arrival_s[::3]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"delay": "soon"}}, "trace.jsonl:2: delay: must be a number of milliseconds"),
        ({1: {"delay": -5}}, "trace.jsonl:2: delay: must be a number of milliseconds"),
        ({1: {"timestamp": 5.0}}, "trace.jsonl:2: timestamp: a later turn of a session whose other turns have a delay"),
        ({0: {"timestamp": None}}, "trace.jsonl:1: timestamp: must be a number of milliseconds"),
        ({2: {"session_id": None}}, "trace.jsonl:3: session_id: is missing here"),
        ({4: {"input_length": 0}}, "trace.jsonl:5: input_length: must be at least 1 token, not 0"),
        ({4: {"output_length": 0}}, "trace.jsonl:5: output_length: must be at least 1 token, not 0"),
        ({4: {"hash_ids": [1, 2, 3]}}, "trace.jsonl:5: hash_ids: has 3 ids, the turn 1 blocks of 512 tokens"),
        ({4: {"hash_ids": [-1]}}, "trace.jsonl:5: hash_ids: must be a list of whole numbers of at least 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, changes: dict[int, Any], message: str) -> None:
    rows = [row | changes.get(i, {}) for i, row in enumerate(ROWS)]
    with pytest.raises(SpecError) as caught:
        read(tmp_path, rows)
    assert message in str(caught.value)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS)[:-30])
    with pytest.raises(SpecError, match="the file seems to be cut off"):
        read_trace(file)


def test_one_session_without_a_time_among_others(tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS]
    del rows[3]["timestamp"]
    with pytest.raises(SpecError, match="4: timestamp: is missing here: the first turns of other sessions have it"):
        read(tmp_path, rows)
