"""First screen of a report: plan in words, launch line, one figure, what limits it, how sure it is, warnings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from simtune.report import certainty, first_screen, info
from simtune.report.page import render
from simtune.runs.run_reader import read_run
from tests.report.test_report_page import Reader, own_part

REJECTIONS = {
    "requests": 30,
    "share": 0.03,
    "classes": [{"class": "chat", "requests": 30}, {"class": "batch", "requests": 0}],
}
STATED = {
    "worlds": 200,
    "level": 0.9,
    "probability": 0.65,
    "low": 0.615,
    "high": 0.69,
    "limits": [{"low_s": 0.2, "high_s": 1.1}, {"low_s": 0.02, "high_s": 0.05}],
    "value": [17.0, 21.3],
    "safe_probability": 0.9,
    "safe_rate_rps": 20.0,
    "simulations": 12,
}


def header(run: Path) -> Reader:
    page = own_part(render(read_run(run)))
    return Reader(page.partition("</head>")[2].partition("<nav")[0].replace("<body>", ""))


def test_first_screen_has_the_answer_and_leaves_tiles_below(make_run: Any) -> None:
    goal = {"name": "goodput_per_gpu", "unit": "requests/s/GPU", "value": 10.0, "bound": 10.2, "gap": 0.02}
    run = make_run(launch="vllm serve x --max-num-seqs 256", objective=goal)
    reader = header(run)
    assert info.chosen_words(read_run(run)) in reader.words
    assert "vllm serve x --max-num-seqs 256" in reader.words
    assert [a["id"] for tag, a in reader.tags if "plotly-graph-div" in (a.get("class") or "")] == ["first"]
    assert "What limits it." in reader.words
    assert "How sure it is." in reader.words
    assert "another plan is at most 2.0 % better under this cost model." in reader.words
    assert ("div", {"class": "tiles"}) not in reader.tags
    assert ("a", {"href": "#warnings"}) in reader.tags


def test_rejected_requests_are_a_loud_warning_with_their_classes(make_run: Any) -> None:
    warned = {warning.name: warning for warning in first_screen.warnings(read_run(make_run(rejections=REJECTIONS)))}
    assert warned["Rejected"].loud
    assert "were rejected (HTTP 503): 30 of chat. They count as missing every limit" in warned["Rejected"].text


def test_warnings_are_one_line_above_and_sentences_below(make_run: Any) -> None:
    run = read_run(make_run(saturated=True, interrupted=True, refused=3))
    warned = first_screen.warnings(run)
    assert [warning.name for warning in warned][:3] == ["Saturated", "Refused", "Interrupted"]
    assert [warning.loud for warning in warned][:3] == [True, True, False]
    line = first_screen.warned_in_a_line(warned)
    assert line.startswith(f"{len(warned)} warnings: saturated; refused; interrupted; ")
    above, _, below = own_part(render(run)).partition('id="warnings"')
    assert above.count(line) == 1
    for warning in warned:
        assert f"<strong>{warning.name}.</strong>" in below
        assert f"<strong>{warning.name}.</strong>" not in above


def test_a_run_without_warnings_has_no_line_of_warnings(make_run: Any, optimized: Any) -> None:
    hardware = {**optimized[0]["hardware"], "validated": "within 7 %", "estimated": []}
    run = read_run(make_run(searched=False, hardware=hardware))
    assert first_screen.warnings(run) == []
    assert 'href="#warnings"' not in own_part(render(run)).partition("<nav")[0]


def test_first_figure_is_the_best_that_a_run_has(make_run: Any) -> None:
    def caption(**changes: Any) -> str | None:
        first = first_screen.first_figure(read_run(make_run(**changes)))
        return None if first is None else first.caption

    assert "over the offered rate" in (caption() or "")
    assert "share of requests" in (caption(sweep=None) or "")
    assert "running and waiting" in (caption(sweep=None, quantiles=None) or "")
    assert caption(sweep=None, quantiles=None, timeline=None) is None
    curves = first_screen.first_figure(read_run(make_run()))
    assert curves is not None
    assert [trace["name"] for trace in curves.figure["data"]] == ["all in time", "chosen plan", "knee"]


def test_certainty_in_one_line_has_probability_interval_and_gap(make_run: Any) -> None:
    goal = {"name": "goodput_per_gpu", "unit": "requests/s/GPU", "value": 18.2}
    stated = read_run(make_run(slo_probability=STATED, objective={**goal, "bound": 19.4, "gap": 0.067})).summary
    assert certainty.in_one_line(stated) == (
        "P(SLO holds) 65.0 % (61.5 % to 69.0 %); 17.0–21.3 requests/s/GPU in 90 % of 200 worlds; "
        "another plan is at most 6.7 % better under this cost model"
    )
    on_draw = read_run(make_run(slo=[], objective={**goal, "bound": 19.4, "gap": 0.067, "gap_on_draw": 0.02})).summary
    assert certainty.in_one_line(on_draw) == (
        "another plan is at most 6.7 % (2.0 % on the same requests) better under this cost model"
    )
    assert certainty.in_one_line(read_run(make_run(objective=None, slo=[])).summary) is None
    best = read_run(make_run(slo=[], objective={**goal, "bound": 18.2, "gap": 0.0})).summary
    assert certainty.in_one_line(best) == "no plan is better under this cost model"


def test_certainty_in_one_line_of_drawn_worlds(make_run: Any, optimized: Any) -> None:
    intervals = {"slo": [{"value_s": [0.2, 0.4]} for _ in optimized[0]["slo"]]}
    drawn = {"worlds": 20, "level": 0.9, "saturated_probability": 0.0, "slo_probability": 0.8, "intervals": intervals}
    line = certainty.in_one_line(read_run(make_run(uncertainty=drawn, objective=None)).summary)
    assert line is not None
    assert re.fullmatch(r"P\(SLO holds\) 80\.0 %; p99 T\w+T is 200–400 ms in 90 % of 20 worlds", line)


def test_reasons_of_other_plans_name_plans_in_words(make_run: Any, optimized: Any) -> None:
    rows = optimized[1]
    chosen, loser = (next(row for row in rows if row["status"] == status) for status in ("chosen", "infeasible"))
    reason = f"cannot exceed 3 requests/s (flops); {chosen['candidate']} reached 4 requests/s"
    candidates = [{**row, "reason": reason} if row is loser else row for row in rows]
    page = own_part(render(read_run(make_run(candidates=candidates))))
    assert page.count("the chosen plan reached 4 requests/s") >= 2, "among the runners-up, and among all"
    assert f"{chosen['candidate']} reached 4 requests/s" not in page


def test_certainty_in_one_line_without_worlds_is_the_error_of_steps(make_run: Any) -> None:
    measured = {"measured": 1.0, "interpolated": 0.0, "extrapolated": 0.0, "carried_over": 0.0, "data_sheet": 0.0}
    operators = [{"operator": "gemm", "share": 1.0, "log_sd": 0.1, "basis": measured}]
    basis = {**measured, "operators": operators}
    steps = "steps may take 15.2 % less to 17.9 % more time (90 % of cases)"
    line = certainty.in_one_line(read_run(make_run(cost_basis=basis, objective=None)).summary)
    assert line == f"P(SLO holds) is not known; {steps}"
    assert certainty.in_one_line(read_run(make_run(cost_basis=basis, objective=None, slo=[])).summary) == steps
