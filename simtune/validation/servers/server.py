"""What can be validated against: an engine runs a plan under a load and says what it measured."""

from __future__ import annotations

from typing import Protocol

from simtune.specs.plan import Plan
from simtune.validation.client.measured_run import MeasuredRun
from simtune.workload.requests import RequestStream


class Engine(Protocol):
    """A real engine on a real clock. It starts whatever a plan needs at the first `run` of it and keeps that until
    another plan comes or it is closed; what starting costs, and a warm-up, is not in what it measures.

    Implementations are given their model (weights, vocabulary) when they are made.
    """

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        """Send the stream's requests, open loop at `arrival_s` or closed loop with `users`, each with its exact prompt
        and output lengths (`simtune.validation.client.prompts`), and wait for all of them.

        `label` names the load in what comes back; `seed` makes the prompts. Requests that failed are in the run with
        their error. Raises UsageError where the engine cannot be told the plan, EngineError where it does not start or
        ends.
        """
        ...

    def check(self, plan: Plan) -> None:
        """Raises UsageError where the engine cannot be told the plan, or lacks what it asks for."""
        ...

    def close(self) -> None:
        """Stop what was started, whatever state it is in. May be called twice."""
        ...
