"""vLLM by its own processor time: its engine is stepped in an interpreter of its own, without a server in front.

On a shared machine a server's wall clock includes the time of other processes. Here requests arrive by the engine's own
clock, which stops while other processes run, and a gauge divides out the slowdown by neighbours; the time that a server
adds is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from simtune.emit import ENGINES
from simtune.errors import UsageError
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.validation.client.measured_run import (
    EngineFacts,
    MeasuredDrafts,
    MeasuredFacts,
    MeasuredRequest,
    MeasuredRun,
)
from simtune.validation.client.prompts import Prompts
from simtune.validation.servers.driven_engines import Driven, EngineSize, StepDriver, requests_of
from simtune.validation.servers.engine_profile import warm_up
from simtune.validation.servers.in_process import queue_samples
from simtune.validation.servers.pair import CONNECTOR, EnginePair
from simtune.validation.servers.server import SYNCHRONOUS_ONLY
from simtune.workload.requests import RequestStream

MakeStepped = Callable[[EngineSize, Mapping[str, Any], float | None], StepDriver]


def engine_arguments(pool: Pool, draft: Model | None = None) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for a pool, in addition to its size."""
    batching, cache = pool.batching, pool.kv_cache
    arguments: dict[str, Any] = {
        "enable_chunked_prefill": batching.chunked_prefill,
        "enable_prefix_caching": cache.prefix_caching,
    }
    if cache.num_blocks is not None:
        arguments["num_gpu_blocks_override"] = cache.num_blocks
    if pool.speculation is not None:
        arguments["speculative_config"] = dict(ENGINES["vllm"].speculation(pool.speculation, draft))
    if pool.role != "mixed":
        arguments["kv_transfer_config"] = CONNECTOR
    return arguments


def check_plan(plan: Plan) -> None:
    """Raise UsageError if the plan has settings that synchronous instances on one device do not support.

    Supported are one instance, or one that prefills and one that decodes.
    """
    pools, roles = plan.pools, sorted(pool.role for pool in plan.pools)
    wrong = {
        "several instances of a kind": roles not in (["mixed"], ["decode", "prefill"])
        or any(pool.instances > 1 or pool.devices > 1 for pool in pools),
        "weight_dtype": any(pool.weight_dtype is not None for pool in pools),
        SYNCHRONOUS_ONLY: any(pool.schedules_async for pool in pools),
        "no max_model_len (give it one)": any(pool.max_model_len is None for pool in pools),
        "drafts beside pools": len(pools) > 1 and any(pool.speculation is not None for pool in pools),
    }
    has = [name for name, present in wrong.items() if present]
    if has:
        raise UsageError(f"plan {plan.name}: has {', '.join(has)}, which vLLM by processor time cannot run")


class SteppedVllm:
    """See `simtune.validation.servers.server.Engine`. An engine starts at the first run of a plan."""

    def __init__(self, model: Model, make: MakeStepped, draft_models: Mapping[str, Model] | None = None) -> None:
        """`make` starts an engine of a size with further arguments, by the reference of an earlier gauge if there is
        one; `draft_models` are by the names in plans."""
        self._model, self._make = model, make
        self._draft_models = dict(draft_models or {})
        self._plan: Plan | None = None
        self._driver: StepDriver | None = None

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        """See `Engine.run`."""
        if self._driver is None or plan != self._plan:
            self.close()
            self._driver, self._plan = self._started(plan), plan
        requests = requests_of(stream, Prompts(stream, self._model.vocab_size, seed))
        driven = self._driver.run(requests, "cpu", seed)
        return measured(stream, driven, self._driver.facts(), label, plan)

    def check(self, plan: Plan) -> None:
        """See `Engine.check`."""
        check_plan(plan)

    def close(self) -> None:
        """End the engine."""
        if self._driver is not None:
            self._driver.close()
        self._driver = self._plan = None

    def _started(self, plan: Plan) -> StepDriver:
        check_plan(plan)
        by_role = {pool.role: pool for pool in plan.pools}
        if "mixed" in by_role:
            return self._one(by_role["mixed"])
        return EnginePair(*(partial(self._one, by_role[role]) for role in ("prefill", "decode")))

    def _one(self, pool: Pool, reference_s: float | None = None) -> StepDriver:
        assert pool.max_model_len is not None
        seats, budget = pool.batching.max_num_seqs, pool.batching.max_num_batched_tokens
        size = EngineSize(seats, budget, pool.max_model_len, pool.kv_cache.block_size)
        draft_name = None if pool.speculation is None else pool.speculation.drafter.own_model
        draft = None if draft_name is None else self._draft_models.get(draft_name)
        started = self._make(size, engine_arguments(pool, draft), reference_s)
        started.run(warm_up(budget, pool.max_model_len))
        return started


def measured(stream: RequestStream, driven: Driven, facts: Mapping[str, Any], label: str, plan: Plan) -> MeasuredRun:
    """Return a session as a measured run."""
    assert stream.arrival_s is not None
    requests = tuple(
        MeasuredRequest(
            request=number,
            due_s=float(stream.arrival_s[number]),
            sent_s=times.sent,
            first_token_s=times.first_token,
            finish_s=times.finish,
            prompt_tokens=int(stream.prompt_tokens[number]),
            output_tokens=int(stream.output_tokens[number]),
            times_s=times.times or None,
            error=None if times.times else "ended without a token",
        )
        for number, times in enumerate(driven.requests)
    )
    drafts = driven.drafts
    caches = plan.pools[0].kv_cache.prefix_caching
    of_run = MeasuredFacts(
        label=label,
        engine=EngineFacts(engine=facts["engine"], version=facts.get("version"), model=plan.model, device="cpu"),
        clock="cpu",
        preemptions=driven.preemptions,
        prefix_hit_rate=driven.hit_tokens / int(stream.prompt_tokens.sum()) if caches else None,
        queues=queue_samples(driven.queues),
        drafts=None if drafts is None else MeasuredDrafts(**_counted(drafts)),
    )
    return MeasuredRun(of_run, requests)


def _counted(drafts: Any) -> dict[str, int]:
    return {"rounds": drafts.rounds, "draft_tokens": drafts.draft_tokens, "accepted_tokens": drafts.accepted_tokens}
