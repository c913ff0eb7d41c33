"""A trace from columns in memory, and the load that replays a trace as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simtune.errors import UsageError
from simtune.specs.base import spec_name
from simtune.specs.traces import MOONCAKE_BLOCK_TOKENS, Trace, adapter_numbers
from simtune.specs.workload import MAX_TOKENS, TraceArrivals, TraceLengths, Workload

NAME = "<columns>"
REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("hash_ids", "block_tokens", "adapter")


def replay(trace: Trace, name: str) -> Workload:
    """The load that sends every request of a trace at its own time, under a name as near to `name` as can be."""
    return Workload(
        name=spec_name(name, "trace"),
        requests=trace.num_arrivals,
        arrivals=TraceArrivals(),
        prompt=TraceLengths(),
        output=TraceLengths(),
        trace=trace.file,
    )


def trace_of(columns: Mapping[str, Any]) -> Trace:
    """Make a trace of columns of one length: REQUIRED, and `hash_ids` (names of the prompt's blocks, of `block_tokens`
    tokens each) if prompts share something, `adapter` (name of each request's LoRA adapter, None for the base model).

    Raises UsageError if a column is missing, unknown, or contains values that a trace cannot have.
    """
    for name in REQUIRED:
        if name not in columns:
            raise UsageError(f"the columns of a trace lack {name}; needed are {', '.join(REQUIRED)}")
    for name in columns:
        if name not in (*REQUIRED, *OPTIONAL):
            raise UsageError(f"unknown trace column {name}; expected one of {', '.join((*REQUIRED, *OPTIONAL))}")
    arrival_s = _numbers(columns, "arrival_s").astype(np.float64)
    prompt, output = _tokens(columns, "prompt_tokens"), _tokens(columns, "output_tokens")
    hash_ids = columns.get("hash_ids")
    rows = None if hash_ids is None else _blocks(hash_ids)
    sizes = {"arrival_s": len(arrival_s), "prompt_tokens": len(prompt), "output_tokens": len(output)}
    adapter = columns.get("adapter")
    if rows is not None:
        sizes["hash_ids"] = len(rows)
    if adapter is not None:
        sizes["adapter"] = len(adapter)
    if len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UsageError(f"the columns of a trace must be of one length: {lengths}")
    if np.any(np.diff(arrival_s) < 0):
        raise UsageError("arrival_s must not fall; sort the requests by time")
    digest = hashlib.sha256(b"".join(column.tobytes() for column in (arrival_s, prompt, output)))
    digest.update(repr(rows).encode())
    if adapter is not None:
        adapter = adapter_numbers(adapter)
        digest.update(adapter.tobytes())
    since_first = arrival_s - arrival_s[0]
    for column in (since_first, prompt, output):
        column.flags.writeable = False
    block_tokens = int(columns.get("block_tokens", MOONCAKE_BLOCK_TOKENS))
    return Trace(NAME, digest.hexdigest(), since_first, prompt, output, rows, block_tokens, adapter=adapter)


def _numbers(columns: Mapping[str, Any], name: str) -> NDArray[Any]:
    """Return a column as an array; raise UsageError unless it contains finite numbers, at least one."""
    column = np.asarray(columns[name])
    if column.ndim != 1 or not len(column) or column.dtype.kind not in "iuf" or not np.isfinite(column).all():
        raise UsageError(f"{name} must be a column of finite numbers, at least one")
    return column


def _tokens(columns: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    """Return a column of lengths in tokens; raise UsageError for a length that is no whole number of 1 or more."""
    column = _numbers(columns, name)
    if np.any(column != np.floor(column)) or column.min() < 1 or column.max() > MAX_TOKENS:
        raise UsageError(f"{name} must be whole numbers of tokens from 1 to {MAX_TOKENS}")
    return column.astype(np.int64)


def _blocks(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(block) for block in row) for row in rows)
