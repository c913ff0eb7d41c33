"""The run directory: what is in it, that it is the same every time, and that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import simtune.api  # noqa: F401 (loaded before anything of it is replaced: it keeps what it finds on loading)
from simtune.report import page
from simtune.runs.run_reader import read_run
from simtune.specs.plan import Plan
from simtune.tuner.search import best_first
from tests.cli.conftest import ROOT, STUDY, Desk

FILES = {
    "plan.yaml", "engine/launch.sh", "engine/vllm-mixed.yaml", "engine/dynamo.yaml", "summary.json", "candidates.csv",
    "requests.csv", "report.html", "manifest.json", "certificate.json",
    "swimlanes.json.gz", "search.csv",
}  # fmt: skip

Call = Callable[..., Any]


@pytest.fixture
def earlier_run(desk: Any, tiny_run: Path) -> None:
    """A finished search of the study of the desk, in the folder `run`."""
    shutil.copytree(tiny_run, desk.folder / "run")


def test_run_directory_holds_exactly_the_documented_files(tiny_run: Path, bytes_of: Call) -> None:
    assert set(bytes_of(tiny_run)) == FILES
    assert [path.name for path in tiny_run.parent.iterdir() if path.name.startswith(".")] == []
    assert os.access(tiny_run / "engine" / "launch.sh", os.X_OK)

    plan = Plan.from_file(tiny_run / "plan.yaml")
    summary = json.loads((tiny_run / "summary.json").read_text())
    assert summary["plan"] == plan.to_data()
    assert summary["num_gpus"] == plan.num_devices
    with (tiny_run / "requests.csv").open() as file:
        requests = list(csv.DictReader(file))
    assert len(requests) == summary["requests"]
    assert sum(r["finish_s"] != "" for r in requests) == summary["completed"]
    with (tiny_run / "candidates.csv").open() as file:
        candidates = list(csv.DictReader(file))
    assert (candidates[0]["candidate"], candidates[0]["status"]) == (plan.name, "chosen")
    engine = yaml.safe_load((tiny_run / "engine" / "vllm-mixed.yaml").read_text())
    assert engine["max-num-seqs"] == plan.pools[0].batching.max_num_seqs


def test_json_files_have_no_nan(tiny_run: Path) -> None:
    for name in ("summary.json", "manifest.json"):
        json.loads((tiny_run / name).read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_time_of_day_is_in_the_manifest_only(tiny_run: Path) -> None:
    written = json.loads((tiny_run / "manifest.json").read_text())["written"]
    for name in FILES - {"manifest.json"}:
        content = (tiny_run / name).read_bytes()
        content = gzip.decompress(content) if name.endswith(".gz") else content
        assert written[:10].encode() not in content, name
        if name.endswith(".gz"):
            assert (tiny_run / name).read_bytes()[4:10] == bytes(4) + b"\x00\xff", "gzip's own time stamp and system"


features: Any = importlib.import_module("numpy._core._multiarray_umath")
WIDE = [name for name in features.__cpu_dispatch__ if features.__cpu_features__[name]]
"""What this processor has beyond what numpy needs, such as AVX2 and AVX-512."""
ELSEWHERE = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONIOENCODING": "utf-8",  # of what is printed: in ASCII tables have other borders
    "TZ": "Asia/Kathmandu",
    "NPY_DISABLE_CPU_FEATURES": " ".join(WIDE),
}


def test_two_processes_with_different_hash_seeds_write_the_same_bytes(typed: Call, desk: Any, bytes_of: Call) -> None:
    """Also with another number of worker processes, locale and time zone, and without the wide registers of its
    processor."""
    desk.study("  tp: [1, 2]\n  pp: [1]", "  tp: [1, 2]\n  pp: [1, 2]")
    first = typed("optimize", "study.yaml", "--out", "one", "--jobs", 1, PYTHONHASHSEED="1")
    second = typed("optimize", "study.yaml", "--out", "two", "--jobs", 2, PYTHONHASHSEED="2", **ELSEWHERE)
    assert (first.code, second.code) == (0, 0)
    # Progress is for searches of more than 20 s, which a busy machine makes of any.
    assert all(line.startswith("plans: ") for line in (first.err + second.err).splitlines()), (first.err, second.err)
    assert first.out.replace("one/", "two/") == second.out
    one, two = bytes_of(desk.folder / "one"), bytes_of(desk.folder / "two")
    assert set(one) == set(two) == FILES
    assert [name for name in one if one[name] != two[name]] == ["manifest.json"]
    manifests = [json.loads(run["manifest.json"]) for run in (one, two)]
    assert [m.pop("command") for m in manifests] == [
        ["simtune", "optimize", "study.yaml", "--out", "one", "--jobs", "1"],
        ["simtune", "optimize", "study.yaml", "--out", "two", "--jobs", "2"],
    ]
    for manifest in manifests:
        del manifest["written"]
    assert manifests[0] == manifests[1]


def test_manifest_distinguishes_inputs(desk: Any, tiny_run: Path) -> None:
    def inputs(out: str, *more: str) -> Any:
        assert desk.optimize("--out", out, *more).code == 0
        return json.loads((desk.folder / out / "manifest.json").read_text())

    first = json.loads((tiny_run / "manifest.json").read_text())
    again, other = inputs("b"), inputs("c", "--seed", "3")
    assert first["inputs"] == again["inputs"]
    changed = {key for key in first["inputs"] if first["inputs"][key] != other["inputs"][key]}
    assert changed == {"study:tiny"}
    assert (first["seed"], other["seed"]) == (0, 3)


def test_the_trace_is_named_by_its_hash(desk: Any) -> None:
    desk.write("trace.csv", "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},50,5\n" for i in range(30)))
    assert desk.simulate("--requests", 30, "--out", "run", workload="trace.csv").code == 0
    trace = json.loads((desk.folder / "run" / "manifest.json").read_text())["trace"]
    assert trace["file"] == "trace.csv"
    assert len(trace["sha256"]) == 64


# --- read again -------------------------------------------------------------------------------------------


def test_simulate_accepts_the_plan_and_gives_the_chosen_result_again(desk: Any) -> None:
    """At the workload's own rate optimize and simulate run the very same thing."""
    desk.write("study.yaml", (desk.folder / "study.yaml").read_text() + "objective: e2el\n")
    assert desk.optimize().code == 0
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    said = desk.simulate("--plan", "run/plan.yaml", "--json", "--requests", summary["requests"])
    assert said.code == 0
    again = said.json
    assert again["plan"] == summary["plan"]
    assert again["metrics"] == summary["metrics"]
    assert again["duration_s"] == summary["duration_s"]


def test_simulate_at_the_rate_found_meets_the_slo_and_well_above_it_does_not(desk: Any) -> None:
    desk.write("steady.yaml", "schema: simtune/workload@1\nname: steady\narrivals: {kind: fixed, rate_rps: 5}\n"
               "prompt: {kind: lognormal, mean_tokens: 800, sigma: 0.7, max_tokens: 4000}\n"
               "output: {kind: lognormal, mean_tokens: 150, sigma: 0.7, max_tokens: 1000}\n")  # fmt: skip
    desk.study("workload: chat", "workload: ./steady.yaml")
    assert desk.optimize().code == 0
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    rate = summary["offered_rate_rps"]
    limit_s = summary["study"]["slo"]["tpot_s"]["p99"]

    def tpot_p99_s(rate_rps: float) -> float:
        said = desk.simulate(
            "--plan",
            "run/plan.yaml",
            "--rate",
            rate_rps,
            "--requests",
            summary["requests"],
            "--json",
            workload="./steady.yaml",
        )
        return float(said.json["metrics"]["tpot"]["p99"])

    assert tpot_p99_s(rate) == pytest.approx(summary["metrics"]["tpot"]["p99"], rel=1e-6)
    assert tpot_p99_s(rate) <= limit_s < tpot_p99_s(1.3 * rate)


@pytest.mark.usefixtures("earlier_run")
def test_report_draws_the_same_page_again(typed: Call, desk: Any, bytes_of: Call) -> None:
    before = bytes_of(desk.folder / "run")
    (desk.folder / "run" / "report.html").unlink()
    said = typed("report", "run", PYTHONHASHSEED="5")
    assert (said.code, said.out, said.err) == (0, "report: run/report.html\n", "")
    assert bytes_of(desk.folder / "run") == before


def test_a_simulation_leaves_a_run_directory_too(desk: Any, bytes_of: Call, call: Call) -> None:
    said = desk.simulate("--out", "run")
    assert said.code == 0
    assert said.out.endswith("report: run/report.html\n")
    before = bytes_of(desk.folder / "run")
    assert set(before) == FILES - {"candidates.csv", "certificate.json", "search.csv"} | {"trace.json.gz"}, (
        "there was nothing to choose from"
    )
    assert call("report", "run").code == 0
    assert bytes_of(desk.folder / "run") == before


# --- what is there already --------------------------------------------------------------------------------


@pytest.mark.usefixtures("earlier_run")
def test_an_earlier_run_is_kept_without_force_and_replaced_with_it(desk: Any, bytes_of: Call) -> None:
    message = desk.refused(desk.optimize, "--seed", 5)
    assert message == "run: holds an earlier run; give --force to replace it, or name another folder"
    (desk.folder / "run" / "left.over").touch()
    first = bytes_of(desk.folder / "run")
    assert desk.optimize("--seed", 5, "--force").code == 0
    second = bytes_of(desk.folder / "run")
    assert set(second) == FILES
    assert second["requests.csv"] != first["requests.csv"]
    assert set(bytes_of(desk.folder)) == {"study.yaml", "tmp"} | {f"run/{name}" for name in FILES}


def test_force_never_replaces_what_is_no_run(desk: Any) -> None:
    desk.write("run/thesis.tex", "years of work")
    message = desk.refused(desk.optimize, "--force")
    assert message == "run: is not empty and no earlier run (it has no manifest.json); name another folder"


def test_an_empty_folder_is_filled(desk: Any, bytes_of: Call) -> None:
    (desk.folder / "run").mkdir()
    assert desk.optimize().code == 0
    assert set(bytes_of(desk.folder / "run")) == FILES


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_current_folder_cannot_be_replaced(desk: Any, out: str) -> None:
    message = desk.refused(desk.optimize, "--out", out, "--force")
    assert message == f"{out}: is in use and cannot be replaced as a whole; name a folder inside it"


# --- whole or not at all ----------------------------------------------------------------------------------


def breaking(method: Callable[..., Any], error: BaseException, nth: int) -> Callable[..., Any]:
    """A method that raises `error` when it is called for the n-th time."""
    calls = itertools.count(1)

    def call(*args: Any, **named: Any) -> Any:
        if next(calls) == nth:
            raise error
        return method(*args, **named)

    return call


@pytest.mark.parametrize(
    ("earlier", "method", "nth"),
    [
        pytest.param(False, "write_bytes", 3, id="writing the files"),
        pytest.param(False, "rename", 1, id="taking the name"),
        pytest.param(True, "write_bytes", 6, id="writing the files over an earlier run"),
        pytest.param(True, "rename", 1, id="setting the earlier run aside"),
        pytest.param(True, "rename", 2, id="taking its name"),
    ],
)
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "run: cannot be written (No space left on device); make room and give the same command again",
        ),
        (KeyboardInterrupt(), 130, "interrupted; what was not finished was not written"),
    ],
    ids=["full disk", "interrupt"],
)
def test_failed_write_leaves_the_earlier_run_unchanged(
    desk: Any,
    monkeypatch: pytest.MonkeyPatch,
    earlier: bool,
    method: str,
    nth: int,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    if earlier:
        assert desk.simulate("--out", "run").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, breaking(getattr(Path, method), error, nth))
        message = desk.refused(desk.simulate, "--out", "run", "--force", "--seed", 9, code=code)
    assert message.endswith(words)
    assert desk.simulate("--out", "run", "--force").code == 0, "and all is well again"


def test_an_interrupt_while_the_page_is_drawn_writes_nothing(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert desk.simulate("--out", "run").code == 0
    monkeypatch.setattr("simtune.report.page.render", breaking(page.render, KeyboardInterrupt(), 1))
    message = desk.refused(desk.simulate, "--out", "run", "--force", "--seed", 9, code=130)
    assert message.endswith("interrupted; what was not finished was not written")


@pytest.mark.parametrize("option", ["--timeline", "--per-request"])
def test_an_interrupted_table_or_timeline_leaves_the_old_one(
    desk: Any, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    name = {"--timeline": "steps.json.gz", "--per-request": "requests.csv"}[option]
    assert desk.simulate(option, name).code == 0
    monkeypatch.setattr(os, "replace", breaking(os.replace, KeyboardInterrupt(), 1))
    desk.refused(desk.simulate, option, name, "--force", "--seed", 9, code=130)


def test_an_interrupted_report_leaves_the_old_page(desk: Any, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert desk.simulate("--out", "run").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", breaking(os.replace, KeyboardInterrupt(), 1))
        desk.refused(call, "report", "run", code=130)


@pytest.mark.usefixtures("earlier_run")
def test_an_interrupt_before_there_is_a_plan_writes_nothing(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simtune.tuner.search.front.answer", breaking(best_first.optimize, KeyboardInterrupt(), 1))
    assert desk.refused(desk.optimize, "--force", code=130) == "interrupted; what was not finished was not written"


def test_interrupted_search_keeps_and_reports_the_best_plan(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = best_first.optimize

    def interrupted(*args: Any, progress: Any, **named: Any) -> Any:
        def stop(now: Any) -> None:
            if now.best is not None:
                raise KeyboardInterrupt

        return whole(*args, progress=stop, **named)

    monkeypatch.setattr("simtune.tuner.search.front.answer", interrupted)
    said = desk.optimize("--json", "--quiet")
    assert said.code == 130
    assert said.err == "interrupted: this is the best of what was searched\n"
    assert said.json["interrupted"] is True
    assert json.loads((desk.folder / "run" / "summary.json").read_text())["interrupted"] is True


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(errno.ENOSPC, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_finished_search_is_kept_where_it_cannot_be_written(
    desk: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """As where the winner is confirmed, drawn or written."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", breaking(Path.rename, error, 1))
        said = desk.optimize()
    assert said.code == code
    assert "simulations are kept: --resume goes on with them, in run" in said.err
    assert [path.name for path in desk.folder.joinpath("run").iterdir()] == ["journal.jsonl"]
    asked: list[Any] = []
    monkeypatch.setattr("simtune.tuner.search.climb.Simulation.run", lambda task: asked.append(task))
    assert desk.optimize("--resume").code == 0
    assert asked == [], "nothing is simulated again"


def test_ctrl_c_reaches_the_process(start: Call, desk: Any) -> None:
    """The study names a policy whose module never comes to its end, so the process is known to be waiting for it."""
    Path("endless.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)\n")
    Path("endless.yaml").write_text(STUDY + "batching: {policy: 'endless:Policy'}\n")
    path = os.pathsep.join((str(ROOT), str(desk.folder)))
    process = start("optimize", "endless.yaml", "--out", "run", "--allow-code", PYTHONPATH=path)
    while not Path("begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    out, err = "", ""
    for _ in range(12):
        process.send_signal(
            signal.SIGINT
        )  # again where Python was where it lets none through, as when it closes a file
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=5)
            break
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "interrupted; what was not finished was not written"
    assert not (desk.folder / "run").exists()


def test_run_directory_holds_swimlanes(desk: Desk) -> None:
    assert desk.simulate("--rate", 2, "--requests", 30, "--out", "run").code == 0
    swimlanes = read_run(Path("run")).swimlanes
    assert swimlanes is not None
    assert swimlanes.to_bytes() == Path("run/swimlanes.json.gz").read_bytes()
    assert swimlanes.requests == 30
