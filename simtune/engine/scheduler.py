"""What a scheduling policy offers to whoever drives it, be it simulated or real.

    scheduler.add(request)            when it arrives
    step = scheduler.schedule()       what to run next; None when there is nothing to do
    scheduler.complete(n)             it has run, n times over: who got a first token, who is finished

A step says how often it may be `repeat`ed before the policy could decide otherwise: while nobody finishes, nobody can
be admitted and the KV blocks suffice, the next steps are this one with every context one token longer. A real executor
runs it once and asks again; the simulator takes all repetitions in one jump. There is one scheduler for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

from simtune.engine.batch import DecodeBatch
from simtune.engine.kv import KvBlocks
from simtune.engine.request import Request


@dataclass(slots=True, frozen=True)
class Chunk:
    """Prompt tokens of one request to compute in this step, after the `past` ones already in the cache."""

    request: Request
    past: int
    tokens: int

    @property
    def completes(self) -> bool:
        """Whether the step samples a token for this request."""
        return self.past + self.tokens == self.request.known_tokens


@dataclass(slots=True)
class Step:
    """One engine iteration."""

    num_decodes: int
    context_tokens: int
    """KV tokens the decodes read, their own new ones included: sum of (computed + 1)."""
    chunks: list[Chunk]
    preempted: list[Request]
    repeat: int = 1
    """How often this step may be run before `schedule` could answer differently; 1 unless it only decodes."""


@dataclass(slots=True)
class Progress:
    """What came out of a completed step (or of the last of its repetitions)."""

    first_token: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)


class Scheduler(ABC):
    """A batching policy with its waiting queue, its resident requests and its KV blocks."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunked_prefill: bool = True,
    ) -> None:
        """Raises ValueError for settings with which an admitted request could wait for ever."""
        self.kv = KvBlocks(num_blocks, block_size)
        if self.kv.blocks_for(max_model_len) > num_blocks:
            raise ValueError(
                f"one request of max_model_len ({max_model_len}) needs {self.kv.blocks_for(max_model_len)} KV blocks "
                f"of {block_size} tokens; there are {num_blocks}"
            )
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs})"
            )
        if not chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_model_len ({max_model_len})"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.chunked_prefill = chunked_prefill
        self.waiting: deque[Request] = deque()
        self.decoding = DecodeBatch(block_size)

    def add(self, request: Request) -> bool:
        """Queue a request; False when it is refused because it could outgrow max_model_len."""
        if request.prompt_tokens + request.output_tokens > self.max_model_len:
            return False
        self.waiting.append(request)
        return True

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that hold KV blocks: decoding ones and prompts under way."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.num_running > 0

    @abstractmethod
    def schedule(self) -> Step | None:
        """The next step, its blocks taken; None when no request is here. `complete` must follow."""

    @abstractmethod
    def complete(self, repetitions: int = 1) -> Progress:
        """The step given last has run `repetitions` times, at most its `repeat`."""

    @abstractmethod
    def would_notice(self) -> bool:
        """Whether one more waiting request could change the schedule before the present step's repetitions are over."""
