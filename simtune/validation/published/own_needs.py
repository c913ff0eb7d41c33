"""Parts that a published system needs beyond its base, and the engines that can be given it today."""

from __future__ import annotations

from collections.abc import Iterator

from simtune.emit import Emitter, drafting_settings, engines
from simtune.emit.emitter import simulated_only
from simtune.specs.drafters import BlockDrafter, Eagle, Medusa, ParallelDecoder
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.speculation import Speculation
from simtune.validation.published.own_runs import OwnSide

BILLION = 1e9


def gpus_of(side: OwnSide) -> int:
    """Return the GPUs of a side's plan."""
    return side.plan.num_devices


def needs_of(base: OwnSide, variant: OwnSide) -> list[str]:
    """Return the parts that a variant needs and the base does not, in words."""
    before = set(_parts(base))
    more = gpus_of(variant) - gpus_of(base)
    extra = [f"{gpus_of(variant)} GPUs, {more} more than its base"] if more > 0 else []
    return list(dict.fromkeys([*extra, *(part for part in _parts(variant) if part not in before)]))


def _parts(side: OwnSide) -> Iterator[str]:
    """Yield the parts of a side that a plain engine lacks, in words."""
    for pool in side.plan.pools:
        if pool.speculation is not None:
            yield from _drafts(side, pool)
        if pool.role != "mixed":
            yield "a link that carries KV caches between prefill and decode GPUs"
        for key, part, value in simulated_only(pool):
            if value is not None:
                yield f"{key}: {part}"
    if side.plan.stages:
        yield "stages before or beside the engine"


def _drafts(side: OwnSide, pool: Pool) -> Iterator[str]:
    """Yield the parts that the drafts of a pool need."""
    assert pool.speculation is not None
    drafter = pool.speculation.drafter
    if drafter.own_model is not None:
        size = side.draft_model(drafter.own_model).parameters / BILLION
        yield f"a draft model of {size:.2g} B parameters with the vocabulary of {side.model.name}"
    elif isinstance(drafter, (Eagle, Medusa, BlockDrafter)):
        yield f"trained draft layers ({drafter.label}) for {side.model.name}"
    elif isinstance(drafter, ParallelDecoder):
        yield f"{side.model.name} trained to decode several tokens in a pass"


# --- engines ----------------------------------------------------------------------------------------------


def engines_for(base: OwnSide, variant: OwnSide) -> tuple[list[str], str | None]:
    """Return the engines that can be given a variant, and why the nearest one cannot if there are none.

    Settings other than drafts that an engine refuses of the base as well do not count: they are those of the
    publication's engine. Nor does a checkpoint without a name, which a user would name.
    """
    if variant.plan.stages:
        return [], "no engine has settings for the stages that its requests go through"
    refused = {name: _refusals(emitter, variant) - _refusals(emitter, base) for name, emitter in engines().items()}
    for name, emitter in engines().items():
        refused[name] |= _undrafted(emitter, variant)
    able = [name for name, why in refused.items() if not why]
    if able:
        return able, None
    nearest = min(refused, key=lambda name: len(refused[name]))
    return [], f"{nearest}: {min(refused[nearest])}"


def _refusals(emitter: Emitter, side: OwnSide) -> set[str]:
    """Return what an engine would not start with, or replaces by what it has, of the settings of a side."""
    reasons: set[str] = set()
    for pool in side.plan.pools:
        plain = pool.model_copy(update={"speculation": None})
        release = emitter.of(pool.engine) if emitter.meant_by(pool) else emitter
        reasons |= {*release.refusals(plain, side.model, {}), *release.unsaid(plain)}
    return reasons


def _undrafted(emitter: Emitter, side: OwnSide) -> set[str]:
    """Return why an engine has no setting for the drafts of a side."""
    drafting = [pool for pool in side.plan.pools if pool.speculation is not None]
    reasons = (drafting_settings(emitter, _named(pool), _draft_model(side, pool))[1] for pool in drafting)
    return {f"speculation: {why}" for why in reasons if why}


def _draft_model(side: OwnSide, pool: Pool) -> Model | None:
    """Return the draft model of a pool, which an engine would load by some name."""
    name = None if pool.speculation is None else pool.speculation.drafter.own_model
    if name is None:
        return None
    draft = side.draft_model(name)
    return draft.model_copy(update={"hf": draft.hf or name})


def _named(pool: Pool) -> Speculation:
    """Return the drafts of a pool whose drafter names a checkpoint if an engine would load one."""
    assert pool.speculation is not None
    drafter = pool.speculation.drafter
    if "checkpoint" not in type(drafter).model_fields:
        return pool.speculation
    with_checkpoint = drafter.model_copy(update={"checkpoint": drafter.weights or "checkpoint"})
    return pool.speculation.model_copy(update={"drafter": with_checkpoint})
