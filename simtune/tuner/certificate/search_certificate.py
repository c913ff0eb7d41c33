"""`certificate.json`, the claims of a search in a form that anybody can check, and the check.

A certificate names every plan of the space with what it could reach at most, and why: a bound, or a simulation at a
rate where it missed the SLO (on one draw of the requests; a plan that misses it at some rate is taken to miss it at
rates that are higher by two standard deviations of what draws differ by, `simtune.tuner.doubt.draw_spread`; and the
bound `stalls` rests on what `simtune.tuner.bounds.stalls` takes for granted). The best of these is what no plan
exceeds. The gap is what another plan may be better by than the chosen one; it is less than the distance to that bound
if the chosen plan met the SLO on the requests on which others missed it (`simtune.tuner.doubt.same_draw`).

`Audit` trusts none of it: it takes the inputs, enumerates the space, and computes every bound, the chosen plan's
simulation and every simulation that ruled a plan out again. Any difference is refused, even if the certificate claims
less than could be proved.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from simtune import __version__
from simtune.specs.base import Count, NonNegative, Record, Seq, Spec
from simtune.specs.hardware import Hardware
from simtune.specs.input_hashes import numbered, sha256, spec_sha256
from simtune.specs.plan import Plan
from simtune.specs.pool import Role
from simtune.specs.references import same_plan
from simtune.specs.study import Study
from simtune.tuner.bounds.relaxation import Worths
from simtune.tuner.certificate.differences import Differences, all_near, near
from simtune.tuner.doubt.draw_spread import DrawSpread
from simtune.tuner.doubt.same_draw import Gaps, Lengths, PlanOnDraw, decisive, ruling
from simtune.tuner.objectives import Miss, Objective, PlanFacts, RateObjective
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import Simulation, SimulationFinding
from simtune.tuner.search.confirm import (
    backlog_task,
    confirmed_deployment,
    judged_together,
    margin,
    misses_below,
    num_draws,
    part_requests,
)
from simtune.tuner.search.most_users import UserLoad, run_at_load
from simtune.tuner.search.same_requests import chosen_on_draw, lengths_of, plan_on_draw
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.expressible import left_out_names, space_for
from simtune.tuner.space.plan_classes import PlanClass, PlanClasses
from simtune.tuner.trial import Attempt, Confirmed, Trial, Tuned

CERTIFICATE_SCHEMA: Literal["simtune/certificate@1"] = "simtune/certificate@1"


def _is_none(value: object) -> bool:
    return value is None


class Tried(Record):
    """A simulation of a plan."""

    rate_rps: float | None = Field(description="null: the workload's own")
    met: bool = Field(description="whether it met the SLO")
    all_cores: bool = Field(description="whether all cores were simulated, where some can stand for all")
    draw: int = Field(0, description="of the requests: 0 is that of the search, others are fresh")
    requests: int | None = Field(None, description="over all cores, to begin with; null: the study's own number")
    missed_by: int | None = Field(
        None, description="requests of the part that missed the SLO; null: no part did alone", exclude_if=_is_none
    )


class PlanFate(Record):
    """A plan of the space, and what is known of it."""

    plan: str
    num_gpus: int
    best: float | None = Field(description="the objective at most; null where it cannot do what is asked")
    by: str = Field(description="the bound that says so, or why it cannot do what is asked")
    simulated: Seq[Tried]
    same_as: str = Field(description="a plan that was simulated, of which this one must do the same; or empty")
    allocation: str = Field(description="a class of plans that was ruled out as a whole, this one in it; or empty")


class AllocationBound(Record):
    """A class of plans, or a part of one: all allocations of the GPUs to instances of these roles and types. The bound
    follows from the worths whatever made them (`simtune.tuner.bounds.relaxation`)."""

    name: str
    best: float | None = Field(description="the objective at most; null where it cannot do what is asked")
    roles: dict[Role, float] = Field(description="what a request per second of each role is worth, in any scale")
    of_cost: float = Field(description="what a unit of cost is worth, where there is a budget")
    of_demand: float = Field(description="what a request per second of the demand is worth, where that is to be met")

    @classmethod
    def of(cls, group: PlanClass) -> AllocationBound:
        """Return the bound that a search found for a class of plans."""
        worths = group.worths
        return cls(
            name=group.name,
            best=group.best,
            roles=dict(worths.roles),
            of_cost=worths.of_cost,
            of_demand=worths.of_demand,
        )

    @property
    def worths(self) -> Worths:
        """Worths that prove the bound."""
        return Worths(self.roles, self.of_cost, self.of_demand)


class Incumbent(Record):
    """The chosen plan."""

    plan: str
    value: float = Field(description="of the objective")
    rate_rps: float | None = Field(description="at which it was simulated; null: the workload's own")


class ConfirmedOnDraws(Record):
    """The fresh draws on all of which the chosen plan keeps the SLO."""

    draws: Count
    requests: Count = Field(description="that were simulated in each, at least")
    lifetimes: NonNegative | None = Field(description="that each lasts, at least; null without a rate")
    values: Seq[float] = Field((), description="the objective on each, where the load is given")

    @classmethod
    def of(cls, confirmed: Confirmed | None) -> ConfirmedOnDraws | None:
        """Return the confirmed draws of a search; None if the study asks for no draws."""
        return None if confirmed is None else cls(**confirmed._asdict())


class Certificate(Record):
    """`certificate.json`."""

    schema_id: Literal["simtune/certificate@1"] = Field(alias="schema")
    simtune: str = Field(description="the release that wrote it")
    study: str
    objective: str
    unit: str
    seed: int
    inputs: dict[str, str] = Field(description="sha256 by kind and name, arrays of profiles apart")
    incumbent: Incumbent
    bound: float = Field(description="no plan of the space reaches more, or less where less is better")
    gap: float = Field(
        description="by which another plan is better at most on any requests, as a share of the incumbent's value"
    )
    gap_on_draw: NonNegative | None = Field(
        None,
        description="the same on the requests on which plans were held against each other; null without rates",
        exclude_if=_is_none,
    )
    interrupted: bool
    confirmed: ConfirmedOnDraws | None = Field(None, description="the fresh draws that the incumbent was confirmed on")
    variants: Seq[str] = Field((), description="variants of the study by name; '' are the plans as they are")
    plans: Seq[PlanFate]
    allocations: Seq[AllocationBound]
    digest: str = Field(description="sha256 of all the rest")

    @classmethod
    def sealed(cls, **content: Any) -> Certificate:
        """Return a certificate of this content, with its digest."""
        open_ = cls(schema_id=CERTIFICATE_SCHEMA, digest="", **content)
        return open_.model_copy(update={"digest": open_.expected_digest})

    @property
    def expected_digest(self) -> str:
        """sha256 of the content without the digest."""
        body = {key: value for key, value in self.model_dump(mode="json", by_alias=True).items() if key != "digest"}
        return sha256(json.dumps(body, sort_keys=True))


def certificate_of(tuned: Tuned) -> Certificate:
    """Return the certificate of a search."""
    question, study = tuned.question, tuned.question.study
    chosen = tuned.chosen
    plans = sorted((_fate(row) for row in tuned.rows), key=lambda fate: fate.plan)
    bound = _remaining(plans, tuned.value, question.objective)
    return Certificate.sealed(
        simtune=__version__,
        study=study.name,
        objective=study.objective,
        unit=question.objective.unit,
        seed=study.seed,
        inputs=inputs_of(question),
        incumbent=Incumbent(
            plan=chosen.candidate.name, value=tuned.value, rate_rps=chosen.rate_rps if question.searches_rate else None
        ),
        bound=bound,
        gap=tuned.gap,
        gap_on_draw=tuned.gap_on_draw,
        interrupted=tuned.interrupted,
        confirmed=ConfirmedOnDraws.of(tuned.confirmed),
        plans=tuple(plans),
        allocations=tuple(AllocationBound.of(group) for group in tuned.classes),
        **_variants(study),
    )


def _variants(study: Study) -> dict[str, tuple[str, ...]]:
    """Return the names of the variants of a study, if it has some beside its plans as they are."""
    labels = tuple(variant.label for variant in study.variants)
    return {} if labels == ("",) else {"variants": labels}


def inputs_of(question: Question) -> dict[str, str]:
    """Return the sha256 of every input of a search, by kind and name."""
    specs: list[Spec] = [question.study, *question.models, question.workload]
    if question.engine is not None:
        specs.append(question.engine)
    for drafting in (*(draft.drafting for draft in question.drafts), *question.fixed_drafting.values()):
        specs += [drafting.acceptance, *([drafting.model] if drafting.model else [])]
    specs += [engine.preset for engine in question.engines.values() if engine.preset is not None]
    hashes = [(f"{spec.KIND}:{spec.name}", spec_sha256(spec)) for spec in specs]
    for profile in (*question.hardware, *question.fixed_hardware.values()):
        hashes += _of_profile(profile)
    for name, engine in question.engines.items():
        of_engine = [entry for profile in engine.hardware for entry in _of_profile(profile)]
        hashes += [(f"{key} under {name}", text) for key, text in of_engine]
    if question.trace is not None:
        hashes.append(("trace", question.trace.sha256))
    return dict(sorted(numbered(hashes).items()))


def inputs_hash(question: Question) -> str:
    """Return a hash of all inputs and of this release: everything that results depend on."""
    return sha256(json.dumps([__version__, inputs_of(question)]))


def _arrays_sha256(hardware: Hardware) -> str:
    arrays = hashlib.sha256()
    for name in sorted(hardware.arrays):
        arrays.update(name.encode() + str(hardware.arrays[name].shape).encode() + hardware.arrays[name].tobytes())
    return arrays.hexdigest()


def _of_profile(hardware: Hardware) -> list[tuple[str, str]]:
    return [
        (f"hardware:{hardware.name}", spec_sha256(hardware)),
        (f"arrays:{hardware.name}", _arrays_sha256(hardware)),
    ]


# --- what a plan can reach --------------------------------------------------------------------------------


def _fate(row: Trial) -> PlanFate:
    best = row.best
    return PlanFate(
        plan=row.candidate.name,
        num_gpus=row.candidate.num_gpus,
        best=best if best is None or math.isfinite(best) else None,
        by=row.bounded_by if best is not None else row.reason,
        simulated=tuple(Tried(**attempt._asdict()) for attempt in row.tried),
        same_as=row.same_as,
        allocation=row.allocation,
    )


def _remaining(plans: Iterable[PlanFate], value: float, objective: Objective) -> float:
    """Return the bound that no plan exceeds."""
    sign = objective.sign
    return max([value, *(fate.best for fate in plans if fate.best is not None)], key=lambda best: sign * best)


# --- the check --------------------------------------------------------------------------------------------


class Resimulations:
    """Simulations that a certificate names, each made again once."""

    def __init__(self, question: Question, plan_cache: PlanCache, problems: Differences) -> None:
        self._question, self._plan_cache, self._problems = question, plan_cache, problems
        self.count = 0
        """Number of simulations that were made."""
        self.looked_at: dict[str, tuple[BoundedCandidate, PlanFate]] = {}
        """Plans that were simulated, each with its claim."""
        self._findings: dict[tuple[str, Tried], SimulationFinding] = {}

    def attempts(self, name: str) -> Iterator[tuple[BoundedCandidate, Tried]]:
        """Yield the simulations of a plan that apply to other plans: those that missed the SLO, or all if the load is
        given."""
        if name in self.looked_at:
            bounded_candidate, fate = self.looked_at[name]
            for attempt in fate.simulated:
                if not attempt.all_cores and not attempt.draw and (attempt.rate_rps is None or not attempt.met):
                    yield bounded_candidate, attempt

    def finding(self, bounded_candidate: BoundedCandidate, tried: Tried) -> SimulationFinding:
        """Return the finding of a simulation; each simulation is made once."""
        key = (bounded_candidate.candidate.name, tried)
        if key not in self._findings:
            self.count += 1
            task = self._task(bounded_candidate, tried)
            finding = self._findings[key] = task.run()
            at = "" if tried.rate_rps is None else f" at {tried.rate_rps:.6g} requests/s"
            self._problems.same(
                f"{bounded_candidate.candidate.name}{at}: whether it meets the SLO", tried.met, finding.met
            )
        return self._findings[key]

    def _task(self, bounded_candidate: BoundedCandidate, tried: Tried) -> Simulation:
        draws, deployment, slo = self._question.draws, bounded_candidate.deployment, self._question.study.slo
        stream = self._plan_cache.stream(bounded_candidate.candidate)
        if tried.requests is not None:
            stream = draws.stream(tried.requests, tried.draw)
        if tried.all_cores:
            users = self._question.searches_users
            deployment = confirmed_deployment(self._question, self._plan_cache, bounded_candidate)
            return Simulation(
                deployment, stream, slo, tried.rate_rps, None, draws=draws if users else None, searches_users=users
            )
        if tried.requests is not None and not tried.draw:
            # A short run is judged as long as it is.
            return Simulation(deployment, stream, slo, tried.rate_rps)
        part = part_requests(self._question) if tried.draw else None
        return Simulation(
            deployment,
            stream,
            slo,
            tried.rate_rps,
            draws=draws,
            draw=tried.draw,
            part=part,
            searches_users=self._question.searches_users,
        )


class DrawComparison:
    """Computes anew by how much another plan is better at most on the same requests than the chosen one."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._plans: list[PlanOnDraw] = []
        """All plans but the chosen one that could reach a value."""
        self.chosen: tuple[BoundedCandidate, PlanFate] | None = None
        """The chosen plan and its claim."""

    def add_unopened(self, best: float | None) -> None:
        """Add a plan whose class was ruled out with the bound `best`."""
        if best is not None:
            self._plans.append(PlanOnDraw(best))

    def add(self, plan: BoundedCandidate, fate: PlanFate, missed: Tried | None, simulated: BoundedCandidate) -> None:
        """Add a plan that missed the SLO as in a simulation of the plan `simulated`, itself or another one."""
        objective = self._question.objective
        if isinstance(objective, RateObjective) and fate.best is not None:
            run = ruling(missed, lengths_of(self._question, simulated))
            self._plans.append(plan_on_draw(objective, plan, fate.best, run))

    def gaps(self, value: float, resimulations: Resimulations) -> Gaps | None:
        """Return the gaps; None unless rates are searched. Every simulation of the chosen plan that shows them is made
        again."""
        question, objective = self._question, self._question.objective
        if not isinstance(objective, RateObjective) or self.chosen is None:
            return None
        plan, fate = self.chosen
        lengths = lengths_of(question, plan)
        chosen = chosen_on_draw(question, objective, plan, value, fate.simulated)
        beginnings = {rival.missed.on for rival in self._plans if rival.missed} | {lengths.full}
        for run in fate.simulated:
            beginning = lengths.of(run)
            if run.met and beginning in beginnings and chosen.met[beginning] == run.rate_rps:
                resimulations.finding(plan, run)
        return chosen.gaps(self._plans, question.draw_spread)


class Audit:
    """Computes anew a certificate and the `plan` that was reported with it. The question's files are in `folder`."""

    def __init__(
        self, certificate: Certificate, question: Question, plan: Plan | None = None, folder: Path = Path()
    ) -> None:
        self.certificate, self.question, self._handed_out, self._folder = certificate, question, plan, folder
        self.problems = Differences()
        """Differences between the certificate and the computed claims, one sentence each."""
        self.bounds = self.allocations = 0
        """Number of bounds, and of bounds of classes, that were computed."""
        self.space = space_for(question)
        self._candidates, self._plan_cache = self.space.candidates, self.space.plan_cache
        self._candidate_filter = CandidateFilter(question, self._plan_cache)
        self._closed: dict[str, tuple[set[str], float | None]] = {}
        """Names of the plans of each class that has a bound, and that bound."""
        self._kinds: dict[tuple[object, ...], list[BoundedCandidate]] = {}
        """Plans that differ in limits alone, until they are bounded together."""
        self._resimulations = Resimulations(question, self._plan_cache, self.problems)
        self._on_draw = DrawComparison(question)

    @property
    def simulations(self) -> int:
        """Number of simulations that were made."""
        return self._resimulations.count

    def run(self) -> bool:
        """Return True if everything in the certificate holds; `problems` lists the differences."""
        certificate, study = self.certificate, self.question.study
        if certificate.digest != certificate.expected_digest:
            self.problems.append("the file was changed after it was written: its digest does not match")
        self.problems += _other_inputs(inputs_of(self.question), certificate.inputs)
        self.problems.same("objective", certificate.objective, study.objective)
        self.problems.same("unit", certificate.unit, self.question.objective.unit)
        self.problems.same("seed", certificate.seed, study.seed)
        self.problems.same("study", certificate.study, study.name)
        self.problems.same("variants", certificate.variants, _variants(study).get("variants", ()))
        if not self.problems:
            self._check_allocations()
        if not self.problems:
            self._check_plans()
        if not self.problems:
            self._check_gaps()
        return not self.problems

    def _check_gaps(self) -> None:
        """Check by how much another plan is better at most."""
        certificate, value = self.certificate, self.certificate.incumbent.value
        bound = _remaining(certificate.plans, value, self.question.objective)
        self.problems.same("best remaining bound", certificate.bound, bound)
        # Certificates of earlier versions claim nothing of the same requests.
        same = certificate.gap_on_draw is not None
        gaps = self._on_draw.gaps(value, self._resimulations) if same else None
        on_draw, on_any = gaps or (None, abs(bound - value) / value if value else 0.0)
        self.problems.same("gap", certificate.gap, on_any)
        self.problems.same("gap on the same requests", certificate.gap_on_draw, on_draw)

    def _check_allocations(self) -> None:
        """Check that the worths of every class prove its bound. No solver is needed."""
        classes = PlanClasses(self.question, self._plan_cache)
        plans = classes.named(self._candidates)
        for claimed in self.certificate.allocations:
            members = plans.get(claimed.name)
            if members is None:
                self.problems.append(f"{claimed.name} is not a class of plans of this space")
                continue
            programme = classes.programme(members)
            group = classes.bounded_by(claimed.name, members, programme, claimed.worths)
            if not programme.counts(claimed.worths):
                self.problems.append(
                    f"allocations of {claimed.name}: a worth is given that the bound does not depend on; it must be 0"
                )
            if not group.proved:
                self.problems.append(f"allocations of {claimed.name}: the worths that are given prove no bound")
                continue
            self.problems.same(f"allocations of {claimed.name}: bound", claimed.best, group.best)
            self._closed[claimed.name] = {candidate.name for candidate in members}, group.best
            self.allocations += 1

    def _check_unopened(self, candidate: Candidate, fate: PlanFate) -> None:
        """Check that a plan belongs to the class that was ruled out with it."""
        name, settled = candidate.name, self._plan_cache.settled(candidate)
        plans, best = self._closed.get(fate.allocation, (set(), None))
        if name not in plans:
            self.problems.append(f"{name} does not belong to class {fate.allocation}, or the class has no bound")
        elif name == self.certificate.incumbent.plan or fate.simulated or fate.same_as:
            self.problems.append(f"{name} was simulated, but is listed as ruled out with class {fate.allocation}")
        else:
            gpus = candidate.num_gpus if isinstance(settled, Refused) else settled.num_gpus
            self.problems.same(f"{name}: GPUs", fate.num_gpus, gpus)
            self.problems.same(f"{name}: bound", fate.best, best)
            self._on_draw.add_unopened(best)

    def _check_plans(self) -> None:
        """Check every plan of the space; plans whose claim rests on the simulation of another plan come last."""
        claimed = {fate.plan: fate for fate in self.certificate.plans}
        if len(claimed) < len(self.certificate.plans):
            self.problems.append("a plan is listed twice")
        bounded_candidates: list[tuple[BoundedCandidate, PlanFate]] = []
        for candidate in self._candidates:
            claim = claimed.get(candidate.name)
            if claim is not None and claim.allocation:
                self._check_unopened(candidate, claimed.pop(candidate.name))
                continue
            bounded_candidate = self._candidate_filter.check(candidate)
            name = (bounded_candidate if isinstance(bounded_candidate, Trial) else bounded_candidate.row).candidate.name
            fate = claimed.pop(name, None)
            if fate is None:
                self.problems.append(f"{name} is in the space and not in the certificate")
            elif isinstance(bounded_candidate, Trial):
                self._check_refused(bounded_candidate, fate)
            else:
                self._kinds.setdefault(bounded_candidate.kind, []).append(bounded_candidate)
                bounded_candidates.append((bounded_candidate, fate))
        for bounded_candidate, fate in sorted(bounded_candidates, key=lambda claim: bool(claim[1].same_as)):
            (self._check_twin if _is_twin(fate) else self._check_plan)(bounded_candidate, fate)
        self.problems += [f"{name} is in the certificate and not in the space" for name in foreign(claimed, self)]

    def _check_refused(self, row: Trial, fate: PlanFate) -> None:
        """Check that nothing is claimed of a plan that cannot meet the objective."""
        self.problems.same(f"{fate.plan}: GPUs", fate.num_gpus, row.candidate.num_gpus)
        self.problems.same(f"{fate.plan}: bound", fate.best, None)
        if fate.plan == self.certificate.incumbent.plan:
            self.problems.append(f"{fate.plan} was chosen, and {row.reason}")

    def _check_plan(self, bounded_candidate: BoundedCandidate, fate: PlanFate) -> None:
        """Check that a plan reaches at most its claimed bound, and that the chosen plan reaches its claimed value."""
        self.problems.same(f"{fate.plan}: GPUs", fate.num_gpus, bounded_candidate.candidate.num_gpus)
        if any(not _of_its_load(self.question, attempt.rate_rps) for attempt in fate.simulated):
            self.problems.append(
                f"{fate.plan} was not simulated under the load of objective {self.question.objective.name}"
            )
            return
        self.bounds += 1
        if fate.simulated:
            self._resimulations.looked_at[fate.plan] = bounded_candidate, fate
        runs = _decisive(fate, lengths_of(self.question, bounded_candidate), self.question.draw_spread)
        best = bounded_candidate.row.best if runs else self._best_by_bound(bounded_candidate, fate)
        for attempt in runs:
            best = self._after(
                bounded_candidate, attempt.rate_rps, self._resimulations.finding(bounded_candidate, attempt), best
            )
        self.problems.at_most(fate.plan, fate.best, best)
        if fate.plan == self.certificate.incumbent.plan:
            self._confirm(bounded_candidate, fate)
            self._on_draw.chosen = bounded_candidate, fate
        else:
            self._on_draw.add(bounded_candidate, fate, next(iter(runs), None), bounded_candidate)

    def _best_by_bound(self, bounded_candidate: BoundedCandidate, fate: PlanFate) -> float | None:
        """Return the bound of a plan: the first of its bounds that equals the claim, or else the last one.

        The bounds in order: its capacity, the SLO at the most favourable limits of its kind, the SLO at its own limits.
        A search computes no more of them than it needs.
        """
        for best in self._bounds(bounded_candidate):
            if near(fate.best, best):
                break
        return bounded_candidate.row.best

    def _bounds(self, bounded_candidate: BoundedCandidate) -> Iterator[float | None]:
        yield bounded_candidate.row.best
        kind = self._kinds.get(bounded_candidate.kind, [])
        if not bounded_candidate.row.reason and kind:
            self._kinds[bounded_candidate.kind] = []
            self._candidate_filter.refine(kind)
            yield bounded_candidate.row.best
        if not bounded_candidate.row.reason and len(kind) != 1:
            self._candidate_filter.refine([bounded_candidate])
            yield bounded_candidate.row.best

    def _after(
        self, bounded_candidate: BoundedCandidate, rate: float | None, finding: SimulationFinding, best: float | None
    ) -> float | None:
        """Return the bound of a plan after a simulation; None if the plan cannot meet the objective."""
        objective, bounded_candidate.row.rate_rps = self.question.objective, rate
        if not finding.met:
            if rate is None or not isinstance(objective, RateObjective):
                return None
            return objective.reaches(
                bounded_candidate.facts,
                Miss(rate, finding.missed_by),
                self.question.draw_spread,
                self._plan_cache.capacity(bounded_candidate.candidate).rps,
            )
        bounded_candidate.row.take(finding.summary, rate or bounded_candidate.offered_rps)
        if _beyond_limits(self.question, bounded_candidate):
            return None
        return objective.value(bounded_candidate.facts, bounded_candidate.row.judged) if rate is None else best

    def _check_twin(self, bounded_candidate: BoundedCandidate, fate: PlanFate) -> None:
        """Check that a plan does the same as another plan, at the rate at which that one missed the SLO."""
        self.problems.same(f"{fate.plan}: GPUs", fate.num_gpus, bounded_candidate.candidate.num_gpus)
        self.bounds += 1
        # Several runs may leave the plan its capacity alone; the one that proves the most counts, as in the search.
        attempts = sorted(self._resimulations.attempts(fate.same_as), key=lambda pair: _proves_rps(*pair))
        for simulated_plan, attempt in attempts:
            finding = self._resimulations.finding(simulated_plan, attempt)
            best = self._after(bounded_candidate, attempt.rate_rps, finding, bounded_candidate.best)
            if near(fate.best, best) and bounded_candidate.ruled_out_by(simulated_plan, finding):
                self._on_draw.add(bounded_candidate, fate, None if attempt.met else attempt, simulated_plan)
                return
        self.problems.append(f"{fate.plan} is not bound to behave as {fate.same_as} does")

    def _confirm_draws(self, bounded_candidate: BoundedCandidate, fate: PlanFate) -> None:
        """Simulate the chosen plan on the fresh draws that confirmed it."""
        rate = self.certificate.incumbent.rate_rps
        draws = range(1, 1 + (num_draws(self.question) if self.question.study.search.confirm.draws else 0))
        fresh = _confirming(self.question, fate, rate)
        if {*fresh} != {*draws}:
            self.problems.append(f"{fate.plan} was chosen, and {len(draws)} fresh draws have not all confirmed it")
            return
        findings = tuple(self._resimulations.finding(bounded_candidate, fresh[draw]) for draw in draws)
        keeps_up = partial(_clears_backlog, self.question, self._resimulations, bounded_candidate, fate)
        confirmed = _confirmed_by(self.question, bounded_candidate.facts, rate, findings, keeps_up)
        if findings and confirmed is None:
            self.problems.append(f"{fate.plan} was chosen, and fresh draws do not confirm it")
        claimed = self.certificate.confirmed
        if claimed is not None and confirmed is not None and not all_near(claimed.values, confirmed.values):
            self.problems.append(f"{fate.plan}: values on fresh draws are {confirmed.values}, not {claimed.values}")

    def _confirm(self, bounded_candidate: BoundedCandidate, fate: PlanFate) -> None:
        """Simulate the chosen plan on all its cores, and on the fresh draws."""
        incumbent, question = self.certificate.incumbent, self.question
        if self._handed_out and not same_plan(bounded_candidate.deployment.plan, self._folder, self._handed_out):
            self.problems.append(f"the plan that was handed out is not {incumbent.plan}, which was chosen")
        if not _of_its_load(self.question, incumbent.rate_rps):
            self.problems.append(
                f"{incumbent.plan} was not chosen under the load of objective {question.objective.name}"
            )
            return
        self._confirm_draws(bounded_candidate, fate)
        on_all = [t.requests or 0 for t in fate.simulated if t.all_cores and t.rate_rps == incumbent.rate_rps]
        stream = question.stream(bounded_candidate.candidate)
        if longest := max(on_all, default=0):
            # The search may have lengthened the run until its verdict was certain.
            stream = question.draws.stream(longest)
        if incumbent.rate_rps is not None:
            stream = stream.at_rate(incumbent.rate_rps)
        users = UserLoad(stream, question.draws) if question.searches_users else None
        deployment = confirmed_deployment(question, self._plan_cache, bounded_candidate)
        result = run_at_load(deployment, stream, question.study.slo, users)
        self._resimulations.count += 1
        if not result.meets_slo:
            self.problems.append(f"{incumbent.plan} was chosen and misses the SLO")
        bounded_candidate.row.take(result.summary(), incumbent.rate_rps or bounded_candidate.offered_rps)
        if wrong := _beyond_limits(self.question, bounded_candidate):
            self.problems.append(f"{incumbent.plan} was chosen, and {wrong}")
        value = question.objective.value(bounded_candidate.facts, bounded_candidate.row.judged)
        self.problems.same(f"{incumbent.plan}: value", incumbent.value, value)


def _other_inputs(current: Mapping[str, str], certified: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence on each input that is not the one of the certificate."""
    for name in sorted(current.keys() | certified.keys()):
        if current.get(name) != certified.get(name):
            how = "is not the one" if name in current and name in certified else "is not there, or was not there"
            yield f"{name} {how} that the search was made with"


def _of_its_load(question: Question, rate: float | None) -> bool:
    """True if a plan was simulated under the load of the study: at some rate if the search varies the rate, and else at
    the workload's own."""
    return (rate is not None) == question.searches_rate


def _beyond_limits(question: Question, plan: BoundedCandidate) -> str:
    """Return the limit of the study that the last simulation of a plan breaks, in words; empty if it breaks none."""
    limits = ((limit, limit.objective.value(plan.facts, plan.row.judged)) for limit in question.limits)
    return next((wrong for limit, value in limits if (wrong := limit.violated(value))), "")


def _is_twin(fate: PlanFate) -> bool:
    """True if the claim of a plan rests on the simulation of another one: not if the plan was itself confirmed at the
    given load, and has a value of its own."""
    confirmed = any(attempt.all_cores and attempt.rate_rps is None for attempt in fate.simulated)
    return bool(fate.same_as) and not confirmed


def foreign(claimed: Mapping[str, PlanFate], audit: Audit) -> list[str]:
    """Return the plans that do not belong into a certificate, of those that are claimed besides the plans of the space.

    Earlier versions listed every plan with a pool that does not fit; of such a plan only a bound may be claimed.
    """
    left_out = left_out_names(audit.question, audit.space) if claimed else set()
    chosen = audit.certificate.incumbent.plan
    return sorted(
        name
        for name, fate in claimed.items()
        if name not in left_out or name == chosen or fate.simulated or fate.same_as
    )


def _on_fresh_draws(fate: PlanFate, rate_rps: float | None) -> dict[int, Tried]:
    """Return the simulations of a plan on fresh draws at a rate, by the draw."""
    return {
        entry.draw: entry
        for entry in fate.simulated
        if entry.draw and (entry.rate_rps == rate_rps or near(entry.rate_rps, rate_rps))
    }


def _confirming(question: Question, fate: PlanFate, rate_rps: float | None) -> dict[int, Tried]:
    """Return the simulations of a plan on fresh draws at a rate; where there are none, at the rate that is higher by
    the margin, which confirm this one as well."""
    at_rate = _on_fresh_draws(fate, rate_rps)
    return at_rate if at_rate or rate_rps is None else _on_fresh_draws(fate, rate_rps * margin(question))


def _confirmed_by(
    question: Question,
    facts: PlanFacts,
    rate_rps: float | None,
    findings: Seq[SimulationFinding],
    keeps_up: Callable[[float], bool],
) -> Confirmed | None:
    """Return what simulations on fresh draws confirm; None if one is too short or misses the SLO, or if neither they
    nor a backlog show that the plan keeps up with the rate."""
    requests = 0 if part_requests(question) is None else question.study.search.confirm.requests
    if not findings or not all(finding.met and finding.summary.requests >= requests for finding in findings):
        return None
    confirmed = judged_together(question, facts, rate_rps, findings).confirmed
    if confirmed is None and rate_rps is not None and keeps_up(rate_rps):
        return judged_together(question, facts, rate_rps, findings, keeps_up=True).confirmed
    return confirmed


def _clears_backlog(
    question: Question, resimulations: Resimulations, plan: BoundedCandidate, fate: PlanFate, rate_rps: float
) -> bool:
    """True if a run of all requests at once shows that a plan keeps up with a rate, and it keeps the SLO on the fresh
    draws and that of the search at a rate that is higher by a margin."""
    task = backlog_task(question, plan)
    if task is None or not isinstance(question.objective, RateObjective):
        return False
    resimulations.count += 1
    if rate_rps > (task.run().kept_up_below_rps or 0.0):
        return False
    higher_rps = rate_rps * margin(question)
    if any(misses_below(Attempt(**entry.model_dump()), higher_rps) for entry in fate.simulated):
        return False
    higher = _on_fresh_draws(fate, higher_rps)
    draws = range(1, 1 + num_draws(question))
    met = (resimulations.finding(plan, entry).met for entry in higher.values())
    return [*sorted(higher)] == [*draws] and all(met)


def _decisive(fate: PlanFate, lengths: Lengths, spread: DrawSpread) -> Seq[Tried]:
    """Return the simulation that decides the bound of a plan; empty if there is none.

    If the load is given it is the last simulation, and else that at the lowest rate that missed the SLO, where a run
    of fewer requests than a full one of `lengths` counts as one at a higher rate; if the plan
    breaks a limit of the study, that at the highest rate that met the SLO.
    """
    if any(attempt.rate_rps is None for attempt in fate.simulated):
        # A fresh draw on which the plan keeps the SLO decides nothing of the draw of the search.
        return tuple(attempt for attempt in fate.simulated if not attempt.draw or not attempt.met)[-1:]
    met = [attempt for attempt in fate.simulated if attempt.met]
    if fate.best is None and met:
        return (max(met, key=_rate),)
    run = decisive(fate.simulated, lengths, spread)
    return () if run is None else (run,)


def _proves_rps(plan: BoundedCandidate, tried: Tried) -> float:
    """Return the rate at which a run of the study's own length would prove as much as a simulation of a plan."""
    question = plan.plan_cache.question
    lengths = lengths_of(question, plan)
    return _rate(tried) * question.draw_spread.slack(lengths.requests, lengths.simulated(tried))


def _rate(tried: Tried) -> float:
    return tried.rate_rps or 0.0
