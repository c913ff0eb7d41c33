"""Tiers below a prefix cache, from the options of engines that keep it in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simtune.emit.importing.launches import Given, real_number, switch, whole_number
from simtune.emit.importing.pool_draft import PoolDraft
from simtune.specs.cache_tiers import PUBLISHED_TIERS
from simtune.specs.preset import GIB

_WRITTEN = {"write_through": "computed", "write_back": "evicted"}
HICACHE = ("enable-hierarchical-cache", "hicache-ratio", "hicache-size", "hicache-write-policy")
"""Options of SGLang that are read together."""


def read_vllm(draft: PoolDraft, option: Given) -> None:
    """Read --kv-offloading-size, in GiB of all ranks together; requests load ahead of their admission."""
    _set_host(draft, {"bytes": real_number(option) * GIB, "fetched": "ahead"})


def read_trtllm(draft: PoolDraft, option: Given) -> None:
    """Read host_cache_size of kv_cache_config, in bytes of each rank; blocks go there as they are evicted."""
    size = whole_number(option)
    if size:
        _set_host(draft, {"bytes_per_device": float(size), "written": "evicted"})


def read_sglang(draft: PoolDraft, by_name: Mapping[str, Given]) -> None:
    """Read HiCache, on if asked for: its size in GB of each rank, or over that of the device's pool."""
    switched = by_name.get("enable-hierarchical-cache")
    if switched is None or not switch(switched):
        for name in HICACHE[1:]:
            if name in by_name:
                draft.ignore(by_name[name], "there is no hierarchical cache without enable-hierarchical-cache")
        return
    (tier,) = PUBLISHED_TIERS["hicache"]
    size: dict[str, Any] = {"device_ratio": tier["device_ratio"]}
    if "hicache-ratio" in by_name:
        size = {"device_ratio": real_number(by_name["hicache-ratio"])}
    if "hicache-size" in by_name and (gigabytes := whole_number(by_name["hicache-size"])):
        size = {"bytes_per_device": gigabytes * 1e9}
    policy = by_name.get("hicache-write-policy")
    if policy is not None and str(policy.value) not in _WRITTEN:
        draft.refuse(policy, "what is written to the tier in host memory")
    elif policy is not None:
        size["written"] = _WRITTEN[str(policy.value)]
    _set_host(draft, {**size, "fetched": tier["fetched"]})


def _set_host(draft: PoolDraft, settings: Mapping[str, Any]) -> None:
    draft.set("kv_cache.tiers", [{"name": "host", **settings}])
    draft.assume("keys and values come back from host memory at the rate of the hardware's link to it")
