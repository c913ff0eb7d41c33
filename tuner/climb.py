"""Judging one plan by simulation: does it do better than what is known, and how much?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simtune.sim.deployment import Deployment
from simtune.sim.requests import RequestStream
from simtune.sim.result import Result
from simtune.sim.summary import SimulationSummary
from simtune.specs.workload import Slo
from simtune.tuner.knobs import Use, uses
from simtune.tuner.question import SAMPLED_CORES

LOWER = 0.75
"""The next rate to try, relative to one that was too high, while no rate is known that is not."""
LOWEST = 0.01
"""Of the rate bound: a plan that misses the SLO there is given up."""


@dataclass(frozen=True)
class SimulationFinding:
    """What a simulation of a plan showed."""

    met: bool
    summary: SimulationSummary
    reason: str
    """Why the SLO was missed."""
    used: tuple[Use, ...] | None
    """What each pool came to of its limits, where that tells what others would do."""


@dataclass(frozen=True)
class Simulation:
    """A plan under one load. What workers are sent."""

    deployment: Deployment
    stream: RequestStream
    slo: Slo
    rate_rps: float | None
    """None: the stream's own."""
    cores: int | None = SAMPLED_CORES
    """So many stand for all; None: all are simulated."""

    def run(self) -> SimulationFinding:
        """What is found; the same wherever it is run."""
        stream = self.stream if self.rate_rps is None else self.stream.at_rate(self.rate_rps)
        result = self.deployment.simulate(stream, self.slo, cores=self.cores, stop_when_lost=True)
        missed = "" if result.meets_slo else violation(result)
        return SimulationFinding(result.meets_slo, result.summary(), missed, uses(self.deployment, result))


@dataclass(frozen=True)
class Climb:
    """The way to a plan's highest rate.

    Where another plan is known, it begins at the rate at which this one would be better: one simulation there tells,
    and only then is more looked for. Where none is, it begins high and comes down until the SLO is met.
    """

    bound_rps: float
    step: float
    """Rates this near to each other are one."""
    beats_rps: float | None
    """The rate at which the plan would be better than the best one; None while none is known."""
    met_rps: float | None = None
    """The highest rate known to meet the SLO."""
    missed_rps: float | None = None
    """The lowest rate known to miss it."""

    @property
    def rate_rps(self) -> float | None:
        """What to try next; None where enough is known."""
        if self.met_rps is None:
            if self.missed_rps is None:
                return self.bound_rps * LOWER if self.beats_rps is None else self.beats_rps
            hopeless = self.beats_rps is not None or self.missed_rps < self.bound_rps * LOWEST
            return None if hopeless else self.missed_rps * LOWER
        high = self.bound_rps if self.missed_rps is None else self.missed_rps
        return (self.met_rps * high) ** 0.5 if high > self.met_rps * self.step else None

    def after(self, rate_rps: float, met: bool) -> Climb:
        """What is left to do when it is known whether a rate meets the SLO."""
        return replace(self, met_rps=rate_rps) if met else replace(self, missed_rps=rate_rps)


def violation(result: Result) -> str:
    """Why a simulation did not meet its SLO."""
    if result.refused:
        return f"{result.refused} requests exceed max_model_len"
    if result.saturated:
        return "saturated: requests pile up faster than they are served"
    missed = "; ".join(str(limit) for limit in result.limits if not limit.met)
    if result.outcome.aborted:
        missed += f", given up after {int(result.completed.sum()):,} of {len(result.stream):,} requests"
    return missed
