"""A load of the user's own for published systems, and the records of what each system gives on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field

from simtune.specs.base import Record, Seq
from simtune.specs.traces import Trace
from simtune.specs.workload import ClosedLoop, Workload
from simtune.workload.requests import RequestStream, build_stream

SCHEMA: Literal["simtune/own-gains@2"] = "simtune/own-gains@2"
ROUNDS = 3
"""Requests of each user of a closed loop."""


class OwnPoint(Record):
    """Gain at a number of users or a length of the prompts."""

    at: float
    gain: float | None = Field(description="null if a side does not fit")


class OwnInput(Record):
    """An assumed input, and the gains at the ends of what it could be."""

    what: str
    gains: Seq[float] = Field(description="0 if a side does not fit there")


class OwnGain(Record):
    """Gain of a published system on a load of the user's own, above 1 if the variant is better."""

    family: str
    system: str
    title: str
    metric: str | None = None
    base: float | None = None
    variant: float | None = None
    gain: float | None = None
    low: float | None = Field(
        None,
        description="low and high: the least and greatest gain over the ends of assumed inputs, each with the error of "
        "the run; low is 0 if the variant saturates",
    )
    high: float | None = Field(None, description="null if only the base saturates: no gain is too large then")
    error: float | None = Field(
        None, description="95 % error of the gain by the length of the run, or by the last step of the bisection"
    )
    requests: int | None = Field(None, description="requests of the runs")
    inputs: Seq[OwnInput] = ()
    not_varied: Seq[str] = Field((), description="assumed inputs that are not varied: the interval excludes them")
    tokens_per_round: float | None = Field(None, description="of the variant, if it drafts")
    pays_above_tokens_per_round: float | None = Field(None, description="the gain is 1 there, if rounds take as long")
    by_users: Seq[OwnPoint] = ()
    by_prompt_tokens: Seq[OwnPoint] = ()
    pays: Seq[str] = Field((), description="where it pays, in words")
    gpus: int | None = Field(None, description="of the variant")
    base_gpus: int | None = None
    needs: Seq[str] = Field((), description="parts that the variant needs and the base does not")
    engines: Seq[str] = Field((), description="engines that can be given the variant, by name")
    lacks: str | None = Field(None, description="why no engine can be given it")
    reason: str | None = Field(None, description="why there are no numbers, or a note on them")
    left_out: str | None = Field(None, description="kind of the reason if there are no numbers")


@dataclass(frozen=True)
class OwnLoad:
    """Model, hardware and load of the user."""

    model: str
    hardware: str
    workload: Workload
    trace: Trace | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    most_requests: int | None = None
    """Most requests of a run; those of the workload unless given."""
    detailed: bool = False
    """True if gains are followed over more numbers of users and lengths of prompts."""

    @property
    def limited(self) -> bool:
        """True if the highest rate within limits is measured, and not the latency at the load's own rate."""
        return self.ttft_s is not None or self.tpot_s is not None

    @property
    def requests(self) -> int:
        """Most requests of a run."""
        return min(self.workload.requests, self.most_requests or self.workload.requests)

    def stream(self, requests: int) -> RequestStream:
        """Return the first requests of the load."""
        return build_stream(self.workload, self.trace, requests=requests, seed=0)

    def of_users(self, users: int, scale: float = 1.0) -> RequestStream:
        """Return requests of the load's lengths in a closed loop, their prompts `scale` times as long."""
        load = self.workload.model_copy(update={"arrivals": ClosedLoop(users=users), "batch": False})
        stream = build_stream(load, self.trace, requests=ROUNDS * users, seed=0)
        if scale == 1.0:
            return stream
        prompts = np.maximum(1, np.rint(stream.prompt_tokens * scale)).astype(np.int64)
        return replace(stream, prompt_tokens=prompts)

    def metric(self) -> str:
        """Return what is measured, in words."""
        return "highest rate, requests/s" if self.limited else "mean E2EL, s"


class OwnGains(Record):
    """A file of gains on a load of the user's own."""

    schema_: Literal["simtune/own-gains@2"] = Field(SCHEMA, alias="schema")
    model: str
    hardware: str
    workload: str
    gains: Seq[OwnGain]

    @classmethod
    def of(cls, gains: Sequence[OwnGain], own: OwnLoad) -> OwnGains:
        """Return the gains of a run that has just been made."""
        return cls(
            schema_=SCHEMA, model=own.model, hardware=own.hardware, workload=own.workload.name, gains=tuple(gains)
        )
