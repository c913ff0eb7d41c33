"""Measurements of an engine under a load, request by request, by its client or by the engine itself.

All sources share this format: the load client, engines in process and files of other tools; the judges read it. Its own
file is JSON lines: a header (`schema: simtune/measured@1`), then one line per request in order of arrival.

TTFT is first token - sent, E2EL finish - sent, TPOT (finish - first token) / (output tokens - 1), undefined for answers
of one token, ITL the time between messages that carried tokens: what came together counts as one, as in a simulation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError, model_validator

from simtune.arrays import Array, Ints, Mask
from simtune.errors import Problem, SpecError
from simtune.specs.base import Count, NonNegative, Record, Seconds, Seq, Share
from simtune.specs.input_files import parse_json, read_text

Label = Annotated[str, Field(max_length=100, pattern=r"^[^/\\\x00-\x1f.][^/\\\x00-\x1f]*$")]
"""Name of a load that can be the beginning of a file's name: not hidden, in no other folder."""

MEASURED_SCHEMA: Literal["simtune/measured@1"] = "simtune/measured@1"
R = TypeVar("R", bound=Record)

MAX_SHOWN = 10
"""Number of problems of one file that are reported in full."""

Clock = Literal["wall", "cpu"]
MeasuredMetric = Literal["ttft", "tpot", "itl", "e2el"]
MEASURED_METRICS: tuple[MeasuredMetric, ...] = ("ttft", "tpot", "itl", "e2el")


class MeasuredRequest(Record):
    """A request. Times are seconds since the run began; null if the event did not happen or was not recorded."""

    request: int = Field(ge=0, description="its number in the stream of requests")
    due_s: Seconds | None = Field(description="when it should be sent; null in a closed loop")
    sent_s: Seconds = Field(description="when it was sent, or came to an engine in process")
    first_token_s: Seconds | None
    finish_s: Seconds | None
    prompt_tokens: Count
    output_tokens: int = Field(ge=0, description="that came")
    times_s: Seq[Seconds] | None = Field(None, description="of every message that carried tokens")
    error: str | None = Field(None, description="why it was not answered to the end")


class EngineFacts(Record):
    """Facts about the engine, as far as it reports them."""

    engine: str = Field(description="vllm, transformers, torch, or the name another tool gives")
    version: str | None = None
    model: str | None = None
    device: str | None = None


class QueueSamples(Record):
    """Number of running and waiting requests that the engine reported, over time."""

    t_s: Seq[NonNegative]
    running: Seq[NonNegative]
    waiting: Seq[NonNegative]


class MeasuredDrafts(Record):
    """Results of drafting, as an engine counts them."""

    rounds: Count = Field(description="verifications of one request")
    draft_tokens: int = Field(ge=0)
    accepted_tokens: int = Field(ge=0)


class Lateness(Record):
    """Lateness of the client itself, in seconds: requests against their times, its event loop against its timers."""

    send_p50_s: NonNegative
    send_p99_s: NonNegative
    send_max_s: NonNegative
    loop_p99_s: NonNegative
    loop_max_s: NonNegative

    @property
    def p99_s(self) -> float:
        """The larger of both p99 values."""
        return max(self.send_p99_s, self.loop_p99_s)


class MeasuredFacts(Record):
    """Facts about a whole run: the header of its file."""

    schema_id: Literal["simtune/measured@1"] = Field(MEASURED_SCHEMA, alias="schema")
    label: Label = Field(description="of the load, e.g. light; it names files too")
    engine: EngineFacts
    clock: Clock = Field("wall", description="cpu: times are those of the engine's own processor time")
    source: str | None = Field(None, description="the tool and file it was read from")
    preemptions: int | None = Field(None, ge=0)
    prefix_hit_rate: Share | None = None
    drafts: MeasuredDrafts | None = None
    queues: QueueSamples | None = None
    lateness: Lateness | None = Field(None, description="null where the engine was fed in process")

    @model_validator(mode="before")
    @classmethod
    def _schema_is_said(cls, data: object) -> object:
        """Add the schema, so that the file contains it even if it was not passed."""
        return {"schema": MEASURED_SCHEMA, **data} if isinstance(data, dict) and "schema_id" not in data else data


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A load on an engine: facts, and columns over its requests in order of arrival; NaN if there is no value."""

    facts: MeasuredFacts
    requests: tuple[MeasuredRequest, ...]

    @cached_property
    def sent_s(self) -> Array:
        """Time at which each request was sent, in seconds."""
        return np.array([r.sent_s for r in self.requests], dtype=np.float64)

    @cached_property
    def first_token_s(self) -> Array:
        """Time of the first token of each request."""
        return _column([r.first_token_s for r in self.requests])

    @cached_property
    def finish_s(self) -> Array:
        """Time of the last token of each request."""
        return _column([r.finish_s for r in self.requests])

    @cached_property
    def prompt_tokens(self) -> Ints:
        """Prompt tokens that were sent."""
        return np.array([r.prompt_tokens for r in self.requests], dtype=np.int64)

    @cached_property
    def output_tokens(self) -> Ints:
        """Output tokens that arrived."""
        return np.array([r.output_tokens for r in self.requests], dtype=np.int64)

    @cached_property
    def completed(self) -> Mask:
        """Mask of the requests that were answered to the end."""
        return np.array([r.error is None and r.finish_s is not None for r in self.requests], dtype=np.bool_)

    @property
    def failed(self) -> list[MeasuredRequest]:
        """Requests with an error."""
        return [r for r in self.requests if r.error is not None]

    @cached_property
    def ttft_s(self) -> Array:
        """Time to first token, in seconds."""
        return self.first_token_s - self.sent_s

    @cached_property
    def e2el_s(self) -> Array:
        """Seconds from sending to the last token."""
        return self.finish_s - self.sent_s

    @cached_property
    def tpot_s(self) -> Array:
        """Mean time per token after the first; NaN for outputs of one token."""
        gaps = self.output_tokens - 1.0
        tpot = np.full(len(gaps), np.nan)
        np.divide(self.finish_s - self.first_token_s, gaps, out=tpot, where=gaps > 0)
        return tpot

    @cached_property
    def itl_s(self) -> Array:
        """Times between messages that carried tokens, of all completed requests together; empty if not recorded."""
        gaps = [
            np.diff(r.times_s) for r, ended in zip(self.requests, self.completed, strict=True) if ended and r.times_s
        ]
        return np.concatenate(gaps) if gaps else np.zeros(0)

    def values(self, metric: MeasuredMetric) -> Array:
        """Return finite values of one of MEASURED_METRICS, of the requests that were answered to the end."""
        if metric == "itl":
            return self.itl_s
        column: Array = getattr(self, metric + "_s")
        return column[self.completed & np.isfinite(column)]

    def statistic(self, metric: MeasuredMetric, statistic: str) -> float | None:
        """Return `mean` or a percentile such as `p99`; None if there is no value."""
        values = self.values(metric)
        if not len(values):
            return None
        return float(values.mean() if statistic == "mean" else np.percentile(values, float(statistic[1:])))

    @property
    def duration_s(self) -> float:
        """Seconds from the first request sent to the last finished; 0 if none finished."""
        if not self.completed.any():
            return 0.0
        return float(np.nanmax(self.finish_s[self.completed]) - self.sent_s.min())

    @property
    def request_throughput_rps(self) -> float | None:
        """Requests answered to the end per second; None if the run has no duration."""
        return float(self.completed.sum()) / self.duration_s if self.duration_s > 0 else None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens per second of the requests that were answered to the end; None if the run has no duration."""
        return float(self.output_tokens[self.completed].sum()) / self.duration_s if self.duration_s > 0 else None

    def to_text(self) -> str:
        """Return the text of the file of this run."""
        rows = (self.facts.to_data(), *(r.to_data() for r in self.requests))
        return "".join(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n" for row in rows)


def _column(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def read_measured(path: Path) -> MeasuredRun:
    """Read a run in simtune's own format.

    Raise UsageError if the file cannot be read, and SpecError with line, key and rule of what is wrong in it.
    """
    lines = [(i, line) for i, line in enumerate(read_text(path).splitlines(), start=1) if line.strip()]
    problems: list[Problem] = []
    if not lines:
        raise SpecError(Problem(str(path), "the file is empty; a measured run has a header and a line per request"))
    facts = _line(MeasuredFacts, str(path), *lines[0], problems)
    if problems:
        raise SpecError(problems[:MAX_SHOWN])
    rows = [_line(MeasuredRequest, str(path), *line, problems) for line in lines[1:]]
    if not rows:
        problems.append(Problem(str(path), "has no requests", "", len(lines)))
    if len(problems) > MAX_SHOWN:
        problems[MAX_SHOWN:] = [Problem(str(path), f"and {len(problems) - MAX_SHOWN} more like these")]
    if problems or facts is None:
        raise SpecError(problems)
    return MeasuredRun(facts, tuple(row for row in rows if row is not None))


def _line(kind: type[R], file: str, number: int, text: str, problems: list[Problem]) -> R | None:
    try:
        return kind.model_validate(parse_json(text))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = ".".join(str(part) for part in item["loc"])
            problems.append(Problem(file, str(item["msg"]), key, number))
    except ValueError as error:
        problems.append(Problem(file, f"not JSON ({error}); the file may be cut off", "", number))
    return None
