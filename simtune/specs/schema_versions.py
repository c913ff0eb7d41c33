"""Versions of the files that simtune reads: what is wrong with a `schema`, and what to do about it."""

from __future__ import annotations

import re
from typing import Any

REDO = "do the run again"
"""Remedy for a file of a run."""

REWRITE = "write @1, and mend what `simtune check` then names"
"""Remedy for a file that a person wrote; all of these are at version 1."""


def schema_problem(schema: Any, wanted: str, remedy: str) -> str:
    """Return what is wrong with the `schema` of a file, for a message.

    Args:
        schema: what the file states; None if it states nothing.
        wanted: the version that this simtune reads, such as simtune/plan@1.
        remedy: what else than an upgrade makes a file of the wanted version, in words.
    """
    kind, _, version = wanted.rpartition("@")
    number = re.fullmatch(re.escape(kind) + r"@(\d{1,9})", str(schema))
    if number is None:
        return f"must be {wanted}" + ("" if schema is None else f", found {schema!r}")
    if int(number[1]) > int(version):
        return f"is {schema}, of a newer simtune; this one reads {wanted}: upgrade simtune, or {remedy}"
    return f"is {schema}, of an older simtune; this one reads {wanted}: {remedy}"
