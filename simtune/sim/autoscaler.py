"""Autoscaler: starts and drains instances of pools as their load asks for it (`simtune.specs.autoscaling`).

Each pool has a controller of its own, or each instance whose ranks come and go (`simtune.sim.rank_scaler`). It looks at
fixed intervals, after the steps and transfers that end at an instant and before the requests that arrive. The loads
that it reads change only with events that end a jump, or grow by one token a step, so that a look within a jump reads
what it would read between the jump's single steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush

from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.engine import Request
from simtune.engine.gauges import num_decoding, queued, running_tokens
from simtune.results.outcome import Outcome, PoolInstances
from simtune.sim.agenda import LOOK, NEVER, Agenda
from simtune.sim.availability import Availability, Change
from simtune.sim.core import EngineCore
from simtune.sim.front_end import FrontEnd, has_front_end
from simtune.sim.handover import Routers
from simtune.sim.role_controller import Cores, CountingRouter
from simtune.sim.router import Router
from simtune.specs.autoscaling import (
    RateRule,
    SaturationRule,
    ScalingRule,
    SlaRule,
    TargetRule,
    ThresholdRule,
    WatchedLoad,
)
from simtune.specs.pool import Pool

_ROUNDING = 1e-9
"""Relative error of a rate over a rate, which must not start one instance more."""


class ArrivalRouter(CountingRouter):
    """Router that delegates to another one, and counts requests in flight on each core and arrivals at each pool."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._arrived: Counter[tuple[str, int]] = Counter()  # requests, by (pool, instance)
        self._prompt_tokens: Counter[tuple[str, int]] = Counter()
        self._sent_on: set[int] = set()

    def arrivals(self, pool: str, instance: int | None = None) -> tuple[int, int]:
        """Return the number of requests that were sent to a pool, or to one of its instances, and their prompt tokens;
        requests that a drained instance sends on count once."""
        keys = [key for key in self._arrived if key[0] == pool and instance in (None, key[1])]
        return sum(self._arrived[key] for key in keys), sum(self._prompt_tokens[key] for key in keys)

    def choose(self, request: Request, now: int) -> EngineCore | None:
        """Return the core that the other router chooses."""
        core = super().choose(request, now)
        if core is not None:
            if request.id in self._sent_on:
                self._sent_on.remove(request.id)
            else:
                self._arrived[core.pool, core.instance] += 1
                self._prompt_tokens[core.pool, core.instance] += request.prompt_tokens
        return core

    def over(self, request: Request, core: EngineCore, now: int) -> None:
        """Count the request as over, and inform the other router."""
        super().over(request, core, now)
        if core.draining:
            self._sent_on.add(request.id)


# --- rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolReading:
    """Load of a pool at a look."""

    instances: int
    """Instances that accept requests or are being started."""
    settled: bool
    """True if no instance is being started or drained."""
    arrived: int
    """Requests that were sent to the pool since the last look."""
    interval: int
    """Ticks since the last look."""
    loads: Mapping[WatchedLoad, Sequence[float]]
    """Loads of the instances that accept requests, by their name."""
    estimates: Sequence[Estimate] = ()
    """Estimated latencies of these instances, for the rule that reads them."""


def _by_rate(rule: RateRule, reading: PoolReading) -> int:
    rate_rps = reading.arrived / (reading.interval / TICKS_PER_SECOND)
    return math.ceil(rate_rps / rule.requests_per_s * (1 - _ROUNDING))


def _by_thresholds(rule: ThresholdRule, reading: PoolReading) -> int:
    loads = reading.loads[rule.watch]
    if not reading.settled:
        return reading.instances
    if any(load >= rule.up for load in loads):
        return reading.instances + 1
    return reading.instances - all(load <= rule.down for load in loads)


def _by_target(rule: TargetRule, reading: PoolReading) -> int:
    total = sum(reading.loads[rule.watch])
    # Instances that are being started count as idle ones, so that they are not started once more.
    if abs(total / (rule.load * reading.instances) - 1) <= rule.tolerance + _ROUNDING:
        return reading.instances
    return math.ceil(total / rule.load * (1 - _ROUNDING))


def _by_saturation(rule: SaturationRule, reading: PoolReading) -> int:
    pairs = zip(reading.loads["kv_cache"], reading.loads["waiting"], strict=True)
    unsaturated = [(kv, waiting) for kv, waiting in pairs if kv < rule.kv_cache and waiting < rule.waiting]
    if not reading.settled:
        return reading.instances
    if not unsaturated:
        return reading.instances + 1
    kv_total, waiting_total = (sum(column) for column in zip(*unsaturated, strict=True))

    def spares(instances: int) -> bool:
        """True if this load leaves enough to spare on average among a number of instances."""
        kv_spare, waiting_spare = rule.kv_cache - kv_total / instances, rule.waiting - waiting_total / instances
        return bool(kv_spare >= rule.kv_cache_spare and waiting_spare >= rule.waiting_spare)

    if not spares(len(unsaturated)):
        return reading.instances + 1
    return reading.instances - (len(unsaturated) > 1 and spares(len(unsaturated) - 1))


def _by_sla(rule: SlaRule, reading: PoolReading) -> int:
    if not reading.settled:
        return reading.instances
    ttft_limit_s, tpot_limit_s = rule.ttft_s or math.inf, rule.tpot_s or math.inf
    # One instance that keeps a limit can take new requests, so all must miss it.
    if all(of.ttft_s > ttft_limit_s for of in reading.estimates) or all(
        of.tpot_s > tpot_limit_s for of in reading.estimates
    ):
        return reading.instances + 1
    after = [of.after for of in reading.estimates if of.after is not None]
    # The own prompt of a request takes as long on any number of instances, so the margin is that of the queue alone.
    spared = all(
        of.fits
        and of.ttft_s - of.alone_s < rule.sensitivity * (ttft_limit_s - of.alone_s)
        and of.tpot_s < rule.sensitivity * tpot_limit_s
        for of in after
    )
    return reading.instances - (bool(after) and spared)


_RULES: Mapping[type[ScalingRule], Callable[..., int]] = {
    RateRule: _by_rate,
    ThresholdRule: _by_thresholds,
    TargetRule: _by_target,
    SaturationRule: _by_saturation,
    SlaRule: _by_sla,
}


def wanted(rule: ScalingRule, reading: PoolReading) -> int:
    """Return the number of instances that a rule asks for, whatever the limits of the pool."""
    return _RULES[type(rule)](rule, reading)


# --- estimates --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """Latencies of an instance by its step costs, as Dynamo's planner estimates them from measured steps."""

    ttft_s: float
    """Seconds of the prompts that wait and a mean one behind them, cut by the token budget."""
    alone_s: float
    """Seconds of the mean prompt alone."""
    tpot_s: float
    """Seconds of the next step of the requests that decode, or whose KV caches wait for room."""
    fits: bool
    """True if the KV cache has room for all tokens, those of prompts that wait among them."""
    after: Estimate | None = None
    """Estimate with the work of one instance less, divided among the others."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of a core: requests that decode, tokens in the KV cache, tokens of prompts that wait."""

    decodes: float
    tokens: float
    waiting: float

    def times(self, factor: float) -> _Work:
        return _Work(self.decodes * factor, self.tokens * factor, self.waiting * factor)


def _work_of(core: EngineCore, now: int) -> _Work:
    coming = core.inbox.waiting
    tokens = _running_tokens(core, now) + sum(transfer.request.prompt_tokens for transfer in coming)
    waiting = sum(request.prompt_tokens for request in queued(core.scheduler))
    return _Work(num_decoding(core.scheduler) + len(coming), tokens, waiting)


def estimate(core: EngineCore, work: _Work, prompt_tokens: int) -> Estimate:
    """Return the latencies of a core with this work, for a next prompt of `prompt_tokens` tokens."""
    scheduler = core.scheduler
    # Step costs are known up to the seats of the core and the longest request; work beyond waits for a seat.
    decodes = min(round(work.decodes), scheduler.max_num_seqs)
    # A step with a prompt has a seat and a token of its budget for it.
    beside = min(decodes, scheduler.max_num_seqs - 1, scheduler.max_num_batched_tokens - 1)
    tokens, tokens_beside = (
        min(max(round(work.tokens), count), count * scheduler.max_model_len) for count in (decodes, beside)
    )
    seats = scheduler.max_num_seqs - beside
    budget = min(scheduler.max_num_batched_tokens - beside, seats * scheduler.max_model_len)

    def chunked(chunk: int) -> int:
        """Return the ticks of a step with `chunk` tokens of mean prompts."""
        size = min(max(prompt_tokens, -(-chunk // seats)), scheduler.max_model_len, chunk)
        whole_prompts, remainder = divmod(chunk, size)
        chunks = [(0, size)] * whole_prompts + [(0, remainder)] * (remainder > 0)
        return core.costs.mixed(beside, tokens_beside, chunks, beside + len(chunks))

    def prefill(prompts: int) -> int:
        """Return the ticks of steps that compute `prompts` tokens of prompts beside the decodes."""
        full, remainder = divmod(prompts, budget)
        return (full * chunked(budget) if full else 0) + (chunked(remainder) if remainder else 0)

    tpot = core.costs.decode(decodes, tokens)[0] if decodes else 0
    ttft, alone = prefill(round(work.waiting) + prompt_tokens), prefill(prompt_tokens)
    room = scheduler.kv.total * scheduler.kv.block_size
    ttft_s, alone_s, tpot_s = (ticks / TICKS_PER_SECOND for ticks in (ttft, alone, tpot))
    return Estimate(ttft_s, alone_s, tpot_s, fits=work.tokens + work.waiting < room)


def estimate_of(cores: Cores, now: int, prompt_tokens: int, instances: int) -> Estimate:
    """Return the latencies of one of `instances` instances: those of its slowest core, for each of them."""
    now_and_after: list[Estimate] = []
    for factor in (1.0, instances / (instances - 1)) if instances > 1 else (1.0,):
        of_cores = [estimate(core, _work_of(core, now).times(factor), prompt_tokens) for core in cores]
        now_and_after.append(
            Estimate(
                max(of.ttft_s for of in of_cores),
                max(of.alone_s for of in of_cores),
                max(of.tpot_s for of in of_cores),
                all(of.fits for of in of_cores),
            )
        )
    return replace(now_and_after[0], after=now_and_after[1]) if instances > 1 else now_and_after[0]


# --- loads ------------------------------------------------------------------------------------------------


def states_tokens(cores: Sequence[EngineCore]) -> bool:
    """True if the tokens of running requests can be read from the schedulers of cores."""
    return all(running_tokens(core.scheduler) >= 0 for core in cores)


def _load_of(cores: Cores, load: WatchedLoad, router: CountingRouter, now: int) -> float:
    """Return a load of one instance at tick `now`."""
    match load:
        case "waiting":
            return sum(core.waiting + len(core.inbox.waiting) for core in cores)
        case "under_way":
            return sum(router.under_way[core.number] for core in cores)
        case "prompt_tokens":
            return sum(_waiting_tokens(core) for core in cores)
    tokens = sum(_running_tokens(core, now) + (_waiting_tokens(core) if load == "kv_demand" else 0) for core in cores)
    return tokens / sum(core.scheduler.kv.total * core.scheduler.kv.block_size for core in cores)


def _waiting_tokens(core: EngineCore) -> int:
    """Return the tokens of the prompts that wait at a core, of a decode core those whose KV caches wait for room."""
    waiting = sum(request.prompt_tokens for request in queued(core.scheduler))
    return waiting + sum(transfer.request.prompt_tokens for transfer in core.inbox.waiting)


def _running_tokens(core: EngineCore, now: int) -> int:
    """Return the tokens in the KV cache of running requests, each step that is over by `now` counted."""
    tokens = running_tokens(core.scheduler)
    # The scheduler learns of the steps of a jump when the jump ends; in each of them all that decode gain a token.
    if core.step is not None and core.time.repetitions > 1:
        tokens += core.time.over_after(now - core.started) * core.step.num_decodes
    return tokens


# --- controllers ------------------------------------------------------------------------------------------


class InstanceCounts:
    """Numbers of instances of a pool over time, or of the ranks of its instances."""

    def __init__(self, present: Iterable[int]) -> None:
        """Begin with an instance at each of these places."""
        self._since = dict.fromkeys(present, 0)
        self.accepting = self.held = len(self._since)
        """Instances that accept requests, and those that hold GPUs."""
        self.starts: list[int] = []  # ticks
        self.drains: list[int] = []
        self._intervals: list[tuple[int, int, int]] = []  # (place, start, tick at which its GPUs were free)
        self._rows = [(0, self.accepting, self.held)]

    def change(self, now: int, accepting: int = 0, held: int = 0, place: int = 0) -> None:
        """Note a change of both numbers; with `held` the instance at `place` takes its GPUs (1) or frees them (-1)."""
        self.accepting, self.held = self.accepting + accepting, self.held + held
        if held > 0:
            self._since[place] = now
        elif held < 0:
            self._intervals.append((place, self._since.pop(place), now))
        if self._rows[-1][0] == now:
            self._rows.pop()
        if self._rows[-1:] == [] or self._rows[-1][1:] != (self.accepting, self.held):
            self._rows.append((now, self.accepting, self.held))

    def until(self, end: int, pool: Pool, ranks: int = 0, busy_ticks: Sequence[int] = ()) -> PoolInstances:
        """Return the counts from the beginning to tick `end`, the last one of the run. `ranks` and `busy_ticks` are
        those of `PoolInstances`."""
        # The last look may come after the last request, and drain instances then.
        ticks = [0] * (pool.most_instances * (ranks or 1))
        for place, since, until in [*self._intervals, *((place, since, end) for place, since in self._since.items())]:
            ticks[place] += max(0, min(until, end) - since)
        rows = tuple(row for row in self._rows if row[0] <= end)
        starts, drains = (bisect_right(ticks_of, end) for ticks_of in (self.starts, self.drains))
        devices = pool.devices // (ranks or 1)
        return PoolInstances(
            pool.name, devices, end, tuple(ticks), starts, drains, rows, ranks=ranks, busy_ticks=tuple(busy_ticks)
        )


class Scaler(ABC):
    """Starts and drains instances, as its rule asks for. A derived class scales those of a pool, or the ranks of an
    instance, which stand for instances in every name here. Serves one run."""

    instance: int | None = None
    """Instance the ranks of which are scaled; None if instances are."""

    def __init__(self, pool: Pool, counts: InstanceCounts, least: int, most: int) -> None:
        """Create a controller of `least` to `most` instances."""
        assert pool.autoscaling is not None
        self.pool, self.counts = pool, counts
        self._scaling, self._least, self._most = pool.autoscaling, least, most
        self.every = to_ticks(self._scaling.interval_s)
        self._startup = to_ticks(self._scaling.startup_s)
        self._window = to_ticks(self._scaling.window_s)
        self._recent: deque[tuple[int, int]] = deque()  # (tick, instances) of the looks of the window
        self._num_arrived = 0

    @property
    @abstractmethod
    def num_present(self) -> int:
        """Instances that accept requests or are being started."""

    @property
    @abstractmethod
    def accepting(self) -> Sequence[Cores]:
        """Cores of each instance that accepts requests."""

    @property
    @abstractmethod
    def settled(self) -> bool:
        """True if no instance is being started or drained."""

    @abstractmethod
    def grow(self, now: int, number: int) -> None:
        """Start a number of instances, as far as there is room for them."""

    @abstractmethod
    def shrink(self, now: int, number: int) -> None:
        """Drain a number of instances, the newest first, or give up their start."""

    def attach(self, router: ArrivalRouter, availability: Availability) -> None:
        """Attach the controller to the router that sends requests to its pool, and to what brings instances up."""
        self._router, self._availability = router, availability

    def summed(self, end: int, scalers: Sequence[Scaler]) -> PoolInstances:
        """Return the numbers of the pool until tick `end`; `scalers` are all controllers of the pool."""
        return self.counts.until(end, self.pool)

    def look(self, now: int) -> None:
        """Read the load, and start or drain instances as the rule asks for."""
        present = self.num_present
        target = min(max(wanted(self._scaling.rule, self._read(now)), self._least), self._most)
        self._recent.append((now, target))
        while self._recent[0][0] < now - self._window:
            self._recent.popleft()
        if target > present:
            self.grow(now, target - present)
        elif (fewer := present - max(number for _, number in self._recent)) > 0:
            self.shrink(now, fewer)

    def _read(self, now: int) -> PoolReading:
        total, prompt_tokens = self._router.arrivals(self.pool.name, self.instance)
        num_arrived, self._num_arrived = total - self._num_arrived, total
        accepting = self.accepting
        loads: dict[WatchedLoad, list[float]] = {
            load: [_load_of(cores, load, self._router, now) for cores in accepting]
            for load in self._scaling.rule.watched
        }
        estimates: list[Estimate] = []
        if isinstance(self._scaling.rule, SlaRule):
            # Of all arrivals so far; the planner's mean is of the steps that it keeps.
            mean_tokens = prompt_tokens // max(1, total)
            estimates = [estimate_of(cores, now, mean_tokens, len(accepting)) for cores in accepting]
        return PoolReading(self.num_present, self.settled, num_arrived, self.every, loads, estimates)


class PoolScaler(Scaler):
    """Starts and drains the instances of one pool. Serves one run."""

    def __init__(self, pool: Pool, places: Sequence[Cores], front_end: FrontEnd | None) -> None:
        """Create the controller of a pool, whose instances are at the first of these places at the beginning."""
        assert pool.autoscaling is not None
        counts = InstanceCounts(range(pool.instances))
        super().__init__(pool, counts, pool.autoscaling.min_instances, pool.most_instances)
        self._places = places
        self._front_end = front_end if has_front_end(pool) else None
        # The newest is the last, so that the first ones, which are always there, never go.
        self._present = list(range(pool.instances))
        self._free = list(range(pool.instances, len(places)))
        heapify(self._free)
        self._starting: dict[int, int] = {}  # number of the change that lets it accept requests, by place

    @property
    def num_present(self) -> int:
        """See `Scaler.num_present`."""
        return len(self._present)

    @property
    def accepting(self) -> Sequence[Cores]:
        """See `Scaler.accepting`."""
        return [self._places[place] for place in self._present if place not in self._starting]

    @property
    def settled(self) -> bool:
        """See `Scaler.settled`."""
        return not self._starting and self.counts.held == len(self._present)

    def grow(self, now: int, number: int) -> None:
        """See `Scaler.grow`."""
        # Places of instances that are not drained yet are no places for new ones.
        for _ in range(min(number, len(self._free))):
            self._start(now)

    def shrink(self, now: int, number: int) -> None:
        """See `Scaler.shrink`."""
        for _ in range(number):
            self._stop(now)

    def _start(self, now: int) -> None:
        """Start an instance at the first free place. What was cached there is gone."""
        place = heappop(self._free)
        cores = self._places[place]
        for core in cores:
            core.scheduler.abandon()
        self._present.append(place)
        self.counts.starts.append(now)
        self.counts.change(now, held=1, place=place)
        ready = Change(now + self._startup, cores, up=True, done=partial(self._ready, place))
        self._starting[place] = self._availability.announce(ready)

    def _ready(self, place: int, now: int) -> None:
        del self._starting[place]
        self.counts.change(now, accepting=1)
        if self._front_end is not None:
            self._front_end.join(now, self.pool)

    def _stop(self, now: int) -> None:
        """Drain the newest instance, or give up its start."""
        place = self._present.pop()
        if place in self._starting:
            self._availability.cancel(self._starting.pop(place))
            self._freed(place, now)
            return
        # All that go at this look are down before requests that wait at any of them are sent elsewhere.
        for core in self._places[place]:
            core.up = False
        self.counts.drains.append(now)
        self.counts.change(now, accepting=-1)
        if self._front_end is not None:
            self._front_end.leave(self.pool)
        self._availability.announce(Change(now, self._places[place], up=False, done=partial(self._freed, place)))

    def _freed(self, place: int, now: int) -> None:
        self.counts.change(now, held=-1, place=place)
        heappush(self._free, place)


class Autoscaler:
    """Controllers of all autoscaled pools of a deployment. Serves one run."""

    def __init__(self, scalers: Sequence[Scaler]) -> None:
        self._scalers = scalers

    def counted(self, routers: Routers) -> Routers:
        """Return the routers of the world, wrapped so that the controllers can count requests."""
        self._routers = ArrivalRouter(routers.front), ArrivalRouter(routers.back)
        return Routers(*self._routers)

    def begin(self, agenda: Agenda, availability: Availability) -> None:
        """Schedule the first look of each controller."""
        self._agenda = agenda
        for number, scaler in enumerate(self._scalers):
            scaler.attach(self._routers[scaler.pool.role == "decode"], availability)
            agenda.post((scaler.every, LOOK, number, 0))

    def look(self, now: int, number: int, version: int) -> None:
        """Let a controller look, and schedule its next look unless nothing but looks is to happen."""
        scaler, agenda = self._scalers[number], self._agenda
        scaler.look(now)
        if agenda.held is not None or any(event[1] != LOOK for event in agenda.heap if event is not NEVER):
            agenda.post((now + scaler.every, LOOK, number, 0))

    def close(self, outcome: Outcome, end: int) -> None:
        """Write the numbers of instances until the end of the run into its outcome."""
        by_pool: dict[str, list[Scaler]] = {}
        for scaler in self._scalers:
            by_pool.setdefault(scaler.pool.name, []).append(scaler)
        outcome.scaled = tuple(scalers[0].summed(end, scalers) for scalers in by_pool.values())
        # The last look may come after the last request, and drain ranks then.
        outcome.rank_turns = tuple(turn for turn in outcome.rank_turns if turn.at <= end)
