"""Paths of settings: every number and choice of nested settings, by the keys that lead to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LABELS = ("name", "request_class")
"""Keys whose values refer to a part and set nothing."""


def leaves(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, value as JSON) of every number and choice.

    Entries of a list of mappings have the path of the list; a list of anything else is one setting. `kind` tells which
    keys are beside it and is a setting only where there are none.
    """
    for key, value in settings.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from leaves(value, at)
        elif isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                yield from leaves(item, at)
        elif key not in LABELS and (key != "kind" or len(settings) == 1):
            yield at, json.dumps(value)


def covered(path: str, covers: Sequence[str]) -> bool:
    """True if a path is one of `covers`, or below one."""
    return any(path == cover or path.startswith(f"{cover}.") for cover in covers)
