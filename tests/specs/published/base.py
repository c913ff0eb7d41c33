"""A published config, and what is known of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INDEX = "checkpoint's index"
META = "transformers 5.24, on the meta device"


@dataclass(frozen=True)
class Published:
    """A config.json, and facts about its model."""

    config: dict[str, Any]
    parameters: float
    kv_bytes: float
    """Per token in the dtype of the cache, windows in full."""
    source: str
    layers: str
    """Runs of equal layers: count, attention and feed-forward."""
    formats: str = "bf16"
    """Formats of weights in general, then of modules that differ."""
    active: float | None = None
