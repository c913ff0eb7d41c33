"""Turns of a session that follow the answer before them are refused by name, once."""

from __future__ import annotations

import json
from pathlib import Path

from simtune.specs.traces import read_trace
from tests.cli.conftest import call

TRACE = Path(__file__).parent / "data" / "f05-multi-turn-trace" / "trace.jsonl"


def test_turns_with_a_delay_are_refused_for_what_they_are() -> None:
    result = call("workload", TRACE)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert f"{TRACE.name}:2: delay: a turn of a session, sent this long after the answer before it" in result.err
    assert "give every turn a timestamp" in result.err


def test_turns_with_times_of_their_own_are_read(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    timed = tmp_path / "timed.jsonl"
    timed.write_text("".join(json.dumps({**row, "timestamp": 1000.0 * i}) + "\n" for i, row in enumerate(rows)))
    assert len(read_trace(timed).prompt_tokens) == len(rows) == 9
