"""A day of changing rates: how many replicas of the chosen plan each hour needs, and what following them saves.

A replica is the smallest part of the plan that is a plan of its own: an instance, or prefill and decode instances in
the plan's ratio. For each window the search finds the fewest replicas that meet the SLO at its rate: that number is
simulated, and one less is simulated too, unless no schedule of it sustains the rate. A number meets the SLO if it does
so in a run of ten lifetimes or more and on each of the fresh draws that the study asks for; the window of a trace has
its own requests, and is not drawn anew. With a confidence all of it is judged with the margin of the search. The day is
known beforehand, so replicas start early enough to serve when their window begins; the time until then is paid as well.
The day repeats: its first window follows the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from pydantic import Field

from simtune.errors import plural
from simtune.results.result import Result
from simtune.sim.deployment import length_limit
from simtune.sim.parallel import Jobs, executor, ordered_map
from simtune.specs.base import Count, NonNegative, Positive, Record, Seq, Share
from simtune.specs.study import Day
from simtune.specs.trace_cut import of_rows
from simtune.specs.traces import Trace
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search.climb import longer, too_short
from simtune.tuner.search.confirm import num_draws
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.trial import Tuned
from simtune.workload.requests import RequestStream

HOUR_S = 3600.0


class DayHour(Record):
    """A window of the day, and what serves it."""

    begin_h: NonNegative = Field(description="since the day began")
    hours: Positive
    rate_rps: NonNegative = Field(description="mean of the window")
    replicas: int = Field(ge=0)
    gpus: int = Field(ge=0)
    meets_slo: bool = Field(description="false where all the study's devices do not suffice")
    slo_attainment: Share | None
    ttft_p99_s: NonNegative | None
    tpot_p99_s: NonNegative | None
    simulations: int = Field(ge=0)
    draws: int = Field(0, ge=0, description="fresh draws of the requests on which it meets the SLO as well")


class DayPlan(Record):
    """`day` of a summary: the plan followed hour by hour, beside the plan of the peak for the whole day."""

    replica: str = Field(description="what there is more or less of")
    gpus_per_replica: Count
    startup_s: NonNegative = Field(description="from a replica's start until it serves")
    hours: Seq[DayHour]
    gpu_hours: NonNegative = Field(description="start-ups included")
    startup_gpu_hours: NonNegative
    peak_gpu_hours: Positive = Field(description="of the most replicas, all day")
    saved: Share = Field(description="of the GPU-hours of the peak plan")
    usd: NonNegative | None = Field(description="null where a hardware profile names no price")
    peak_usd: NonNegative | None

    def lines(self) -> list[str]:
        """Return the result of the day in sentences."""
        missed = [hour for hour in self.hours if not hour.meets_slo]
        most = max(hour.replicas for hour in self.hours)
        lines = [
            f"day: {min(hour.replicas for hour in self.hours)} to {most} replicas ({self.replica}) take "
            f"{self.gpu_hours:.4g} GPU-hours, {self.startup_gpu_hours:.3g} of them to start; {most} all day take "
            f"{self.peak_gpu_hours:.4g}: {self.saved:.1%} saved"
        ]
        if self.usd is not None and self.peak_usd is not None:
            lines[0] += f", {self.peak_usd - self.usd:,.2f} of {self.peak_usd:,.2f} USD"
        lines += [
            f"day: from hour {hour.begin_h:g} {hour.rate_rps:.4g} requests/s are more than "
            f"{plural(hour.gpus, 'GPU')} can serve within the SLO"
            for hour in missed
        ]
        return lines


class _Window(Record):
    begin_h: float
    hours: float
    rate_rps: float
    begin_s: float | None = None
    """Start of the window in the trace; None if the requests are drawn."""


Done = Callable[[int, int, str], None]
"""Callback with the number of windows that are done, the number of all windows, and a word on the latest."""


def day_of(tuned: Tuned, *, jobs: Jobs = None, progress: Done | None = None) -> DayPlan | None:
    """Return the day of a study under its chosen plan; None if the study has no day. The answer does not depend on
    `jobs`, the number of processes."""
    question, day = tuned.question, tuned.question.study.day
    if day is None:
        return None
    unit = replica_of(tuned.chosen.candidate)
    rate = tuned.chosen.rate_rps if question.searches_rate else None
    rate_per_replica = None if rate is None else rate / _times(tuned.chosen.candidate, unit)
    windows = windows_of(day, question.trace)
    tasks = [
        _WindowTask(question, unit, window, tuned.deployment.max_model_len, rate_per_replica) for window in windows
    ]
    with executor(jobs, len(tasks)) as pool:
        hours = []
        for hour in ordered_map(pool, _WindowTask.run, tasks):
            hours.append(hour)
            if progress is not None:
                progress(len(hours), len(tasks), f"hour {hour.begin_h:g}: {plural(hour.replicas, 'replica')}")
    return _summed(question, unit, day, hours)


def replica_of(candidate: Candidate) -> Candidate:
    """Return the smallest plan of the same ratio; the plan itself if it has a fixed pool, which is not scaled."""
    if any(pool.fixed is not None for pool in candidate.pools):
        return candidate
    divisor = math.gcd(*(pool.instances for pool in candidate.pools))
    return candidate.with_pools(replace(pool, instances=pool.instances // divisor) for pool in candidate.pools)


def _times(candidate: Candidate, unit: Candidate) -> int:
    return candidate.pools[0].instances // unit.pools[0].instances


def _scaled(unit: Candidate, replicas: int) -> Candidate:
    return unit.with_pools(replace(pool, instances=pool.instances * replicas) for pool in unit.pools)


def windows_of(day: Day, trace: Trace | None) -> list[_Window]:
    """Return the windows of a day: as given, or a trace cut into equal windows, the last one as long as the others."""
    if day.windows is not None:
        windows, begin = [], 0.0
        for window in day.windows:
            windows.append(_Window(begin_h=begin, hours=window.hours, rate_rps=window.rate_rps))
            begin += window.hours
        return windows
    assert trace is not None
    assert trace.arrival_s is not None
    assert day.trace_window_h is not None
    length_s = day.trace_window_h * HOUR_S
    counts = np.bincount((trace.arrival_s // length_s).astype(np.int64))
    return [
        _Window(
            begin_h=i * day.trace_window_h,
            hours=day.trace_window_h,
            rate_rps=count / length_s,
            begin_s=i * length_s,
        )
        for i, count in enumerate(counts.tolist())
    ]


class _TriedCount(NamedTuple):
    """A number of replicas, and whether it meets the SLO."""

    result: Result
    met: bool
    simulations: int
    draws: int = 0
    """Fresh draws on all of which it meets the SLO."""


@dataclass(frozen=True)
class _WindowTask:
    """The fewest replicas for one window. Sent to worker processes."""

    question: Question
    unit: Candidate
    window: _Window
    max_model_len: int
    each_rps: float | None
    """Requests per second that a replica was found to serve within the SLO: the starting point; None if there is
    none."""

    @cached_property
    def _plan_cache(self) -> PlanCache:
        return PlanCache(self.question, [self.unit])

    def run(self) -> DayHour:
        window = self.window
        if not window.rate_rps:
            return self._hour(0, None, 0)
        trials: dict[int, _TriedCount] = {}

        def met(replicas: int) -> bool:
            if replicas not in trials:
                trials[replicas] = self._try(replicas)
            return trials[replicas].met

        most, least = self._most(), self._least()
        first = math.ceil(window.rate_rps / self.each_rps - 1e-9) if self.each_rps else least
        replicas = min(max(first, least), most)
        while met(replicas) and replicas > least and met(replicas - 1):
            replicas -= 1
        while not met(replicas) and replicas < most:
            replicas += 1
        return self._hour(replicas, trials[replicas], sum(trial.simulations for trial in trials.values()))

    def _try(self, replicas: int) -> _TriedCount:
        """Simulate a number of replicas: in a run that is long enough, then on fresh draws until one misses the SLO."""
        question, candidate = self.question, _scaled(self.unit, replicas)
        requests = question.num_requests(candidate)
        result, simulations = self._result(candidate, requests), 1
        if self.window.begin_s is not None:
            return _TriedCount(result, result.meets_slo, simulations)
        while (more_requests := longer(result, requests)) is not None:
            requests, simulations = more_requests, simulations + 1
            result = self._result(candidate, requests)
        if not result.meets_slo or too_short(result):
            return _TriedCount(result, False, simulations)
        requests = max(requests, question.num_requests(candidate, question.study.search.confirm.requests))
        draws = num_draws(question)
        for draw in range(1, 1 + draws):
            simulations += 1
            if not self._result(candidate, requests, draw).meets_slo:
                return _TriedCount(result, False, simulations)
        return _TriedCount(result, True, simulations, draws)

    def _most(self) -> int:
        """Return the largest number of replicas that the study has devices for."""
        study, unit = self.question.study, self.unit
        if any(pool.fixed is not None for pool in unit.pools):
            return 1
        devices: dict[str, int] = {}
        for pool in unit.pools:
            devices[pool.shape.gpu] = devices.get(pool.shape.gpu, 0) + pool.devices
        most = min(study.devices(gpu) // count for gpu, count in devices.items())
        return most if study.limits.gpus is None else min(most, study.limits.gpus // unit.num_gpus)

    def _least(self) -> int:
        """Return the number of replicas below which no schedule sustains the rate."""
        settled = self._plan_cache.settled(self.unit)
        assert isinstance(settled, Candidate)
        return max(1, math.ceil(self.window.rate_rps / self._plan_cache.capacity(settled).rps - 1e-9))

    def _result(self, candidate: Candidate, requests: int, draw: int = 0) -> Result:
        question, stream = self.question, self._stream(candidate, requests, draw)
        longest = max(self.max_model_len, length_limit(question.model_of(candidate.decoding.shape), stream))
        deployment = self._plan_cache.judged_deployment(candidate, longest)
        return deployment.simulate(stream, question.study.slo, cores=SAMPLED_CORES)

    def _stream(self, candidate: Candidate, requests: int, draw: int) -> RequestStream:
        """Return the requests of the window at its mean rate: of a draw, or the window's own requests of a trace."""
        question, window = self.question, self.window
        if window.begin_s is None:
            return question.draws.stream(requests, draw).at_rate(window.rate_rps)
        trace = question.trace
        assert trace is not None
        assert trace.arrival_s is not None
        end_s = window.begin_s + window.hours * HOUR_S
        in_window = (trace.arrival_s >= window.begin_s) & (trace.arrival_s < end_s)
        part = of_rows(trace, in_window, trace.arrival_s, f"a window of the day from hour {window.begin_h:g}")
        # Requests that all arrive at once can be neither repeated nor stretched.
        spans = part.arrival_s is not None and part.arrival_s[-1] > part.arrival_s[0]
        requests = question.num_requests(candidate) if spans else len(part.prompt_tokens)
        stream = replace(question.draws, trace=part).stream(requests)
        return stream if stream.offered_rate_rps is None else stream.at_rate(window.rate_rps)

    def _hour(self, replicas: int, tried: _TriedCount | None, simulations: int) -> DayHour:
        summary = None if tried is None else tried.result.summary()
        return DayHour(
            begin_h=self.window.begin_h,
            hours=self.window.hours,
            rate_rps=self.window.rate_rps,
            replicas=replicas,
            gpus=replicas * self.unit.num_gpus,
            meets_slo=tried is None or tried.met,
            slo_attainment=None if summary is None else summary.slo_attainment,
            ttft_p99_s=None if summary is None else summary.metrics["ttft"].p99,
            tpot_p99_s=None if summary is None else summary.metrics["tpot"].p99,
            simulations=simulations,
            draws=0 if tried is None else tried.draws,
        )


def _summed(question: Question, unit: Candidate, day: Day, hours: Sequence[DayHour]) -> DayPlan:
    gpus, usd_per_hour = unit.num_gpus, question.usd_per_hour(unit)
    total_h = sum(hour.hours for hour in hours)
    started = sum(max(0, after.replicas - before.replicas) for before, after in pairwise([hours[-1], *hours]))
    startup = started * gpus * day.startup_s / HOUR_S
    spent = sum(hour.gpus * hour.hours for hour in hours) + startup
    peak = max(hour.gpus for hour in hours) * total_h
    usd = None if usd_per_hour is None else usd_per_hour / gpus
    return DayPlan(
        replica=unit.name,
        gpus_per_replica=gpus,
        startup_s=day.startup_s,
        hours=tuple(hours),
        gpu_hours=spent,
        startup_gpu_hours=startup,
        peak_gpu_hours=peak,
        saved=max(0.0, 1 - spent / peak),
        usd=None if usd is None else spent * usd,
        peak_usd=None if usd is None else peak * usd,
    )
