"""Contents of a run directory: of one simulated plan, or of a study and the plan it chose."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from simtune.costs.accuracy_record import published_runs
from simtune.costs.basis import KindBasis
from simtune.costs.calibration import words
from simtune.errors import Infeasible
from simtune.results.result import Result
from simtune.results.summary import SimulationSummary, Uncertainty
from simtune.runs.breakdown import step_times
from simtune.runs.engine_files import (
    MAX_NODES,
    NO_ENGINE,
    engine_files,
    launch_like,
    launch_of,
    other_engines,
    searched_plan,
    speculation_facts,
)
from simtune.runs.files import FRONT, MANIFEST, SUMMARY_SCHEMA, Files
from simtune.runs.price import MILLION, price, usd_per
from simtune.runs.request_columns import requests_csv
from simtune.runs.schema import (
    COURSE,
    CandidateRow,
    CourseRow,
    DraftedLoad,
    DraftSchedule,
    FamilyResult,
    HardwareFacts,
    Manifest,
    MemoryUse,
    ObjectiveValue,
    OperatorQuality,
    PoolTimeline,
    Run,
    RunnerUp,
    Status,
    Summary,
    SweepPoint,
    VariantResult,
)
from simtune.runs.swimlanes import SWIMLANES, swimlanes_of
from simtune.runs.tables import columns, to_csv
from simtune.runs.timeline import sampled, trace_file
from simtune.sim.deployment import Deployment
from simtune.sim.parallel import Jobs
from simtune.sim.pools import DeployedPool
from simtune.sim.run_basis import basis_of, pool_bases
from simtune.sim.uncertainty import LEVEL
from simtune.specs.references import Place, Places, unmoved
from simtune.specs.study import Study
from simtune.specs.trace_cut import replayed_part
from simtune.specs.traces import Trace
from simtune.specs.workload import Workload
from simtune.tuner.certificate.front_certificate import front_certificate_of
from simtune.tuner.certificate.search_certificate import Certificate, certificate_of
from simtune.tuner.doubt.confidence import Confidence
from simtune.tuner.doubt.draw_spread import interval_of_draws
from simtune.tuner.doubt.slo_probability import slo_probability
from simtune.tuner.drafting import DraftContexts, schedule
from simtune.tuner.search.day import DayHour, Done, day_of
from simtune.tuner.search.rate_sweep import RateSweep, sweeps
from simtune.tuner.search.variant_gains import family_gains, variant_gains
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.trial import Trial, Tuned
from simtune.workload.load import load_facts

PLAN = "plan.yaml"
WRITTEN = "Written by simtune; read by simtune simulate."


@dataclass(frozen=True)
class Contents:
    """A run without its page and manifest, which are made last."""

    run: Run
    files: Files
    """Files that no report is drawn from: the plan, engine settings, requests, the timeline."""

    def complete(self, page: str, manifest: Manifest) -> Files:
        """Return all files of the directory, with the page that was drawn from `run`."""
        files = {**self.files, "summary.json": _json(self.run.summary.to_data())}
        if self.run.candidates:
            files["candidates.csv"] = _table(self.run.candidates)
        if self.run.certificate is not None:
            files["certificate.json"] = _json(self.run.certificate.to_data())
            files[COURSE] = to_csv(columns(CourseRow), ([*row.model_dump().values()] for row in self.run.course))
        if self.run.swimlanes is not None:
            files[SWIMLANES] = self.run.swimlanes.to_bytes()
        return {**files, "report.html": page, MANIFEST: _json(manifest.to_data())}


def _table(candidates: Sequence[CandidateRow]) -> str:
    """Return `candidates.csv`, without optional columns that are empty."""
    rows = [row.model_dump() for row in candidates]
    empty = {name for name in CandidateRow.MAY_LACK if all(row[name] is None for row in rows)}
    header = [name for name in columns(CandidateRow) if name not in empty]
    return to_csv(header, ([row[name] for name in header] for row in rows))


def of_simulation(
    deployment: Deployment,
    result: Result,
    name: str,
    seed: int,
    uncertainty: Uncertainty | None = None,
    workload: Workload | None = None,
    trace: Trace | None = None,
    leave_out: Collection[str] = (),
) -> Contents:
    """Make the files of one simulated plan: plan.yaml, engine/, summary.json, requests.csv, trace.json.gz and
    swimlanes.json.gz.

    `leave_out` names what of `requests`, `trace` and `swimlanes` is not made.
    """
    files = _files(deployment, result, leave_out)
    summary = Summary(
        name=name,
        seed=seed,
        study=None,
        objective=None,
        sweep=None,
        runners_up=None,
        uncertainty=uncertainty,
        **_common(deployment, result, files, (workload, trace), pool_bases(deployment, result)),
    )
    return Contents(Run(summary, (), None if "swimlanes" in leave_out else swimlanes_of(result)), files)


def of_study(
    tuned: Tuned,
    *,
    jobs: Jobs = None,
    confidence: Confidence | None = None,
    uncertainty: Uncertainty | None = None,
    progress: Done | None = None,
    places: Places = unmoved,
) -> Contents:
    """Make the same for the chosen plan of a study, with all candidates, goodput curves, and how sure all of it is.
    `progress` is called for the windows of a day; `places` has the study's references in files of the run. There is no
    trace.json.gz: `simtune simulate --timeline` writes it.
    """
    study, of_variant = tuned.question.study, bool(tuned.chosen.candidate.decoding.shape.variant)
    files = _files(tuned.deployment, tuned.result, ("trace",), simulated_only=of_variant)
    files[PLAN] = searched_plan(tuned.deployment.plan, WRITTEN, places(""))
    chosen, *rivals = sweeps(tuned, jobs=jobs)
    of_chosen, *of_rivals = map(_points, (chosen, *rivals))
    facts = _draft_facts(tuned)
    if facts is not None and tuned.chosen.candidate.speculation is not None:
        files |= other_engines(facts, tuned.deployment.plan)
    drafts = None if facts is None else {**facts, "load": _drafted_load(of_chosen)}
    bases = pool_bases(tuned.deployment, tuned.result)
    probability = None if uncertainty else slo_probability(tuned, chosen, bases)
    day = day_of(tuned, jobs=jobs, progress=progress)
    answers = {"confidence": confidence, "slo_probability": probability, "day": day}
    extras = _asked_for(tuned, answers, drafts) | _of_variants(tuned, files)
    if "day" in extras:
        files["day.csv"] = to_csv(columns(DayHour), ([*hour.model_dump().values()] for hour in extras["day"].hours))
    summary = Summary(
        name=study.name,
        seed=study.seed,
        study=study,
        interrupted=tuned.interrupted,
        objective=_objective_value(tuned),
        sweep=tuple(chain(of_chosen, *of_rivals)) or None,
        runners_up=tuple(map(_runner_up, rivals)),
        uncertainty=uncertainty,
        **extras,
        **_common(tuned.deployment, tuned.result, files, (tuned.question.workload, tuned.question.trace), bases),
    )
    candidates = tuple(
        _startable(tuned, row, priced(_candidate(rank, row, study), tuned.question.usd_per_hour(row.candidate)))
        for rank, row in enumerate(tuned.rows, start=1)
    )
    certificate = None if tuned.ladder else certificate_of(tuned)
    files |= _proof(tuned, certificate, places("front"))
    course = tuple(CourseRow(**point._asdict()) for point in tuned.course)
    return Contents(Run(summary, candidates, swimlanes_of(tuned.result), certificate, course), files)


def _runner_up(sweep: RateSweep) -> RunnerUp:
    judged = sweep.judged
    return RunnerUp(candidate=sweep.candidate, ttft_quantiles_s=judged.ttft_s, tpot_quantiles_s=judged.tpot_s)


def _objective_value(tuned: Tuned) -> ObjectiveValue:
    """Return the objective of the chosen plan; for a front, a file of its own states what is certified."""
    objective, single = tuned.question.objective, not tuned.ladder
    bound, gap = (tuned.bound, tuned.gap) if single else (None, None)
    value = ObjectiveValue(
        name=tuned.question.study.objective,
        unit=objective.unit,
        value=tuned.value,
        bound=bound,
        gap=gap,
        gap_on_draw=tuned.gap_on_draw,
    )
    between = None if tuned.confirmed is None else interval_of_draws(tuned.confirmed.values, LEVEL)
    if tuned.confirmed is None or between is None:
        return value
    # The draw that is reported is one of them, so the interval contains its value.
    low, high = min(tuned.value, between[0]), max(tuned.value, between[1])
    return value.model_copy(update={"draws": tuned.confirmed.values, "low": low, "high": high})


def _of_variants(tuned: Tuned, files: Files) -> dict[str, Any]:
    """Return the fields of the summary that a study with variants, or with two families of plans, has by name."""
    variants = tuple(VariantResult(**gain._asdict()) for gain in variant_gains(tuned))
    families = tuple(FamilyResult(**gain._asdict()) for gain in family_gains(tuned))
    no_engine = files.get(NO_ENGINE) if tuned.chosen.candidate.decoding.shape.variant else None
    fields = {"variants": variants, "families": families, "no_engine": no_engine}
    return {name: value for name, value in fields.items() if value}


def _asked_for(tuned: Tuned, answers: Mapping[str, Any], drafts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return fields of the summary by name; a field that the study does not use has no key."""
    fields = {
        **answers,
        "draft_schedule": None if drafts is None else DraftSchedule.model_validate(drafts),
        "front": None if tuned.ladder is None else tuned.ladder.points,
    }
    return {name: value for name, value in fields.items() if value is not None}


# --- what both have ---------------------------------------------------------------------------------------


def _files(
    deployment: Deployment, result: Result, leave_out: Collection[str] = (), *, simulated_only: bool = False
) -> Files:
    files: Files = {
        PLAN: deployment.plan.to_yaml(WRITTEN),
        **engine_files(deployment, simulated_only=simulated_only),
    }
    if "requests" not in leave_out:
        files["requests.csv"] = requests_csv(result)
    if "trace" not in leave_out:
        files["trace.json.gz"] = trace_file(result)
    return files


def _load_source(workload: Workload | None, trace: Trace | None, requests: int) -> str | None:
    """Return the load's name, its source, and the part of a trace that is replayed."""
    if workload is None:
        return None
    file = "no source given" if trace is None else Path(trace.file).name
    replayed = None if trace is None else replayed_part(workload, trace, requests)
    return "; ".join(filter(None, (f"{workload.name}: {workload.source or file}", replayed)))


def _common(
    deployment: Deployment,
    result: Result,
    files: Files,
    load: tuple[Workload | None, Trace | None],
    bases: Mapping[str, Mapping[str, KindBasis]],
) -> dict[str, Any]:
    """The fields of the summary that every run has, by name; what its steps rest on is known by pool and kind."""
    simulated, memory, pools = result.summary(), deployment.memory, deployment.pools
    return {
        "price": price(deployment, simulated),
        "load": load_facts(result.stream, result.stream.users, result.stream.due_s),
        "load_source": _load_source(*load, len(result.stream)),
        "launch": launch_of(files, deployment.model.hf),
        **{name: getattr(simulated, name) for name in simulated.model_fields_set},
        "schema_id": SUMMARY_SCHEMA,
        "plan": deployment.plan,
        "model": deployment.model.name,
        **_hardware_facts(deployment),
        "memory": MemoryUse(
            total_bytes=memory.total_bytes,
            weights_bytes=memory.weights_bytes,
            kv_bytes=memory.kv_bytes,
            other_bytes=memory.other_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token,
            num_blocks=memory.num_blocks,
        ),
        "breakdown": step_times(deployment, result),
        "cost_basis": basis_of(deployment, bases),
        "timeline": sampled(result),
        "pool_timelines": tuple(
            PoolTimeline(pool=pool.spec.name, **dict(sampled(result, pool.spec.name))) for pool in pools
        )
        if len(pools) > 1
        else None,
        "quantiles": result.latency_quantiles(),
    }


def _hardware_facts(deployment: Deployment) -> dict[str, Any]:
    """Return what was assumed of the model, and the facts of the hardware of the first pool, and of every other profile
    among the pools if there is one. Under several engines one profile has other kernels in each, and counts as several.
    """
    labels = deployment.profile_labels
    first, *more = {labels[pool.spec.name]: pool for pool in deployment.pools}.values()
    facts: dict[str, Any] = {"hardware": _hardware(deployment, first)}
    if deployment.model.notes:
        facts["model_notes"] = deployment.model.notes
    if more:
        facts["other_hardware"] = tuple(_hardware(deployment, pool) for pool in more)
    return facts


def _hardware(deployment: Deployment, pool: DeployedPool) -> HardwareFacts:
    hardware = pool.hardware
    under = {"under": pool.spec.engine or "no engine"} if deployment.several_engines else {}
    held_out = [(key, o, o.hold_out[0] if o.hold_out else None) for key, o in hardware.operators.items()]
    return HardwareFacts(
        name=hardware.name,
        **under,
        engine=hardware.engine,
        device=hardware.device.name,
        validated="; ".join(map(str, hardware.validations)) if hardware.validations else None,
        published_runs=published_runs(hardware.name, pool.spec.engine, deployment.model),
        estimated=tuple(deployment.estimated),
        corrected=words(hardware.calibration) if hardware.calibration else None,
        operators=tuple(
            OperatorQuality(
                key=key,
                median=errors.median if errors else None,
                p90=errors.p90 if errors else None,
                max=errors.max if errors else None,
                provenance=operator.origin,
                source=operator.provenance.source,
            )
            for key, operator, errors in held_out
        ),
    )


def _proof(tuned: Tuned, certificate: Certificate | None, place: Place) -> Files:
    """Return the files of the search's proof: a certificate; or for a front its certificate and the plan of each of its
    points.
    """
    if certificate is not None:
        return {"certificate.json": _json(certificate.to_data())}
    assert tuned.ladder is not None, "only of a front there is no certificate of one plan"
    files: Files = {FRONT: _json(front_certificate_of(tuned).to_data())}
    candidates = {row.candidate.name: row.candidate for row in tuned.rows}
    for number, point in enumerate(tuned.ladder.points, start=1):
        plan = tuned.question.plan(candidates[point.candidate], tuned.deployment.max_model_len)
        at = f"Point {number} of the front, for {point.rate_rps:.4g} requests/s."
        files[f"front/{number:02}.yaml"] = searched_plan(plan, f"{at} {WRITTEN}", place)
    return files


# --- of a study -------------------------------------------------------------------------------------------


def _candidate(rank: int, row: Trial, study: Study) -> CandidateRow:
    candidate, drafts, simulated = row.candidate, row.candidate.speculation, row.summary
    pool, prefill, num_gpus = candidate.decoding, candidate.prefilling, candidate.num_gpus
    goodput = None if simulated is None else simulated.goodput_rps
    return CandidateRow(
        rank=rank,
        candidate=candidate.name,
        gpu=pool.shape.gpu,
        tp=pool.shape.tp,
        pp=pool.shape.pp,
        attention_dp=pool.shape.attention_dp,
        expert_parallel=pool.shape.expert_parallel,
        weight_dtype=pool.shape.weight_dtype or None,
        kv_dtype=pool.shape.kv_dtype or None,
        prefix_caching=pool.prefix_caching,
        router=_router(study, candidate),
        instances=pool.instances,
        prefill=None if prefill is None else f"{prefill.shape.gpu} {prefill.name}",
        beside=f"{candidate.pools[0].shape.gpu} {candidate.pools[0].name}" if candidate.of_kinds else None,
        num_gpus=num_gpus,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        speculation=None if drafts is None else f"{candidate.drafter}: {drafts.scheme.in_words()}",
        status=cast(Status, row.status),
        reason=row.reason,
        kv_blocks=row.kv_blocks,
        rate_bound_rps=row.rate_bound_rps,
        bounded_by=row.bounded_by or None,
        rate_rps=row.rate_rps,
        goodput_rps=goodput,
        goodput_rps_per_gpu=None if goodput is None else goodput / num_gpus,
        output_tokens_per_s_per_gpu=None if simulated is None else simulated.output_tokens_per_s_per_gpu,
        output_tokens_per_s_per_user=None if simulated is None else simulated.output_tokens_per_s_per_user,
        ttft_mean_s=row.statistic("ttft", "mean"),
        ttft_p99_s=row.statistic("ttft", "p99"),
        tpot_mean_s=row.statistic("tpot", "mean"),
        tpot_p99_s=row.statistic("tpot", "p99"),
        slo_attainment=None if simulated is None else simulated.slo_attainment,
        saturated=None if simulated is None else simulated.saturated,
        simulations=row.simulations,
        finished=None if simulated is None else _finished(simulated),
        joules_per_token=None if simulated is None else simulated.joules_per_token,
    )


def _startable(tuned: Tuned, row: Trial, known: CandidateRow) -> CandidateRow:
    """Return the row with the command that starts it, if it was simulated and its drafts are none or those of the
    chosen plan's drafter. A plan that misses the SLO because another one does has no command.
    """
    drafter = row.candidate.drafter
    if (
        row.summary is None
        or (row.same_as and row.status == "infeasible")
        or (drafter and drafter != tuned.chosen.candidate.drafter)
    ):
        return known
    plan = tuned.question.plan(row.candidate, tuned.deployment.max_model_len)
    return known.model_copy(update={"launch": launch_like(tuned.deployment, plan)})


def _router(study: Study, candidate: Candidate) -> str:
    kind, changes = str(candidate.routing(study).kind), candidate.changes
    of_variant = changes is not None and changes.router is not None
    return kind if len(study.routers) == 1 or of_variant else f"{candidate.router + 1}: {kind}"


def _finished(simulated: SimulationSummary) -> bool:
    """True if every request came to an end; False if the simulation was stopped before."""
    rejected = 0 if simulated.rejections is None else simulated.rejections.requests
    return simulated.completed + simulated.refused + rejected + simulated.unserved >= simulated.requests


def _points(sweep: RateSweep) -> list[SweepPoint]:
    return [_point(sweep.candidate, *point) for point in sweep.points]


def _point(candidate: str, rate_rps: float, simulated: SimulationSummary) -> SweepPoint:
    drafted = simulated.speculation
    return SweepPoint(
        candidate=candidate,
        rate_rps=rate_rps,
        # None only without an offered rate.
        goodput_rps=simulated.goodput_rps or 0.0,
        slo_attainment=simulated.slo_attainment,
        ttft_p99_s=simulated.metrics["ttft"].p99,
        tpot_p99_s=simulated.metrics["tpot"].p99,
        saturated=simulated.saturated,
        tokens_per_round=drafted.tokens_per_round if drafted else None,
        wasted_per_round=1 + (drafted.wasted_tokens - drafted.rounds) / drafted.rounds if drafted else None,
    )


def _drafted_load(points: Sequence[SweepPoint]) -> tuple[DraftedLoad, ...]:
    """Return the tokens that a round of a request yields and wastes, at the rates at which anything was drafted."""
    return tuple(
        DraftedLoad(rate_rps=p.rate_rps, tokens=p.tokens_per_round, wasted=p.wasted_per_round)
        for p in points
        if p.tokens_per_round is not None and p.wasted_per_round is not None
    )


def _draft_facts(tuned: Tuned) -> dict[str, Any] | None:
    """Return the schedule over batch and context of the chosen drafter, or of the study's first drafter if none was
    chosen.
    """
    question, candidate = tuned.question, tuned.chosen.candidate
    if not question.drafts:
        return None
    draft = next((d for d in question.drafts if d.choice.label == candidate.drafter), question.drafts[0])
    contexts = DraftContexts.of(question.stream(candidate))
    # The pool that decodes.
    pool = tuned.deployment.plan.pools[-1]
    hardware = question.hardware_of(candidate.decoding)
    try:
        best = schedule(draft, question.model_of(candidate.decoding.shape), hardware, pool, contexts, MAX_NODES)
    except Infeasible:
        return None
    return speculation_facts(draft, best)


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def priced(row: CandidateRow, usd_per_hour: float | None) -> CandidateRow:
    """Return a candidate with the price of a million output tokens, by the price of all its GPUs."""
    tokens_per_s = row.output_tokens_per_s_per_gpu
    usd = (
        None
        if usd_per_hour is None or tokens_per_s is None
        else usd_per(usd_per_hour, tokens_per_s * row.num_gpus, MILLION)
    )
    return row.model_copy(update={"usd_per_million_output_tokens": usd})
