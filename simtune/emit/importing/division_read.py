"""Processors that SGLang gives to prompts and decodes (`--enable-pdmux`), read as two pools on the same GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simtune.emit.importing.launches import Given, switch
from simtune.emit.importing.pool_draft import PoolDraft
from simtune.emit.multiplexed import Division
from simtune.specs.hardware import Device
from simtune.specs.plan import IN_PLACE
from simtune.specs.pool import Pool

CHANGES = "how many processors prompts and decodes have as the number of decodes changes; give one of manual_divisions"


def read(draft: PoolDraft, by_name: Mapping[str, Given]) -> tuple[int, int] | None:
    """Return the processors of the streams of a server; None if it does not divide them, or if SGLang would choose
    among several divisions."""
    if "enable-pdmux" not in by_name or not switch(by_name["enable-pdmux"]):
        return None
    option = by_name.get("pdmux-config-path", by_name["enable-pdmux"])
    config: Any = option.value
    divisions = config.get("manual_divisions") if isinstance(config, dict) else None
    if not isinstance(divisions, list) or len(divisions) != 1:
        draft.refuse(option, CHANGES)
        return None
    (division,) = divisions
    if not isinstance(division, list) or [type(number) for number in division] != [int, int, int]:
        raise_at = "manual_divisions must be lists of three numbers: processors for prompts, for decodes, decodes"
        draft.problems.append(option.problem(raise_at))
        return None
    return division[0], division[1]


def pools_of(pool: dict[str, Any], division: tuple[int, int] | None, device: Device) -> list[dict[str, Any]]:
    """Return the prefill and the decode pool of a server that divides the processors of a device; the pool alone if it
    does not."""
    if division is None:
        return [pool]
    shares = Division(*division).shares(device)
    pools = []
    for role, share in zip(("prefill", "decode"), shares, strict=True):
        of_role: dict[str, Any] = {"processors": share, "bandwidth": share, "kv_cache": share}
        if role == "decode":
            of_role["beside"] = "prefill"
        settings = {**pool, "name": role, "role": role, "share": of_role}
        pools.append({key: settings[key] for key in Pool.model_fields if key in settings})
    return pools


def link() -> dict[str, Any]:
    """Return the link between the two pools."""
    return IN_PLACE.model_dump(exclude_unset=True)
