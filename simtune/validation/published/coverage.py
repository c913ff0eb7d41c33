"""Settings of an entry without a source: which no input covers, and which can change the gain at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simtune.errors import SpecError, UsageError
from simtune.specs.setting_paths import covered
from simtune.specs.systems import PublishedSystem, Systems

LENGTH = "pool.max_model_len"
DRAWS = "workload.requests"
HARDWARE = "hardware"
"""Last key of a device: neutral if the gain is the same on three cards."""
CUT = "max_tokens"
"""Last key of a length: where its longest draws are cut."""
NEUTRAL: dict[str, str] = {
    LENGTH: "room for the longest request: it rejects longer ones, and no more",
    "pool.batching.max_num_seqs": "seats, if there are more than requests at a time",
    "pool.batching.max_num_batched_tokens": "room for the prompts of a step, if they fit",
    "pool.parallelism.tp": "room for the weights, if tokens are counted",
    "pool.kv_cache.prefix_caching": "on by default in engines, and idle without prompts in common",
    DRAWS: "the number of draws: more of them only reduce the error",
}
"""Settings that may be neutral, and why.

They are if both sides have the same, and for a gain that stays the same when they are doubled, or switched the other
way; `pool.max_model_len` also if the model or the memory has no room for twice as much, and `workload.requests` if the
gain stays in the band. Lengths may be neutral in `max_tokens`, which is doubled with `pool.max_model_len`.
"""
SAME = 0.01
"""Relative difference up to which a gain is the same."""

Sides = Mapping[str, Mapping[str, Any]]


def without_source(family: Systems, system: PublishedSystem) -> tuple[str, ...]:
    """Return the paths of the settings that no input covers, neither one that has a source nor an assumed one that is
    varied. An entry with an assumed input that decides is assumed anyway.
    """
    covers = [path for item in system.inputs for path in item.covers]
    varied = {setting for item in system.inputs for setting in family.varied_settings(system, item)}
    settings = family.settings(system) - varied
    return tuple(sorted({setting.path for setting in settings if not covered(setting.path, covers)}))


def differing(family: Systems, system: PublishedSystem) -> set[str]:
    """Return the paths of the settings that a base has otherwise than the variant, or not at all."""
    sides = {name: {s[1:] for s in family.settings(system) if s.side == name} for name in family.sides(system)}
    return {path for path, _ in sides["variant"] ^ sides.get("base", sides["variant"])}


def decisive(
    paths: Sequence[str],
    sides: Sides,
    gain: float,
    gain_of: Callable[[Sides], float],
    inside: Callable[[float], bool],
) -> tuple[str, ...]:
    """Return the paths that are not neutral; see `NEUTRAL`.

    `gain_of` returns the gain between two sides, 0 if one of them does not fit; `inside` is true of gains in the band.
    """

    def neutral(path: str) -> bool:
        is_cut = path.startswith("workload.") and path.endswith(f".{CUT}")
        if path not in NEUTRAL and not is_cut:
            return False
        together = (path, LENGTH) if is_cut else (path,)
        try:
            changed_gain = gain_of({name: doubled(side, together) for name, side in sides.items()})
        except (UsageError, SpecError):
            changed_gain = 0.0
        if path == DRAWS:
            return inside(changed_gain)
        return abs(changed_gain / gain - 1) <= SAME or (path == LENGTH and not changed_gain)

    return tuple(path for path in paths if not neutral(path))


def doubled(side: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return a side with settings doubled, or switched the other way, in its phases and alternatives too."""
    result = dict(side)
    for path in paths:
        keys = path.split(".")
        result = _doubled(result, keys)
        if keys[0] == "pool":
            result |= {
                key: [_doubled(fields, keys[1:]) for fields in result[key]]
                for key in ("pools", "best_of")
                if key in result
            }
    if "phases" in result:
        result["phases"] = [{**phase, "setup": doubled(phase.get("setup", {}), paths)} for phase in result["phases"]]
    return result


def _doubled(settings: Any, keys: Sequence[str]) -> Any:
    if not keys:
        return not settings if isinstance(settings, bool) else 2 * settings
    if isinstance(settings, list | tuple):
        return [_doubled(item, keys) for item in settings]
    if not isinstance(settings, Mapping) or keys[0] not in settings:
        return settings
    return {**settings, keys[0]: _doubled(settings[keys[0]], keys[1:])}
