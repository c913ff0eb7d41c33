"""The search: best first by what each plan could reach at most, judged by simulation on the same requests.

Plans are taken in the order of their bounds (`simtune.tuner.bounds.best_case`): by their capacity first; when it is the
turn of one, by the SLO, of all plans that differ from it in limits alone at the most favourable of these; then by its
own. For a rate objective each is simulated at the rate at which it would just beat the best plan so far; only one that
meets the SLO there is bisected up to its own bound. The search is over when no bound beats the best plan by more than
the tolerance. Plans that differ from a simulated plan only in limits that were not reached get its result without a
simulation (`simtune.tuner.search.implied_results`).

Plans of several pools form classes, all divisions of the GPUs among instances of the same kind. A class is not opened
if no allocation of it beats the best plan (`simtune.tuner.space.plan_classes`).

Plans are decided one after the other. Several processes work ahead, on the plans that come next unless the best plan
changes; if it changes, work that no longer applies is done again. So the answer does not depend on the number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from simtune.errors import UsageError
from simtune.sim.parallel import Jobs, executor
from simtune.tuner.objectives import RateObjective
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.question_checks import check
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.choice_on_draws import best_on_draws
from simtune.tuner.search.climb import SimulationFinding
from simtune.tuner.search.confirm import ConfirmedPlan, Confirmer
from simtune.tuner.search.course import CourseLog, ReportsDue, SearchCourse, SearchProgress
from simtune.tuner.search.evaluator import Evaluator, Keyed, TimeIsUp
from simtune.tuner.search.open_plans import OpenKind, OpenPlans
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.search.reasons import no_allocation, no_better, no_plan, out_of_time, praise, ranked
from simtune.tuner.search.same_requests import ended_otherwise, gaps, show_on_draw, value_on_draw
from simtune.tuner.search.scouting import favourite
from simtune.tuner.search.search_journal import Ledger
from simtune.tuner.search.variant_gains import to_show
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.expressible import space_for
from simtune.tuner.space.plan_classes import PlanClass, PlanClasses, UnopenedClasses
from simtune.tuner.trial import Trial, Tuned

AHEAD = 8
"""Plans that worker processes may simulate before it is their turn."""


Begins = Callable[[Sequence[Candidate], PlanCache], None]


def optimize(
    question: Question,
    *,
    jobs: Jobs = None,
    progress: SearchProgress | None = None,
    ledger: Ledger[SimulationFinding] | None = None,
    time_is_up: Callable[[], bool] | None = None,
    begins: Begins | None = None,
) -> Tuned:
    """Search the study's space. Raise Infeasible, with the reasons, if no plan meets the SLO.

    `jobs` processes simulate plans side by side (default: one per core); the answer does not depend on it. `progress`
    is called after every simulation, and now and then while plans are decided without any. Simulations that the
    `ledger` contains are not repeated, and new ones are added to it. An interrupt (Ctrl-C) ends the search with its
    best plan so far, marked `interrupted`; if no plan has met the SLO yet, it is raised. So does `time_is_up` as soon
    as it returns True; it raises UsageError if no plan has met the SLO yet. `begins` is called with the space before
    the search starts.
    """
    check(question)
    space = space_for(question)
    course = CourseLog(progress)
    with executor(jobs, AHEAD) as pool:
        evaluator = Evaluator(pool, ledger, time_is_up)
        search = BestFirst(question, space.candidates, evaluator, course, space.plan_cache)
        if begins is not None:
            begins(space.candidates, search.plan_cache)
        interrupted = ended(search.run)
    if interrupted is None:
        raise UsageError(out_of_time(question, sum(row.simulations for row in search.rows)))
    # Further simulations follow, of the nearest plan if none meets the SLO, or of fresh draws after an interrupt.
    evaluator.work_alone()
    tuned = search.answer(interrupted)
    # The final bound includes the allowance for plans that missed the SLO on one draw; the course does not.
    ends = [point._replace(value=tuned.value, bound=tuned.bound) for point in course.points[-1:]]
    tuned.course, tuned.left_out = (*course.points[:-1], *ends), space.reasons
    return tuned


def ended(run: Callable[[], bool]) -> bool | None:
    """Return the answer of a search's `run`; None if its time was up before there was a plan.

    An error that is raised while TimeIsUp is handled would count as an interrupt (`simtune.errors.is_interrupt`).
    """
    with suppress(TimeIsUp):
        return run()
    return None


class BestFirst:
    """State of a search: open plans, decided plans and the best plan so far."""

    def __init__(
        self,
        question: Question,
        candidates: Sequence[Candidate],
        evaluator: Evaluator,
        progress: SearchProgress | None = None,
        plan_cache: PlanCache | None = None,
    ) -> None:
        self.question, self.evaluator, self.progress = question, evaluator, progress
        self.plan_cache = plan_cache or PlanCache(question, candidates)
        self.candidate_filter = CandidateFilter(question, self.plan_cache)
        self.step = 1 + question.study.search.rate_tolerance
        self._tolerance = self.step - 1 if question.searches_rate else 0.0
        self.rows: list[Trial] = []
        self.plans: list[BoundedCandidate] = []
        self.best: BoundedCandidate | None = None
        self.confirmed: ConfirmedPlan | None = None
        self._confirmer = Confirmer(question, self.plan_cache, evaluator)
        self.total, self._due = len(candidates), ReportsDue(len(candidates))
        self._open, self._scouted = OpenPlans(), False
        self._judge = PlanJudge(question, self.plan_cache, evaluator, self._next, self._met)
        self._classes = UnopenedClasses(PlanClasses(question, self.plan_cache), candidates)

    def run(self) -> bool:
        """Decide all plans. Return True if an interrupt left some open."""
        try:
            self._admit(self._classes.alone)
            self._decide_all()
            while not self._confirm():
                self._reopen()
                self._decide_all()
                self._judge_ended_otherwise()
            if self.confirmed is not None:
                self.confirmed = best_on_draws(self.question, self._confirmer, self.confirmed, self._feasible())
            self._show_all()
        except KeyboardInterrupt as stop:
            if self.best is None:
                raise
            why = "when the time was up" if isinstance(stop, TimeIsUp) else "by an interrupt"
            self._close(f"left open {why}: ")
            return True
        self._close("")
        return False

    def _decide_all(self) -> None:
        """Decide plans in the order of their bounds, until no bound is better than the best plan."""
        while (best := self._most_promising()) is not None and self._could_be_better(best):
            self.evaluator.check_time()
            if not self._scouted and self.best is None and self._open.best == best:
                self._begin_well()
                continue
            if self._open.best == best:
                self._decide(self._open.pop())
            else:
                self._admit(self._classes.opened())
            if self._due.after_decision(self.evaluator.findings):
                self._report()

    def _show_all(self) -> None:
        """Simulate what the table of variants states besides."""
        best = self.best
        for plan in to_show(self.question, self.plans):
            self._judge.judge(plan, None)
        self.best = best or self.best

    def _begin_well(self) -> None:
        """Judge the plan first that very short runs favour, so that there is a good plan to hold others against."""
        self._scouted = True
        plan = favourite(self._judge, (plan for item in self._open for plan in item.plans))
        if plan is not None:
            self.candidate_filter.refine([plan])
            if not plan.row.reason:
                self._judge.judge(plan, None)
                self._report()

    def _most_promising(self) -> float | None:
        """Return the best bound of all open plans and classes of plans."""
        return _best_of(self.question, [self._open.best, self._classes.best])

    def _reopen(self) -> None:
        """Open again the plans that were ruled out by a best plan that turned out to be worse."""
        still_open = {id(plan) for item in self._open for plan in item.plans}
        for plan in self.plans:
            best = None if id(plan) in still_open else plan.row.best
            may_be_better = best is not None and not plan.given_up and self._could_be_better(best)
            if plan.row.status == "infeasible" and best is not None and may_be_better:
                plan.best = best
                self._open.push([plan], "all there is")

    def _judge_ended_otherwise(self) -> None:
        """Judge plans again whose rate another limit ends than that of a confirmed plan."""
        for plan, low in ended_otherwise(self.question, self.confirmed and self.confirmed.plan, self.plans):
            self._judge.judge(plan, low)

    def _admit(self, candidates: Iterable[Candidate]) -> None:
        """Open the kinds of plans among candidates."""
        rows, plans, kinds = self.candidate_filter.sorted_by_kind(candidates)
        self.rows += rows
        self.plans += plans
        for kind in kinds:
            self._open.push(kind, "as it came")

    def _decide(self, item: OpenKind) -> None:
        """Tighten the bound of a kind of plans, or of a plan; if it is exact, simulate the plan."""
        if item.known == "as it came":  # one bound may rule out all plans of a kind
            self.candidate_filter.refine(item.plans)
            for plan in [plan for plan in item.plans if not plan.row.reason]:
                self._open.push([plan], "as one of its kind" if len(item.plans) > 1 else "all there is")
            return
        (plan,) = item.plans
        if plan.row.status == "feasible":
            # The plan that the search began with: judged out of its turn.
            return
        low = self._low(plan)
        if (implied_result := self._judge.seen.tell(plan, low)) is None:
            if item.known == "all there is":
                self._judge.judge(plan, low)
                return
            self.candidate_filter.refine([plan])
            if not plan.row.reason:
                self._open.push([plan], "all there is")
            return
        self._judge.imply(plan, implied_result)

    def _next(self) -> Iterator[Keyed]:
        """Yield the simulations that come next, unless the best plan changes."""
        for item in self._open.nearest(AHEAD):
            if item.known != "all there is" or not self._could_be_better(item.best):
                return
            (plan,) = item.plans
            low = self._low(plan)
            if self._judge.seen.tell(plan, low) is None:
                yield self._judge.first(plan, low)

    def _met(self, plan: BoundedCandidate) -> None:
        """Make a plan that meets the SLO the best one, if it is better, and report."""
        if self.best is None or self.question.objective.better(
            self.value(plan), value_on_draw(self.question, self.best)
        ):
            self.best = plan
        self._report()

    def value(self, plan: BoundedCandidate) -> float:
        """Return the objective of a plan that met its SLO."""
        return self.question.objective.value(plan.facts, plan.row.judged)

    def _could_be_better(self, best: float) -> bool:
        """True if a bound exceeds the best plan by more than the tolerance."""
        return self.best is None or self.question.objective.better(
            best, value_on_draw(self.question, self.best), self._tolerance
        )

    def _low(self, plan: BoundedCandidate) -> float | None:
        """Return the rate at which a plan would beat the best one; None while there is no best plan."""
        objective = self.question.objective
        if self.best is None or not isinstance(objective, RateObjective):
            return None
        return objective.rate_for(plan.facts, value_on_draw(self.question, self.best)) * self.step

    def _close(self, why: str) -> None:
        """Write into the rows of all open plans why they were not simulated."""
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
        on_draw = None if self.best is None else value_on_draw(self.question, self.best)
        better, tolerance = self.question.objective.better, self._tolerance
        counts = _counts(self._open, self._classes)
        num_undecided = sum(n for best, n in counts if on_draw is None or better(best, on_draw, tolerance))
        self.progress(
            SearchCourse(
                done=self.total - num_undecided,
                total=self.total,
                best=None if self.best is None else self.best.row,
                value=value,
                bound=self._bound(value),
                open=num_undecided,
                simulations=sum(row.simulations for row in self._judge.looked_at.values()),
            )
        )

    def _bound(self, value: float | None) -> float | None:
        """Return the value that no plan exceeds: the best of all bounds, and of the best plan."""
        bests = (row.best for row in self._judge.looked_at.values())
        return _best_of(self.question, [self._most_promising(), value, *bests])

    def answer(self, interrupted: bool) -> Tuned:
        """Return the best plan, confirmed on all its cores. Raise Infeasible if no plan meets the SLO."""
        # An interrupt may have come before the best plan was confirmed.
        while self.confirmed is None and not self._confirm():
            pass
        if (confirmed := self.confirmed) is None:
            self._judge.look_at_nearest(self.plans)
            raise no_plan(self.question, self.rows)
        best = self.best = confirmed.plan
        show_on_draw(self.question, self._judge, confirmed, self.plans)
        value = self.value(best)
        for plan in self.plans:
            plan.row.best = plan.reaches
        bound = _best_of(self.question, [value, *(row.best for row in self.rows)])
        assert bound is not None
        rows = ranked(self.rows, best.row, self.question, {id(p.row): self.value(p) for p in self._feasible()})
        best.row.status, best.row.reason = "chosen", praise(best.row, self.question, value)
        tuned = Tuned(self.question, rows, confirmed.deployment, confirmed.result, value, bound, interrupted)
        tuned.classes, tuned.confirmed = tuple(self._classes.bounded), confirmed.draws
        tuned.gaps = gaps(self.question, best, self.plans, rows)
        return tuned

    def _feasible(self) -> list[BoundedCandidate]:
        return [plan for plan in self.plans if plan.row.status == "feasible"]

    def _confirm(self) -> bool:
        """Confirm the best plan on fresh draws, then on all its cores instead of some.

        Return True if it is still the best then, or if no plan is left. Otherwise its verdict is taken back: a rate is
        stepped down until it holds, and a verdict at a given load is dropped. The best of all is then another plan, or
        this one at a lower rate.
        """
        feasible, objective = self._feasible(), self.question.objective
        if not feasible:
            self.best = self.confirmed = None
            return True
        best = min(feasible, key=lambda plan: (-objective.sign * self.value(plan), plan.order()))
        leader = None if self.confirmed is None else self.confirmed.plan
        if leader is not None and not objective.better(self.value(best), self.value(leader), self._tolerance):
            best = leader
        before = self.value(best)
        if self.confirmed is None or self.confirmed.plan is not best:
            confirmed = self._confirmer.confirm(best, self.confirmed)
            if confirmed is None:
                self.best = leader or max(
                    self._feasible(), key=lambda plan: objective.sign * self.value(plan), default=None
                )
                return False
            self.confirmed = confirmed
        self.best = best
        return self.value(best) == before


def _counts(items: Iterable[OpenKind], classes: Iterable[PlanClass]) -> list[tuple[float, int]]:
    """Return (best bound, number of plans) of each open kind of plans, and of each class that may meet the SLO."""
    counts = [(item.best, len(item.plans)) for item in items]
    return counts + [(group.best, len(group.candidates)) for group in classes if group.best is not None]


def _best_of(question: Question, bounds: Iterable[float | None]) -> float | None:
    """Return the best of several bounds on the objective of a question; None if there is none."""
    sign = question.objective.sign
    return max((bound for bound in bounds if bound is not None), key=lambda bound: sign * bound, default=None)
