"""simtune from Python: load specs, simulate a plan, optimize a study.

Specs are given by name, by path, or as objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from simtune.costs.other_engines import for_preset, load_kernels
from simtune.costs.step_files import read_costs
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result
from simtune.sim import plan_parts
from simtune.sim.deployment import NO_HARDWARE, Deployment, default_plan, deploy, unbound_plan
from simtune.sim.drafting import Drafting
from simtune.sim.parallel import Jobs
from simtune.sim.streamed import StreamedLoad, StreamedResult, simulate_streamed
from simtune.sim.watch import Watch
from simtune.specs.base import Spec, override
from simtune.specs.catalog import (
    LikeLaunch,
    engine_name,
    load,
    load_acceptance,
    load_engine,
    load_launch,
    load_model,
    load_plan,
    load_study,
    load_workload,
)
from simtune.specs.columns import replay, trace_of
from simtune.specs.hardware import Hardware
from simtune.specs.launch import LaunchFacts, LoadShape
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.preset import NO_ENGINE, EnginePreset
from simtune.specs.references import beside, is_path
from simtune.specs.speculation import DrafterChoice
from simtune.specs.study import Study
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import Workload
from simtune.specs.yamlfile import Document
from simtune.workload.requests import RequestStream, build_stream
from simtune.workload.trace_media import check_media

if TYPE_CHECKING:
    # A simulation needs no tuner: importing it takes a third of the time in which a command starts.
    from simtune.tuner.drafting import Draft
    from simtune.tuner.question import Question, StudyEngine
    from simtune.tuner.trial import Tuned

Given = TypeVar("Given")
Load = str | Path | Workload | Trace | Mapping[str, Any]
"""Requests: a workload or a trace file by name or path, as an object, or the columns of a trace."""

# --- simulate ---------------------------------------------------------------------------------------------


def simulate(  # noqa: PLR0913 - one for each option
    workload: Load,
    *,
    plan: str | Path | Plan | None = None,
    model: str | Path | Model | None = None,
    hardware: str | Path | Hardware | None = None,
    engine: str | Path | None = None,
    like: str | Path | LaunchFacts | None = None,
    costs: plan_parts.Costs | str | Path | None = None,
    rate_rps: float | None = None,
    requests: int | None = None,
    seed: int = 0,
) -> Result:
    """Simulate a plan under a load.

    Workload, plan, model and hardware are given by name or path or as objects, the requests also as columns: a mapping
    with arrival_s, prompt_tokens and output_tokens. Without a plan: one instance of `model` on the fewest GPUs that
    fit, with the settings of `engine`, a preset, or vLLM's batching. With a plan, `model` and `hardware` replace the
    plan's own. `like` are facts of a published launch file (`simtune list launches`): what it sets takes the place of
    the engine's defaults, and its model, card and engine are meant where none is named.

    `costs` are used in place of those that follow from the hardware: an object with the methods of
    `simtune.costs.protocol.StepCosts`, a function `seconds(num_decodes, context_tokens, chunks)`, or a file with a
    table of whole steps (`simtune.costs.step_table`). The hardware then only says how much memory there is; without
    hardware and plan, memory does not bind.

    `rate_rps` (as the exact mean rate of the requests) and `requests` replace the workload's own. Raises SpecError,
    UsageError or Infeasible, each with the remedy.
    """
    specs = load_specs(model, hardware, workload, plan, engine=engine, like=like)
    return set_up(specs, costs=costs, rate_rps=rate_rps, requests=requests, seed=seed).run()


@dataclass(frozen=True)
class Specs:
    """Specs of a simulation, loaded."""

    model: Model
    hardware: Sequence[Hardware]
    """Hardware of every pool of the plan; without a plan, that of the plan that will be made, or empty."""
    workload: Workload
    trace: Trace | None
    plan: Plan | None
    plan_settings: Sequence[str] = ()
    """Settings that override fields of the plan that will be made."""
    engine: EnginePreset | None = None
    """Engine whose settings the plan that will be made has."""
    references: tuple[str | None, str | None] = (None, None)
    """References of model and hardware that take the place of the plan's; None for those of the plan, and for
    objects."""


@dataclass(frozen=True)
class Experiment:
    """A plan under a load, ready to run."""

    deployment: Deployment
    workload: Workload
    trace: Trace | None
    stream: RequestStream
    seed: int
    plan: Plan
    """The plan with the references by which its model and hardware were found, from the present folder."""

    def run(self, *, record: bool = False, watch: Watch | None = None) -> Result:
        """Simulate the plan; `record` keeps every step for timelines, `watch` is called now and then with progress."""
        return self.deployment.simulate(self.stream, record=record, seed=self.seed, watch=watch)


def load_specs(
    model: str | Path | Model | None,
    hardware: str | Path | Hardware | None,
    workload: Load,
    plan: str | Path | Plan | None = None,
    settings: Mapping[str, Sequence[str]] | None = None,
    engine: str | Path | None = None,
    like: str | Path | LaunchFacts | None = None,
) -> Specs:
    """Load specs that are given by name or path. `settings` override fields, by kind of spec.

    A plan may be tried with another model, or with all its pools on other hardware, than it was made for. What `like`
    sets for the load takes the place of defaults of the engine.
    """
    by_spec = settings or {}
    model, hardware, plan, engine = _named(model), _named(hardware), _named(plan), _named(engine)
    if engine is not None and plan is not None:
        raise UsageError("engine: is given beside a plan; name it in the plan's pools, or leave one of the two out")
    requests, trace = _load_requests(workload, by_spec.get("workload", ()))
    launch = _launch(like)
    over = None if launch is None else partial(launch.over, load=LoadShape.of(requests, trace))
    plan = _plan_like(plan, launch, over, by_spec.get("plan", ()))
    if plan is not None:
        model = plan.model if model is None else model
    elif launch is not None:
        model, hardware, engine = model or launch.model, hardware or launch.hardware, engine or launch.engine
    if model is None:
        raise UsageError("name a model and a hardware profile, or a plan that does")
    return Specs(
        model if isinstance(model, Model) else load_model(model, by_spec.get("model", ())),
        _load_profiles(hardware, plan, engine, by_spec.get("hardware", ())),
        requests,
        trace,
        plan,
        by_spec.get("plan", ()),
        None if engine is None else load_engine(engine) if over is None else over(load_engine(engine)),
        (_reference(model), _reference(hardware)),
    )


def _reference(spec: str | Spec | None) -> str | None:
    """Return the reference by which a spec is given; None for an object."""
    return spec if isinstance(spec, str) else None


def _plan_like(
    plan: str | Plan | None,
    launch: LaunchFacts | None,
    over: LikeLaunch | None,
    settings: Sequence[str],
) -> Plan | None:
    """Return a plan, given by its file or as an object, filled in by its engines' presets or what `over`, of the
    launch facts, makes of them. Raises UsageError for launch facts that no pool could have."""
    if isinstance(plan, str):
        read = load_plan(plan, settings, plan_parts.problems, over)
        _check_filled(read, launch)
        return _tables_beside(read, Path(plan).parent)
    if plan is not None and launch is not None:
        raise UsageError("launch facts are beside a plan that has all its settings; give the plan by its file")
    return plan


def _launch(like: str | Path | LaunchFacts | None) -> LaunchFacts | None:
    """Return launch facts, given by name or path or as an object."""
    like = _named(like)
    return load_launch(like) if isinstance(like, str) else like


def _check_filled(plan: Plan, launch: LaunchFacts | None) -> None:
    """Raise UsageError for launch facts beside a plan none of whose pools leaves anything to an engine."""
    if launch is not None and not any(pool.engine not in (None, NO_ENGINE) for pool in plan.pools):
        raise UsageError(
            f"--like {launch.name}: no pool of plan {plan.name} names an engine whose defaults it could take the place "
            f"of; write engine: {launch.engine} in its pools"
        )


def _tables_beside(plan: Plan, folder: Path) -> Plan:
    """Return the plan with its logs and tables by path: their names in the file are relative to its folder."""
    pools = [p if p.costs is None else p.model_copy(update={"costs": str(folder / p.costs)}) for p in plan.pools]
    link, links = plan.link, plan.links
    if link is not None and link.costs is not None:
        link = link.model_copy(update={"costs": str(folder / link.costs)})
    if links is not None:
        links = tuple(x if x.costs is None else x.model_copy(update={"costs": str(folder / x.costs)}) for x in links)
    return plan.model_copy(update={"pools": tuple(pools), "link": link, "links": links})


def _load_profiles(
    hardware: str | Hardware | None, plan: Plan | None, engine: str | None, settings: Sequence[str]
) -> list[Hardware]:
    """Return the hardware of every pool of a plan, of the one pool that there will be, or none, with the kernels of its
    engine.
    """
    references = (
        [(hardware, engine)]
        if plan is None
        else [(hardware or pool.hardware, pool.engine_release) for pool in plan.pools]
    )
    profiles: dict[tuple[str, str | None], Hardware] = {}
    loaded = []
    for profile, of_engine in references:
        if profile is None:
            continue
        if isinstance(profile, Hardware):
            loaded.append(for_preset(profile, of_engine))
            continue
        key = (profile, of_engine)
        if key not in profiles:
            profiles[key] = load_kernels(profile, of_engine, settings)
        loaded.append(profiles[key])
    return loaded


def _load_requests(load: Load, settings: Sequence[str] = ()) -> tuple[Workload, Trace | None]:
    """A load, with the trace it replays, if any."""
    load = _named(load)
    if isinstance(load, str):
        return load_workload(load, settings)
    if isinstance(load, Workload):
        return load, read_trace(Path(load.trace)) if load.trace else None
    trace = load if isinstance(load, Trace) else trace_of(load)
    return replay(trace, Path(trace.file).name.split(".")[0].strip("<>") or "columns"), trace


def set_up(
    specs: Specs,
    *,
    costs: plan_parts.Costs | str | Path | None = None,
    rate_rps: float | None = None,
    requests: int | None = None,
    seed: int = 0,
) -> Experiment:
    """Draw the requests and deploy the plan, which names what it is deployed on. See `simulate`."""
    workload, trace, towers = specs.workload, specs.trace, specs.model.towers
    check_media(towers, workload, trace, specs.model.name)
    stream = build_stream(workload, trace, requests=requests or workload.requests, seed=seed, towers=towers)
    if rate_rps is not None:
        stream = stream.at_rate(rate_rps)
    deployment, plan = _deployed(specs, stream, costs)
    return Experiment(deployment, workload, trace, stream, seed, plan)


def stream(
    specs: Specs,
    *,
    costs: plan_parts.Costs | str | Path | None = None,
    rate_rps: float | None = None,
    requests: int | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[Deployment, StreamedResult]:
    """Simulate a plan under any number of requests in memory that does not grow with them: no columns, and percentiles
    within `simtune.results.sketch.ERROR`. See `simulate`; raises UsageError for what needs all requests at once."""
    workload, trace, towers = specs.workload, specs.trace, specs.model.towers
    check_media(towers, workload, trace, specs.model.name)
    number = requests or workload.requests
    load = StreamedLoad(workload, trace, requests=number, seed=seed, rate_rps=rate_rps, towers=towers)
    deployment, _ = _deployed(specs, load.extremes, costs)
    return deployment, simulate_streamed(deployment, load, seed=seed, watch=watch)


def _deployed(
    specs: Specs, stream: RequestStream, costs: plan_parts.Costs | str | Path | None
) -> tuple[Deployment, Plan]:
    """Deploy the plan with the names of its model and hardware; return it with their references as well."""
    if isinstance(costs, (str, Path)):
        costs = read_costs(Path(costs))
    own_costs = None if costs is None else plan_parts.OwnCosts(costs)
    plan, hardware = _planned(specs, stream, own_costs is not None)
    pools = [
        pool.model_copy(update={"hardware": profile.name}) for pool, profile in zip(plan.pools, hardware, strict=True)
    ]
    with_references = _with_references(plan, *specs.references)
    plan = plan.model_copy(update={"model": specs.model.name, "pools": tuple(pools)})
    by_pool = {pool.name: profile for pool, profile in zip(pools, hardware, strict=True)}
    try:
        return deploy(plan, specs.model, by_pool, own_costs, drafting=load_drafting(plan)), with_references
    except Infeasible as error:
        if specs.plan is not None or specs.plan_settings:
            # A plan of the user's own that cannot be is wrong input, not an answer.
            raise UsageError(f"plan {plan.name}: {error}") from None
        raise


def _with_references(plan: Plan, model: str | None, hardware: str | None) -> Plan:
    """Return the plan with other references of its model, and of the hardware of all its pools, where they are
    given."""
    pools = [pool if hardware is None else pool.model_copy(update={"hardware": hardware}) for pool in plan.pools]
    return plan.model_copy(update={"model": model or plan.model, "pools": tuple(pools)})


def deploy_plan(plan: str | Path | Plan) -> Deployment:
    """Deploy a plan on the hardware that it names, without a load. Raises SpecError or UsageError if it cannot be
    deployed.
    """
    plan = _named(plan)
    if isinstance(plan, str):
        plan = _tables_beside(load_plan(plan, (), plan_parts.problems), Path(plan).parent)
    hardware = _load_profiles(None, plan, None, ())
    pools = [
        pool.model_copy(update={"hardware": profile.name}) for pool, profile in zip(plan.pools, hardware, strict=True)
    ]
    plan = plan.model_copy(update={"pools": tuple(pools)})
    by_pool = {pool.name: profile for pool, profile in zip(pools, hardware, strict=True)}
    try:
        return deploy(plan, load_model(plan.model), by_pool, drafting=load_drafting(plan))
    except Infeasible as error:
        raise UsageError(f"plan {plan.name}: {error}") from None


def try_out(plan: Plan, folder: Path) -> str:
    """Deploy a plan read from a file in `folder`, as `simulate` does before it runs.

    Return an empty text, or what is missing if the plan names a model, hardware or acceptance that is not found here.
    Raises UsageError if `simulate` would refuse the plan.
    """
    try:
        load_model(plan.model)
        _load_profiles(None, plan, None, ())
        load_drafting(plan)
    except UsageError as error:
        return str(error)
    deploy_plan(_tables_beside(plan, folder))
    return ""


def _planned(specs: Specs, stream: RequestStream, own_costs: bool) -> tuple[Plan, Sequence[Hardware]]:
    """The plan that is given, or the one that is meant by none; and the hardware of each of its pools."""
    plan, hardware = specs.plan, specs.hardware
    if plan is not None:
        return plan, hardware
    if hardware:
        plan = default_plan(specs.model, hardware[0], stream, specs.engine)
    elif own_costs:
        plan, hardware = unbound_plan(specs.model, stream), [NO_HARDWARE]
    else:
        raise UsageError("name a model and a hardware profile, or a plan that does")
    if specs.plan_settings:
        document = Document("<default plan>", plan.to_data(), None)
        plan = Plan.from_document(override(document, specs.plan_settings), plan_parts.problems)
    return plan, [hardware[0]] * len(plan.pools)


def load_drafting(plan: Plan) -> dict[str, Drafting]:
    """Load draft models and acceptance of each pool that has speculation, by the pool's name."""
    return _drafting_by_pool(plan.pools, f"plan {plan.name}", str)


def _drafting_by_pool(pools: Sequence[Pool], where: str, placed: Callable[[str], str]) -> dict[str, Drafting]:
    """Load acceptance and draft model of each pool that has speculation, by the pool's name.

    `placed` turns a reference into a name or a path from here. Raises UsageError for what is not found.
    """
    drafting = {}
    for pool in pools:
        if pool.speculation is not None:
            draft_model = pool.speculation.drafter.own_model
            try:
                model = None if draft_model is None else load_model(placed(draft_model))
                drafting[pool.name] = Drafting(load_acceptance(placed(pool.speculation.acceptance)), model)
            except UsageError as error:
                raise UsageError(f"{where}, pool {pool.name}, speculation: {error}") from None
    return drafting


# --- optimize ---------------------------------------------------------------------------------------------


def optimize(
    study: str | Path | Study,
    *,
    model: str | Path | Model | None = None,
    hardware: str | Path | Hardware | None = None,
    workload: Load | None = None,
    jobs: Jobs = None,
    settings: Sequence[str] = (),
    like: str | Path | LaunchFacts | None = None,
) -> Tuned:
    """Search the best plan for a study, given by its file or as an object; see
    `simtune.tuner.search.best_first.optimize`.

    `model`, `hardware` and `workload` take the place of those that the study names. `settings` override fields of a
    file. `like` are facts of a published launch file: what it sets takes the place of the engine's defaults.
    """
    from simtune.tuner.search.front import answer

    question = load_question(study, settings, model=model, hardware=hardware, workload=workload, like=like)
    return answer(question, jobs=jobs)


def load_question(
    study: str | Path | Study,
    settings: Sequence[str] = (),
    *,
    model: str | Path | Model | None = None,
    hardware: str | Path | Hardware | None = None,
    workload: Load | None = None,
    like: str | Path | LaunchFacts | None = None,
) -> Question:
    """A study with everything it names. Names in its file that are paths are relative to its folder.

    Without an engine of its own the study is of that of `like`. Raises UsageError for launch facts beside several
    engines.
    """
    from simtune.tuner.question import Question

    study, model, hardware = _named(study), _named(model), _named(hardware)
    if isinstance(study, str):
        folder = Path(study).parent
        study = load_study(study, [_from_here(setting, folder) for setting in settings], plan_parts.problems)
    elif settings:
        raise UsageError("settings override fields of a study's file; change an object by model_copy")
    else:
        folder = Path()
    requests, trace = _load_requests(beside(folder, study.workload) if workload is None else workload)
    target = beside(folder, study.model) if model is None else model
    target = load_model(target) if isinstance(target, str) else target
    launch = _launch(like)
    if launch is not None:
        study = _launched(study, launch)
    engine_as_stated = None if study.single_engine is None else _engine_here(study.single_engine, folder)
    study = _fragments_from_here(study, folder)
    engine = study.single_engine
    # By its path from the present folder: plans name it, and are read from there.
    fixed_pools = [
        pool if pool.engine is None else pool.model_copy(update={"engine": engine_name(beside(folder, pool.engine))})
        for pool in study.fixed
    ]
    study = study.model_copy(update={"fixed": tuple(fixed_pools)})
    study, profiles = _hardware_of(study, hardware, folder, engine)
    if model is not None:
        # Plans and certificates name the model that was searched, not that of the file.
        study = study.model_copy(update={"model": target.name})
    drafts = tuple(load_draft(choice, target, folder) for choice in study.drafters)
    fixed = _drafting_by_pool(study.fixed, f"study {study.name}", partial(beside, folder))
    preset, own_kernels = _preset(engine_as_stated), _fixed_hardware(study, hardware, folder)
    if launch is not None and preset is not None:
        preset = launch.over(preset, LoadShape.of(requests, trace))
    engines, checkpoints = _variant_engines(study, hardware, folder), _checkpoints(study, target)
    return Question(study, target, profiles, requests, trace, drafts, fixed, preset, engines, checkpoints, own_kernels)


def _launched(study: Study, launch: LaunchFacts) -> Study:
    """Return the study with the engine of launch facts, if it names none."""
    if study.engine is None:
        return study.model_copy(update={"engine": launch.engine})
    if study.single_engine in (None, NO_ENGINE) or any(variant.engine for variant in study.variants):
        raise UsageError(f"--like {launch.name} is of one engine; study {study.name} names several, or none")
    return study


def _engine_here(engine: str, folder: Path) -> str:
    """Return an engine as it was asked for, a path from the present folder."""
    return engine if engine == NO_ENGINE else beside(folder, engine)


def _fragments_from_here(study: Study, folder: Path) -> Study:
    """Return the study with its engines and checkpoints by the names of their presets, or by their paths from the
    present folder."""

    def placed(engine: str) -> str:
        return engine_name(_engine_here(engine, folder))

    def here(fragment: Mapping[str, Any]) -> dict[str, Any]:
        places: dict[str, Callable[[str], str]] = {"engine": placed, "model": partial(beside, folder)}
        return {key: places[key](value) if key in places else value for key, value in fragment.items()}

    engine = study.engine
    update: dict[str, Any] = {
        "engine": placed(engine) if isinstance(engine, str) else engine and tuple(map(placed, engine))
    }
    if study.search.variants is not None:
        variants = tuple(map(here, study.search.variants))
        update["search"] = study.search.model_copy(update={"variants": variants})
    return study.model_copy(update=update)


def _preset(engine: str | None) -> EnginePreset | None:
    return None if engine is None or engine == NO_ENGINE else load_engine(engine)


def _variant_engines(study: Study, hardware: str | Hardware | None, folder: Path) -> dict[str, StudyEngine]:
    """Load the engines of variants, each with the profiles of the study with its kernels. Raises UsageError."""
    from simtune.tuner.question import StudyEngine

    engines = {}
    for name in {variant.engine: None for variant in study.variants if variant.engine}:
        profiles = hardware
        if isinstance(hardware, Hardware):
            profiles = for_preset(hardware, name)
        engines[name] = StudyEngine(_preset(name), _hardware_of(study, profiles, folder, name)[1])
    return engines


PADDING = 0.01
"""Share by which checkpoints that have a tokenizer in common pad its vocabulary differently, at most."""


def _checkpoints(study: Study, target: Model) -> dict[str, Model]:
    """Load the checkpoints of variants. Raises UsageError if one is of another model: its tokens are not those of the
    load."""
    checkpoints = {}
    for number, fragment in enumerate(study.search.variants or ()):
        if (name := fragment.get("model")) is None:
            continue
        checkpoint = checkpoints[name] = load_model(name)
        if abs(checkpoint.vocab_size / target.vocab_size - 1) > PADDING:
            raise UsageError(
                f"study {study.name}: search.variants.{number}.model: {name} has a vocabulary of "
                f"{checkpoint.vocab_size:,} tokens and {study.model} one of {target.vocab_size:,}, so that lengths of "
                "the load are not the same for both; name a checkpoint of this model, or search it with another study"
            )
    return checkpoints


def _hardware_of(
    study: Study, hardware: str | Hardware | None, folder: Path, engine: str | None
) -> tuple[Study, tuple[Hardware, ...]]:
    """Load the profiles of a study, with the kernels of its engine if there are some; `hardware` replaces its only one.
    Raises UsageError if it has several.
    """
    if hardware is None:
        names = [beside(folder, entry.profile) for entry in study.hardware]
        return study, tuple(load_kernels(name, engine) for name in names)
    if len(study.hardware) > 1:
        raise UsageError(f"{study.name} names several hardware profiles; change them in the study")
    profile = load_kernels(hardware, engine) if isinstance(hardware, str) else hardware
    entry = study.hardware[0].model_copy(update={"profile": profile.name})
    return study.model_copy(update={"hardware": (entry,)}), (profile,)


def _fixed_hardware(study: Study, hardware: str | Hardware | None, folder: Path) -> dict[str, Hardware]:
    """Return the hardware of the fixed pools under another engine than the study's, by the name of the pool."""
    profiles = {}
    for pool in study.fixed:
        if pool.engine is not None and pool.engine != study.engine:
            profile = beside(folder, pool.hardware) if hardware is None else hardware
            profiles[pool.name] = (
                load_kernels(profile, pool.engine_release)
                if isinstance(profile, str)
                else for_preset(profile, pool.engine_release)
            )
    return profiles


def load_draft(choice: DrafterChoice, target: Model, folder: Path | None = None) -> Draft:
    """Load a drafter's model and acceptance; names that are paths are relative to `folder`, if one is given.

    Raises UsageError if the draft model does not go with the target, or the acceptance not with the scheme.
    """
    from simtune.tuner.drafting import Draft

    def placed(reference: str) -> str:
        return reference if folder is None else beside(folder, reference)

    draft_model = choice.drafter.own_model
    model = None if draft_model is None else load_model(placed(draft_model))
    acceptance = load_acceptance(placed(choice.acceptance))
    try:
        choice.drafter.network(target, model)
        if choice.scheme is not None:
            choice.scheme.survival(acceptance.rates)
    except (Infeasible, ValueError) as error:
        raise UsageError(f"drafter {choice.label}: {error}") from None
    return Draft(choice, Drafting(acceptance, model))


@overload
def _named(reference: Path) -> str: ...
@overload
def _named(reference: Given) -> Given: ...
def _named(reference: object) -> object:
    """Return a path as a text that is read as a path, never as a built-in name; anything else unchanged."""
    if not isinstance(reference, Path):
        return reference
    text = str(reference)
    return text if is_path(text) else os.path.join(os.curdir, text)


def _from_here(setting: str, folder: Path) -> str:
    """Return a path that a setting gives: it is relative to the current folder, not to that of the study."""
    key, equals, value = setting.partition("=")
    if equals and key in ("model", "workload", "hardware.profile") and beside(folder, value) != value:
        return f"{key}={os.path.relpath(value, folder)}"
    return setting


__all__ = [
    "Experiment",
    "Specs",
    "deploy_plan",
    "load",
    "load_draft",
    "load_drafting",
    "load_question",
    "load_specs",
    "optimize",
    "set_up",
    "simulate",
    "stream",
]
