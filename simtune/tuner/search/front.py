"""The front of tokens/s/user against tokens/s/GPU: every point of it a plan that was simulated at a rate.

Plans are held against each other at the same loads: a ladder of output tokens/s/GPU, from the highest capacity of any
plan downwards. At each load the plan with the most tokens/s/user (one over the mean TPOT) that keeps up within the SLO
is searched, best floor first. A plan must be better than every point with at least that load. This is expressed as the
study's SLO with a mean TPOT below the best so far, so that all bounds of `simtune.tuner.bounds` can rule out plans at a
load without a simulation. A plan that beats them is simulated once more on all cores, then on the fresh draws that the
study asks for (`simtune.tuner.search.confirm`), each of which has to keep the SLO: that is the point. Nothing is
interpolated between the loads of the ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.sim.parallel import Jobs, executor
from simtune.specs.workload import Slo
from simtune.tuner.bounds.best_case import least_tpot_s, slo_bound
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.question_checks import check
from simtune.tuner.search.best_first import AHEAD, Begins, ended, optimize
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import Simulation, SimulationFinding
from simtune.tuner.search.confirm import DrawsVerdict, FreshDraws
from simtune.tuner.search.course import SearchCourse, SearchProgress
from simtune.tuner.search.evaluator import Evaluator, Keyed
from simtune.tuner.search.front_points import FrontPoint, Ladder
from simtune.tuner.search.implied_results import tell_apart
from simtune.tuner.search.reasons import no_plan, out_of_time
from simtune.tuner.search.search_journal import Ledger
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Attempt, Confirmed, Trial, Tuned

LOWEST_LOAD = 1 / 64
"""Load at the foot of the ladder as a share of the highest: requests hardly overlap there."""
STRICTLY = 1 - 1e-9
"""Factor on the mean TPOT to beat: a plan as good as the best so far is not better."""


def answer(
    question: Question,
    *,
    jobs: Jobs = None,
    progress: SearchProgress | None = None,
    ledger: Ledger[SimulationFinding] | None = None,
    time_is_up: Callable[[], bool] | None = None,
    begins: Begins | None = None,
) -> Tuned:
    """Return the answer of a study: for objective `pareto` the front, with its point of the greatest power chosen, or
    else the best plan. See `simtune.tuner.search.best_first.optimize`."""
    if question.study.objective != "pareto":
        return optimize(question, jobs=jobs, progress=progress, ledger=ledger, time_is_up=time_is_up, begins=begins)
    check(question)
    space = space_for(question)
    with executor(jobs, AHEAD) as pool:
        evaluator = Evaluator(pool, ledger, time_is_up)
        search = FrontSearch(question, space.candidates, evaluator, progress, space.plan_cache)
        if begins is not None:
            begins(space.candidates, search.plan_cache)
        interrupted = ended(search.run)
    if interrupted is None:
        raise UsageError(out_of_time(question, search.simulations))
    tuned = search.answer(interrupted)
    tuned.left_out = space.reasons
    return tuned


@dataclass
class _Climber:
    """A plan on the ladder."""

    plan: BoundedCandidate
    least_tpot_s: float
    """No request mean is below it, in seconds, at any rate."""
    points: dict[float, FrontPoint] = field(default_factory=dict)
    """Points at which the plan was the best so far, by load."""
    confirmed: dict[float, Confirmed | None] = field(default_factory=dict)
    """Fresh draws on which the plan holds, by load; None if the study asks for none."""

    def rate(self, load: float) -> float:
        """Return the requests per second at which each GPU has a load in output tokens/s."""
        return load * self.plan.facts.num_gpus / self.plan.facts.output_tokens


class FrontSearch:
    """State of a search for a front: the ladder of loads, the simulated plans and the points."""

    def __init__(
        self,
        question: Question,
        candidates: Sequence[Candidate],
        evaluator: Evaluator,
        progress: SearchProgress | None = None,
        plan_cache: PlanCache | None = None,
    ) -> None:
        self.question, self.progress, self.evaluator = question, progress, evaluator
        self.rows: list[Trial] = []
        self.points: list[FrontPoint] = []
        """Points of the front, from the highest load to the lowest."""
        self.loads: list[float] = []
        """Ladder of loads in output tokens/s/GPU, the highest first."""
        self.settled = self.ruled_out = 0
        """Loads that were decided, and plans at a load that needed no simulation."""
        self._candidates = candidates
        self.plan_cache = plan_cache or PlanCache(question, candidates)
        self._fresh = FreshDraws(question, evaluator)
        self._runners: list[_Climber] = []
        self._decided = 0

    @property
    def simulations(self) -> int:
        """Number of simulations so far."""
        return sum(row.simulations for row in self.rows)

    @property
    def ladder(self) -> Ladder:
        """Front so far, and the ladder of its loads."""
        return Ladder(tuple(self.loads), self.settled, tuple(self.points))

    def run(self, loads: int | None = None) -> bool:
        """Find the best plan at every load, or at the first `loads` of them. Return True if an interrupt left some
        open."""
        try:
            self._enter()
            for load in self.loads[:loads]:
                self._settle(load)
                self.settled += 1
        except KeyboardInterrupt:
            if not self.points:
                raise
            return True
        return False

    def _enter(self) -> None:
        candidate_filter = CandidateFilter(self.question, self.plan_cache)
        for candidate in self._candidates:
            bounded_candidate = candidate_filter.check(candidate)
            if isinstance(bounded_candidate, Trial):
                self.rows.append(bounded_candidate)
                continue
            self.rows.append(bounded_candidate.row)
            stream = self.plan_cache.stream(candidate)
            self._runners.append(
                _Climber(bounded_candidate, least_tpot_s(bounded_candidate.deployment, stream, SAMPLED_CORES))
            )
        self._runners.sort(key=lambda runner: (runner.least_tpot_s, runner.plan.order()))
        facts = [(runner.plan.bound_rps, runner.plan.facts) for runner in self._runners]
        top = max((rps * plan.output_tokens / plan.num_gpus for rps, plan in facts), default=0.0)
        steps = self.question.study.search.front
        self.loads = [top * LOWEST_LOAD ** (step / (steps - 1)) for step in range(steps)] if top else []

    # --- at one load ------------------------------------------------------------------------------------------

    def _settle(self, load: float) -> None:
        """Find the best plan at a load, unless a plan at a higher load is better than all others could be."""
        findings: list[tuple[BoundedCandidate, SimulationFinding]] = []
        best: FrontPoint | None = None
        for number, runner in enumerate(self._runners):
            self._decided += 1
            rate, target = runner.rate(load), self._wanted(best)
            if self._hopeless(runner, rate, target) or any(_same(runner.plan, *earlier) for earlier in findings):
                self.ruled_out += 1
                continue
            finding = self._simulated(runner, rate, target, self._next(number, load, target))
            if finding.used is not None:
                findings.append((runner.plan, finding))
            point = (
                self._on_every_core(runner, load, self.question.arrivals(finding.summary.requests))
                if finding.met
                else None
            )
            if point is not None and self._beats(point, best) and self._holds(runner, load):
                best = runner.points[load] = point
            elif not runner.plan.row.reason:
                runner.plan.row.reason = f"at {rate:.4g} requests/s: {finding.reason or 'no better on all its cores'}"
            self._report(best)
        if best is not None:
            self.points.append(best)

    def _wanted(self, best: FrontPoint | None) -> Slo:
        """Return the study's SLO, tightened to require a better mean TPOT than every point with at least this load."""
        speeds = [point.output_tokens_per_s_per_user for point in [*self.points, *([best] if best else [])]]
        slo = self.question.study.slo
        if not speeds:
            return slo
        limits = [1 / max(speeds) * STRICTLY, *([slo.tpot_s["mean"]] if "mean" in slo.tpot_s else [])]
        return slo.model_copy(update={"tpot_s": {**slo.tpot_s, "mean": min(limits)}})

    def _hopeless(self, runner: _Climber, rate: float, wanted: Slo) -> bool:
        """True if bounds rule out that a plan meets the SLO `wanted` at a rate."""
        plan, mean_s = runner.plan, wanted.tpot_s.get("mean", float("inf"))
        if rate > plan.bound_rps or runner.least_tpot_s > mean_s:
            return True
        stream = self.plan_cache.stream(plan.candidate)
        return slo_bound(plan.deployment, stream, wanted, SAMPLED_CORES, below_rps=rate).rps < rate

    def _simulated(self, runner: _Climber, rate: float, wanted: Slo, expected: Iterator[Keyed]) -> SimulationFinding:
        row, keyed = runner.plan.row, self._keyed(runner, rate, wanted)
        finding = self.evaluator.finding(*keyed, expected)
        row.simulations += 1
        row.tried.append(Attempt(rate, finding.met))
        return finding

    def _keyed(self, runner: _Climber, rate: float, wanted: Slo) -> Keyed:
        plan = runner.plan
        stream = self.plan_cache.stream(plan.candidate)
        task = Simulation(plan.deployment, stream, wanted, rate, draws=self.question.draws)
        return (f"{plan.candidate.name} {wanted.tpot_s.get('mean')}", rate, 0), task

    def _next(self, number: int, load: float, wanted: Slo) -> Iterator[Keyed]:
        """Yield the simulations that come next, unless the best plan changes."""
        for runner in self._runners[number + 1 : number + 1 + AHEAD]:
            rate = runner.rate(load)
            if not self._hopeless(runner, rate, wanted):
                yield self._keyed(runner, rate, wanted)

    def _holds(self, runner: _Climber, load: float) -> bool:
        """Return True if a plan keeps the SLO at a load on the fresh draws that the study asks for."""
        rate, verdict = runner.rate(load), DrawsVerdict(None, "")
        if self.question.study.search.confirm.draws:
            verdict = self._fresh.verdict(runner.plan, rate)
            if verdict.confirmed is None:
                runner.plan.row.reason = f"at {rate:.4g} requests/s {verdict.reason}"
                return False
        runner.confirmed[load] = verdict.confirmed
        return True

    def _on_every_core(self, runner: _Climber, load: float, seen: int) -> FrontPoint | None:
        """Return the point of a plan at a load; None if it misses the SLO or a limit of the study on all its cores.
        `seen` is the number of requests in which some of its cores meet the SLO."""
        plan, rate = runner.plan, runner.rate(load)
        requests = self.question.num_requests(plan.candidate, max(self.question.requests, seen))
        result = self._on_all_cores(plan.deployment, rate, requests)
        plan.row.simulations += 1
        plan.row.tried.append(Attempt(rate, result.meets_slo, all_cores=True))
        summary = result.summary()
        per_user = summary.output_tokens_per_s_per_user
        if not result.meets_slo or per_user is None:
            return None
        last = (plan.row.summary, plan.row.rate_rps)
        plan.row.take(summary, rate)
        for limit in self.question.limits:
            if wrong := limit.violated(limit.objective.value(plan.facts, plan.row.judged)):
                plan.row.reason, (plan.row.summary, plan.row.rate_rps) = wrong, last
                return None
        return FrontPoint(
            candidate=plan.candidate.name,
            num_gpus=plan.facts.num_gpus,
            rate_rps=rate,
            output_tokens_per_s_per_gpu=load,
            delivered_tokens_per_s_per_gpu=summary.output_tokens_per_s_per_gpu or 0.0,
            output_tokens_per_s_per_user=per_user,
            ttft_p99_s=summary.metrics["ttft"].p99,
            tpot_p99_s=summary.metrics["tpot"].p99,
            requests=result.stream.arrivals,
        )

    def _on_all_cores(self, deployment: Deployment, rate: float, requests: int, record: bool = False) -> Result:
        stream = self.question.draws.stream(requests).at_rate(rate)
        return deployment.simulate(stream, self.question.study.slo, record=record)

    def _beats(self, point: FrontPoint, best: FrontPoint | None) -> bool:
        rivals = [*self.points, *([best] if best else [])]
        return all(point.output_tokens_per_s_per_user > rival.output_tokens_per_s_per_user for rival in rivals)

    def _report(self, best: FrontPoint | None) -> None:
        if self.progress is None:
            return
        leader = max([*self.points, *([best] if best else [])], key=lambda point: point.power, default=None)
        total = len(self._runners) * len(self.loads)
        row = next((row for row in self.rows if leader and row.candidate.name == leader.candidate), None)
        self.progress(
            SearchCourse(
                done=self._decided,
                total=total,
                best=row,
                value=None if leader is None else leader.power,
                bound=None,
                open=total - self._decided,
                simulations=self.simulations,
            )
        )

    # --- the end ----------------------------------------------------------------------------------------------

    def answer(self, interrupted: bool) -> Tuned:
        """Return the front, with the point of the greatest power as the chosen plan. Raise Infeasible if it is
        empty."""
        if not self.points:
            raise no_plan(self.question, self.rows)
        chosen = max(self.points, key=lambda point: point.power)
        on_front: dict[str, list[FrontPoint]] = {}
        for point in self.points:
            on_front.setdefault(point.candidate, []).append(point)
        leader = next(runner for runner in self._runners if runner.plan.candidate.name == chosen.candidate)
        deployment = self.question.deploy(leader.plan.candidate, self.plan_cache.max_model_len)
        assert chosen.requests is not None
        result = self._on_all_cores(deployment, chosen.rate_rps, chosen.requests, record=True)
        for runner in self._runners:
            self._close(runner, on_front.get(runner.plan.candidate.name, []))
        row = leader.plan.row
        row.take(result.summary(), chosen.rate_rps)
        row.status = "chosen"
        row.reason = f"the greatest throughput over delay of the front; {row.reason}"
        rank = ("chosen", "feasible", "infeasible", "pruned", "does_not_fit")
        highest = {name: points[0].output_tokens_per_s_per_gpu for name, points in on_front.items()}
        rows = sorted(self.rows, key=lambda row: (rank.index(row.status), -highest.get(row.candidate.name, 0.0)))
        value = chosen.power
        tuned = Tuned(self.question, rows, deployment, result, value, value, interrupted, self.ladder)
        tuned.confirmed = leader.confirmed[chosen.output_tokens_per_s_per_gpu]
        return tuned

    def _close(self, runner: _Climber, points: Sequence[FrontPoint]) -> None:
        """Write into the row of a plan where it is on the front, or why it is not."""
        row = runner.plan.row
        if points:
            row.status = "feasible"
            rates = ", ".join(f"{point.rate_rps:.4g}" for point in points)
            row.reason = f"on the front at {rates} requests/s"
        elif runner.points:
            row.status, row.reason = "feasible", "meets the SLO; at every load another plan has more tokens/s/user"
        elif not row.reason:
            row.reason = "at every load another plan has more tokens/s/user than this one could"


def _same(plan: BoundedCandidate, other: BoundedCandidate, finding: SimulationFinding) -> bool:
    """True if a plan must do the same as a simulated one at the same load: no limit that tells them apart is
    reached."""
    return plan.kind == other.kind and bool(finding.used) and not tell_apart(plan.deployment, finding.used or ())
