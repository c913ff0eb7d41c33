"""Simulations of the sides of published systems on a load of the user's own, each made once.

Sides take the user's model and hardware, and lengths, seats and sizes of batches of the load unless these are what
tells the sides apart. Equal plans of several systems share their runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.other_engines import load_kernels
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result
from simtune.results.steady import LIFETIMES
from simtune.sim.deployment import Deployment, default_plan, length_limit
from simtune.sim.plan_parts import POLICY
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Batching
from simtune.specs.systems import POOL, HighestRate, Systems, alternatives, merged
from simtune.validation.published.own_load import OwnLoad
from simtune.validation.published.sides import Side, meets, moved, per_round
from simtune.workload.requests import RequestStream

SIZES = (("max_model_len",), ("batching", "max_num_seqs"), ("batching", "max_num_batched_tokens"),
         ("kv_cache", "num_blocks"), ("kv_cache", "other_memory_gib"))  # fmt: skip
"""Keys of a pool that are those of the published load, and not of the technique."""
FIRST = 100
"""Requests of the first run, which decides if more are needed."""
LONGER = 4
"""Factor between the requests of a run and those of the next one."""
DEPLOYMENTS = 16
"""Deployments that are kept. Runs of older ones are kept, and seldom more are needed."""
SPAN = 64.0
"""Factor on the load's own rate within which the highest rate is looked for."""
TOLERANCE = 0.05
"""Relative tolerance of the highest rate."""
COARSE = 0.25
"""The same of short runs."""
LEAP, NEAR = 2.0, 1.3
"""Factor by which a rate is raised or lowered until the highest one is passed; the same around a coarse one."""


class RunLoad(NamedTuple):
    """A load that sides run under: requests of the user's load, or of users in a closed loop."""

    requests: int = 0
    users: int = 0
    scale: float = 1.0


Verdict = Literal["keeps up", "saturated", "undecided"]
QUEUED = 0.1
"""Share of the latency that requests of a short run may wait if the side keeps up."""


def verdict_of(result: Result) -> Verdict:
    """Return whether a side keeps up with the load, by the rule of all runs or, if it finds a run too short, by a rule
    for short ones: at least ten lifetimes, and hardly any wait for a seat.
    """
    steady = result.steadiness
    if steady == "saturated":
        return "saturated"
    if steady in (None, "stable"):
        return "keeps up"
    waits = float(np.nansum(result.queue_s)) > QUEUED * float(np.nansum(result.e2el_s))
    return "undecided" if waits or (result.lifetimes or 0.0) < LIFETIMES else "keeps up"


@dataclass(frozen=True)
class OwnRun:
    """Numbers of one run of a side."""

    e2el_s: Array
    verdict: Verdict
    output_tokens_per_s: float
    tokens_per_round: float | None

    @classmethod
    def of(cls, result: Result) -> OwnRun:
        """Return the numbers of a result."""
        drafts = per_round(result) if result.drafted.rounds else None
        return cls(result.e2el_s, verdict_of(result), result.output_tokens_per_s or 0.0, drafts)


class OwnSide(Side):
    """A side on the user's model. A draft model is read as one of its size that fits the target.

    The published draft model may have another vocabulary or a shorter context than the user's model and load need.
    """

    def __init__(self, family: Systems, side: Mapping[str, Any], runs: OwnRuns) -> None:
        super().__init__(family, side, None, runs.deployed)
        self._profiles, self._users_model = runs.profiles, runs.model

    @cached_property
    def model(self) -> Model:
        """Model of the user, read once for all sides, unless the family defines one of that name."""
        return self._family.own_model(str(self._side.get("model"))) or self._users_model

    def profile(self, hardware: str, engine: str | None) -> Hardware:
        """Return a profile, which all sides share with what was computed from it."""
        if (hardware, engine) not in self._profiles:
            self._profiles[hardware, engine] = load_kernels(hardware, engine)
        return self._profiles[hardware, engine]

    def draft_model(self, name: str) -> Model:
        """Return a model of that size with the vocabulary and at least the context of the target."""
        draft = super().draft_model(name)
        longest = max(draft.max_position, self.model.max_position)
        return draft.model_copy(update={"vocab_size": self.model.vocab_size, "max_position": longest})


@dataclass
class OwnRuns:
    """Runs of sides on one load."""

    own: OwnLoad
    deployed: dict[str, Deployment] = field(default_factory=dict)
    profiles: dict[tuple[str, str | None], Hardware] = field(default_factory=dict)
    _runs: dict[tuple[str, RunLoad], OwnRun] = field(default_factory=dict)
    _rates: dict[tuple[str, int], float] = field(default_factory=dict)
    _streams: dict[RunLoad, RequestStream] = field(default_factory=dict)

    @cached_property
    def model(self) -> Model:
        """Model of the user."""
        return load_model(self.own.model)

    @cached_property
    def first(self) -> int:
        """Requests of the first run; a finite load runs as it is."""
        most = self.own.requests
        return most if self.own.workload.batch else min(most, FIRST)

    @cached_property
    def fewest(self) -> int:
        """Fewest GPUs that an instance of the model fits on; 1 if no number of them is enough."""
        try:
            plan = default_plan(self.model, load_hardware(self.own.hardware), self.stream(RunLoad(self.own.requests)))
        except Infeasible:
            return 1
        return plan.pools[0].devices

    def stream(self, load: RunLoad) -> RequestStream:
        """Return the requests of a load."""
        if load not in self._streams:
            of_users = partial(self.own.of_users, load.users, load.scale)
            self._streams[load] = of_users() if load.users else self.own.stream(load.requests)
        return self._streams[load]

    # --- sides ---

    def adapted(self, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Return the alternatives of each side with the model and hardware of the user."""
        apart = [path for path in SIZES if _at(sides["base"], path) != _at(sides["variant"], path)]
        return {
            name: [self._moved(alternative, apart) for alternative in alternatives(side)]
            for name, side in sides.items()
        }

    def _moved(self, side: Mapping[str, Any], apart: Sequence[tuple[str, ...]]) -> dict[str, Any]:
        pool = dict(side.get("pool", {}))
        for path in SIZES:
            if path not in apart:
                pool = _removed(pool, path)
        # A published step is a load of its own kind, which the user's load replaces.
        without_load = {key: value for key, value in side.items() if key not in ("step", "workload")}
        adapted = {**moved({**without_load, "pool": pool}, self.own.hardware), "model": self.own.model}
        return self._on_enough_gpus(adapted)

    def _on_enough_gpus(self, side: dict[str, Any]) -> dict[str, Any]:
        """Return a side whose pools have a tp with which the user's model fits, if the published one is too small."""
        shared = side["pool"]
        pools = [self._enough(merged(shared, pool), pool) for pool in side.get("pools", ())]
        return {**side, "pool": self._enough(shared, shared), **({"pools": pools} if pools else {})}

    def _enough(self, every: Mapping[str, Any], pool: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a pool; `every` are those with which it is merged."""
        parallelism = every.get("parallelism") or {}
        sizes = (parallelism.get(key) or 1 for key in ("pp", "cp", "attention_dp", "prefill_context_parallel"))
        ranks = int(np.prod(list(sizes)))
        tp = parallelism.get("tp") or 1
        if tp * ranks >= self.fewest or self.fewest % ranks or (every.get("research") or {}).get("offload"):
            return dict(pool)
        return merged(pool, {"parallelism": {"tp": self.fewest // ranks}})

    def side(self, family: Systems, side: Mapping[str, Any], load: RunLoad) -> OwnSide:
        """Return a side whose pools take the longest request of the load, in one step if they never cut prompts."""
        longest = max(length_limit(self.model, self.stream(some)) for some in (load, RunLoad(self.own.requests)))
        shared = merged({"max_model_len": longest}, side.get("pool", {}))
        pools = [_in_one_step(merged(shared, pool), pool, longest) for pool in side.get("pools", ())]
        adapted = {**side, "pool": _in_one_step(shared, shared, longest), **({"pools": pools} if pools else {})}
        while len(self.deployed) > DEPLOYMENTS:
            del self.deployed[next(iter(self.deployed))]
        return OwnSide(family, adapted, self)

    # --- runs ---

    def run(self, family: Systems, side: Mapping[str, Any], load: RunLoad) -> OwnRun:
        """Run a side under a load, unless an equal one ran. Raises Infeasible or UsageError if it cannot be run."""
        plan = self.side(family, side, load)
        key = (plan.key, load)
        if key not in self._runs:
            self._runs[key] = OwnRun.of(plan.deployment.simulate(self.stream(load)))
        return self._runs[key]

    def highest(self, family: Systems, side: Mapping[str, Any], requests: int) -> float:
        """Return the highest rate within the limits: coarsely by short runs, then by runs of `requests` around that.

        Raises Infeasible if the limits are not met at any rate within the span.
        """
        key = (self.side(family, side, RunLoad(requests)).key, requests)
        if key not in self._rates:
            coarse = self._highest(family, side, self.first, None)
            exact = requests == self.first and coarse
            self._rates[key] = exact or self._highest(family, side, requests, coarse)
        return self._rates[key]

    def _highest(self, family: Systems, side: Mapping[str, Any], requests: int, near: float | None) -> float:
        load = RunLoad(requests)
        plan, stream = self.side(family, side, load), self.stream(load)
        offered = stream.offered_rate_rps
        if offered is None:
            raise UsageError("requests that all come at once have no rate; remove --ttft and --tpot")
        low, high = offered / SPAN, offered * SPAN
        measure = HighestRate(ttft_s=self.own.ttft_s, tpot_s=self.own.tpot_s, share=0.99, from_rps=low, to_rps=high)

        def ok(rate: float) -> bool:
            return meets(plan.deployment.simulate(stream.at_rate(rate)), measure)

        last = requests == self.own.requests
        leap = LEAP if near is None else NEAR
        rate = highest_near(ok, near or offered, (low, high), leap, TOLERANCE if last else COARSE)
        if rate is None:
            raise Infeasible(f"the limits are not met at {low:.4g} requests/s either; raise them")
        return rate


def highest_near(
    ok: Callable[[float], bool], start: float, span: tuple[float, float], leap: float, tolerance: float
) -> float | None:
    """Return the highest rate that is ok, by leaps from `start` and then by bisection; None if none in the span is."""
    low, high = span
    start = min(max(start, low), high)
    below = start
    while not ok(below):
        if below <= low:
            return None
        below = max(low, below / leap)
    above = min(high, below * leap)
    if below < start:
        # The rate above is one that was missed; only a first rate that is ok has to be passed.
        return _between(ok, below, above, tolerance)
    while ok(above):
        if above >= high:
            return high
        below, above = above, min(high, above * leap)
    return _between(ok, below, above, tolerance)


def _between(ok: Callable[[float], bool], below: float, above: float, tolerance: float) -> float:
    """Return the highest rate that is ok between one that is and one that is not."""
    while above / below > 1 + tolerance:
        middle = (below * above) ** 0.5
        below, above = (middle, above) if ok(middle) else (below, middle)
    return below


def _in_one_step(every: Mapping[str, Any], pool: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return the settings of a pool, with a budget for the longest prompt if it never cuts prompts."""
    batching = every.get("batching") or {}
    policy = POLICY.find(batching.get("policy", Batching.model_fields["policy"].default))
    uncut = policy.cuts_prompts == "never" or batching.get("chunked_prefill") is False
    budget = batching.get("max_num_batched_tokens", POOL["batching"]["max_num_batched_tokens"])
    if not uncut or budget >= longest:
        return dict(pool)
    return merged(pool, {"batching": {"max_num_batched_tokens": longest}})


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
