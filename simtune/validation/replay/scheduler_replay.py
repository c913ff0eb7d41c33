"""Replay a step log through a scheduler, and compare every step with that of the real engine.

The scheduler gets the log's settings and its requests, each before the step at which the engine got it. Equal means:
the same requests with the same tokens in the same order, the same ones admitted with the same tokens in the cache
already, the same ones preempted in the same order, the same finished, the same free blocks and queue lengths.

If a log has drafts, the numbers that the target accepted are taken from the log, as far as the schedules agree.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simtune.engine import (
    POLICIES,
    DraftingTerms,
    Request,
    Scheduler,
    Step,
    TransformersFifo,
    VllmFcfs,
)
from simtune.engine.next_token import NextTokenCache
from simtune.engine.offloading import Offloading
from simtune.engine.tiers import Tier, TierStore
from simtune.errors import Problem, SpecError, UsageError, suggest
from simtune.specs.base import Count, NonNegative
from simtune.specs.catalog import load_engine
from simtune.validation.replay.step_log import LoggedStep, StepLog, describe


@dataclass(frozen=True)
class Decision:
    """Part of a step that is compared."""

    scheduled: tuple[tuple[str, int], ...]
    """Pairs (request, tokens) in the order in which they were scheduled."""
    admitted: tuple[tuple[str, int], ...]
    """Requests that enter the batch, with the tokens they have in the cache already, by name."""
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    """Names of the requests that finish, sorted."""
    free_blocks: int
    running: int
    waiting: int
    loading: tuple[tuple[str, int], ...] = ()
    """Requests that have begun to load blocks from host memory since the step before, with their tokens."""

    def differs_from(self, other: Decision, compared: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the fields among `compared` that differ."""
        return tuple(name for name in compared if getattr(self, name) != getattr(other, name))


ALL = tuple(field.name for field in fields(Decision))
SCHEDULE = ("scheduled", "preempted", "finished")
"""Fields that are compared with the log of an engine that has another policy: its blocks may differ."""


@dataclass(frozen=True)
class Resident:
    """A request in the batch."""

    request: str
    computed_tokens: int
    emitted_tokens: int


@dataclass(frozen=True)
class State:
    """State of both schedulers before the step."""

    running: tuple[Resident, ...]
    """Requests in the batch, in order of admission."""
    waiting: tuple[str, ...]
    """Names of the waiting requests, in order of arrival."""
    free_blocks: int


@dataclass(frozen=True)
class Parting:
    """First step that differs. `logged` or `simulated` is None if one schedule ends and the other continues."""

    step: int
    different: tuple[str, ...]
    """Names of the fields of the two decisions that differ."""
    logged: Decision | None
    simulated: Decision | None
    before: State


@dataclass(frozen=True)
class Replay:
    """Result of one log. The first `equal` steps agree; all of them unless there is a `parting`."""

    file: str
    log: str
    engine: str
    policy: str
    steps: int
    equal: int
    parting: Parting | None


def replay(log: StepLog, policy: str | None = None) -> Replay:
    """Drive a scheduler through a log up to the first step that differs.

    `policy` is a name in `simtune.engine.POLICIES`, the log's own unless given. With another engine's policy only
    scheduled, preempted and finished requests are compared, and settings that it does not know are left out.

    Raise UsageError for an unknown policy, SpecError if the header requires what no scheduler here does.
    """
    options = _options(log)
    policy = policy or options.policy
    scheduler = _scheduler(log, options, policy)
    compared = ALL if policy == options.policy else SCHEDULE
    account = _Account(log, scheduler)
    parting = None
    equal = 0
    for logged in log.steps:
        account.arrive(logged.step)
        before = account.state()
        simulated, expected = account.decide(logged.loaded), _decision(logged)
        different = ALL if simulated is None else expected.differs_from(simulated, compared)
        if different:
            parting = Parting(logged.step, different, expected, simulated, before)
            break
        equal += 1
    else:
        before = account.state()
        if (more := account.decide()) is not None:
            parting = Parting(log.steps[-1].step + 1, ALL, None, more, before)
    return Replay(log.file, log.header.log, log.header.engine, policy, len(log.steps), equal, parting)


class _Account:
    """A scheduler with the state of each request, by the names in the log."""

    def __init__(self, log: StepLog, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._offloading = scheduler.offloading if isinstance(scheduler, VllmFcfs) else None
        self._names = [line.req for line in log.requests]
        block_size = scheduler.kv.block_size
        last_part = block_size - 1 if isinstance(scheduler.kv, NextTokenCache) else 0
        self._coming: deque[tuple[int, Request]] = deque()
        for number, line in enumerate(log.requests):
            # A block that is shared in part has a name too if others find the one before it by the token after it.
            shared = (line.prefix_len + last_part) // block_size if line.group is not None else 0
            request = Request(number, line.prompt_len, line.output_len, priority=line.priority)
            request.blocks = tuple((line.group, block) for block in range(shared))
            self._coming.append((line.at_step, request))
        self._file = log.file
        self._waiting: dict[Request, None] = {}
        # Tokens computed and delivered.
        self._running: dict[Request, tuple[int, int]] = {}

    def arrive(self, step: int) -> None:
        while self._coming and self._coming[0][0] <= step:
            request = self._coming.popleft()[1]
            if not self._scheduler.add(request):
                raise SpecError(
                    Problem(
                        self._file,
                        f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens exceed "
                        f"max_model_len ({self._scheduler.max_model_len}); the engine would have refused it",
                        "prompt_len",
                        request.id + 2,
                    )
                )
            self._waiting[request] = None

    def state(self) -> State:
        return State(
            tuple(Resident(self._name(request), *tokens) for request, tokens in self._running.items()),
            self._list(sorted(self._waiting, key=lambda request: request.id)),
            self._scheduler.kv.free,
        )

    def decide(self, loaded: Sequence[Sequence[str]] = ((),)) -> Decision | None:
        """Schedule and complete one step; None if there is nothing to run. Blocks of requests are `loaded` before each
        call, of which only the last one gives a step."""
        scheduler, step = self._scheduler, None
        for names in loaded:
            if step is not None:
                break
            for name in names:
                self._arrive_from_host(name)
            step = scheduler.schedule()
        if step is None:
            return None
        tokens_of = scheduler.composition()
        past = {chunk.request: chunk.past for chunk in step.chunks}
        # Copy the facts of chunks and the lengths of queues now: they change when the step completes.
        chunks = {chunk.request: (chunk.padding, int(chunk.completes)) for chunk in step.chunks}
        free, running, waiting = scheduler.kv.free, scheduler.num_running, scheduler.num_waiting
        self._requeue(step, past)
        delivered = {request: scheduler.emitted(request) for request in tokens_of}
        finished = scheduler.complete().finished
        for request, tokens in tokens_of.items():
            if request in chunks:
                padding, emitted = chunks[request]
                self._advance(request, tokens - padding, emitted)
            else:  # of a token and its drafts only the accepted ones stay in the cache
                tokens_kept = scheduler.emitted(request) - delivered[request] if step.draft_tokens else tokens
                self._advance(request, tokens_kept, tokens_kept)
        for request in finished:
            del self._running[request]
        return Decision(
            tuple((self._name(request), tokens) for request, tokens in tokens_of.items()),
            tuple(sorted((self._name(request), past[request]) for request in step.admitted)),
            self._list(step.preempted),
            tuple(sorted(self._list(finished))),
            free,
            running,
            waiting,
            self._loading(),
        )

    def _arrive_from_host(self, name: str) -> None:
        """Let the blocks of a request have come from host memory, if it loads any."""
        if self._offloading is not None:
            for request in self._offloading.holding:
                if self._name(request) == name:
                    self._offloading.arrive(request)

    def _loading(self) -> tuple[tuple[str, int], ...]:
        """Return the loads that have begun since the last time."""
        if self._offloading is None:
            return ()
        started = sorted((self._name(request), tokens) for request, tokens in self._offloading.started)
        self._offloading.started.clear()
        return tuple(started)

    def _requeue(self, step: Step, past: Mapping[Request, int]) -> None:
        """Move preempted requests to the waiting ones, and admitted ones to the batch, with `past` tokens in the
        cache."""
        for request in step.preempted:
            # A request that is missing has ended, which the engine does not know yet.
            if self._running.pop(request, None) is not None:
                self._waiting[request] = None
        for request in step.admitted:
            del self._waiting[request]
            self._running[request] = past[request], request.emitted

    def _advance(self, request: Request, computed: int, emitted: int) -> None:
        """Count tokens that a step computed and emitted; tokens of a request that has ended are discarded."""
        if request in self._running:
            before = self._running[request]
            self._running[request] = before[0] + computed, before[1] + emitted

    def _name(self, request: Request) -> str:
        return self._names[request.id]

    def _list(self, requests: Iterable[Request]) -> tuple[str, ...]:
        return tuple(map(self._name, requests))


def _decision(logged: LoggedStep) -> Decision:
    """Return the decision of a logged step.

    transformers counts its queues before it resets starved requests in the step, simtune afterwards.
    """
    reset = len(logged.reset_after)
    return Decision(
        tuple(logged.sched.items()),
        tuple(sorted(logged.admit.items())),
        logged.preempt + logged.reset_before + logged.reset_after,
        tuple(sorted(logged.finish)),
        logged.free,
        logged.running - reset,
        logged.waiting + reset,
        tuple(sorted(logged.load.items())),
    )


# --- the scheduler that a header asks for -----------------------------------------------------------------


class _ReplayOptions(BaseModel):
    """Options that a schedule depends on; those in ONLY must have that value, because no other is modelled."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    ONLY: ClassVar[dict[str, Any]]


class _ReplayDrafting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    k: Count
    draft_slots_per_request: int
    method: str = "draft_model"
    by_batch: tuple[tuple[Count, Count, int], ...] | None = None
    """(first, last, drafts) by size of the batch; beyond the last range and in gaps the drafts of the range before."""

    def drafts(self, batch: int) -> int:
        assert self.by_batch is not None
        return max(entry for entry in self.by_batch if entry[0] <= batch)[2]


JOINS_TOKENS = ("eagle", "eagle3", "mtp")
"""Methods whose drafter joins a token to the target's hidden state of the one before it."""
DROP_LAST_HIT = (*JOINS_TOKENS, "dflash", "dspark")
"""Methods for which vLLM up to 0.32 computes the last cached block again, since it drafts from hidden states."""


class _VllmOptions(_ReplayOptions):
    # V1 refused to run several partial prefills at once, as long as it had an option for that.
    ONLY: ClassVar = {"max_num_partial_prefills": 1, "max_long_partial_prefills": 1}
    scheduling_policy: Literal["fcfs", "priority"]
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count
    block_size: Count
    free_blocks_at_start: Count
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    max_num_active_seqs: Count | None = None
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    long_prefill_token_threshold_adaptive: bool = False
    prefill_schedule_interval: Count = 1
    data_parallel_size: Count = 1
    watermark: NonNegative = 0.0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool
    num_lookahead_tokens: int
    spec: _ReplayDrafting | None
    host_blocks: Count | None = None

    @property
    def policy(self) -> str:
        return f"vllm-{self.scheduling_policy}"

    def scheduler(self, log: StepLog, kind: type[Scheduler]) -> Scheduler:
        plain: dict[str, Any] = {
            "num_blocks": self.free_blocks_at_start,
            "block_size": self.block_size,
            "max_num_seqs": min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "chunked_prefill": self.enable_chunked_prefill,
        }
        if not issubclass(kind, VllmFcfs):
            return kind(**plain)
        drafting, rules = None, _rules_of_release(log)
        if self.spec is not None:
            newest = rules.get("draft_rules") == "vllm-0.33"
            drafting = DraftingTerms(
                max_drafts=self.spec.k,
                accepted=_Accepted(log),
                drafts=self.spec.drafts if self.spec.by_batch else None,
                lookahead=self.num_lookahead_tokens,
                extra_slots=self.spec.draft_slots_per_request,
                drops_last_hit=self.spec.method in DROP_LAST_HIT and not newest,
                hashes_next=self.spec.method in JOINS_TOKENS and newest,
                names_verified=newest,
            )
        scheduler = kind(
            **plain,
            # The watermark is a share of all blocks, the engine's own included.
            watermark_blocks=int(self.watermark * (self.free_blocks_at_start + 1)),
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            prefill_schedule_interval=self.prefill_schedule_interval,
            prefill_steps_aligned=self.data_parallel_size > 1,
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
            self_preemption_ends_step=rules.get("self_preemption_ends_step") is not False,
            prefix_caching=self.enable_prefix_caching,
            async_scheduling=self.async_scheduling,
            speculation=drafting,
        )
        if self.host_blocks is not None:
            tier = Tier("host", TierStore(0))
            scheduler.offload(Offloading(tier, self.host_blocks, newest=_is_newest(log)))
        return scheduler


def _is_newest(log: StepLog) -> bool:
    """True if the release that wrote a log has the newest rule for host memory, that of 0.33."""
    release = re.search(r"0\.(\d+)", log.header.package)
    return release is None or int(release[1]) >= 33


def _rules_of_release(log: StepLog) -> Mapping[str, Any]:
    """Return how the release that wrote a log batches, as its preset has it; of the newest if none is stated."""
    release = re.search(r"\d+(\.\d+)+", log.header.package)
    batching: Mapping[str, Any] = load_engine(f"vllm@{release[0]}" if release else "vllm").pool["batching"]
    return batching


class _TransformersOptions(_ReplayOptions):
    ONLY: ClassVar = {"cpu_offload_space": 0.0, "use_async_batching": False}
    scheduler_type: Literal["fifo", "prefill_first"]
    safety_margin: float
    max_batch_tokens: Count
    max_requests_per_batch: Count
    page_size: Count
    free_blocks_at_start: Count
    prefix_sharing: bool = False
    """Effective value of `allow_block_sharing`: models with sliding windows share nothing."""

    @property
    def policy(self) -> str:
        return f"transformers-{self.scheduler_type.replace('_', '-')}"

    def scheduler(self, log: StepLog, kind: type[Scheduler]) -> Scheduler:
        plain: dict[str, Any] = {
            "num_blocks": self.free_blocks_at_start,
            "block_size": self.page_size,
            "max_num_seqs": self.max_requests_per_batch,
            "max_num_batched_tokens": self.max_batch_tokens,
            # The engine knows no limit but its cache.
            "max_model_len": self.free_blocks_at_start * self.page_size,
        }
        if issubclass(kind, TransformersFifo):
            return kind(**plain, safety_margin=self.safety_margin, prefix_caching=self.prefix_sharing)
        return kind(**plain)


ENGINES: dict[str, type[_VllmOptions] | type[_TransformersOptions]] = {
    "vllm": _VllmOptions,
    "transformers-cb": _TransformersOptions,
}


class _Accepted:
    """Drafts that the log's target accepted, by request and verification; 0 beyond the log."""

    def __init__(self, log: StepLog) -> None:
        names = {line.req: number for number, line in enumerate(log.requests)}
        self._log: dict[int, list[int]] = defaultdict(list)
        for step in log.steps:
            for name, accepted in step.accept.items():
                # A request that enters has no drafts, only padding.
                if name not in step.admit:
                    self._log[names[name]].append(accepted)

    def __call__(self, request: Request, number: int, drafts: int) -> int:
        logged = self._log[request.id]
        return min(logged[number], drafts) if number < len(logged) else 0


def _options(log: StepLog) -> _VllmOptions | _TransformersOptions:
    kind = ENGINES[log.header.engine]
    problems = [
        Problem(log.file, f"{log.header.options[key]!r} is not modelled, only {value!r}", f"options.{key}", 1)
        for key, value in kind.ONLY.items()
        if log.header.options.get(key, value) != value
    ]
    try:
        options = kind.model_validate(log.header.options)
    except ValidationError as error:
        problems += [Problem(log.file, message, f"options.{key}", 1) for key, message in describe(error)]
    if problems:
        raise SpecError(problems)
    return options


def _scheduler(log: StepLog, options: _VllmOptions | _TransformersOptions, policy: str) -> Scheduler:
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}{suggest(policy, POLICIES)}; known: {', '.join(POLICIES)}")
    try:
        return options.scheduler(log, POLICIES[policy])
    except ValueError as error:
        raise SpecError(Problem(log.file, f"{policy} refuses these settings: {error}", "options", 1)) from None
