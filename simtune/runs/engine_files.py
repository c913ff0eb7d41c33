"""Settings for engines: files for those that can run a plan, and the part of a schedule for drafts that each can be
given.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from simtune import emit
from simtune.emit.emitter import with_unsaid
from simtune.errors import SimtuneError, UsageError
from simtune.runs.files import Files
from simtune.sim.deployment import Deployment
from simtune.specs import yamlfile
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.references import Place, to_folder, with_places
from simtune.tuner.drafting import Draft, Schedule, described

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_NODES = 64
"""Tokens of the largest draft tree that is tried for the report."""


def speculation_facts(draft: Draft, chosen: Schedule) -> dict[str, Any]:
    """Return a schedule for drafts as plain data, with the part of it that each engine can be given."""
    engines = []
    for name, emitter in emit.engines().items():
        if not emitter.schemes:
            continue
        projection = chosen.projection_for(emitter.schemes)
        settings, why = None, "drafting pays nowhere"
        if projection.scheme is not None:
            speculation = draft.speculation(projection.scheme)
            settings, why = emit.drafting_settings(emitter, speculation, draft.drafting.model)
        engines.append(
            {
                "engine": name,
                "scheme": "none" if projection.scheme is None else projection.scheme.in_words(),
                "gain": projection.gain,
                "loss": projection.loss,
                "settings": settings,
                "why": why,
            }
        )
    return {**described(draft, chosen), "engines": engines}


def other_engines(facts: dict[str, Any], plan: Plan) -> Files:
    """Return files with the best single draft for engines that do not schedule as the plan does."""
    files, emitters = Files(), emit.engines()
    for engine in facts["engines"]:
        emitter, settings = emitters[engine["engine"]], engine["settings"]
        if settings is not None and not all(emitter.schedules(pool) for pool in plan.pools):
            scheme = engine["scheme"].capitalize()
            comment = f"{scheme}: the best single draft for this load by the cost model, not simulated."
            files |= emitter.drafting_file(settings, comment)
    return files


NO_ENGINE = "engine/none.txt"
"""File that states why there are no engine settings."""


def engine_files(deployment: Deployment, *, simulated_only: bool = False) -> Files:
    """Return the settings for the engine that can run the plan; if it cannot draft so, the drafting settings of other
    engines; or why there are none, and what engines lack for the plan.

    Raise UsageError if the engine refuses the plan, unless the plan may be one that is `simulated_only`.
    """
    plan = deployment.plan
    try:
        files = _emitted(deployment, plan)
    except UsageError as error:
        if not simulated_only:
            raise
        files, why = {}, "; ".join(line.removeprefix(f"{plan.name}: ") for line in str(error).splitlines())
    else:
        why = "" if files else emit.why_none(plan)
    if files:
        return files
    parts = emit.to_build(plan) if simulated_only else []
    to_build = f"To be built in an engine: {', '.join(parts)}.\n" if parts else ""
    return {NO_ENGINE: f"No engine settings: {why}.\n{to_build}"}


def plan_file(plan: Plan, comment: str, folder: Path) -> str:
    """Return the file of a plan in `folder`; the plan's references are from the present folder."""
    return yamlfile.dump(with_places(plan.to_data(), to_folder(folder), tables=True), comment)


def searched_plan(plan: Plan, comment: str, place: Place = str) -> str:
    """Return the file of a plan that a search chose, see `searched_data`; `place` turns its references into those of
    the file's folder. The comment names the settings left out."""
    data, left_open = searched_data(plan)
    return yamlfile.dump(with_places(data, place, tables=True), with_unsaid(comment, left_open))


def searched_data(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Return a plan that a search chose as plain data, without the settings that are left to its engine, so that a
    reader finds them open too; and these settings, each with the reason.
    """
    data, left_open = plan.to_data(), []
    for pool, entry in zip(plan.pools, data["pools"], strict=True):
        emitter = emit.emitter_of(pool)
        if emitter is None:
            continue
        left_open += [f"pool {pool.name}: {why}" for why in emitter.left_open(pool)]
        for key in emitter.own_defaults:
            if pool.stated(key) is None:
                part, name = key.split(".")
                del entry[part][name]
    return data, left_open


def launch_like(deployment: Deployment, plan: Plan) -> str | None:
    """Return the command that starts another plan of the same model and models that draft; None if no engine has its
    policy.

    Raises nothing for a setting that an engine cannot be given: such a plan has no command either.
    """
    try:
        return launch_of(_emitted(deployment, plan, servers_only=True), deployment.model.hf)
    except SimtuneError:
        return None


def _emitted(deployment: Deployment, plan: Plan, *, servers_only: bool = False) -> Files:
    devices_per_node, drafts = deployment.hardware.device.devices_per_node, draft_models(deployment)
    return {**emit.engine_files(plan, deployment.model, devices_per_node, drafts, servers_only=servers_only)}


def launch_of(files: Files, checkpoint: str | None) -> str | None:
    """Return the commands that start a plan: one for each vLLM pool, with its settings written out, or the script."""
    commands = []
    for name, text in files.items():
        if name.startswith("engine/vllm-") and isinstance(text, str):
            settings = yaml.load(text, Loader=_LOADER)
            flags = " ".join(_flag(key, value) for key, value in settings.items())
            commands.append(f"vllm serve {shlex.quote(checkpoint or 'MODEL')} {flags}".rstrip())
    script = files.get("engine/launch.sh")
    return "\n".join(commands) if commands else script if isinstance(script, str) else None


def _flag(key: str, value: Any) -> str:
    if value is True:
        return f"--{key}"
    if value is False:
        return f"--no-{key}"
    return f"--{key} {shlex.quote(json.dumps(value) if isinstance(value, (dict, list)) else str(value))}"


def draft_models(deployment: Deployment) -> dict[str, Model]:
    """The models that draft, by the names that the plan has for them."""
    drafting = deployment.drafting
    models = {
        pool.speculation.drafter.own_model: drafting[pool.name].model
        for pool in deployment.plan.pools
        if pool.speculation is not None and pool.name in drafting
    }
    return {name: model for name, model in models.items() if name is not None and model is not None}
