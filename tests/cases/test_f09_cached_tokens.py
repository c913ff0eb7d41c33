"""Prompt tokens that a gateway counts as cached are said to be missing from the load."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.specs.traces import read_trace
from tests.cli.conftest import call

GATEWAY = Path(__file__).parent / "data" / "f09-cached-tokens" / "gateway.jsonl"
SAID = "23,040 of 30,000 prompt tokens were found cached; this load says nothing of prefixes"


def test_a_note_says_how_many() -> None:
    assert any(note.startswith(SAID) for note in read_trace(GATEWAY).notes)
    assert f"note: {SAID}" in call("workload", GATEWAY).err


@pytest.mark.parametrize("key", ["prompt_tokens_details", "input_tokens_details"])
def test_by_either_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(GATEWAY.read_text().replace("prompt_tokens_details", key))
    assert any(note.startswith(SAID) for note in read_trace(path).notes)


def test_a_column_of_them(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,cached_tokens\n0,100,6,64\n1,50,6,0\n2,50,6,\n")
    (note,) = read_trace(path).notes
    assert note.startswith("64 of 200 prompt tokens were found cached")


def test_a_log_without_hits_has_no_note(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(GATEWAY.read_text().replace('"cached_tokens": 768', '"cached_tokens": 0'))
    assert not any("cached" in note for note in read_trace(path).notes)
