"""LoRA adapters under load: steps wait for the adapters that they load, and run the products of those they use.

A load happens before the step that needs it, and nothing hides it: vLLM loads as it prepares a step, while the step
before may still run, so that its loads are shorter by at most one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simtune.costs.adapted_steps import AdaptedRounds, AdaptedSteps
from simtune.costs.adapters import AdapterCosts
from simtune.costs.compiled import CompiledCosts
from simtune.costs.drafting import CompiledRounds
from simtune.costs.protocol import ChunkList
from simtune.engine import Step
from simtune.engine.adapters import AdapterSlots, SharedSlots
from simtune.engine.batched import BatchScheduler
from simtune.engine.request import NO_ADAPTER, Request
from simtune.sim.core import EngineCore
from simtune.sim.step_timing import JumpTime, StepTimer, timer_for
from simtune.sim.stepping import Pipeline
from simtune.specs.pool import Pool


class AdapterTimer(StepTimer):
    """Timer of steps of requests with adapters. Drafts are verified with the adapter of their request."""

    def __init__(self, core: EngineCore, slots: AdapterSlots, adapters: AdapterCosts) -> None:
        costs, self._drafts = core.costs, core.scheduler.drafting
        # Costs that are not those of operators are taken to have the products in them.
        self._steps: AdaptedSteps | AdaptedRounds | None = None
        if isinstance(costs, CompiledCosts):
            self._steps = AdaptedSteps(costs)
        elif isinstance(costs, CompiledRounds):
            self._steps = AdaptedRounds(costs)
        self._timer = timer_for(costs if self._steps is None else self._steps, self._drafts)
        self._scheduler, self._slots, self._adapters = core.scheduler, slots, adapters
        self._time, self._extra, self._shared = core.time, 0, isinstance(slots, SharedSlots)
        self.asks_longest = self._timer.asks_longest

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """See `StepTimer.mixed`."""
        wait, _ = self._prepare(step)
        return wait + self._timer.mixed(step, chunks, completing)

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """See `StepTimer.decode`. The adapters of a batch change with its members only."""
        wait, repeats = self._prepare(step)
        if self._shared and (self._scheduler.unsettled or step.preempted):
            # A slot comes free with the step, for which other cores may wait.
            repeats = False
        self._timer.decode(step, most if repeats else 1, time)
        time.first += wait

    def account(self) -> None:
        """Count the products of the step before, which may have been cut; to be called once more after the last."""
        self._slots.note_products(self._extra * self._time.repetitions)
        self._extra = 0

    def _prepare(self, step: Step) -> tuple[int, bool]:
        """Take the adapters of a step into their slots and set the ticks of its products; return the ticks of loads,
        and True if repetitions of the step take as long without these."""
        slots, costs = self._slots, self._adapters
        tokens_of = self._tokens(step)
        tokens = sum(tokens_of.values()) - tokens_of[NO_ADAPTER]
        in_step = {adapter for adapter in tokens_of if adapter != NO_ADAPTER or slots.counts_base}
        newcomers = self._newcomers(step)
        wait = costs.load_ticks(*slots.use(frozenset(in_step), newcomers)) if in_step else 0
        self.account()
        slots.note_wait(wait)
        if self._steps is not None:
            self._extra = self._steps.extra = costs.ticks(tokens, len(in_step - {NO_ADAPTER}))
        if not self._drafts or not tokens:
            return wait, not wait
        # A jump has as many tokens in each round, but drafts may move from one member to another; and a member whose
        # answer is complete is in the first round only.
        return wait, not (wait or step.discarded or tokens_of[NO_ADAPTER])

    def _newcomers(self, step: Step) -> Sequence[Request]:
        """Return the requests that a step admits, and those that joined whose prompt was computed elsewhere."""
        joined = self._scheduler.take_joined()
        return [*joined, *step.admitted] if joined else step.admitted

    def _tokens(self, step: Step) -> Counter[int]:
        """Return the tokens of each adapter in a step."""
        scheduler = self._scheduler
        if self._drafts or not isinstance(scheduler, BatchScheduler):
            tokens: Counter[int] = Counter()
            for request, num_tokens in scheduler.composition().items():
                tokens[request.adapter] += num_tokens
            return tokens
        # As `composition`, which sorts: without drafts each request that decodes computes one token.
        tokens = Counter([request.adapter for request in scheduler.decoding])
        for chunk in step.chunks:
            tokens[chunk.request.adapter] += chunk.tokens
        return tokens


class SlotWatch:
    """Watch over the slots that the cores of a pipeline share: cores that wait for a slot schedule when one is free."""

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        self._cores = cores
        self._of: dict[int, frozenset[int]] = {}

    def look(self, now: int, core: EngineCore) -> None:
        """Note which adapters the requests of a core ask for, after it has scheduled or ended a step."""
        before = self._of.get(core.virtual_engine, frozenset())
        after = self._of[core.virtual_engine] = frozenset([request.adapter for request in core.scheduler.seated()])
        freed = before.difference(after, *(self._of[at] for at in self._of if at != core.virtual_engine), {NO_ADAPTER})
        if not freed:
            return
        slots = core.scheduler.adapters
        assert isinstance(slots, SharedSlots)
        slots.free(freed)
        for waiting in self._cores:
            if waiting is not core and (waiting.scheduler.waiting or waiting.inbox.waiting):
                waiting.notify(now)

    def reset(self) -> None:
        """Forget all, since the instance has failed."""
        self._of.clear()


def give_slots(cores: Sequence[EngineCore], pool: Pool, adapters: AdapterCosts) -> None:
    """Give each core of a pool its slots, or those of its pipeline, and time its steps with them."""
    assert pool.lora is not None
    host_slots = None if pool.lora.storage_bytes_per_s is None else pool.lora.in_host
    shared: dict[int, SharedSlots] = {}
    for core in cores:
        if isinstance(core.stepping, Pipeline):
            beside = shared.get(core.instance)
            shared[core.instance] = SharedSlots(core.scheduler.seated, pool.lora.slots, host_slots, beside)
            slots: AdapterSlots = shared[core.instance]
            core.stepping.watch = core.stepping.watch or SlotWatch(core.stepping.cores)
        else:
            slots = AdapterSlots(pool.lora.slots, host_slots, counts_base=pool.batching.policy == "sglang")
        core.scheduler.adapters = slots
        core.timer = AdapterTimer(core, slots, adapters)
        core.scheduler.tells_longest = core.timer.asks_longest
