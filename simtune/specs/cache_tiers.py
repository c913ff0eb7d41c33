"""Tiers of a prefix cache below the devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simtune.specs.base import Name, NonNegative, Part, Positive, Seconds


class CacheTier(Part):
    """Level of a prefix cache below the device's own: host memory, a disk, a remote store."""

    name: Name
    bytes: NonNegative | None = Field(
        None, description="its size, of an instance or, if shared, of all together; without a limit unless given"
    )
    bytes_per_s: Positive = Field(description="rate at which keys and values come back, of an instance or of all")
    latency_s: Seconds = Field(0.0, description="seconds of a fetch besides those of its bytes")
    shared: bool = Field(False, description="one store and one link for all instances of the pool")
    written: Literal["computed", "evicted"] = Field(
        "computed",
        description="what is written to it: all that an instance computes, or what the level above it evicts",
    )
    fetched: Literal["before", "beside"] = Field(
        "before",
        description="a step fetches what its new requests find before it computes, or beside, layer by layer",
    )
