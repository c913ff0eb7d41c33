"""Simulation of one plan until its value is settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simtune.tuner.objectives import Miss, RateObjective
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import Climb, Simulation, SimulationFinding
from simtune.tuner.search.evaluator import Evaluator, Keyed
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

    def judge(self, plan: BoundedCandidate, low: float | None) -> None:
        """Simulate a plan until it is known whether it is better than the best one, and by how much."""
        self.looked_at[id(plan.row)] = plan.row
        plan.row.same_as = ""
        climb = Climb(plan.ceiling_rps, self._step, low)
        objective = self.question.objective
        if not objective.searches_rate:
            self.take(plan, None, self.simulated(plan, None))
            return
        assert isinstance(objective, RateObjective)
        while (rate := climb.rate_rps) is not None:
            finding = self.simulated(plan, rate)
            climb = climb.after(rate, finding)
            if not finding.met:
                plan.missed = Miss(rate, finding.summary.requests)
                plan.row.best = rate * objective.worth(plan.facts)
            if finding.met or climb.met is None:
                self.take(plan, rate, finding)
            else:
                self.seen.remember(plan, rate, finding)
        if climb.met is not None and plan.row.status == "infeasible":
            # The plan meets the SLO, but breaks a limit of the study.
            plan.row.best = None

    def simulated(self, plan: BoundedCandidate, rate: float | None) -> SimulationFinding:
        """Simulate a plan; with worker processes, the simulation may have been started before."""
        plan.row.simulations += 1
        finding = self._evaluator.finding((plan.candidate.name, rate, 0), self.task(plan, rate), self._upcoming())
        plan.row.tried.append(Attempt(rate, finding.met))
        return finding

    def task(self, plan: BoundedCandidate, rate: float | None) -> Simulation:
        """Return the simulation of a plan at a rate, or at the workload's own for None."""
        stream = self.plan_cache.stream(plan.candidate)
        return Simulation(plan.deployment, stream, self.question.study.slo, rate, draws=self.question.draws)

    def take(self, plan: BoundedCandidate, rate: float | None, finding: SimulationFinding) -> None:
        """Write the finding of a simulation into the row of its plan."""
        row, objective = plan.row, self.question.objective
        row.take(finding.summary, rate)
        if not finding.met:
            self.seen.remember(plan, rate, finding)
            at = f"at {rate:.4g} requests/s: " if rate is not None else ""
            row.status, row.reason = "infeasible", at + finding.reason
            row.best = row.best if objective.searches_rate else None
            return
        if not objective.searches_rate:
            self.seen.remember(plan, rate, finding)
            row.best = objective.value(plan.facts, row.judged)
        for limit in self.question.limits:
            if wrong := limit.violated(limit.objective.value(plan.facts, row.judged)):
                row.status, row.reason = "infeasible", wrong
                return
        row.status, row.reason = "feasible", ""
        self._met(plan)

    def imply(self, plan: BoundedCandidate, result: tuple[SeenPlan, str]) -> None:
        """Write into the row of a plan what the simulation of another plan implies."""
        self.looked_at[id(plan.row)] = plan.row
        (simulated_plan, rate, finding), reason = result
        row, objective = plan.row, self.question.objective
        row.same_as = simulated_plan.candidate.name
        if finding.met:
            self.take(plan, rate, finding)
            return
        row.status, row.summary, row.rate_rps, row.reason = "infeasible", finding.summary, rate, reason
        row.best = None
        if rate is not None and isinstance(objective, RateObjective):
            plan.missed, row.best = Miss(rate, finding.summary.requests), rate * objective.worth(plan.facts)
