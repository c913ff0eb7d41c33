"""How far off a simulated number may be, given how far off the step times may be.

A time model errs in the same direction for all layers, steps and plans that use it, so its error is drawn once per
operator kind and simulated world, never per call: independent errors would average out and fake certainty. World
i of a seed has the same errors for every plan, so that plans can be compared world by world.

What this covers is the error of operator times as seen on points held back from their fits, and that of acceptance as
its estimate states it. It does not cover what the
model leaves out: another engine release, noise of the machine, or a load that is not the one asked about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simtune.costs.iteration import KINDS
from simtune.costs.predict import Profile
from simtune.parallel import executor, ordered_map
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.requests import RequestStream
from simtune.sim.speculation import Drafting
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.workload import Slo

LEVEL = 0.9
_PURPOSE = 6  # key of the random streams of `simtune.sim.requests`, continued

_FIXED = {
    "requests", "num_gpus", "unit", "count", "offered_rate_rps", "limit_s", "class", "metric", "statistic",
    "pool", "instance", "ci95", "warm_up_requests",
}  # fmt: skip
"""Keys of a summary that no error of step times can change, or that speak of one run's own noise."""


@dataclass(frozen=True)
class Uncertainty:
    """What `worlds` redrawn worlds say: intervals that hold the middle `level` of them, and shares of worlds."""

    worlds: int
    level: float
    saturated: float
    """Share of worlds in which the system is saturated."""
    meets_slo: float
    intervals: dict[str, Any]
    """Shaped like `Result.summary`, [low, high] in place of each number; None is unbounded."""

    def to_data(self) -> dict[str, Any]:
        return {
            "worlds": self.worlds,
            "level": self.level,
            "saturated_probability": self.saturated,
            "slo_probability": self.meets_slo,
            "intervals": self.intervals,
        }


def worlds(hardware: Iterable[Hardware], count: int, seed: int) -> list[dict[str, float]]:
    """`count` worlds: a factor on the time of every operator kind, lognormal with the kind's typical log error.

    Pools on different hardware share the factor, of the size of the larger error.
    """
    log_sd: dict[str, float] = {}
    for one in hardware:
        for kind, sd in Profile(one).kind_log_sd().items():
            log_sd[kind] = max(sd, log_sd.get(kind, 0.0))
    drawn = {kind: _normal(seed, i, count) for i, kind in enumerate(KINDS)}
    return [{kind: math.exp(log_sd[kind] * drawn[kind][i]) for kind in KINDS if kind in log_sd} for i in range(count)]


def _normal(seed: int, purpose: int, count: int) -> NDArray[np.float64]:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _PURPOSE, purpose)))).standard_normal(
        count
    )


def uncertainty(
    deployment: Deployment,
    stream: RequestStream,
    slo: Slo | None = None,
    *,
    count: int,
    seed: int,
    jobs: int | None = None,
) -> Uncertainty:
    """Simulate the same requests in `count` redrawn worlds; `jobs` processes, the answer does not depend on it.

    Where drafts are verified, how often they are kept is off too: by one multiple of its standard errors per world.
    """
    d = deployment
    hardware = {pool.spec.hardware: pool.hardware for pool in d.pools}
    tasks = [
        _World(d.plan, d.model, hardware, _shifted(d.drafting, float(errors)), stream, slo or Slo(), factors, seed)
        for factors, errors in zip(
            worlds(hardware.values(), count, seed), _normal(seed, len(KINDS), count), strict=True
        )
    ]
    with executor(jobs, count) as pool:
        found = list(ordered_map(pool, _World.run, tasks))
    summaries = [summary for summary, _ in found]
    return Uncertainty(
        worlds=count,
        level=LEVEL,
        saturated=sum(s["saturated"] for s in summaries) / count,
        meets_slo=sum(met for _, met in found) / count,
        intervals=_intervals(summaries),
    )


def _shifted(drafting: Mapping[str, Drafting], errors: float) -> dict[str, Drafting]:
    return {pool: replace(one, acceptance=one.acceptance.shifted(errors)) for pool, one in drafting.items()}


@dataclass(frozen=True)
class _World:
    plan: Plan
    model: Model
    hardware: Mapping[str, Hardware]
    drafting: Mapping[str, Drafting]
    stream: RequestStream
    slo: Slo
    factors: Mapping[str, float]
    seed: int

    def run(self) -> tuple[dict[str, Any], bool]:
        deployment = deploy(self.plan, self.model, self.hardware, factors=self.factors, drafting=self.drafting)
        result = deployment.simulate(self.stream, self.slo, seed=self.seed)
        summary = result.summary()
        del summary["quantiles"]
        return summary, result.meets_slo


def _intervals(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """[low, high] for every number that all summaries share, following their nesting."""
    found: dict[str, Any] = {}
    for key, example in summaries[0].items():
        values = [summary.get(key) for summary in summaries]
        if key in _FIXED or isinstance(example, bool):
            continue
        if isinstance(example, Mapping):
            found[key] = _intervals([v for v in values if isinstance(v, Mapping)])
        elif isinstance(example, list):
            found[key] = [_intervals(items) for items in zip(*(v for v in values if isinstance(v, list)), strict=True)]
        elif example is None or isinstance(example, (int, float)):
            found[key] = _interval(values)
    return found


def _interval(values: Sequence[Any]) -> list[float | None]:
    """The smallest and largest value after leaving out (1 - LEVEL) / 2 at each end; None counts as the largest."""
    ordered = sorted(math.inf if v is None else float(v) for v in values)
    cut = math.floor(len(ordered) * (1 - LEVEL) / 2 + 1e-9)  # 100 x 0.05 is to be 5, not 4.999...
    low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
    return [None if math.isinf(v) else v for v in (low, high)]
