"""Readers of what load generators, gateways and collections of conversations write, recognised by content."""

from __future__ import annotations

import json
from typing import Any

from simtune.specs.trace_formats.benchmarks import AiPerf, GenAiPerf, GuideLlm, PerfSummary, VllmBench
from simtune.specs.trace_formats.log_rows import AS_IT_IS, LogReading, LogRequests, Problems, TraceFormat, cached_note
from simtune.specs.trace_formats.logs import SHARED_BLOCK_TOKENS, OpenAiLog, ShareGpt
from simtune.specs.trace_formats.strangers import binary_title, stranger

FORMATS: tuple[TraceFormat, ...] = (
    PerfSummary(),
    VllmBench(),
    AiPerf(),
    GuideLlm(),
    GenAiPerf(),
    ShareGpt(),
    OpenAiLog(),
)
"""Tried in this order."""

__all__ = [
    "AS_IT_IS",
    "FORMATS",
    "SHARED_BLOCK_TOKENS",
    "LogReading",
    "LogRequests",
    "Problems",
    "TraceFormat",
    "binary_title",
    "cached_note",
    "recognised",
    "stranger",
    "title_of",
]


def recognised(text: str) -> tuple[TraceFormat, list[Any], list[int]] | None:
    """The format of a text of JSON, its objects and the lines they begin in; None for any other text, and where a line
    of several is damaged (which line by line reading then says).
    """
    start = text.lstrip()
    if start[:1] not in ("{", "["):
        return None
    first, _, rest = start.partition("\n")
    begin = text[: len(text) - len(start)].count("\n") + 1
    head = _parsed(first)
    whole = head is None or not rest.strip()
    if whole:
        head = _parsed(text)
    form = None if head is None else next((f for f in FORMATS if f.recognises(head)), None)
    if form is None:
        return None
    if whole:
        return form, [head], [begin]
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    objects = [_parsed(line) for _, line in lines]
    return None if any(x is None for x in objects) else (form, objects, [i for i, _ in lines])


def title_of(text: str) -> str | None:
    """What a text is called that is of one of the formats."""
    known = recognised(text)
    return None if known is None else known[0].title


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
