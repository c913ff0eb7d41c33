"""Simulation of one plan until its value is settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from simtune.results.summary import SimulationSummary
from simtune.sim.deployment import Deployment
from simtune.tuner.objectives import Miss
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import LOWEST, Climb, Rung, Simulation, SimulationFinding
from simtune.tuner.search.evaluator import Evaluator, Keyed
from simtune.tuner.search.rate_hints import RateHints
from simtune.tuner.search.short_runs import short_lengths
from simtune.tuner.search.simulated_plans import SeenPlan, SeenPlans
from simtune.tuner.trial import Attempt, Trial


class PlanJudge:
    """Simulates plans, or takes what another simulation implies, and writes into their rows what follows."""

    def __init__(
        self,
        question: Question,
        plan_cache: PlanCache,
        evaluator: Evaluator,
        upcoming: Callable[[], Iterator[Keyed]],
        met: Callable[[BoundedCandidate], None],
    ) -> None:
        """Create a judge; `upcoming` yields the simulations that probably come next, and `met` is called with every
        plan that meets the SLO and the limits of the study."""
        self.question, self.plan_cache, self._evaluator = question, plan_cache, evaluator
        self._upcoming, self._met = upcoming, met
        self._step = 1 + question.study.search.rate_tolerance
        self.looked_at: dict[int, Trial] = {}
        """Rows of plans that were simulated, or that were compared with a simulated plan."""
        self.seen = SeenPlans()
        """Findings of simulations, for plans that must do the same."""
        self._hints = RateHints(question, self.simulated_shorter)

    def judge(self, plan: BoundedCandidate, low: float | None) -> None:
        """Simulate a plan until it is known whether it is better than the best one, and by how much."""
        self.looked_at[id(plan.row)] = plan.row
        plan.row.same_as = ""
        if not self.question.objective.searches_rate:
            self.take(plan, None, self.simulated(plan, None))
            return
        climb = self._as_its_like(plan, low) or self._begun(plan, low)
        if climb is None:
            return
        while (rate := climb.rate_rps) is not None:
            finding = self.simulated(plan, rate)
            climb = climb.after(rate, finding)
            if finding.met and low is not None and climb.hint_rps is None:
                climb = replace(climb, hint_rps=self._hints.after(plan, rate, finding))
            if not finding.met:
                plan.miss(Miss(rate, finding.missed_by))
            if finding.met or climb.met is None:
                self.take(plan, rate, finding)
            else:
                self.seen.remember(plan, rate, finding)
        self._hints.learn(None if climb.met is None else climb.met.rate_rps)
        if climb.met is not None and plan.row.status == "infeasible":
            # The plan meets the SLO, but breaks a limit of the study.
            plan.row.best = None

    def _begun(self, plan: BoundedCandidate, low: float | None) -> Climb | None:
        """Begin with short runs; return None if one of them rules the plan out."""
        lengths = short_lengths(self.question, plan.candidate)
        if low is not None and any(self._misses_when_shorter(plan, low, requests) for requests in lengths):
            return None
        hint_rps = self._hints.first(plan) if low is None else None
        return Climb(plan.ceiling_rps, self._step, low, hint_rps=hint_rps)

    def _as_its_like(self, plan: BoundedCandidate, low: float | None) -> Climb | None:
        """Begin with what simulations of plans that must do the same show, at no cost; return None if none of them met
        the SLO at a rate of `low` or above.

        The row lists these simulations as its own: `certify` makes them again with the plan itself.
        """
        like = self.seen.highest_met(plan)
        if like is None or like.rate_rps is None or (low is not None and like.rate_rps < low):
            return None
        plan.row.tried.append(Attempt(like.rate_rps, True))
        self.take(plan, like.rate_rps, like.finding)
        climb = Climb(plan.ceiling_rps, self._step, low, met=Rung(like.rate_rps, like.finding.strain))
        worse = self.seen.lowest_missed(plan, like.rate_rps)
        if worse is None or worse.rate_rps is None:
            return climb
        plan.row.tried.append(Attempt(worse.rate_rps, False))
        plan.miss(Miss(worse.rate_rps, worse.finding.missed_by))
        return replace(climb, missed=Rung(worse.rate_rps, worse.finding.strain))

    def simulated(self, plan: BoundedCandidate, rate: float | None) -> SimulationFinding:
        """Simulate a plan; with worker processes, the simulation may have been started before."""
        plan.row.simulations += 1
        finding = self._evaluator.finding((plan.candidate.name, rate, 0), self.task(plan, rate), self._upcoming())
        plan.row.tried.append(Attempt(rate, finding.met))
        plan.tightest = tightest(finding.summary)
        return finding

    def _misses_when_shorter(self, plan: BoundedCandidate, low: float, requests: int) -> bool:
        """Rule a plan out by a short run that proves as much as a full one at the rate `low`; return False if the short
        run meets the SLO."""
        rate = low / self.question.draw_spread.slack(self.question.requests, requests)
        finding = self.simulated_shorter(plan, rate, requests)
        if finding.met:
            return False
        # The number over all cores; the run is repeated by it.
        over_all = self.question.num_requests(plan.candidate, requests)
        plan.row.tried.append(Attempt(rate, False, requests=over_all))
        plan.miss(Miss(rate, finding.missed_by))
        self.take(plan, rate, finding)
        return True

    def simulated_shorter(self, plan: BoundedCandidate, rate: float, requests: int) -> SimulationFinding:
        """Simulate the beginning of a plan's load."""
        plan.row.simulations += 1
        return self._evaluator.finding(*self._shorter(plan, rate, requests), self._upcoming())

    def simulated_on_all_cores(
        self, plan: BoundedCandidate, deployment: Deployment, rate: float, requests: int
    ) -> SimulationFinding:
        """Simulate the beginning of the load on all cores of a plan, whose `deployment` it is."""
        plan.row.simulations += 1
        task = Simulation(deployment, self.question.draws.stream(requests), self.question.study.slo, rate, None)
        return self._evaluator.finding((f"{plan.candidate.name} on all cores", rate, -requests), task, self._upcoming())

    def _shorter(self, plan: BoundedCandidate, rate: float, requests: int) -> Keyed:
        stream = self.question.stream(plan.candidate, requests=requests)
        key = (plan.candidate.name, rate, -requests)
        return key, Simulation(plan.deployment, stream, self.question.study.slo, rate)

    def first(self, plan: BoundedCandidate, low: float | None) -> Keyed:
        """Return the first simulation that judging a plan takes, with its key."""
        if not self.question.searches_rate:
            return (plan.candidate.name, None, 0), self.task(plan, None)
        lengths = short_lengths(self.question, plan.candidate)
        climb = Climb(plan.ceiling_rps, self._step, low)
        if low is not None and lengths:
            lower = low / self.question.draw_spread.slack(self.question.requests, lengths[0])
            return self._shorter(plan, lower, lengths[0])
        rate = climb.rate_rps
        assert rate is not None
        return (plan.candidate.name, rate, 0), self.task(plan, rate)

    def task(self, plan: BoundedCandidate, rate: float | None) -> Simulation:
        """Return the simulation of a plan at a rate, or at the workload's own for None."""
        stream = self.plan_cache.stream(plan.candidate)
        return Simulation(
            plan.deployment,
            stream,
            self.question.study.slo,
            rate,
            draws=self.question.draws,
            searches_users=self.question.searches_users,
        )

    def take(self, plan: BoundedCandidate, rate: float | None, finding: SimulationFinding) -> None:
        """Write the finding of a simulation into the row of its plan."""
        row, objective = plan.row, self.question.objective
        row.take(finding.summary, rate or plan.offered_rps)
        if not finding.met:
            self.seen.remember(plan, rate, finding)
            at = f"at {rate:.4g} requests/s: " if rate is not None else ""
            row.status, row.reason = "infeasible", at + finding.reason
            row.best = row.best if objective.searches_rate else None
            return
        if not objective.searches_rate:
            # What was used by the most users tells nothing of more users, which another plan may serve.
            if not objective.searches_users:
                self.seen.remember(plan, rate, finding)
            row.best = objective.value(plan.facts, row.judged)
        elif rate is not None:
            self.seen.remember_met(plan, rate, finding)
            plan.met_rps = max(rate, plan.met_rps or 0.0)
        for limit in self.question.limits:
            if wrong := limit.violated(limit.objective.value(plan.facts, row.judged)):
                row.status, row.reason = "infeasible", wrong
                return
        row.status, row.reason = "feasible", ""
        self._met(plan)

    def look_at_nearest(self, plans: Sequence[BoundedCandidate]) -> None:
        """Simulate one plan if bounds alone rule out all plans, to report how far the SLO is missed.

        The plan is the one with the most GPUs per request, at a rate at which hardly any requests overlap.
        """
        if plans and all(plan.row.summary is None for plan in plans):
            plan = max(plans, key=lambda plan: (plan.candidate.gpus_per_instance, -plan.best))
            sustained = self.plan_cache.capacity(plan.candidate).rps
            rate = sustained * LOWEST if self.question.searches_rate else None
            self.take(plan, rate, self.simulated(plan, rate))

    def imply(self, plan: BoundedCandidate, result: tuple[SeenPlan, str]) -> None:
        """Write into the row of a plan what the simulation of another plan implies."""
        self.looked_at[id(plan.row)] = plan.row
        (simulated_plan, rate, finding), reason = result
        row = plan.row
        row.same_as = simulated_plan.candidate.name
        if finding.met:
            self.take(plan, rate, finding)
            return
        row.status, row.summary, row.rate_rps, row.reason = "infeasible", finding.summary, rate, reason
        row.best = None
        if rate is not None and self.question.searches_rate:
            plan.miss(Miss(rate, finding.missed_by))


def tightest(summary: SimulationSummary) -> str:
    """Return the metric of the limit of which a run used the largest share; empty if no limit has a value."""
    lines = [(line.value_s / line.limit_s, line.metric) for line in summary.slo if line.value_s is not None]
    return max(lines)[1] if lines else ""
