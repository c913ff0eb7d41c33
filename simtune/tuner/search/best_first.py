"""The search: best first by what each plan could reach at most, judged by simulation on the same requests.

Plans are taken in the order of their bounds (`simtune.tuner.bounds.best_case`): by their capacity first; when it is the
turn of one, by the SLO, of all plans that differ from it in limits alone at the most favourable of these; then by its
own. For a rate objective each is simulated at the rate at which it would just beat the best plan so far; only one that
meets the SLO there is bisected up to its own bound. The search is over when no bound beats the best plan by more than
the tolerance. Plans that differ from one that was simulated only in limits that nobody reached are told what they would
do (`simtune.tuner.search.implied_results`).

Plans of several pools come in classes, all divisions of the GPUs among instances of the same kind, and stay unopened
where no allocation of these beats the best plan (`simtune.tuner.space.plan_classes`).

Plans are decided one after the other. Several processes work ahead of that, on the plans that will come next unless
the best plan changes; what changes it makes void is done again. So the answer does not depend on how many there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from simtune.errors import Infeasible
from simtune.sim.parallel import Jobs, executor
from simtune.tuner.objectives import Miss, RateObjective
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import LOWEST, Climb, Simulation, SimulationFinding
from simtune.tuner.search.confirm import ConfirmedPlan, Confirmer
from simtune.tuner.search.evaluator import Evaluator, Keyed
from simtune.tuner.search.reasons import no_allocation, no_better, praise, ranked, why_none
from simtune.tuner.search.search_journal import Ledger
from simtune.tuner.search.simulated_plans import SeenPlans
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.expressible import space_for
from simtune.tuner.space.plan_classes import PlanClasses, UnopenedClasses
from simtune.tuner.trial import Attempt, CoursePoint, Trial, Tuned

AHEAD = 8
"""Plans that several processes may work on before it is their turn."""


class SearchCourse(NamedTuple):
    """How far a search has come."""

    done: int
    """Plans whose fate is known."""
    total: int
    best: Trial | None
    value: float | None
    """Of the best plan, in the objective's unit."""
    bound: float | None
    """No plan of the space reaches more."""
    open: int
    """Plans that could still be better."""
    simulations: int


Known = Literal["as it came", "as one of its kind", "all there is"]
"""How exactly it is known what a plan could reach."""
SearchProgress = Callable[[SearchCourse], None]


def optimize(
    question: Question,
    *,
    jobs: Jobs = None,
    progress: SearchProgress | None = None,
    ledger: Ledger[SimulationFinding] | None = None,
) -> Tuned:
    """Search the study's space. Raises Infeasible, saying what stood in the way, when no plan meets the SLO.

    `jobs` processes simulate plans side by side (default: one per core); the answer does not depend on it. `progress`
    is called after every plan. What the `ledger` knows is not simulated again, and it keeps what is. An interrupt
    (Ctrl-C) ends the search with what it has, marked `interrupted`, or is passed on when no plan has met the SLO yet.
    """
    question.check()
    space = space_for(question)
    course = CourseLog(progress)
    with executor(jobs, AHEAD) as pool:
        search = BestFirst(question, space.candidates, Evaluator(pool, ledger), course)
        interrupted = search.run()
    tuned = search.answer(interrupted)
    # The end has the allowance for plans that missed on one draw, which the course leaves out.
    ends = [point._replace(value=tuned.value, bound=tuned.bound) for point in course.points[-1:]]
    tuned.course, tuned.left_out = (*course.points[:-1], *ends), space.reasons
    return tuned


class CourseLog:
    """Keeps where a search stood whenever its best plan or its bound changed, and passes everything on."""

    def __init__(self, listener: SearchProgress | None = None) -> None:
        self.points: list[CoursePoint] = []
        self._listener = listener

    def __call__(self, now: SearchCourse) -> None:
        """A plan was decided."""
        plan = "" if now.best is None else now.best.candidate.name
        point = CoursePoint(now.simulations, now.done, plan, now.value, now.bound)
        if len(self.points) > 1 and all((p.value, p.bound) == (point.value, point.bound) for p in self.points[-2:]):
            self.points.pop()  # of a time in which nothing changed its two ends are enough
        self.points.append(point)
        if self._listener is not None:
            self._listener(now)


@dataclass(order=True)
class _Open:
    """A shape, or one of its plans, that is not decided yet."""

    order: tuple[float, ...]
    """What it could reach first, the best first; then the simplest cut and the smallest budgets."""
    number: int
    plans: Sequence[BoundedCandidate] = field(compare=False)
    best: float = field(compare=False)
    """Of the objective, at most."""
    known: Known = field(compare=False)


class BestFirst:
    """What is open, what is decided, and the best so far."""

    def __init__(
        self,
        question: Question,
        candidates: Sequence[Candidate],
        evaluator: Evaluator,
        progress: SearchProgress | None = None,
    ) -> None:
        self.question, self.evaluator, self.progress = question, evaluator, progress
        self.plan_cache = PlanCache(question, candidates)
        self.candidate_filter = CandidateFilter(question, self.plan_cache)
        self.step = 1 + question.study.search.rate_tolerance
        self.rows: list[Trial] = []
        self._looked_at: dict[int, Trial] = {}
        """Of plans that were simulated, or compared with one that was."""
        self.plans: list[BoundedCandidate] = []
        self.best: BoundedCandidate | None = None
        self.confirmed: ConfirmedPlan | None = None
        self._confirmer = Confirmer(question, self.plan_cache, evaluator)
        self.total = len(candidates)
        self._open: list[_Open] = []
        self._pushed = 0
        self._seen = SeenPlans()
        self._classes = UnopenedClasses(PlanClasses(question, self.plan_cache), candidates)

    def run(self) -> bool:
        """Decide all plans; whether an interrupt left some open."""
        try:
            self._admit(self._classes.alone)
            self._decide_all()
            while not self._confirm():
                self._reopen()
                self._decide_all()
            for label in self.question.labels:
                self._show(label)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self._close("left open by an interrupt: ")
            return True
        self._close("")
        return False

    def _decide_all(self) -> None:
        """All of which the best might be better than the best so far."""
        while (best := self._most_promising()) is not None and self._could_be_better(best):
            if self._open and self._open[0].best == best:
                self._decide(heapq.heappop(self._open))
            else:
                self._admit(self._classes.opened())
            self._report()

    def _most_promising(self) -> float | None:
        """The best that anything open, or a class of plans, could reach."""
        return self._best_of([self._open[0].best if self._open else None, self._classes.best])

    def _reopen(self) -> None:
        """When the best plan turns out to be less good: those that were only not better than it was."""
        still_open = {id(plan) for item in self._open for plan in item.plans}
        for plan in self.plans:
            best = None if id(plan) in still_open else plan.row.best
            may_be_better = best is not None and not plan.given_up and self._could_be_better(best)
            if plan.row.status == "infeasible" and best is not None and may_be_better:
                plan.best = best
                self._push([plan], "all there is")

    def _admit(self, candidates: Iterable[Candidate]) -> None:
        """Open the kinds of plans that there are among candidates."""
        rows, plans, kinds = self.candidate_filter.sorted_by_kind(candidates)
        self.rows += rows
        self.plans += plans
        for kind in kinds:
            self._push(kind, "as it came")

    def _push(self, plans: Sequence[BoundedCandidate], known: Known) -> None:
        """Open a kind of plans, or a plan, by the best that is in it."""
        first = min(plans, key=BoundedCandidate.order)
        self._pushed += 1
        heapq.heappush(self._open, _Open(first.order(), self._pushed, plans, first.best, known))

    def _decide(self, item: _Open) -> None:
        """Say more exactly what a kind of plans, or a plan, could reach; or else simulate it."""
        if item.known == "as it came":
            self.candidate_filter.refine(item.plans)
            for plan in [plan for plan in item.plans if not plan.row.reason]:
                self._push([plan], "as one of its kind" if len(item.plans) > 1 else "all there is")
            return
        (plan,) = item.plans
        low = self._low(plan)
        if (known := self._seen.tell(plan, low)) is None:
            if item.known == "all there is":
                self._judge(plan, low)
                return
            self.candidate_filter.refine([plan])
            if not plan.row.reason:
                self._push([plan], "all there is")
            return
        self._looked_at[id(plan.row)] = plan.row
        (other, rate, finding), reason = known
        row, objective = plan.row, self.question.objective
        row.same_as = other.candidate.name
        if finding.met:
            self._take(plan, rate, finding)
            return
        row.status, row.summary, row.rate_rps, row.reason = "infeasible", finding.summary, rate, reason
        row.best = None
        if rate is not None and isinstance(objective, RateObjective):
            plan.missed, row.best = Miss(rate, finding.summary.requests), rate * objective.worth(plan.facts)

    def _judge(self, plan: BoundedCandidate, low: float | None) -> None:
        """Simulate a plan until it is known whether it is better than the best one, and by how much."""
        self._looked_at[id(plan.row)] = plan.row
        plan.row.same_as = ""
        climb = Climb(plan.ceiling_rps, self.step, low)
        objective = self.question.objective
        if not objective.searches_rate:
            self._take(plan, None, self._simulated(plan, None))
            return
        assert isinstance(objective, RateObjective)
        while (rate := climb.rate_rps) is not None:
            finding = self._simulated(plan, rate)
            climb = climb.after(rate, finding)
            if not finding.met:
                plan.missed = Miss(rate, finding.summary.requests)
                plan.row.best = rate * objective.worth(plan.facts)
            if finding.met or climb.met is None:
                self._take(plan, rate, finding)
            else:
                self._seen.remember(plan, rate, finding)
        if climb.met is not None and plan.row.status == "infeasible":
            plan.row.best = None  # it meets the SLO, and no limit of the study

    def _simulated(self, plan: BoundedCandidate, rate: float | None) -> SimulationFinding:
        """One simulation of a plan; by a worker, and perhaps before it was asked for, where there are some."""
        plan.row.simulations += 1
        finding = self.evaluator.finding((plan.candidate.name, rate, 0), self._task(plan, rate), self._next())
        plan.row.tried.append(Attempt(rate, finding.met))
        return finding

    def _task(self, plan: BoundedCandidate, rate: float | None) -> Simulation:
        stream = self.plan_cache.stream(plan.candidate)
        return Simulation(plan.deployment, stream, self.question.study.slo, rate, draws=self.question.draws)

    def _next(self) -> Iterator[Keyed]:
        """The simulations that come next, unless the best plan changes."""
        for item in heapq.nsmallest(AHEAD, self._open):
            if item.known != "all there is" or not self._could_be_better(item.best):
                return
            (plan,) = item.plans
            low = self._low(plan)
            rate = Climb(plan.ceiling_rps, self.step, low).rate_rps if self.question.searches_rate else None
            if self._seen.tell(plan, low) is None:
                yield (plan.candidate.name, rate, 0), self._task(plan, rate)

    def _take(self, plan: BoundedCandidate, rate: float | None, finding: SimulationFinding) -> None:
        """Write down what a simulation of a plan showed, and whether it is the best one now."""
        row, objective = plan.row, self.question.objective
        row.take(finding.summary, rate)
        if not finding.met:
            self._seen.remember(plan, rate, finding)
            at = f"at {rate:.4g} requests/s: " if rate is not None else ""
            row.status, row.reason = "infeasible", at + finding.reason
            row.best = row.best if objective.searches_rate else None
            return
        value = objective.value(plan.facts, row.judged)
        if not objective.searches_rate:
            self._seen.remember(plan, rate, finding)
            row.best = value
        for limit in self.question.limits:
            if wrong := limit.violated(limit.objective.value(plan.facts, row.judged)):
                row.status, row.reason = "infeasible", wrong
                return
        row.status, row.reason = "feasible", ""
        if self.best is None or objective.better(value, self.value(self.best)):
            self.best = plan
        self._report()

    def value(self, plan: BoundedCandidate) -> float:
        """The objective of a plan that met its SLO."""
        return self.question.objective.value(plan.facts, plan.row.judged)

    def _could_be_better(self, best: float) -> bool:
        """Whether a bound leaves room above the best plan."""
        objective = self.question.objective
        tolerance = self.step - 1 if objective.searches_rate else 0.0
        return self.best is None or objective.better(best, self.value(self.best), tolerance)

    def _low(self, plan: BoundedCandidate) -> float | None:
        """The rate at which a plan would beat the best one; None while there is none."""
        objective = self.question.objective
        if self.best is None or not isinstance(objective, RateObjective):
            return None
        return objective.rate_for(plan.facts, self.value(self.best)) * self.step

    def _show(self, label: str) -> None:
        """Judge the most promising plan with a drafter for itself, unless one is known to meet the SLO."""
        those = [plan for plan in self.plans if plan.candidate.drafter == label]
        if not those or any(plan.row.status == "feasible" for plan in those):
            return
        best, plan = self.best, min(those, key=BoundedCandidate.order)
        self._judge(plan, None)
        self.best = best or self.best

    # --- the end ------------------------------------------------------------------------------------------

    def _close(self, why: str) -> None:
        """Say of all plans that are still open why they were not simulated."""
        leader, value = (None, 0.0) if self.best is None else (self.best.row, self.value(self.best))
        for item in self._open:
            for plan in item.plans:
                if not plan.row.reason and plan.row.status == "pruned":
                    plan.row.reason = why + no_better(self.question, plan.row, plan.best, leader, value)
        self._open.clear()
        for group in self._classes.closed():
            reason = group.reason or why + no_allocation(self.question, group.name, group.best, leader, value)
            self.rows += self.candidate_filter.unopened(group, reason)

    def _report(self) -> None:
        if self.progress is None:
            return
        value = None if self.best is None else self.value(self.best)
        left = sum(len(item.plans) for item in self._open if self._could_be_better(item.best))
        left += sum(len(g.candidates) for g in self._classes if g.best is not None and self._could_be_better(g.best))
        self.progress(
            SearchCourse(
                done=self.total - left,
                total=self.total,
                best=None if self.best is None else self.best.row,
                value=value,
                bound=self._bound(value),
                open=left,
                simulations=sum(row.simulations for row in self._looked_at.values()),
            )
        )

    def _bound(self, value: float | None) -> float | None:
        """What no plan exceeds: the best of all bounds, and of the plan that is known."""
        return self._best_of([self._most_promising(), value, *(row.best for row in self._looked_at.values())])

    def _best_of(self, known: Iterable[float | None]) -> float | None:
        sign = self.question.objective.sign
        return max((best for best in known if best is not None), key=lambda best: sign * best, default=None)

    def answer(self, interrupted: bool) -> Tuned:
        """The best plan, confirmed on all its cores. Raises Infeasible where none meets the SLO."""
        while self.confirmed is None and not self._confirm():
            pass
        confirmed = self.confirmed
        if confirmed is None:
            self._look_at_nearest()
            raise Infeasible(why_none(self.question, self.rows))
        best = self.best = confirmed.plan
        value = self.value(best)
        for plan in self.plans:
            plan.row.best = plan.reaches
        bound = self._best_of([value, *(row.best for row in self.rows)])
        assert bound is not None
        rows = ranked(self.rows, best.row, self.question, {id(p.row): self.value(p) for p in self._feasible()})
        best.row.status, best.row.reason = "chosen", praise(best.row, self.question, value)
        tuned = Tuned(self.question, rows, confirmed.deployment, confirmed.result, value, bound, interrupted)
        tuned.classes, tuned.confirmed = tuple(self._classes.bounded), confirmed.draws
        return tuned

    def _feasible(self) -> list[BoundedCandidate]:
        return [plan for plan in self.plans if plan.row.status == "feasible"]

    # --- what is confirmed --------------------------------------------------------------------------------

    def _confirm(self) -> bool:
        """Confirm the best plan on fresh draws, then on all its cores, not some of them; whether it is the best then,
        or none is left.

        Else its verdict is taken back: a rate is stepped down until it holds, a verdict at a given load falls
        altogether. The best of all is then another one, or this one with less.
        """
        feasible, objective = self._feasible(), self.question.objective
        if not feasible:
            self.best = self.confirmed = None
            return True
        best = min(feasible, key=lambda plan: (-objective.sign * self.value(plan), plan.order()))
        before = self.value(best)
        if self.confirmed is None or self.confirmed.plan is not best:
            confirmed = self._confirmer.confirm(best, self.confirmed)
            if confirmed is None:
                self.best = max(self._feasible(), key=lambda plan: objective.sign * self.value(plan), default=None)
                return False
            self.confirmed = confirmed
        self.best = max([best, *self._feasible()], key=lambda plan: objective.sign * self.value(plan))
        return self.best is best and self.value(best) == before

    def _look_at_nearest(self) -> None:
        """Where bounds alone say that no plan meets the SLO, simulate one, to say by how much it is missed: that with
        the most GPUs for a request, at a rate at which hardly anybody else is there."""
        if self.plans and all(row.summary is None for row in self.rows):
            plan = max(self.plans, key=lambda plan: (plan.candidate.gpus_per_instance, -plan.best))
            sustained = self.plan_cache.capacity(plan.candidate).rps
            rate = sustained * LOWEST if self.question.searches_rate else None
            self._take(plan, rate, self._simulated(plan, rate))
