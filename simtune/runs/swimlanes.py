"""Steps of every engine core over time, and the lives of requests, from which the timeline of a report is drawn.

`swimlanes.json.gz` contains as much as a page can show. If there are more steps than `MOST_SPANS`, neighbours are one
span, with the time that went to each kind of step and the least and most of what was counted; nothing is averaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from simtune.arrays import Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.outcome import Outcome
from simtune.results.recorded_steps import RecordedSteps
from simtune.results.result import Result
from simtune.runs.files import packed
from simtune.specs.base import Record, Seq

SWIMLANES_SCHEMA: Literal["simtune/swimlanes@1"] = "simtune/swimlanes@1"
SWIMLANES = "swimlanes.json.gz"
MOST_SPANS = 100_000
"""Most spans of all cores together."""
MOST_LIVES = 2_000
"""Most requests whose lives are kept: the slowest tenth of this number, the others evenly spread over the run."""
KINDS = ("prefill", "mixed", "draft", "decode")
"""Kinds of steps: prompts alone, prompts beside decodes, decodes that verify drafts, and decodes."""
COUNTED = ("running", "waiting", "free_blocks")


class CoreLane(Record):
    """The spans of one engine core, in order and apart from each other; between them it is idle."""

    instance: str = Field(description="pool and number")
    core: int = Field(description="virtual engine of the instance")
    blocks: int = Field(description="size of its KV cache")
    start_us: Seq[int] = Field(description="of the first span; of each later one the time since the start before")
    length_us: Seq[int]
    steps: Seq[int] = Field(description="engine steps in the span")
    prefill_us: Seq[int] = Field(description="time of steps with prompts alone")
    mixed_us: Seq[int] = Field(description="time of steps with prompts and decodes")
    draft_us: Seq[int] = Field(description="time of steps that verify drafts")
    decode_us: Seq[int] = Field(description="time of steps that only decode")
    running_low: Seq[int] = Field(description="requests, least of the span's steps")
    running_high: Seq[int]
    waiting_low: Seq[int]
    waiting_high: Seq[int]
    free_blocks_low: Seq[int] = Field(description="KV blocks")
    free_blocks_high: Seq[int]
    transfer_us: Seq[Seq[int]] = Field(
        description="(from, to) where KV caches come to this core; nearer ones are joined"
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        lengths = {len(getattr(self, name)) for name in (*_SPAN_COLUMNS, "start_us")}
        if len(lengths) > 1:
            raise ValueError("all columns of a swimlane must be equally long")
        return self

    def share(self, kind: str, duration_us: int) -> float:
        """Share of the run that went to steps of a kind."""
        return float(sum(getattr(self, f"{kind}_us"))) / duration_us if duration_us else 0.0


_SPAN_COLUMNS = (
    "length_us", "steps", *(f"{kind}_us" for kind in KINDS),
    *(f"{what}_{end}" for what in COUNTED for end in ("low", "high")),
)  # fmt: skip


class RequestLife(Record):
    """Life of a request; times from the start of the run, null for an event that never happened."""

    request: int
    prompt_tokens: int
    output_tokens: int
    swimlane: int | None = Field(description="number of the swimlane on which it was answered")
    arrival_us: int
    scheduled_us: int | None
    first_token_us: int | None
    transferred_us: int | None
    finish_us: int | None
    preempted_us: Seq[int] = Field(description="when it lost its seat")
    chunks: Seq[Seq[int]] = Field(description="(swimlane, start, length, tokens) of the steps that computed its prompt")


class Swimlanes(Record):
    """`swimlanes.json.gz`."""

    schema_id: Literal["simtune/swimlanes@1"] = Field(alias="schema")
    duration_us: int
    steps: int = Field(description="that were simulated")
    steps_per_span: int = Field(description="jumps that one span stands for, at most")
    requests: int = Field(description="that were simulated")
    swimlanes: Seq[CoreLane]
    lives: Seq[RequestLife]

    def to_bytes(self) -> bytes:
        """The file; the same bytes for the same swimlanes."""
        return self._packed

    @cached_property
    def _packed(self) -> bytes:
        # A run writes it as a file and puts it into its report.
        text = json.dumps(self.to_data(), separators=(",", ":"), sort_keys=True, allow_nan=False)
        return packed([text])


def swimlanes_of(result: Result, most_spans: int = MOST_SPANS, most_lives: int = MOST_LIVES) -> Swimlanes | None:
    """Return the swimlanes of a simulation that recorded its steps; None for one that did not."""
    outcome = result.outcome
    if not outcome.records:
        return None
    records = outcome.records
    together = -(-len(records) // most_spans)
    duration = max(int(_us(int(records.column("end").max()))), 1)
    swimlanes = [
        CoreLane(
            instance=f"{core.pool} {core.instance}",
            core=core.virtual_engine,
            blocks=core.blocks,
            transfer_us=_transfers(outcome, number, duration),
            **_spans(records, np.flatnonzero(records.column("core") == number), together),
        )
        for number, core in enumerate(outcome.cores)
    ]
    return Swimlanes(
        schema_id=SWIMLANES_SCHEMA,
        duration_us=duration,
        steps=outcome.steps,
        steps_per_span=together,
        requests=len(result.stream),
        swimlanes=tuple(swimlanes),
        lives=_lives(result, _kept(result, most_lives)),
    )


def _us(ticks: int | Ints) -> Ints:
    """Microseconds, rounded."""
    return np.rint(np.asarray(ticks) * (1e6 / TICKS_PER_SECOND)).astype(np.int64)


def _spans(records: RecordedSteps, here: Ints, together: int) -> dict[str, tuple[int, ...]]:
    """Return the columns of the swimlane of the jumps `here`, each row for `together` of them."""
    if not len(here):
        return dict.fromkeys((*_SPAN_COLUMNS, "start_us"), ())

    def column(name: str) -> Ints:
        return records.column(name)[here]

    start, end, steps = _us(column("start")), _us(column("end")), column("steps")
    prompts, decodes = column("prefill_tokens") > 0, column("num_decodes") > 0
    drafts, first = column("draft_tokens") > 0, np.arange(0, len(here), together)
    is_kind = {"prefill": prompts & ~decodes, "mixed": prompts & decodes, "draft": ~prompts & drafts}
    is_kind["decode"] = ~prompts & ~drafts
    spent = end - start
    begins = start[first]
    columns = {
        "start_us": np.diff(begins, prepend=0),
        "length_us": end[np.minimum(first + together, len(here)) - 1] - begins,
        "steps": np.add.reduceat(steps, first),
    }
    columns |= {f"{kind}_us": np.add.reduceat(np.where(of_kind, spent, 0), first) for kind, of_kind in is_kind.items()}
    for counter in COUNTED:
        values = column(counter)
        columns[f"{counter}_low"] = np.minimum.reduceat(values, first)
        columns[f"{counter}_high"] = np.maximum.reduceat(values, first)
    return {name: tuple(column.tolist()) for name, column in columns.items()}


def _transfers(outcome: Outcome, core: int, duration_us: int) -> tuple[tuple[int, int], ...]:
    """Return the intervals in which KV caches arrive at a core; intervals that overlap, or are apart by less than a
    page can show, are joined.
    """
    sent = (outcome.transferred >= 0) & (outcome.core == core)
    begins, ends = _us(outcome.prompt_done[sent]), _us(outcome.transferred[sent])
    apart, joined = duration_us // 20_000, list[list[int]]()
    for at in np.argsort(begins, kind="stable"):
        begin, end = int(begins[at]), int(ends[at])
        if joined and begin <= joined[-1][1] + apart:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return tuple((begin, end) for begin, end in joined)


# --- requests ---------------------------------------------------------------------------------------------


def _kept(result: Result, most: int) -> list[int]:
    """The slowest, and others evenly spread; in order."""
    came = np.flatnonzero(result.outcome.arrival >= 0)
    if len(came) <= most:
        return [int(i) for i in came]
    # Requests that never finished count as the slowest.
    slow = np.nan_to_num(result.e2el_s[came], nan=np.inf)
    slowest = came[np.argsort(-slow, kind="stable")[: most // 10]]
    spread = came[np.linspace(0, len(came) - 1, most - len(slowest)).astype(np.int64)]
    return sorted({int(i) for i in (*slowest, *spread)})


def _lives(result: Result, kept: Iterable[int]) -> tuple[RequestLife, ...]:
    outcome, stream = result.outcome, result.stream
    chunks: dict[int, list[tuple[int, int, int, int]]] = {request: [] for request in kept}
    preempted: dict[int, list[int]] = {request: [] for request in chunks}
    records, requests = outcome.records, np.array(list(chunks), dtype=np.int64)
    start, end = _us(records.column("start")), _us(records.column("end"))
    computed, lost = records.chunks(), records.preempted()
    for jump, request, tokens in computed[np.isin(computed[:, 1], requests)].tolist():
        core, begin = int(records.column("core")[jump]), int(start[jump])
        chunks[request].append((core, begin, int(end[jump]) - begin, tokens))
    for jump, request in lost[np.isin(lost[:, 1], requests)].tolist():
        preempted[request].append(int(start[jump]))

    def at(column: Ints, request: int) -> int | None:
        return int(_us(column[request])) if column[request] >= 0 else None

    return tuple(
        RequestLife(
            request=i,
            prompt_tokens=int(stream.prompt_tokens[i]),
            output_tokens=int(stream.output_tokens[i]),
            swimlane=int(outcome.core[i]) if outcome.core[i] >= 0 else None,
            arrival_us=at(outcome.arrival, i) or 0,
            scheduled_us=at(outcome.scheduled, i),
            first_token_us=at(outcome.first_token, i),
            transferred_us=at(outcome.transferred, i),
            finish_us=at(outcome.finish, i),
            preempted_us=tuple(preempted[i]),
            chunks=tuple(chunks[i]),
        )
        for i in chunks
    )
