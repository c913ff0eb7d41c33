"""Readers of what load generators, gateways and collections of conversations write, recognised by content."""

from __future__ import annotations

import json
from typing import Any

from simtune.specs.trace_formats.benchmarks import AiPerf, GenAiPerf, GuideLlm, PerfSummary, VllmBench
from simtune.specs.trace_formats.log_rows import AS_IT_IS, LogReading, LogRequests, Problems, TraceFormat, cached_note
from simtune.specs.trace_formats.logs import SHARED_BLOCK_TOKENS, OpenAiLog, ShareGpt
from simtune.specs.trace_formats.otel import OtelSpans
from simtune.specs.trace_formats.strangers import binary_title, stranger
from simtune.specs.trace_formats.weka import Weka

FORMATS: tuple[TraceFormat, ...] = (
    PerfSummary(),
    VllmBench(),
    AiPerf(),
    GuideLlm(),
    GenAiPerf(),
    ShareGpt(),
    Weka(),
    OtelSpans(),
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
    """Return the format of a text of JSON, its objects and the lines they begin in; None for any other text, and if a
    line of several is damaged (which reading line by line then reports).
    """
    start = text.lstrip()
    if start[:1] not in ("{", "["):
        return None
    first, _, following = start.partition("\n")
    begin = text[: len(text) - len(start)].count("\n") + 1
    head = _parsed(first)
    is_one_object = head is None or not following.strip()
    if is_one_object:
        head = _parsed(text)
    form = None if head is None else next((f for f in FORMATS if f.recognises(head)), None)
    if form is None:
        return None
    if is_one_object:
        return form, [head], [begin]
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    objects = [_parsed(line) for _, line in lines]
    return None if any(x is None for x in objects) else (form, objects, [i for i, _ in lines])


def title_of(text: str) -> str | None:
    """Return the title of the format of a text; None if it is of none of the formats."""
    recognition = recognised(text)
    return None if recognition is None else recognition[0].title


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
