"""A trace as a file that can be read again: CSV, or JSON lines if prompts share something or are turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from simtune.errors import UsageError
from simtune.specs.trace_media import media_cells, media_entries
from simtune.specs.traces import MAX_HASH_ID, Trace

SUFFIXES = (".csv", ".jsonl")


def trace_text(trace: Trace, name: str) -> str:
    """Return the text of a file of this name. Raises UsageError if a file with this ending cannot contain the trace."""
    if name.endswith(".csv"):
        if trace.hash_ids is not None or trace.session is not None:
            raise UsageError(f"{name}: this trace says what its prompts share; end the name in .jsonl")
        cells = {} if trace.media is None else media_cells(trace.media)
        if cells is None:
            raise UsageError(
                f"{name}: this trace says how videos are sampled or that their sound is read, has items within the "
                "text, or names with spaces; end the name in .jsonl"
            )
        columns = _requests(trace) | cells
        rows = (",".join("" if x is None else str(x) for x in row) for row in zip(*columns.values(), strict=True))
        return "\n".join([",".join(columns), *rows]) + "\n"
    if not name.endswith(".jsonl"):
        raise UsageError(f"{name}: end the name in .csv or .jsonl")
    columns = _requests(trace) | _shared(trace) | ({} if trace.media is None else media_entries(trace.media))
    return "".join(
        json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True)
    )


def written_names(rows: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the names of the blocks of each prompt as `hash_ids` of a file.

    Names stay as they are unless one of them exceeds `MAX_HASH_ID`, the most that a file may have; then all names are
    numbered from 0 in order of appearance: equal names stay equal, and the first rows have the same numbers whatever
    rows follow. Names of blocks with images, videos or recordings are digests, which exceed it.
    """
    names = [list(row) for row in rows]
    if max((max(row, default=0) for row in names), default=0) <= MAX_HASH_ID:
        return names
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(name, len(numbers)) for name in row] for row in names]


def _requests(trace: Trace) -> dict[str, list[Any]]:
    """Return what each request is by itself, as columns."""
    columns: dict[str, list[Any]] = {}
    if trace.arrival_s is not None:
        columns["arrival_s"] = [round(x, 9) for x in trace.arrival_s.tolist()]
    columns |= {"prompt_tokens": trace.prompt_tokens.tolist(), "output_tokens": trace.output_tokens.tolist()}
    if trace.adapter is not None:
        columns["adapter"] = [None if number < 0 else f"adapter-{number}" for number in trace.adapter.tolist()]
    if trace.num_images is not None:
        columns["num_images"] = trace.num_images.tolist()
    return columns


def _shared(trace: Trace) -> dict[str, list[Any]]:
    """Return what requests have in common with others, as columns."""
    columns: dict[str, list[Any]] = {}
    if trace.session is not None:
        columns["session"] = trace.session.tolist()
    if trace.turns is not None:
        columns["after"] = [list(after) for after in trace.turns.after]
        columns["pause_s"] = [round(x, 9) for x in trace.turns.pause_s.tolist()]
    if trace.hash_ids is not None:
        columns["hash_ids"] = written_names(trace.hash_ids)
        columns["block_tokens"] = [trace.block_tokens] * len(trace)
    return columns
