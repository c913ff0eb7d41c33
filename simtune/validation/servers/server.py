"""The interface of engines for validation: run a plan under a load, and return the measurements."""

from __future__ import annotations

from typing import Protocol

from simtune.specs.plan import Plan
from simtune.validation.client.measured_run import MeasuredRun
from simtune.workload.requests import RequestStream

SYNCHRONOUS_ONLY = "async_scheduling (set `async_scheduling: false` in the pool, beside `engine`)"
"""Setting that engines stepped by simtune lack, with the remedy, for a message."""


class Engine(Protocol):
    """A real engine on a real clock.

    It starts everything that a plan needs at the first `run` of the plan, and keeps it until another plan comes or it
    is closed. Measurements exclude the start and a warm-up. Implementations are given their model (weights, vocabulary)
    when they are made.
    """

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        """Send the stream's requests, and wait for all of them.

        Open loop at `arrival_s` or closed loop with `users`, each request with its exact prompt and output lengths
        (`simtune.validation.client.prompts`). `label` names the load in the returned run; `seed` makes the prompts.
        Requests that failed are in the run with their error. Raise UsageError if the engine cannot be given the plan,
        and EngineError if it does not start or ends.
        """
        ...

    def check(self, plan: Plan) -> None:
        """Raise UsageError if the engine cannot be given the plan, or lacks something that the plan needs."""
        ...

    def close(self) -> None:
        """Stop everything that was started, in any state. May be called twice."""
        ...
