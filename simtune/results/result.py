"""Result of a simulation: columns per request, and the statistics over them.

TTFT is first token - arrival, TPOT is (finish - first token) / (output tokens - 1), undefined for one-token answers,
E2EL is finish - arrival; all in seconds. Percentiles interpolate linearly between order statistics, as in vLLM's
benchmark client. E2EL is the sum of queue (until first scheduled), prefill (until the first token), transfer (until
the KV cache has reached the decode instance, if there is one) and decode (until the last token).
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
from simtune.results.summing import (
    between_tokens,
    distribution,
    held_back,
    instances,
    prefix_cache,
    quantiles,
    verifications,
)
from simtune.specs.workload import Slo
from simtune.workload.requests import RequestStream

METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2el", "queue", "prefill", "transfer", "decode")
PERCENTILES = ("p50", "p90", "p95", "p99")
"""Percentiles of a summary."""
_ROUNDING = 1e-9
"""Relative error that adding up may cause."""
_SHOWN = ("requests", "offered_rate_rps", "request_throughput_rps", "goodput_rps", "slo_attainment", "num_gpus")
"""Fields of the summary that a notebook shows first."""


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


@dataclass
class Result(RequestTimes):
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

    @property
    def refused(self) -> int:
        """Requests that exceed max_model_len; 0 for a run that was stopped early, where the number is not known."""
        return 0 if self.outcome.aborted else self.outcome.refused

    @property
    def unserved(self) -> int:
        """Requests left when no instance was up any more to serve them; 0 for a run that was stopped early."""
        return 0 if self.outcome.aborted else int((~self.completed).sum()) - self.refused - len(self.outcome.stopped)

    @cached_property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last finish; 0 if nothing finished."""
        if not self.completed.any():
            return 0.0
        return float(np.nanmax(self.finish_s) - self.arrival_s[self.outcome.arrival >= 0].min())

    @cached_property
    def steadiness(self) -> Steadiness | None:
        """Verdict on whether the deployment keeps up with the load (`simtune.results.steady`).

        None if the question does not apply: to a closed loop, whose users wait; to a client that holds requests back;
        to a batch, to requests that all come at once, to a run that was stopped early. Requests
        left when no instance is up make any system saturated.
        """
        if self.unserved:
            return "saturated"
        if self.stream.offered_rate_rps is None or self.stream.batch or self.outcome.aborted:
            return None
        return steadiness(*self._at_arrivals, int((self.outcome.arrival >= 0).sum()))

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

    @property
    def saturated(self) -> bool:
        """True if requests certainly pile up."""
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
        """Percentiles of the summary and of the SLO for which too few requests ended."""
        finished = int(self.completed.sum())
        short = {p: finished for p in PERCENTILES if finished < needed_for(p)}
        for index, name, slo in self._objectives():
            count = finished if index is None else int((self.completed & (self.stream.class_index == index)).sum())
            of_class = "" if name is None else f" of class {name}"
            short |= {f"{s}{of_class}": count for _, s, _ in slo.limits() if count < needed_for(s)}
        return tuple(short)

    @cached_property
    def family_s(self) -> Array:
        """Seconds from the arrival of each request's family until the family's last node was over; NaN without one."""
        return family_latencies(self.outcome, len(self.stream))

    def values(self, metric: str, request_class: int | None = None) -> Array:
        """Return the finite values of one of METRICS, of one class or of all; for `family` one value per family."""
        column: Array = getattr(self, metric + "_s")
        if metric == "family":
            column = column[:: max(1, len(column) // max(1, len(self.outcome.family_end)))]
            return column[np.isfinite(column)]
        keep = np.isfinite(column)
        if request_class is not None:
            keep &= self.stream.class_index == request_class
        return column[keep]

    def statistic(self, metric: str, statistic: str) -> float | None:
        """Return `mean` or a percentile such as `p99` of one of METRICS; None if no request has a value."""
        values = self.values(metric)
        return statistic_of(values, statistic) if len(values) else None

    @cached_property
    def limits(self) -> list[SloLimit]:
        """All lines of the SLO, the run's own and those of classes that have one, with their values."""
        lines = []
        for index, name, slo in self._objectives():
            for metric, statistic, limit in slo.limits():
                values = self.values(metric, index)
                # Latencies of a saturated system grow with the length of the run, so it has no value.
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
        """True if all lines hold, nothing was refused, the system is not saturated, and the run was not stopped for
        misses."""
        if self.outcome.aborted or self.saturated or self.refused:
            return False
        return all(limit.met for limit in self.limits)

    @cached_property
    def good(self) -> NDArray[np.bool_]:
        """True for each request that was answered within every limit that applies to it.

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
        """Requests per second answered within their limits: for a stable system the offered rate times the attainment,
        for any other one the number of such requests over the duration."""
        if self.offered_rate_rps is not None and self.steadiness == "stable":
            return self.offered_rate_rps * (self.slo_attainment or 0.0)
        return float(self.good.sum()) * self.scale / self.duration_s if self.duration_s > 0 else None

    def _objectives(self) -> list[tuple[int | None, str | None, Slo]]:
        return objectives(self.stream, self.slo)

    def summary(self, *, noise: bool = True) -> SimulationSummary:
        """Return the statistics of the run; None stands for a number that does not exist or is unbounded. Without
        `noise` intervals are left out, which take longer than all the rest."""
        completed, duration, tpot = self.completed, self.duration_s, self.values("tpot")
        output = int(self.stream.output_tokens[completed].sum())
        total = output + int(self.stream.prompt_tokens[completed].sum())

        def per_second(x: float) -> float | None:
            return x * self.scale / duration if duration > 0 else None

        output_rate = per_second(output)
        # Fields that do not apply are left out of the file.
        where_it_applies = self._held_back()
        if cached := prefix_cache(self.outcome.cores):
            where_it_applies["prefix_cache"] = cached
        if self.drafted.rounds:
            where_it_applies["speculation"] = verifications(self.drafted)
        core_use = instances(self.outcome.cores, self._answered_on(completed), duration)
        where_it_applies |= self.outcome.controlled | energy_of(self.power, core_use, duration, output, self.scale)
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
            instances=core_use,
            slo=tuple(self.limits),
            **where_it_applies,
        )

    def _held_back(self) -> dict[str, Any]:
        """Return how long the client held requests back, by the name of its field; nothing if it holds none back."""
        if self.stream.due_s is None or self.stream.users is None:
            return {}
        return {"held_back": held_back(self.held_s, self.stream.users)}

    def _answered_on(self, completed: NDArray[np.bool_]) -> list[int]:
        """Return the number of requests that each core answered."""
        return list(np.bincount(self.outcome.core[completed], minlength=len(self.outcome.cores)).tolist())

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

    @cached_property
    def drafted(self) -> Tally:
        """Tally of all verifications; zeros if no pool drafts."""
        tallies = [core.drafting for core in self.outcome.cores]
        return Tally(*(sum(column) for column in zip(*tallies, strict=True)))


def objectives(stream: RequestStream, slo: Slo) -> list[tuple[int | None, str | None, Slo]]:
    """Return (class index, class name, SLO): one entry for all requests, or one per class if classes have their own.

    Raises UsageError for a limit of families if the requests are none.
    """
    if stream.graph is None and any(limits.family_s for limits in (slo, *stream.slos) if limits is not None):
        raise UsageError("slo.family_s limits families of a request graph, and this load has none; leave it out")
    if all(class_slo is None for class_slo in stream.slos):
        return [(None, None, slo)]
    return [
        (index, name, slo if class_slo is None else class_slo)
        for index, (name, class_slo) in enumerate(zip(stream.class_names, stream.slos, strict=True))
    ]


class MissBudget:
    """Stop condition that ends a run once an SLO cannot be met any more.

    The p-th percentile of n values lies above the limit as soon as n - floor((n - 1) p) of them do, and their mean as
    soon as some of them add up to more than n times the limit: so the verdict equals that of the whole run.
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
                    # The margin keeps rounding of the sum from ending a run whose mean meets the limit.
                    self._lines.append((index, metric, None))
                    self._left.append((ticks * n + 1) * (1 + _ROUNDING))
                else:
                    self._lines.append((index, metric, math.floor(ticks)))
                    self._left.append(n - math.floor((n - 1) * float(statistic[1:]) / 100))

    def __call__(self, request: int, arrival: int, first_token: int, finish: int) -> bool:
        """Account for a finished request (times in ticks); return True once a limit can no longer be met."""
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


def family_latencies(outcome: Outcome, requests: int) -> Array:
    """Return the seconds from the arrival of each request's family until the family's last node was over; NaN without
    families, and for families that never arrived."""
    families = len(outcome.family_end)
    if not families:
        return np.full(requests, np.nan)
    return np.repeat(_seconds(outcome.family_end) - _seconds(outcome.family_begin), requests // families)


def statistic_of(values: Array, statistic: str) -> float:
    """Return `mean` or a percentile such as `p99` or `p99.9` of non-empty values."""
    return float(values.mean()) if statistic == "mean" else float(np.percentile(values, float(statistic[1:])))


def _seconds(ticks: NDArray[np.int64]) -> Array:
    return np.where(ticks >= 0, ticks / TICKS_PER_SECOND, np.nan)
