"""A trace as a file that can be read again: CSV, or JSON lines if prompts share something or are turns."""

from __future__ import annotations

import json
from typing import Any

from simtune.errors import UsageError
from simtune.specs.traces import Trace

SUFFIXES = (".csv", ".jsonl")


def trace_text(trace: Trace, name: str) -> str:
    """Return the text of a file of this name. Raises UsageError if a file with this ending cannot contain the trace."""
    columns: dict[str, list[Any]] = {}
    if trace.arrival_s is not None:
        columns["arrival_s"] = [round(x, 9) for x in trace.arrival_s.tolist()]
    columns |= {"prompt_tokens": trace.prompt_tokens.tolist(), "output_tokens": trace.output_tokens.tolist()}
    if name.endswith(".csv"):
        if trace.hash_ids is not None or trace.session is not None:
            raise UsageError(f"{name}: this trace says what its prompts share; end the name in .jsonl")
        rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        return "\n".join(rows) + "\n"
    if not name.endswith(".jsonl"):
        raise UsageError(f"{name}: end the name in .csv or .jsonl")
    if trace.session is not None:
        columns["session"] = trace.session.tolist()
    if trace.turns is not None:
        columns["after"] = [list(after) for after in trace.turns.after]
        columns["pause_s"] = [round(x, 9) for x in trace.turns.pause_s.tolist()]
    if trace.hash_ids is not None:
        columns["hash_ids"] = [list(row) for row in trace.hash_ids]
        columns["block_tokens"] = [trace.block_tokens] * len(trace)
    return "".join(
        json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True)
    )
