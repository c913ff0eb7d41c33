"""Judge one plan by simulation: does it beat the best plan so far, and by how much?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from simtune.results.result import WHOLE, MissBudget, Result, parts_of
from simtune.results.steady import LIFETIMES
from simtune.results.summary import SimulationSummary
from simtune.sim.deployment import Deployment
from simtune.specs.workload import Slo
from simtune.tuner.question import SAMPLED_CORES
from simtune.tuner.search.backlog import kept_up_below_rps
from simtune.tuner.search.draws import MOST_REQUESTS, LoadDraws
from simtune.tuner.search.implied_results import DecodeMiss, Use, decodes_miss, first_tokens_miss, uses
from simtune.tuner.search.most_users import UserLoad, most_users
from simtune.workload.requests import RequestStream

LOWER = 0.75
"""Next rate to try, relative to a rate that was too high, while no rate is known to meet the SLO."""
FASTEST = 0.5
"""Smallest share of a rate that missed the SLO that is tried next."""
RISING = 1.5
"""Exponent with which the strain grows with the rate below a limit, until two runs show it: about 1 for means and 2 for
percentiles (quickstart, `benchmarks/tuner/aiconfigurator`)."""
FALLING = 2.0
"""The same above a limit, where the strain grows faster."""
GUESSES = 6
"""Simulations after which the remaining interval of rates is halved instead of interpolated."""
LOWEST = 0.01
"""Share of the rate bound: a plan that still misses the SLO below it is given up."""


LONGER = 8.0
"""Largest factor by which the requests of a run are multiplied when the run is made longer."""


@dataclass(frozen=True)
class SimulationFinding:
    """Result of a simulation of a plan."""

    met: bool
    summary: SimulationSummary
    reason: str
    """Reason why the SLO was missed; empty if it was met."""
    used: tuple[Use, ...] | None
    """Use of its limits by each pool, if that determines what other plans would do."""
    first_tokens_miss: bool
    """True if plans with the same prefill pool miss the SLO as well, whatever pool decodes
    (`simtune.tuner.search.implied_results`)."""
    decodes_miss: DecodeMiss | None
    """Decode pools with which plans miss the SLO as well, whatever pool prefills; None if there are none."""
    strain: float | None
    """Largest share of a limit that was used, above 1 if the limit was missed; None if requests piled up."""
    wander: float | None = None
    """Spread of the number of requests in the system (`simtune.results.steady.wander`)."""
    missed_by: int = 0
    """Requests of the run, or of the part of it, that missed the SLO; 0 if it was met."""
    kept_up_below_rps: float | None = None
    """Rate below which the plan keeps up, if all requests of the run were present at once
    (`simtune.tuner.search.backlog`)."""


@dataclass(frozen=True)
class Simulation:
    """A plan under one load. Sent to worker processes."""

    deployment: Deployment
    stream: RequestStream
    slo: Slo
    rate_rps: float | None
    """Requests per second; None for the stream's own rate."""
    cores: int | None = SAMPLED_CORES
    """Number of cores that stand for all; None if all are simulated."""
    draws: LoadDraws | None = None
    """Source of more requests, if those of the stream last less than ten lifetimes; None if the run stays as it is."""
    draw: int = 0
    """Number of the draw that the stream belongs to."""
    part: int | None = None
    """Requests of a part; each of the parts that the run can be cut into must keep the SLO by itself. None: the run is
    judged as a whole."""
    searches_users: bool = False
    """True to run the most users of a closed loop that meet the SLO, by requests of `draws`."""
    at_once: bool = False
    """True if all requests are present at once, to see at what rate they are served."""

    def run(self) -> SimulationFinding:
        """Simulate the plan, longer if needed, and return the finding; it is the same wherever it is run."""
        stream = self.stream
        if self.searches_users and self.draws is not None:
            result = most_users(UserLoad(stream, self.draws, self.draw), self._simulated)
        else:
            result = self._simulated(stream)
        while self.draws is not None and (requests := longer(result, stream.arrivals)) is not None:
            stream = self.draws.stream(requests, self.draw)
            result = self._simulated(stream)
        reason = violation(result) or ("" if self.draws is None else too_short(result))
        missed_by = len(result.stream) if reason else 0
        if self.part is not None and (not reason or lost_in_part(result)):
            reason, missed_by = missed_in_part(result, self.part)
        return SimulationFinding(
            met=not reason,
            summary=result.summary(noise=False),
            reason=reason,
            used=uses(self.deployment, result),
            first_tokens_miss=not result.meets_slo and first_tokens_miss(self.deployment, result),
            decodes_miss=None if result.meets_slo else decodes_miss(self.deployment, result),
            strain=_strain(result),
            wander=result.wander,
            missed_by=missed_by,
            kept_up_below_rps=kept_up_below_rps(result) if self.at_once else None,
        )

    def _simulated(self, stream: RequestStream) -> Result:
        at_rate = stream if self.rate_rps is None else stream.at_rate(self.rate_rps)
        return self.deployment.simulate(at_rate, self.slo, cores=self.cores, until_lost=self.part or WHOLE)


def longer(result: Result, requests: int) -> int | None:
    """Return the number of arrivals to draw in place of `requests`, if these last less than ten lifetimes.

    Return None if more requests are not needed, or not possible (MOST_REQUESTS).
    """
    simulated = len(result.stream)
    if not too_short(result) or not result.meets_slo or simulated >= MOST_REQUESTS:
        return None
    assert result.lifetimes is not None
    factor = min(LONGER, max(1.5, 1.2 * LIFETIMES / max(result.lifetimes, 1e-9)), MOST_REQUESTS / simulated)
    return math.ceil(requests * factor)


def lost_in_part(result: Result) -> bool:
    """True if a run was given up, and not because all of its requests miss the SLO: a part of it does."""
    return result.outcome.aborted and not _lost_in(result, None)


def _lost_in(result: Result, part: slice | None) -> bool:
    """True if the requests that are answered so far are enough for all requests, or those of a part, to miss the SLO,
    whatever becomes of the others."""
    budget, outcome = MissBudget(result.stream, result.slo, part), result.outcome
    answered = np.flatnonzero(result.completed)
    if part is not None:
        answered = answered[(answered >= part.start) & (answered < part.stop)]
    columns = (column[answered].tolist() for column in (outcome.arrival, outcome.first_token, outcome.finish))
    return any(map(budget, answered.tolist(), *columns))


def missed_in_part(result: Result, requests: int) -> tuple[str, int]:
    """Return which part of a run misses the SLO, and its requests, if the run is cut into as many equal parts of
    `requests` requests or more as it has; empty and 0 if none does. A class that no request of a part belongs to is not
    judged there, and of a run that was given up only the part that was lost is."""
    count = len(result.stream)
    for part in parts_of(count, requests):
        lost = result.outcome.aborted and _lost_in(result, part)
        if result.outcome.aborted and not lost:
            continue
        missed = [str(limit) for limit in result.limits_of(part) if limit.value_s is not None and not limit.met]
        # A limit is counted in whole ticks, so that one may be lost by less than its value shows.
        if missed or lost:
            reason = f"in requests {part.start + 1:,} to {part.stop:,} of {count:,}: " + "; ".join(missed)
            return reason + given_up(result), part.stop - part.start
    return "", 0


def given_up(result: Result) -> str:
    """Return after how many requests a run was given up; empty if it was not."""
    if not result.outcome.aborted:
        return ""
    return f", given up after {int(result.completed.sum()):,} of {len(result.stream):,} requests"


def too_short(result: Result) -> str:
    """Return why a run is too short to be judged: it lasts less than ten lifetimes. Empty if it is long enough, or was
    given up."""
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
    """A rate that was tried, and the largest share of a limit that it used (`SimulationFinding.strain`)."""

    rate_rps: float
    strain: float | None


@dataclass(frozen=True)
class Climb:
    """Search for the highest rate of a plan.

    If another plan is known, start at the rate at which this plan would be better: one simulation decides, and only if
    it meets the SLO are higher rates tried. Otherwise start high and step down until the SLO is met. The strain of each
    simulation suggests the next rate; it decides nothing.
    """

    bound_rps: float
    step: float
    """Ratio of rates up to which they count as equal."""
    beats_rps: float | None
    """Rate at which the plan would beat the best one; None while there is no best plan."""
    met: Rung | None = None
    """The highest rate known to meet the SLO."""
    met_before: Rung | None = None
    """The rate that was known to meet it before."""
    missed: Rung | None = None
    """The lowest rate known to miss it."""
    tried: int = 0
    hint_rps: float | None = None
    """Highest rate at which shorter runs met the SLO, which is tried first; None without such runs."""

    @property
    def rate_rps(self) -> float | None:
        """Rate to try next; None if enough is known."""
        if self.met is None:
            return self._lower()
        low, high = self.met.rate_rps, self.bound_rps if self.missed is None else self.missed.rate_rps
        if high <= low * self.step:
            return None
        if self.hint_rps is not None and low * self.step <= self.hint_rps < high:
            return self.hint_rps
        if high <= low * self.step**2 or self.tried >= GUESSES:
            return math.sqrt(low * high)
        guess = max(self._guess(low, high), low * self.step)
        # This close to a rate that missed the SLO, one step below it is as good a guess, and the last one if it is met.
        return high / self.step if guess * self.step**1.5 >= high else guess

    def _lower(self) -> float | None:
        """Return the rate to try next while no rate is known to meet the SLO; None to give the plan up."""
        if self.missed is None:
            start = self.bound_rps * LOWER if self.hint_rps is None else self.hint_rps
            return start if self.beats_rps is None else self.beats_rps
        rate, strain = self.missed
        if self.beats_rps is not None or rate < self.bound_rps * LOWEST:
            return None
        if self.hint_rps is not None:
            # Shorter runs met the SLO at about this rate, so the limit is near. Each miss makes the next step longer.
            growth = math.sqrt(1 / LOWER) if strain is None or strain <= 1 else math.pow(strain, self.tried / FALLING)
            return rate / max(self.step, growth)
        # A run that is given up underestimates the strain, so that 1 / strain alone approaches the limit slowly.
        return rate * (LOWER if strain is None or strain <= 1 else min(LOWER, max(FASTEST, 1 / (strain * self.step))))

    def _guess(self, low: float, high: float) -> float:
        """Return a rate a little below the one at which the limit is likely to be reached, so that one step above it is
        likely to miss."""
        assert self.met is not None
        met, missed = self.met.strain, None if self.missed is None else self.missed.strain
        if met is None or missed is None or not 0 < met <= 1 < missed:
            return min(math.sqrt(low * high), self._extrapolated() / math.sqrt(self.step))
        between = low * math.pow(high / low, math.log(1 / met) / math.log(missed / met))
        if self.met_before is not None:
            # The strain grows ever faster: a line through two rates that met the SLO leads above the limit, one to a
            # rate that missed it stays below.
            between = math.sqrt(between * min(high, self._extrapolated()))
        return between / math.sqrt(self.step)

    def _extrapolated(self) -> float:
        """Return the rate at which the strain would have grown to 1, by the last two rates that met the SLO, or by
        RISING if only one has a strain; infinite if the strain does not grow."""
        met, before = self.met, self.met_before
        if met is None or met.strain is None or not 0 < met.strain <= 1:
            return math.inf
        growth = RISING
        if before is not None and before.strain is not None:
            if not (before.rate_rps < met.rate_rps and 0 < before.strain < met.strain):
                return math.inf
            growth = math.log(met.strain / before.strain) / math.log(met.rate_rps / before.rate_rps)
        return met.rate_rps * math.pow(1 / met.strain, 1 / growth)

    def after(self, rate_rps: float, finding: SimulationFinding) -> Climb:
        """Return the search after the simulation at a rate."""
        rung, attempts = Rung(rate_rps, finding.strain), self.tried + 1
        if finding.met:
            return replace(self, met=rung, met_before=self.met, tried=attempts)
        return replace(self, missed=rung, tried=attempts)


def violation(result: Result) -> str:
    """Return why a simulation did not meet its SLO; empty if it did."""
    if result.meets_slo:
        return ""
    if result.refused:
        return f"{result.refused} requests exceed max_model_len, or the token budget where prompts are not cut"
    if rejected := result.num_rejected():
        return f"{rejected:,} requests are rejected because the queue of a server is full"
    if result.saturated:
        return "saturated: requests pile up faster than they are served"
    missed = "; ".join(str(limit) for limit in result.limits if not limit.met)
    # Of a run that was given up only some requests are known, of which a share says nothing.
    if not result.attains and not result.outcome.aborted:
        share, demanded = result.slo_attainment or 0.0, result.slo.attainment or 0.0
        missed += f"{'; ' * bool(missed)}{demanded:.4g} of the requests within all limits (it reaches {share:.4g})"
    return missed + given_up(result)
