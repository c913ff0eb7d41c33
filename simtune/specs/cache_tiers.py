"""Tiers of a prefix cache below the devices, and those of published caches by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from simtune.errors import suggest
from simtune.specs.base import ErrorAt, Name, NonNegative, Part, Positive, Seconds

_SIZES = ("bytes", "bytes_per_device", "device_ratio")


class CacheTier(Part):
    """Level of a prefix cache below the device's own: host memory, a disk, a remote store."""

    name: Name
    bytes: NonNegative | None = Field(
        None, description="its size, of an instance or, if shared, of all together; without a limit unless given"
    )
    bytes_per_device: Positive | None = Field(None, description="its size for each GPU of an instance")
    device_ratio: Positive | None = Field(None, description="its size over that of the KV cache of the instance's GPUs")
    bytes_per_s: Positive | None = Field(
        None,
        description="rate at which keys and values come back, of an instance or of all; that of the hardware's link "
        "`host`, over all GPUs of an instance, unless given",
    )
    latency_s: Seconds = Field(0.0, description="seconds of a fetch besides those of its bytes")
    shared: bool = Field(False, description="one store and one link for all instances of the pool")
    written: Literal["computed", "evicted"] = Field(
        "computed",
        description="what is written to it: all that an instance computes, or what the level above it evicts",
    )
    fetched: Literal["before", "beside", "ahead"] = Field(
        "before",
        description="a step fetches what its new requests find before it computes, or beside, layer by layer; or "
        "requests wait for what they find, ahead of admission, while others step on (vLLM's offloading connector)",
    )

    @model_validator(mode="after")
    def _has_one_size_and_link(self) -> Self:
        sizes = [key for key in _SIZES if getattr(self, key) is not None]
        if len(sizes) > 1:
            raise ErrorAt(f"cannot be combined with {sizes[0]}; keep one size", sizes[1])
        if self.shared and sizes and sizes[0] != "bytes":
            raise ErrorAt("is of one instance; give bytes for a tier that instances share", sizes[0])
        if self.fetched == "ahead" and not sizes:
            raise ErrorAt("is required of a tier from which requests fetch ahead of admission", "bytes")
        if self.fetched == "ahead" and self.shared:
            raise ErrorAt("cannot be combined with fetched: ahead; remove one", "shared")
        if self.fetched == "ahead" and self.written != "computed":
            raise ErrorAt("must be computed with fetched: ahead; remove one", "written")
        if self.shared and self.bytes_per_s is None:
            raise ErrorAt("is required of a tier that instances share, which no host link leads to", "bytes_per_s")
        return self

    def size(self, devices: int, cache_bytes: float | None = None) -> float | None:
        """Return the bytes of an instance of `devices` GPUs; None without a limit, and for a ratio if the bytes of
        their KV cache are not given."""
        if self.bytes_per_device is not None:
            return self.bytes_per_device * devices
        if self.device_ratio is not None:
            return None if cache_bytes is None else self.device_ratio * cache_bytes
        return self.bytes


PUBLISHED_TIERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    # SGLang 0.5.23, srt/arg_groups: hicache_ratio 2.0, write_through; layers are loaded one ahead of computing.
    "hicache": ({"name": "host", "device_ratio": 2.0, "fetched": "beside"},),
    # LMCache, lmcache/v1/config.py: max_local_cpu_size 5.0 (GiB for each GPU's worker), no disk and no remote store,
    # use_layerwise off, least recently used first.
    "lmcache": ({"name": "host", "bytes_per_device": 5.0 * 2**30},),
    # Dynamo KVBM has no size of its own; its configuration reference (docs.nvidia.com/dynamo, KVBM Configuration
    # Reference) advises 100 GB or more of host memory, more than the device's cache. A disk needs its own rate.
    "kvbm": ({"name": "host", "bytes": 100e9},),
}
"""Tiers of published caches with their own defaults, by name."""


def named_tiers(tiers: Any) -> Any:
    """Return the tiers of a published cache if its name is given, anything else as it is. Raises ValueError for an
    unknown name."""
    if not isinstance(tiers, str):
        return tiers
    if tiers not in PUBLISHED_TIERS:
        names = ", ".join(PUBLISHED_TIERS)
        raise ValueError(f"{tiers!r} is no published cache{suggest(tiers, PUBLISHED_TIERS)}; there are {names}")
    return [dict(tier) for tier in PUBLISHED_TIERS[tiers]]
