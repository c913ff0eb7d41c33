"""Uncertainty of simulated numbers that follows from the errors of the step times.

A time model errs in the same direction for all layers, steps and plans that use it, so its error is drawn once per
operator kind (an engine's host is one more) and simulated world, never per call: independent errors would average out
and feign certainty. World i of a seed has the same errors for every plan, in units of their spread, so that plans can
be compared world by world. The spread of a kind is that of the shapes which the plan's own steps need, weighted by
their time (`simtune.sim.run_basis`): wider where they are outside what was measured.

This covers the error of operator times as seen on points held back from their fits, that of the engine's host
(`simtune.costs.host`), and that of acceptance as its estimate states it. It does not cover what the
model leaves out: another engine release, noise of the machine, or a load that is not the one asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simtune.costs.host import HostCosts
from simtune.costs.iteration import HOST, KINDS, REDRAWN_KINDS
from simtune.costs.predict import DATA_SHEET_LOG_SD, Profile
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.results.summary import SimulationSummary, Uncertainty, is_uncertain
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.sim.parallel import Jobs, executor, ordered_map
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.run_basis import pool_bases
from simtune.specs.base import Record
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.workload import Slo
from simtune.workload.requests import RequestStream

LEVEL = 0.9
_PURPOSE = 6  # key of the random streams of `simtune.workload.requests`, continued


def spreads(deployment: Deployment, result: Result) -> dict[str, float]:
    """Return the standard deviation of the log error of every kind in the steps of a run.

    Pools on different hardware share the error, of the size of the larger one. A kind that took no time has the error
    that is typical of it on this hardware.
    """
    log_sd: dict[str, float] = {}
    for kinds in pool_bases(deployment, result).values():
        for kind, basis in kinds.items():
            log_sd[kind] = max(basis.log_sd, log_sd.get(kind, 0.0))
    typical = [Profile(pool.hardware).kind_log_sd() for pool in deployment.pools]
    for kind in KINDS:
        if kind not in log_sd:
            log_sd[kind] = max(sds.get(kind, DATA_SHEET_LOG_SD) for sds in typical)
    if HOST not in log_sd:
        log_sd[HOST] = max(HostCosts.of(pool.spec, pool.hardware).log_sd for pool in deployment.pools)
    return log_sd


ACCEPTANCE = "acceptance"
"""Column of `draws` that belongs to no part of a step: the error of the acceptance of drafts."""


def draws(count: int, seed: int) -> dict[str, NDArray[np.float64]]:
    """Return the error of each kind of operator, of the host, and of acceptance, in each of `count` worlds, in units of
    its own spread.

    Errors are the same for every plan, and a larger `count` only adds worlds.
    """
    return {name: _normal(seed, i, count) for i, name in enumerate((*KINDS, ACCEPTANCE, HOST))}


def worlds(log_sd: Mapping[str, float], count: int, seed: int) -> list[dict[str, float]]:
    """Return `count` worlds: a factor on the time of every kind, lognormal with these standard deviations."""
    errors = draws(count, seed)
    return [
        {kind: math.exp(log_sd[kind] * errors[kind][i]) for kind in REDRAWN_KINDS if kind in log_sd}
        for i in range(count)
    ]


def _normal(seed: int, purpose: int, count: int) -> NDArray[np.float64]:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _PURPOSE, purpose)))).standard_normal(
        count
    )


@dataclass(frozen=True)
class Blueprint:
    """Inputs of a deployment, without its tables: small enough to be sent to a worker process, which deploys them
    again."""

    plan: Plan
    model: Model
    hardware: Mapping[str, Hardware]
    drafting: Mapping[str, Drafting]

    @classmethod
    def of(cls, deployment: Deployment) -> Blueprint:
        """Return the inputs of a deployment. Raise UsageError if the costs of a pool come from outside: the times of
        their operators are not known."""
        d = deployment
        if pool_names := [pool.spec.name for pool in d.pools if isinstance(pool.costs, OwnCosts)]:
            raise UsageError(
                f"pool {pool_names[0]}: its step costs were brought from outside, and --uncertainty perturbs the times "
                "of operators; leave --uncertainty out, or simulate with the hardware's operators"
            )
        return cls(d.plan, d.model, d.profiles, d.drafting)

    def deploy(self, factors: Mapping[str, float] | None = None, acceptance_errors: float = 0.0) -> Deployment:
        """Return the deployment of a world in which the times of kinds are off by `factors`, and the acceptance of
        drafts by `acceptance_errors` standard errors."""
        drafting = {
            pool: replace(loaded, acceptance=loaded.acceptance.shifted(acceptance_errors))
            for pool, loaded in self.drafting.items()
        }
        return deploy(self.plan, self.model, self.hardware, factors=factors, drafting=drafting)


def uncertainty(
    deployment: Deployment,
    stream: RequestStream,
    slo: Slo | None = None,
    *,
    count: int,
    seed: int,
    jobs: Jobs = None,
    each: Callable[[int], None] | None = None,
) -> Uncertainty:
    """Simulate the same requests in `count` redrawn worlds; `jobs` processes, on which the result does not depend.

    `each` is called with the number of worlds done. If drafts are verified, their acceptance is perturbed too: by one
    multiple of its standard errors per world.
    Raises UsageError if the costs of a pool come from outside: the times of their operators are not known.
    """
    blueprint = Blueprint.of(deployment)
    # The errors are as wide as those of the shapes in the steps of an unperturbed run.
    log_sd = spreads(deployment, deployment.simulate(stream, slo, seed=seed))
    errors = draws(count, seed)[ACCEPTANCE]
    tasks = [
        _DrawnWorld(blueprint, float(off), stream, slo or Slo(), factors, seed)
        for factors, off in zip(worlds(log_sd, count, seed), errors, strict=True)
    ]
    with executor(jobs, count) as pool:
        verdicts = []
        for verdict in ordered_map(pool, _DrawnWorld.run, tasks):
            verdicts.append(verdict)
            if each is not None:
                each(len(verdicts))
    summaries = [summary for summary, _ in verdicts]
    return Uncertainty(
        worlds=count,
        level=LEVEL,
        saturated_probability=sum(s.saturated for s in summaries) / count,
        slo_probability=sum(met for _, met in verdicts) / count,
        intervals=intervals(summaries),
    )


@dataclass(frozen=True)
class _DrawnWorld:
    blueprint: Blueprint
    acceptance_errors: float
    stream: RequestStream
    slo: Slo
    factors: Mapping[str, float]
    seed: int

    def run(self) -> tuple[SimulationSummary, bool]:
        deployment = self.blueprint.deploy(self.factors, self.acceptance_errors)
        result = deployment.simulate(self.stream, self.slo, seed=self.seed)
        return result.summary(), result.meets_slo


def intervals(records: Sequence[Record]) -> dict[str, Any]:
    """Return [low, high] for every `Uncertain` field that the first of the worlds has, nested as their records are."""
    first = records[0]
    bounds: dict[str, Any] = {}
    for name, field in type(first).model_fields.items():
        if name not in first.model_fields_set:
            continue
        if is_uncertain(type(first), name):
            bounds[field.alias or name] = interval([getattr(record, name) for record in records])
        else:
            below = _nested([getattr(record, name) for record in records if name in record.model_fields_set])
            if below is not None:
                bounds[field.alias or name] = below
    return bounds


def _nested(values: Sequence[Any]) -> Any:
    """Return the intervals within records, named records or lists of records; None for anything else."""
    match values[0]:
        case Record():
            return intervals(values)
        case dict() as named if all(isinstance(value, Record) for value in named.values()):
            return {key: intervals([value[key] for value in values]) for key in named}
        case (Record(), *_):
            return [intervals(items) for items in zip(*values, strict=True)]
    return None


def interval(values: Sequence[Any]) -> list[float | None]:
    """Return the smallest and largest value after leaving out (1 - LEVEL) / 2 at each end; None counts as the
    largest."""
    ordered = sorted(math.inf if v is None else float(v) for v in values)
    # 100 x 0.05 must give 5, not 4.999...
    cut = math.floor(len(ordered) * (1 - LEVEL) / 2 + 1e-9)
    low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
    return [None if math.isinf(v) else v for v in (low, high)]
