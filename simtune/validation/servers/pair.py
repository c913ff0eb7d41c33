"""Prefill and decode apart, by processor time: two vLLM engines that are stepped one after the other.

A prefill instance waits for no decode instance as long as its KV cache has room. So all prompts of a session are
computed first, each by the prefill engine's own clock; then the decode engine is given every request at the time at
which its prompt was done, fetches its cache from the other one, which is kept until then, and answers by its own clock,
which began when the other's did. The first token is that of the prefill engine; the decode engine samples it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from simtune.costs.kv_transfer_times import MeasuredTransfer
from simtune.costs.memory import kv_bytes_per_token
from simtune.errors import EngineError
from simtune.specs.model import Model
from simtune.specs.pool import Parallelism
from simtune.validation.client.relay import KEEP
from simtune.validation.servers.driven_engines import (
    Driven,
    DrivenRequest,
    DrivenTimes,
    DriverClock,
    EngineSize,
    StepDriver,
)

CONNECTOR: Mapping[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    # The prefill engine is not stepped while the other one is, so it cannot renew its promise to keep a cache; and
    # engines with made-up weights are of folders of their own, which vLLM takes for other models.
    "kv_connector_extra_config": {"kv_lease_duration": 86400, "enforce_handshake_compat": False},
}
"""What vLLM's EngineArgs are given as kv_transfer_config."""
SIZES, REPEATS = 6, 7
"""Of the transfers that are measured."""


class EnginePair:
    """See `StepDriver`; its steps are those of both."""

    def __init__(self, prefill: Callable[[], StepDriver], decode: Callable[[float | None], StepDriver]) -> None:
        """Starts both, the second with the reference of the gauge by which the first goes, and lets them get to know
        each other, which takes long."""
        with ExitStack() as started:
            self.prefill = prefill()
            started.callback(self.prefill.close)
            self.decode = decode(self.prefill.facts().get("reference_s"))
            started.callback(self.decode.close)
            self.size: EngineSize = self.decode.size
            self.run([DrivenRequest(0, min(self.size.max_model_len, 64) - 2, 2)])
            self._started = started.pop_all()

    def facts(self) -> dict[str, Any]:
        """See `StepDriver`; those of the decode engine."""
        return self.decode.facts()

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "cpu", seed: int = 0) -> Driven:
        """See `StepDriver`. Answers of one token never come to the decode engine."""
        first = self.prefill.run([_prompt(request) for request in requests], clock, seed)
        rest = [number for number, request in enumerate(requests) if request.output_tokens > 1]
        coming = [
            requests[number]._replace(at=first.requests[number].finish, kv=first.requests[number].kept)
            for number in rest
        ]
        second = self.decode.run(coming, clock, seed)
        times = list(first.requests)
        for number, after in zip(rest, second.requests, strict=True):
            times[number] = joined(times[number], after)
        preemptions, queues = first.preemptions + second.preemptions, summed(first.queues, second.queues)
        return Driven([*first.steps, *second.steps], times, None, first.hit_tokens, preemptions, queues)

    def transfers(self, model: Model, seed: int = 0) -> list[MeasuredTransfer]:
        """What it takes until the idle decode engine has its first token, for prompts of all lengths.

        Raises EngineError where a cache does not come.
        """
        longest, block = self.size.max_model_len - 2, self.size.block_size
        lengths = np.unique(np.geomspace(min(block, longest), longest, SIZES).astype(int)).tolist()
        token_bytes = kv_bytes_per_token(model, Parallelism(), 0, model.kv_dtype or model.dtype)
        measured: list[MeasuredTransfer] = []
        for tokens in np.random.default_rng(seed).permutation(lengths * REPEATS).tolist():
            request = DrivenRequest(0, tokens, 2)
            (before,) = self.prefill.run([_prompt(request)], "cpu", len(measured)).requests
            (after,) = self.decode.run([request._replace(kv=before.kept)], "cpu", len(measured)).requests
            if not after.times:
                raise EngineError("vllm: the KV cache did not come to the decode engine")
            size = -(-tokens // block) * block * token_bytes
            measured.append(MeasuredTransfer(round(size), after.first_token - after.sent))
        return measured

    def close(self) -> None:
        """End both."""
        self._started.close()


def summed(*queues: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Running and waiting requests of several engines together, at every time at which one of them changes."""
    columns = [np.array([(-np.inf, 0, 0), *rows]) for rows in queues]
    times = np.unique(np.concatenate([rows[1:, 0] for rows in columns]))
    counts = sum(rows[np.searchsorted(rows[:, 0], times, side="right") - 1, 1:] for rows in columns)
    return [(at, *both) for at, both in zip(times.tolist(), np.asarray(counts).tolist(), strict=True)]


def _prompt(request: DrivenRequest) -> DrivenRequest:
    """What the prefill engine is asked; the cache is kept where there is more to come."""
    return request._replace(output_tokens=1, kv=KEEP if request.output_tokens > 1 else None)


def joined(prefill: DrivenTimes, decode: DrivenTimes) -> DrivenTimes:
    """A request's times on both engines; none of one whose cache did not come."""
    times = (prefill.first_token, *decode.times[1:]) if decode.times else ()
    return prefill._replace(finish=decode.finish, times=times, kept=None)
