"""Result of a simulation: columns per request, and the statistics over them.

TTFT is first token - arrival, TPOT is (finish - first token) / (output tokens - 1), undefined for one-token answers,
E2EL is finish - arrival; all in seconds. Percentiles interpolate linearly between order statistics, as in vLLM's
benchmark client. E2EL is the sum of queue (until first scheduled), prefill (until the first token), transfer (until
the KV cache has reached the decode instance, if there is one) and decode (until the last token).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.energy import Power
from simtune.results.frames import PlainCurve, arrow, frame, html_table, plotted
from simtune.results.outcome import Outcome
from simtune.results.run_statistics import METRICS, InSystem, RunStatistics, Sums, objectives
from simtune.results.statistics import TokenIntervals, warm_up
from simtune.results.steady import in_system, wander
from simtune.results.summary import Distribution, FirstTokenParts, HeldBack, LatencyQuantiles, Metric, SloLimit
from simtune.results.summing import between_tokens, distribution, held_back, quantiles, slowest
from simtune.specs.workload import FAMILY_METRICS, Slo, SloMetric
from simtune.workload.graphs import Families
from simtune.workload.requests import RequestStream

_ROUNDING = 1e-9
"""Relative error that adding up may cause."""
_SHOWN = ("requests", "offered_rate_rps", "request_throughput_rps", "goodput_rps", "slo_attainment", "num_gpus")
"""Fields of the summary that a notebook shows first."""


_ALL = slice(None)
WHOLE = 1 << 62
"""Requests of a part that only all requests of a run come to (`parts_of`)."""


@dataclass
class RequestTimes:
    """Times of requests as arrays in order of request number, in seconds; NaN if the event never came."""

    stream: RequestStream
    outcome: Outcome

    @cached_property
    def arrival_s(self) -> Array:
        """Arrival of each request; NaN if it never arrived."""
        return _seconds(self.outcome.arrival)

    @cached_property
    def scheduled_s(self) -> Array:
        """Begin of the first step that each request took part in."""
        return _seconds(self.outcome.scheduled)

    @cached_property
    def first_token_s(self) -> Array:
        """Time of each request's first token."""
        return _seconds(self.outcome.first_token)

    @cached_property
    def finish_s(self) -> Array:
        """Time of each request's last token."""
        return _seconds(self.outcome.finish)

    @cached_property
    def ttft_s(self) -> Array:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @cached_property
    def held_s(self) -> Array:
        """Time from when each request was due until a client that holds requests back sent it; 0 without such a
        client."""
        if self.stream.due_s is None:
            return np.where(self.outcome.arrival >= 0, 0.0, np.nan)
        return self.arrival_s - np.rint(self.stream.due_s * TICKS_PER_SECOND) / TICKS_PER_SECOND

    @cached_property
    def queue_s(self) -> Array:
        """Time from arrival to the first step."""
        return self.scheduled_s - self.arrival_s

    @cached_property
    def front_end_s(self) -> Array:
        """The part of `queue_s` in the front end; 0 without one."""
        return np.where(self.outcome.routed >= 0, _seconds(self.outcome.routed) - self.arrival_s, 0.0)

    @cached_property
    def delivery_s(self) -> Array:
        """Time from the end of the transfer to the first token, if a decode instance delivers that; NaN if not."""
        sent = np.where(self.outcome.transferred >= 0, self.outcome.transferred, self.outcome.prefilled)
        return np.where(self.outcome.prefilled >= 0, self.first_token_s - _seconds(sent), np.nan)

    def first_token_parts(self) -> tuple[FirstTokenParts, ...]:
        """Return the mean parts of the TTFT: of all requests that count, of the slowest tenth and hundredth. A group of
        fewer than ten requests is left out."""
        queue_s = self.queue_s - self.front_end_s
        by_decode = self.outcome.prefilled >= 0
        handover_s = np.where(by_decode & (self.outcome.transferred >= 0), self.transfer_s, 0.0)
        delivery_s = np.where(by_decode, self.delivery_s, 0.0)
        columns = self.front_end_s, queue_s, self.prefill_s, handover_s, delivery_s
        parts = np.stack([column[self.counted] for column in columns])
        parts = parts[:, np.isfinite(self.ttft_s[self.counted])]
        return slowest(parts)

    @cached_property
    def e2el_s(self) -> Array:
        """Time from arrival to the last token (end-to-end latency)."""
        return self.finish_s - self.arrival_s

    @cached_property
    def prefill_s(self) -> Array:
        """Time from the first step until the prompt was done."""
        return _seconds(self.outcome.prompt_done) - self.scheduled_s

    @cached_property
    def transferred_s(self) -> Array:
        """Time at which the KV cache reached the decode instance; NaN if none was sent."""
        return _seconds(self.outcome.transferred)

    @cached_property
    def transfer_s(self) -> Array:
        """Time from the end of the prompt until the KV cache reached the decode instance; NaN if none was sent."""
        return self.transferred_s - _seconds(self.outcome.prompt_done)

    @cached_property
    def decode_s(self) -> Array:
        """Time from the end of the transfer, or from the first token without one, to the last token."""
        sent = np.isfinite(self.transferred_s)
        return self.finish_s - np.where(sent, self.transferred_s, self.first_token_s)

    @cached_property
    def itl(self) -> TokenIntervals | None:
        """Times between tokens; None if there are none."""
        return TokenIntervals(self.outcome.intervals) if len(self.outcome.intervals) else None

    @cached_property
    def tpot_s(self) -> Array:
        """Mean time per token after the first; NaN for one-token answers."""
        gaps = self.stream.output_tokens - 1.0
        tpot = np.full(len(gaps), np.nan)
        np.divide(self.finish_s - self.first_token_s, gaps, out=tpot, where=gaps > 0)
        return tpot

    @cached_property
    def completed(self) -> NDArray[np.bool_]:
        """True for each request that was answered to the end."""
        return self.outcome.finish >= 0

    @cached_property
    def rejected(self) -> NDArray[np.bool_]:
        """True for each request that a server rejected because its queue was full."""
        rejected = np.zeros(len(self.stream), dtype=bool)
        if self.outcome.rejected is not None:
            rejected[self.outcome.rejected] = True
        return rejected

    @cached_property
    def family_s(self) -> Array:
        """Seconds from the arrival of each request's family until the family's last node was over; NaN without one."""
        begin, end = self.outcome.family_begin, self.outcome.family_end
        return _by_request(self.stream, _seconds(end) - _seconds(begin))

    @cached_property
    def family_active_s(self) -> Array:
        """Seconds of them in which at least one request of the family was under way; NaN for a family that is not
        over."""
        families = self.stream.families
        if families is None:
            return np.full(len(self.stream), np.nan)
        active_s = active_seconds(families, self.arrival_s, self.finish_s)
        return np.where(np.isfinite(self.family_s), _by_request(self.stream, active_s), np.nan)

    @property
    def counted(self) -> slice:
        """Requests that statistics count: all but those of the warm-up."""
        return slice(self.stream.warm_up, None)


@dataclass
class Result(RequestTimes, RunStatistics):
    """Result of a simulation: times of requests, and the statistics and verdicts that follow from them."""

    num_gpus: int
    """GPUs of the whole deployment."""
    slo: Slo = field(default_factory=Slo)
    offered_rate_rps: float | None = None
    """Mean rate at which clients send, or would send if they held nothing back; None for a closed loop and for a single
    instant."""
    scale: float = 1.0
    """Number of equal, independent cores that each simulated one stands for; throughputs are those of all of them."""
    power: Power | None = None
    """Power of the instances; None if a hardware profile does not state it."""
    searched_users: int | None = None

    @cached_property
    def duration_s(self) -> float:
        """Seconds from the first arrival after the warm-up to the last finish; 0 if nothing finished."""
        return self._seconds_from(self._start_s) if self._in_time.any() else 0.0

    @cached_property
    def span_s(self) -> float:
        """See `RunStatistics`."""
        return self._seconds_from(self.arrival_s[self.outcome.arrival >= 0].min()) if self.completed.any() else 0.0

    def _seconds_from(self, start_s: float) -> float:
        return float(np.nanmax(self.finish_s) - start_s)

    @cached_property
    def _start_s(self) -> float:
        """First arrival after the warm-up; infinity if there is none."""
        arrived = self.outcome.arrival[self.counted] >= 0
        return float(self.arrival_s[self.counted][arrived].min()) if arrived.any() else math.inf

    @cached_property
    def _in_time(self) -> NDArray[np.bool_]:
        """True for each request that was answered in the time that counts."""
        return self.finish_s >= self._start_s if self.stream.warm_up else self.completed

    @cached_property
    def _at_arrivals(self) -> tuple[Ints, Ints]:
        """Requests in the system, and requests waiting, as sampled arrivals find them."""
        return in_system(self.outcome.arrival, self.outcome.finish, self.outcome.waiting_at_arrival)

    @property
    def wander(self) -> float | None:
        """Wander of the number in the system over the second half of the run (`simtune.results.steady.wander`); None if
        `steadiness` is None."""
        present = self._at_arrivals[0]
        return (
            None
            if self.steadiness is None or len(present) < 4
            else wander(present[len(present) // 2 :].astype(np.float64))
        )

    @cached_property
    def lifetimes(self) -> float | None:
        """Time in which requests arrive, over the mean end-to-end latency, or over the mean latency of a session, whose
        turns come as long as it lasts; None if they have no rate or none ends."""
        mean = self.values("e2el" if self.stream.turns is None else "family")
        if self.stream.offered_rate_rps is None or self.stream.batch or not len(mean):
            return None
        if self.stream.turns is not None:
            begun = _seconds(self.outcome.family_begin)
            return float(np.ptp(begun[np.isfinite(begun)]) / mean.mean())
        return float(np.ptp(self.arrival_s[self.outcome.arrival >= 0]) / mean.mean())

    @property
    def head(self) -> RequestStream:
        """All requests."""
        return self.stream

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.stream)

    def num_completed(self, request_class: int | None = None) -> int:
        """Return the number of requests that were answered to the end, of one class or of all."""
        return int(self._of_class(self.completed, request_class).sum())

    def num_judged(self, request_class: int | None = None) -> int:
        """See `RunStatistics`."""
        return int(self._of_class(self.completed[self.counted], request_class, self.counted).sum())

    def num_rejected(self, request_class: int | None = None) -> int:
        """See `RunStatistics`."""
        return int(self._of_class(self.rejected, request_class).sum())

    @property
    def num_rejected_judged(self) -> int:
        """See `RunStatistics`."""
        return int(self.rejected[self.counted].sum())

    @property
    def num_good(self) -> int:
        """Requests that were answered within every limit that applies to them."""
        return int(self.good.sum())

    @property
    def sums(self) -> Sums:
        """Sums over requests."""
        completed, core = self.completed, self.outcome.core
        return Sums(
            prompt_tokens=int(self.stream.prompt_tokens[self._in_time].sum()),
            output_tokens=int(self.stream.output_tokens[self._in_time].sum()),
            preemptions=int(self.outcome.preemptions.sum()),
            resent=int(self.outcome.resent.sum()),
            answered=np.bincount(core[completed], minlength=len(self.outcome.cores)).tolist(),
            finished=int(self._in_time.sum()),
            all_output_tokens=int(self.stream.output_tokens[completed].sum()),
        )

    def in_system(self) -> InSystem | None:
        """Return the requests in the system at arrivals; None for a load that no deployment keeps up with or not."""
        if self.stream.offered_rate_rps is None or self.stream.batch or self.outcome.aborted:
            return None
        return *self._at_arrivals, int((self.outcome.arrival >= 0).sum())

    def values(self, metric: str, request_class: int | None = None, part: slice | None = None) -> Array:
        """Return the finite values of one of METRICS, of one class or of all, of a part of the requests or of all but
        the warm-up; for metrics of families one value per family."""
        part = self.counted if part is None else part
        column: Array = getattr(self, metric + "_s")[part]
        finite = np.isfinite(column)
        if metric in FAMILY_METRICS and self.stream.families is not None:
            # Every request of a family has the latency of the family: one of each is enough.
            is_first = np.zeros(len(self.stream), dtype=bool)
            is_first[self.stream.families.begin[:-1]] = True
            finite &= is_first[part]
        return column[self._of_class(finite, request_class, part)]

    def _of_class(
        self, requests: NDArray[np.bool_], request_class: int | None, part: slice = _ALL
    ) -> NDArray[np.bool_]:
        return requests if request_class is None else requests & (self.stream.class_index[part] == request_class)

    def statistic(self, metric: str, statistic: str, request_class: int | None = None) -> float | None:
        """Return `mean` or a percentile such as `p99` of one of METRICS; None if no request has a value."""
        values = self.values(metric, request_class)
        return statistic_of(values, statistic) if len(values) else None

    def limits_of(self, part: slice) -> list[SloLimit]:
        """Return the limits with the values of a part of the requests, which are in order of arrival. Limits of classes
        that no request of the part belongs to are left out."""
        lines = []
        for index, name, slo in self.objectives():
            for metric, statistic, limit in slo.limits():
                values = self.values(metric, index, part)
                if len(values):
                    value = statistic_of(values, statistic)
                    met = value <= limit
                    lines.append(
                        SloLimit(
                            request_class=name,
                            metric=metric,
                            statistic=statistic,
                            limit_s=limit,
                            value_s=value,
                            met=met,
                        )
                    )
        return lines

    def distributions(self, noise: bool) -> dict[Metric, Distribution]:
        """Return the distribution of every metric."""
        by_metric = {metric: distribution(self.values(metric), noise=noise) for metric in METRICS}
        by_metric["itl"] = between_tokens(self.itl)
        families = self.stream.families
        for metric in FAMILY_METRICS if families is not None else ():
            if metric == "family" or (families is not None and families.has_pauses):
                by_metric[metric] = distribution(self.values(metric), noise=False)
        return by_metric

    @property
    def held_back(self) -> HeldBack | None:
        """See `RunStatistics`."""
        if self.stream.due_s is None or self.stream.users is None:
            return None
        return held_back(self.held_s, self.stream.users)

    @property
    def warm_up_requests(self) -> int | None:
        """Requests after which TTFT has settled; None if that is not seen."""
        return warm_up(self.values("ttft"))

    @cached_property
    def good(self) -> NDArray[np.bool_]:
        """True for each request that was answered within every limit that applies to it.

        A single request is held to the widest limit of each metric (that of the highest percentile).
        """
        good = self.completed.copy()
        good[: self.stream.warm_up] = False
        for index, _, slo in self.objectives():
            for metric in get_args(SloMetric):
                limits = [limit for m, _, limit in slo.limits() if m == metric]
                if limits:
                    late = getattr(self, metric + "_s") > max(limits)
                    good &= ~(late if index is None else late & (self.stream.class_index == index))
        return good

    def to_pandas(self) -> Any:
        """Return every request as a row of a `pandas.DataFrame`, times in seconds. Raise UsageError without pandas."""
        return frame(self._columns())

    def to_arrow(self) -> Any:
        """Return every request as a row of a `pyarrow.Table`, times in seconds. Raise UsageError without pyarrow."""
        return arrow(self._columns())

    def figures(self) -> dict[str, Any]:
        """Return the distributions of TTFT, TPOT and E2EL as figures of Plotly, by metric; metrics without values are
        left out."""
        return _drawn({metric: quantiles(self.values(metric)) for metric in ("ttft", "tpot", "e2el")})

    def _columns(self) -> dict[str, Any]:
        """Return the columns of all requests, by name."""
        stream, outcome = self.stream, self.outcome
        columns: dict[str, Any] = {
            "class": [stream.class_names[i] for i in stream.class_index.tolist()],
            "engine_core": outcome.core,
            "prompt_tokens": stream.prompt_tokens,
            "output_tokens": stream.output_tokens,
        }
        columns |= {
            f"{name}_s": getattr(self, f"{name}_s") for name in ("arrival", "scheduled", "first_token", "finish")
        }
        columns |= {f"{metric}_s": getattr(self, f"{metric}_s") for metric in METRICS}
        return {**columns, "preemptions": outcome.preemptions, "good": self.good}

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        summary = self.summary()
        rows = [(key, f"{value:,.4g}") for key in _SHOWN if (value := getattr(summary, key)) is not None]
        if summary.saturated:
            rows.append(("saturated", "requests pile up faster than they are served; latencies grow without bound"))
        else:
            latencies = ((metric, summary.metrics[metric]) for metric in METRICS)
            rows += [
                (f"{m} p50, p99", f"{d.p50 * 1e3:,.1f}, {d.p99 * 1e3:,.1f} ms") for m, d in latencies if d.p50 and d.p99
            ]
        return html_table("simtune.Result", rows)

    def latency_quantiles(self) -> LatencyQuantiles:
        """Return the quantiles from which the curves of the latencies are drawn."""
        ttft, tpot, e2el = (quantiles(self.values(metric)) for metric in ("ttft", "tpot", "e2el"))
        return LatencyQuantiles(ttft_s=ttft, tpot_s=tpot, e2el_s=e2el)


class MissBudget:
    """Stop condition that ends a run once an SLO cannot be met any more.

    The p-th percentile of n values lies above the limit as soon as n - floor((n - 1) p) of them do, and their mean as
    soon as some of them add up to more than n times the limit: so the verdict equals that of the whole run.
    """

    def __init__(self, stream: RequestStream, slo: Slo, part: slice | None = None) -> None:
        """Judge the requests after the warm-up, or those of a part, in which warm-up requests count as well."""
        self._class_of = stream.class_index.tolist()
        self._gaps = (stream.output_tokens - 1).tolist()
        self._lines: list[tuple[int | None, str, int | None]] = []  # class, metric, limit that few may exceed
        self._warm_up = stream.warm_up if part is None else 0
        self._left: list[float] = []  # how many more may exceed it, or how much more all of them may add up to
        judged = np.zeros(len(stream), dtype=bool)
        judged[slice(stream.warm_up, None) if part is None else part] = True
        for index, _, objective in objectives(stream, slo):
            of_class = judged if index is None else judged & (stream.class_index == index)
            for metric, statistic, limit in objective.limits():
                n = int((of_class & (stream.output_tokens > 1)).sum() if metric == "tpot" else of_class.sum())
                ticks = limit * TICKS_PER_SECOND
                if statistic == "mean":
                    # The margin keeps rounding of the sum from ending a run whose mean meets the limit.
                    self._lines.append((index, metric, None))
                    self._left.append((ticks * n + 1) * (1 + _ROUNDING))
                else:
                    self._lines.append((index, metric, math.floor(ticks)))
                    self._left.append(n - math.floor((n - 1) * float(statistic[1:]) / 100))

    def __call__(self, request: int, arrival: int, first_token: int, finish: int) -> bool:
        """Account for a finished request (times in ticks); return True once a limit can no longer be met."""
        if request < self._warm_up:
            return False
        for line, (index, metric, limit) in enumerate(self._lines):
            if index is not None and index != self._class_of[request]:
                continue
            gaps = 1
            if metric == "ttft":
                took = first_token - arrival
            elif metric == "e2el":
                took = finish - arrival
            elif metric == "tpot":
                took, gaps = finish - first_token, self._gaps[request]
            else:
                # Families are judged when the run is over.
                continue
            if limit is None:
                self._left[line] -= took / (gaps or 1)
            elif took > limit * gaps:
                self._left[line] -= 1
            if self._left[line] <= 0:
                return True
        return False


class PartBudgets:
    """Stop condition that ends a run once its SLO cannot be met any more by all requests, or by one of their parts."""

    def __init__(self, stream: RequestStream, slo: Slo, parts: Sequence[slice]) -> None:
        """Judge `parts`, slices that cover all requests in order, each by itself."""
        self._whole = MissBudget(stream, slo)
        self._begins = [part.start for part in parts]
        self._parts = [MissBudget(stream, slo, part) for part in parts]

    def __call__(self, request: int, arrival: int, first_token: int, finish: int) -> bool:
        """Account for a finished request (times in ticks); return True once a limit can no longer be met."""
        part = self._parts[bisect_right(self._begins, request) - 1]
        return self._whole(request, arrival, first_token, finish) or part(request, arrival, first_token, finish)


def parts_of(count: int, requests: int) -> list[slice]:
    """Return the equal parts of `count` requests, as many as have at least `requests` each, but one at least."""
    parts = max(1, count // requests)
    return [slice(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def _drawn(of_metrics: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return figures of quantiles in seconds, by metric."""
    figures = {}
    for metric, seconds in of_metrics.items():
        values = [1e3 * x for x in seconds]
        if len(values) > 1:
            levels = [100 * i / (len(values) - 1) for i in range(len(values))]
            figures[metric] = plotted(
                f"{metric.upper()}, ms", "requests, %", [PlainCurve(metric.upper(), values, levels)]
            )
    return figures


def _by_request(stream: RequestStream, of_families: Array) -> Array:
    """Return the value of its family for each request; NaN without families."""
    if stream.families is None or not len(of_families):
        return np.full(len(stream), np.nan)
    return np.repeat(of_families, stream.families.sizes)


def active_seconds(families: Families, arrival_s: Array, finish_s: Array) -> Array:
    """Return the seconds in which at least one answered request of each family was under way; NaN if none was.

    A request that was aborted is under way only while the one that its node waited for is.
    """
    family = np.repeat(np.arange(len(families)), families.sizes)
    answered = np.flatnonzero(np.isfinite(finish_s))
    order = answered[np.lexsort((arrival_s[answered], family[answered]))]
    active_s = np.full(len(families), np.nan)
    last, until_s = -1, 0.0
    for number, begin_s, end_s in zip(family[order], arrival_s[order], finish_s[order], strict=True):
        if number != last:
            last, until_s, active_s[number] = number, begin_s, 0.0
        active_s[number] += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return active_s


def statistic_of(values: Array, statistic: str) -> float:
    """Return `mean` or a percentile such as `p99` or `p99.9` of non-empty values."""
    return float(values.mean()) if statistic == "mean" else float(np.percentile(values, float(statistic[1:])))


def _seconds(ticks: NDArray[np.int64]) -> Array:
    return np.where(ticks >= 0, ticks / TICKS_PER_SECOND, np.nan)
