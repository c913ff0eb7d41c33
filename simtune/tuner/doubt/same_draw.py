"""Plans held against the chosen plan on the same requests.

The highest rate of a plan within an SLO differs from draw to draw of the requests (`simtune.tuner.doubt.draw_spread`),
and those of two plans go up and down together: busy draws are busy for both. So what is known of a plan on one draw is
compared with what the chosen plan meets on that draw. Each plan counts by the simulation that decides its bound: if it
misses the SLO at a rate m on requests on which the chosen plan meets it at r, it is better by a factor of m / r at most
there; and on any requests by what their number leaves open of that ratio more (`DrawSpread.of_ratio`). A plan that was
not simulated counts by its bound, and one that was given other requests by what it reaches on any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from simtune.tuner.doubt.draw_spread import DrawSpread


class JudgedRun(Protocol):
    """A simulation of a plan at a rate."""

    @property
    def rate_rps(self) -> float | None:
        """Requests per second."""

    @property
    def met(self) -> bool:
        """True if the plan met the SLO."""

    @property
    def all_cores(self) -> bool:
        """True if all cores were simulated although some could stand for all."""

    @property
    def draw(self) -> int:
        """Draw of the requests; 0 is the draw of the search."""

    @property
    def requests(self) -> int | None:
        """Requests over all cores; None for the study's own number."""

    @property
    def missed_by(self) -> int | None:
        """Requests of the part of the run that missed the SLO; None if no part was cut off."""


R = TypeVar("R", bound=JudgedRun)


class Beginning(NamedTuple):
    """The first requests of a draw."""

    draw: int
    requests: int
    """Number of requests over all cores."""
    simulated: int
    """Number of those that are simulated: plans that simulate another share of their cores are given other ones."""


class Lengths(NamedTuple):
    """Requests of a full run of a plan."""

    requests: int
    """Requests of the simulated cores: those of the study."""
    over_all: int
    """Requests of all cores."""

    @property
    def full(self) -> Beginning:
        """Requests of a full run on the draw of the search."""
        return Beginning(0, self.over_all, self.requests)

    def of(self, run: JudgedRun) -> Beginning:
        """Return the requests that a run of the plan was made with."""
        requests = self.over_all if run.requests is None else run.requests
        simulated = requests if run.all_cores else requests * self.requests // self.over_all
        return Beginning(run.draw, requests, simulated)

    def simulated(self, run: JudgedRun) -> int:
        """Return the number of requests of the simulated cores, of a part of the run if that missed the SLO alone."""
        return run.missed_by or self.of(run).simulated


class RulingRun(NamedTuple):
    """A simulation in which a plan missed the SLO, which decides its bound."""

    rate_rps: float
    on: Beginning
    requests: int
    """Number of requests that were simulated, of a part of the run if that missed the SLO alone."""


class PlanOnDraw(NamedTuple):
    """A plan that was not chosen, and what is known of it."""

    reaches: float
    """Objective that the plan does not exceed on any draw."""
    worth: float = 0.0
    """Objective per request per second; 0 for a plan that no simulation rules out."""
    missed: RulingRun | None = None
    """Simulation of the plan, or of one that must do the same; None if its bound rules it out."""


def rates_met(runs: Iterable[JudgedRun], lengths: Lengths) -> dict[Beginning, float]:
    """Return the highest rate (requests per second) at which a plan meets the SLO, by the requests it met it on."""
    rates: dict[Beginning, float] = {}
    for run in runs:
        if run.met and run.rate_rps is not None:
            beginning = lengths.of(run)
            rates[beginning] = max(run.rate_rps, rates.get(beginning, 0.0))
    return rates


def decisive(runs: Sequence[R], lengths: Lengths, spread: DrawSpread) -> R | None:
    """Return the run at the lowest rate in which a plan missed the SLO, if shorter runs count as full ones at a higher
    rate (`simtune.tuner.search.short_runs`); None if it missed none."""
    # Of two at one rate the later one counts: that of all cores.
    missed = [run for run in reversed(runs) if not run.met and run.rate_rps is not None]

    def proves_rps(run: R) -> float:
        assert run.rate_rps is not None
        return run.rate_rps * spread.slack(lengths.requests, lengths.simulated(run))

    return min(missed, key=proves_rps, default=None)


def ruling(run: JudgedRun | None, lengths: Lengths) -> RulingRun | None:
    """Return what a run in which a plan of these lengths missed the SLO proves; None if there is none."""
    if run is None or run.rate_rps is None:
        return None
    return RulingRun(run.rate_rps, lengths.of(run), lengths.simulated(run))


class Gaps(NamedTuple):
    """Shares of the value of the chosen plan by which another plan is better at most."""

    on_draw: float
    """Share on the same requests."""
    on_any: float
    """Share on any requests."""


class ChosenOnDraw(NamedTuple):
    """The chosen plan, and what is known of it."""

    value: float
    """Objective that the plan reaches on any requests."""
    worth: float
    """Objective per request per second."""
    met: Mapping[Beginning, float]
    """Result of `rates_met` for the plan."""
    full: Beginning
    """Requests of its full run on the draw of the search."""

    def gaps(self, rivals: Sequence[PlanOnDraw], spread: DrawSpread) -> Gaps | None:
        """Return the gaps to other plans, given by how much draws differ; None if the chosen plan did not meet the SLO
        on the draw of the search."""
        value_on_draw = self.met.get(self.full, 0.0) * self.worth
        if not value_on_draw:
            return None
        on_draw = on_any = 1.0
        for rival in rivals:
            reaches = rival.reaches / self.value
            if rival.missed is None:
                on_draw, on_any = max(on_draw, rival.reaches / value_on_draw), max(on_any, reaches)
                continue
            ratio = self._ratio(rival.missed, rival.worth)
            on_draw = max(on_draw, min(reaches, ratio))
            on_any = max(on_any, min(reaches, ratio * spread.of_ratio(rival.missed.requests)))
        return Gaps(on_draw - 1, on_any - 1)

    def _ratio(self, missed: RulingRun, worth: float) -> float:
        """Return how many times as much as the chosen plan a plan reaches at most on the requests on which it missed
        the SLO; infinite if the chosen plan was not given these."""
        rate = self.met.get(missed.on)
        return math.inf if rate is None else missed.rate_rps * worth / (rate * self.worth)


def gap_in_words(gap: float, on_draw: float | None) -> str:
    """Return how much better another plan could be at most, on any requests and on the same ones."""
    if on_draw is None or on_draw == gap:
        return f"no plan in this space is more than {gap:.1%} better under this cost model"
    return (
        f"no plan in this space is more than {on_draw:.1%} better on the same requests, or {gap:.1%} on any, "
        "under this cost model"
    )
