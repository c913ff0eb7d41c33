"""Integer programmes: which solver there is, and whether what it says was proved.

They are written with pulp. HiGHS solves them where `highspy` is installed, else CBC, which comes with pulp. A solver
that ran out of time says Optimal all the same in `status`; only `sol_status` tells a proof from a good guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simtune.errors import SimtuneError

if TYPE_CHECKING:
    import pulp

TOLERANCE = 1e-6
"""How far a solver's numbers may be off, relative: bounds are widened by it."""


class Unsolvable(SimtuneError):
    """No choice keeps to the constraints of a programme; its caller says which."""

    exit_code = 3


def solver_name() -> str:
    """`HiGHS` or `CBC`: what `solve` uses here."""
    import pulp

    return "HiGHS" if pulp.HiGHS(msg=False).available() else "CBC"


def _solver(whole: bool, time_limit_s: float | None) -> Any:
    import pulp
    from pulp.apis.coin_api import pulp_cbc_path

    settings: dict[str, Any] = {"msg": False, "mip": whole, "gapRel": 0.0, "timeLimit": time_limit_s}
    if solver_name() == "HiGHS":
        return pulp.HiGHS(**settings)
    return pulp.COIN_CMD(path=pulp_cbc_path, **settings)


def solve(problem: pulp.LpProblem, *, whole: bool = True, time_limit_s: float | None = None) -> bool:
    """Solve in place; whether the solution is proved optimal, or only the best found until `time_limit_s` was over.

    `whole=False` lets integers be fractions: the linear relaxation, whose value bounds that of every whole choice.
    Raises Unsolvable where no choice keeps to the constraints, and SimtuneError with the solver's word for anything
    else that is no solution.
    """
    import pulp

    problem.solve(_solver(whole, time_limit_s))
    if problem.sol_status == pulp.LpSolutionOptimal:
        return True
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return False
    said = pulp.LpSolution[problem.sol_status]
    if problem.status == pulp.LpStatusInfeasible:  # of fractions, or only of whole numbers
        raise Unsolvable(f"{problem.name}: {said}")
    limit = "" if time_limit_s is None else f" within {time_limit_s:g} s; allow more time"
    raise SimtuneError(f"{solver_name()} on {problem.name}: {said}{limit}")
