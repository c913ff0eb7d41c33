"""Engine and release that the name of a software means, as tables, profiles and presets write it."""

from __future__ import annotations

import re
from typing import get_args

from simtune.specs.preset import EngineFamily

Release = tuple[int, ...]

_BEGINNINGS: dict[str, EngineFamily] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
    "tensorrt-llm": "trtllm",
    "torch": "transformers",
}
assert set(_BEGINNINGS.values()) <= set(get_args(EngineFamily))

_RELEASE = re.compile(r"\d+(?:\.\d+)+(?:rc\d+)?")


def engine_of(software: str | None) -> EngineFamily | None:
    """Return the engine whose kernels a table or profile names; None if it names none that is known here."""
    lower = (software or "").lower()
    return next((family for word, family in _BEGINNINGS.items() if lower.startswith(word)), None)


def releases_in(text: str | None) -> tuple[Release, ...]:
    """Return the numbers of all releases in a text: (1, 2) and (1, 3) for `TensorRT-LLM 1.2 and 1.3`."""
    return tuple(tuple(map(int, re.findall(r"\d+", release))) for release in _RELEASE.findall(text or ""))


def release_text(software: str | None) -> str:
    """Return the release in a software's name as written, without what follows it; empty if it names none."""
    match = _RELEASE.search(software or "")
    return "" if match is None else match[0]


def release_of_software(software: str | None) -> Release:
    """Return the numbers of a release, (1, 3, 0, 23) for `TRTLLM 1.3.0rc23`; empty if the software names none."""
    return next(iter(releases_in(software)), ())
