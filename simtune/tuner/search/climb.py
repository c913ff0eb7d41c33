"""Judging one plan by simulation: does it do better than what is known, and how much?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from simtune.results.result import Result
from simtune.results.steady import LIFETIMES
from simtune.results.summary import SimulationSummary
from simtune.sim.deployment import Deployment
from simtune.specs.workload import Slo
from simtune.tuner.question import SAMPLED_CORES
from simtune.tuner.search.draws import MOST_REQUESTS, LoadDraws
from simtune.tuner.search.implied_results import Use, first_tokens_miss, uses
from simtune.workload.requests import RequestStream

LOWER = 0.75
"""The next rate to try, relative to one that was too high, while no rate is known that is not."""
FASTEST = 0.5
"""The least of it that is tried next."""
GUESSES = 6
"""After so many simulations the rates that are left are halved."""
LOWEST = 0.01
"""Of the rate bound: a plan that misses the SLO there is given up."""


LONGER = 8.0
"""Times the requests, where a run is made longer, at most."""


@dataclass(frozen=True)
class SimulationFinding:
    """What a simulation of a plan showed."""

    met: bool
    summary: SimulationSummary
    reason: str
    """Why the SLO was missed."""
    used: tuple[Use, ...] | None
    """What each pool came to of its limits, where that tells what others would do."""
    first_tokens_miss: bool
    """Whether plans with the same prefill pool miss the SLO as well, whatever decodes
    (`simtune.tuner.search.implied_results`)."""
    strain: float | None
    """The largest share of a limit that was taken, above 1 where it was missed; None where requests piled up."""
    wander: float | None = None
    """How far the number in the system strays (`simtune.results.steady.wander`)."""


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
    draws: LoadDraws | None = None
    """Where more requests come from, if these last less than ten lifetimes; None: from nowhere."""
    draw: int = 0
    """Which of them the stream is of."""

    def run(self) -> SimulationFinding:
        """What is found; the same wherever it is run."""
        stream = self.stream
        result = self._simulated(stream)
        while self.draws is not None and (needed := longer(result, len(stream))) is not None:
            stream = self.draws.stream(needed, self.draw)
            result = self._simulated(stream)
        short = "" if self.draws is None else too_short(result)
        met = result.meets_slo and not short
        return SimulationFinding(
            met=met,
            summary=result.summary(noise=False),
            reason="" if met else violation(result) or short,
            used=uses(self.deployment, result),
            first_tokens_miss=not result.meets_slo and first_tokens_miss(self.deployment, result),
            strain=_strain(result),
            wander=result.wander,
        )

    def _simulated(self, stream: RequestStream) -> Result:
        at_rate = stream if self.rate_rps is None else stream.at_rate(self.rate_rps)
        return self.deployment.simulate(at_rate, self.slo, cores=self.cores, stop_when_lost=True)


def longer(result: Result, requests: int) -> int | None:
    """How many requests to draw in place of so many, where these last less than ten lifetimes; None where they need
    not, or cannot, be more."""
    simulated = len(result.stream)
    if not too_short(result) or not result.meets_slo or simulated >= MOST_REQUESTS:
        return None
    assert result.lifetimes is not None
    factor = min(LONGER, max(1.5, 1.2 * LIFETIMES / max(result.lifetimes, 1e-9)), MOST_REQUESTS / simulated)
    return math.ceil(requests * factor)


def too_short(result: Result) -> str:
    """Why a run is too short to be judged: it lasts less than ten lifetimes; empty where it is not, or was given up."""
    lifetimes = result.lifetimes
    if result.outcome.aborted or lifetimes is None or lifetimes >= LIFETIMES:
        return ""
    return (
        f"too short to tell: {len(result.stream):,} requests last {lifetimes:.2g} lifetimes, and {LIFETIMES} are needed"
    )


def _strain(result: Result) -> float | None:
    shares = [line.value_s / line.limit_s for line in result.limits if line.value_s is not None]
    return max(shares, default=None)


class Rung(NamedTuple):
    """A rate that was tried, and how near that came to a limit (`SimulationFinding.strain`)."""

    rate_rps: float
    strain: float | None


@dataclass(frozen=True)
class Climb:
    """The way to a plan's highest rate.

    Where another plan is known, it begins at the rate at which this one would be better: one simulation there tells,
    and only then is more looked for. Where none is, it begins high and comes down until the SLO is met. How near each
    came to a limit says where to try next; it decides nothing.
    """

    bound_rps: float
    step: float
    """Rates this near to each other are one."""
    beats_rps: float | None
    """The rate at which the plan would be better than the best one; None while none is known."""
    met: Rung | None = None
    """The highest rate known to meet the SLO."""
    missed: Rung | None = None
    """The lowest rate known to miss it."""
    tried: int = 0

    @property
    def rate_rps(self) -> float | None:
        """What to try next; None where enough is known."""
        if self.met is None:
            return self._lower()
        low, high = self.met.rate_rps, self.bound_rps if self.missed is None else self.missed.rate_rps
        if high <= low * self.step:
            return None
        if high <= low * self.step**2 or self.tried >= GUESSES:
            return math.sqrt(low * high)
        guess = max(self._guess(low, high), low * self.step)
        # So near below a rate that is missed, a step below it is as good a guess, and the last if it is met.
        return high / self.step if guess * self.step**1.5 >= high else guess

    def _lower(self) -> float | None:
        """While no rate is known that meets the SLO."""
        if self.missed is None:
            return self.bound_rps * LOWER if self.beats_rps is None else self.beats_rps
        rate, strain = self.missed
        if self.beats_rps is not None or rate < self.bound_rps * LOWEST:
            return None
        return rate * (LOWER if strain is None or strain <= 1 else max(FASTEST, 1 / (strain * self.step)))

    def _guess(self, low: float, high: float) -> float:
        """A little below where the limit is likely to be reached, so that a step above it is likely to miss."""
        assert self.met is not None
        met, missed = self.met.strain, None if self.missed is None else self.missed.strain
        if met is None or missed is None or not 0 < met <= 1 < missed:
            return math.sqrt(low * high)
        return low * math.pow(high / low, math.log(1 / met) / math.log(missed / met)) / math.sqrt(self.step)

    def after(self, rate_rps: float, finding: SimulationFinding) -> Climb:
        """What is left to do when it is known what a rate shows."""
        rung, tried = Rung(rate_rps, finding.strain), self.tried + 1
        return replace(self, met=rung, tried=tried) if finding.met else replace(self, missed=rung, tried=tried)


def violation(result: Result) -> str:
    """Why a simulation did not meet its SLO."""
    if result.refused:
        return f"{result.refused} requests exceed max_model_len, or the token budget where prompts are not cut"
    if result.saturated:
        return "saturated: requests pile up faster than they are served"
    missed = "; ".join(str(limit) for limit in result.limits if not limit.met)
    if result.outcome.aborted:
        missed += f", given up after {int(result.completed.sum()):,} of {len(result.stream):,} requests"
    return missed
