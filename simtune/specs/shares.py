"""Two pools on the same GPUs: the share of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Field

from simtune.specs.base import ErrorAt, Part
from simtune.specs.role_control import SizedPool

ShareOfDevice = Annotated[float, Field(ge=0.01, le=1)]
_ROUNDING = 1e-9


class DeviceShare(Part):
    """Share that an instance has of each of its GPUs, which instances of two pools share. It keeps its share while the
    other is idle. Memory is shared out by `kv_cache.memory_utilization`, and each holds the weights, unless the two are
    one process, which has shares of one KV cache.
    """

    processors: ShareOfDevice = Field(description="share of the processors")
    bandwidth: ShareOfDevice = Field(description="share of the memory bandwidth")
    kv_cache: ShareOfDevice | None = Field(
        None,
        description="share of one KV cache, if instances of both pools are one process that holds the weights once; "
        "memory_utilization is that of the process. Unless given each pool has memory of its own",
    )
    beside: str | None = Field(
        None, description="the pool whose instances are on the same GPUs; set in only one of the two pools"
    )


class _OfMemory(Protocol):
    """The same of their memory."""

    @property
    def memory_utilization(self) -> float: ...


class _SharingPool(SizedPool, Protocol):
    """Fields of a pool that the checks of shares read."""

    @property
    def costs(self) -> str | None: ...
    @property
    def share(self) -> DeviceShare | None: ...
    @property
    def model_devices(self) -> int: ...
    @property
    def kv_cache(self) -> _OfMemory: ...


def check_shares(pools: Sequence[_SharingPool]) -> None:
    """Raise ErrorAt if pools that share GPUs are not two and two, differ in hardware, or take more of it than there is.
    Every pool that is named exists.
    """
    by_name = {pool.name: pool for pool in pools}
    for i, pool in enumerate(pools):
        at, share = ("pools", i, "share"), pool.share
        if share is None:
            continue
        if pool.costs is not None:
            raise ErrorAt("measured whole steps are those of a whole GPU; remove `share`", *at)
        if share.beside is not None:
            _check_beside(i, pool, share, by_name[share.beside])
        elif sum(peer.share is not None and peer.share.beside == pool.name for peer in pools) != 1:
            raise ErrorAt(f"one pool, and one alone, must be `beside: {pool.name}`, or it has its GPUs to itself", *at)


def _check_beside(i: int, pool: _SharingPool, own: DeviceShare, other: _SharingPool) -> None:
    at = ("pools", i, "share")
    if other.share is None or other.share.beside is not None:
        raise ErrorAt(f"pool {other.name} has its GPUs to itself; give it a share without `beside`", *at, "beside")
    kinds = [(p.hardware, p.instances, p.model_devices, p.devices) for p in (pool, other)]
    if kinds[0] != kinds[1] or pool.devices != pool.model_devices:
        raise ErrorAt(
            f"pools {other.name} and {pool.name} share GPUs: give them the same hardware, instances and parallelism, "
            "and no drafter with GPUs of its own",
            *at,
            "beside",
        )
    for resource in ("processors", "bandwidth"):
        total = getattr(own, resource) + getattr(other.share, resource)
        if total > 1 + _ROUNDING:
            raise ErrorAt(f"shares of {other.name} and {pool.name} come to {total:g}, more than all", *at, resource)
    if (own.kv_cache is None) != (other.share.kv_cache is None):
        raise ErrorAt(f"give {other.name} and {pool.name} a share of one KV cache each, or neither", *at, "kv_cache")
    if own.kv_cache is not None and other.share.kv_cache is not None:
        _check_one_cache(i, pool, other, own.kv_cache + other.share.kv_cache)
        return
    memory = pool.kv_cache.memory_utilization + other.kv_cache.memory_utilization
    if memory > 1 + _ROUNDING:
        raise ErrorAt(
            f"{other.name} and {pool.name} take {memory:g} of the memory of their GPUs; lower memory_utilization",
            "pools",
            i,
            "kv_cache",
        )


def _check_one_cache(i: int, pool: _SharingPool, other: _SharingPool, total: float) -> None:
    """Raise ErrorAt if two pools take more than one KV cache, or differ in the memory of their process."""
    if total > 1 + _ROUNDING:
        raise ErrorAt(
            f"shares of {other.name} and {pool.name} come to {total:g}, more than all", "pools", i, "share", "kv_cache"
        )
    if pool.kv_cache.memory_utilization != other.kv_cache.memory_utilization:
        raise ErrorAt(
            f"{other.name} and {pool.name} are one process; give them the same memory_utilization",
            "pools",
            i,
            "kv_cache",
            "memory_utilization",
        )
