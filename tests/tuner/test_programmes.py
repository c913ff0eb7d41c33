"""Integer programmes are solved with every pulp that is admitted, and their solver writes nothing to stdout."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from typing import Any

import pulp
import pytest

from simtune.tuner.space.integer_programs import add_variable, constraint, solve


def knapsack() -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """At most 10 of weight from things of 6, 5 and 5, worth 7, 5 and 4."""
    problem = pulp.LpProblem("knapsack", pulp.LpMaximize)
    taken = [add_variable(problem, f"x{i}", binary=True) for i in range(3)]
    problem += pulp.lpDot([7, 5, 4], taken)
    problem += pulp.lpDot([6, 5, 5], taken) <= 10, "room"
    return problem, taken


def solved() -> list[float]:
    problem, taken = knapsack()
    assert solve(problem)
    return [variable.value() for variable in taken]


def test_a_pulp_that_has_no_add_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 3.3.0: variables are made by their constructor, which later releases deprecate."""
    expected = solved()
    for name in ("add_variable", "get_constraint_by_name"):
        monkeypatch.delattr(pulp.LpProblem, name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert solved() == expected == [0, 1, 1]
        problem = knapsack()[0]
        assert constraint(problem, "room") is not None
        assert constraint(problem, "price") is None


@pytest.mark.parametrize(
    ("settings", "value"), [({}, 2.5), ({"whole": True}, 2), ({"low": 2.25, "high": 2.75}, 2.5), ({"binary": True}, 1)]
)
def test_kinds_of_variables(settings: dict[str, Any], value: float) -> None:
    problem = pulp.LpProblem("one", pulp.LpMaximize)
    x = add_variable(problem, "x", **settings)
    problem += 1 * x
    problem += x <= 2.5
    assert solve(problem)
    assert x.value() == pytest.approx(value)


def test_what_a_solver_writes_past_python_is_no_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """HiGHS 1.16 prints a banner by C's printf, which stays in a buffer if stdout is no terminal."""
    quiet = pulp.LpProblem.solve

    def chatty(problem: pulp.LpProblem, solver: Any) -> Any:
        os.write(1, b"Running HiGHS\n")
        ctypes.CDLL(None).puts(b"Running HiGHS 1.16.0")
        return quiet(problem, solver)

    monkeypatch.setattr(pulp.LpProblem, "solve", chatty)
    sys.stdout.write("before\n")
    solved()
    sys.stdout.write("after\n")
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"
