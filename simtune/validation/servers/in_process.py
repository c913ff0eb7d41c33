"""What engines in this process share: the deployment of a plan, and the times of tokens as a measured run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from math import nan

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import UsageError
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.plan import Plan
from simtune.validation.client.measured_run import Clock, MeasuredFacts, MeasuredRequest, MeasuredRun, QueueSamples
from simtune.workload.requests import RequestStream

REFUSED = "longer than the engine can hold"
MOST_SAMPLES = 2000
"""Of how many requests run and wait."""


def queue_samples(queues: Sequence[tuple[float, float, float]]) -> QueueSamples | None:
    """(time, running, waiting) as a run keeps them, at most MOST_SAMPLES of them evenly spread up to the last; None of
    none."""
    every = max(1, -(-len(queues) // MOST_SAMPLES))
    kept = queues[(len(queues) - 1) % every :: every]
    if not kept:
        return None
    t_s, running, waiting = zip(*kept, strict=True)
    return QueueSamples(t_s=t_s, running=running, waiting=waiting)


class TokenTimes:
    """When the tokens of each request of a stream came, in seconds by the engine's clock."""

    def __init__(self, count: int) -> None:
        """For so many requests."""
        self._times: list[list[float]] = [[] for _ in range(count)]

    def came(self, request: int, at_s: float) -> None:
        """A token of a request is there."""
        self._times[request].append(at_s)

    def first_and_last(self) -> list[tuple[float, float]]:
        """Of each request; NaN of those without a token."""
        return [(times[0], times[-1]) if times else (nan, nan) for times in self._times]

    def measured(self, stream: RequestStream, arrival: Sequence[int], facts: MeasuredFacts) -> MeasuredRun:
        """As a run; `arrival` is the tick at which each request came. Those without a token were refused."""
        due = [None] * len(stream) if stream.arrival_s is None else stream.arrival_s.tolist()
        requests = tuple(
            MeasuredRequest(
                request=number,
                due_s=due[number],
                sent_s=arrival[number] / TICKS_PER_SECOND,
                first_token_s=times[0] if times else None,
                finish_s=times[-1] if times else None,
                prompt_tokens=int(stream.prompt_tokens[number]),
                output_tokens=len(times),
                times_s=tuple(times) if times else None,
                error=None if times else REFUSED,
            )
            for number, times in enumerate(self._times)
        )
        return MeasuredRun(facts, requests)


def redeployed(plan: Plan, deployment: Deployment) -> Deployment:
    """Another plan on the same hardware. What its steps would cost is of no account to an engine, and left as it is."""
    if plan == deployment.plan:
        return deployment
    return deploy(plan, deployment.model, deployment.profiles, deployment.costs)


def check_clock(device: str, clock: Clock) -> None:
    """Raises UsageError for processor time where the processor does not do the work."""
    if clock == "cpu" and not device.startswith("cpu"):
        raise UsageError(f"--clock cpu: is the processor's time, and {device} does the work; name --clock wall")


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
