"""The search: shape by shape, most promising first, each candidate judged by simulation on the same requests.

For a rate objective every shape (tp x pp x instances) finds the highest request rate at which one of its members meets
the SLO. The members are tried in order of their capacity bound; each is first tried just above the best rate so far, so
most cost one simulation, and only one that passes there is bisected up to its own bound. Shapes whose bound cannot beat
the best of the shapes before them are dropped unsimulated. Members that draft with one drafter, and those that do not
draft, are so many searches side by side: what each drafter gains is to be seen.

Shapes are taken in waves of WAVE, and only what earlier waves found prunes, so the answer does not depend on how many
processes work on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from simtune.costs.compiled import CompiledCosts, compile_costs
from simtune.costs.drafting import CompiledRounds
from simtune.errors import Infeasible, UsageError
from simtune.parallel import executor, ordered_map
from simtune.sim.deployment import Deployment, deploy, length_limit
from simtune.sim.feasibility import check
from simtune.sim.parts import ROUTER
from simtune.sim.requests import RequestStream, build_stream
from simtune.sim.result import Result
from simtune.sim.summary import Metric, SimulationSummary
from simtune.specs.engine import EnginePreset
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.speculation import Speculation
from simtune.specs.study import Study
from simtune.specs.traces import Trace
from simtune.specs.workload import ClosedLoop, Workload
from simtune.tuner.bounds import Capacity
from simtune.tuner.drafting import Draft, speculation_on
from simtune.tuner.space import Candidate, ParallelShape, members, shapes

WAVE = 4
SAMPLED_CORES = 4
"""Of wide deployments this many cores are simulated while searching; the chosen plan is confirmed on all of them."""
RATE_OBJECTIVES = ("goodput_per_gpu", "goodput")
UNITS = {"goodput_per_gpu": "requests/s/GPU", "goodput": "requests/s", "gpus": "GPUs", "e2el": "s"}


@dataclass(frozen=True)
class Question:
    """A study with everything it names loaded. What workers are sent."""

    study: Study
    model: Model
    hardware: Hardware
    workload: Workload
    trace: Trace | None
    drafts: tuple[Draft, ...] = ()
    """The drafters of the study."""
    engine: EnginePreset | None = None
    """Whose settings hold where the search leaves something open."""

    @property
    def requests(self) -> int:
        """How many a simulation runs, by the study or else by the workload."""
        return self.study.search.requests or self.workload.requests

    @property
    def searches_rate(self) -> bool:
        """Whether the objective is a rate, which the search varies; else the load is the workload's."""
        return self.study.objective in RATE_OBJECTIVES

    @property
    def cores_apart(self) -> bool:
        """Whether some cores of a wide deployment can stand for all."""
        apart = self.study.router is None or ROUTER.find(self.study.router.kind).deals_in_turn
        return apart and not isinstance(self.workload.arrivals, ClosedLoop)

    def stream(self, shape: ParallelShape, rate_rps: float | None = None) -> RequestStream:
        """Requests for instances of a shape, of which some, seeing `requests` of them, will be simulated."""
        requests = self.requests
        if self.cores_apart:
            requests = -(-requests * shape.instances // min(shape.instances, -(-SAMPLED_CORES // shape.pp)))
        stream = build_stream(self.workload, self.trace, requests=requests, seed=self.study.seed)
        return stream if rate_rps is None else stream.at_rate(rate_rps)

    def stream_for(self, deployment: Deployment, rate_rps: float | None) -> RequestStream:
        """The requests of `stream` for the instances of a deployment."""
        (pool,) = deployment.plan.pools
        return self.stream(ParallelShape(pool.parallelism.tp, pool.parallelism.pp, pool.instances), rate_rps)

    def plan(self, candidate: Candidate, max_model_len: int) -> Plan:
        """The plan that a candidate stands for."""
        settings = None if self.engine is None else self.engine.settings(self.hardware.device, self.model)
        return candidate.plan(self.study, max_model_len, settings)

    def draft(self, candidate: Candidate) -> Draft | None:
        """Its drafter."""
        return next((draft for draft in self.drafts if draft.choice.label == candidate.drafter), None)

    def deploy(self, candidate: Candidate, max_model_len: int, costs: CompiledCosts | None = None) -> Deployment:
        """`costs` serve what does not draft; all else has its own."""
        draft = self.draft(candidate)
        drafting = None if draft is None else draft.drafting
        return deploy(self.plan(candidate, max_model_len), self.model, self.hardware, costs, drafting=drafting)

    def judge(self, deployment: Deployment, rate_rps: float | None) -> Result:
        """Whether a deployment meets the SLO, judged by some of its cores; ends as soon as it cannot any more."""
        stream = self.stream_for(deployment, rate_rps)
        return deployment.simulate(stream, self.study.slo, cores=SAMPLED_CORES, stop_when_lost=True)

    def watch(self, deployment: Deployment, rate_rps: float | None) -> Result:
        """The same to the end."""
        stream = self.stream_for(deployment, rate_rps)
        return deployment.simulate(stream, self.study.slo, cores=SAMPLED_CORES)


@dataclass
class Trial:
    """A candidate and its fate. Numbers are those of the last simulation at `rate_rps`; None where there was none."""

    candidate: Candidate
    status: str
    reason: str
    kv_blocks: int | None = None
    rate_bound_rps: float | None = None
    rate_rps: float | None = None
    simulations: int = 0
    summary: SimulationSummary | None = None

    def take(self, result: Result, rate_rps: float | None) -> None:
        """Remember what a simulation of this candidate showed."""
        self.summary, self.rate_rps = result.summary(), rate_rps or result.offered_rate_rps

    def statistic(self, metric: Metric, statistic: Literal["mean", "p99"]) -> float | None:
        """A statistic of a metric in seconds; None where nothing was simulated or counted."""
        if self.summary is None:
            return None
        latencies = self.summary.metrics[metric]
        return latencies.mean if statistic == "mean" else latencies.p99

    def value(self, objective: str) -> float:
        """The objective, larger is better, of a candidate that met its SLO."""
        gpus = self.candidate.shape.num_gpus
        if objective in RATE_OBJECTIVES:
            assert self.rate_rps is not None
            return self.rate_rps / (gpus if objective == "goodput_per_gpu" else 1)
        if objective == "gpus":
            return -float(gpus)
        return -(self.statistic("e2el", "mean") or float("inf"))


@dataclass
class Tuned:
    """The answer of a search: the chosen plan first, then everybody else with the reason it lost."""

    question: Question
    rows: list[Trial]
    deployment: Deployment
    result: Result
    interrupted: bool = False

    @property
    def chosen(self) -> Trial:
        """The plan that won."""
        return self.rows[0]

    @property
    def value(self) -> float:
        """The objective of the chosen plan in its own unit (UNITS)."""
        return abs(self.chosen.value(self.question.study.objective))

    def runners_up(self, most: int = 3) -> list[Trial]:
        """The best candidates of other shapes that meet the SLO."""
        return [r for r in self.rows[1:] if r.status == "feasible"][:most]


SearchProgress = Callable[[int, int, "Trial | None"], None]


def optimize(question: Question, *, jobs: int | None = None, progress: SearchProgress | None = None) -> Tuned:
    """Search the study's space. Raises Infeasible, saying what stood in the way, when no plan meets the SLO.

    `jobs` processes work on shapes side by side (default: one per core); the answer does not depend on it.
    `progress(done, total, best so far)` is called after every shape. An interrupt (Ctrl-C) ends the search with what it
    has, marked `interrupted`, or is passed on when no plan has met the SLO yet.
    """
    study = question.study
    _check(question)
    space = shapes(study)
    if not space:
        raise Infeasible(
            f"{study.name}: no tp x pp of the search space fits {study.hardware.devices} devices; "
            "allow more devices, or smaller search.tp and search.pp"
        )
    longest_stream = max((question.stream(shape) for shape in space), key=len)
    max_model_len = length_limit(question.model, longest_stream)
    rows, interrupted = _search(question, space, max_model_len, jobs, progress)
    chosen, deployment, result = _confirm(question, rows, max_model_len)
    return Tuned(question, _ranked(rows, chosen, study.objective), deployment, result, interrupted)


def _check(question: Question) -> None:
    """Raises UsageError where the objective asks for a rate that the workload or the SLO leaves open."""
    study = question.study
    if not question.searches_rate:
        return
    if isinstance(question.workload.arrivals, ClosedLoop):
        raise UsageError(
            f"{study.name}: objective {study.objective} looks for a request rate, but workload "
            f"{question.workload.name} is a closed loop; use objective e2el or gpus"
        )
    if not study.slo.limits() and not any(c.slo for c in question.workload.classes):
        raise UsageError(f"{study.name}: objective {study.objective} needs an slo with at least one limit")


def _search(
    question: Question,
    space: list[ParallelShape],
    max_model_len: int,
    jobs: int | None,
    progress: SearchProgress | None,
) -> tuple[list[Trial], bool]:
    """Every candidate of the space with its fate, wave by wave; and whether an interrupt left some shapes out."""
    rows: list[Trial] = []
    best: Trial | None = None
    with executor(jobs, min(WAVE, len(space))) as pool:
        try:
            ordered = _by_promise(question, space, max_model_len)
            for start in range(0, len(ordered), WAVE):
                wave = [ShapeTask(question, shape, max_model_len, best) for shape in ordered[start : start + WAVE]]
                for trials in ordered_map(pool, ShapeTask.run, wave):
                    rows += trials
                    best = _best([*([best] if best else []), *trials], question.study)
                    if progress is not None:
                        progress(len({r.candidate.shape for r in rows}), len(space), best)
        except KeyboardInterrupt:
            if best is None:
                raise
            return rows, True
    return rows, False


def _confirm(question: Question, rows: list[Trial], max_model_len: int) -> tuple[Trial, Deployment, Result]:
    """Simulate all cores of the best candidate, not some of them; if that misses the SLO, take its verdict back.

    A rate is taken back by one step of the tolerance, a verdict at a given load altogether; then the best is chosen
    anew.
    """
    study = question.study
    while (best := _best(rows, study)) is not None:
        deployment = question.deploy(best.candidate, max_model_len)
        rate = best.rate_rps if question.searches_rate else None
        result = deployment.simulate(question.stream_for(deployment, rate), study.slo, record=True)
        best.simulations += 1
        if result.meets_slo:
            best.take(result, rate)
            return best, deployment, result
        if best.rate_rps is not None and question.searches_rate:
            best.rate_rps /= 1 + study.search.rate_tolerance
        else:
            best.take(result, rate)
            best.status, best.reason = "infeasible", _violation(result)
    raise Infeasible(_why_none(study, rows))


@dataclass(frozen=True)
class ShapeTask:
    """One shape to search, knowing the best candidate of earlier waves."""

    question: Question
    shape: ParallelShape
    max_model_len: int
    best: Trial | None

    def run(self) -> list[Trial]:
        """All members of the shape with their fates."""
        return [*_ShapeSearch(self).run()]


class _ShapeSearch:
    """The members of one shape, and the best found among those that draft alike."""

    def __init__(self, task: ShapeTask) -> None:
        self.q, self.shape, self.max_model_len = task.question, task.shape, task.max_model_len
        self.study, self.best = task.question.study, task.best
        self.leaders: dict[str, Trial] = {}
        self.speculations: dict[tuple[str, int], Speculation | None] = {}
        self.stream = self.q.stream(self.shape)

    def run(self) -> Iterator[Trial]:
        fitting = []
        for candidate in members(self.study, self.shape):
            try:
                settled = self._fitting(candidate)
            except Infeasible as error:
                yield Trial(candidate, "does_not_fit", str(error))
                continue
            if settled.drafter and settled.speculation is None:
                yield Trial(settled, "pruned", f"drafting with {settled.drafter} pays at no batch size")
            else:
                fitting.append(settled)
        bounded = [*self._bounded(fitting)]
        bounded.sort(key=lambda b: (-b[0], b[1]))
        judge = self._judge_by_rate if self.q.searches_rate else self._judge_at_load
        for bound, candidate, deployment in bounded:
            row = Trial(candidate, "pruned", "", deployment.memory.num_blocks, bound)
            judge(row, deployment)
            yield row

    def _fitting(self, candidate: Candidate) -> Candidate:
        """The same with its drafts settled, left at None where they do not pay. Raises Infeasible where its memory does
        not add up, or an engine would refuse it."""
        draft = self.q.draft(candidate)
        (pool,) = self.q.plan(candidate, self.max_model_len).pools
        if draft is None:
            check(pool, self.q.model, self.q.hardware)
            return candidate
        key = (candidate.drafter, candidate.max_num_seqs)
        if key not in self.speculations:
            self.speculations[key] = speculation_on(draft, self.q.model, self.q.hardware, pool, self.stream)
        candidate = replace(candidate, speculation=self.speculations[key])
        (pool,) = self.q.plan(candidate, self.max_model_len).pools
        check(pool, self.q.model, self.q.hardware, draft.drafting)
        return candidate

    def _bounded(self, fitting: list[Candidate]) -> Iterator[tuple[float, Candidate, Deployment]]:
        """Each with its capacity bound, deployed."""
        plain = [c for c in fitting if not c.drafter]
        if plain:
            # One set of tables serves all that do not draft: they differ only in how far into them they may go.
            widest = replace(
                plain[0],
                max_num_seqs=max(c.max_num_seqs for c in plain),
                max_num_batched_tokens=max(c.max_num_batched_tokens for c in plain),
            )
            (pool,) = self.q.plan(widest, self.max_model_len).pools
            costs = compile_costs(self.q.model, self.q.hardware, pool, self.max_model_len)
            capacity = Capacity(costs.tables, self.stream, self.max_model_len)
            for candidate in plain:
                deployment = self.q.deploy(candidate, self.max_model_len, costs)
                yield capacity.rps(deployment.pools[0]), candidate, deployment
        for candidate in fitting:
            if candidate.drafter:
                deployment = self.q.deploy(candidate, self.max_model_len)
                own = deployment.pools[0].costs
                assert isinstance(own, CompiledRounds)
                yield (
                    Capacity(own.tables, self.stream, self.max_model_len).rps(deployment.pools[0]),
                    candidate,
                    deployment,
                )

    # --- highest rate that meets the SLO ------------------------------------------------------------------

    def _judge_by_rate(self, row: Trial, deployment: Deployment) -> None:
        bound = row.rate_bound_rps
        assert bound is not None
        if self._cannot_win(row, bound):
            return
        step = 1 + self.study.search.rate_tolerance
        leader = self.leaders.get(row.candidate.drafter)
        if leader is not None:
            assert leader.rate_rps is not None
            low = leader.rate_rps * step
            result = self._try(row, deployment, low)
            if not result.meets_slo:
                row.status, row.reason = "infeasible", f"at {low:.4g} requests/s: {_violation(result)}"
                return
        else:
            # Nobody of this shape and drafter has met the SLO yet: find a first rate that does, from above.
            low = bound / 2
            result = self._try(row, deployment, low)
            while not result.meets_slo and low > bound / 100:
                low /= 4
                result = self._try(row, deployment, low)
            if not result.meets_slo:
                row.status, row.reason = "infeasible", f"even at {low:.3g} requests/s: {_violation(result)}"
                return
        high, kept = bound, result
        while high > low * step:
            middle = (low * high) ** 0.5
            result = self._try(row, deployment, middle)
            if result.meets_slo:
                low, kept = middle, result
            else:
                high = middle
        row.take(kept, low)
        row.status, row.reason = "feasible", ""
        self.leaders[row.candidate.drafter] = row

    def _cannot_win(self, row: Trial, bound: float) -> bool:
        """Drop a candidate whose bound beats neither its leader nor the best of earlier waves."""
        for rival in (self.best, self.leaders.get(row.candidate.drafter)):
            if rival is None:
                continue
            to_beat = rival.value(self.study.objective)
            if self.study.objective == "goodput_per_gpu":
                to_beat *= self.shape.num_gpus
            if bound <= to_beat * (1 + self.study.search.rate_tolerance):
                row.reason = (
                    f"cannot exceed {bound:.4g} requests/s (capacity bound); {rival.candidate.name} reached "
                    f"{rival.rate_rps:.4g} requests/s on {rival.candidate.shape.num_gpus} GPUs"
                )
                return True
        return False

    def _try(self, row: Trial, deployment: Deployment, rate_rps: float) -> Result:
        row.simulations += 1
        result = self.q.judge(deployment, rate_rps)
        row.take(result, rate_rps)
        return result

    # --- at the load asked for ----------------------------------------------------------------------------

    def _judge_at_load(self, row: Trial, deployment: Deployment) -> None:
        fewest = self.best if self.study.objective == "gpus" else None
        if fewest is not None and fewest.candidate.shape.num_gpus < self.shape.num_gpus:
            row.reason = f"needs {self.shape.num_gpus} GPUs; {fewest.candidate.name} needs fewer"
            return
        offered = self.stream.offered_rate_rps
        assert row.rate_bound_rps is not None
        if offered is not None and row.rate_bound_rps < offered:
            row.reason = (
                f"cannot exceed {row.rate_bound_rps:.4g} requests/s (capacity bound); {offered:.4g} are offered"
            )
            return
        row.simulations += 1
        result = self.q.watch(deployment, None)
        row.take(result, None)
        if result.meets_slo:
            row.status, row.reason = "feasible", ""
        else:
            row.status, row.reason = "infeasible", _violation(result)


def _violation(result: Result) -> str:
    if result.refused:
        return f"{result.refused} requests exceed max_model_len"
    if result.saturated:
        return "saturated: requests pile up faster than they are served"
    missed = "; ".join(str(limit) for limit in result.limits if not limit.met)
    if result.outcome.aborted:
        missed += f", given up after {int(result.completed.sum()):,} of {len(result.stream):,} requests"
    return missed


def _by_promise(question: Question, space: list[ParallelShape], max_model_len: int) -> list[ParallelShape]:
    """Shapes in the order in which they are worth trying: fewest GPUs first where these are counted, else the
    simplest cut first (small tp x pp leaves most of the hardware to batching)."""
    if question.study.objective == "gpus":
        return sorted(space, key=lambda s: (s.num_gpus, s.tp * s.pp, s.pp))
    return sorted(space, key=lambda s: (s.tp * s.pp, s.pp))


def _best(rows: Sequence[Trial], study: Study) -> Trial | None:
    """The best candidate that meets the SLO.

    Rates are only known to within the search's tolerance; among those that near to the highest, the one with the fewest
    GPUs per instance is taken: it is the simplest to run, and what pipelines lose is modelled least well.
    """
    feasible = [r for r in rows if r.status == "feasible"]
    if not feasible:
        return None
    highest = max(feasible, key=lambda r: _merit(r, study.objective))
    if study.objective in RATE_OBJECTIVES:
        enough = highest.value(study.objective) / (1 + study.search.rate_tolerance)
        near = [r for r in feasible if r.value(study.objective) >= enough]
        fewest = min(r.candidate.shape.gpus_per_instance for r in near)
        near = [r for r in near if r.candidate.shape.gpus_per_instance == fewest]
        highest = max(near, key=lambda r: _merit(r, study.objective))
    return highest


def _merit(row: Trial, objective: str) -> tuple[float, float, float]:
    """Objective first; then lower mean end-to-end latency, then fewer GPUs. Earlier rows win ties."""
    return row.value(objective), -(row.statistic("e2el", "mean") or 0.0), -float(row.candidate.shape.num_gpus)


def _ranked(rows: list[Trial], best: Trial, objective: str) -> list[Trial]:
    """The chosen row first, then the others that meet the SLO by merit, then the rest by their bound."""
    feasible = [r for r in rows if r.status == "feasible" and r is not best]
    feasible.sort(key=lambda r: _merit(r, objective), reverse=True)
    rest = [r for r in rows if r.status != "feasible"]
    rest.sort(key=lambda r: (r.status != "infeasible", r.status == "does_not_fit", -(r.rate_bound_rps or 0)))
    best.status = "chosen"
    best.reason = _praise(best, objective)
    for row in feasible:
        row.reason = _reason(row, best, objective)
    return [best, *feasible, *rest]


def _praise(row: Trial, objective: str) -> str:
    if objective in RATE_OBJECTIVES:
        return f"meets the SLO up to {row.rate_rps:.4g} requests/s, {row.value(objective):.4g} {UNITS[objective]}"
    if objective == "gpus":
        return f"meets the SLO on {row.candidate.shape.num_gpus} GPUs"
    return f"meets the SLO with a mean end-to-end latency of {-row.value(objective):.4g} s"


def _reason(row: Trial, best: Trial, objective: str) -> str:
    if objective == "gpus":
        more = row.candidate.shape.num_gpus - best.candidate.shape.num_gpus
        return f"needs {more} GPUs more" if more else "as many GPUs, but a longer mean end-to-end latency"
    own, chosen = row.value(objective), best.value(objective)
    if objective in RATE_OBJECTIVES:
        if own > chosen:
            return f"{own:.4g} {UNITS[objective]}, within the tolerance, but more GPUs per instance"
        return f"{own:.4g} {UNITS[objective]}, {1 - own / chosen:.1%} less than the chosen plan"
    return f"mean end-to-end latency {-own:.4g} s, {own / chosen - 1:.1%} more than the chosen plan"


def _why_none(study: Study, rows: list[Trial]) -> str:
    fit = [r for r in rows if r.status != "does_not_fit"]
    if not fit:
        shown = sorted(rows, key=lambda r: (-r.candidate.shape.tp * r.candidate.shape.pp, r.candidate))[0]
        return f"{study.name}: no plan fits the hardware. The widest one, {shown.candidate.name}: {shown.reason}"
    shown = max(fit, key=_nearness)
    return (
        f"{study.name}: {len(fit)} plans fit, none meets the SLO. The nearest, {shown.candidate.name}, {shown.reason}. "
        "Relax the SLO, lower the load, or allow more or faster devices"
    )


def _nearness(row: Trial) -> tuple[float, float]:
    """How near a candidate that missed the SLO came to it."""
    attainment = None if row.summary is None else row.summary.slo_attainment
    return attainment or 0.0, row.rate_bound_rps or 0.0
