"""`simtune rank`: order, words and pages of published techniques on a load of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.report.own_gains_page import points_figure, rank_bars, ranking_figure, render_ranking, render_systems
from simtune.validation.published import OwnGain, OwnGains, OwnLoad, left_out_in_words, ranked
from simtune.validation.published.own_load import OwnInput, OwnPoint
from tests.reproduce.test_own_load import LOAD

OWN = OwnLoad("llama-3.2-1b", "l40s", LOAD)


def gain(name: str, value: float | None, **more: Any) -> OwnGain:
    interval = {} if value is None else {"low": value * 0.9, "high": value * 1.1, "gpus": 1, "base_gpus": 1}
    return OwnGain(family="f", system=name, title=f"<{name}>", gain=value, metric="m", **{**interval, **more})


GAINS = (
    gain("small", 0.5, lacks="vllm: has none"),
    gain("none", None, left_out="alike", reason="alike"),
    gain("great", 2.0, engines=("vllm",), needs=("a draft model",), pays=("below 18 users",)),
    gain("open", 9.0, high=None, low=0.0, reason="saturated: base; lower the rate"),
)


def test_the_greatest_gain_comes_first_and_a_side_that_may_not_keep_up_after_all_others() -> None:
    assert [g.system for g in ranked(GAINS)] == ["great", "small", "open", "none"]
    words = left_out_in_words(GAINS)
    assert words == "Left out: 1 systems: 1 (its sides differ in the published step, load or model alone)."
    assert left_out_in_words(GAINS[:1]) == "No system is left out."


def test_a_bar_lies_between_one_and_the_gain_and_intervals_reach_their_ends() -> None:
    bars = rank_bars(ranked(GAINS))
    figure = ranking_figure(bars)
    *kinds, intervals = figure["data"]
    assert [(trace["base"], trace["x"]) for trace in kinds] == [([1.0], [1.0]), ([0.5], [0.5]), ([1.0], [8.0])]
    assert intervals["x"] == [2.0, 0.5, 9.0]
    errors = intervals["error_x"]
    assert errors["array"][:2] == pytest.approx([0.2, 0.05])
    assert errors["arrayminus"][:2] == pytest.approx([0.2, 0.05])
    assert all(error > 0 for error in (*errors["array"], *errors["arrayminus"]))


def test_break_even_is_drawn_where_the_gain_passes_one() -> None:
    points = [OwnPoint(at=1, gain=2.0), OwnPoint(at=8, gain=None), OwnPoint(at=64, gain=0.5)]
    figure = points_figure(points, "users")
    assert figure["data"][0]["x"] == [1, 64]
    (_, turn) = figure["layout"]["shapes"]
    assert 1 < turn["x0"] < 64


def test_pages_have_every_technique_and_escape_titles() -> None:
    document = OwnGains.of(ranked(GAINS), OWN)
    page = render_ranking(document, OWN)
    for text in ("&lt;great&gt;", "Pays below 18 users.", "Needs: a draft model.", "No engine can be given it: vllm"):
        assert text in page
    assert "<great>" not in page
    varied = gain(
        "great",
        2.0,
        inputs=(OwnInput(what="a <guess>", gains=(0.0, 3.0)),),
        by_users=(OwnPoint(at=1, gain=2.0), OwnPoint(at=64, gain=1.5)),
    )
    systems = render_systems(OwnGains.of([varied, GAINS[1]], OWN), OWN)
    assert "a &lt;guess&gt;" in systems
    assert "does not fit, 3.00" in systems
    assert 'id="users-great"' in systems
