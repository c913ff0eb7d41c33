"""Published systems on a model, a device and a load of the user's own: gain, its interval, and where it breaks even.

Both sides are those of the entry but for what the user names: model, hardware, load, and lengths and sizes of batches,
unless these are what tells the sides apart. The interval is over the ends of every assumed input, one at a time. An
entry is left out with a reason if its sides are no plans under a load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field

from simtune.errors import Infeasible, SpecError, UsageError
from simtune.results.result import Result
from simtune.sim.deployment import length_limit
from simtune.specs.base import Record, Seq
from simtune.specs.catalog import load_model
from simtune.specs.systems import HighestRate, PublishedSystem, Systems, alternatives, merged
from simtune.specs.traces import Trace
from simtune.specs.workload import ClosedLoop, Workload
from simtune.validation.published.collection import Entry
from simtune.validation.published.sides import Side, moved, per_round
from simtune.workload.requests import RequestStream, build_stream

SCHEMA: Literal["simtune/own-gains@1"] = "simtune/own-gains@1"
USERS = (1, 8, 64)
"""Users of the closed loops in which the gain is followed over the size of the batch."""
SCALES = (0.25, 1.0, 4.0)
"""Multiples of the prompts with which the gain is followed over the context, with `CONTEXT_USERS` users."""
CONTEXT_USERS = 8
ROUNDS = 3
"""Requests of each user."""
SIZES = (("max_model_len",), ("batching", "max_num_seqs"), ("batching", "max_num_batched_tokens"),
         ("kv_cache", "num_blocks"), ("kv_cache", "other_memory_gib"))  # fmt: skip
"""Keys of a pool that are those of the published load, and not of the technique."""
ARRANGED = ("phases", "branches", "finish_first", "order")
"""Settings of a side with which it is no plan under an ordinary load."""
NO_GAIN = 1.005
"""Gain up to which a variant does not pay: differences of rounding and of single steps lie below."""
SPAN = 64.0
"""Factor on the load's own rate within which the highest rate is looked for."""


class OwnPoint(Record):
    """Gain at a size of the batch or a length of the prompts."""

    at: float
    gain: float | None = Field(description="null where a side does not fit")


class OwnInput(Record):
    """An assumed input, and the gains at the ends of what it could be."""

    what: str
    gains: Seq[float]


class OwnGain(Record):
    """Gain of a published system on a load of the user's own, above 1 if the variant is better."""

    family: str
    system: str
    title: str
    metric: str | None
    base: float | None
    variant: float | None
    gain: float | None
    low: float | None
    high: float | None = Field(description="low and high: least and greatest gain over the ends of assumed inputs")
    inputs: Seq[OwnInput]
    tokens_per_round: float | None = Field(description="of the variant, if it drafts")
    pays_above_tokens_per_round: float | None = Field(description="the gain is 1 there, if rounds take as long")
    by_users: Seq[OwnPoint]
    by_prompt_tokens: Seq[OwnPoint]
    pays: Seq[str] = Field(description="where it pays, in words")
    reason: str | None = Field(description="why there are no numbers, or a note on them")


class OwnGains(Record):
    """A file of gains on a load of the user's own."""

    schema_: Literal["simtune/own-gains@1"] = Field(SCHEMA, alias="schema")
    model: str
    hardware: str
    workload: str
    gains: Seq[OwnGain]


@dataclass(frozen=True)
class OwnLoad:
    """Model, hardware and load of the user."""

    model: str
    hardware: str
    workload: Workload
    trace: Trace | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def limited(self) -> bool:
        """True if the highest rate within limits is measured, and not the latency at the load's own rate."""
        return self.ttft_s is not None or self.tpot_s is not None

    def stream(self) -> RequestStream:
        """Return the requests of the load."""
        return build_stream(self.workload, self.trace, requests=self.workload.requests, seed=0)

    def of_users(self, users: int, scale: float = 1.0) -> RequestStream:
        """Return requests of the load's lengths in a closed loop, their prompts `scale` times as long."""
        load = self.workload.model_copy(update={"arrivals": ClosedLoop(users=users), "batch": False})
        stream = build_stream(load, self.trace, requests=ROUNDS * users, seed=0)
        if scale == 1.0:
            return stream
        prompts = np.maximum(1, np.rint(stream.prompt_tokens * scale)).astype(np.int64)
        return replace(stream, prompt_tokens=prompts)

    def metric(self) -> str:
        """Return what is measured, in words."""
        return "highest rate, requests/s" if self.limited else "mean E2EL, s"


def own_gains(entries: Sequence[Entry], own: OwnLoad) -> Iterator[OwnGain]:
    """Yield the gain of each entry on a load of the user's own, in their order."""
    if own.limited and isinstance(own.workload.arrivals, ClosedLoop):
        raise UsageError(f"workload {own.workload.name} is a closed loop, which has no rate; remove --ttft and --tpot")
    for entry in entries:
        try:
            yield _gain(entry, own)
        except (Infeasible, UsageError, SpecError) as error:
            yield _without(entry, str(error))


def _without(entry: Entry, reason: str | None) -> OwnGain:
    """Return the record of an entry without numbers."""
    return OwnGain(
        family=entry.family.name, system=entry.system.name, title=entry.system.title, metric=None, base=None,
        variant=None, gain=None, low=None, high=None, inputs=(), tokens_per_round=None,
        pays_above_tokens_per_round=None, by_users=(), by_prompt_tokens=(), pays=(), reason=reason,
    )  # fmt: skip


def _gain(entry: Entry, own: OwnLoad) -> OwnGain:
    family, system = entry
    sides = family.sides(system)
    if "base" not in sides:
        return _without(entry, "has no two sides that are run: it needs what simtune lacks, or claims a number alone")
    arranged = [key for key in ARRANGED if any(key in side for side in sides.values())]
    if arranged:
        return _without(entry, f"its sides are no plans under an ordinary load ({', '.join(arranged)})")
    pair = _Pair(family, sides, own)
    if pair.alike:
        return _without(entry, "its sides differ in the published step or load alone")
    base, variant = pair.measured()
    gain = _ratio(own, base.value, variant.value)
    inputs = pair.inputs(system)
    every = [gain, *(end for item in inputs for end in item.gains)]
    rounds = per_round(variant.result) if variant.result.drafted.rounds else None
    by_users, by_prompt = _points(pair, own)
    above = None if rounds is None else rounds / gain
    return _without(entry, _note(base.result, variant.result, own)).model_copy(
        update={
            "metric": own.metric(),
            "base": base.value,
            "variant": variant.value,
            "gain": gain,
            "low": min(every),
            "high": max(every),
            "inputs": tuple(inputs),
            "tokens_per_round": rounds,
            "pays_above_tokens_per_round": above,
            "by_users": tuple(by_users),
            "by_prompt_tokens": tuple(by_prompt),
            "pays": tuple(_pays(above, by_users, by_prompt)),
        }
    )


def _points(pair: _Pair, own: OwnLoad) -> tuple[list[OwnPoint], list[OwnPoint]]:
    """Return the gain over the number of users, and over the mean length of the prompts unless these share prefixes."""
    by_users = [OwnPoint(at=users, gain=pair.throughput_gain(own.of_users(users))) for users in USERS]
    stream = own.of_users(CONTEXT_USERS)
    if stream.hash_ids is not None:
        return by_users, []
    prompt = float(stream.prompt_tokens.mean())
    gains = {scale: pair.throughput_gain(own.of_users(CONTEXT_USERS, scale)) for scale in SCALES}
    return by_users, [OwnPoint(at=prompt * scale, gain=gain) for scale, gain in gains.items()]


def _ratio(own: OwnLoad, base: float, variant: float) -> float:
    return variant / base if own.limited else base / variant


def _note(base: Result, variant: Result, own: OwnLoad) -> str | None:
    saturated = [name for name, result in (("base", base), ("variant", variant)) if result.saturated]
    if own.limited:
        most = (own.stream().offered_rate_rps or 0.0) * SPAN
        unbound = [result for result in (base, variant) if (result.stream.offered_rate_rps or 0.0) > 0.99 * most]
        return f"the limits are kept at {most:.4g} requests/s too; give the load more requests" if unbound else None
    return f"saturated: {' and '.join(saturated)}; lower the rate" if saturated else None


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
    paying = [gain > NO_GAIN for _, gain in fitting]
    if all(paying):
        return f"from {fitting[0][0]:,.0f} to {fitting[-1][0]:,.0f} {what} throughout"
    if not any(paying):
        return f"nowhere from {fitting[0][0]:,.0f} to {fitting[-1][0]:,.0f} {what}"
    turns = [
        f"{'from' if b > NO_GAIN else 'below'} {_between(x, a, y, b):,.0f} {what}"
        for (x, a), (y, b) in pairwise(fitting)
        if (a > NO_GAIN) != (b > NO_GAIN)
    ]
    return ", ".join(turns)


def _between(x: float, a: float, y: float, b: float) -> float:
    """Return where the gain is NO_GAIN between two points."""
    return math.exp(math.log(x) + (NO_GAIN - a) / (b - a) * (math.log(y) - math.log(x)))


@dataclass(frozen=True)
class _Measured:
    value: float
    result: Result


class _Pair:
    """Base and variant of an entry on a load of the user's own."""

    def __init__(self, family: Systems, sides: Mapping[str, Mapping[str, Any]], own: OwnLoad) -> None:
        self._family, self._own = family, own
        self._model = load_model(own.model)
        self._sides = self._adapted(sides)

    def _adapted(self, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Return the alternatives of each side with the model and hardware of the user."""
        apart = [path for path in SIZES if _at(sides["base"], path) != _at(sides["variant"], path)]
        return {
            name: [self._moved(alternative, apart) for alternative in alternatives(side)]
            for name, side in sides.items()
        }

    @property
    def alike(self) -> bool:
        """True if both sides are the same plan."""
        return self._sides["base"] == self._sides["variant"]

    def _moved(self, side: Mapping[str, Any], apart: Sequence[tuple[str, ...]]) -> dict[str, Any]:
        pool = dict(side.get("pool", {}))
        for path in SIZES:
            if path not in apart:
                pool = _removed(pool, path)
        # A published step is a load of its own kind, which the user's load replaces.
        without_load = {key: value for key, value in side.items() if key not in ("step", "workload")}
        return {**moved({**without_load, "pool": pool}, self._own.hardware), "model": self._own.model}

    def other_gain(self, sides: Mapping[str, Mapping[str, Any]]) -> float:
        """Return the gain with other settings of both sides; 0 if a side does not fit then."""
        try:
            base, variant = _Pair(self._family, sides, self._own).measured()
        except Infeasible:
            return 0.0
        return _ratio(self._own, base.value, variant.value)

    def inputs(self, system: PublishedSystem) -> list[OwnInput]:
        """Return the assumed inputs of a system, each with the gains at the ends of what it could be."""
        varied = {
            item.what: [self.other_gain(self._family.varied(system, otherwise)) for otherwise in item.otherwise]
            for item in system.inputs
            if item.otherwise
        }
        return [OwnInput(what=words, gains=tuple(gains)) for words, gains in varied.items()]

    def measured(self) -> tuple[_Measured, _Measured]:
        """Return the base and the variant under the load, each with the best of its alternatives."""
        limited, stream = self._own.limited, self._own.stream()
        work = (lambda side: self._highest(side, stream)) if limited else (lambda side: self._latency(side, stream))
        wins: Callable[..., _Measured] = max if limited else min
        best = {
            name: wins(map(work, every), key=lambda measured: measured.value) for name, every in self._sides.items()
        }
        return best["base"], best["variant"]

    def throughput_gain(self, stream: RequestStream) -> float | None:
        """Return the output tokens per second of the variant over those of the base; None if a side does not fit."""
        try:
            rates = {
                name: max(self._tokens_per_s(side, stream) for side in every) for name, every in self._sides.items()
            }
        except (Infeasible, UsageError):
            return None
        return rates["variant"] / rates["base"] if rates["base"] else None

    def _tokens_per_s(self, side: Mapping[str, Any], stream: RequestStream) -> float:
        return self._side(side, stream).deployment.simulate(stream).summary().output_tokens_per_s or 0.0

    def _side(self, side: Mapping[str, Any], stream: RequestStream) -> Side:
        """Return a side whose pools take the longest of the requests."""
        longest = {"max_model_len": length_limit(self._model, stream)}
        pool = merged(longest, side.get("pool", {}))
        return Side(self._family, {**side, "pool": pool}, None, {})

    def _latency(self, side: Mapping[str, Any], stream: RequestStream) -> _Measured:
        result = self._side(side, stream).deployment.simulate(stream)
        return _Measured(float(np.nanmean(result.e2el_s)), result)

    def _highest(self, side: Mapping[str, Any], stream: RequestStream) -> _Measured:
        offered = stream.offered_rate_rps
        assert offered is not None
        measure = HighestRate(
            ttft_s=self._own.ttft_s, tpot_s=self._own.tpot_s, share=0.99, from_rps=offered / SPAN, to_rps=offered * SPAN
        )
        own_side = self._side(side, stream)
        rate = own_side.highest_rate_of(stream, measure)
        return _Measured(rate, own_side.deployment.simulate(stream.at_rate(rate)))


def _at(side: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = side.get("pool", {})
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _removed(pool: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return the settings without a key."""
    head, *tail = path
    if head not in pool:
        return dict(pool)
    if not tail:
        return {key: value for key, value in pool.items() if key != head}
    below = _removed(pool[head], tail)
    return {**{key: value for key, value in pool.items() if key != head}, **({head: below} if below else {})}
