"""Separate prefill and decode engines, by processor time: two vLLM engines that are stepped one after the other.

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
    # The prefill engine is not stepped while the other one is, so it cannot renew the lease of a cache: make it long.
    # Engines with random weights load folders of their own, which vLLM's handshake takes for other models.
    "kv_connector_extra_config": {"kv_lease_duration": 86400, "enforce_handshake_compat": False},
}
"""Value of kv_transfer_config in vLLM's EngineArgs."""
SIZES, REPEATS = 6, 7
"""Number of lengths, and of repeats of each, of the transfers that are measured."""


class EnginePair:
    """See `StepDriver`; its steps are those of both engines."""

    def __init__(self, prefill: Callable[[], StepDriver], decode: Callable[[float | None], StepDriver]) -> None:
        """Start both engines, the second with the reference of the first one's gauge, and run one request.

        The request makes the engines connect to each other, which takes long.
        """
        with ExitStack() as started:
            self.prefill = prefill()
            started.callback(self.prefill.close)
            self.decode = decode(self.prefill.facts().get("reference_s"))
            started.callback(self.decode.close)
            self.size: EngineSize = self.decode.size
            self.run([DrivenRequest(0, min(self.size.max_model_len, 64) - 2, 2)])
            self._started = started.pop_all()

    def facts(self) -> dict[str, Any]:
        """See `StepDriver`; the facts of the decode engine."""
        return self.decode.facts()

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "cpu", seed: int = 0) -> Driven:
        """See `StepDriver`. Requests with one output token do not reach the decode engine."""
        first = self.prefill.run([_prompt(request) for request in requests], clock, seed)
        decoded = [number for number, request in enumerate(requests) if request.output_tokens > 1]
        coming = [
            requests[number]._replace(at=first.requests[number].finish, kv=first.requests[number].kept)
            for number in decoded
        ]
        second = self.decode.run(coming, clock, seed)
        times = list(first.requests)
        for number, after in zip(decoded, second.requests, strict=True):
            times[number] = joined(times[number], after)
        preemptions, queues = first.preemptions + second.preemptions, summed(first.queues, second.queues)
        return Driven([*first.steps, *second.steps], times, None, first.hit_tokens, preemptions, queues)

    def transfers(self, model: Model, seed: int = 0) -> list[MeasuredTransfer]:
        """Measure the time until the idle decode engine has its first token, for prompts of all lengths.

        Raise EngineError if a cache does not arrive.
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
        """End both engines."""
        self._started.close()


def summed(*queues: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Return running and waiting requests of several engines together, at every time at which one of them changes."""
    columns = [np.array([(-np.inf, 0, 0), *rows]) for rows in queues]
    times = np.unique(np.concatenate([rows[1:, 0] for rows in columns]))
    counts = sum(rows[np.searchsorted(rows[:, 0], times, side="right") - 1, 1:] for rows in columns)
    return [(at, *queue) for at, queue in zip(times.tolist(), np.asarray(counts).tolist(), strict=True)]


def _prompt(request: DrivenRequest) -> DrivenRequest:
    """Return the request to the prefill engine; the cache is kept if the decode engine continues it."""
    return request._replace(output_tokens=1, kv=KEEP if request.output_tokens > 1 else None)


def joined(prefill: DrivenTimes, decode: DrivenTimes) -> DrivenTimes:
    """Return a request's times on both engines; no token times if its cache did not arrive."""
    times = (prefill.first_token, *decode.times[1:]) if decode.times else ()
    return prefill._replace(finish=decode.finish, times=times, kept=None)
