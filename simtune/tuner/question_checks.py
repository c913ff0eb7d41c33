"""Checks of a study against its workload and its hardware profiles, before anything is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from simtune.errors import UsageError
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.preset import EnginePreset
from simtune.specs.study import Study
from simtune.specs.traces import Trace
from simtune.specs.variants import ROLES, Variant, at_path
from simtune.specs.workload import ClosedLoop, Workload
from simtune.tuner.objectives import OBJECTIVES, Limit, Objective, RateObjective
from simtune.workload.trace_media import check_media, media_kinds


class LoadedEngine(Protocol):
    """An engine of a variant, as far as the checks read it (`simtune.tuner.question.StudyEngine`)."""

    @property
    def preset(self) -> EnginePreset | None:
        """Preset of the engine; None for no engine."""


class LoadedStudy(Protocol):
    """A study with its inputs, as far as the checks read it (`simtune.tuner.question.Question`)."""

    @property
    def study(self) -> Study:
        """The study."""

    @property
    def workload(self) -> Workload:
        """Workload of the study."""

    @property
    def model(self) -> Model:
        """Model of the study."""

    @property
    def trace(self) -> Trace | None:
        """Trace that the workload replays."""

    @property
    def sends_families(self) -> bool:
        """True if every arrival is a family of requests: of a graph, or a session whose turns follow answers."""

    @property
    def engine(self) -> EnginePreset | None:
        """Engine preset of the study."""

    @property
    def engines(self) -> Mapping[str, LoadedEngine]:
        """Engines of variants by name."""

    @property
    def profiles(self) -> Mapping[str, Hardware]:
        """Hardware by the name that the study gives."""

    @property
    def objective(self) -> Objective:
        """Objective of the study."""

    @property
    def limits(self) -> Sequence[Limit]:
        """Limits of the study on other objectives."""

    @property
    def searches_rate(self) -> bool:
        """True if the search varies the rate."""


def check(question: LoadedStudy) -> None:
    """Raise UsageError if the objective or a limit needs data that the workload, the SLO or a profile does not
    have."""
    study, name = question.study, question.study.name
    workload = question.workload
    check_media(question.model.towers, workload, question.trace, study.model)
    for setting, objective in (
        ("objective", question.objective),
        *(("limit", limit.objective) for limit in question.limits),
    ):
        _check_profiles(question, setting, objective)
        _check_load(question, setting, objective)
    _check_families(question)
    _check_engine(question)
    _check_day(question)
    _check_confidence(question)
    _check_users(question)
    _check_scaling(question)
    _check_encoders(question)
    requests = study.search.requests
    if question.workload.batch and requests not in (None, question.workload.requests):
        raise UsageError(
            f"{name}: search.requests is {requests}, but workload {question.workload.name} is a batch of "
            f"{question.workload.requests} requests; remove search.requests"
        )
    if not question.searches_rate:
        return
    if question.workload.waits_for_answers:
        raise UsageError(
            f"{name}: objective {study.objective} looks for a request rate, but workload "
            f"{question.workload.name} {_why_no_rate(question.workload)}; use objective e2el or gpus"
        )
    if question.objective.needs_slo and not study.slo.limits() and not any(c.slo for c in question.workload.classes):
        raise UsageError(f"{name}: objective {study.objective} needs an slo with at least one limit")


def _check_users(question: LoadedStudy) -> None:
    """Raise UsageError for an objective on users if the load has none, or if there is no limit that they could miss."""
    study, load = question.study, question.workload
    if not OBJECTIVES[study.objective].searches_users:
        return
    if not isinstance(load.arrivals, ClosedLoop) or load.batch:
        raise UsageError(
            f"{study.name}: objective {study.objective} looks for the most users of a closed loop, and workload "
            f"{load.name} is none; set arrivals: {{kind: closed_loop, users: 8}} in it, or use objective goodput"
        )
    if not study.slo.limits() and not any(c.slo for c in load.classes):
        raise UsageError(f"{study.name}: objective {study.objective} needs an slo with at least one limit")
    if study.slo.confidence is not None:
        raise UsageError(
            f"{study.name}: slo.confidence is not judged for objective {study.objective}; remove it, or use objective "
            "family or e2el at a number of users"
        )


def _check_encoders(question: LoadedStudy) -> None:
    """Raise UsageError if a variant has encoder servers, and the load has no media or no arrivals known in advance."""
    variant = next((v for v in question.study.variants if v.plan.encoders_apart is not None), None)
    if variant is None:
        return
    of, load = f"{question.study.name}: variant {variant.label} has encoders_apart", question.workload
    if not media_kinds(load, question.trace):
        raise UsageError(f"{of}, and workload {load.name} has no images, videos or recordings; remove the variant")
    if load.waits_for_answers or (question.trace is not None and question.trace.turns is not None):
        raise UsageError(
            f"{of}, which encode in order of arrival, and workload {load.name} {_why_no_rate(load)}; remove the variant"
        )


def _check_scaling(question: LoadedStudy) -> None:
    """Raise UsageError if pools of a variant are autoscaled, and the objective or the load does not go with it."""
    variant = next((variant for variant in question.study.variants if variant.scales), None)
    if variant is None:
        return
    name, load, objective = question.study.name, question.workload, question.objective
    of = f"{name}: variant {variant.label} has autoscaling"
    if objective.searches_rate or objective.searches_users:
        looks_for = "a number of users" if objective.searches_users else "a single request rate"
        raise UsageError(
            f"{of}, and objective {objective.name} looks for {looks_for}, at which nothing has to come and go; give "
            "the workload a rate that changes (arrivals: {kind: piecewise, segments: [...]}), and use objective "
            "usd_per_million_tokens or gpu_hours_per_million_tokens"
        )
    if load.graph:
        raise UsageError(f"{of}, which requests of a graph cannot be combined with; remove it, or the graph")
    of_run = next((o.name for o in (objective, *(limit.objective for limit in question.limits)) if o.of_run), None)
    if load.warm_up and of_run is not None:
        raise UsageError(f"{of}, so {of_run} is of the whole run; remove warm_up of workload {load.name}")


def _why_no_rate(workload: Workload) -> str:
    if isinstance(workload.arrivals, ClosedLoop):
        return "is a closed loop"
    return "holds requests back (arrivals.max_in_flight), so no rate saturates a plan"


def _check_profiles(question: LoadedStudy, setting: str, objective: Objective) -> None:
    """Raise UsageError if an objective, or a limit on one, needs figures that a hardware profile does not have."""
    name = question.study.name
    for profile, hardware in question.profiles.items():
        if objective.needs_prices and hardware.device.price_per_hour_usd is None:
            raise UsageError(
                f"{name}: {setting} {objective.name} needs prices, but hardware profile {profile} has none; "
                "set device.price_per_hour_usd in it"
            )
        if objective.needs_power and hardware.device.power is None:
            raise UsageError(
                f"{name}: {setting} {objective.name} needs power figures, but hardware profile {profile} has "
                "none; set device.power with tdp_w and idle_w in it"
            )


def _check_load(question: LoadedStudy, setting: str, objective: Objective) -> None:
    """Raise UsageError if an objective, or a limit on one, does not apply to the kind of load."""
    name, load = question.study.name, question.workload
    if objective.needs_batch and not load.batch:
        raise UsageError(
            f"{name}: {setting} {objective.name} is of a finite load, but workload {load.name} is no batch; set "
            "batch: true in it if it ends with its last request, or use objective e2el"
        )
    if objective.needs_families and not question.sends_families:
        raise UsageError(
            f"{name}: {setting} {objective.name} is of families, but workload {load.name} has none; give it a "
            "request graph (graph) or sessions whose turns follow answers (sessions), or use objective e2el"
        )
    if load.batch and (objective.searches_rate or isinstance(objective, RateObjective)):
        seeks = "looks for" if setting == "objective" else "is on"
        raise UsageError(
            f"{name}: {setting} {objective.name} {seeks} a request rate, but workload {load.name} is a batch; use "
            "makespan, e2el, gpus or usd_per_million_tokens, or remove batch"
        )


def _check_families(question: LoadedStudy) -> None:
    """Raise UsageError for limits on families that the load does not have, and for pools that families cannot
    have."""
    study, load = question.study, question.workload
    limited = [name for name in ("family_s", "family_active_s") if getattr(study.slo, name)]
    if limited and not question.sends_families:
        raise UsageError(
            f"{study.name}: slo.{limited[0]} limits families of a request graph or sessions, and workload {load.name} "
            "has none; remove it, or give the workload a graph or sessions"
        )
    if load.graph and "prefill-decode" in study.search.layouts:
        raise UsageError(
            f"{study.name}: search.layouts has prefill-decode, but the request graph of workload {load.name} needs "
            "pools of role mixed; write layouts: [mixed]"
        )


def _check_engine(question: LoadedStudy) -> None:
    """Raise UsageError if an engine preset sets the parallelism, which every candidate sets."""
    presets = {str(question.study.engine): question.engine, **{n: e.preset for n, e in question.engines.items()}}
    for name, preset in presets.items():
        for settings in () if preset is None else (preset.pool, *(case.pool for case in preset.cases)):
            if keys := settings.get("parallelism"):
                raise UsageError(
                    f"{question.study.name}: engine preset {name} sets parallelism ({', '.join(keys)}), which a search "
                    "sets for every plan; remove it from the preset, and simulate such a plan with --plan"
                )


def _check_confidence(question: LoadedStudy) -> None:
    study = question.study
    if study.slo.confidence is None:
        return
    wrong = ""
    of_times = question.objective.floor is not None or question.objective.needs_power or study.objective == "pareto"
    limited = study.slo.limits() or any(c.slo for c in question.workload.classes)
    if not of_times and not limited:
        wrong = f"the slo has no limit to keep, and {study.objective} does not depend on step times; add a limit"
    elif any(_scales_ranks(variant) for variant in study.variants):
        wrong = "errors of operators are not judged of instances whose ranks come and go; remove min_ranks"
    elif any(pool.costs is not None for pool in study.fixed):
        wrong = "errors of operators are not known of a fixed pool with costs of its own; remove costs"
    if wrong:
        raise UsageError(f"{study.name}: slo.confidence: {wrong}, or remove confidence")


def _scales_ranks(variant: Variant) -> bool:
    """True if ranks of instances come and go in plans of a variant."""
    path = ("autoscaling", "min_ranks")
    return any(at_path(variant.of_role(role), path) is not None for role in ("mixed", *ROLES))


def _check_day(question: LoadedStudy) -> None:
    day, name = question.study.day, question.study.name
    if day is None:
        return
    if question.workload.waits_for_answers:
        raise UsageError(
            f"{name}: a day has rates, and workload {question.workload.name} {_why_no_rate(question.workload)}"
        )
    if day.trace_window_h is not None and (question.trace is None or question.trace.arrival_s is None):
        raise UsageError(
            f"{name}: day.trace_window_h cuts a trace, and workload {question.workload.name} replays none; give windows"
        )
