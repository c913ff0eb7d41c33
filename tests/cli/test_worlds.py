"""`optimize --worlds` and `--robust`: how sure the choice is, printed and in the summary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simtune.report.info import percent
from simtune.runs.run_reader import read_run
from simtune.specs.plan_words import in_words


@pytest.mark.slow
def test_worlds_state_confidence_in_the_choice(desk: Any) -> None:
    desk.study("max_num_batched_tokens: [2048]", "max_num_batched_tokens: [512, 2048]")
    said = desk.optimize("--worlds", 20)
    assert said.code == 0, said
    assert "20 redrawn worlds: " in said.out
    assert "the chosen plan in " in said.out
    assert "measure next: " in said.out
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    sure = summary["confidence"]
    assert sure["worlds"] == 20
    assert [v["candidate"] for v in sure["versus"]] == [q["candidate"] for q in sure["quantiles"][1:]]
    for rival in sure["versus"]:
        assert f"beats {in_words(rival['candidate'])} with {rival['probability']:.0%}" in said.out
    drawn = summary["uncertainty"]
    assert f"P(SLO holds) is {percent(drawn['slo_probability'])} over 20 redrawn worlds; in 90 % of them " in said.out
    assert "requests/s/GPU are served inside the limits" in said.out
    run = read_run(desk.folder / "run")
    assert run.summary.confidence is not None
    assert json.loads(json.dumps(run.summary.confidence.to_data())) == sure


def test_search_states_probability_of_its_limits(desk: Any) -> None:
    said = desk.optimize("--jobs", 1)
    assert said.code == 0, said
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    assert "confidence" not in summary
    assert summary["uncertainty"] is None
    stated = summary["slo_probability"]
    assert len(stated["limits"]) == len(summary["slo"])
    assert stated["low"] <= stated["probability"] <= stated["high"]
    ends = f"{percent(stated['low'])} to {percent(stated['high'])}"
    sentence = f"P(SLO holds) is {percent(stated['probability'])} ({ends}) over 200 drawn worlds; in 90 % of them "
    assert sentence in said.out
    assert sentence in (desk.folder / "run" / "report.html").read_text()
    for text in ("p99 TTFT is ", "p99 TPOT is ", "requests/s/GPU are served inside the limits."):
        assert text in said.out
    again = desk.optimize("--jobs", 2, "--json", "--force")
    assert again.json["slo_probability"] == stated


def test_the_robust_plan_is_chosen(desk: Any) -> None:
    said = desk.optimize("--robust", 0.1, "--worlds", 4, "--json")
    assert said.code == 0, said
    assert said.json["uncertainty"]["worlds"] == 4
    assert "slo_probability" not in said.json, "simulated worlds replace the estimated probability"
    quantiles = said.json["confidence"]["quantiles"]
    tenth = [dict(zip(q["levels"], q["values"], strict=True))[0.1] for q in quantiles]
    assert tenth[0] == max(tenth)
    assert quantiles[0]["candidate"] == said.json["plan"]["name"]


def test_a_quantile_is_within_0_and_1(desk: Any) -> None:
    assert "--robust" in desk.refused(desk.optimize, "--robust", 1.5)
    assert "--worlds" in desk.refused(desk.optimize, "--worlds", 1)
