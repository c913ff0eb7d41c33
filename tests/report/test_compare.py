"""Runs side by side: only what differs, every number beside the first, one colour each, within one offline page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.report import compare, figures, index
from simtune.report.compare import NamedRun
from simtune.runs.reading import read_run, runs_in
from tests.report.test_report_page import read

RunMaker = Callable[..., Path]
MOST_BYTES = 8_000_000


def price(per_million: float) -> dict[str, Any]:
    known = {"per_hour_usd": 24.0, "per_million_output_tokens_usd": per_million, "source": "a list"}
    return {**known, "per_million_tokens_usd": None, "per_thousand_requests_usd": None}


def pair(make_run: RunMaker, summary: dict[str, Any], **changed: Any) -> list[NamedRun]:
    """The same run twice, the second with a larger batch and other values."""
    plan = json.loads(json.dumps(summary["plan"]))
    plan["pools"][0]["batching"]["max_num_seqs"] = 512
    return [
        NamedRun("today", read_run(make_run(price=price(2.0)))),
        NamedRun("tomorrow", read_run(make_run(price=price(1.5), plan=plan, **changed))),
    ]


def test_only_what_differs_is_listed(make_run: RunMaker, optimized: Any) -> None:
    runs = pair(make_run, optimized[0], seed=7)
    assert compare.plan_differences(runs) == [
        ("seed", ("0", "7")),
        ("pools.0.batching.max_num_seqs", ("256", "512")),
    ]
    assert compare.plan_differences([runs[0], runs[0]]) == []


def test_numbers_stand_beside_those_of_the_first_run(make_run: RunMaker, optimized: Any) -> None:
    summary, _ = optimized
    ttft = {**summary["metrics"]["ttft"], "p99": summary["metrics"]["ttft"]["p99"] * 0.9, "ci95": {"p99": [0.2, 0.4]}}
    runs = pair(make_run, summary, metrics={**summary["metrics"], "ttft": ttft})
    rows = {row.what: row for row in compare.numbers(runs)}
    assert rows["TTFT p99"].cells[1][1:] == ("200–400", "−10.0 %")
    assert rows["TPOT p99"].cells[1].difference == "="
    assert rows["output tokens"].cells[0].difference == ""
    assert rows["output tokens"].cells[1] == ("1.50", "", "−25.0 %")
    assert "P(SLO holds)" not in rows  # of neither run worlds were redrawn


def test_a_saturated_run_has_no_latency_and_no_curve(make_run: RunMaker, optimized: Any) -> None:
    runs = pair(make_run, optimized[0], saturated=True)
    rows = {row.what: row for row in compare.numbers(runs)}
    assert rows["TTFT p99"].cells[1] == ("saturated", "", "")
    curves = [trace["name"] for trace in compare.overlays(runs)["ttft"]["data"]]
    assert curves == ["today"]


def test_a_run_keeps_its_colour_through_the_page(make_run: RunMaker, optimized: Any) -> None:
    runs = pair(make_run, optimized[0])
    for name, figure in compare.overlays(runs).items():
        lines = {
            trace["name"]: trace["line"]["color"] for trace in figure["data"] if trace["name"] in ("today", "tomorrow")
        }
        assert lines == {"today": figures.COLOURS[0], "tomorrow": figures.COLOURS[1]}, name
    page = compare.render(runs)
    assert re.findall(r'<i class="dot" style="background: (#\w+)"></i>tomorrow', page) == [figures.COLOURS[1]] * 3


def test_ten_runs_fit_into_one_page_that_loads_nothing(make_run: RunMaker) -> None:
    runs = [NamedRun(f"run {i} <b>&", read_run(make_run())) for i in range(10)]
    page = compare.render(runs)
    assert len(page.encode()) < MOST_BYTES
    assert page == compare.render(runs)
    reader = read(page)
    assert reader.headings == ["The runs", "What differs", "Numbers", "Figures"]
    assert not [attrs for tag, attrs in reader.tags if tag == "script" and "src" in attrs]
    assert not [tag for tag, _ in reader.tags if tag in ("link", "b")]
    assert json.loads(reader.scripts["numbers"])["run 3 <b>&"]["GPUs"] == 8


def test_names_that_are_equal_are_numbered() -> None:
    assert compare.distinct(["a", "b", "a"]) == ["a (1)", "b", "a (2)"]


def test_an_index_links_to_every_run(make_run: RunMaker, tmp_path: Path) -> None:
    for _ in range(2):
        make_run(price=price(2.0))
    folders = runs_in(tmp_path)
    assert len(folders) == 2
    assert runs_in(folders[0]) == ()
    page = index.render("runs", [NamedRun(f.name, read_run(f)) for f in folders])
    assert [f'href="{f.name}/report.html"' in page for f in folders] == [True, True]
    row = index.index_row(NamedRun("a b", read_run(folders[0])))
    assert row.link == "a%20b/report.html"
    assert dict(zip(index.COLUMNS, row.cells, strict=True))["state"] == "meets its limits"


@pytest.mark.parametrize(("relative", "shown"), [(0.0004, "="), (0.1234, "+12.3 %"), (-0.5, "−50.0 %")])
def test_differences_in_words(relative: float, shown: str) -> None:
    assert compare.difference(relative) == shown
