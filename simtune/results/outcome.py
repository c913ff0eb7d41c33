"""What a simulated world leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.engine import Tally
from simtune.results.recorded_steps import RecordedSteps

Ticks = NDArray[np.int64]


class SampledStep(NamedTuple):
    """What a step worked on; `ticks` of a core's busy time are taken to have gone to steps like it."""

    ticks: int
    num_decodes: int
    context_tokens: int
    """KV tokens that the decodes read."""
    verify_tokens: int
    """Tokens that the decodes compute, drafts included."""
    num_samples: int
    """Sequences that get a token."""
    chunks: tuple[tuple[int, int], ...]
    """(past tokens, new tokens) of prefill chunks."""


class EngineCoreUse(NamedTuple):
    """What became of a core."""

    pool: str
    instance: int
    virtual_engine: int
    blocks: int
    """Size of its KV cache."""
    busy: int
    """Ticks spent in steps."""
    drafting: Tally = Tally()
    """What its verifications came to, where it drafts."""
    queried_tokens: int = 0
    """Prompt tokens looked for in its prefix cache."""
    hit_tokens: int = 0
    """How many of them were there."""
    sampled: tuple[SampledStep, ...] = ()
    """Some of its steps, evenly spaced in its busy time."""
    most_tokens: int = 0
    """Of a step with prefill chunks."""


@dataclass(slots=True)
class Outcome:
    """What happened to every request, as columns in order of request number; times in ticks, -1 where it never came."""

    arrival: Ticks
    scheduled: Ticks
    first_token: Ticks
    finish: Ticks
    core: Ticks
    """Where it was answered; with prefill and decode apart, where it was decoded."""
    preemptions: Ticks
    waiting_at_arrival: Ticks
    """Requests waiting in the whole deployment when this one arrived, itself not counted."""
    transferred: Ticks
    """When its KV cache had come to the decode instance for the first time (of a request that was lost before its first
    token, for the last time); -1 where nothing was sent."""
    prefilled: Ticks
    """When its prompt was done at the prefill instance, if a decode instance delivers the first token; otherwise -1."""
    family_begin: Ticks
    """When each family of a request graph arrived; empty without a graph."""
    family_end: Ticks
    """When its last node was over."""
    resent: Ticks
    """How often it was sent again because an instance failed; those that waited at one that left are not counted."""
    refused: int
    """Requests that no instance takes, for they are too long."""
    stopped: dict[int, int]
    """Requests of families that were aborted, by number, and how many tokens had been delivered of each."""
    aborted: bool
    events: int
    steps: int
    transferred_bytes: int
    cores: list[EngineCoreUse]
    intervals: Ticks
    """Times between tokens, without a value per token, for a jump's are an arithmetic progression. A row (first, slope,
    steps, decodes) stands for `steps` steps of `decodes` tokens, the k-th taking first + k * slope ticks."""
    records: RecordedSteps = field(default_factory=RecordedSteps)
    """Every jump, if that was asked for."""
    role_switches: int | None = None
    """Instances that took the other role, where a controller lets them."""

    @property
    def prompt_done(self) -> Ticks:
        """When the prompt of each request was done: with the first token, unless a decode instance delivers that."""
        return np.where(self.prefilled >= 0, self.prefilled, self.first_token)

    @property
    def controlled(self) -> dict[str, int]:
        """What a controller did, by its name in a summary; nothing where there is none."""
        return {} if self.role_switches is None else {"role_switches": self.role_switches}
