"""What a simulation says: columns per request, and the statistics people ask of them.

TTFT is first token - arrival, TPOT is (finish - first token) / (output tokens - 1), undefined for one-token answers,
E2EL is finish - arrival; all in seconds. Percentiles interpolate linearly between order statistics. As vLLM's benchmark
client counts them. E2EL is made up of queue (until first scheduled), prefill (until the first token), transfer (until
the KV cache has come to the decode instance, where there is one) and decode (until the last token).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Tally
from simtune.errors import UsageError
from simtune.results.energy import Power, energy_of
from simtune.results.frames import PlainCurve, arrow, frame, html_table, plotted
from simtune.results.outcome import Outcome
from simtune.results.statistics import TokenIntervals, warm_up
from simtune.results.steady import Steadiness, in_system, needed_for, steadiness, wander
from simtune.results.summary import LatencyQuantiles, Metric, SimulationSummary, SloLimit
from simtune.results.summing import between_tokens, distribution, instances, prefix_cache, quantiles, verifications
from simtune.specs.workload import Slo
from simtune.workload.requests import RequestStream

METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2el", "queue", "prefill", "transfer", "decode")
PERCENTILES = ("p50", "p90", "p95", "p99")
"""Of a summary."""
_ROUNDING = 1e-9
"""Relative; what adding up may come to."""
_SHOWN = ("requests", "offered_rate_rps", "request_throughput_rps", "goodput_rps", "slo_attainment", "num_gpus")
"""Numbers that a notebook shows first."""


@dataclass
class RequestTimes:
    """Arrays in order of request number, NaN where something never came."""

    stream: RequestStream
    outcome: Outcome

    @cached_property
    def arrival_s(self) -> Array:
        """When each request came; NaN where one never did."""
        return _seconds(self.outcome.arrival)

    @cached_property
    def scheduled_s(self) -> Array:
        """When each was first in a step."""
        return _seconds(self.outcome.scheduled)

    @cached_property
    def first_token_s(self) -> Array:
        """When its first token was there."""
        return _seconds(self.outcome.first_token)

    @cached_property
    def finish_s(self) -> Array:
        """When its last token was there."""
        return _seconds(self.outcome.finish)

    @cached_property
    def ttft_s(self) -> Array:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @cached_property
    def queue_s(self) -> Array:
        """Until it was first in a step."""
        return self.scheduled_s - self.arrival_s

    @cached_property
    def e2el_s(self) -> Array:
        """From arrival to the last token."""
        return self.finish_s - self.arrival_s

    @cached_property
    def prefill_s(self) -> Array:
        """From the first step until the prompt was done."""
        return _seconds(self.outcome.prompt_done) - self.scheduled_s

    @cached_property
    def transferred_s(self) -> Array:
        """When the KV cache had come to the decode instance; NaN where none was sent."""
        return _seconds(self.outcome.transferred)

    @cached_property
    def transfer_s(self) -> Array:
        """From the end of the prompt until the KV cache had come to the decode instance; NaN where none was sent."""
        return self.transferred_s - _seconds(self.outcome.prompt_done)

    @cached_property
    def decode_s(self) -> Array:
        """From there, or from the first token, to the last."""
        sent = np.isfinite(self.transferred_s)
        return self.finish_s - np.where(sent, self.transferred_s, self.first_token_s)

    @cached_property
    def itl(self) -> TokenIntervals | None:
        """The times between tokens; None when there are none."""
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
        """Which requests were answered to the end."""
        return self.outcome.finish >= 0


@dataclass
class Result(RequestTimes):
    """Times of requests, and the statistics and verdicts that follow from them."""

    num_gpus: int
    """GPUs of the whole deployment."""
    slo: Slo = field(default_factory=Slo)
    offered_rate_rps: float | None = None
    """Mean arrival rate at the deployment; None for a closed loop and for a single instant."""
    scale: float = 1.0
    """How many equal and independent cores each simulated one stands for; throughputs are those of all of them."""
    power: Power | None = None
    """What instances draw; None where a hardware profile does not say."""

    @property
    def refused(self) -> int:
        """Requests that exceed max_model_len; 0 for a run that was stopped early, where it cannot be told."""
        return 0 if self.outcome.aborted else self.outcome.refused

    @property
    def unserved(self) -> int:
        """Requests left when no instance was up any more to serve them; 0 for a run that was stopped early."""
        return 0 if self.outcome.aborted else int((~self.completed).sum()) - self.refused - len(self.outcome.stopped)

    @cached_property
    def duration_s(self) -> float:
        """From the first arrival to the last finish; 0 when nothing finished."""
        if not self.completed.any():
            return 0.0
        return float(np.nanmax(self.finish_s) - self.arrival_s[self.outcome.arrival >= 0].min())

    @cached_property
    def steadiness(self) -> Steadiness | None:
        """Whether the load is kept up with (`simtune.results.steady`).

        None where that is no question: in a closed loop, whose users wait; of a batch and of requests that all come at
        once; and of a run that was stopped early. Requests that are left when no instance is up saturate any system.
        """
        if self.unserved:
            return "saturated"
        if self.stream.offered_rate_rps is None or self.stream.batch or self.outcome.aborted:
            return None
        return steadiness(*self._at_arrivals, int((self.outcome.arrival >= 0).sum()))

    @cached_property
    def _at_arrivals(self) -> tuple[Ints, Ints]:
        """Requests in the system, and requests waiting, as arrivals find them."""
        return in_system(self.outcome.arrival, self.outcome.finish, self.outcome.waiting_at_arrival)

    @property
    def wander(self) -> float | None:
        """How far the number in the system strays in the second half (`simtune.results.steady.wander`); None where the
        verdict is None."""
        present = self._at_arrivals[0]
        return (
            None
            if self.steadiness is None or len(present) < 4
            else wander(present[len(present) // 2 :].astype(np.float64))
        )

    @property
    def saturated(self) -> bool:
        """True if requests pile up for certain."""
        return self.steadiness == "saturated"

    @cached_property
    def lifetimes(self) -> float | None:
        """Time in which requests arrive, over the mean end-to-end latency; None if they have no rate or none ends."""
        mean = self.values("e2el")
        if self.stream.offered_rate_rps is None or self.stream.batch or not len(mean):
            return None
        return float(np.ptp(self.arrival_s[self.outcome.arrival >= 0]) / mean.mean())

    @cached_property
    def too_few_for(self) -> tuple[str, ...]:
        """Percentiles of the summary and of the objective that fewer requests ended for than they need."""
        finished = int(self.completed.sum())
        short = {p: finished for p in PERCENTILES if finished < needed_for(p)}
        for index, name, slo in self._objectives():
            count = finished if index is None else int((self.completed & (self.stream.class_index == index)).sum())
            of_class = "" if name is None else f" of class {name}"
            short |= {f"{s}{of_class}": count for _, s, _ in slo.limits() if count < needed_for(s)}
        return tuple(short)

    @cached_property
    def family_s(self) -> Array:
        """Of each request, how long its family took from its arrival until its last node was over; NaN without one."""
        return family_latencies(self.outcome, len(self.stream))

    def values(self, metric: str, request_class: int | None = None) -> Array:
        """Finite values of one of METRICS, of one class or of all; of families, each once."""
        column: Array = getattr(self, metric + "_s")
        if metric == "family":
            column = column[:: max(1, len(column) // max(1, len(self.outcome.family_end)))]
            return column[np.isfinite(column)]
        keep = np.isfinite(column)
        if request_class is not None:
            keep &= self.stream.class_index == request_class
        return column[keep]

    def statistic(self, metric: str, statistic: str) -> float | None:
        """`mean` or a percentile such as `p99` of one of METRICS; None when no request has a value."""
        values = self.values(metric)
        return statistic_of(values, statistic) if len(values) else None

    @cached_property
    def limits(self) -> list[SloLimit]:
        """Every line of the objective, the run's own and those of classes that have one."""
        lines = []
        for index, name, slo in self._objectives():
            for metric, statistic, limit in slo.limits():
                values = self.values(metric, index)
                value = statistic_of(values, statistic) if len(values) and not self.saturated else None
                lines.append(
                    SloLimit(
                        request_class=name,
                        metric=metric,
                        statistic=statistic,
                        limit_s=limit,
                        value_s=value,
                        met=value is not None and value <= limit,
                    )
                )
        return lines

    @property
    def meets_slo(self) -> bool:
        """All lines hold, nothing was refused, the system is not saturated, and the run was not stopped for misses."""
        if self.outcome.aborted or self.saturated or self.refused:
            return False
        return all(limit.met for limit in self.limits)

    @cached_property
    def good(self) -> NDArray[np.bool_]:
        """Requests that were answered within every limit that applies to them.

        A single request is held to the widest limit of each metric (that of the highest percentile).
        """
        good = self.completed.copy()
        for index, _, slo in self._objectives():
            for metric in ("ttft", "tpot", "e2el", "family"):
                limits = [limit for m, _, limit in slo.limits() if m == metric]
                if limits:
                    late = getattr(self, metric + "_s") > max(limits)
                    good &= ~(late if index is None else late & (self.stream.class_index == index))
        return good

    @property
    def slo_attainment(self) -> float | None:
        """Share of the finished requests answered within every limit that applies to them."""
        finished = int(self.completed.sum())
        return float(self.good.sum()) / finished if finished else None

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second answered within their limits: of a stable system the offered rate times the attainment,
        of any other those that were answered so, over the time that took."""
        if self.offered_rate_rps is not None and self.steadiness == "stable":
            return self.offered_rate_rps * (self.slo_attainment or 0.0)
        return float(self.good.sum()) * self.scale / self.duration_s if self.duration_s > 0 else None

    def _objectives(self) -> list[tuple[int | None, str | None, Slo]]:
        return objectives(self.stream, self.slo)

    def summary(self, *, noise: bool = True) -> SimulationSummary:
        """What it comes to in numbers; None stands for a number that does not exist or is unbounded. Without `noise`
        intervals are left out, which take longer than all the rest."""
        completed, duration, tpot = self.completed, self.duration_s, self.values("tpot")
        output = int(self.stream.output_tokens[completed].sum())
        total = output + int(self.stream.prompt_tokens[completed].sum())

        def per_second(x: float) -> float | None:
            return x * self.scale / duration if duration > 0 else None

        output_rate = per_second(output)
        where_it_applies: dict[str, Any] = {}  # the rest is left out of the file
        if cached := prefix_cache(self.outcome.cores):
            where_it_applies["prefix_cache"] = cached
        if self.drafted.rounds:
            where_it_applies["speculation"] = verifications(self.drafted)
        used = instances(self.outcome.cores, self._answered_on(completed), duration)
        where_it_applies |= self.outcome.controlled | energy_of(self.power, used, duration, output, self.scale)
        return SimulationSummary(
            requests=len(completed),
            completed=int(completed.sum()),
            refused=self.refused,
            unserved=self.unserved,
            preemptions=int(self.outcome.preemptions.sum()),
            duration_s=duration,
            saturated=self.saturated,
            steadiness=self.steadiness,
            lifetimes=self.lifetimes,
            too_few_for=self.too_few_for,
            offered_rate_rps=self.offered_rate_rps,
            request_throughput_rps=per_second(int(completed.sum())),
            goodput_rps=self.goodput_rps,
            slo_attainment=self.slo_attainment,
            output_tokens_per_s=output_rate,
            total_tokens_per_s=per_second(total),
            output_tokens_per_s_per_gpu=None if output_rate is None else output_rate / self.num_gpus,
            output_tokens_per_s_per_user=1 / float(tpot.mean()) if len(tpot) and tpot.mean() > 0 else None,
            num_gpus=self.num_gpus,
            metrics={m: distribution(self.values(m), noise=noise and not self.saturated) for m in METRICS}
            | {"itl": between_tokens(self.itl)}
            | ({"family": distribution(self.values("family"), noise=False)} if self.stream.graph else {}),
            warm_up_requests=warm_up(self.values("ttft")),
            resent=int(self.outcome.resent.sum()),
            transferred_bytes=self.outcome.transferred_bytes,
            instances=used,
            slo=tuple(self.limits),
            **where_it_applies,
        )

    def _answered_on(self, completed: NDArray[np.bool_]) -> list[int]:
        """How many requests each core answered."""
        return list(np.bincount(self.outcome.core[completed], minlength=len(self.outcome.cores)).tolist())

    def to_pandas(self) -> Any:
        """Every request as a row of a `pandas.DataFrame`, times in seconds. Raises UsageError without pandas."""
        return frame(self._columns())

    def to_arrow(self) -> Any:
        """The same as a `pyarrow.Table`. Raises UsageError without pyarrow."""
        return arrow(self._columns())

    def figures(self) -> dict[str, Any]:
        """Distributions of TTFT, TPOT and E2EL as figures of Plotly, by metric; none of what no request has."""
        return _drawn({metric: quantiles(self.values(metric)) for metric in ("ttft", "tpot", "e2el")})

    def _columns(self) -> dict[str, Any]:
        """Of all requests, by name."""
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
        """What a notebook shows."""
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
        """What the curves of the latencies are drawn from."""
        ttft, tpot, e2el = (quantiles(self.values(metric)) for metric in ("ttft", "tpot", "e2el"))
        return LatencyQuantiles(ttft_s=ttft, tpot_s=tpot, e2el_s=e2el)

    @cached_property
    def drafted(self) -> Tally:
        """What all verifications came to; nothing where nobody drafts."""
        tallies = [core.drafting for core in self.outcome.cores]
        return Tally(*(sum(column) for column in zip(*tallies, strict=True)))


def objectives(stream: RequestStream, slo: Slo) -> list[tuple[int | None, str | None, Slo]]:
    """(class index, class name, objective): one for all requests, or one per class where classes have their own.

    Raises UsageError for a limit of families if the requests are none.
    """
    if stream.graph is None and any(one.family_s for one in (slo, *stream.slos) if one is not None):
        raise UsageError("slo.family_s limits families of a request graph, and this load has none; leave it out")
    if all(own is None for own in stream.slos):
        return [(None, None, slo)]
    return [
        (index, name, slo if own is None else own)
        for index, (name, own) in enumerate(zip(stream.class_names, stream.slos, strict=True))
    ]


class MissBudget:
    """Tells a run to stop once an SLO cannot be met any more.

    The p-th percentile of n values lies above the limit as soon as n - floor((n - 1) p) of them do, and their mean as
    soon as some of them add up to more than n times the limit: so the verdict is the one the whole run would give.
    """

    def __init__(self, stream: RequestStream, slo: Slo) -> None:
        self._class_of = stream.class_index.tolist()
        self._gaps = (stream.output_tokens - 1).tolist()
        self._lines: list[tuple[int | None, str, int | None]] = []  # class, metric, limit that few may exceed
        self._left: list[float] = []  # how many more may exceed it, or how much more all of them may add up to
        for index, _, objective in objectives(stream, slo):
            of_class = np.ones(len(stream), dtype=bool) if index is None else stream.class_index == index
            for metric, statistic, limit in objective.limits():
                n = int((of_class & (stream.output_tokens > 1)).sum() if metric == "tpot" else of_class.sum())
                ticks = limit * TICKS_PER_SECOND
                if statistic == "mean":
                    self._lines.append((index, metric, None))
                    self._left.append((ticks * n + 1) * (1 + _ROUNDING))
                else:
                    self._lines.append((index, metric, math.floor(ticks)))
                    self._left.append(n - math.floor((n - 1) * float(statistic[1:]) / 100))

    def __call__(self, request: int, arrival: int, first_token: int, finish: int) -> bool:
        """Account for a finished request (times in ticks); True once a limit is lost for good."""
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
                continue  # of families, which are judged when the run is over
            if limit is None:
                self._left[line] -= took / (gaps or 1)
            elif took > limit * gaps:
                self._left[line] -= 1
            if self._left[line] <= 0:
                return True
        return False


def _drawn(of_metrics: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Figures of quantiles in seconds, by metric."""
    drawn = {}
    for metric, seconds in of_metrics.items():
        values = [1e3 * x for x in seconds]
        if len(values) > 1:
            levels = [100 * i / (len(values) - 1) for i in range(len(values))]
            drawn[metric] = plotted(
                f"{metric.upper()}, ms", "requests, %", [PlainCurve(metric.upper(), values, levels)]
            )
    return drawn


def family_latencies(outcome: Outcome, requests: int) -> Array:
    """Seconds from the arrival of each request's family until its last node was over; NaN without families, and of
    families that never were."""
    families = len(outcome.family_end)
    if not families:
        return np.full(requests, np.nan)
    return np.repeat(_seconds(outcome.family_end) - _seconds(outcome.family_begin), requests // families)


def statistic_of(values: Array, statistic: str) -> float:
    """`mean` or a percentile such as `p99` or `p99.9` of non-empty values."""
    return float(values.mean()) if statistic == "mean" else float(np.percentile(values, float(statistic[1:])))


def _seconds(ticks: NDArray[np.int64]) -> Array:
    return np.where(ticks >= 0, ticks / TICKS_PER_SECOND, np.nan)
