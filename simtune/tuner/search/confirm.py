"""Confirm a plan on draws of the requests that the search has not seen, before it is reported.

A search selects the best of many plans on one draw, so its result is biased upwards. A rate is reported only if it
keeps the SLO on every one of a few fresh draws, each of 8,000 requests, 25 lifetimes, and ten requests beyond each
percentile of the SLO, or more; otherwise it is stepped down. A draw that is longer is several: each 8,000 requests of
it must keep the SLO, since a burst hides in the percentile of a longer run. The draws must also show that the plan
keeps up: the number of requests in the system, averaged over the draws, must stray less than the mean of as many free
random walks does in all but a thousandth of cases.

Near the capacity it strays more. Then a rate is kept up with if requests that are all present at once are served faster
(`simtune.tuner.search.backlog`). Draws of such a rate differ more, too, so the draws are made at a rate that is higher
by `margin`, the standard deviation of what draws of their length differ by, which the draw of the search must not have
missed either. A rate is near the capacity if draws of one that is a little higher strayed, or the run of the search at
this rate. If a backlog does not show it, the draws are extended to MOST_REQUESTS, and it is enough that an overload of
1 % would violate a limit of TTFT or E2EL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simtune.results.result import Result
from simtune.results.steady import needed_for
from simtune.results.summary import SimulationSummary
from simtune.sim.deployment import Deployment
from simtune.specs.workload import Slo
from simtune.tuner.doubt.draw_spread import CAPACITY
from simtune.tuner.objectives import Miss, PlanFacts, RateObjective
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.backlog import AT_ONCE_RPS, shows_drift
from simtune.tuner.search.candidate_filter import BoundedCandidate
from simtune.tuner.search.climb import LOWEST, Simulation, SimulationFinding, violation
from simtune.tuner.search.draws import MOST_REQUESTS
from simtune.tuner.search.evaluator import Evaluator
from simtune.tuner.search.most_users import UserLoad, run_at_load
from simtune.tuner.trial import Attempt, Confirmed, judged_of

ENOUGH_LIFETIMES = 25
OVERLOAD = 0.01
"""Share of the offered requests that are not kept up with, which a rate that is reported may hide."""
NEAR = 0.9
"""Share of a rate that short draws did not show to be kept up with, above which rates are drawn long at once."""
STRAYS = {1: 0.016, 2: 0.027, 3: 0.036}
"""0.1 % quantile of the mean of `simtune.results.steady.wander` over 1, 2 or 3 free random walks; for more walks the
quantile of 3 is used."""


class DrawsVerdict(NamedTuple):
    """Result of a plan at a rate on fresh draws."""

    confirmed: Confirmed | None
    """None if a draw misses the SLO, or if the draws do not show that the plan keeps up."""
    reason: str
    missed: int = 0
    """Requests that were simulated in the draw that missed the SLO; 0 if no single draw missed it."""


class DrawnLoad(NamedTuple):
    """The beginning of a fresh draw at a rate; None for the workload's own rate."""

    rate_rps: float | None
    draw: int
    requests: int

    def attempt(self, finding: SimulationFinding) -> Attempt:
        """Return the entry of a plan's row for a simulation under this load."""
        in_part = 0 < finding.missed_by < finding.summary.requests
        missed_by = finding.missed_by if in_part else None
        return Attempt(self.rate_rps, finding.met, draw=self.draw, requests=self.requests, missed_by=missed_by)


class SeenDraws:
    """Simulations on fresh draws, for plans that must do the same under the same load.

    Their rows list the simulation as their own: `certify` makes it again with the plan itself, so nothing is taken for
    granted that it does not check.
    """

    def __init__(self) -> None:
        self._of: dict[DrawnLoad, list[tuple[BoundedCandidate, SimulationFinding]]] = {}

    def remember(self, plan: BoundedCandidate, load: DrawnLoad, finding: SimulationFinding) -> None:
        """Store a finding that may imply results of other plans."""
        if finding.used is not None or finding.first_tokens_miss:
            # That a decode pool is too slow behind any prefill pool is an assumption: not for draws that confirm.
            self._of.setdefault(load, []).append((plan, replace(finding, decodes_miss=None)))

    def same(self, plan: BoundedCandidate, load: DrawnLoad) -> SimulationFinding | None:
        """Return the finding of a plan that differs in limits alone, none of which was reached; None if none was
        simulated."""
        return next((finding for rival, finding in self._of.get(load, ()) if plan.does_the_same(rival, finding)), None)

    def miss(self, plan: BoundedCandidate, load: DrawnLoad) -> tuple[SimulationFinding, str] | None:
        """Return a missed SLO that a plan must miss as well, with the reason; None if there is none."""
        for rival, finding in self._of.get(load, ()):
            if not finding.met and (reason := plan.ruled_out_by(rival, finding)):
                return finding, reason
        return None


class FreshDraws:
    """Simulates plans on fresh draws, unless a simulation of another plan on the same draw implies the result."""

    def __init__(self, question: Question, evaluator: Evaluator) -> None:
        self._question, self._evaluator = question, evaluator
        self._draws = [*range(1, 1 + num_draws(question))]
        self._seen = SeenDraws()
        self._strayed: dict[tuple[object, ...], float] = {}
        """The lowest rate of each kind of plans that short draws did not show to be kept up with."""
        self._findings: dict[tuple[str, float | None, int, int], SimulationFinding] = {}
        self._kept_up_below: dict[str, float] = {}
        """Rates below which plans keep up, by their names, as runs of all requests at once show them."""

    def verdict(self, plan: BoundedCandidate, rate_rps: float | None) -> DrawsVerdict:
        """Simulate a plan on one draw after the other until one misses the SLO; if the draws do not show that it keeps
        up, see whether a backlog does (then a higher rate must keep the SLO), or repeat with longer ones."""
        requests, most = self._requests(plan, rate_rps), self._question.num_requests(plan.candidate, MOST_REQUESTS)
        if requests >= most:
            return self.on_draws(plan, rate_rps, requests)
        searched = isinstance(self._question.objective, RateObjective)
        if rate_rps is None or not (searched and self._near_capacity(plan, rate_rps)):
            verdict = self.on_draws(plan, rate_rps, requests)
            if verdict.confirmed is not None or verdict.missed:
                return verdict
            if rate_rps is None:
                return self.on_draws(plan, None, most)
            self._strayed[plan.kind] = min(rate_rps, self._strayed.get(plan.kind, math.inf))
        elif too_near := self._too_near(plan, rate_rps):
            return too_near
        if searched and self._clears_backlog(plan, rate_rps):
            return self._with_margin(plan, rate_rps, requests)
        return self.on_draws(plan, rate_rps, most)

    def _near_capacity(self, plan: BoundedCandidate, rate_rps: float) -> bool:
        """True if draws of a rate are likely not to show that it is kept up with: those of a rate that is a little
        higher did not, or the run of the search at this rate did not."""
        strayed, row = self._strayed.get(plan.kind, math.inf), plan.row
        if strayed * NEAR < rate_rps <= strayed:
            return True
        if row.summary is None or row.rate_rps is None or self._question.scales:
            return False
        as_long = row.summary.requests >= (part_requests(self._question) or math.inf)
        if not as_long or row.summary.steadiness == "stable" or not math.isclose(row.rate_rps, rate_rps):
            return False
        self._strayed[plan.kind] = min(rate_rps, strayed)
        return True

    def _clears_backlog(self, plan: BoundedCandidate, rate_rps: float) -> bool:
        """True if a run of all requests at once shows that a plan keeps up with a rate."""
        name = plan.candidate.name
        if name not in self._kept_up_below:
            task = backlog_task(self._question, plan)
            self._kept_up_below[name] = 0.0
            if task is not None:
                finding = self._evaluator.finding((name, task.rate_rps, task.draw), task, ())
                plan.row.simulations += 1
                self._kept_up_below[name] = finding.kept_up_below_rps or 0.0
        return rate_rps <= self._kept_up_below[name]

    def _too_near(self, plan: BoundedCandidate, rate_rps: float) -> DrawsVerdict | None:
        """Return the verdict on a rate of which one that is higher by the `margin` missed the SLO on the draw of the
        search; None if it did not."""
        higher_rps = rate_rps * margin(self._question)
        if not any(misses_below(attempt, higher_rps) for attempt in plan.row.tried):
            return None
        return DrawsVerdict(None, f"{_too_near_to(higher_rps)} misses the SLO on the draw of the search")

    def _with_margin(self, plan: BoundedCandidate, rate_rps: float, requests: int) -> DrawsVerdict:
        """Return the verdict on a rate that is kept up with, by fresh draws at a rate that is higher by the `margin`,
        which the draw of the search must not have missed either."""
        if too_near := self._too_near(plan, rate_rps):
            return too_near
        higher_rps = rate_rps * margin(self._question)
        verdict = self.on_draws(plan, higher_rps, requests, keeps_up=True)
        if not verdict.missed:
            return verdict
        plan.miss(Miss(higher_rps, verdict.missed))
        return DrawsVerdict(None, f"{_too_near_to(higher_rps)}, {verdict.reason}")

    def on_draws(
        self, plan: BoundedCandidate, rate_rps: float | None, requests: int, *, keeps_up: bool = False
    ) -> DrawsVerdict:
        """Simulate a plan on one draw of a number of requests after the other, until one misses the SLO.

        Misses that other plans imply come first, and cost nothing; then the draws that were missed last, or that came
        closest to a limit: they are likely to be missed again, or in a longer run. `keeps_up` says that it is known
        that the plan keeps up.
        """
        loads = [DrawnLoad(rate_rps, draw, requests) for draw in self._draws]
        for load in loads:
            if implied := self._seen.miss(plan, load):
                finding, reason = implied
                return self._missed(plan, load, finding, reason)
        findings: dict[int, SimulationFinding] = {}
        for load in loads:
            finding = self._finding(plan, load)
            if not finding.met:
                self._draws.remove(load.draw)
                self._draws.insert(0, load.draw)
                return self._missed(plan, load, finding, finding.reason)
            _note(plan, load.attempt(finding))
            findings[load.draw] = finding
        self._draws.sort(key=lambda draw: -(findings[draw].strain or 0.0))
        in_order = [findings[draw] for draw in sorted(findings)]
        return judged_together(self._question, plan.facts, rate_rps, in_order, keeps_up=keeps_up)

    def _missed(self, plan: BoundedCandidate, load: DrawnLoad, finding: SimulationFinding, reason: str) -> DrawsVerdict:
        _note(plan, load.attempt(finding))
        return DrawsVerdict(None, f"on another draw of the requests: {reason}", finding.missed_by)

    def _finding(self, plan: BoundedCandidate, load: DrawnLoad) -> SimulationFinding:
        # Rates that are a margin apart are those of the steps between, but for rounding.
        rate = load.rate_rps if load.rate_rps is None else float(f"{load.rate_rps:.9g}")
        key = plan.candidate.name, rate, load.draw, load.requests
        finding = self._findings.get(key) or self._seen.same(plan, load)
        if finding is None:
            task = draw_task(self._question, plan, load.rate_rps, load.draw, load.requests)
            finding = self._evaluator.finding((plan.candidate.name, load.rate_rps, load.draw), task, ())
            plan.row.simulations += 1
            self._seen.remember(plan, load, finding)
        self._findings[key] = finding
        return finding

    def _requests(self, plan: BoundedCandidate, rate_rps: float | None) -> int:
        """Return the requests of a draw over all cores, so that the simulated cores receive as many as are needed."""
        question, summary = self._question, plan.row.summary
        least = part_requests(question)
        if least is None:
            return question.num_requests(plan.candidate)
        if question.searches_users:
            # Users wait for answers, so that no overload has to be given time to be felt.
            return max(question.requests, question.arrivals(least))
        rate = rate_rps if summary is None or rate_rps is not None else summary.offered_rate_rps
        felt = question.num_requests(plan.candidate, MOST_REQUESTS) if rate is None else felt_after_s(question) * rate
        simulated = question.simulated_instances(plan.candidate) / plan.candidate.pools[0].instances
        needed_requests = max(question.arrivals(_lasting(summary)), felt * simulated)
        return question.num_requests(plan.candidate, max(least, math.ceil(min(MOST_REQUESTS, needed_requests))))


def _lasts_s(finding: SimulationFinding) -> float:
    """Return the seconds in which the requests of a run arrive; infinite for a load without a rate."""
    summary = finding.summary
    mean = summary.metrics["e2el"].mean
    return math.inf if summary.lifetimes is None or mean is None else summary.lifetimes * mean


def _lasting(seen: SimulationSummary | None) -> int:
    """Return the requests that last ENOUGH_LIFETIMES, extrapolated from a shorter or longer run."""
    if seen is None or not seen.lifetimes:
        return 1
    return math.ceil(seen.requests * ENOUGH_LIFETIMES / seen.lifetimes)


class ConfirmedPlan(NamedTuple):
    """A plan that keeps the SLO on all its cores, and on fresh draws if the study asks for them."""

    plan: BoundedCandidate
    deployment: Deployment
    result: Result
    draws: Confirmed | None


def part_requests(question: Question) -> int | None:
    """Return the least number of requests of a draw, and of a part of one.

    None if draws are judged as a whole: of a batch, and of a load that is served by plans that follow its rate, such
    as a day, of which a part would be the night."""
    if question.workload.batch or question.scales:
        return None
    statistics = [statistic for slo in question.workload.slos(question.study.slo) for _, statistic, _ in slo.limits()]
    return max(question.study.search.confirm.requests, *(needed_for(statistic) for statistic in statistics), 1)


def felt_after_s(question: Question) -> float:
    """Return the seconds that a load must last until an OVERLOAD is sure to violate the SLO; infinite if no limit
    reacts.

    In an overload requests wait longer and longer, the last one OVERLOAD of the time in which all arrive: the
    percentile p of the waits is p of that, their mean a half.
    """
    durations = []
    for slo in question.workload.slos(question.study.slo):
        waits = [(statistic, limit) for metric, statistic, limit in slo.limits() if metric != "tpot"]
        shares = [0.5 if statistic == "mean" else float(statistic[1:]) / 100 for statistic, _ in waits]
        seconds = (limit / OVERLOAD / share for (_, limit), share in zip(waits, shares, strict=True) if share > 0)
        durations.append(min(seconds, default=math.inf))
    return max(durations)


def judged_together(
    question: Question,
    facts: PlanFacts,
    rate_rps: float | None,
    findings: Sequence[SimulationFinding],
    *,
    keeps_up: bool = False,
) -> DrawsVerdict:
    """Return the joint verdict of draws on each of which a plan keeps the SLO: whether they show that it keeps up as
    well, unless it is known that it `keeps_up`."""
    count = min(finding.summary.requests for finding in findings)
    if not keeps_up and _strays(question, findings, count):
        return DrawsVerdict(None, f"is not shown to be kept up with by {len(findings)} draws of {count:,} requests")
    lifetimes = [f.summary.lifetimes for f in findings if f.summary.lifetimes is not None]
    objective, summaries = question.objective, [finding.summary for finding in findings]
    values = (
        ()
        if objective.searches_rate
        else tuple(
            objective.value(facts, judged_of(summary, rate_rps or summary.offered_rate_rps)) for summary in summaries
        )
    )
    return DrawsVerdict(Confirmed(len(findings), count, min(lifetimes, default=None), values), "")


def _strays(question: Question, findings: Sequence[SimulationFinding], count: int) -> bool:
    """True if draws of `count` requests do not show that a plan keeps up: the number of requests in the system strays,
    and they are too short for an overload to violate a limit."""
    strays = [finding.wander for finding in findings if finding.wander is not None]
    # A load whose rate changes is judged as it is, from its beginning to its end.
    if question.scales or not strays or sum(strays) / len(strays) <= STRAYS[min(3, len(strays))]:
        return False
    return count < MOST_REQUESTS or any(_lasts_s(finding) < felt_after_s(question) for finding in findings)


def num_draws(question: Question) -> int:
    """Return the number of fresh draws of a study: one if all draws are alike, for example of a trace with arrival
    times and lengths."""
    # A hundred requests tell: draws of a load that varies differ in the first few.
    first, second = (question.draws.stream(100, draw) for draw in (1, 2))
    columns = [(first.prompt_tokens, second.prompt_tokens), (first.output_tokens, second.output_tokens)]
    alike = all(np.array_equal(column, redrawn) for column, redrawn in columns)
    if first.arrival_s is not None and second.arrival_s is not None:
        alike = alike and np.array_equal(first.arrival_s, second.arrival_s)
    draws = question.study.search.confirm.draws
    return min(1, draws) if alike else draws


def margin(question: Question) -> float:
    """Return the factor to the rate at which draws must keep the SLO as well, if these alone do not show that a rate is
    kept up with: about the standard deviation of the highest rate between draws, in whole steps of the search."""
    step = 1 + question.study.search.rate_tolerance
    return step ** max(1, round(CAPACITY.spread(part_requests(question) or question.requests) / math.log(step)))


def _too_near_to(higher_rps: float) -> str:
    return f"is too near to {higher_rps:.4g} requests/s, which"


def misses_below(attempt: Attempt, rate_rps: float) -> bool:
    """True if a full run on the draw of the search missed the SLO at a rate or below."""
    lost = not attempt.met and not attempt.draw and attempt.requests is None
    return lost and attempt.rate_rps is not None and attempt.rate_rps <= rate_rps * (1 + 1e-9)


def backlog_task(question: Question, plan: BoundedCandidate) -> Simulation | None:
    """Return the run of all requests of a fresh draw at once that shows which rates a plan keeps up with; None if it
    would not show it."""
    least = part_requests(question)
    if least is None or not shows_drift(question, plan.deployment):
        return None
    stream = question.draws.stream(question.num_requests(plan.candidate, least), 1)
    return Simulation(plan.deployment, stream, Slo(), AT_ONCE_RPS, draw=1, at_once=True)


def draw_task(
    question: Question, plan: BoundedCandidate, rate_rps: float | None, draw: int, requests: int
) -> Simulation:
    """Return the simulation of a plan on a fresh draw."""
    stream, part = question.draws.stream(requests, draw), part_requests(question)
    return Simulation(
        plan.deployment,
        stream,
        question.study.slo,
        rate_rps,
        draws=question.draws,
        draw=draw,
        part=part,
        searches_users=question.searches_users,
    )


def confirmed_deployment(question: Question, plan_cache: PlanCache, plan: BoundedCandidate) -> Deployment:
    """Return the deployment of which a verdict on all cores is: with step costs compiled for this plan alone, as the
    report has it. With `slo.confidence` that of the search, which has the margins."""
    if question.study.slo.confidence is not None:
        return plan.deployment
    # Step costs that plans share are tables for the widest of them, and differ by some millionths of a step.
    return question.deploy(plan.candidate, plan_cache.max_model_len)


def _note(plan: BoundedCandidate, attempt: Attempt) -> None:
    """Write a simulation into the row of a plan, unless it is there."""
    if attempt not in plan.row.tried:
        plan.row.tried.append(attempt)


def highest_rung(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the least k in 0, 1, ..., `most` that holds, if all above it do; None if none holds.

    The search goes through 0, 1, 2, 4, ..., then by halves. Rung 2 follows 1, since draws at the rate of rung 1 also
    decide on rung 2 if that is near the capacity (`FreshDraws`).
    """
    low, high = -1, 0
    while not holds(high):
        if high >= most:
            return None
        low, high = high, min(most, max(1, 2 * high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class Confirmer:
    """Confirms plans on fresh draws, then on all their cores."""

    def __init__(self, question: Question, plan_cache: PlanCache, evaluator: Evaluator) -> None:
        self.question, self.plan_cache = question, plan_cache
        self.step = 1 + question.study.search.rate_tolerance
        self._fresh = FreshDraws(question, evaluator)
        self._confirmed: dict[int, Confirmed] = {}
        """Draws of plans that were compared with a confirmed one, by the identity of the plan."""

    def confirm(self, plan: BoundedCandidate, leader: ConfirmedPlan | None) -> ConfirmedPlan | None:
        """Return a plan with the highest rate that holds, and write what is found into its row.

        Return None if no rate holds that is better than that of `leader`, or if the plan misses the SLO on all its
        cores.
        """
        value = None
        if leader is not None:
            value = self.question.objective.value(leader.plan.facts, leader.plan.row.judged)
        verdict = self._on_fresh_draws(plan, value)
        return None if verdict is None else self._on_all_cores(plan, verdict.confirmed)

    def values_on_draws(self, plan: BoundedCandidate, requests: int) -> tuple[float, ...]:
        """Return the objective of a plan at the given load on each fresh draw, of which its simulated cores receive
        `requests` requests; empty if these do not confirm it."""
        question, row = self.question, plan.row
        verdict = self._fresh.on_draws(plan, None, question.num_requests(plan.candidate, question.arrivals(requests)))
        if verdict.confirmed is None:
            if verdict.missed:
                row.status, row.reason, row.best = "infeasible", verdict.reason, None
            return ()
        self._confirmed[id(plan)] = verdict.confirmed
        row.drawn = verdict.confirmed.values
        return row.drawn

    def on_all_cores(self, plan: BoundedCandidate) -> ConfirmedPlan | None:
        """Return a plan that fresh draws have confirmed; None if it misses the SLO on all its cores."""
        return self._on_all_cores(plan, self._confirmed[id(plan)])

    def _on_fresh_draws(self, plan: BoundedCandidate, leader: float | None) -> DrawsVerdict | None:
        """Return the verdict of fresh draws at the highest rate that holds, which becomes the plan's own.

        Return None if no rate holds that is better than `leader`, the value of a plan that is confirmed.
        """
        row, objective = plan.row, self.question.objective
        if not self.question.study.search.confirm.draws:
            return DrawsVerdict(None, "")
        if not isinstance(objective, RateObjective):
            verdict = self._fresh.verdict(plan, row.rate_rps if objective.searches_rate else None)
            if verdict.confirmed is None:
                row.status, row.reason, row.best = "infeasible", verdict.reason, None
                return None
            row.drawn = verdict.confirmed.values
            return verdict
        assert row.rate_rps is not None
        highest, verdicts = row.rate_rps, dict[int, DrawsVerdict]()
        least = self.plan_cache.capacity(plan.candidate).rps * LOWEST
        if leader is not None:
            least = objective.rate_for(plan.facts, leader) * self.step

        def holds(rung: int) -> bool:
            if rung in verdicts:
                return verdicts[rung].confirmed is not None
            verdicts[rung] = self._fresh.verdict(plan, highest / self.step**rung)
            if verdicts[rung].missed:
                plan.miss(Miss(highest / self.step**rung, verdicts[rung].missed))
            return verdicts[rung].confirmed is not None

        most = max(0, math.floor(math.log(highest / least) / math.log(self.step) + 1e-9))
        # If the lowest rate that beats the leader does not hold, no higher one needs to be simulated.
        rung = None if leader is not None and not holds(most) else highest_rung(holds, most)
        if rung is None:
            last = max(verdicts)
            row.status, plan.given_up = "infeasible", True
            row.reason = f"at {highest / self.step**last:.4g} requests/s {verdicts[last].reason}"
            return None
        row.rate_rps = highest / self.step**rung
        return verdicts[rung]

    def _on_all_cores(self, best: BoundedCandidate, draws: Confirmed | None) -> ConfirmedPlan | None:
        """Simulate all cores of a plan on the draw of the search; return None if it misses the SLO."""
        question, objective, row = self.question, self.question.objective, best.row
        rate, summary = row.rate_rps if objective.searches_rate else None, row.summary
        requests = question.requests if summary is None else max(question.requests, question.arrivals(summary.requests))
        deployment = question.deploy(best.candidate, self.plan_cache.max_model_len)
        stream = question.stream(best.candidate, rate, requests)
        users = UserLoad(stream, question.draws) if question.searches_users else None
        result = run_at_load(deployment, stream, question.study.slo, users, record=True)
        judged = result
        if result.meets_slo and question.study.slo.confidence is not None:
            # Judge with the margin of the study, but report the result as predicted.
            judged = run_at_load(best.deployment, stream, question.study.slo, users)
        row.simulations += 1
        row.tried.append(Attempt(rate, judged.meets_slo, all_cores=True, requests=stream.arrivals))
        if judged.meets_slo:
            # A rate is kept as it was judged; a value at the given load is the one that is reached with the margin.
            row.take((result if objective.searches_rate else judged).summary(), rate or best.offered_rps)
            if not objective.searches_rate:
                row.best = objective.value(best.facts, row.judged)
            return ConfirmedPlan(best, deployment, result, draws)
        if isinstance(objective, RateObjective) and row.rate_rps is not None:
            best.miss(Miss(row.rate_rps, len(stream)))
            row.rate_rps /= self.step
        else:
            row.take(judged.summary(), rate or best.offered_rps)
            row.status, row.reason, row.best = "infeasible", violation(judged), None
        return None
