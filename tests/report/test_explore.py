"""Limits that a reader moves rank the candidates again, by what was simulated and nothing else."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from simtune.report import explore
from simtune.report.page import render
from simtune.runs.run_reader import read_run

RunMaker = Callable[..., Path]


def test_explorer_points_are_finished_simulations(make_run: RunMaker) -> None:
    run = read_run(make_run())
    simulated = [c for c in run.candidates if c.rate_rps is not None]
    swept = [p for p in run.summary.sweep or () if not p.saturated]
    assert len(explore.points(run)) == len(simulated) + len(swept)
    stopped = tuple(c.model_copy(update={"finished": c.status != "infeasible"}) for c in run.candidates)
    missed = sum(c.status == "infeasible" for c in run.candidates)
    assert len(explore.points(run._replace(candidates=stopped))) == len(simulated) + len(swept) - missed


def test_sliders_begin_at_the_limits_of_the_study(make_run: RunMaker) -> None:
    run = read_run(make_run())
    assert explore.limits(run) == {"ttft": 1000.0, "tpot": 40.0}
    free = run._replace(summary=run.summary.model_copy(update={"slo": ()}))
    assert explore.limits(free)["tpot"] == max(p["tpot"] for p in explore.points(run))


def test_explorer_data_escapes_names(make_run: RunMaker) -> None:
    run = read_run(make_run())
    hostile = run.candidates[0].model_copy(update={"candidate": "</script><b>"})
    text = explore.document(run._replace(candidates=(hostile, *run.candidates[1:])))
    assert "<" not in text
    assert json.loads(text)["points"][0]["name"] == "</script><b>"


def test_a_run_without_a_search_has_nothing_to_explore(make_run: RunMaker) -> None:
    assert 'id="explore"' not in render(read_run(make_run(searched=False)))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to run the page")
def test_the_fragment_of_the_address_moves_the_limits(make_run: RunMaker, tmp_path: Path) -> None:
    run = read_run(make_run())
    page = tmp_path / "page.html"
    page.write_text(render(run), encoding="utf-8")
    rates = sorted(p["rate"] for p in explore.points(run) if p["ttft"] <= 900 and p["tpot"] <= 12)
    least = round(rates[len(rates) // 2] - 0.01, 2)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=8000", "--dump-dom", f"{page.as_uri()}#ttft=900&tpot=12&by=rate&load={least}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    met = [p for p in explore.points(run) if p["ttft"] <= 900 and p["tpot"] <= 12 and p["rate"] >= least]
    best = max(met, key=lambda p: p["rate"])
    assert '<svg class="moved-front"' in dom
    said = html.unescape(dom.partition('<p id="explored" role="status">')[2].partition("</p>")[0])
    count = len({p["name"] for p in met})
    words = json.loads(explore.document(run))["words"]
    assert said == f"{words[best['name']]}: best of {count} that meet these limits at a rate that was simulated."


def test_explorer_details_have_settings_and_launch_command(make_run: RunMaker) -> None:
    run = read_run(make_run(launch="vllm serve x --a 'b'"))
    told = explore.details(run)
    assert set(told) == {point["name"] for point in explore.points(run)}
    chosen, second = run.candidates[0], run.candidates[1]
    assert told[chosen.candidate]["launch"] == "vllm serve x --a 'b'"
    assert ("tp", str(chosen.tp)) in told[chosen.candidate]["settings"]
    assert len(told[chosen.candidate]["quantiles"]["ttft"]) == 101
    assert told[second.candidate]["mean"]["tpot"] == pytest.approx(1e3 * (second.tpot_mean_s or 0))
    assert told[second.candidate]["launch"] is None


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to run the page")
def test_explorer_opens_the_candidate_of_the_address(make_run: RunMaker, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    run = read_run(make_run())
    first = run.candidates[0].model_copy(update={"candidate": hostile})
    page = tmp_path / "page.html"
    page.write_text(render(run._replace(candidates=(first, *run.candidates[1:]))), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=8000", "--dump-dom", f"{page.as_uri()}#candidate={quote(hostile)}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    shown = dom.partition('<div id="candidate"')[2].partition("</section>")[0]
    assert html.escape(hostile, quote=False) in shown
    assert "<img" not in shown
    assert "<dt>max_num_seqs</dt>" in shown
    assert dom.count("As a table") >= 5
