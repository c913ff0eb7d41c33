"""Hashes of inputs by kind and name, for manifests and certificates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from simtune.specs.base import Spec


def sha256(text: str) -> str:
    """Return the sha256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def spec_sha256(spec: Spec) -> str:
    """Return the sha256 of a spec as it was understood: JSON of its data with sorted keys."""
    return sha256(json.dumps(spec.to_data(), sort_keys=True))


def numbered(hashes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return hashes by name; other contents under a name that is taken get a number: `hardware:h100 (2)`."""
    by_name: dict[str, str] = {}
    for name, value in hashes:
        key, number = name, 1
        # The same content under the same name is one input, however often it is named.
        while by_name.get(key, value) != value:
            number += 1
            key = f"{name} ({number})"
        by_name[key] = value
    return by_name
