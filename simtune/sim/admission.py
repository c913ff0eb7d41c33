"""Admission limits of servers: requests that one rejects (HTTP 503) because too many are in flight, or wait.

vLLM checks its limits in the API server of an instance, over all of its data-parallel ranks: with a new request at most
`max_num_queued_reqs` may be in flight, and prompts without a first token must have fewer than `max_num_queued_tokens`
tokens (`check_admission` in vllm/v1/engine/async_llm.py, release 0.33). SGLang checks in the scheduler of each rank:
with a new request at most `max_queued_requests` may wait (`_abort_on_queued_limit` in
sglang/srt/managers/scheduler.py, release 0.5.23). A rejected request is not sent to another instance.
"""

from __future__ import annotations

from collections.abc import Sequence

from simtune.engine import Progress, Request
from simtune.errors import UsageError
from simtune.specs.pool import Batching, Pool
from simtune.workload.requests import RequestStream


class AdmissionLimits:
    """Requests that the server of one instance has admitted, and the limits up to which it admits more.

    All cores of an instance share one object. A prompt counts in full until its first token, however much of it is
    computed or cached: the server learns no more.
    """

    def __init__(self, batching: Batching) -> None:
        self._max_requests = batching.max_num_queued_reqs
        self._max_prompt_tokens = batching.max_num_queued_tokens
        self._max_waiting = batching.max_queued_requests
        self._in_flight: dict[int, int] = {}  # prompt tokens of each request without a first token, 0 of others
        self._prompt_tokens = 0

    def admit(self, request: Request, num_waiting: int) -> bool:
        """Count a new request as in flight, of a core at which `num_waiting` others wait; False if it is rejected."""
        if self._max_requests is not None and len(self._in_flight) + 1 > self._max_requests:
            return False
        if self._max_prompt_tokens is not None and self._prompt_tokens >= self._max_prompt_tokens:
            return False
        if self._max_waiting is not None and num_waiting + 1 > self._max_waiting:
            return False
        self._in_flight[request.id] = request.prompt_tokens
        self._prompt_tokens += request.prompt_tokens
        return True

    def note(self, progress: Progress) -> None:
        """Record the first tokens of a step: these prompts count no longer."""
        for request in progress.first_token:
            if request.id in self._in_flight:
                self._prompt_tokens -= self._in_flight[request.id]
                self._in_flight[request.id] = 0

    def over(self, number: int) -> None:
        """Record that a request is no longer in flight, if it was."""
        self._prompt_tokens -= self._in_flight.pop(number, 0)


def check_clients_wait(pools: Sequence[Pool], stream: RequestStream) -> None:
    """Raise UsageError for a closed loop whose clients could be rejected and do not think: they would send all
    remaining requests at the instant of the first rejection."""
    if stream.users is None or stream.think_s > 0 or stream.due_s is not None:
        return
    for pool in pools:
        most = [x for x in (pool.batching.max_num_queued_reqs, pool.batching.max_queued_requests) if x is not None]
        may_reject = stream.families is not None or any(x < stream.users for x in most)
        if pool.queue_limits and (may_reject or pool.batching.max_num_queued_tokens is not None):
            raise UsageError(
                f"pool {pool.name}: clients of a closed loop that do not think would send their next request at the "
                "instant at which one is rejected, and so on to the last; set arrivals.think_s, or remove the limits "
                f"of the queue ({', '.join(pool.queue_limits)})"
            )
