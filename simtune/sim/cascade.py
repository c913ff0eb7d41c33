"""Cascade attention: when an engine attends once to the beginning that all running requests share.

The rule is that of vLLM, which had it up to release 0.28 at least, off unless asked for, and has it no more in 0.33
(`use_cascade_attention` in vllm/v1/attention/backends/flash_attn.py, `get_num_common_prefix_blocks`): at least
FEWEST_TOKENS tokens in KV blocks that every request with blocks holds, at least FEWEST_REQUESTS requests in the step,
and, if each computes one token and heads share keys, fewer waves of thread blocks by its rough estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simtune.costs.compiled import CompiledCosts
from simtune.costs.protocol import ChunkList, StepCosts
from simtune.costs.shared_prefix import SharedPrefixCosts
from simtune.engine import Request, Step, VllmFcfs
from simtune.errors import UsageError
from simtune.sim.core import EngineCore
from simtune.sim.step_timing import JumpTime, StepTimer, timer_for
from simtune.specs.hardware import Hardware
from simtune.specs.model import FullAttention, Model
from simtune.specs.pool import Pool

FEWEST_TOKENS, FEWEST_REQUESTS = 256, 8
_TILE = 128
"""Queries, and keys, of a thread block in the estimate."""


@dataclass(frozen=True)
class CascadeRule:
    """Heads of one rank, and processors of its device, by which the engine decides for each step."""

    heads: int
    kv_heads: int
    processors: int

    @classmethod
    def of(cls, model: Model, pool: Pool, hardware: Hardware) -> CascadeRule:
        """Return the rule for a pool that `refusals` accepts."""
        attention, tp = model.layers[0].attention, pool.parallelism.tp
        assert isinstance(attention, FullAttention)
        return cls(attention.heads // tp, max(1, attention.kv_heads // tp), hardware.device.processors)

    def tokens(self, scheduler: VllmFcfs, step: Step) -> int:
        """Return the leading tokens that the step attends to once; 0 if it does not."""
        num_requests = step.num_decodes + len(step.chunks)
        if num_requests < FEWEST_REQUESTS or not step.num_decodes:
            return 0
        tokens = common_blocks(scheduler) * scheduler.kv.block_size
        if tokens < FEWEST_TOKENS:
            return 0
        decodes = self.kv_heads < self.heads and all(chunk.tokens == 1 for chunk in step.chunks)
        return 0 if decodes and not self._has_fewer_waves(num_requests, tokens) else tokens

    def _has_fewer_waves(self, num_requests: int, tokens: int) -> bool:
        tiles = -(-tokens // _TILE)
        cascade = -(-self.heads * -(-num_requests // _TILE) // self.processors) * tiles
        of_request = self.kv_heads * -(-(self.heads // self.kv_heads) // _TILE)
        return cascade < -(-num_requests * of_request * tiles // self.processors)


def common_blocks(scheduler: VllmFcfs) -> int:
    """Return the leading KV blocks that all running requests hold."""
    member: Request | None = next(iter(scheduler.decoding), None)
    blocks, num_running = 0, scheduler.num_running
    for run in () if member is None else member.runs or ():
        if run.holders != num_running:
            break
        blocks += run.size
    return blocks


class CascadeTimer(StepTimer):
    """Timer of steps that attend once to what all contexts share."""

    def __init__(self, costs: CompiledCosts, scheduler: VllmFcfs, rule: CascadeRule) -> None:
        self._costs, self._scheduler, self._rule = costs, scheduler, rule
        self._timers: dict[int, StepTimer] = {0: timer_for(costs, drafts=False)}  # by shared tokens
        self.asks_longest = self._timers[0].asks_longest

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """See `StepTimer.mixed`."""
        return self._timer_of(step).mixed(step, chunks, completing)

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """See `StepTimer.decode`; requests that have ended leave with the first repetition, and others then share
        more."""
        self._timer_of(step).decode(step, 1 if self._scheduler.unsettled else most, time)

    def _timer_of(self, step: Step) -> StepTimer:
        shared = self._rule.tokens(self._scheduler, step)
        if shared not in self._timers:
            self._timers[shared] = timer_for(SharedPrefixCosts(self._costs, shared), drafts=False)
        return self._timers[shared]


def attend_once(cores: Sequence[EngineCore], costs: StepCosts, rule: CascadeRule) -> None:
    """Let cores time their steps by a rule. Raises UsageError for costs that are not those of operators."""
    if not isinstance(costs, CompiledCosts):
        raise UsageError("cascade_attention needs step costs by operators; leave it out of the plan")
    for core in cores:
        assert isinstance(core.scheduler, VllmFcfs)
        core.timer = CascadeTimer(costs, core.scheduler, rule)
        core.scheduler.tells_longest = core.timer.asks_longest


def refusals(pool: Pool, model: Model) -> Iterator[str]:
    """Yield a message for each setting and kind of layer that cascade attention does not go with."""
    if not pool.cascade_attention:
        return
    parallelism, studied = pool.parallelism, pool.studied
    if not pool.kv_cache.prefix_caching:
        yield "cascade_attention attends to blocks that requests share; set kv_cache.prefix_caching, or leave it out"
    if any(type(group.attention) is not FullAttention for group in model.layers):
        yield f"cascade_attention needs full attention in all layers, and {model.name} has other kinds; leave it out"
    for key, value in (
        ("speculation", pool.speculation),
        ("parallelism.cp", parallelism.cp if parallelism.context_ranks > 1 else None),
        ("parallelism.decode_context_parallel", parallelism.decode_ranks if parallelism.decode_ranks > 1 else None),
        ("research.kv_policy", studied.kv_policy),
        ("research.offload", studied.offload),
        ("research.afd", studied.afd),
        ("costs", pool.costs),
    ):
        if value is not None:
            yield f"cascade_attention and {key} do not go together; leave one of them out"
