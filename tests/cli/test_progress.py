"""Long work shows itself: lines now and then, JSON for machines, names that a shell completes."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from rich.console import Console

from simtune.cli import cli, output, pace
from tests.cli.conftest import Desk, Said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is set."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def work(clock: list[float], quiet: bool = False) -> None:
    with output.progress("plans", quiet) as update:
        for done in range(1, 101):
            clock[0] += 1.0
            update(done, 100, "the best")


def test_progress_without_a_terminal_is_a_line_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    work(clock)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 100 // pace.EVERY_S
    assert lines[0] == "plans: 20 of 100 in 20 s, 1/s, about 80 s left; the best"
    work(clock, quiet=True)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar_that_disappears(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    work(clock)
    output.print_table("a title", ("first", "second"), [("one", "2" * 70)])
    told = capsys.readouterr()
    assert "100/100" in told.err
    assert "the best" in told.err
    assert told.err.rstrip().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the line is cleared"
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", told.out).splitlines())) == 60, "as wide as the terminal"


def test_progress_as_json_is_one_document_a_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(cli) as context:
        context.params["log_json"] = True
        work(clock)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["done"] for line in lines] == [*range(1, 101)]
    assert lines[49] == {
        "what": "plans", "done": 50, "total": 100, "words": "the best", "elapsed_s": 50.0, "per_s": 1.0, "left_s": 50.0,
    }  # fmt: skip


def test_progress_bar_appears_after_its_patience_with_a_rate(clock: list[float]) -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=120)
    with closing(pace.Bar("requests", shown, patience_s=3.0)) as bar:
        clock[0] = 1.0
        bar(250, 1000, "2 h simulated")
        assert shown.file.getvalue() == ""  # type: ignore[attr-defined]
        clock[0] = 5.0
        bar(500, 1000, "5 h simulated")
    line = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "500/1000" in line
    assert "100/s" in line
    assert "5 h simulated" in line


@pytest.mark.parametrize("more", [(), ("--stream",)])
def test_simulation_reports_progress(desk: Desk, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    monkeypatch.setattr(pace, "EVERY_S", 0.0)
    asked = ("--rate", 20, "--requests", 600, *more)
    said = desk.simulate(*asked)
    lines = [line for line in said.err.splitlines() if line.startswith("requests: ")]
    assert [line.split(" in ")[0] for line in lines] == [f"requests: {n} of 600" for n in (256, 512, 600)]
    assert all(line.endswith(" s simulated") for line in lines)
    quiet = desk.simulate(*asked, "--quiet")
    assert "requests: " not in quiet.err
    assert (quiet.code, quiet.out) == (said.code, said.out)


def test_redrawn_worlds_are_counted(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "EVERY_S", 0.0)
    said = desk.simulate("--rate", 2, "--requests", 20, "--uncertainty", 20, "--jobs", 1)
    lines = [line.split(" in ")[0] for line in said.err.splitlines() if line.startswith("worlds: ")]
    assert lines == [f"worlds: {n} of 20" for n in range(1, 21)]


@pytest.mark.parametrize(
    ("typed", "begun", "found"),
    [
        (["simulate", "--model"], "llama-3.1-8", "llama-3.1-8b"),
        (["simulate", "--hardware"], "h100", "h100-sxm"),
        (["sweep", "--workload"], "ch", "chat"),
        (["simulate", "--engine"], "vllm-0.2", "vllm-0.24"),
        (["show"], "rtx", "rtx-4090"),
        ([], "opt", "optimize"),
    ],
)
def test_shells_complete_verbs_and_names(typed: list[str], begun: str, found: str) -> None:
    items = ShellComplete(cli, {}, "simtune", "_SIMTUNE_COMPLETE").get_completions(typed, begun)
    assert found in [item.value for item in items]
    assert all(item.value.startswith(begun) for item in items)


def test_large_files_can_be_left_out_of_a_run(desk: Desk, call: Callable[..., Said]) -> None:
    asked = ("--rate", 2, "--requests", 20, "--out", "run")
    assert (
        desk.simulate(*asked, "--leave-out", "requests", "--leave-out", "trace", "--leave-out", "swimlanes").code == 0
    )
    left = {path.name for path in Path("run").iterdir()}
    assert "summary.json" in left
    assert not left & {"requests.csv", "trace.json.gz", "swimlanes.json.gz"}
    assert 'id="swimlane-data"' not in Path("run/report.html").read_text()
    before = Path("run/report.html").read_bytes()
    assert call("report", "run").code == 0
    assert Path("run/report.html").read_bytes() == before
    said = desk.simulate("--leave-out", "trace")
    assert said.code == 2
    assert "give both" in said.err
