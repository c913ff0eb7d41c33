"""Limits that an objective sets for single requests, and the number of requests that may miss them.

A percentile p of n values lies above its limit as soon as n - floor((n - 1) p) of them do (`MissBudget`), so that
n - 1 - floor((n - 1) p) may. A mean within L leaves fewer than n / x values above x L (Markov), for every x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array
from simtune.results.run_statistics import objectives
from simtune.specs.workload import FAMILY_METRICS, Slo, SloMetric
from simtune.workload.requests import RequestStream

MARKOV = (1.5, 4.0, 20.0)
"""Multiples of a mean at which what lies above is counted."""
HIGH = 90.0
"""Percentile that is taken to be above the mean."""


def limits_the_mean(statistic: str) -> bool:
    """True if a limit on a statistic (`mean`, `p50`, `p99`) is taken to hold for the mean as well."""
    return statistic == "mean" or float(statistic[1:]) >= HIGH


@dataclass(frozen=True)
class SloLimits:
    """Limits per request in seconds; infinite if there is no limit. At most `allowed` requests may miss any limit."""

    ttft_s: Array
    tpot_s: Array
    e2el_s: Array
    allowed: int

    @classmethod
    def none(cls, requests: int) -> SloLimits:
        """Return limits that every request meets."""
        endless = np.full(requests, np.inf)
        return cls(endless, endless, endless, 0)

    def narrowed(self, metric: SloMetric, which: NDArray[np.bool_], limit_s: float, allowed: int = 0) -> SloLimits:
        """Return these limits with one more limit, which `allowed` further requests may miss."""
        column: Array = getattr(self, f"{metric}_s")
        within = np.where(which, np.minimum(column, limit_s), column)
        return replace(self, **{f"{metric}_s": within}, allowed=self.allowed + allowed)


@dataclass(frozen=True)
class MeanLimit:
    """A limit on the mean of a metric over some requests."""

    metric: SloMetric
    which: NDArray[np.bool_]
    limit_s: float


def of_one_request(stream: RequestStream, slo: Slo) -> SloLimits:
    """Return the limits within which a request is good: the widest limit of each metric that applies to it
    (`Result.good`)."""
    limits = SloLimits.none(len(stream))
    for applies, metric, widest in _widest(stream, slo):
        limits = limits.narrowed(metric, applies, widest)
    return limits


def _widest(stream: RequestStream, slo: Slo) -> Iterator[tuple[NDArray[np.bool_], SloMetric, float]]:
    for applies, objective in _objectives(stream, slo):
        for metric in ("ttft", "tpot", "e2el"):
            limits = [limit for m, _, limit in objective.limits() if m == metric]
            if limits:
                yield applies, metric, max(limits)


def _objectives(stream: RequestStream, slo: Slo) -> Iterator[tuple[NDArray[np.bool_], Slo]]:
    for index, _, objective in objectives(stream, slo):
        applies = np.ones(len(stream), dtype=bool) if index is None else stream.class_index == index
        # Latencies of the warm-up do not count (`Result.values`).
        applies[: stream.warm_up] = False
        yield applies, objective


def of_statistics(stream: RequestStream, slo: Slo) -> tuple[list[SloLimits], list[MeanLimit]]:
    """Return conditions that hold if every line of an objective does: each line by itself, and the widest of all
    together."""
    unlimited = SloLimits.none(len(stream))
    lines: list[SloLimits] = []
    means: list[MeanLimit] = []
    together = unlimited
    for applies, objective in _objectives(stream, slo):
        widest: dict[SloMetric, tuple[float, int]] = {}
        for metric, statistic, limit in objective.limits():
            if metric in FAMILY_METRICS:
                # Not bounded: a family takes at least as long as its members, so no plan is ruled out by its limit.
                continue
            counted = applies & (stream.output_tokens > 1) if metric == "tpot" else applies
            n = int(counted.sum())
            if statistic == "mean":
                means.append(MeanLimit(metric, counted, limit))
                bounds = [(x * limit, math.ceil(n / x) - 1) for x in MARKOV]
            else:
                bounds = [(limit, max(0, n - 1 - math.floor((n - 1) * float(statistic[1:]) / 100)))]
            lines += [unlimited.narrowed(metric, counted, *line) for line in bounds]
            widest[metric] = max([bounds[-1], *([widest[metric]] if metric in widest else [])])
        for metric, (limit, allowed) in widest.items():
            counted = applies & (stream.output_tokens > 1) if metric == "tpot" else applies
            together = together.narrowed(metric, counted, limit, allowed)
    if len(lines) > 1:
        lines.append(together)
    return lines, means
