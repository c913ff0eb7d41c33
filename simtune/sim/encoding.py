"""Pools whose steps encode media: the time of their steps, and what a load with media needs of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from simtune.costs.encoder import ENCODER, EncoderCosts, Work
from simtune.costs.protocol import ChunkList
from simtune.costs.ticks import to_ticks
from simtune.engine import Scheduler, Step
from simtune.engine.encoder import EncoderLimits
from simtune.engine.encoding import EncodingFcfs
from simtune.engine.media import MediaItem
from simtune.errors import UsageError
from simtune.results.outcome import EncoderUse
from simtune.sim.core import EngineCore
from simtune.sim.step_timing import JumpTime, StepTimer
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.tower import MEDIA_KINDS, MEDIA_NAMES, MediaKind, MediaShape, media_words
from simtune.workload.media import RequestMedia
from simtune.workload.requests import RequestStream


class EncodingTimer(StepTimer):
    """Timer of steps that first encode the items which their chunks reach."""

    def __init__(self, timer: StepTimer, costs: EncoderCosts) -> None:
        self._timer, self._costs = timer, costs
        self.affine, self.asks_longest = timer.affine, timer.asks_longest
        self.ticks = 0
        """Ticks of encoding so far."""

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """See `StepTimer.mixed`."""
        ticks = self._timer.mixed(step, chunks, completing)
        if step.encoded:
            encoding = to_ticks(self._costs.seconds([_work(item) for item in step.encoded]))
            self.ticks += encoding
            ticks += encoding
        return ticks

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """See `StepTimer.decode`; a step without chunks encodes nothing."""
        self._timer.decode(step, most, time)


def _work(item: MediaItem) -> Work:
    """Return the work of an item, as the costs count it."""
    return Work(*item.work, item.vectors, cast(MediaKind, item.kind))


def encode_in_steps(cores: Sequence[EngineCore], costs: EncoderCosts) -> None:
    """Let cores encode media in their steps, at these costs."""
    for core in cores:
        core.timer = EncodingTimer(core.timer, costs)


def encoder_use(scheduler: Scheduler, timer: StepTimer) -> EncoderUse | None:
    """Return the work of the encoder in a core's steps; None without one."""
    if not isinstance(scheduler, EncodingFcfs) or not isinstance(timer, EncodingTimer):
        return None
    return EncoderUse(scheduler.encoder.encoded, scheduler.encoder.hits, timer.ticks)


@dataclass(frozen=True)
class PoolEncoder:
    """Encoders of media in the steps of a pool."""

    limits: EncoderLimits
    costs: EncoderCosts
    kinds: tuple[MediaKind, ...]
    """Kinds of media that instances take."""

    @classmethod
    def of(
        cls, pool: Pool, model: Model, hardware: Hardware, factors: Mapping[str, float] | None = None
    ) -> PoolEncoder | None:
        """Return the encoder of a pool that `refusals` accepts; None if it has none. `factors` multiply the times of
        kinds, those of this one under `encoder`."""
        item = _largest(pool, model)
        if pool.encoder is None or item is None:
            return None
        tokens, largest = pool.batching.max_num_batched_tokens, item.vectors
        room, budget = pool.encoder.room(tokens, largest), pool.encoder.budget(tokens, largest)
        limits = EncoderLimits(room, budget, not pool.encoder.disable_chunked_mm_input)
        factor = 1.0 if factors is None else factors.get(ENCODER, 1.0)
        return cls(limits, EncoderCosts(model, hardware, pool, factor), pool.encoder.kinds(model.towers))


def _largest(pool: Pool, model: Model) -> MediaShape | None:
    """Return the sizes of the largest item for which a pool keeps room; None if it takes none."""
    if pool.encoder is None:
        return None
    item = pool.encoder.largest(model.towers, pool.max_model_len or model.max_position)
    return None if item is None else item[1]


def refusals(pool: Pool, model: Model) -> Iterator[str]:
    """Yield a message for each setting of a pool that an encoder in its steps does not go with."""
    if pool.encoder is None:
        return
    item, parallelism = _largest(pool, model), pool.parallelism
    if not model.towers.kinds:
        yield (
            f"encoder: model {model.name} states no vision encoder and no audio encoder; add vision to the model, or "
            "audio, or leave encoder out"
        )
        return
    if item is None:
        yield "encoder takes no kind of media that the model reads; raise a limit of encoder.limit_per_prompt above 0"
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
    tokens, largest = pool.batching.max_num_batched_tokens, item.tokens
    if pool.encoder.disable_chunked_mm_input and largest > tokens:
        yield (
            f"disable_chunked_mm_input needs a step for the largest item ({largest} tokens); raise "
            f"max_num_batched_tokens ({tokens}), or leave it out"
        )


def check_media(plan: Plan, model: Model, stream: RequestStream) -> None:
    """Raise UsageError if a load has media that nothing in the plan encodes."""
    media = stream.media
    if media is None:
        return
    names = media_words(media.kinds)
    if not media.sized:
        raise UsageError(
            f"{names} of the load are not sized by model {model.name}; simulate it with simtune simulate or optimize"
        )
    apart = [stage.name for stage in plan.stages or () if stage.encoder is not None]
    for pool in plan.pools:
        if apart and pool.encoder is not None:
            raise UsageError(
                f"plan {plan.name}: stage {apart[0]} encodes {names} already; remove encoder from pool {pool.name}, or "
                "the stage"
            )
        if apart or pool.role == "decode":
            continue
        if pool.encoder is None:
            raise UsageError(
                f"plan {plan.name}: the load has {names}, and pool {pool.name} does not encode them; add "
                "encoder: {} to the pool, or a stage with encoder: weights"
            )
        _check_limits(f"plan {plan.name}: pool {pool.name}", pool, model, media)


def _check_limits(where: str, pool: Pool, model: Model, media: RequestMedia) -> None:
    """Raise UsageError if an instance rejects items: more of a kind than it takes, or larger ones than it has room
    for."""
    largest = _largest(pool, model)
    assert pool.encoder is not None
    for kind in media.kinds:
        limit, most = pool.encoder.limit_per_prompt.of(kind), media.most(kind)
        if limit is not None and most > limit:
            raise UsageError(
                f"{where} takes {limit} {MEDIA_NAMES[kind]} in one prompt, and the load has up to {most}; raise "
                f"encoder.limit_per_prompt.{kind}"
            )
    if largest is None or not len(media):
        return
    tokens, vectors = pool.batching.max_num_batched_tokens, int(media.shape[:, 2].max())
    room = min(pool.encoder.room(tokens, largest.vectors), pool.encoder.budget(tokens, largest.vectors))
    if vectors > room:
        kind = MEDIA_KINDS[int(media.kind[media.shape[:, 2].argmax()])]
        raise UsageError(
            f"{where}: an item of the load ({kind}) has {vectors:,} embeddings, more than a step may make or the cache "
            f"keep ({room:,}), and is rejected; raise max_num_batched_tokens, max_model_len or encoder.cache_size, or "
            f"make {MEDIA_NAMES[kind]} smaller"
        )
    _check_sound(where, pool, media, room)


def _check_sound(where: str, pool: Pool, media: RequestMedia, room: int) -> None:
    """Raise UsageError if a video between whose frames its sound stands would wait for ever."""
    if media.group_s is None:
        return
    sound = np.flatnonzero(media.group_s)
    tokens, budget = media.shape[sound, 3] + media.shape[sound - 1, 3], pool.batching.max_num_batched_tokens
    if pool.encoder is not None and pool.encoder.disable_chunked_mm_input and tokens.max(initial=0) > budget:
        raise UsageError(
            f"{where}: disable_chunked_mm_input needs a step for a video and its sound ({tokens.max():,} tokens); "
            f"raise max_num_batched_tokens ({budget:,}), or leave it out"
        )
    # behind some text a step may encode the video, and the next one its sound
    vectors = np.where(media.start[sound] == 0, media.shape[sound, 2] + media.shape[sound - 1, 2], 0).max(initial=0)
    if vectors > room:
        raise UsageError(
            f"{where}: a prompt begins with a video that has {vectors:,} embeddings with its sound, more than a step "
            f"may make or the cache keep ({room:,}), and would wait for ever; raise max_num_batched_tokens or "
            "encoder.max_batched_embeds, or make videos smaller"
        )
