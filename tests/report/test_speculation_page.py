"""What a page says of speculation: where it should be off, how the draft branches, what engines are told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.report import page
from simtune.report.figures import plotly_js
from simtune.report.speculation_page import (
    drawn_tree,
    engine_rows,
    gain_figure,
    headline,
    off_line,
    render,
    tree_figure,
)
from simtune.runs.run_reader import read_run
from simtune.runs.schema import DraftSchedule, DraftShape

RunMaker = Callable[..., Path]


def cell(short: str, gain: float, occurs: bool = True) -> dict[str, Any]:
    return {"scheme": short, "short": short, "off": short == "off", "gain": gain, "occurs": occurs}


FACTS: dict[str, Any] = {
    "drafter": "eagle3",
    "acceptance": {"name": "mine", "origin": "measured"},
    "batches": [1, 64, 512],
    "contexts": [512, 8192],
    "cells": [
        [cell("T7", 2.5), cell("T9", 2.6)],
        [cell("2", 1.4), cell("3", 1.9)],
        [cell("off", 1.0), cell("3", 1.8, occurs=False)],
    ],
    "chain_lengths": [[3, 3], [2, 3], [0, 3]],
    "gain": 1.7,
    "fixed": {"scheme": "chain of 2", "gain": 1.5},
    "by_batch": [
        {"batch": 1, "draft_tokens": 3, "tokens": 2.4, "wasted": 1.6},
        {"batch": 64, "draft_tokens": 2, "tokens": 2.0, "wasted": 1.0},
        {"batch": 512, "draft_tokens": 0, "tokens": 1.0, "wasted": 0.0},
    ],
    "engines": [
        {
            "engine": "vLLM",
            "scheme": "chain of 2",
            "gain": 1.6,
            "loss": 0.06,
            "settings": {"method": "eagle3"},
            "why": "",
        },
        {
            "engine": "SGLang",
            "scheme": "none",
            "gain": 1.0,
            "loss": 0.4,
            "settings": None,
            "why": "drafting pays nowhere",
        },
    ],
    "draft": {
        "batch": 1,
        "context": 8192,
        "nodes": [
            {"path": [1], "probability": 0.6},
            {"path": [2], "probability": 0.2},
            {"path": [1, 1], "probability": 0.3},
            {"path": [1, 2], "probability": 0.1},
        ],
    },
}


def facts(**changes: Any) -> DraftSchedule:
    return DraftSchedule.model_validate({**FACTS, **changes})


def test_speculation_map_draws_the_line_where_drafting_ends() -> None:
    """Below the one cell that is off; not beside the cell that nothing can get to."""
    (edge,) = off_line(facts())
    assert (edge.x, edge.y) == ((-0.5, 0.5), (1.5, 1.5))
    (line,) = gain_figure(facts())["layout"]["shapes"]
    assert (line["y0"], line["y1"]) == (1.5, 1.5)
    open_ = [[*FACTS["cells"][0]], [*FACTS["cells"][1]], [cell("off", 1.0), cell("3", 1.8)]]
    assert len(off_line(facts(cells=open_))) == 2
    assert gain_figure(facts(cells=[[cell("1", 1.2)] * 2] * 3))["layout"]["shapes"] == []


def test_speculation_map_shows_chosen_cells_and_omits_impossible_ones() -> None:
    (shown,) = gain_figure(facts())["data"]
    assert shown["text"][0] == ["T7<br>×2.50", "T9<br>×2.60"]
    assert (shown["z"][2], shown["text"][2]) == ([1.0, None], ["off<br>×1.00", ""])


def test_the_headline_counts_the_cells() -> None:
    assert headline(facts()) == (
        "Drafting with eagle3 gains a factor of 1.70 altogether, 13.3 % more than the best single setting, 2.60 at "
        "best; it should be off in 1 of 5 cells."
    )
    assert "pays at no batch size" in headline(facts(gain=1.0))


def test_draft_tree_drawing_puts_parents_above_children_without_overlap() -> None:
    nodes = {node.path: node for node in drawn_tree(facts().draft)}
    assert nodes[(1,)].x == (nodes[(1, 1)].x + nodes[(1, 2)].x) / 2
    assert nodes[(1, 1)].parent == (nodes[(1,)].x, 1)
    assert nodes[(1,)].x < nodes[(2,)].x
    markers = tree_figure(facts().draft)["data"][1]
    assert markers["hovertext"][0] == "ranks certain: 100.0%"
    assert sorted(markers["text"]) == [".10", ".20", ".30", ".60", "1.00"]


@given(st.sets(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), max_size=20))
def test_draft_tree_drawing_fits_any_tree(nodes: set[tuple[int, ...]]) -> None:
    closed = {path[:depth] for path in nodes for depth in range(1, len(path) + 1)}
    shape = [{"path": list(path), "probability": 0.5 ** len(path)} for path in closed]
    drawn = drawn_tree(DraftShape.model_validate({"batch": 1, "context": 1, "nodes": shape}))
    assert {node.path for node in drawn} == closed
    assert len({(node.x, node.depth) for node in drawn}) == len(closed)
    by_depth: dict[int, list[tuple[int, ...]]] = {}
    for node in sorted(drawn, key=lambda n: n.x):
        by_depth.setdefault(node.depth, []).append(node.path)
    assert all(level == sorted(level) for level in by_depth.values()), "edges never cross"


def test_speculation_page_has_engine_settings_or_the_reason_without() -> None:
    told, not_told = engine_rows(facts())
    assert told == ("vLLM", "chain of 2", "1.60", "6.0 %", '{"method": "eagle3"}')
    assert not_told[-1] == "drafting pays nowhere"


def test_speculation_page_is_self_contained_and_escapes_names() -> None:
    hostile = facts(drafter="<img src=x onerror=alert(1)>")
    written = render(hostile, "a<b>", "GPU & co")
    own = written.replace(plotly_js(), "")
    assert "<img" not in own
    assert "a&lt;b&gt; on GPU &amp; co" in own
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", own)
    assert written == render(hostile, "a<b>", "GPU & co")


def test_the_report_has_the_section_if_the_run_has_the_schedule(make_run: RunMaker) -> None:
    run = make_run()
    assert "What engines can be told" not in page.render(read_run(run))
    summary = json.loads((run / "summary.json").read_text())
    load = [{"rate_rps": rate, "tokens": 2.2, "wasted": 1.1} for rate in (5.0, 10.0)]
    (run / "summary.json").write_text(json.dumps({**summary, "draft_schedule": {**FACTS, "load": load}}))
    written = page.render(read_run(run))
    for name in ("gains", "draft", "batch", "load"):
        assert f'id="speculation-{name}"' in written
    assert "beyond the red line" in written


@pytest.mark.parametrize("key", ["cells", "engines", "draft"])
def test_a_damaged_schedule_is_an_error(make_run: RunMaker, key: str) -> None:
    from simtune.errors import SpecError

    run = make_run()
    summary = json.loads((run / "summary.json").read_text())
    damaged = {k: v for k, v in FACTS.items() if k != key}
    (run / "summary.json").write_text(json.dumps({**summary, "draft_schedule": damaged}))
    with pytest.raises(SpecError, match=rf"draft_schedule\.{key}: is required and missing"):
        page.render(read_run(run))
