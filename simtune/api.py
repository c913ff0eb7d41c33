"""simtune from Python: load specs, simulate a plan, optimize a study."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simtune.costs.drafting import drafting_model
from simtune.errors import Infeasible, UsageError
from simtune.sim.deployment import Deployment, default_plan, deploy
from simtune.sim.requests import build_stream
from simtune.sim.result import Result
from simtune.sim.speculation import Drafting
from simtune.specs.catalog import (
    beside,
    load,
    load_acceptance,
    load_hardware,
    load_model,
    load_plan,
    load_study,
    load_workload,
)
from simtune.specs.drafts import survival
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.speculation import DraftModel
from simtune.specs.study import DrafterChoice
from simtune.specs.traces import Trace
from simtune.specs.workload import Workload
from simtune.tuner.drafting import Draft
from simtune.tuner.search import Question, Tuned
from simtune.tuner.search import optimize as _search


@dataclass(frozen=True)
class Ran:
    """A simulated plan with everything it was made of."""

    deployment: Deployment
    workload: Workload
    trace: Trace | None
    result: Result


def run(
    model: str | None,
    hardware: str | None,
    workload: str,
    plan: str | Plan | None = None,
    *,
    rate_rps: float | None = None,
    requests: int | None = None,
    seed: int = 0,
    settings: Mapping[str, Sequence[str]] | None = None,
    record: bool = False,
) -> Ran:
    """Load by name or path, deploy and simulate; see `simulate`. `settings` override fields by spec.

    A plan may be tried with another model, or with all its pools on other hardware, than it was made for; the plan of
    what was run then names these.
    """
    given = settings or {}
    if isinstance(plan, str):
        plan = load_plan(plan, given.get("plan", ()))
    if plan is not None:
        model = model or plan.model
    if model is None or (hardware is None and plan is None):
        raise UsageError("name a model and a hardware profile, or a plan that does")
    m = load_model(model, given.get("model", ()))
    w, trace = load_workload(workload, given.get("workload", ()))
    stream = build_stream(w, trace, requests=requests or w.requests, seed=seed)
    if rate_rps is not None:
        stream = stream.at_rate(rate_rps)
    references = [hardware or ""] if plan is None else [hardware or pool.hardware for pool in plan.pools]
    loaded = {name: load_hardware(name, given.get("hardware", ())) for name in dict.fromkeys(references)}
    asked = plan is not None or bool(given.get("plan"))
    if plan is None:
        plan = default_plan(m, loaded[references[0]], stream)
        if given.get("plan"):
            plan = _overridden(plan, given["plan"])
    pools = [p.model_copy(update={"hardware": loaded[r].name}) for p, r in zip(plan.pools, references, strict=True)]
    plan = plan.model_copy(update={"model": m.name, "pools": tuple(pools)})
    drafting = load_drafting(plan)
    try:
        deployment = deploy(plan, m, {h.name: h for h in loaded.values()}, drafting=drafting)
    except Infeasible as error:
        if asked:  # a plan of the user's own that cannot be is wrong input, not an answer
            raise UsageError(f"plan {plan.name}: {error}") from None
        raise
    return Ran(deployment, w, trace, deployment.simulate(stream, record=record, seed=seed))


def load_drafting(plan: Plan) -> dict[str, Drafting]:
    """What the speculation of each pool names, by the pool's name."""
    found = {}
    for pool in plan.pools:
        if pool.speculation is not None:
            drafter = pool.speculation.drafter
            model = load_model(drafter.model) if isinstance(drafter, DraftModel) else None
            found[pool.name] = Drafting(load_acceptance(pool.speculation.acceptance), model)
    return found


def _overridden(plan: Plan, settings: Sequence[str]) -> Plan:
    from simtune.specs.base import override
    from simtune.specs.yamlfile import Document

    return Plan.from_document(override(Document("<default plan>", plan.to_data(), None), settings))


def simulate(
    model: str | None,
    hardware: str | None,
    workload: str,
    plan: str | Plan | None = None,
    *,
    rate_rps: float | None = None,
    requests: int | None = None,
    seed: int = 0,
) -> Result:
    """Simulate a plan under a load; all four by name or path, the plan also as an object.

    Without a plan: one instance on the fewest GPUs that fit, with vLLM's defaults. With one, model and hardware may be
    None: they are the plan's. `rate_rps` (as the exact mean rate of the requests) and `requests` replace the workload's
    own. Raises SpecError, UsageError or Infeasible, each with the remedy.
    """
    return run(model, hardware, workload, plan, rate_rps=rate_rps, requests=requests, seed=seed).result


def load_question(study: str, settings: Sequence[str] = ()) -> Question:
    """A study with everything it names. Names in it that are paths are relative to the study's folder."""
    folder = Path(study).parent
    spec = load_study(study, [_from_here(setting, folder) for setting in settings])
    workload, trace = load_workload(beside(folder, spec.workload))
    model, hardware = (
        load_model(beside(folder, spec.model)),
        load_hardware(beside(folder, spec.hardware.profile)),
    )
    drafts = tuple(load_draft(choice, model, folder) for choice in spec.speculation)
    return Question(spec, model, hardware, workload, trace, drafts)


def load_draft(choice: DrafterChoice, target: Model, folder: Path | None = None) -> Draft:
    """A drafter with what it names; names that are paths are relative to `folder`, where there is one.

    Raises UsageError where the draft model does not go with the target, or the acceptance not with the scheme.
    """

    def found(reference: str) -> str:
        return reference if folder is None else beside(folder, reference)

    model = load_model(found(choice.drafter.model)) if isinstance(choice.drafter, DraftModel) else None
    acceptance = load_acceptance(found(choice.acceptance))
    try:
        drafting_model(choice.drafter, target, model)
        if choice.scheme is not None:
            survival(choice.scheme, acceptance.rates)
    except (Infeasible, ValueError) as error:
        raise UsageError(f"drafter {choice.label}: {error}") from None
    return Draft(choice, Drafting(acceptance, model))


def _from_here(setting: str, folder: Path) -> str:
    """A path given in a setting is relative to where the user is, not to the study."""
    key, equals, value = setting.partition("=")
    if equals and key in ("model", "workload", "hardware.profile") and beside(folder, value) != value:
        return f"{key}={os.path.relpath(value, folder)}"
    return setting


def optimize(study: str, *, jobs: int | None = None, settings: Sequence[str] = ()) -> Tuned:
    """Search the best plan for a study file; see `simtune.tuner.search.optimize`."""
    return _search(load_question(study, settings), jobs=jobs)


__all__ = ["Ran", "load", "load_drafting", "load_question", "optimize", "run", "simulate"]
