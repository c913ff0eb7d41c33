"""Parts that engines in this process share: the deployment of a plan, and the times of tokens as a measured run."""

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
"""Largest number of samples of running and waiting requests."""


def queue_samples(queues: Sequence[tuple[float, float, float]]) -> QueueSamples | None:
    """Return (time, running, waiting) as a run stores them, at most MOST_SAMPLES, evenly spread up to the last; None
    without any."""
    every = max(1, -(-len(queues) // MOST_SAMPLES))
    samples = queues[(len(queues) - 1) % every :: every]
    if not samples:
        return None
    t_s, running, waiting = zip(*samples, strict=True)
    return QueueSamples(t_s=t_s, running=running, waiting=waiting)


class TokenTimes:
    """Times of the tokens of each request of a stream, in seconds by the engine's clock."""

    def __init__(self, count: int) -> None:
        """Prepare the times of `count` requests."""
        self._times: list[list[float]] = [[] for _ in range(count)]

    def came(self, request: int, at_s: float) -> None:
        """Record a token of a request."""
        self._times[request].append(at_s)

    def first_and_last(self) -> list[tuple[float, float]]:
        """Return the times of the first and last token of each request; NaN without a token."""
        return [(times[0], times[-1]) if times else (nan, nan) for times in self._times]

    def measured(self, stream: RequestStream, arrival: Sequence[int], facts: MeasuredFacts) -> MeasuredRun:
        """Return the times as a run; `arrival` is the tick at which each request arrived.

        Requests without a token were refused.
        """
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
    """Return the deployment of another plan on the same hardware. Its step costs are left unchanged: an engine does not
    use them."""
    if plan == deployment.plan:
        return deployment
    profiles = deployment.profiles
    by_name = {pool.spec.hardware: profiles[pool.spec.name] for pool in deployment.pools}
    hardware = {pool.name: by_name[pool.hardware] for pool in plan.pools}
    return deploy(plan, deployment.model, hardware, deployment.costs)


def check_clock(device: str, clock: Clock) -> None:
    """Raise UsageError for processor time if a device other than the processor does the work."""
    if clock == "cpu" and not device.startswith("cpu"):
        raise UsageError(f"--clock cpu: is the processor's time, and {device} does the work; name --clock wall")


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
