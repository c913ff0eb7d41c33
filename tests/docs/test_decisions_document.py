"""docs/decisions.md: its figures are those of the code."""

from __future__ import annotations

from plotly.offline import get_plotlyjs

from simtune.costs.residual import MAX_POINTS
from simtune.costs.ticks import TICKS_PER_SECOND
from tests.docs import reading
from tests.docs.reading import DOCS

DOCUMENT = " ".join(reading.text(DOCS / "decisions.md").split())


def test_figures_are_those_of_the_code() -> None:
    assert f"at most {MAX_POINTS} centres" in DOCUMENT
    assert f"ends after {2**62 // TICKS_PER_SECOND // 86400} days" in DOCUMENT
    assert "about 5 MiB of plotly.js" in DOCUMENT
    assert 3 < len(get_plotlyjs().encode()) / 2**20 < 7
