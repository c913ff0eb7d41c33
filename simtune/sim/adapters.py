"""LoRA adapters under load: steps wait for the adapters that they load, and run the products of those they use.

A load happens before the step that needs it, and nothing hides it: vLLM loads as it prepares a step, while the step
before may still run, so that its loads are shorter by at most one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from simtune.costs.adapted_steps import AdaptedSteps
from simtune.costs.adapters import AdapterCosts, adaptable
from simtune.costs.compiled import CompiledCosts
from simtune.costs.protocol import ChunkList
from simtune.engine import Step
from simtune.engine.adapters import AdapterSlots
from simtune.engine.batched import BatchScheduler
from simtune.engine.request import NO_ADAPTER
from simtune.errors import UsageError
from simtune.sim.core import EngineCore
from simtune.sim.step_timing import JumpTime, StepTimer, timer_for
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.workload.requests import RequestStream


class AdapterTimer(StepTimer):
    """Timer of steps of requests with adapters."""

    def __init__(self, core: EngineCore, slots: AdapterSlots, adapters: AdapterCosts) -> None:
        costs = core.costs
        # Costs that are not those of operators are taken to have the products in them.
        self._steps = AdaptedSteps(costs) if isinstance(costs, CompiledCosts) else None
        self._timer = timer_for(costs if self._steps is None else self._steps, drafts=False)
        self._scheduler, self._slots, self._adapters = core.scheduler, slots, adapters
        self._time, self._extra = core.time, 0
        self.asks_longest = self._timer.asks_longest

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """See `StepTimer.mixed`."""
        wait = self._prepare(step)
        return wait + self._timer.mixed(step, chunks, completing)

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """See `StepTimer.decode`. The adapters of a batch change with its members only."""
        wait = self._prepare(step)
        self._timer.decode(step, 1 if wait else most, time)
        time.first += wait

    def account(self) -> None:
        """Count the products of the step before, which may have been cut; to be called once more after the last."""
        self._slots.note_products(self._extra * self._time.repetitions)
        self._extra = 0

    def _prepare(self, step: Step) -> int:
        """Take the adapters of a step into their slots and set the ticks of its products; return the ticks of loads."""
        slots, costs = self._slots, self._adapters
        tokens_of = self._tokens(step)
        tokens = sum(tokens_of.values()) - tokens_of[NO_ADAPTER]
        in_step = {adapter for adapter in tokens_of if adapter != NO_ADAPTER or slots.counts_base}
        wait = costs.load_ticks(*slots.use(frozenset(in_step), step.admitted)) if in_step else 0
        self.account()
        slots.note_wait(wait)
        if self._steps is not None:
            self._extra = self._steps.extra = costs.ticks(tokens, len(in_step - {NO_ADAPTER}))
        return wait

    def _tokens(self, step: Step) -> Counter[int]:
        """Return the tokens of each adapter in a step."""
        scheduler = self._scheduler
        if not isinstance(scheduler, BatchScheduler):
            tokens: Counter[int] = Counter()
            for request, num_tokens in scheduler.composition().items():
                tokens[request.adapter] += num_tokens
            return tokens
        # As `composition`, which sorts: without drafts each request that decodes computes one token.
        tokens = Counter([request.adapter for request in scheduler.decoding])
        for chunk in step.chunks:
            tokens[chunk.request.adapter] += chunk.tokens
        return tokens


def give_slots(cores: Sequence[EngineCore], pool: Pool, adapters: AdapterCosts) -> None:
    """Give each core of a pool its slots, and time its steps with them."""
    assert pool.lora is not None
    host_slots = None if pool.lora.storage_bytes_per_s is None else pool.lora.in_host
    for core in cores:
        slots = AdapterSlots(pool.lora.slots, host_slots, counts_base=pool.batching.policy == "sglang")
        core.scheduler.adapters = slots
        core.timer = AdapterTimer(core, slots, adapters)
        core.scheduler.tells_longest = core.timer.asks_longest


def check_adapters(pools: Sequence[Pool], stream: RequestStream) -> None:
    """Raise UsageError if a pool cannot serve the adapters for which requests ask."""
    if stream.adapter is None or not len(stream):
        return
    count = int(stream.adapter.max()) + 1
    for pool in pools:
        if pool.lora is None and count:
            raise UsageError(
                f"pool {pool.name}: requests ask for LoRA adapters, and the pool has no slots for any; set lora, or "
                "remove adapters from the load"
            )
        if pool.lora is not None and pool.lora.storage_bytes_per_s is None and count > pool.lora.in_host:
            raise UsageError(
                f"pool {pool.name}: lora.host_slots ({pool.lora.in_host}) is less than the {count} adapters of the "
                "load, which are then read from storage; set lora.storage_bytes_per_s, or raise host_slots"
            )


def refusals(pool: Pool, model: Model) -> Iterator[str]:
    """Yield a message for each setting and kind of layer that adapters do not go with."""
    if pool.lora is None:
        return
    if not adaptable(model, pool):
        yield (
            "lora needs full or windowed attention in all layers, and with targets all dense feed-forward blocks too; "
            f"{model.name} has other kinds: set targets to attention, or leave lora out"
        )
    parallelism, studied, batching = pool.parallelism, pool.studied, pool.batching
    for key, value in (
        ("role", pool.role if pool.role != "mixed" else None),
        ("speculation", pool.speculation),
        ("parallelism.pp", parallelism.pp if parallelism.pp > 1 else None),
        ("parallelism.cp", parallelism.cp if parallelism.context_ranks > 1 else None),
        ("cascade_attention", pool.cascade_attention or None),
        ("batching.prefill_schedule_interval", batching.prefill_schedule_interval),
        ("research.offload", studied.offload),
        ("research.afd", studied.afd),
    ):
        if value is not None:
            yield f"lora and {key} do not go together; leave one of them out"
