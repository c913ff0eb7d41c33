"""Prediction for a load, and the validation of a plan over several loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simtune.costs.engine_steps import EngineSteps
from simtune.errors import EngineError
from simtune.results.result import Result
from simtune.results.summary import Uncertainty
from simtune.sim.deployment import Deployment
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.uncertainty import uncertainty
from simtune.validation.client.measured_run import MeasuredRun
from simtune.validation.judge.comparison import VALIDATION_SCHEMA, Validation, compare
from simtune.validation.loads import NamedLoad


class Predicted(NamedTuple):
    """Simulation of a load; the interval is None if a pool has step costs whose errors are not known."""

    result: Result
    drawn: Uncertainty | None


def predict(deployment: Deployment, load: NamedLoad, worlds: int, seed: int) -> Predicted:
    """Simulate the requests of a load, recorded, and once more in each of `worlds` redrawn worlds."""
    result = deployment.simulate(load.stream, record=True, seed=seed)
    brought = [pool.costs.own for pool in deployment.pools if isinstance(pool.costs, OwnCosts)]
    unknown = not all(isinstance(costs, EngineSteps) for costs in brought)
    intervals = None if unknown or not worlds else uncertainty(deployment, load.stream, count=worlds, seed=seed, jobs=1)
    return Predicted(result, intervals)


def validation_of(
    deployment: Deployment, loads: Sequence[tuple[NamedLoad, Sequence[MeasuredRun], Predicted]], tolerance: float
) -> Validation:
    """Return the verdict over all loads. Raise EngineError if nothing was measured that could be judged."""
    compared = [
        compare(load.label, runs, predicted.result.summary(), predicted.drawn, tolerance)
        for load, runs, predicted in loads
    ]
    verdicts = [c.within for load in compared for c in load.comparisons if c.within is not None]
    facts = loads[0][1][0].facts
    if not verdicts and not any(load.failed for load in compared):
        raise EngineError("nothing can be judged: no request has a latency")
    return Validation(
        schema_id=VALIDATION_SCHEMA,
        name=deployment.plan.name,
        model=deployment.model.name,
        hardware=deployment.hardware.name,
        device=deployment.hardware.device.name,
        engine=facts.engine,
        clock=facts.clock,
        tolerance=tolerance,
        loads=tuple(compared),
        within=bool(verdicts) and all(verdicts),
    )
