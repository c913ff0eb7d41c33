"""Release of an engine that a preset describes."""

from __future__ import annotations

import os
import re
from functools import lru_cache

from simtune.specs.catalog import load_engine
from simtune.specs.preset import EnginePreset
from simtune.specs.references import is_path

ReleaseNumber = tuple[int, ...]


def release_of(engine: str | None, family: str, newest: ReleaseNumber) -> ReleaseNumber:
    """The numbers of an engine preset's release, by its name or file; the newest if none of the family is named, or its
    release is no number: files state whose names they have.

    Raises UsageError if there is no such preset.
    """
    if engine is None:
        return newest
    preset = load_engine(engine) if is_path(engine) else _named(engine, os.environ.get("SIMTUNE_PATH", ""))
    numbers = re.search(r"\d+(\.\d+)+", preset.release)
    return tuple(map(int, numbers[0].split("."))) if preset.family == family and numbers else newest


@lru_cache(maxsize=64)
def _named(engine: str, path: str) -> EnginePreset:
    """Return a preset by its name. `path` is where presets are looked for: a report asks for every plan that was
    simulated."""
    return load_engine(engine)


def words(release: ReleaseNumber) -> str:
    """Return a release in words: its numbers joined by dots."""
    return ".".join(map(str, release))
