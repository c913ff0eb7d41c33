"""Confidence in a choice: the chosen plan and its rivals in the same redrawn worlds, and what to measure next.

In each world every kind of operator, and the acceptance of drafts, is off by one error that all plans share, on the
same requests (`simtune.sim.drawn_worlds`); errors drawn for each plan by itself would make the gap between two plans
look several times less sure than it is. The value of a plan in a world is what the search looked for: the highest rate
within the SLO that the plan could sustain there for ever, over its weight (GPUs or dollars), on one ladder of rates for
all plans, or its value at the given load. A short run may end before requests are seen to pile up; rates above the
sustained one do not count, here as in the search.

    P(A beats B) = share of worlds in which A is worth more, ties half

What to measure next follows from a line fitted to the worlds: gap = d + sum b_k z_k + the rest, z_k the error of kind k
in units of its spread, s the spread of the gap. Once z_k is known, A is better with probability

    Phi((d + b_k z_k) / sqrt(s^2 - b_k^2))

and the better of the two is then chosen with a probability that is the mean over z_k of max(P, 1 - P): the kind with
the largest mean should be measured next.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from pydantic import Field

from simtune.arrays import Array
from simtune.costs.basis import AskedCall
from simtune.errors import UsageError
from simtune.results.result import WHOLE, Result
from simtune.sim.deployment import Deployment
from simtune.sim.drawn_worlds import ACCEPTANCE, Blueprint, DrawnWorlds, PerturbedWorld, spreads
from simtune.sim.parallel import Jobs, executor, ordered_map
from simtune.sim.run_basis import asked_calls
from simtune.sim.uncertainty import LEVEL, interval
from simtune.specs.base import Count, NonNegative, Record, Seq, Share
from simtune.specs.plan_words import in_words
from simtune.specs.workload import Slo
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.workload.requests import RequestStream

WORTH_NAMING = 3
"""Number of shapes of a kind that are named as worth measuring."""
_FREEDOM = 5
"""Worlds beyond those that a line needs, so that its residual is known."""
_ENDLESS = 400
"""Largest number of rungs above or below the first one on the ladder of rates: a factor of thousands at 2 %."""


@dataclass(frozen=True)
class RivalPlan:
    """A plan of a finished search, ready to be judged in other worlds."""

    name: str
    deployment: Deployment
    stream: RequestStream
    rate_rps: float | None
    """Highest rate that the plan was found to serve; None if plans are compared at the load of the stream."""
    weight: float = 1.0
    """Divisor of the rate: GPUs, or dollars per hour. If the load is given and cost is compared, the cost of the
    plan."""
    worth: Literal["rate", "weight", "e2el", "makespan", "family", "family_active", "joules_per_token"] = "rate"
    """Value of which more is better: rate / weight, 1 / weight, or 1 over the mean E2EL, the makespan, the mean latency
    of a family, with or without pauses, or the energy of an output token; 0 if the SLO is missed."""
    cores: int | None = None
    """Engine cores that are simulated for all of them; None for all."""
    long_stream: RequestStream | None = None
    """Requests that the capacity of the plan is of; None for `stream`."""


# --- what is said of it -----------------------------------------------------------------------------------


class Versus(Record):
    """Comparison of the chosen plan with one rival."""

    candidate: str
    probability: Share = Field(description="that the chosen plan beats it: share of worlds, ties half")
    gap: Seq[float | None] = Field(
        description="[low, high] of the chosen plan's value over the rival's, less 1; null is unbounded"
    )


class WorthQuantiles(Record):
    """Quantiles of the value of a plan over the worlds, in the objective's terms; 0 if it misses the SLO."""

    candidate: str
    levels: Seq[Share]
    values: Seq[NonNegative]

    def at(self, level: float) -> float:
        """Return the value at a level, interpolated linearly between two levels."""
        return float(np.interp(level, self.levels, self.values))


class ProfilePoint(Record):
    """A shape whose time is worth measuring."""

    operator: str = Field(description="its key in the profile: kind, variant, dtype")
    hardware: str
    shape: dict[str, float]
    log_sd: NonNegative = Field(description="standard deviation of the log error of its time")
    basis: str = Field(description="what its time rests on")

    def __str__(self) -> str:
        shape = " ".join(f"{name}={value:g}" for name, value in self.shape.items())
        return f"{self.operator} {shape} on {self.hardware} ({self.basis}, ±{self.log_sd:.0%})"


class ToMeasure(Record):
    """Effect of knowing one error on the choice between the chosen plan and its nearest rival."""

    error: str = Field(description="operator kind, or acceptance")
    share: Share = Field(description="of the variance of the gap between the two that it stands for")
    right_after: Share = Field(description="probability of choosing the better of the two once it is known")
    points: Seq[ProfilePoint] = Field(description="shapes of the kind that matter most; none for acceptance")
    acceptance: Seq[str] = Field(description="the acceptance specs that are in doubt; none for an operator kind")

    def __str__(self) -> str:
        unknown = ", ".join(map(str, self.points)) or f"how often drafts are kept: {', '.join(self.acceptance)}"
        return f"{self.error} ({unknown}): chosen rightly with {self.right_after:.0%} then"


class Confidence(Record):
    """Confidence in the choice of a plan."""

    worlds: Count
    level: Share = Field(description="share of worlds that the intervals hold")
    best: Share = Field(description="share of worlds in which no rival is worth more than the chosen plan")
    versus: Seq[Versus] = Field(description="each rival, in the order of the search")
    right: Share | None = Field(
        description="probability that the better of the chosen plan and its nearest rival is chosen, as things are"
    )
    to_measure: Seq[ToMeasure] = Field(description="what helps most first; empty where worlds were too few to tell")
    quantiles: Seq[WorthQuantiles] = Field(description="the chosen plan first")

    @property
    def nearest(self) -> Versus | None:
        """Rival that is beaten with the lowest probability."""
        return min(self.versus, key=lambda v: v.probability, default=None)

    def robust(self, level: float) -> str:
        """Return the plan with the largest value at a quantile of the worlds; of equal plans the first."""
        return max(self.quantiles, key=lambda q: q.at(level)).candidate

    def lines(self) -> list[str]:
        """Return the lines that are printed."""
        if not self.versus:
            return [f"{self.worlds} redrawn worlds: there is no other plan to compare with"]
        rivals = "the rival does not beat" if len(self.versus) == 1 else f"none of {len(self.versus)} rivals beats"
        lines = [f"{self.worlds} redrawn worlds: {rivals} the chosen plan in {self.best:.0%} of them"]
        for rival in self.versus:
            low, high = ("unbounded" if g is None else f"{g:+.1%}" for g in rival.gap)
            lines.append(f"  beats {in_words(rival.candidate)} with {rival.probability:.0%}; gap {low} to {high}")
        lines += [f"measure next: {error}" for error in self.to_measure[:1]]
        return lines


# --- worlds -----------------------------------------------------------------------------------------------


def confidence(
    contenders: Sequence[RivalPlan],
    slo: Slo,
    *,
    worlds: int,
    seed: int = 0,
    tolerance: float = 0.02,
    jobs: Jobs = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Confidence:
    """Judge the first contender, which was chosen, against the others in `worlds` redrawn worlds.

    `tolerance` is the relative step of the ladder of rates. `jobs` processes; the answer does not depend on them.
    Raise UsageError if there is no plan to judge, or if a pool has step costs of its own.
    """
    if not contenders:
        raise UsageError("no plan to judge; pass the chosen plan, and its rivals after it")
    # As predicted first: the steps of these runs tell which errors matter, and how wide they are.
    runs = [_as_chosen(c, slo, seed) for c in contenders]
    drawn_worlds = DrawnWorlds.of(worlds, seed)
    tasks: list[_InWorld] = []
    ladder = RateLadder(contenders[0].rate_rps or 1.0, tolerance)
    for contender, run in zip(contenders, runs, strict=True):
        tasks += _tasks(contender, drawn_worlds.worlds(spreads(contender.deployment, run)), slo, ladder, seed)
    # Contender by contender, so that the values of each are a row of the array below.
    with executor(jobs, len(tasks)) as pool:
        worth = []
        for value in ordered_map(pool, _InWorld.run, tasks):
            worth.append(value)
            if progress is not None:
                progress(len(worth), len(tasks), in_words(contenders[(len(worth) - 1) // worlds].name))
    values = np.array(worth).reshape(len(contenders), worlds)
    calls_by_plan = [[*asked_calls(c.deployment, run)] for c, run in zip(contenders, runs, strict=True)]
    # Errors of kinds that no contender uses would be noise to a line through the worlds.
    in_doubt = {call.kind for calls in calls_by_plan for _, call in calls}
    if any(c.deployment.drafting for c in contenders):
        in_doubt.add(ACCEPTANCE)
    verdict = judge(
        [c.name for c in contenders], values, {name: z for name, z in drawn_worlds.errors.items() if name in in_doubt}
    )
    return verdict.model_copy(update={"to_measure": _with_points(verdict, contenders, calls_by_plan)})


def _tasks(
    c: RivalPlan, worlds: Sequence[PerturbedWorld], slo: Slo, ladder: RateLadder, seed: int
) -> Iterator[_InWorld]:
    """Yield a contender in every world, with the errors that its own steps may have."""
    long_stream = c.stream if c.long_stream is None else c.long_stream
    blueprint, judged = Blueprint.of(c.deployment), (c.rate_rps, c.weight, c.worth, c.cores)
    for world in worlds:
        yield _InWorld(blueprint, c.stream, long_stream, slo, judged, world, ladder, seed)


@dataclass(frozen=True)
class RateLadder:
    """Rates at which all plans are tried, on both sides of that of the chosen plan.

    Its own rate is a rung: otherwise the worlds would show a lower rate where the next rung is above what the plan
    sustains, and the headline would lie outside their interval.
    """

    begin_rps: float
    tolerance: float
    """Relative step."""

    def rate_rps(self, rung: int) -> float:
        """Return the rate of a rung; 0 is that of the chosen plan."""
        return float(self.begin_rps * (1 + self.tolerance) ** rung)

    def below(self, rate_rps: float) -> int:
        """Return the highest rung that is not above a rate."""
        return math.floor(math.log(rate_rps / self.begin_rps) / math.log(1 + self.tolerance) + 1e-9)


def _as_chosen(c: RivalPlan, slo: Slo, seed: int) -> Result:
    stream = c.stream if c.rate_rps is None else c.stream.at_rate(c.rate_rps)
    return c.deployment.simulate(stream, slo, cores=c.cores, seed=seed)


@dataclass(frozen=True)
class _InWorld:
    """A contender in one world."""

    blueprint: Blueprint
    stream: RequestStream
    long_stream: RequestStream
    slo: Slo
    judged: tuple[float | None, float, str, int | None]
    world: PerturbedWorld
    ladder: RateLadder
    seed: int

    def run(self) -> float:
        """Return the value of the contender in the world."""
        rate, weight, worth, cores = self.judged
        deployment = self.blueprint.deploy(self.world)
        sustained = sustained_rps(deployment, self.long_stream)
        if rate is not None:
            return self._highest_rate(deployment, rate, cores, sustained) / weight
        result = deployment.simulate(self.stream, self.slo, cores=cores, seed=self.seed)
        offered = 0.0 if self.stream.batch else self.stream.offered_rate_rps or 0.0
        if not result.meets_slo or sustained < offered:
            return 0.0
        return 1 / (weight if worth == "weight" else _AT_GIVEN_LOAD[worth](result))

    def _highest_rate(self, deployment: Deployment, near: float, cores: int | None, sustained: float) -> float:
        """Return the highest rung of the ladder within the SLO, if all below are, and not above the sustained rate; 0
        if there is none."""
        ladder = self.ladder

        def meets(rung: int) -> bool:
            if ladder.rate_rps(rung) > sustained:
                return False
            stream = self.stream.at_rate(ladder.rate_rps(rung))
            result = deployment.simulate(stream, self.slo, cores=cores, until_lost=WHOLE, seed=self.seed)
            return result.meets_slo

        rung = highest(meets, ladder.below(near))
        return 0.0 if rung is None else ladder.rate_rps(rung)


_AT_GIVEN_LOAD: dict[str, Callable[[Result], float]] = {
    "e2el": lambda result: float(result.values("e2el").mean()),
    "makespan": lambda result: result.duration_s,
    "family": lambda result: float(result.values("family").mean()),
    "family_active": lambda result: float(result.values("family_active").mean()),
    "joules_per_token": lambda result: result.summary(noise=False).joules_per_token or math.inf,
}
"""Value of a run at the given load by the `worth` of a rival, of which less is better."""


def highest(meets: Callable[[int], bool], near: int) -> int | None:
    """Return the highest rung that meets, if all below it do: from `near` in growing strides, then by halves.

    Return None if no rung within a factor of thousands meets; a rung that high is as good as the highest.
    """
    stride = 2
    if meets(near):
        low, high = near, near + stride
        while high - near < _ENDLESS and meets(high):
            stride *= 2
            low, high = high, high + stride
    else:
        low, high = near - stride, near
        while not meets(low):
            if near - low > _ENDLESS:
                return None
            stride *= 2
            low, high = low - stride, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


# --- what the worlds say ----------------------------------------------------------------------------------

_LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


@cache
def normal_levels() -> Array:
    """Return quantiles of the standard normal distribution at equally likely levels."""
    from scipy.special import ndtri

    return np.asarray(ndtri((np.arange(2000) + 0.5) / 2000))


def judge(names: Sequence[str], values: Array, errors: Mapping[str, Array]) -> Confidence:
    """Judge a choice by the values of plans (a row each, the chosen one first) in the same worlds (a column each).

    `errors` are the errors of each world by name, in units of their spread.
    """
    chosen, rivals = values[0], values[1:]
    versus = tuple(_versus(name, chosen, rival) for name, rival in zip(names[1:], rivals, strict=True))
    nearest = min(range(len(versus)), key=lambda i: versus[i].probability, default=None)
    right: float | None = None
    to_measure: tuple[ToMeasure, ...] = ()
    if nearest is not None:
        right, to_measure = _to_measure(chosen - rivals[nearest], errors)
    return Confidence(
        worlds=values.shape[1],
        level=LEVEL,
        best=float(np.mean(chosen >= np.max(values, axis=0))),
        versus=versus,
        right=right,
        to_measure=to_measure,
        quantiles=tuple(
            WorthQuantiles(candidate=name, levels=_LEVELS, values=tuple(np.quantile(row, _LEVELS).tolist()))
            for name, row in zip(names, values, strict=True)
        ),
    )


def _versus(name: str, chosen: Array, rival: Array) -> Versus:
    wins = float(np.mean(np.where(chosen == rival, 0.5, chosen > rival)))
    ratio = np.where(chosen == rival, 1.0, np.inf)
    np.divide(chosen, rival, out=ratio, where=rival > 0)
    return Versus(candidate=name, probability=wins, gap=tuple(interval((ratio - 1).tolist())))


def _to_measure(gap: Array, errors: Mapping[str, Array]) -> tuple[float | None, tuple[ToMeasure, ...]]:
    """Return (probability of choosing rightly now, by a line through the worlds; errors worth knowing, best first).

    If there are too few worlds for a line, or the gap is the same in all, return (None, ()).
    """
    names = [*errors]
    freedom = len(gap) - 1 - len(names)
    if freedom < max(_FREEDOM, len(names)) or not np.ptp(gap):
        return None, ()
    design = np.column_stack([np.ones(len(gap)), *(errors[name] for name in names)])
    line, *_ = np.linalg.lstsq(design, gap, rcond=None)
    mean, slopes = float(line[0]), line[1:]
    residual = float(np.sum((gap - design @ line) ** 2)) / freedom
    variance = float(np.sum(slopes**2)) + residual
    now = float(sure_of_sign(np.array(mean), variance))
    helps = [
        ToMeasure(
            error=name,
            share=min(1.0, b * b / variance),
            right_after=float(np.mean(sure_of_sign(mean + b * normal_levels(), variance - b * b))),
            points=(),
            acceptance=(),
        )
        for name, b in zip(names, slopes.tolist(), strict=True)
    ]
    return now, tuple(sorted(helps, key=lambda h: (-h.right_after, -h.share)))[:WORTH_NAMING]


def sure_of_sign(mean: Array, variance: float) -> Array:
    """Return the probability that a normal number has the sign of its mean."""
    from scipy.special import ndtr

    return np.asarray(ndtr(np.abs(mean) / math.sqrt(variance)) if variance > 0 else np.ones_like(mean))


# --- which shapes -----------------------------------------------------------------------------------------


def _with_points(
    verdict: Confidence, contenders: Sequence[RivalPlan], asked: Sequence[Sequence[tuple[str, AskedCall]]]
) -> tuple[ToMeasure, ...]:
    """Return the errors to measure, with the shapes that the chosen plan and its nearest rival use, or the
    acceptances."""
    nearest = verdict.nearest
    if nearest is None:
        return ()
    two = [i for i, c in enumerate(contenders) if i == 0 or c.name == nearest.candidate]
    specs = {d.acceptance.name for i in two for d in contenders[i].deployment.drafting.values()}
    return tuple(
        item.model_copy(update={"acceptance": tuple(sorted(specs))})
        if item.error == ACCEPTANCE
        else item.model_copy(update={"points": _points([call for i in two for call in asked[i]], item.error)})
        for item in verdict.to_measure
    )


def _points(asked: Sequence[tuple[str, AskedCall]], kind: str) -> tuple[ProfilePoint, ...]:
    """Return the shapes of a kind whose time times error is largest."""
    doubt: dict[tuple[str, str, tuple[tuple[str, float], ...]], float] = defaultdict(float)
    calls: dict[tuple[str, str, tuple[tuple[str, float], ...]], AskedCall] = {}
    for hardware, call in asked:
        if call.kind == kind:
            key = (hardware, call.operator, tuple(sorted(call.shape.items())))
            doubt[key] += call.seconds * call.log_sd
            calls[key] = call
    worst = sorted(doubt, key=lambda key: (-doubt[key], key))[:WORTH_NAMING]
    return tuple(
        ProfilePoint(
            operator=operator,
            hardware=hardware,
            shape={name: round(value, 3) for name, value in shape},
            log_sd=calls[hardware, operator, shape].log_sd,
            basis=calls[hardware, operator, shape].basis.words,
        )
        for hardware, operator, shape in worst
    )
