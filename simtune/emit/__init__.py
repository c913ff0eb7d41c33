"""A plan as the settings files and launch script of real engines.

No engine has settings for everything that can be simulated. `ENGINES` lists the emitters; other settings are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from simtune.emit.emitter import Emitter, EngineFiles, LaunchArgs, simulated_only
from simtune.emit.llama_cpp import LlamaCpp
from simtune.emit.multiplexed import SglangServers
from simtune.emit.tensorrt_llm import TensorrtLlm
from simtune.emit.transformers import Transformers
from simtune.emit.vllm_encoders import VllmServers
from simtune.errors import UsageError
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.plugins import PartKind, registered
from simtune.specs.pool import Pool
from simtune.specs.preset import NO_ENGINE
from simtune.specs.speculation import Speculation

__all__ = [
    "ENGINES",
    "Emitter",
    "EngineFiles",
    "Settings",
    "drafting_settings",
    "emitter_of",
    "engine_files",
    "engine_for",
    "engines",
    "to_build",
    "why_none",
]

_OWN: tuple[Emitter, ...] = (VllmServers(), SglangServers(), TensorrtLlm(), LlamaCpp(), Transformers())
ENGINES: dict[str, Emitter] = {emitter.name: emitter for emitter in _OWN}
"""The engines of the package that can be written for, by name."""

ENGINE: PartKind[Emitter] = PartKind(
    "engine", "simtune.engines", {name: type(e) for name, e in ENGINES.items()}, Emitter
)


def engines() -> dict[str, Emitter]:
    """`ENGINES`, then those that installed packages register as `simtune.engines`; the first that can run a plan is
    written for. Raises PartError if a registered one cannot be used."""
    added = [name for name in registered(ENGINE.group) if name not in ENGINES]
    return ENGINES | {name: ENGINE.find(name)() for name in added}


def engine_for(policy: str) -> Emitter | None:
    """Return the first engine that has a batching policy; None if none has it."""
    return next((emitter for emitter in engines().values() if policy in emitter.policies), None)


def emitter_of(pool: Pool) -> Emitter | None:
    """Return the engine of a pool: that of its preset, else the first one that has its policy; None if none has, or if
    the pool is for no engine.
    """
    if pool.engine == NO_ENGINE:
        return None
    of_preset = next((emitter for emitter in engines().values() if emitter.meant_by(pool)), None)
    return of_preset or engine_for(pool.batching.policy)


def _writer(plan: Plan) -> Emitter | None:
    """Return the engine that schedules as a plan does, if one does."""
    if any(pool.engine == NO_ENGINE for pool in plan.pools):
        return None
    every = engines().values()
    of_presets = [emitter for emitter in every if all(emitter.meant_by(pool) for pool in plan.pools)]
    return next((e for e in of_presets or every if all(e.schedules(pool) for pool in plan.pools)), None)


def drafting_settings(
    emitter: Emitter, speculation: Speculation, draft: Model | None = None
) -> tuple[LaunchArgs | None, str]:
    """(settings, \"\") of an engine, or None and why there are none. `draft` is the model that a draft model names."""
    try:
        return emitter.speculation(speculation, draft), ""
    except UsageError as error:
        return None, str(error)


def engine_files(
    plan: Plan,
    model: Model,
    devices_per_node: int,
    draft_models: Mapping[str, Model],
    *,
    servers_only: bool = False,
) -> EngineFiles:
    """Return the settings of the first engine that schedules as the plan does; none if no engine has its policy, or
    swaps.

    If that engine has no setting for the drafts, return the drafting settings of the engines that have one. Raises
    UsageError if the engine refuses the plan for another reason. `servers_only` leaves out files that the commands of
    its servers are not made of.
    """
    emitter = _writer(plan)
    if emitter is None or not emitter.takes_stages(plan):
        return {}
    drafting = [
        (emitter.of(pool.engine), pool.speculation, draft_models.get(pool.speculation.drafter.own_model or ""))
        for pool in plan.pools
        if pool.speculation is not None
    ]
    if all(drafting_settings(*draft)[0] for draft in drafting):
        write = emitter.server_files if servers_only else emitter.files
        return write(plan, model, devices_per_node, draft_models)
    files: EngineFiles = {}
    for candidate in engines().values():
        settings, _ = drafting_settings(candidate, *drafting[0][1:])
        if settings is not None and candidate is not emitter:
            files |= candidate.drafting_file(
                settings, f"The drafts of the plan, for which {emitter.title} has no setting."
            )
    return files


def why_none(plan: Plan) -> str:
    """Why there are no settings for any engine."""
    if any(pool.engine == NO_ENGINE for pool in plan.pools):
        return "the plan is for no engine (engine: none)"
    writer = _writer(plan)
    if plan.stages and not (writer is not None and writer.takes_stages(plan)):
        return "no engine has settings for the stages that its requests go through"
    policies = sorted({p.batching.policy for p in plan.pools if engine_for(p.batching.policy) is None})
    if policies:
        return f"no engine has policy {' or '.join(policies)}"
    if writer is None:
        return "no engine schedules and preempts as the plan does"
    return "no engine has settings for its drafts"


def to_build(plan: Plan) -> list[str]:
    """Return what engines lack for a plan, each with the part of an engine that would have to be changed for it."""
    lacks = [f"{key} ({part})" for pool in plan.pools for key, part, value in simulated_only(pool) if value is not None]
    policies = {pool.batching.policy for pool in plan.pools if engine_for(pool.batching.policy) is None}
    lacks += [f"batching.policy {policy} (the scheduler)" for policy in sorted(policies)]
    return list(dict.fromkeys(lacks))
