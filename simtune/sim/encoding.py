"""Pools whose steps encode images: the time of their steps, and what a load with images asks of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simtune.costs.encoder import ENCODER, EncoderCosts
from simtune.costs.protocol import ChunkList
from simtune.costs.ticks import to_ticks
from simtune.engine import Scheduler, Step
from simtune.engine.encoder import EncoderLimits
from simtune.engine.encoding import EncodingFcfs
from simtune.errors import UsageError
from simtune.results.outcome import EncoderUse
from simtune.sim.core import EngineCore
from simtune.sim.step_timing import JumpTime, StepTimer
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.workload.requests import RequestStream


class EncodingTimer(StepTimer):
    """Timer of steps that first encode the images which their chunks reach."""

    def __init__(self, timer: StepTimer, costs: EncoderCosts) -> None:
        self._timer, self._costs = timer, costs
        self.affine, self.asks_longest = timer.affine, timer.asks_longest
        self.ticks = 0
        """Ticks of encoding so far."""

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """See `StepTimer.mixed`."""
        ticks = self._timer.mixed(step, chunks, completing)
        if step.encoded:
            encoding = to_ticks(self._costs.seconds([(*image.work, image.vectors) for image in step.encoded]))
            self.ticks += encoding
            ticks += encoding
        return ticks

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """See `StepTimer.decode`; a step without chunks encodes nothing."""
        self._timer.decode(step, most, time)


def encode_in_steps(cores: Sequence[EngineCore], costs: EncoderCosts) -> None:
    """Let cores encode images in their steps, at these costs."""
    for core in cores:
        core.timer = EncodingTimer(core.timer, costs)


def encoder_use(scheduler: Scheduler, timer: StepTimer) -> EncoderUse | None:
    """Return the work of the encoder in a core's steps; None without one."""
    if not isinstance(scheduler, EncodingFcfs) or not isinstance(timer, EncodingTimer):
        return None
    return EncoderUse(scheduler.encoder.encoded, scheduler.encoder.hits, timer.ticks)


@dataclass(frozen=True)
class PoolEncoder:
    """Vision encoder in the steps of a pool."""

    limits: EncoderLimits
    costs: EncoderCosts

    @classmethod
    def of(
        cls, pool: Pool, model: Model, hardware: Hardware, factors: Mapping[str, float] | None = None
    ) -> PoolEncoder | None:
        """Return the encoder of a pool that `refusals` accepts; None if it has none. `factors` multiply the times of
        kinds, those of this one under `encoder`."""
        if pool.encoder is None or model.vision is None:
            return None
        tokens, largest = pool.batching.max_num_batched_tokens, model.vision.largest.vectors
        room, budget = pool.encoder.room(tokens, largest), pool.encoder.budget(tokens, largest)
        limits = EncoderLimits(room, budget, not pool.encoder.disable_chunked_mm_input)
        return cls(limits, EncoderCosts(model, hardware, pool, 1.0 if factors is None else factors.get(ENCODER, 1.0)))


def refusals(pool: Pool, model: Model) -> Iterator[str]:
    """Yield a message for each setting of a pool that an encoder in its steps does not go with."""
    if pool.encoder is None:
        return
    vision, parallelism = model.vision, pool.parallelism
    if vision is None:
        yield f"encoder: model {model.name} states no vision encoder; add vision to the model, or leave encoder out"
        return
    for key, value in (
        ("parallelism.pp", parallelism.pp if parallelism.pp > 1 else None),
        ("parallelism.cp", parallelism.cp if parallelism.context_ranks > 1 else None),
        ("research.afd", pool.studied.afd),
        ("costs", pool.costs),
    ):
        if value is not None:
            yield f"encoder and {key} do not go together; leave one of them out"
    if not pool.batching.chunked_prefill:
        yield "encoder needs chunked prefill, which cuts prompts before images; set batching.chunked_prefill"
    tokens, largest = pool.batching.max_num_batched_tokens, vision.largest.tokens
    if pool.encoder.disable_chunked_mm_input and largest > tokens:
        yield (
            f"disable_chunked_mm_input needs a step for the largest image ({largest} tokens); raise "
            f"max_num_batched_tokens ({tokens}), or leave it out"
        )


def check_images(plan: Plan, model: Model, stream: RequestStream) -> None:
    """Raise UsageError if a load has images that nothing in the plan encodes."""
    images = stream.images
    if images is None:
        return
    if not images.sized:
        raise UsageError(
            f"images of the load are not sized by model {model.name}; simulate it with simtune simulate or optimize"
        )
    apart = [stage.name for stage in plan.stages or () if stage.encoder is not None]
    for pool in plan.pools:
        if apart and pool.encoder is not None:
            raise UsageError(
                f"plan {plan.name}: stage {apart[0]} encodes images already; remove encoder from pool {pool.name}, or "
                "the stage"
            )
        if apart:
            continue
        if pool.role != "decode" and pool.encoder is None:
            raise UsageError(
                f"plan {plan.name}: the load has images, and pool {pool.name} does not encode them; add "
                "encoder: {} to the pool, or a stage with encoder: weights"
            )
