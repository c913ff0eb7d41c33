"""Loads of a validation: light, near the knee, beyond it, as fractions of the simulator's own knee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simtune.errors import UsageError
from simtune.sim.deployment import Deployment
from simtune.specs.base import LONGEST_S
from simtune.workload.requests import RequestStream

FRACTIONS = {"light": 0.3, "knee": 0.9, "overload": 1.5}
"""Fractions of the knee's rate, by name of the load."""
KNEE_SLOWDOWN = 2.0
"""Factor on the mean E2EL of requests served alone that defines the knee."""
WARM_UP_TOKENS = (32, 8)
"""Prompt and output tokens of the requests that an engine gets before the first load."""
WARM_UPS = 4
_HALVINGS = 12
_ALONE = 1e-3
"""Share of the rate at which requests follow one another without a pause: at this rate no requests overlap."""
_FEW = 48
"""Number of requests that measure how long one takes alone: with all of them the simulated time would be months."""


class NamedLoad(NamedTuple):
    """Requests under a name."""

    label: str
    stream: RequestStream

    @property
    def rate_rps(self) -> float | None:
        """Rate at which the client would send; None for a closed loop, and for requests that all arrive at once."""
        return self.stream.target_rate_rps


def loads(deployment: Deployment, stream: RequestStream, rates: Sequence[float] = (), seed: int = 0) -> list[NamedLoad]:
    """Return the stream at given rates, or at FRACTIONS of its knee; unchanged if it has no rate to change.

    Raise UsageError for families and sessions, because the load client sends every request at a time of its own, and
    for adapters, which it does not name.
    """
    if stream.adapter is not None:
        raise UsageError(
            "requests of this workload ask for LoRA adapters, and the load client sends all of them to the base model; "
            "validate with a workload without adapters"
        )
    if stream.families is not None:
        raise UsageError(
            "requests of this workload follow one another (a graph, or sessions whose turns follow answers), and the "
            "load client sends each at a time of its own; validate with a workload without them"
        )
    if stream.due_s is not None and not rates:
        return [NamedLoad("capped", stream)]
    if stream.target_rate_rps is None:
        if rates:
            raise UsageError("the workload has no request rate to change (a closed loop, or all at once); omit --rates")
        return [NamedLoad("closed-loop" if stream.arrival_s is None else "at-once", stream)]
    if rates:
        return [NamedLoad(f"{rate:g}-rps", stream.at_rate(rate)) for rate in rates]
    knee = knee_rps(deployment, stream, seed)
    return [NamedLoad(label, stream.at_rate(fraction * knee)) for label, fraction in FRACTIONS.items()]


def knee_rps(deployment: Deployment, stream: RequestStream, seed: int = 0) -> float:
    """Return the highest rate at which the mean E2EL is at most KNEE_SLOWDOWN times that of requests served alone.

    If even requests that all arrive at once are not that slow, return the rate at which all arrive within the time that
    one takes. Raise UsageError if the plan refuses some of the requests, which no engine could serve.
    """

    def e2el_s(rate: float, requests: RequestStream = stream) -> float:
        value = deployment.simulate(requests.at_rate(rate), seed=seed).statistic("e2el", "mean")
        assert value is not None
        return value

    # At the stream's own rate, to find refused requests, and a first scale of the latency.
    alone = deployment.simulate(stream, seed=seed)
    if alone.refused or not alone.completed.any():
        raise UsageError(
            f"{alone.refused} of {len(stream)} requests exceed max_model_len; validate with a workload that fits"
        )
    first = alone.statistic("e2el", "mean")
    assert first is not None
    few = _few(stream)
    # The last of the few requests must still arrive within the longest time that can be simulated.
    slowest = 2 * len(few) / LONGEST_S
    alone_s = e2el_s(max(_ALONE / max(first, 1e-9), slowest), few)
    high = len(stream) / alone_s
    low = min(max(_ALONE / alone_s, 2 * len(stream) / LONGEST_S), high)
    if e2el_s(high) <= KNEE_SLOWDOWN * alone_s:
        return high
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if e2el_s(middle) <= KNEE_SLOWDOWN * alone_s:
            low = middle
        else:
            high = middle
    return low


def _few(stream: RequestStream) -> RequestStream:
    """Return _FEW of the requests, evenly spread over their lengths, in order of arrival."""
    if len(stream) <= _FEW:
        return stream
    # Decoding takes most of the time: a few requests drawn at random could all have short outputs.
    by_length = np.argsort(stream.output_tokens, kind="stable")
    chosen = by_length[np.linspace(0, len(stream) - 1, _FEW).round().astype(np.int64)]
    return stream.kept(np.isin(np.arange(len(stream)), chosen))


def warm_up(stream: RequestStream) -> RequestStream:
    """Return a few short requests, one after another."""
    prompt, output = (np.full(WARM_UPS, tokens, dtype=np.int64) for tokens in WARM_UP_TOKENS)
    short = replace(stream, arrival_s=None, due_s=None, users=1, think_s=0.0, hash_ids=None, session=None)
    zeros = np.zeros(WARM_UPS, dtype=np.int64)
    return replace(short, prompt_tokens=prompt, output_tokens=output, class_index=zeros, priority=zeros)
