"""What a search says of work to come and done: worlds, windows of a day, a journal; and words that fit numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import plural
from simtune.report import verdict
from simtune.report.spec_in_one_line import understood
from simtune.runs.run_reader import read_run
from simtune.runs.schema import Run
from simtune.specs.catalog import load_plan
from tests.cli.conftest import Desk, call

DAY = "day: {startup_s: 60, windows: [{hours: 1, rate_rps: 2}, {hours: 2, rate_rps: 4}, {hours: 1, rate_rps: 1}]}\n"


@pytest.fixture
def desk(desk: Desk) -> Desk:
    """With a study of one plan."""
    text = (desk.folder / "study.yaml").read_text()
    for old, new in (("tp: [1, 2]", "tp: [1]"), ("[64, 128]", "[64]")):
        assert old in text
        text = text.replace(old, new)
    desk.write("study.yaml", text)
    return desk


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_windows_of_a_day_are_counted_as_they_are_simulated(desk: Desk) -> None:
    desk.write("study.yaml", (desk.folder / "study.yaml").read_text() + DAY)
    said = call("--log-json", "optimize", "study.yaml", "--out", "run", "--jobs", 1)
    assert said.code == 0, said.err
    windows = [line for line in lines(said.err) if line["what"] == "windows of the day"]
    assert windows[-1]["done"] == windows[-1]["total"] == 3
    assert windows[-1]["words"].startswith("hour 3: ")


def test_worlds_print_their_cost_before_they_start(desk: Desk) -> None:
    said = call("--log-json", "optimize", "study.yaml", "--out", "run", "--jobs", 1, "--worlds", 3)
    assert said.code == 0, said.err
    price = next(i for i, line in enumerate(said.err.splitlines()) if line.startswith("worlds: "))
    first = next(i for i, line in enumerate(said.err.splitlines()) if '"plans in worlds"' in line)
    assert price < first
    assert "in 3 worlds are " in said.err
    worlds = [line for line in lines(said.err) if line["what"] == "plans in worlds"]
    assert worlds[-1]["done"] == worlds[-1]["total"]
    assert f"are {worlds[-1]['total']:,} times a search" in said.err


def test_resume_prints_the_number_of_journal_entries(desk: Desk) -> None:
    assert "resumes with 0 simulations of run/journal.jsonl" in desk.optimize("--resume").err
    assert "resumes" not in desk.optimize("--force").err


def test_plural_follows_the_number(tmp_path: Path) -> None:
    assert (plural(1, "GPU"), plural(2, "GPU"), plural(1_000, "GPU")) == ("1 GPU", "2 GPUs", "1,000 GPUs")
    pool = {"hardware": "h100-sxm", "instances": 1, "engine": "vllm-0.24", "max_model_len": 8192}
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps({"schema": "simtune/plan@1", "name": "p", "model": "llama-3.1-8b", "pools": [pool]}))
    assert "on 1 GPU (h100-sxm): 1 server of 1 GPU, " in understood(load_plan(str(path)))


# --- edges ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny_run: Path) -> Run:
    return read_run(tiny_run)


def changed(run: Run, chosen: dict[str, Any], others: list[dict[str, Any]]) -> Run:
    """The run with one chosen candidate, and others that differ from it."""
    base = next(c for c in run.candidates if c.status == "chosen")
    plan = base.model_copy(update=chosen)
    rows = [plan.model_copy(update={"status": "feasible", "candidate": f"o{i}", **o}) for i, o in enumerate(others)]
    return run._replace(candidates=(plan, *rows))


@pytest.mark.parametrize(
    ("chosen", "others", "noted"),
    [
        ({"tp": 2, "pp": 1}, [{"tp": 1}], False),  # two GPUs are all the study has
        ({"max_num_seqs": 128}, [{"max_num_seqs": 64}], True),
        ({"max_num_seqs": 128}, [{"max_num_seqs": 64}, {"max_num_seqs": 256, "status": "does_not_fit"}], False),
        (
            {"max_num_seqs": 128, "max_num_batched_tokens": 128},
            [{"max_num_seqs": 128, "max_num_batched_tokens": 2048}],
            False,
        ),
    ],
)
def test_edges_are_noted_only_if_values_lie_beyond(
    run: Run, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], others: list[dict[str, Any]], noted: bool
) -> None:
    monkeypatch.setattr(verdict, "neighbours", lambda run: [])
    assert bool(verdict.edges(changed(run, chosen, others))) is noted
