"""Release of an engine that a preset describes."""

from __future__ import annotations

import re

from simtune.specs.catalog import load_engine

ReleaseNumber = tuple[int, ...]


def release_of(engine: str | None, family: str, newest: ReleaseNumber) -> ReleaseNumber:
    """The numbers of an engine preset's release, by its name or file; the newest if none of the family is named, or its
    release is no number: files state whose names they have.

    Raises UsageError if there is no such preset.
    """
    if engine is None:
        return newest
    preset = load_engine(engine)
    numbers = re.search(r"\d+(\.\d+)+", preset.release)
    return tuple(map(int, numbers[0].split("."))) if preset.family == family and numbers else newest


def words(release: ReleaseNumber) -> str:
    """Return a release in words: its numbers joined by dots."""
    return ".".join(map(str, release))
