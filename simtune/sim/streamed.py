"""Simulation of any number of requests in memory that does not grow with their number.

Requests are drawn a chunk at a time, and forgotten as soon as they are answered: only counts and sketches of them are
kept (`simtune.results.sketch`). Requests in the system at once are kept, so the memory of a saturated system grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Request
from simtune.engine.request import NO_ADAPTER
from simtune.errors import UsageError
from simtune.results.energy import Power
from simtune.results.outcome import Outcome, Ticks
from simtune.results.run_statistics import METRICS, InSystem, RunStatistics, Sums, objectives
from simtune.results.sketch import Sketch
from simtune.results.steady import stride
from simtune.results.summary import Distribution, Metric
from simtune.sim import plan_parts
from simtune.sim.agenda import ARRIVAL, Agenda
from simtune.sim.deployment import Deployment
from simtune.sim.encoding import check_media
from simtune.sim.pool_power import power_of
from simtune.sim.recorder import COLUMNS, Recorder
from simtune.sim.source import LONGEST_S, RequestSource, media_items
from simtune.sim.watch import Watch, watched
from simtune.sim.wiring import wire
from simtune.sim.world import World
from simtune.specs.towers import NO_TOWERS, Towers
from simtune.specs.traces import Trace
from simtune.specs.workload import ClosedLoop, Slo, TraceArrivals, Workload
from simtune.workload.media import RequestMedia
from simtune.workload.requests import RequestStream, draw, unit_arrivals
from simtune.workload.sampling import Span

CHUNK = 1 << 15
"""Requests that are drawn in one go."""
FOLD = 1 << 12
"""Most requests that are answered but not yet summed up."""
AT_ONCE = 1 << 20
"""Times between tokens that are counted in one go."""


class StreamedLoad:
    """The requests of a workload, drawn as they are needed; identical to those of `build_stream`."""

    def __init__(
        self, workload: Workload, trace: Trace | None, *, requests: int, seed: int, rate_rps: float | None = None,
        towers: Towers = NO_TOWERS,
    ) -> None:  # fmt: skip
        """Draw all requests once to find their rate and the longest one; `towers` are the encoders of the model. Raise
        UsageError for workloads that cannot be drawn a few at a time."""
        if workload.sessions is not None:
            raise UsageError(
                f"workload {workload.name}: turns of a conversation depend on those before, so its requests cannot be "
                "drawn a few at a time; leave --stream out"
            )
        if workload.warm_up:
            raise UsageError(f"workload {workload.name}: warm_up needs kept requests; leave --stream out")
        if workload.max_in_flight is not None:
            raise UsageError(
                f"workload {workload.name}: how long requests are held back (max_in_flight) is counted of kept "
                "requests only; leave --stream out"
            )
        if workload.graph or (trace is not None and trace.turns is not None):
            raise UsageError(
                f"workload {workload.name}: requests of a family wait for one another, so they cannot be drawn a few "
                "at a time; leave --stream out"
            )
        self.workload, self.trace, self.seed, self.towers = workload, trace, seed, towers
        self._requests, self._stretch = requests, 1.0
        self.head = next(self.chunks())
        self.shortest = self.longest = _row(self.head, 0)
        last, media = 0.0, list[RequestMedia]()
        # Drawn twice: their rate and the longest one must be known before the first one arrives.
        for chunk in self.chunks():
            last = 0.0 if chunk.arrival_s is None else float(chunk.arrival_s[-1])
            tokens = chunk.prompt_tokens + chunk.output_tokens
            self.shortest = min(self.shortest, _row(chunk, int(tokens.argmin())), key=sum)
            self.longest = max(self.longest, _row(chunk, int(tokens.argmax())), key=sum)
            if chunk.media is not None:
                media.append(chunk.media.largest_requests())
        self._largest_media = RequestMedia.joined(media) if media else None
        span = 0.0 if self.head.arrival_s is None else last - float(self.head.arrival_s[0])
        self.offered_rate_rps = (requests - 1) / span if span > 0 else None
        if rate_rps is not None:
            self._at_rate(rate_rps, last)

    def _at_rate(self, rate_rps: float, last_s: float) -> None:
        # Raises UsageError if the rate is invalid or the load has none.
        self.head.at_rate(rate_rps)
        assert self.offered_rate_rps is not None
        self._stretch = self.offered_rate_rps / rate_rps
        if last_s * self._stretch > LONGEST_S:
            raise UsageError(
                f"rate {rate_rps:g}: the last of {len(self):,} requests comes too late; reduce the number of requests"
            )
        self.offered_rate_rps = rate_rps

    def __len__(self) -> int:
        return self._requests

    def chunks(self) -> Iterator[RequestStream]:
        """Yield all requests in order, a chunk at a time."""
        arrivals, unit = self.workload.arrivals, 0.0
        for first in range(0, self._requests, CHUNK):
            span = Span(first, min(first + CHUNK, self._requests), unit)
            chunk = draw(self.workload, self.trace, span, self.seed, self.towers)
            if not isinstance(arrivals, (ClosedLoop, TraceArrivals)):
                unit = float(unit_arrivals(arrivals, self.seed, span)[-1])
            yield chunk if chunk.arrival_s is None else replace(chunk, arrival_s=chunk.arrival_s * self._stretch)

    @property
    def extremes(self) -> RequestStream:
        """The shortest and the longest request, and the media of requests with the most and the largest of them: the
        range that a plan must support."""
        prompt, output = np.array([self.shortest, self.longest], dtype=np.int64).T
        none = np.zeros(2, dtype=np.int64)
        head, media = self.head, self._largest_media
        return RequestStream(None, prompt, output, none, none, head.class_names, head.slos, media=media)


def _row(stream: RequestStream, row: int) -> tuple[int, int]:
    return int(stream.prompt_tokens[row]), int(stream.output_tokens[row])


class _Live(dict[int, int]):
    """A column with entries only for requests that are in the system; all others have the default."""

    def __init__(self, default: int) -> None:
        super().__init__()
        self.default = default

    def __missing__(self, number: int) -> int:
        return self.default


class _Finish(_Live):
    """Column of finish times that also starts a `fold` when enough requests have finished."""

    def __init__(self, recorder: StreamRecorder) -> None:
        super().__init__(-1)
        self._recorder = recorder

    def __setitem__(self, number: int, now: int) -> None:
        self._recorder.finished += 1
        # Many at a time: numpy sums a thousand requests in the time of a few.
        if len(self) >= FOLD:
            self._recorder.fold(list(self))
        super().__setitem__(number, now)


class _LiveArrivals(_Live):
    """Number of requests that every `stride`-th arrival finds in the system."""

    def __init__(self, recorder: StreamRecorder, requests: int) -> None:
        super().__init__(0)
        self._recorder, self._every, self._come = recorder, stride(requests), 0
        self.present, self.waiting = array("q"), array("q")

    def __setitem__(self, number: int, waiting: int) -> None:
        if self._come % self._every == 0:
            gone = self._recorder.finished + self._recorder.refused + int(self._recorder.totals.rejected.sum())
            self.present.append(max(0, self._come - gone))
            self.waiting.append(waiting)
        self._come += 1


class StreamedSource(RequestSource):
    """Source of requests that draws them on arrival and keeps only those that are in the system."""

    def __init__(self, load: StreamedLoad, agenda: Agenda) -> None:
        super().__init__(next(load.chunks()), agenda)
        self.live = _Live(-1), _Live(0), _Live(0), _Live(0), _Live(0)
        """Arrival, prompt tokens, output tokens, class and priority of requests in the system."""
        self.arrival, self._prompt, self._output, self._class, self._priority = self.live  # type: ignore[assignment]
        self._count = len(load)
        self._rows = _rows(load)
        self._ahead = next(self._rows)

    def begin(self) -> None:
        """Announce the first request; in a closed loop, the first request of each user."""
        if self._open:
            self._announce(0)
        else:
            super().begin()

    def _announce(self, number: int) -> None:
        self.arrival[number] = self._ahead[0]
        self._agenda.post((self._ahead[0], ARRIVAL, number, 0))

    def arrive(self, number: int) -> Request:
        """Return the request that arrives now, and announce the next one."""
        _, self._prompt[number], self._output[number], self._priority[number], kind, adapter, blocks, media = (
            self._ahead
        )
        if kind:
            self._class[number] = kind
        if number + 1 < self._count:
            self._ahead = next(self._rows)
            if self._open:
                self._announce(number + 1)
        request = Request(number, self._prompt[number], self._output[number], priority=self._priority[number])
        request.max_tokens, request.adapter = self._allowed(number), adapter
        if blocks is not None:
            request.blocks = blocks
        if media is not None:
            request.media = media_items(*media)
        return request

    def forget(self, number: int) -> tuple[int, int, int, int]:
        """Remove a request that is over; return its arrival, prompt tokens, output tokens and class."""
        arrivals, prompts, outputs, classes, priorities = self.live
        priorities.pop(number, 0)
        return arrivals.pop(number, -1), prompts.pop(number, 0), outputs.pop(number, 0), classes.pop(number, 0)


_Row = tuple[int, int, int, int, int, int, tuple[int, ...] | None, tuple[RequestMedia, int] | None]


def _rows(load: StreamedLoad) -> Iterator[_Row]:
    """Yield arrival, prompt tokens, output tokens, priority, class, adapter, blocks and place of the media of every
    request."""
    for chunk in load.chunks():
        n = len(chunk)
        arrival = np.zeros(n) if chunk.arrival_s is None else np.rint(chunk.arrival_s * TICKS_PER_SECOND)
        columns = (
            arrival.astype(np.int64),
            chunk.prompt_tokens,
            chunk.output_tokens,
            chunk.priority,
            chunk.class_index,
            np.full(n, NO_ADAPTER) if chunk.adapter is None else chunk.adapter,
        )
        blocks = [None] * n if chunk.hash_ids is None else chunk.hash_ids
        media = repeat(None, n) if chunk.media is None else zip(repeat(chunk.media, n), range(n), strict=True)
        yield from zip(*(column.tolist() for column in columns), blocks, media, strict=True)


@dataclass
class Totals:
    """Totals over the requests that are over."""

    completed: Ints
    """Requests answered of each class."""
    answered: Ints
    """Requests answered by each core."""
    rejected: Ints
    """Requests rejected of each class."""
    good: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    resent: int = 0
    first_arrival: int | None = None
    last_finish: int = 0
    latencies: dict[str, Sketch] = field(default_factory=lambda: {metric: Sketch() for metric in (*METRICS, "itl")})
    by_class: dict[tuple[int, str], Sketch] = field(default_factory=dict)
    """Metrics of classes that have an SLO of their own."""


class StreamRecorder(Recorder):
    """Recorder that sums requests up as they finish, and then forgets them."""

    def __init__(self, load: StreamedLoad, slo: Slo, cores: int) -> None:
        super().__init__(0)
        self.live = _Live(-1), _Live(-1), _Live(-1), _Live(-1), _Finish(self), _Live(-1), _Live(0), _Live(0), _Live(-1)
        self.scheduled, self.first_token, self.prefilled = self.live[:3]  # type: ignore[assignment]
        self.transferred, self.finish, self.core, self.preemptions, self.resent = self.live[3:8]  # type: ignore[assignment]
        self.routed = self.live[8]  # type: ignore[assignment]
        self.finished = 0
        self.at_arrivals = _LiveArrivals(self, len(load))
        self.waiting_at_arrival = self.at_arrivals  # type: ignore[assignment]
        of_classes = len(load.head.class_names)
        self.totals = Totals(
            completed=np.zeros(of_classes, dtype=np.int64),
            answered=np.zeros(cores, dtype=np.int64),
            rejected=np.zeros(of_classes, dtype=np.int64),
        )
        self.source: StreamedSource | None = None
        self._objectives = objectives(load.head, slo)

    def refuse(self, number: int) -> None:
        """Record that no instance accepts this request."""
        super().refuse(number)
        self._forget(number)

    def reject(self, number: int) -> None:
        """Record that the server of an instance rejects this request."""
        assert self.source is not None
        self.totals.rejected[self.source.live[3][number]] += 1
        self._forget(number)

    def _forget(self, number: int) -> tuple[int, ...]:
        assert self.source is not None
        row = (*self.source.forget(number), *[column.pop(number, column.default) for column in self.live])
        if row[0] >= 0:
            first = self.totals.first_arrival
            self.totals.first_arrival = row[0] if first is None else min(first, row[0])
        return row

    def fold(self, numbers: Sequence[int]) -> None:
        """Sum up requests that are over, and forget them."""
        if not numbers:
            return
        rows = np.array([self._forget(number) for number in numbers], dtype=np.int64).T
        (
            arrival,
            prompt,
            output,
            kind,
            scheduled,
            first,
            prefilled,
            transferred,
            finish,
            core,
            preemptions,
            resent,
            _,
        ) = rows
        done_at = np.where(prefilled >= 0, prefilled, first)
        t, finished = self.totals, finish >= 0
        t.completed += np.bincount(kind[finished], minlength=len(t.completed))
        t.prompt_tokens += int(prompt[finished].sum())
        t.output_tokens += int(output[finished].sum())
        t.preemptions += int(preemptions.sum())
        t.resent += int(resent.sum())
        t.last_finish = max(t.last_finish, int(finish.max()))
        t.answered += np.bincount(core[finished], minlength=len(t.answered))
        latencies = _latencies(arrival, scheduled, first, done_at, transferred, finish, output)
        for metric, values in latencies.items():
            t.latencies[metric].add(values[np.isfinite(values)])
        good = finished
        for index, _, slo in self._objectives:
            of_class = np.ones(len(kind), dtype=bool) if index is None else kind == index
            for name in ("ttft", "tpot", "e2el"):
                limits = [limit for m, _, limit in slo.limits() if m == name]
                # A single request is held to the widest limit of each metric, as in `Result.good`.
                if limits:
                    good = good & ~(of_class & (latencies[name] > max(limits) * TICKS_PER_SECOND))
                if limits and index is not None:
                    sketch = t.by_class.setdefault((index, name), Sketch())
                    sketch.add(latencies[name][of_class & np.isfinite(latencies[name])])
        t.good += int(good.sum())

    def _columns(self, arrival: array[int]) -> dict[str, Any]:
        """Sum up the requests that are still in the system, and return empty columns."""
        self.fold(sorted({*self.finish, *self.first_token, *arrival}))
        return dict.fromkeys(COLUMNS, np.zeros(0, dtype=np.int64))

    def _steps_between_tokens(self) -> Ticks:
        """Return no rows: intervals are counted as they come."""
        return np.zeros((0, 4), dtype=np.int64)

    def note_listed(self, ends: Sequence[int], decodes: int) -> None:
        """Count the intervals of a jump whose steps end `ends` ticks after its start."""
        at = np.array([0, *ends], dtype=np.int64)
        values: Ints = at[1:] - at[:-1]
        self.totals.latencies["itl"].add(values, np.full(len(values), decodes, dtype=np.int64))

    def pack(self) -> None:
        """Count the latest intervals."""
        if not self.rows:
            return
        first, slope, steps, decodes = np.fromiter(chain.from_iterable(self.rows), dtype=np.int64).reshape(-1, 4).T
        self.rows.clear()
        # Steps of equal length need one count; rising ones need one value per step, so they are expanded below in
        # portions.
        even = (slope == 0) | (steps == 1)
        itl = self.totals.latencies["itl"]
        some = even & (decodes > 0)
        itl.add(first[some], (steps * decodes)[some])
        rising = np.flatnonzero(~even & (decodes > 0))
        for some in np.split(rising, np.flatnonzero(np.diff(steps[rising].cumsum() // AT_ONCE)) + 1):
            n = steps[some]
            nth = np.arange(n.sum()) - np.repeat(n.cumsum() - n, n)
            itl.add(np.repeat(first[some], n) + np.repeat(slope[some], n) * nth, np.repeat(decodes[some], n))


def _latencies(
    arrival: Ints, scheduled: Ints, first: Ints, prompt_done: Ints, transferred: Ints, finish: Ints, output: Ints
) -> dict[str, Array]:
    """Return every latency of every request in ticks; NaN if an event that it needs never came."""

    def known(ticks: Ints) -> Array:
        return np.where(ticks < 0, np.nan, ticks.astype(np.float64))

    a, s, f, p, t, e = (known(ticks) for ticks in (arrival, scheduled, first, prompt_done, transferred, finish))
    gaps = np.where(output > 1, output - 1.0, np.nan)
    received = np.where(np.isfinite(t), t, f)
    return {
        "ttft": f - a, "tpot": (e - f) / gaps, "e2el": e - a, "queue": s - a, "prefill": p - s, "transfer": t - p,
        "decode": e - received,
    }  # fmt: skip


class StreamedWorld(World):
    """A deployment under a load of which only the requests in the system are kept."""

    def __init__(self, load: StreamedLoad, slo: Slo, **wiring: Any) -> None:
        self._load, self._slo = load, slo
        super().__init__(stream=load.head, **wiring)

    def _books(self, *_: Any) -> tuple[Recorder, RequestSource]:
        source = StreamedSource(self._load, self._agenda)
        self.recorder = StreamRecorder(self._load, self._slo, len(self._cores))
        self.recorder.source = source
        return self.recorder, source


@dataclass
class StreamedResult(RunStatistics):
    """Result of a streamed simulation; percentiles are within `simtune.results.sketch.ERROR`."""

    load: StreamedLoad
    outcome: Outcome
    """Outcome of the run, with empty columns."""
    totals: Totals
    at_arrivals: tuple[Ints, Ints]
    """Requests in the system, and requests waiting, as every `simtune.results.steady.stride`-th arrival found them."""
    num_gpus: int
    slo: Slo
    offered_rate_rps: float | None
    scale: float = 1.0
    power: Power | None = None
    """Power of the instances; None if their hardware profiles do not state it."""

    @property
    def head(self) -> RequestStream:
        """The first requests."""
        return self.load.head

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.load)

    def num_completed(self, request_class: int | None = None) -> int:
        """Return the number of requests that were answered to the end, of one class or of all."""
        return int(self.totals.completed.sum() if request_class is None else self.totals.completed[request_class])

    def num_rejected(self, request_class: int | None = None) -> int:
        """Return the number of requests that servers rejected, of one class or of all."""
        return int(self.totals.rejected.sum() if request_class is None else self.totals.rejected[request_class])

    @property
    def num_good(self) -> int:
        """Requests that were answered within every limit that applies to them."""
        return self.totals.good

    @property
    def sums(self) -> Sums:
        """Sums over requests."""
        t = self.totals
        answered = t.answered.tolist()
        finished = self.num_completed()
        return Sums(t.prompt_tokens, t.output_tokens, t.preemptions, t.resent, answered, finished, t.output_tokens)

    @property
    def warm_up_requests(self) -> None:
        """None: the order of latencies is not kept."""

    def in_system(self) -> InSystem | None:
        """Return the requests in the system at arrivals; None for a load that no deployment keeps up with or not."""
        if self.offered_rate_rps is None or self.load.workload.batch:
            return None
        return *self.at_arrivals, len(self.load)

    @property
    def lifetimes(self) -> float | None:
        """Time in which requests arrive, over the mean end-to-end latency; None if they have no rate or none ends."""
        offered, mean = self.offered_rate_rps, self.totals.latencies["e2el"].mean_s
        return (
            None if offered is None or not mean or self.load.workload.batch else (len(self.load) - 1) / offered / mean
        )

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last finish; 0 if nothing finished."""
        if not self.num_completed():
            return 0.0
        return (self.totals.last_finish - (self.totals.first_arrival or 0)) / TICKS_PER_SECOND

    def statistic(self, metric: str, statistic: str, request_class: int | None = None) -> float | None:
        """Return `mean` or a percentile such as `p99` of one of METRICS; None if no request has a value."""
        t = self.totals
        sketch = t.latencies[metric] if request_class is None else t.by_class.get((request_class, metric))
        return sketch.statistic_s(statistic) if sketch is not None and sketch.count else None

    def distributions(self, noise: bool) -> dict[Metric, Distribution]:
        """Return the distribution of every metric; never with confidence intervals."""
        itl = self.totals.latencies["itl"]
        # As for kept requests: no deviation and no minimum, and the smallest value that a share does not exceed.
        shares = {f"p{p}": itl.quantile_s(p / 100) for p in (50, 90, 95, 99)} if itl.count else {}
        between = itl.distribution().model_copy(update={"std": None, "min": None, **shares})
        return {metric: self.totals.latencies[metric].distribution() for metric in METRICS} | {"itl": between}


def simulate_streamed(
    deployment: Deployment, load: StreamedLoad, slo: Slo | None = None, *, seed: int = 0, watch: Watch | None = None
) -> StreamedResult:
    """Run a load through a deployment and keep only the requests that are in the system. `watch` is called at
    intervals with the progress.

    Raises UsageError if a part of the plan needs all requests in advance: drafts, policies that go by
    predicted lengths or deadlines, routers that use conversations.
    """
    plan, slo = deployment.plan, slo or Slo()
    drafting = [pool.spec.name for pool in deployment.pools if pool.spec.speculation is not None]
    if drafting:
        raise UsageError(f"plan {plan.name}: pool {drafting[0]} drafts, and acceptance is drawn for all requests "
                         "at once; leave --stream out")  # fmt: skip
    if plan.stages:
        raise UsageError(f"plan {plan.name}: its stages see all requests at once; leave --stream out")
    check_media(plan, deployment.model, load.extremes)
    brought = plan_parts.brought(plan, [pool.costs for pool in deployment.pools])
    with plan_parts.blamed(brought):
        wiring = wire(plan, deployment.model, deployment.pools, load.head, slo, seed)
        routers = [router for router in (wiring.router, wiring.decode_router) if router is not None]
        by_session = any("session" in router.needs for router in routers)
        if wiring.predicted_tokens is not None or wiring.deadlines is not None or by_session:
            raise UsageError(f"plan {plan.name}: its policy or router needs data of all requests in advance; "
                             "leave --stream out")  # fmt: skip
        world = StreamedWorld(
            load, slo, cores=wiring.cores, router=wiring.router, decode_router=wiring.decode_router,
            front_end=wiring.front_end, changes=wiring.changes, control=wiring.control,
            first_token=wiring.first_token, local_prefill=wiring.local_prefill,
            stop_when=watched(watch, len(load)),
        )  # fmt: skip
        outcome = world.run()
    if brought:
        plan_parts.check_nobody_waits(plan, wiring.cores)
    totals, counts = world.recorder.totals, world.recorder.at_arrivals
    if not totals.completed.any():
        raise UsageError(
            f"no request is answered: all are longer than max_model_len ({deployment.max_model_len} tokens), or the "
            f"events of plan {plan.name} leave no instance"
        )
    at_arrivals = np.array(counts.present, dtype=np.int64), np.array(counts.waiting, dtype=np.int64)
    power = power_of(deployment.pools)
    return StreamedResult(load, outcome, totals, at_arrivals, plan.num_devices, slo, load.offered_rate_rps, power=power)
