"""The plan that starts of servers make: equal servers are instances of one pool; the rest is the engine preset's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simtune.emit.dynamo import ROUTER_MODES
from simtune.emit.importing import division_read, encoders_read
from simtune.emit.importing.engine_readers import READERS
from simtune.emit.importing.knowledge import IGNORED
from simtune.emit.importing.launches import Launch
from simtune.emit.importing.pool_draft import Note, PoolDraft, note_lines
from simtune.emit.importing.sources import Source, join_nodes, release_of_image
from simtune.errors import Problem, SimtuneError, SpecError, UsageError, suggest
from simtune.specs import yamlfile
from simtune.specs.base import override, spec_name
from simtune.specs.catalog import load_acceptance, load_engine, load_hardware, load_model, names, with_engines
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.preset import EnginePreset

_ONE_RELEASE = ("llamacpp", "transformers")
"""Families with a single preset, which needs no release."""
IMPORTED = "the imported plan"
_MOST_PROBLEMS = 50


@dataclass(frozen=True)
class ImportRequest:
    """Text to import, and what the user states beside it."""

    hardware: str | None
    text: str | None = None
    words: Sequence[str] = ()
    """Command line, in place of a text."""
    file: str = "command line"
    folder: Path | None = None
    """Folder in which files that the text names are looked for; None: they are not read."""
    model: str | None = None
    engine: str | None = None
    acceptance: str | None = None
    entry: str | None = None
    name: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    """Role of each pool whose options do not state it."""
    settings: Sequence[str] = ()
    """Fields of the plan to override, KEY=VALUE."""
    lenient: bool = False


@dataclass(frozen=True)
class Imported:
    """A plan as plain data, with notes on what is not in it."""

    plan: Plan
    """The plan as it is simulated, with the settings of its engine."""
    data: dict[str, Any]
    """The plan with the settings that the servers are given."""
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """YAML of the plan, with the notes at its top."""
        return yamlfile.dump(self.data, "\n".join(self.notes))


def import_plan(request: ImportRequest) -> Imported:
    """Return the plan of a request. Raises SpecError with every problem and its place, UsageError for what the user has
    to state.
    """
    try:
        return _imported(request)
    except RecursionError:
        message = "is nested too deeply; cut it to what starts the servers"
        raise SpecError(Problem(request.file, message)) from None


def _imported(request: ImportRequest) -> Imported:
    family = None if request.engine is None else load_engine(request.engine).family
    source = Source(request.file, request.folder, request.variables, family, request.entry)
    if request.text is None:
        source.words(request.words)
    else:
        source.read(request.text)
    join_nodes(source)
    launches = source.launches
    _check(request, source)
    if any(_needs_role(launch) for launch in launches) and not source.roles:
        source.look_beside()
    for launch in launches:
        port = str(launch.value("port") or 8000)
        node = launch.branch if launch.branch.isdecimal() else ""
        role = source.roles.get((node, port)) or source.roles.get(("", port)) or request.roles.get(launch.pool)
        launch.role = launch.role or role
    engine, preset = _engine(request, source, launches[0].family)
    model = _model(request, launches)
    assert request.hardware is not None
    device = load_hardware(request.hardware).device
    notes: list[Note] = list(source.notes)
    problems: list[Problem] = []
    pools: list[dict[str, Any]] = []
    encoders, servers = encoders_read.parted(launches)
    for launch in _grouped(servers):
        settings = preset.settings(device, load_model(model), _stages(launch))
        draft = PoolDraft(load_model(model), settings, request.acceptance, _reference, request.lenient)
        READERS[launch.family].read(draft, launch)
        notes += draft.notes
        problems += draft.problems
        pools += division_read.pools_of(_pool(launch, draft, request, engine), draft.division, device)
    if problems:
        unique = list(dict.fromkeys(problems))
        raise SpecError(unique[:_MOST_PROBLEMS])
    data = _plan(request, source, model, pools)
    data |= encoders_read.stages_of(encoders, pools, notes, lenient=request.lenient)
    return _checked(data, note_lines(notes), request)


def _checked(data: dict[str, Any], notes: tuple[str, ...], request: ImportRequest) -> Imported:
    """Return what is written, once it is a valid plan."""
    document = override(yamlfile.parse(yamlfile.dump(data), IMPORTED), request.settings)
    plan = Plan.from_document(with_engines(document))
    return Imported(plan, document.data, notes)


def _check(request: ImportRequest, source: Source) -> None:
    """Raise an error if nothing is started, if engines differ, if the hardware is not stated, or if the acceptance of
    drafts is not there."""
    if request.acceptance is not None:
        load_acceptance(request.acceptance)
    launches = source.launches
    if not launches:
        raise SpecError(
            Problem(
                request.file,
                "starts no server of an engine that simtune reads: vllm serve, python -m sglang.launch_server, sglang "
                "serve, trtllm-serve, llama-server, transformers serve",
            )
        )
    if len({launch.family for launch in launches}) > 1:
        first, second = launches[0], next(x for x in launches if x.family != launches[0].family)
        message = f"starts {second.family} beside {first.family}; import them one at a time"
        raise SpecError(Problem(second.file, message, "", second.line))
    if len(launches) > 1 and (unsure := next((x for x in launches if x.conditional), None)) is not None:
        message = "is started under a condition that is not known here; give --env NAME=VALUE, or cut the script"
        raise SpecError(Problem(unsure.file, message, "", unsure.line))
    if request.hardware is None:
        raise UsageError(
            f"{request.file}: no launch line states the card; give --hardware NAME (`simtune list hardware`)"
        )


def _needs_role(launch: Launch) -> bool:
    return (
        launch.role is None
        and (launch.value("kv-transfer-config", "cache-transceiver-config") is not None or launch.pool in ("", None))
    ) or launch.family == "trtllm"


def _engine(request: ImportRequest, source: Source, family: str) -> tuple[str, EnginePreset]:
    """Return name and preset of the engine. Raises UsageError if its release is not known, or is of another engine."""
    engine = request.engine
    if engine is None:
        tags = (release_of_image(launch.image) for launch in source.launches)
        release = source.release or next((tag for tag in tags if tag), "")
        if not release and family not in _ONE_RELEASE:
            presets = [name for name in names("engine") if name.startswith(family)]
            raise UsageError(
                f"{request.file}: which release of {family} runs is not in it; give --engine {family}@RELEASE, or one "
                f"of {', '.join(presets)}"
            )
        engine = f"{family}@{release}" if release else family
    preset = load_engine(engine)
    if preset.family != family:
        raise UsageError(
            f"--engine {engine}: is of {preset.family}, and {request.file} starts {family}; name its preset"
        )
    return preset.name, preset


def _model(request: ImportRequest, launches: Sequence[Launch]) -> str:
    """Return the model's name in the plan. Raises UsageError if it is not known, or differs between servers."""
    if request.model is not None:
        return request.model
    models = list(dict.fromkeys(launch.model for launch in launches if launch.model is not None))
    if len(models) != 1 or "${" in models[0]:
        fault = "names no model" if not models else f"names the model {' and '.join(models[:3])}"
        raise UsageError(f"{request.file}: {fault}; give --model NAME, or --env NAME=VALUE for a variable")
    reference = _reference(models[0])
    try:
        load_model(reference)
    except SimtuneError:
        hint = suggest(reference.rpartition("/")[2].lower(), names("model"))
        why = f"model {reference} is no built-in one, no folder here, and not in the cache of huggingface_hub"
        raise UsageError(f"{request.file}: {why}{hint}; give --model NAME, or its config.json") from None
    return reference


def _reference(checkpoint: str) -> str:
    """Return the built-in model of a checkpoint's id, or the checkpoint as it is."""
    if checkpoint in names("model"):
        return checkpoint
    loaded: dict[str, Model] = {name: load_model(name) for name in _near(checkpoint)}
    return next((name for name, model in loaded.items() if model.hf == checkpoint), checkpoint)


def _near(checkpoint: str) -> list[str]:
    """Return built-in models whose names may be those of a checkpoint: the first word of the name is in it."""
    lower = checkpoint.lower()
    first_words = {name: re.match(r"[a-z]*", name.lower()) for name in names("model")}
    return [name for name, word in first_words.items() if word is not None and word[0] in lower]


def _stages(launch: Launch) -> int:
    stages = str(launch.value("pipeline-parallel-size", "pp-size") or 1)
    return int(stages) if stages.isdecimal() and len(stages) < 6 else 1


def _grouped(launches: Sequence[Launch]) -> list[Launch]:
    """Return one launch for all that are alike but for what changes nothing: ports, addresses."""
    groups: dict[Any, Launch] = {}
    for launch in launches:
        matters = [(o.name, str(o.value)) for o in launch.given if o.name not in IGNORED[launch.family]]
        devices = launch.environment.get("CUDA_VISIBLE_DEVICES", "").count(",") if launch.family == "llamacpp" else 0
        key = (launch.model, launch.pool, launch.role, devices, *matters)
        if key in groups:
            groups[key].instances += launch.instances
        else:
            groups[key] = launch
    return list(groups.values())


def _pool(launch: Launch, draft: PoolDraft, request: ImportRequest, engine: str) -> dict[str, Any]:
    role = draft.data.pop("role", "mixed")
    parallelism = draft.data.pop("parallelism", {})
    head: dict[str, Any] = {"name": spec_name(launch.pool or role, role), "role": role, "hardware": request.hardware}
    shape = {"parallelism": parallelism} if parallelism else {}
    pool = {**head, "engine": engine, "instances": launch.instances, **shape, **draft.data}
    return {key: pool[key] for key in Pool.model_fields if key in pool}


def _plan(request: ImportRequest, source: Source, model: str, pools: list[dict[str, Any]]) -> dict[str, Any]:
    default = spec_name(Path(request.file).stem if request.folder else "imported", "imported")
    counts: dict[str, int] = {}
    for pool in pools:
        counts[pool["name"]] = counts.get(pool["name"], 0) + 1
        if counts[pool["name"]] > 1:
            pool["name"] = f"{pool['name']}-{counts[pool['name']]}"
    routers = {mode: kind for kind, mode in ROUTER_MODES.items()}
    router = {"router": {"kind": routers[source.router]}} if source.router in routers else {}
    link = division_read.link() if any("share" in pool for pool in pools) else {}
    apart: dict[str, Any] = {"link": link} if any(pool["role"] != "mixed" for pool in pools) else {}
    name = request.name or (spec_name(source.plan, default) if source.plan else default)
    return {"schema": Plan.schema_id(), "name": name, "model": model, "pools": pools, **router, **apart}
