"""The journal of a search: what it keeps, what it forgives, and that a killed search comes to the same bytes."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simtune.errors import UsageError
from simtune.results.summary import SimulationSummary
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Pool
from simtune.tuner.search.climb import SimulationFinding
from simtune.tuner.search.implied_results import uses
from simtune.tuner.search.search_journal import SearchJournal, key_of
from tests.tuner.test_bounds import COSTS, deployed, poisson, pool

STUDY = """\
schema: simtune/study@1
name: tiny
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 2}
workload: chat
slo:
  ttft_s: {p99: 1.0}
  tpot_s: {p99: 0.030}
search:
  tp: [1, 2]
  pp: [1]
  max_num_seqs: [64]
  max_num_batched_tokens: [2048]
  requests: 200
  confirm: {draws: 0}
"""
CHANGES = {"manifest.json"}
"""The only file that tells the time of day, and the command."""


def a_finding(seed: int = 0) -> SimulationFinding:
    deployment = deployed(pool())
    result = deployment.simulate(poisson(30, 20.0, 50, 20, seed))
    return SimulationFinding(
        met=False,
        summary=result.summary(),
        reason="TTFT p99 is too long",
        used=uses(deployment, result) if seed else None,
        first_tokens_miss=False,
        decodes_miss=None,
        strain=1.25,
    )


def test_what_is_kept_is_there_in_another_process(tmp_path: Path) -> None:
    path, kept = tmp_path / "run" / "journal.jsonl", [a_finding(seed) for seed in range(3)]
    journal = SearchJournal.begin(path, "inputs", SimulationFinding)
    assert not path.exists()
    for i, finding in enumerate(kept):
        journal.keep(f"key{i}", finding)
    later = SearchJournal(path, "inputs", SimulationFinding)
    assert [later.look(f"key{i}") for i in range(3)] == kept
    assert later.look("key3") is None
    sent = pickle.loads(pickle.dumps(later))
    assert len(sent) == 3
    summary = sent.look("key1").summary
    assert isinstance(summary, SimulationSummary)
    assert summary.to_data() == kept[1].summary.to_data()  # also in what was never set


def test_a_line_that_is_not_whole_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    path, finding = tmp_path / "journal.jsonl", a_finding()
    journal = SearchJournal.begin(path, "inputs", SimulationFinding)
    for key in ("one", "two", "three"):
        journal.keep(key, finding)
    whole = path.read_bytes()
    for cut in (1, 40, 700):
        path.write_bytes(whole[:-cut])
        journal = SearchJournal(path, "inputs", SimulationFinding)
        assert [journal.look(key) is not None for key in ("one", "two", "three")] == [True, True, cut == 1]
        journal.keep("four", finding)
        assert SearchJournal(path, "inputs", SimulationFinding).look("four") == finding
    path.write_bytes(whole.replace(b'"preemptions": 0', b'"preemptions": 1', 1))
    assert SearchJournal(path, "inputs", SimulationFinding).look("one") is None, "a result that was changed is none"


def test_results_of_other_inputs_are_not_taken(tmp_path: Path) -> None:
    journal = SearchJournal.begin(tmp_path / "journal.jsonl", "inputs", SimulationFinding)
    journal.keep("key", a_finding())
    with pytest.raises(UsageError, match=r"holds results of another study.*--force"):
        SearchJournal(tmp_path / "journal.jsonl", "others", SimulationFinding)
    assert len(SearchJournal.begin(tmp_path / "journal.jsonl", "others", SimulationFinding)) == 0


def test_keys_tell_plans_and_rates_apart() -> None:
    def plan(seats: int) -> Plan:
        batching = Batching(max_num_seqs=seats, max_num_batched_tokens=512)
        return Plan(name="plan", model="m", pools=(Pool(hardware="h", instances=1, batching=batching),))

    keys = {key_of(plan(seats), rate) for seats in (8, 16) for rate in (None, 1.0, 1.0 + 1e-15)}
    assert len(keys) == 6
    assert key_of(plan(8), 1.0) in keys
    assert COSTS.step_s > 0


# --- killed -----------------------------------------------------------------------------------------------


def _command(out: str, jobs: int, *more: str) -> list[str]:
    given = ("optimize", "study.yaml", "--out", out, "--jobs", str(jobs), "--quiet", "--json", *more)
    return [sys.executable, "-m", "simtune", *given]


def _bytes(run: Path) -> dict[str, bytes]:
    files = (path for path in run.rglob("*") if path.is_file() and path.name not in CHANGES)
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def _kill_and_resume(folder: Path, kills: int, jobs: int, seed: int) -> None:
    """Kill a search at random moments, when it has come a little further each time; then let it end."""
    (folder / "study.yaml").write_text(STUDY)
    undisturbed = subprocess.run(_command("one", jobs), cwd=folder, capture_output=True, text=True)
    assert undisturbed.returncode == 0, undisturbed.stderr
    journal, rng = folder / "two" / "journal.jsonl", random.Random(seed)
    resume: list[str] = []
    for _ in range(kills):
        process = subprocess.Popen(
            _command("two", jobs, *resume), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        size = journal.stat().st_size if journal.exists() else 0
        while process.poll() is None and (journal.stat().st_size if journal.exists() else 0) <= size:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -9, errors
        resume = ["--resume"]
    last = subprocess.run(_command("two", jobs, "--resume", "--force"), cwd=folder, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert _bytes(folder / "two") == _bytes(folder / "one")


def test_a_killed_search_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    _kill_and_resume(tmp_path, kills=2, jobs=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_killed_again_and_again(tmp_path: Path, jobs: int) -> None:
    for round_ in range(4):
        folder = tmp_path / str(round_)
        folder.mkdir()
        _kill_and_resume(folder, kills=5, jobs=jobs, seed=round_)
