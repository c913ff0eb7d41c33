"""`simtune report` with one run, several, and a folder of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Desk, Said


def test_runs_are_compared_and_listed(desk: Desk, call: Callable[..., Said]) -> None:
    for name, rate in (("a", 2), ("b", 4)):
        assert desk.simulate("--rate", rate, "--requests", 40, "--out", f"runs/{name}").code == 0
    said = call("report", "runs/a", "runs/b", "--out", "both.html")
    assert said.code == 0, said
    assert "USD per million" in said.out
    assert said.err.startswith("warning: The runs are not under the same load: offered, requests/s (2.00 beside 4.00)")
    assert "+100.0 %" in said.out
    assert Path("both.html").read_text().startswith("<!DOCTYPE html>")
    assert call("report", "runs").code == 0
    assert 'href="b/report.html"' in Path("runs/index.html").read_text()
    document = call("report", "runs/a", "runs/b", "--json").json
    assert document["a"]["price, USD an hour"] == 3.0
    assert call("report", "runs", "--json").json == {"report": str(Path("runs") / "index.html")}
    assert call("report", "runs/a", "--json").json == {"report": str(Path("runs/a") / "report.html")}
    before = Path("runs/a/report.html").read_bytes()
    assert call("report", "runs/a").code == 0
    assert Path("runs/a/report.html").read_bytes() == before
    assert "exists; give --force" in desk.refused(call, "report", "runs/a", "runs/b", "--out", "both.html")
