"""aiperf's first releases name the time and the phase of a request otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simtune.specs.traces import read_trace

EXPORT = Path(__file__).parent / "data" / "f04-aiperf-first-releases" / "profile_export.jsonl"


def test_it_is_read_as_aiperf() -> None:
    trace = read_trace(EXPORT)
    assert trace.notes == ("read as aiperf", "1 failed requests left out")
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.999], abs=0.001)
    assert trace.prompt_tokens.tolist() == [550, 540]
    assert trace.output_tokens.tolist() == [193, 193]  # reasoning tokens count


def test_its_warm_up_is_left_out(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in EXPORT.read_text().splitlines()]
    rows[2]["metadata"]["credit_phase"] = "warmup"
    path = tmp_path / "profile_export.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert len(trace) == 1
    assert "1 requests of the warm-up left out" in trace.notes
