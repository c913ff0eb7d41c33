"""The notebook runs from top to bottom, and everything a notebook would show can be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELLS = json.loads((ROOT / "examples" / "tour.ipynb").read_text("utf-8"))["cells"]


@pytest.fixture(scope="module")
def toured() -> dict[str, Any]:
    """What is there after all cells, each run as a notebook runs it."""
    known: dict[str, Any] = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), known)
    return known


def test_nothing_that_was_shown_is_stored() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_what_comes_out_can_be_shown(toured: dict[str, Any]) -> None:
    result, tuned = toured["result"], toured["tuned"]
    assert "offered_rate_rps" in result._repr_html_()
    assert tuned.chosen.candidate.name in tuned._repr_html_()
    assert set(result.figures()) == {"ttft", "tpot", "e2el"}
    course = tuned.figures()["course"]
    assert course.data[0].y[-1] == tuned.bound
    assert course.data[1].y[-1] == tuned.value
    (curve,) = result.figures()["ttft"].data
    assert curve.x[0] == pytest.approx(1e3 * result.ttft_s.min())


@pytest.mark.parametrize("library", ["pandas", "pyarrow"])
def test_tables_have_a_row_for_each(toured: dict[str, Any], library: str) -> None:
    pytest.importorskip(library)
    for what, rows in ((toured["result"], 300), (toured["tuned"], len(toured["tuned"].rows))):
        table = what.to_pandas() if library == "pandas" else what.to_arrow()
        assert len(table) == rows
