"""Rules that tell evidence from arithmetic: gains that are one of the settings, or the same on every card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simtune.specs.systems import merged
from simtune.validation.published.findings import CardGain

SAME = 0.05
"""Relative range of the gains on several cards up to which costs do not decide them."""
RESTATED = 0.005
"""Relative difference up to which a gain is a setting."""


def unchanged(cards: Sequence[CardGain]) -> bool:
    """True if a gain is the same on two cards or more."""
    gains = [card.gain for card in cards]
    return len(gains) > 1 and max(gains) <= min(gains) * (1 + SAME)


def restated(gain: float, sides: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the setting of the variant, other than in the base, that is the gain: as a factor, as the share that is
    left, or as the share that is spared. None if none is. A gain near 1 restates nothing.
    """
    if abs(gain - 1) <= RESTATED:
        return None
    base = dict(_numbers(sides.get("base", {})))
    for path, value in _numbers(sides["variant"]):
        factors = [value, 1 / value if value > 0 else 0.0, 1 / (1 - value) if value < 1 else 0.0]
        if base.get(path) != value and any(abs(factor / gain - 1) <= RESTATED for factor in factors):
            return f"{path} {value:g}"
    return None


def _numbers(settings: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of settings, by their paths."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(settings, list | tuple):
        for i, value in enumerate(settings):
            yield from _numbers(value, f"{path}[{i}]")
    elif isinstance(settings, int | float) and not isinstance(settings, bool):
        yield path, float(settings)


def batched(side: Mapping[str, Any], requests: int) -> dict[str, Any] | None:
    """Return a side of one request at a time with more of them; None if it has several, or phases of its own."""
    arrivals = side.get("workload", {}).get("arrivals", {})
    if "phases" in side or "branches" in side or "pools" in side:
        return None
    if side.get("step", {}).get("decodes") == 1:
        load: dict[str, Any] = {"step": {"decodes": requests}}
    elif "step" not in side and arrivals.get("kind", "closed_loop") == "closed_loop" and arrivals.get("users", 1) == 1:
        users = {"kind": "closed_loop", "users": requests}
        load = {"workload": {"arrivals": users, "requests": requests}}
    else:
        return None
    batching = side.get("pool", {}).get("batching", {})
    if batching.get("max_num_seqs", requests) < requests:
        load["pool"] = {"batching": {"max_num_seqs": requests}}
    return merged(side, load)
