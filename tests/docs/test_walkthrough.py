"""docs/walkthrough.md: its four commands answer its question, one after the other, in a folder with the log."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from simtune.cli import main
from tests.docs import reading
from tests.docs.reading import DOCS

TEXT = reading.text(DOCS / "walkthrough.md")


def bench() -> dict[str, object]:
    """A result file as `vllm bench serve --save-detailed` leaves it."""
    chance = np.random.default_rng(5)
    prompts, outputs = chance.integers(100, 1500, 60), chance.integers(10, 300, 60)
    return {
        "request_throughput": 3.0,
        "total_input_tokens": int(prompts.sum()),
        "input_lens": prompts.tolist(),
        "output_lens": outputs.tolist(),
        "start_times": np.cumsum(chance.exponential(1 / 3, 60)).tolist(),
        "errors": [""] * 60,
    }


def test_the_commands_lead_from_a_log_to_a_compared_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bench.json").write_text(json.dumps(bench()))
    commands = [line for block in reading.blocks(TEXT, "sh") for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        name, *words = shlex.split(command)
        assert name == "simtune"
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, command
    said = capsys.readouterr().out
    rows = ("TTFT p99, ms", "TPOT p99, ms", "output tokens, USD per million")
    table = said.rpartition("numbers (differences from today)")[2]
    assert [row in table for row in rows] == [True] * 3
    page = Path("compared.html").read_text()
    assert all(name in page for name in ("today", "l40s"))
    assert "<script src" not in page
