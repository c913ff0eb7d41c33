"""--budget: the search ends in time, and what it had is written; what a search will cost is printed before it."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.cli import optimize as command


class Clock:
    """A deadline that passes once it was asked so often."""

    def __init__(self, questions: int) -> None:
        self.questions, self.passed, self.seconds = questions, False, 60.0

    def __call__(self) -> bool:
        self.questions -= 1
        self.passed = self.questions < 0
        return self.passed


def test_the_plan_by_then_is_written_and_the_gap_is_stated(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = 0
    said = None
    while said is None or said.code:
        questions += 1
        monkeypatch.setattr(command, "Deadline", lambda seconds, most=questions: Clock(most))
        said = desk.optimize("--json", "--budget", "1m", "--force")
        if said.code:
            assert said.code == 2
            assert "no plan met the SLO before the time was up" in said.err
    assert "the budget of 60 s was up: this is the best plan by then; --resume goes on" in said.err
    assert said.json["interrupted"] is True
    assert said.json["objective"]["gap"] > 0
    lines = [line for line in said.err.splitlines() if line.startswith("plans: ")]
    assert lines[0].startswith("plans: 4 to search in 2 cuts of GPUs; one simulation takes ")
    assert "--budget 60s" in lines[1]
    monkeypatch.undo()


def test_a_budget_that_is_not_used_up_changes_nothing(desk: Any) -> None:
    said = desk.optimize("--json", "--budget", "1h")
    assert said.code == 0
    assert said.json["interrupted"] is False
    assert "budget of" not in said.err
    assert desk.refused(desk.optimize, "--budget", "soon").count("write it as 90s, 3m or 1h, from 1 second") == 1
