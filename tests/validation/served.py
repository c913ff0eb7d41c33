"""What an engine did with a load beside what was predicted of it: latencies request by request, queues over time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from simtune.arrays import Array, Ints
from simtune.results.result import Result

STATISTICS = ("mean", "p50", "p90", "p99")


class Served(NamedTuple):
    """When what happened to each request, in seconds of one clock, and how many tokens it got."""

    queued_s: Array
    scheduled_s: Array
    first_token_s: Array
    finish_s: Array
    output_tokens: Ints

    @classmethod
    def of(cls, result: Result) -> Served:
        """A simulation. Raises ValueError where a request never finished."""
        if not result.completed.all():
            raise ValueError("a request was never answered; compare what was served")
        tokens = np.asarray(result.stream.output_tokens, dtype=np.int64)
        return cls(result.arrival_s, result.scheduled_s, result.first_token_s, result.finish_s, tokens)

    def latencies(self) -> dict[str, Array]:
        """TTFT, TPOT of answers of two tokens and more, and E2EL, in seconds."""
        gaps = self.output_tokens - 1
        return {
            "ttft": self.first_token_s - self.queued_s,
            "tpot": ((self.finish_s - self.first_token_s)[gaps > 0]) / gaps[gaps > 0],
            "e2el": self.finish_s - self.queued_s,
        }

    def in_flight(self, at_s: ArrayLike) -> tuple[Ints, Ints]:
        """(running, waiting) requests at these times; one that was preempted counts as running."""
        times = np.asarray(at_s, dtype=np.float64)
        queued, scheduled, finished = (
            np.searchsorted(np.sort(column), times, side="right")
            for column in (self.queued_s, self.scheduled_s, self.finish_s)
        )
        return scheduled - finished, queued - scheduled


class Comparison(NamedTuple):
    """One statistic of one latency, both in seconds."""

    metric: str
    statistic: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


def compare(measured: Served, predicted: Served) -> list[Comparison]:
    """Mean and percentiles of every latency; percentiles interpolate linearly between order statistics."""
    theirs = predicted.latencies()
    return [
        Comparison(metric, statistic, _statistic(seconds, statistic), _statistic(theirs[metric], statistic))
        for metric, seconds in measured.latencies().items()
        for statistic in STATISTICS
    ]


def _statistic(seconds: Array, name: str) -> float:
    return float(seconds.mean() if name == "mean" else np.percentile(seconds, float(name[1:])))
