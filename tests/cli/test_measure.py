"""simtune measure, and simtune validate of a run: what to run next, and what the results say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Call = Callable[..., Any]


@pytest.mark.slow
def test_runs_are_written_and_their_results_read(
    typed: Call, call: Call, bytes_of: Callable[[Path], Any], tiny_run: Path, tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run-measure"
    assert typed("optimize", tiny_run.parent / "study.yaml", "--out", run, "--jobs", 1).code == 0
    before = bytes_of(run)
    said = call("measure", run, "--json")
    assert said.code == 0, said.err
    record = said.json
    assert record == json.loads((folder / "measure.json").read_text())
    assert record["plans"][0]["name"] == json.loads((run / "certificate.json").read_text())["incumbent"]["plan"]
    assert record["right"] <= record["runs"][0]["right_after"]
    for made in record["runs"]:
        settings = (folder / "plans" / made["plan"] / "engine" / "vllm-mixed.yaml").read_text()
        assert "max-num-seqs" in settings
    made = next(made for made in record["runs"] if made["prompt_tokens"] is None)
    rows = [json.loads(line) for line in (folder / "loads" / f"{made['name']}.jsonl").read_text().splitlines()]
    assert len(rows) == made["requests"]
    low, high = (next(m[k] for m in made["predicted"] if m["metric"] == "tpot") for k in ("low_s", "high_s"))
    ttft = next(m["middle_s"] for m in made["predicted"] if m["metric"] == "ttft")
    slow = {
        "total_input_tokens": 1,
        "input_lens": [row["input_length"] for row in rows],
        "output_lens": [row["output_length"] for row in rows],
        "start_times": [row["timestamp"] / 1e3 for row in rows],
        "ttfts": [ttft] * len(rows),
        "itls": [[(low + high) / 2] * (row["output_length"] - 1) for row in rows],
        "errors": [""] * len(rows),
    }
    result = folder / "results" / f"{made['name']}.json"
    result.parent.mkdir()
    result.write_text(json.dumps(slow))
    answer = call("validate", run, "--from", result, "--json")
    assert answer.code == 0, answer.err
    assert answer.json == json.loads((folder / "answer.json").read_text())
    ends = next(plan for plan in answer.json["plans"] if plan["name"] == made["plan"])
    assert np.diff(ends["after"]) < np.diff(ends["before"]), "the answer is tighter"
    slow["itls"] = [[10 * high] * (row["output_length"] - 1) for row in rows]
    result.write_text(json.dumps(slow))
    against = call("validate", run, "--from", result)
    assert against.code == 4
    assert "every run contradicts the prediction" in against.out
    assert bytes_of(run) == before, "the run is not changed"


def test_what_is_missing_is_named(call: Call, tiny_run: Path, tmp_path: Path) -> None:
    said = call("validate", tiny_run, "--from", tmp_path / "bench.json", "--out", tmp_path)
    assert said.code == 2
    assert f"holds no measure.json; run `simtune measure {tiny_run}` first" in said.err
    assert "name the folder to write: --out" in call("validate", "plan.yaml", "--from", "bench.json").err
    assert "no such folder" in call("measure", tmp_path / "nothing").err
    record: dict[str, Any] = {
        "schema": "simtune/measure@1", "study": "tiny", "study_file": None, "unit": "requests/s", "digest": "other",
        "seed": 0, "worlds": 2, "noise": 0.03, "right": 0.5, "rival": "b", "plans": [], "runs": [],
    }  # fmt: skip
    (tmp_path / "measure.json").write_text(json.dumps(record))
    said = call("validate", tiny_run, "--from", tmp_path / "bench.json", "--out", tmp_path)
    assert said.code == 2
    assert "is of another search than" in said.err
