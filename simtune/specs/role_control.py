"""Instances that change between prefilling and decoding by the length of their queues: settings of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field, model_validator

from simtune.specs.base import LONGEST_S, ErrorAt, GpuCount, NonNegative, Part, Positive, Seconds

WatchedQueue = Literal["waiting", "under_way"]
"""Requests of an instance that are counted: those that wait there, or those and its running ones."""


class Pressure(Part):
    """Thresholds at which the pool of a role takes one instance more, and gives one away; in requests per available
    instance.
    """

    watch: WatchedQueue = Field(
        "waiting", description="waiting: requests that wait for a seat; under_way: also those that have one"
    )
    low: NonNegative = Field(0.0, description="the pool can give an instance away at this pressure or less")
    high: Positive = Field(description="the pool takes another instance at this pressure or more; above low")
    least: GpuCount = Field(1, description="instances that the pool always keeps")

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.high <= self.low:
            raise ErrorAt(
                f"high ({self.high:g}) must be above low ({self.low:g}): what lies between keeps instances from "
                "switching back at once",
                "high",
            )
        return self


class RoleControl(Part):
    """Instances of the prefill and the decode pool take the other role as their queues ask for it: every `every_s` one
    may switch, from a pool that can spare it to one that wants it, unless one is still on its way. It takes nothing
    new, finishes what it has, and is there in its new role `switch_s` later.
    """

    every_s: Annotated[float, Field(ge=1e-3, le=LONGEST_S)] = Field(description="interval at which the queues are read")
    patience: Annotated[int, Field(ge=1, le=10**6)] = Field(1, description="successive readings that must agree")
    switch_s: Seconds = Field(
        0.0, description="from the end of an instance's last request to the first in its new role"
    )
    prefill: Pressure
    decode: Pressure


class SizedPool(Protocol):
    """Fields of a pool that the checks of a plan read."""

    @property
    def name(self) -> str:
        """Name of the pool in the plan."""

    @property
    def role(self) -> str:
        """Role: mixed, prefill or decode."""

    @property
    def hardware(self) -> str:
        """Name of the hardware profile of its devices."""

    @property
    def instances(self) -> int:
        """Number of instances, at the start if it changes."""

    @property
    def devices(self) -> int:
        """GPUs of one instance."""

    @property
    def share(self) -> object:
        """Share of its GPUs that the pool has; None if it has them to itself."""


def check_control(control: RoleControl, pools: Sequence[SizedPool], with_events: bool) -> None:
    """Raise ErrorAt if instances of these pools could not take each other's role by this control."""
    if sorted(pool.role for pool in pools) != ["decode", "prefill"]:
        roles = ", ".join(f"{pool.name} ({pool.role})" for pool in pools)
        raise ErrorAt(
            f"the controller moves instances between one prefill and one decode pool; found {roles}", "control"
        )
    if with_events:
        raise ErrorAt("instances come and go by events or by a controller, not both; leave one out", "control")
    if any(pool.share is not None for pool in pools):
        raise ErrorAt("instances on shares of the same GPUs keep their roles; remove `share`, or `control`", "control")
    first, second = pools
    if (first.hardware, first.devices) != (second.hardware, second.devices):
        raise ErrorAt(
            f"an instance of pool {first.name} is {first.devices} x {first.hardware}, one of {second.name} "
            f"{second.devices} x {second.hardware}: only equal ones can take each other's role",
            "control",
        )
    for pool in pools:
        least = control.prefill.least if pool.role == "prefill" else control.decode.least
        if least > pool.instances:
            raise ErrorAt(
                f"pool {pool.name} is to keep {least} instances and begins with {pool.instances}",
                "control",
                pool.role,
                "least",
            )
