"""Outcome of a simulated world: columns of its requests and use of its cores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.engine import Tally
from simtune.engine.adapters import AdapterTally
from simtune.results.recorded_steps import RecordedSteps

Ticks = NDArray[np.int64]


class SampledStep(NamedTuple):
    """Work of a step; `ticks` of a core's busy time count as spent on steps like it."""

    ticks: int
    num_decodes: int
    context_tokens: int
    """KV tokens that the decodes read."""
    verify_tokens: int
    """Tokens that the decodes compute, drafts included."""
    num_samples: int
    """Sequences that sample a token."""
    chunks: tuple[tuple[int, int], ...]
    """(past tokens, new tokens) of prefill chunks."""


class EncoderUse(NamedTuple):
    """Work of encoders of media in a run."""

    encoded: int
    """Items encoded."""
    hits: int
    """Items whose embeddings a request found in the encoder's cache."""
    ticks: int
    """Ticks spent in encoding."""


class EngineCoreUse(NamedTuple):
    """Use of a core in a run."""

    pool: str
    instance: int
    virtual_engine: int
    blocks: int
    """Size of its KV cache."""
    busy: int
    """Ticks spent in steps."""
    drafting: Tally = Tally()
    """Tally of the core's verifications; empty if it does not draft."""
    queried_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    hit_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    tier_tokens: tuple[tuple[str, int], ...] = ()
    """Number of them found in each tier below the device, by its name."""
    adapters: AdapterTally | None = None
    """Tally of the core's LoRA adapters; None without slots for any."""
    sampled: tuple[SampledStep, ...] = ()
    """Some of its steps, evenly spaced in its busy time."""
    most_tokens: int = 0
    """Most tokens of a step with prefill chunks."""
    encoder: EncoderUse | None = None
    """Work of encoders of media in its steps; None without one."""
    most_blocks: int | None = None
    """Most KV blocks that were not free at one time; None if the policy does not show it."""


class PoolInstances(NamedTuple):
    """Instances of an autoscaled pool in a run, or with `ranks` the ranks of its instances: then every number is one of
    ranks, and a place is that of a rank, instance by instance."""

    pool: str
    devices: int
    """GPUs of one instance."""
    end: int
    """Tick at which the last step of the run ended."""
    held_ticks: tuple[int, ...]
    """Ticks until then for which each place held its GPUs: from the start of an instance until it was drained, of a
    rank until the instance goes on without it."""
    starts: int
    """Instances that were started, those given up before they accepted requests among them."""
    drains: int
    """Instances that were drained."""
    counts: tuple[tuple[int, int, int], ...]
    """(tick, instances that accept requests, instances that hold GPUs) from the beginning and after each change."""
    ranks: int = 0
    """Most ranks of an instance, if ranks come and go; 0 if instances do."""
    busy_ticks: tuple[int, ...] = ()
    """Ticks in which each instance ran steps times the ranks that it had then, if ranks come and go."""

    @property
    def mean(self) -> float:
        """Mean number of instances, or ranks, that hold GPUs."""
        return sum(self.held_ticks) / self.end if self.end > 0 else float(self.counts[0][2])


class RankTurn(NamedTuple):
    """Change of the ranks of an instance in a run."""

    pool: str
    instance: int
    at: int
    """Tick at which ranks left, or began to join."""
    ranks: int
    """Data-parallel ranks from then on."""
    pause: int
    """Ticks in which no rank of the instance computed."""
    lost: int
    """Requests that were sent again, because they were on ranks that left."""


@dataclass(slots=True)
class Outcome:
    """Events of every request, as columns in order of request number; times in ticks, -1 if the event never came."""

    arrival: Ticks
    routed: Ticks
    """Tick at which the request had passed the front end; -1 without one."""
    scheduled: Ticks
    first_token: Ticks
    finish: Ticks
    core: Ticks
    """Core that answered the request; with separate prefill and decode, the core that decoded it."""
    preemptions: Ticks
    waiting_at_arrival: Ticks
    """Requests waiting in the whole deployment when this one arrived, itself not counted."""
    transferred: Ticks
    """Tick at which the KV cache first reached the decode instance (for a request that was lost before its first token,
    last reached it); -1 if none was sent."""
    prefilled: Ticks
    """Tick at which the prompt was done on the prefill instance, if a decode instance delivers the first token or a
    stage beside the engines delays it; else -1."""
    family_begin: Ticks
    """Tick at which each family of a request graph arrived; empty without a graph."""
    family_end: Ticks
    """Tick at which the family's last node was over."""
    resent: Ticks
    """Times the request was sent again because an instance failed, or left with a KV cache that no decode instance was
    up to take; waiting requests of instances that leave do not count."""
    refused: int
    """Requests that no instance accepts because they are too long."""
    stopped: dict[int, int]
    """Tokens delivered of each request of a family that was aborted, by request number."""
    aborted: bool
    events: int
    steps: int
    transferred_bytes: int
    cores: list[EngineCoreUse]
    intervals: Ticks
    """Times between tokens, without a value per token, because those of a jump are an arithmetic progression. A row
    (first, slope, steps, decodes) stands for `steps` steps of `decodes` tokens, the k-th taking first + k * slope
    ticks."""
    records: RecordedSteps = field(default_factory=RecordedSteps)
    """All jumps, if the run recorded them."""
    rejected: Ticks | None = None
    """Numbers of the requests that servers rejected because their queues were full; None without such a limit, and in a
    streamed run, which counts them only."""
    role_switches: int | None = None
    """Instances that took the other role; None without a controller."""
    scaled: tuple[PoolInstances, ...] = ()
    """Instances of each autoscaled pool."""
    rank_turns: tuple[RankTurn, ...] = ()
    """Changes of the ranks of instances, in order of time."""

    @property
    def prompt_done(self) -> Ticks:
        """Ticks at which the prompts were done: with the first token, unless a decode instance delivers that."""
        return np.where(self.prefilled >= 0, self.prefilled, self.first_token)

    @property
    def mean_free_gpus(self) -> float:
        """Mean number of GPUs that autoscaled pools do not hold, of those that they may."""
        return sum(of.devices * (len(of.held_ticks) - of.mean) for of in self.scaled)

    @property
    def controlled(self) -> dict[str, int]:
        """Counts of a controller, by their names in a summary; empty without a controller."""
        return {} if self.role_switches is None else {"role_switches": self.role_switches}
