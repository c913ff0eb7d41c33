"""Uncertainty of simulated numbers that follows from the errors of the step times, by worlds drawn with such errors
(`simtune.sim.drawn_worlds`).

This covers the error of operator times as seen on points held back from their fits, that of the engine's host
(`simtune.costs.host`), and that of acceptance as its estimate states it. It does not cover what the
model leaves out: another engine release, noise of the machine, or a load that is not the one asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simtune.results.summary import SimulationSummary, Uncertainty, is_uncertain
from simtune.sim.deployment import Deployment
from simtune.sim.drawn_worlds import Blueprint, DrawnWorlds, PerturbedWorld, spreads
from simtune.sim.parallel import Jobs, executor, ordered_map
from simtune.specs.base import Record
from simtune.specs.workload import Slo
from simtune.workload.requests import RequestStream

LEVEL = 0.9


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
    tasks = [
        _DrawnRun(blueprint, world, stream, slo or Slo(), seed) for world in DrawnWorlds.of(count, seed).worlds(log_sd)
    ]
    with executor(jobs, count) as pool:
        verdicts = []
        for verdict in ordered_map(pool, _DrawnRun.run, tasks):
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
class _DrawnRun:
    blueprint: Blueprint
    world: PerturbedWorld
    stream: RequestStream
    slo: Slo
    seed: int

    def run(self) -> tuple[SimulationSummary, bool]:
        result = self.blueprint.deploy(self.world).simulate(self.stream, self.slo, seed=self.seed)
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
    # A number without a bound is larger than all others.
    ordered = sorted(math.inf if v is None else float(v) for v in values)
    # 100 x 0.05 must give 5, not 4.999...
    cut = math.floor(len(ordered) * (1 - LEVEL) / 2 + 1e-9)
    low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
    return [None if math.isinf(v) else v for v in (low, high)]
