"""One scheduler with one batch under way, the pipeline it may share with others, and the way out of it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from simtune.costs.protocol import RoundCosts, StepCosts
from simtune.engine import Request, Scheduler, Step, Tally
from simtune.sim.link import Link


@dataclass(slots=True, frozen=True)
class KvConnector:
    """How a prefill instance sends a KV cache of whole blocks."""

    link: Link
    block_bytes: int
    """Of all GPUs of the instance together."""
    setup: int
    """Ticks before the first byte."""
    descriptors: int
    """Ticks per block besides its bytes."""
    layers: int = 1
    """With more than one, all but the last layer are sent while the prompt is computed, as far as the link can."""

    def left_to_send(self, blocks: int, computing: int) -> int:
        """Bytes to send after the prompt is done, when computing it took so many ticks."""
        size = blocks * self.block_bytes
        if self.layers == 1:
            return size
        return max(-(-size // self.layers), size - self.link.bytes_within(computing))


@dataclass(slots=True, eq=False)
class Handoff:
    """A request on its way from a prefill to a decode instance."""

    request: Request
    """As the decode instance will know it: its prompt computed, its first token delivered."""
    source: EngineCore
    held: Request
    """As the prefill instance knows it: finished, its blocks still taken."""
    ready: int
    """The tick at which its prompt was done."""
    serial: int
    """Tells this attempt to send it from an earlier one that was called off."""
    target: EngineCore | None = None
    sending: bool = False
    """Whether the target has room for it and the transfer is under way."""


@dataclass(slots=True, eq=False)
class Pipeline:
    """The stages of an instance, shared by its cores: a stage works for one of them at a time.

    A step of D ticks takes D / stages in each (the first ones a tick longer where that leaves a rest); it enters a
    stage when it has left the one before and the stage is free.
    """

    stages: int
    cores: list[EngineCore] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    """The tick from which on each stage is free."""

    def __post_init__(self) -> None:
        self.free = [0] * self.stages

    def pass_through(self, now: int, ticks: int) -> int:
        """Send a step of `ticks` through; the tick at which it leaves the last stage."""
        share, rest = divmod(ticks, self.stages)
        free = self.free
        for stage in range(self.stages):
            now = max(now, free[stage]) + share + (stage < rest)
            free[stage] = now
        return now


@dataclass(slots=True, eq=False)
class EngineCore:
    """One scheduler, its cost model, and the step it is running.

    What vLLM calls an engine core. An instance is one of them, or with pipeline parallelism as many ("virtual engines")
    as it has stages, or with data-parallel attention one for each group of ranks.
    """

    scheduler: Scheduler
    costs: StepCosts
    instance: int = 0
    pool: str = "mixed"
    connector: KvConnector | None = None
    """The way out of a prefill instance: its requests are handed over when their prompt is done."""
    pipeline: Pipeline | None = None
    dp_group: list[EngineCore] | None = None
    """The cores it steps together with, itself included: data-parallel attention over experts that all share."""
    swap: int = 0
    """Ticks to move one KV block to or from host memory; steps wait for it."""
    up: bool = True
    """Whether it takes new requests."""
    number: int = 0
    receives: bool = False
    """Whether other cores hand requests over to it."""
    jumps_freely: bool = False
    """Whether all that bounds its jumps is the scheduler and the costs."""
    step: Step | None = None
    started: int = 0
    first: int = 0  # ticks of the first repetition of the running step
    slope: int = 0  # ticks that each further repetition takes longer
    ends: Sequence[int] | None = None
    """After how many ticks each repetition ends, where they are told one by one."""
    repetitions: int = 0
    jumping: bool = False  # in a jump, alone in its pipeline or DP group
    version: int = 0  # of the event that ends the running step; an older one is void
    woken: bool = False
    waiting: int = 0
    """Requests that wait in the scheduler, as last counted."""
    busy: int = 0
    """Ticks spent in steps so far."""
    inbox: deque[Handoff] = field(default_factory=deque)
    """Requests whose KV cache waits elsewhere for room here, oldest first."""
    arrived: list[Request] = field(default_factory=list)
    """Requests whose KV cache has come; they join before the next step."""
    dropped: list[Request] = field(default_factory=list)
    """Requests whose KV cache will never come; their reservation ends before the next step."""
    uneven: Callable[[int, int, int, bool], int] | None = None
    """`StepCosts.uneven`, where the costs have it."""
    rounds: RoundCosts | None = None
    """The costs of a scheduler that drafts."""
    holding: int = 0
    """Requests handed over whose KV cache is still here."""

    def __post_init__(self) -> None:
        self.uneven = getattr(self.costs, "uneven", None)
        if self.uneven is not None and getattr(self.costs, "is_even", False):
            self.uneven = None
        if self.scheduler.decoding.drafting:
            self.rounds, self.uneven = cast(RoundCosts, self.costs), None
        self.scheduler.tells_longest = self.uneven is not None

    @property
    def tally(self) -> Tally:
        """What its verifications came to so far."""
        return self.scheduler.decoding.tally

    @property
    def has_work(self) -> bool:
        return bool(self.inbox or self.arrived or self.dropped) or self.scheduler.has_work

    def elapsed(self, repetitions: int) -> int:
        """Ticks of the first `repetitions` repetitions of the running step: an arithmetic series, or as told."""
        if self.ends is not None:
            return self.ends[repetitions - 1] if repetitions else 0
        return repetitions * self.first + self.slope * (repetitions * (repetitions - 1) // 2)

    def reaching(self, ticks: int) -> tuple[int, int]:
        """(n, ticks of n repetitions) for the smallest n, at least 1, that take `ticks` or longer.

        Solves first*n + slope*n(n-1)/2 = ticks for n in floating point, exact or a little too small once it is cut to
        a whole number, which is stepped up.
        """
        if self.ends is not None:
            n = bisect_left(self.ends, ticks) + 1
            return n, self.elapsed(n)
        first, slope = self.first, self.slope
        b = 2.0 * first - slope
        root = math.sqrt(b * b + 8.0 * slope * ticks)
        n = int(4.0 * ticks / (root + b) if b > 0 else (root - b) / (2.0 * slope)) or 1
        while (elapsed := n * first + slope * (n * (n - 1) // 2)) < ticks:
            n += 1
        return n, elapsed

    def repetitions_within(self, ticks: int) -> int:
        """How many repetitions are over after `ticks`."""
        if self.ends is not None:
            return bisect_right(self.ends, ticks)
        n, elapsed = self.reaching(ticks)
        return n if elapsed <= ticks else n - 1
