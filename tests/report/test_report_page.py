"""The page: complete, self-contained, the same every time, and deaf to hostile names."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from simtune.report.figures import plotly_js
from simtune.report.page import render
from simtune.runs.run_reader import read_run

RunMaker = Callable[..., Path]


def drawn(run: Path) -> str:
    """The page of a run directory."""
    return render(read_run(run))


def own_part(page: str) -> str:
    """The page without the library it carries."""
    library = plotly_js()
    assert page.count(library) == 1
    return page.replace(library, "")


class Reader(HTMLParser):
    """Headings, visible text, element attributes and the content of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._open: list[str] = []
        self._script = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self._open.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif self._open and self._open[-1] != "style":
            self.text += data
            if self._open[-1] == "h2":
                self.headings.append(data)

    @property
    def balanced(self) -> bool:
        return not self._open

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def read(page: str) -> Reader:
    reader = Reader(own_part(page))
    assert reader.balanced
    return reader


def test_report_of_a_search_has_all_sections_in_order(make_run: RunMaker) -> None:
    reader = read(drawn(make_run()))
    assert reader.headings == [
        "In numbers",
        "Warnings",
        "What was asked",
        "The plan and the runners-up",
        "Throughput against interactivity",
        "Explore",
        "Goodput against rate",
        "Latency",
        "Where a step's time goes",
        "Load over time",
        "Cost model",
        "Memory",
        "All candidates",
    ]
    figures = [a["id"] for tag, a in reader.tags if tag == "div" and "plotly-graph-div" in (a.get("class") or "")]
    assert figures == ["first", "pareto", "sweep", "cdf-ttft", "cdf-tpot", "breakdown", "timeline"]
    assert "serves" in reader.words
    assert "Never validated on this hardware." in reader.words
    assert "weights leave no room for one KV block" in reader.words


def test_one_simulated_plan_makes_a_page_too(make_run: RunMaker) -> None:
    reader = read(drawn(make_run(searched=False)))
    assert "No search: one plan was simulated" in reader.words
    assert "One rate was simulated" in reader.words
    assert "All candidates" not in reader.headings
    assert "Throughput against interactivity" not in reader.headings


def test_of_very_many_candidates_the_table_has_the_first(make_run: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run()
    candidates = [row.candidate for row in read_run(path).candidates]
    note = "The first 2 by rank; candidates.csv has all of them."
    assert len(candidates) > 2
    assert note not in " ".join(read(drawn(path)).words.split())
    monkeypatch.setattr("simtune.report.page.LISTED", 2)
    page = drawn(path)
    assert note in " ".join(read(page).words.split())
    table = page[page.index("All candidates</h2>") :]
    assert table.count('<td class="text plan">') == 2


def test_the_page_loads_nothing_from_anywhere(make_run: RunMaker) -> None:
    page = own_part(drawn(make_run()))
    reader = Reader(page)
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert not [tag for tag, _ in reader.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]
    assert not [a for _, a in reader.tags if "src" in a or a.get("href", "#")[:1] != "#"]  # type: ignore[index]


def test_the_library_inside_cannot_end_its_own_script_element() -> None:
    assert "</script" not in plotly_js().lower()


def test_the_same_run_gives_the_same_bytes_in_any_process(make_run: RunMaker) -> None:
    run = make_run()
    here = hashlib.sha256(drawn(run).encode()).hexdigest()
    assert here == hashlib.sha256(drawn(run).encode()).hexdigest()
    program = (
        "import hashlib, pathlib, sys; from simtune.report.page import render;"
        "from simtune.runs.run_reader import read_run;"
        "print(hashlib.sha256(render(read_run(pathlib.Path(sys.argv[1]))).encode()).hexdigest())"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": str(root)}
    there = subprocess.run(
        [sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True, env=environment
    )
    assert there.stdout.strip() == here


def test_the_numbers_behind_the_page_can_be_read_back(make_run: RunMaker) -> None:
    run = make_run(name="a</script><b>&amp;")
    inside = json.loads(read(drawn(run)).scripts["summary"])
    assert inside == json.loads((run / "summary.json").read_text())


def test_hostile_names_stay_text(make_run: RunMaker, optimized: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    hostile = """<script>alert(1)</script><img src=x onerror="alert(2)">'&{{7*7}}"""
    summary, rows = optimized
    (pool,) = summary["plan"]["pools"]
    plan = {**summary["plan"], "model": hostile, "pools": [{**pool, "hardware": hostile}]}
    study = {**summary["study"], "model": hostile, "workload": hostile}
    candidates = [{**row, "candidate": hostile + row["candidate"], "reason": hostile} for row in rows]
    steps = [{"step": hostile, "parts": [{"operator": hostile, "seconds": 1e-3, "provenance": hostile}]}]
    runners_up = [{**r, "candidate": hostile} for r in summary["runners_up"]]
    sweep = [{**p, "candidate": hostile} for p in summary["sweep"]]
    slo = [{**x, "class": hostile} for x in summary["slo"]]
    changed = {"name": hostile, "model": hostile, "plan": plan, "study": study, "slo": slo}
    changed |= {"hardware": {**summary["hardware"], "device": hostile}, "breakdown": steps}
    page = own_part(drawn(make_run(candidates=candidates, runners_up=runners_up, sweep=sweep, **changed)))
    assert "<script>alert" not in page
    assert "<img" not in page
    reader = Reader(page)
    assert reader.balanced
    assert hostile in reader.words
    figures, _ = page.split('id="summary"')
    before, after = figures.split('id="explore-data">')  # its script sets text, never HTML
    figures = before + after.partition("</script>")[2]
    labels = [json.loads(text) for text in re.findall(r'"(?:name|hovertext|text)":\s*("(?:[^"\\]|\\.)*")', figures)]
    assert any("&lt;script&gt;" in label for label in labels)
    assert not any("<script" in label or "<img" in label for label in labels)  # Plotly takes labels for HTML


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("sweep", "One rate was simulated"),
        ("quantiles", "keeps no latency distribution"),
        ("breakdown", "recorded no step breakdown"),
        ("timeline", "recorded no timeline"),
        ("memory", "recorded no memory accounting"),
        ("study", "No search: one plan was simulated"),
        ("objective", "ranked after the chosen plan"),
        ("runners_up", "Latency"),
        ("offered_rate_rps", "Latency"),
        ("goodput_rps", "runs within"),
        ("slo_attainment", "Latency"),
        ("seed", "Latency"),
    ],
)
def test_report_explains_or_omits_absent_data(make_run: RunMaker, absent: str, words: str) -> None:
    assert words in read(drawn(make_run(**{absent: None}))).words


def test_a_run_in_which_nothing_finished_still_makes_a_page(make_run: RunMaker) -> None:
    nothing = {"unit": "s", "count": 0}
    page = drawn(
        make_run(
            searched=False,
            metrics=dict.fromkeys(("ttft", "tpot", "e2el", "queue"), nothing),
            quantiles={"ttft_s": [], "tpot_s": [], "e2el_s": []},
            timeline={"t_s": [], "running": [], "waiting": [], "kv_used": []},
            slo=[],
            request_throughput_rps=None,
            goodput_rps=None,
            refused=2000,
        )
    )
    words = read(page).words
    assert "2,000 requests of 2,000 exceed max_model_len" in words
    assert "keeps no latency distribution" in words


def test_report_states_saturation_interruption_and_validation(make_run: RunMaker, optimized: Any) -> None:
    calm = read(drawn(make_run())).words
    assert "Saturated." not in calm
    assert "Interrupted." not in calm
    hardware = {**optimized[0]["hardware"], "validated": "within 7 % of vLLM on three loads"}
    loud = read(drawn(make_run(saturated=True, interrupted=True, hardware=hardware))).words
    assert "Saturated." in loud
    assert "cannot keep up" in loud
    assert "Interrupted." in loud
    assert "Validated: within 7 % of vLLM on three loads" in loud
    assert "Never validated" not in loud


def test_a_search_that_simulated_nothing_has_no_front_to_draw(make_run: RunMaker, optimized: Any) -> None:
    rows = [row for row in optimized[1] if row["status"] == "does_not_fit"]
    words = read(drawn(make_run(candidates=rows, sweep=None))).words
    assert "1 candidate: 1 do not fit in memory" in words
    assert "No candidate was simulated" in words
