"""Instances that change between prefilling and decoding as their queues ask for it: what a plan says of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field, model_validator

from simtune.specs.base import LONGEST_S, ErrorAt, Gpus, NonNegative, Part, Positive, Seconds

Watched = Literal["waiting", "under_way"]
"""What is counted of an instance: requests that wait there, or those and its running ones."""


class Pressure(Part):
    """When the pool of a role wants one instance more, and when it can spare one; by requests for each instance up."""

    watch: Watched = Field("waiting", description="waiting: for a seat; under_way: those too that have one")
    low: NonNegative = Field(0.0, description="it can spare an instance while no more than this")
    high: Positive = Field(description="it wants one more from this on; above low")
    least: Gpus = Field(1, description="instances that it keeps")

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

    every_s: Annotated[float, Field(ge=1e-3, le=LONGEST_S)] = Field(description="how often the queues are looked at")
    patience: Annotated[int, Field(ge=1, le=10**6)] = Field(1, description="looks in a row that must agree")
    switch_s: Seconds = Field(0.0, description="from the end of its last request to the first in its new role")
    prefill: Pressure
    decode: Pressure


class SizedPool(Protocol):
    """What a plan's checks ask of a pool."""

    @property
    def name(self) -> str:
        """How it is called in the plan."""

    @property
    def role(self) -> str:
        """mixed, prefill or decode."""

    @property
    def hardware(self) -> str:
        """The profile of its devices, by name."""

    @property
    def instances(self) -> int:
        """How many it has, or begins with."""

    @property
    def devices(self) -> int:
        """GPUs of one of them."""

    @property
    def share(self) -> object:
        """What it has of its GPUs; None where it has them to itself."""


def check_control(control: RoleControl, pools: Sequence[SizedPool], with_events: bool) -> None:
    """Raises ErrorAt where instances of these pools could not take each other's role as the control says."""
    if sorted(pool.role for pool in pools) != ["decode", "prefill"]:
        roles = ", ".join(f"{pool.name} ({pool.role})" for pool in pools)
        raise ErrorAt(
            f"the controller moves instances between one prefill and one decode pool; found {roles}", "control"
        )
    if with_events:
        raise ErrorAt("instances come and go by events or by a controller, not both; leave one out", "control")
    if any(pool.share is not None for pool in pools):
        raise ErrorAt("instances on shares of the same GPUs keep their roles; leave out the shares, or this", "control")
    one, other = pools
    if (one.hardware, one.devices) != (other.hardware, other.devices):
        raise ErrorAt(
            f"an instance of pool {one.name} is {one.devices} x {one.hardware}, one of {other.name} {other.devices} x "
            f"{other.hardware}: only equal ones can take each other's role",
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
