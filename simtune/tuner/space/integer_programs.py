"""Integer programmes: the available solver, and whether its solution was proved optimal.

They are written with pulp. HiGHS solves them if `highspy` is installed, otherwise CBC, which comes with pulp. A solver
that ran out of time still reports Optimal in `status`; only `sol_status` distinguishes a proof from a good guess.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from simtune.errors import SimtuneError

if TYPE_CHECKING:
    import pulp

TOLERANCE = 1e-6
"""Relative error that a solver's numbers may have: bounds are widened by it."""


class Unsolvable(SimtuneError):
    """No choice satisfies the constraints of a programme; the caller reports which."""

    exit_code = 3


def solver_name() -> str:
    """Return `HiGHS` or `CBC`: the solver that `solve` uses here."""
    import pulp

    return "HiGHS" if pulp.HiGHS(msg=False).available() else "CBC"


def _solver(whole: bool, time_limit_s: float | None) -> Any:
    import pulp
    from pulp.apis.coin_api import pulp_cbc_path

    settings: dict[str, Any] = {"msg": False, "mip": whole, "gapRel": 0.0, "timeLimit": time_limit_s}
    if solver_name() == "HiGHS":
        return pulp.HiGHS(**settings)
    return pulp.COIN_CMD(path=pulp_cbc_path, **settings)


def add_variable(
    problem: pulp.LpProblem,
    name: str,
    low: float | None = None,
    high: float | None = None,
    *,
    whole: bool = False,
    binary: bool = False,
) -> pulp.LpVariable:
    """Return a new variable of a programme, of whole numbers or of 0 and 1 if asked.

    pulp has `LpProblem.add_variable` since 3.3.1 and deprecates the constructor of variables since then.
    """
    import pulp

    cat = pulp.LpBinary if binary else pulp.LpInteger if whole else pulp.LpContinuous
    if hasattr(problem, "add_variable"):
        return problem.add_variable(name, low, high, cat=cat)
    return pulp.LpVariable(name, low, high, cat)


def constraint(problem: pulp.LpProblem, name: str) -> pulp.LpConstraint | None:
    """Return a constraint by its name, or None; by a method that pulp has since 3.3.1, or by its mapping."""
    if hasattr(problem, "get_constraint_by_name"):
        return problem.get_constraint_by_name(name)
    return problem.constraints.get(name)


@contextmanager
def _stdout_muted() -> Iterator[None]:
    """Discard what a solver's own code writes to stdout, which holds data only.

    HiGHS 1.16 prints a banner when it is constructed, before any option can silence it. It goes past `sys.stdout`, so
    the file descriptor is redirected; C's buffer is emptied before and after, or the banner would come later.
    """
    try:
        saved_stdout = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    try:
        _flush_c()
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        _flush_c()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def _flush_c() -> None:
    """Empty the buffers of C's standard streams, if C's library can be found."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)


def solve(problem: pulp.LpProblem, *, whole: bool = True, time_limit_s: float | None = None) -> bool:
    """Solve in place. Return True if the solution is proved optimal, False if it is the best found in `time_limit_s`.

    `whole=False` lets integers be fractions: the linear relaxation, whose value bounds that of every whole choice.
    Raise Unsolvable if no choice satisfies the constraints, and SimtuneError with the solver's status if there is no
    solution for another reason.
    """
    import pulp

    with _stdout_muted():
        problem.solve(_solver(whole, time_limit_s))
    if problem.sol_status == pulp.LpSolutionOptimal:
        return True
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return False
    status = pulp.LpSolution[problem.sol_status]
    # The relaxation is infeasible, or only whole numbers are.
    if problem.status == pulp.LpStatusInfeasible:
        raise Unsolvable(f"{problem.name}: {status}")
    limit = "" if time_limit_s is None else f" within {time_limit_s:g} s; allow more time"
    raise SimtuneError(f"{solver_name()} on {problem.name}: {status}{limit}")
