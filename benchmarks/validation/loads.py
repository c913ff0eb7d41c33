"""Three loads of the same requests: light, near the knee and beyond it, by what a deployment is said to sustain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.workload.requests import RequestStream

SHARES = {"light": 0.3, "knee": 0.8, "overload": 1.3}
"""Of the rate at which requests that all come at once are answered."""
METRICS = ("ttft", "tpot", "e2el")


def at_once(requests: int, seed: int, prompt: tuple[int, int], output: tuple[int, int]) -> RequestStream:
    """Requests of lengths drawn evenly between these, all there from the beginning."""
    rng, zero = np.random.default_rng(seed), np.zeros(requests, dtype=np.int64)
    return RequestStream(
        arrival_s=np.zeros(requests),
        prompt_tokens=rng.integers(*prompt, requests),
        output_tokens=rng.integers(*output, requests),
        class_index=zero,
        priority=zero,
        class_names=("default",),
        slos=(None,),
    )


def three_loads(deployment: Deployment, requests: RequestStream, seed: int) -> Mapping[str, RequestStream]:
    """The same requests as they come at random at three shares of what the deployment is predicted to sustain."""
    sustained = len(requests) / deployment.simulate(requests).duration_s
    gaps = np.random.default_rng(seed).exponential(1.0, len(requests))
    pattern = replace(requests, arrival_s=np.cumsum(gaps))
    return {name: pattern.at_rate(share * sustained) for name, share in SHARES.items()}


def errors(predicted: Result, measured: list[Result]) -> dict[str, tuple[float, float, float, float]]:
    """(predicted mean, median of the measured means, predicted / measured - 1, repeat noise) of each metric.

    The noise is half the range of the measured means over their median.
    """
    table = {}
    for metric in METRICS:
        means = [float(result.values(metric).mean()) for result in measured]
        middle = float(np.median(means))
        said = float(predicted.values(metric).mean())
        table[metric] = said, middle, said / middle - 1, (max(means) - min(means)) / 2 / middle
    return table
