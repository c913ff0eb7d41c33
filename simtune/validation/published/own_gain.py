"""Gain of a published system on a load of the user's own, its interval, and where it breaks even.

Both sides are those of the entry but for what the user names: model, hardware, load (`own_runs`). The interval is over
the ends of every assumed input, one at a time, and the error of the runs. Runs are short at first and longer while
their error or the verdict on saturation is undecided. An entry is left out with a reason if its sides are no plans
under a load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from simtune.errors import Infeasible, SpecError, UsageError
from simtune.sim.parallel import executor, ordered_map
from simtune.specs.systems import PublishedSystem, Systems
from simtune.specs.workload import ClosedLoop
from simtune.validation.published.collection import Entry
from simtune.validation.published.own_load import OwnGain, OwnInput, OwnLoad, OwnPoint
from simtune.validation.published.own_needs import engines_for, gpus_of, needs_of
from simtune.validation.published.own_runs import LONGER, SPAN, TOLERANCE, OwnRun, OwnRuns, RunLoad

USERS = (1, 8, 64)
"""Users of the closed loops in which the gain is followed over the size of the batch."""
MANY_USERS = (1, 2, 4, 8, 16, 32, 64)
"""The same of a page of one system."""
SCALES = (0.25, 1.0, 4.0)
"""Multiples of the prompts with which the gain is followed over the context, with `CONTEXT_USERS` users."""
MANY_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
CONTEXT_USERS = 8
REFINED = 1
"""Points that are added where the gain passes 1."""
ARRANGED = ("phases", "branches", "finish_first", "order")
"""Settings of a side with which it is no plan under an ordinary load."""
NO_GAIN = 1.005
"""Gain up to which a variant does not pay: differences of rounding and of single steps lie below."""
PRECISE = 0.1
"""Relative error of a gain with which a run is long enough, if the gain is above or below 1 beyond its error."""
SMALL = 0.02
"""Error of a gain near 1 with which a run is long enough."""
BATCHES = 10
"""Batches of requests whose means give the error of a run."""
T_95 = 2.262
"""97.5 % quantile of Student's t with BATCHES - 1 degrees of freedom."""

LEFT_OUT = {
    "no sides": "claims a number alone, needs what simtune lacks, or is no schedule",
    "arranged": "its sides are no plans under an ordinary load",
    "alike": "its sides differ in the published step, load or model alone",
    "does not fit": "does not fit on that hardware, or with that model",
    "refused": "does not run under that load",
}
"""Kinds of reasons why an entry has no numbers."""


def own_gains(entries: Sequence[Entry], own: OwnLoad, jobs: int | None = 1) -> Iterator[OwnGain]:
    """Yield the gain of each entry on a load of the user's own, in their order; families run in `jobs` processes.

    Raises UsageError if limits are given for a load that has no rate.
    """
    if own.limited and isinstance(own.workload.arrivals, ClosedLoop):
        raise UsageError(f"workload {own.workload.name} is a closed loop, which has no rate; remove --ttft and --tpot")
    families = [list(group) for _, group in groupby(entries, key=lambda entry: entry.family.name)]
    runs = OwnRuns(own)
    with executor(jobs, len(families)) as pool:
        if pool is None:
            yield from (own_gain(entry, runs) for entry in entries)
            return
        for gains in ordered_map(pool, partial(_family, runs=runs), families):
            yield from gains


def _family(entries: Sequence[Entry], runs: OwnRuns) -> list[OwnGain]:
    return [own_gain(entry, runs) for entry in entries]


def own_gain(entry: Entry, runs: OwnRuns) -> OwnGain:
    """Return the gain of an entry; without numbers, and with a reason, if it cannot be run."""
    try:
        return _gain(entry, runs)
    except Infeasible as error:
        return _without(entry, "does not fit", str(error))
    except (UsageError, SpecError) as error:
        return _without(entry, "refused", str(error))


def _without(entry: Entry, kind: str, reason: str) -> OwnGain:
    """Return the record of an entry without numbers."""
    system = entry.system
    return OwnGain(family=entry.family.name, system=system.name, title=system.title, reason=reason, left_out=kind)


def _gain(entry: Entry, runs: OwnRuns) -> OwnGain:
    family, system = entry
    sides = family.sides(system)
    if "base" not in sides:
        return _without(entry, "no sides", f"{LEFT_OUT['no sides']}: no two sides are run")
    arranged = [key for key in ARRANGED if any(key in side for side in sides.values())]
    if arranged:
        return _without(entry, "arranged", f"{LEFT_OUT['arranged']} ({', '.join(arranged)})")
    pair = _Pair(family, sides, runs)
    if pair.alike:
        return _without(entry, "alike", LEFT_OUT["alike"])
    pair = pair.of_best()
    comparison = pair.measured()
    inputs = pair.inputs(system, comparison)
    low, high = _interval(comparison, inputs)
    by_users, by_prompt = _points(pair, runs.own)
    rounds = comparison.tokens_per_round
    above = None if rounds is None else rounds / comparison.gain
    base, variant = pair.plans()
    engines, lacks = engines_for(base, variant)
    return OwnGain(
        family=family.name,
        system=system.name,
        title=system.title,
        metric=runs.own.metric(),
        base=comparison.base,
        variant=comparison.variant,
        gain=comparison.gain,
        low=low,
        high=high,
        error=comparison.error,
        requests=comparison.requests,
        inputs=tuple(inputs),
        not_varied=system.assumed,
        tokens_per_round=rounds,
        pays_above_tokens_per_round=above,
        by_users=tuple(by_users),
        by_prompt_tokens=tuple(by_prompt),
        pays=tuple(_pays(above, by_users, by_prompt)),
        gpus=gpus_of(variant),
        base_gpus=gpus_of(base),
        needs=tuple(needs_of(base, variant)),
        engines=tuple(engines),
        lacks=lacks,
        reason=comparison.note,
    )


def _interval(comparison: OwnComparison, inputs: Sequence[OwnInput]) -> tuple[float, float | None]:
    """Return the least and greatest gain over the ends of the inputs, each with the error of the run."""
    every = [comparison.gain, *(end for item in inputs for end in item.gains)]
    relative = (comparison.error or 0.0) / comparison.gain
    low = 0.0 if "variant" in comparison.saturated else max(0.0, min(every) * (1 - relative))
    return low, None if "base" in comparison.saturated else max(every) * (1 + relative)


# --- both sides -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnComparison:
    """Both sides on the load, and the gain of the variant."""

    base: float
    variant: float
    gain: float
    error: float | None
    requests: int
    saturated: tuple[str, ...] = ()
    tokens_per_round: float | None = None
    note: str | None = None


class Ratio(NamedTuple):
    """Mean E2EL of two runs on the same requests, their ratio, and its 95 % error."""

    base: float
    variant: float
    gain: float
    error: float | None


def ratio(base: OwnRun, variant: OwnRun) -> Ratio:
    """Return the gain in mean E2EL over the requests that end in both runs, and its error by means of batches.

    Raises UsageError if no request ends in both.
    """
    ended = np.isfinite(base.e2el_s) & np.isfinite(variant.e2el_s)
    if not ended.any():
        raise UsageError("no request ends on both sides")
    before, after = base.e2el_s[ended], variant.e2el_s[ended]
    gain = float(before.mean() / after.mean())
    if len(before) < 2 * BATCHES:
        return Ratio(float(before.mean()), float(after.mean()), gain, None)
    means = [part.mean() for part in np.array_split(before - gain * after, BATCHES)]
    error = T_95 * float(np.std(means, ddof=1)) / math.sqrt(BATCHES) / float(after.mean())
    return Ratio(float(before.mean()), float(after.mean()), gain, error)


class _Pair:
    """Base and variant of an entry on a load of the user's own."""

    def __init__(
        self,
        family: Systems,
        sides: Mapping[str, Mapping[str, Any]],
        runs: OwnRuns,
        chosen: Mapping[str, int] | None = None,
    ) -> None:
        """`chosen` are the numbers of the alternatives that run; all unless given."""
        self._family, self._published, self._runs, self._own = family, sides, runs, runs.own
        self._chosen = dict(chosen or {})
        self.sides = {
            name: every if name not in self._chosen else [every[min(self._chosen[name], len(every) - 1)]]
            for name, every in runs.adapted(sides).items()
        }

    def of_best(self) -> _Pair:
        """Return the pair with the alternative of each side that is best on the first requests of the load.

        With a load of the user's own in detail, all alternatives run everywhere.
        """
        if self._own.detailed or all(len(every) == 1 for every in self.sides.values()):
            return self
        best = {name: self._best_at(name, self._runs.first) for name in SIDES}
        return _Pair(self._family, self._published, self._runs, best)

    @property
    def alike(self) -> bool:
        """True if both sides are the same plan."""
        return self.sides["base"] == self.sides["variant"]

    def plans(self) -> tuple[Any, Any]:
        """Return the first alternative of each side, as it runs."""
        load = RunLoad(self._own.requests)
        base, variant = (self._runs.side(self._family, self.sides[name][0], load) for name in ("base", "variant"))
        return base, variant

    def measured(self) -> OwnComparison:
        """Return both sides on the load, each with the best of its alternatives, by runs as long as is needed."""
        if self._own.limited:
            return self._highest()
        requests = self._runs.first
        while True:
            base, variant = self._best("base", requests), self._best("variant", requests)
            now = ratio(base, variant)
            verdicts = {base.verdict, variant.verdict}
            if requests >= self._own.requests or (_decided(now) and "undecided" not in verdicts):
                break
            requests = min(self._own.requests, requests * LONGER)
        saturated = tuple(name for name, run in zip(SIDES, (base, variant), strict=True) if _saturated(run))
        drafts, note = variant.tokens_per_round, _note(saturated, verdicts)
        return OwnComparison(*now, requests, saturated, drafts, note)

    def _best(self, name: str, requests: int) -> OwnRun:
        return self._all(name, requests)[self._best_at(name, requests)]

    def _best_at(self, name: str, requests: int) -> int:
        means = [float(np.nanmean(run.e2el_s)) for run in self._all(name, requests)]
        return means.index(min(means))

    def _all(self, name: str, requests: int) -> list[OwnRun]:
        return [self._runs.run(self._family, side, RunLoad(requests)) for side in self.sides[name]]

    def _highest(self) -> OwnComparison:
        requests = self._own.requests
        base, variant = (self._rate(name, requests) for name in SIDES)
        most = (self._runs.stream(RunLoad(requests)).offered_rate_rps or 0.0) * SPAN
        rounds = self._best("variant", self._runs.first).tokens_per_round
        unbound = f"the limits are kept at {most:.4g} requests/s too; give the load more requests"
        note = unbound if max(base, variant) > 0.99 * most else None
        gain = variant / base
        return OwnComparison(base, variant, gain, gain * TOLERANCE, requests, (), rounds, note)

    def _rate(self, name: str, requests: int) -> float:
        return max(self._runs.highest(self._family, side, requests) for side in self.sides[name])

    def other_gain(self, sides: Mapping[str, Mapping[str, Any]], requests: int) -> float:
        """Return the gain with other settings of both sides; 0 if a side does not fit then."""
        pair = _Pair(self._family, sides, self._runs, self._chosen)
        try:
            if self._own.limited:
                return pair._rate("variant", requests) / pair._rate("base", requests)
            return ratio(pair._best("base", requests), pair._best("variant", requests)).gain
        except Infeasible:
            return 0.0

    def inputs(self, system: PublishedSystem, comparison: OwnComparison) -> list[OwnInput]:
        """Return the assumed inputs that change a side on this load, each with the gains at its ends."""
        inputs = []
        for item in system.inputs:
            varied = [self._family.varied(system, otherwise) for otherwise in item.otherwise]
            if any(_Pair(self._family, sides, self._runs, self._chosen).sides != self.sides for sides in varied):
                gains = tuple(self.other_gain(sides, comparison.requests) for sides in varied)
                inputs.append(OwnInput(what=item.what, gains=gains))
        return inputs

    def throughput_gain(self, load: RunLoad) -> float | None:
        """Return the output tokens per second of the variant over those of the base; None if a side does not fit."""
        try:
            rates = {
                name: max(self._runs.run(self._family, side, load).output_tokens_per_s for side in every)
                for name, every in self.sides.items()
            }
        except (Infeasible, UsageError):
            return None
        return rates["variant"] / rates["base"] if rates["base"] else None


SIDES = ("base", "variant")


def _decided(comparison: Ratio) -> bool:
    """True if a gain is precise enough, and above or below 1 beyond its error unless that is small."""
    if comparison.error is None or comparison.error > PRECISE * comparison.gain:
        return False
    return abs(comparison.gain - 1) > comparison.error or comparison.error <= SMALL


def _saturated(run: OwnRun) -> bool:
    return run.verdict == "saturated"


def _note(saturated: Sequence[str], verdicts: set[Any]) -> str | None:
    if saturated:
        return f"saturated: {' and '.join(saturated)}; lower the rate"
    short = "undecided" in verdicts
    return "near the capacity: too short to tell if both sides keep up; give the load more requests" if short else None


# --- where it breaks even ---------------------------------------------------------------------------------


def _points(pair: _Pair, own: OwnLoad) -> tuple[list[OwnPoint], list[OwnPoint]]:
    """Return the gain over the number of users, and over the mean length of the prompts unless these share prefixes."""
    users = MANY_USERS if own.detailed else USERS
    by_users = traced(users, lambda at: pair.throughput_gain(RunLoad(users=round(at))), whole=True)
    stream = own.of_users(CONTEXT_USERS)
    if stream.hash_ids is not None:
        return by_users, []
    prompt = float(stream.prompt_tokens.mean())
    scales = MANY_SCALES if own.detailed else SCALES
    by_scale = traced(scales, lambda at: pair.throughput_gain(RunLoad(users=CONTEXT_USERS, scale=at)))
    return by_users, [OwnPoint(at=prompt * point.at, gain=point.gain) for point in by_scale]


def traced(at: Sequence[float], gain_at: Callable[[float], float | None], whole: bool = False) -> list[OwnPoint]:
    """Return the gain at some points, and at further ones between those where it passes 1."""
    points = {float(x): gain_at(x) for x in at}
    for _ in range(REFINED):
        fitting = sorted((x, gain) for x, gain in points.items() if gain is not None)
        for (x, a), (y, b) in pairwise(fitting):
            middle = math.sqrt(x * y)
            middle = float(round(middle)) if whole else middle
            if _pays_at(a) != _pays_at(b) and middle not in points:
                points[middle] = gain_at(middle)
    return [OwnPoint(at=x, gain=gain) for x, gain in sorted(points.items())]


def _pays_at(gain: float) -> bool:
    return gain > NO_GAIN


def _pays(above: float | None, by_users: Sequence[OwnPoint], by_prompt: Sequence[OwnPoint]) -> Iterator[str]:
    if above is not None:
        yield f"above {above:.2f} tokens a round"
    yield f"{crossing(by_users, 'users')}"
    if by_prompt:
        yield f"{crossing(by_prompt, 'prompt tokens')}, with {CONTEXT_USERS} users"


def crossing(points: Sequence[OwnPoint], what: str) -> str:
    """Return in words where the gain is above 1, by straight lines over the logarithm between the points."""
    fitting = [(point.at, point.gain) for point in points if point.gain is not None]
    if not fitting:
        return f"at no number of {what} that fits"
    paying = [_pays_at(gain) for _, gain in fitting]
    if all(paying):
        return f"from {fitting[0][0]:,.0f} to {fitting[-1][0]:,.0f} {what} throughout"
    if not any(paying):
        return f"nowhere from {fitting[0][0]:,.0f} to {fitting[-1][0]:,.0f} {what}"
    turns = [
        f"{'from' if _pays_at(b) else 'below'} {_between(x, a, y, b):,.0f} {what}"
        for (x, a), (y, b) in pairwise(fitting)
        if _pays_at(a) != _pays_at(b)
    ]
    return ", ".join(turns)


def turns_of(points: Sequence[OwnPoint]) -> list[float]:
    """Return where the gain passes 1 between the points."""
    fitting = [(point.at, point.gain) for point in points if point.gain is not None]
    return [_between(x, a, y, b) for (x, a), (y, b) in pairwise(fitting) if _pays_at(a) != _pays_at(b)]


def _between(x: float, a: float, y: float, b: float) -> float:
    """Return where the gain is NO_GAIN between two points."""
    return math.exp(math.log(x) + (NO_GAIN - a) / (b - a) * (math.log(y) - math.log(x)))
