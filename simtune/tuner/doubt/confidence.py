"""How sure a choice is: the chosen plan and its rivals in the same redrawn worlds, and what to measure to be surer.

In each world every kind of operator, and the acceptance of drafts, is off by one error that all plans share, on the
same requests (`simtune.sim.uncertainty`); errors drawn for each plan by itself would make the gap between two plans
look several times less sure than it is. The value of a plan in a world is what the search looked for: the highest rate
within the SLO that the plan could sustain there for ever, per whatever counts, on one ladder of rates for all plans, or
what it is worth at the load asked about. A short run may end before it is felt that requests pile up; no such rate
counts, here as in the search.

    P(A beats B) = share of worlds in which A is worth more, ties half

What to measure next is asked of a line through the worlds: gap = d + sum b_k z_k + the rest, z_k the error of kind k in
units of its spread, s the spread of the gap. Once z_k is known, A is better with probability

    Phi((d + b_k z_k) / sqrt(s^2 - b_k^2))

and the better of the two is then chosen rightly with the mean over z_k of max(P, 1 - P): the kind with the largest is
to be measured next.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field
from scipy.special import ndtr, ndtri

from simtune.arrays import Array
from simtune.costs.basis import AskedCall
from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.sim.parallel import Jobs, executor, ordered_map
from simtune.sim.run_basis import asked_calls
from simtune.sim.uncertainty import ACCEPTANCE, LEVEL, Blueprint, draws, interval, spreads
from simtune.specs.base import Count, NonNegative, Record, Seq, Share
from simtune.specs.workload import Slo
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.workload.requests import RequestStream

WORTH_NAMING = 3
"""Shapes of a kind that are named as worth measuring."""
_FREEDOM = 5
"""Worlds beyond those that a line needs, for its rest to be known."""
_ENDLESS = 400
"""Rungs of the ladder of rates above or below the first one that are looked at: a factor of thousands at 2 %."""


@dataclass(frozen=True)
class RivalPlan:
    """A plan of a finished search, ready to be judged in other worlds."""

    name: str
    deployment: Deployment
    stream: RequestStream
    rate_rps: float | None
    """The highest that it was found to serve; None where plans are compared at the load of the stream."""
    weight: float = 1.0
    """What its rate counts per: GPUs, dollars per hour. Where the load is given, what it takes, if that is compared."""
    worth: Literal["rate", "e2el", "weight"] = "rate"
    """What larger values of are better: rate / weight, 1 / mean E2EL, or 1 / weight; 0 where the SLO is missed."""
    cores: int | None = None
    """Engine cores that are simulated for all of them."""


# --- what is said of it -----------------------------------------------------------------------------------


class Versus(Record):
    """The chosen plan against one rival."""

    candidate: str
    probability: Share = Field(description="that the chosen plan beats it: share of worlds, ties half")
    gap: Seq[float | None] = Field(
        description="[low, high] of the chosen plan's value over the rival's, less 1; null is unbounded"
    )


class WorthQuantiles(Record):
    """What a plan is worth in the worlds, in the objective's terms: 0 where it misses the SLO."""

    candidate: str
    levels: Seq[Share]
    values: Seq[NonNegative]

    def at(self, level: float) -> float:
        """The value at a level; between two of them, on a straight line."""
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
    """What knowing one error would do for the choice between the chosen plan and its nearest rival."""

    error: str = Field(description="operator kind, or acceptance")
    share: Share = Field(description="of the variance of the gap between the two that it stands for")
    right_after: Share = Field(description="probability of choosing the better of the two once it is known")
    points: Seq[ProfilePoint] = Field(description="shapes of the kind that matter most; none for acceptance")
    acceptance: Seq[str] = Field(description="the acceptance specs that are in doubt; none for an operator kind")

    def __str__(self) -> str:
        what = ", ".join(map(str, self.points)) or f"how often drafts are kept: {', '.join(self.acceptance)}"
        return f"{self.error} ({what}): chosen rightly with {self.right_after:.0%} then"


class Confidence(Record):
    """How sure the choice is."""

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
        """The rival that is least surely beaten."""
        return min(self.versus, key=lambda v: v.probability, default=None)

    def robust(self, level: float) -> str:
        """The plan with the largest value at a quantile of the worlds; of equals the first."""
        return max(self.quantiles, key=lambda q: q.at(level)).candidate

    def lines(self) -> list[str]:
        """What to print of it."""
        if not self.versus:
            return [f"{self.worlds} redrawn worlds: there is no other plan to compare with"]
        rivals = "the rival does not beat" if len(self.versus) == 1 else f"none of {len(self.versus)} rivals beats"
        said = [f"{self.worlds} redrawn worlds: {rivals} the chosen plan in {self.best:.0%} of them"]
        for rival in self.versus:
            low, high = ("unbounded" if g is None else f"{g:+.1%}" for g in rival.gap)
            said.append(f"  beats {rival.candidate} with {rival.probability:.0%}; gap {low} to {high}")
        said += [f"measure next: {one}" for one in self.to_measure[:1]]
        return said


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
    Raises UsageError where there is nobody to judge, or step costs were brought from outside.
    """
    if not contenders:
        raise UsageError("nobody to judge: a confidence is of a chosen plan and its rivals")
    runs = [_as_chosen(c, slo, seed) for c in contenders]
    drawn = draws(worlds, seed)
    tasks: list[_InWorld] = []
    for contender, run in zip(contenders, runs, strict=True):
        tasks += _tasks(contender, spreads(contender.deployment, run), drawn, slo, tolerance, seed)
    with executor(jobs, len(tasks)) as pool:
        worth = []
        for value in ordered_map(pool, _InWorld.run, tasks):
            worth.append(value)
            if progress is not None:
                progress(len(worth), len(tasks), contenders[(len(worth) - 1) // worlds].name)
    values = np.array(worth).reshape(len(contenders), worlds)
    asked = [[*asked_calls(c.deployment, run)] for c, run in zip(contenders, runs, strict=True)]
    in_doubt = {call.kind for calls in asked for _, call in calls}
    if any(c.deployment.drafting for c in contenders):
        in_doubt.add(ACCEPTANCE)
    verdict = judge([c.name for c in contenders], values, {name: z for name, z in drawn.items() if name in in_doubt})
    return verdict.model_copy(update={"to_measure": _with_points(verdict, contenders, asked)})


def _tasks(
    c: RivalPlan, log_sd: Mapping[str, float], drawn: Mapping[str, Array], slo: Slo, tolerance: float, seed: int
) -> Iterator[_InWorld]:
    """A contender in every world, off by as much as its own steps may be."""
    blueprint, judged = Blueprint.of(c.deployment), (c.rate_rps, c.weight, c.worth, c.cores)
    for i, acceptance_errors in enumerate(drawn[ACCEPTANCE].tolist()):
        factors = {kind: math.exp(sd * float(drawn[kind][i])) for kind, sd in log_sd.items()}
        yield _InWorld(blueprint, c.stream, slo, judged, factors, acceptance_errors, tolerance, seed)


def _as_chosen(c: RivalPlan, slo: Slo, seed: int) -> Result:
    stream = c.stream if c.rate_rps is None else c.stream.at_rate(c.rate_rps)
    return c.deployment.simulate(stream, slo, cores=c.cores, seed=seed)


@dataclass(frozen=True)
class _InWorld:
    """One contender in one world."""

    blueprint: Blueprint
    stream: RequestStream
    slo: Slo
    judged: tuple[float | None, float, str, int | None]
    factors: Mapping[str, float]
    acceptance_errors: float
    tolerance: float
    seed: int

    def run(self) -> float:
        """What it is worth there."""
        rate, weight, worth, cores = self.judged
        deployment = self.blueprint.deploy(self.factors, self.acceptance_errors)
        sustained = sustained_rps(deployment, self.stream)
        if rate is not None:
            return self._highest_rate(deployment, rate, cores, sustained) / weight
        result = deployment.simulate(self.stream, self.slo, cores=cores, seed=self.seed)
        if not result.meets_slo or sustained < (self.stream.offered_rate_rps or 0.0):
            return 0.0
        return 1 / weight if worth == "weight" else 1 / float(np.nanmean(result.e2el_s))

    def _highest_rate(self, deployment: Deployment, near: float, cores: int | None, sustained: float) -> float:
        """The highest rung (1 + tolerance)^k of the ladder within the SLO, if all below are, and not above what is
        sustained; 0 where it is nowhere."""
        step = 1 + self.tolerance

        def meets(rung: int) -> bool:
            if step**rung > sustained:
                return False
            stream = self.stream.at_rate(step**rung)
            result = deployment.simulate(stream, self.slo, cores=cores, stop_when_lost=True, seed=self.seed)
            return result.meets_slo

        rung = highest(meets, math.floor(math.log(near) / math.log(step) + 1e-9))
        return 0.0 if rung is None else step**rung


def highest(meets: Callable[[int], bool], near: int) -> int | None:
    """The highest rung that meets, where all below it do: from `near` in growing strides, then by halves.

    None where no rung within a factor of thousands does; one that high is as good as the highest.
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
_NORMAL: Array = ndtri((np.arange(2000) + 0.5) / 2000)
"""The standard normal distribution, as equally likely numbers."""


def judge(names: Sequence[str], values: Array, errors: Mapping[str, Array]) -> Confidence:
    """What the values of plans (a row each, the chosen one first) in the same worlds (a column each) say of the choice.

    `errors` are how far off what is in each world, in units of its spread, by name.
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
    """(probability of choosing rightly as things are, by a line through the worlds; what would raise it, best first).

    Where worlds are too few for a line, or the gap is the same in all, nothing is said.
    """
    names = [*errors]
    freedom = len(gap) - 1 - len(names)
    if freedom < max(_FREEDOM, len(names)) or not np.ptp(gap):
        return None, ()
    design = np.column_stack([np.ones(len(gap)), *(errors[name] for name in names)])
    line, *_ = np.linalg.lstsq(design, gap, rcond=None)
    mean, slopes = float(line[0]), line[1:]
    rest = float(np.sum((gap - design @ line) ** 2)) / freedom
    variance = float(np.sum(slopes**2)) + rest
    now = float(_sure(np.array(mean), variance))
    helps = [
        ToMeasure(
            error=name,
            share=min(1.0, b * b / variance),
            right_after=float(np.mean(_sure(mean + b * _NORMAL, variance - b * b))),
            points=(),
            acceptance=(),
        )
        for name, b in zip(names, slopes.tolist(), strict=True)
    ]
    return now, tuple(sorted(helps, key=lambda h: (-h.right_after, -h.share)))[:WORTH_NAMING]


def _sure(mean: Array, variance: float) -> Array:
    """Probability that a normal number has the sign of its mean."""
    return np.asarray(ndtr(np.abs(mean) / math.sqrt(variance)) if variance > 0 else np.ones_like(mean))


# --- which shapes -----------------------------------------------------------------------------------------


def _with_points(
    verdict: Confidence, contenders: Sequence[RivalPlan], asked: Sequence[Sequence[tuple[str, AskedCall]]]
) -> tuple[ToMeasure, ...]:
    """What to measure, with the shapes that the chosen plan and its nearest rival ask for, or the acceptances."""
    nearest = verdict.nearest
    if nearest is None:
        return ()
    two = [i for i, c in enumerate(contenders) if i == 0 or c.name == nearest.candidate]
    specs = {d.acceptance.name for i in two for d in contenders[i].deployment.drafting.values()}
    return tuple(
        one.model_copy(update={"acceptance": tuple(sorted(specs))})
        if one.error == ACCEPTANCE
        else one.model_copy(update={"points": _points([call for i in two for call in asked[i]], one.error)})
        for one in verdict.to_measure
    )


def _points(asked: Sequence[tuple[str, AskedCall]], kind: str) -> tuple[ProfilePoint, ...]:
    """The shapes of a kind whose time and doubt together are largest."""
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
