"""Short runs before full ones: what they prove, when there are none, and that they rule plans out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from simtune.specs.workload import ClosedLoop, SharedPrefix, Slo
from simtune.tuner.doubt.draw_spread import CAPACITY, DrawSpread
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.search import short_runs
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import RISING, Climb, Rung, Simulation, SimulationFinding
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.search.rate_hints import NEAR, RateHints
from simtune.tuner.search.search_journal import key_of
from simtune.tuner.search.short_runs import as_shown, lasting, short_lengths
from simtune.tuner.space.candidates import Candidate, space_of
from tests.tuner.test_exhaustive import random_question
from tests.tuner.test_search import question
from tests.tuner.truths import plan


def test_a_miss_of_a_short_run_proves_as_much_as_one_of_a_full_run() -> None:
    for spread in (CAPACITY, DrawSpread.of([Slo(tpot_s={"p99": 0.03})])):
        rate = 10.0 / spread.slack(2000, 500)
        assert rate * spread.of_ratio(500) == pytest.approx(10.0 * spread.of_ratio(2000)), "the gap on any is the same"
        assert spread.slack(2000, 8000) == 1.0, "of a longer run no more is claimed"


def test_short_runs_are_of_steady_loads_whose_prompts_share_nothing() -> None:
    q = random_question(1, 4)
    candidate = Candidate.mixed("h100-sxm", 1, instances=1, max_num_seqs=8, max_num_batched_tokens=512)

    def lengths(**load: object) -> tuple[int, ...]:
        return short_lengths(replace(q, workload=q.workload.model_copy(update=load)), candidate)

    assert lengths(requests=8000) == (500, 2000)
    assert lengths(requests=1599) == ()
    assert lengths(requests=8000, arrivals=ClosedLoop(users=4)) == ()
    assert lengths(requests=8000, shared_prefix=SharedPrefix(groups=4, tokens=64)) == ()


def test_short_runs_tell_which_rates_to_try_first() -> None:
    climb = Climb(100.0, 1.02, None, hint_rps=40.0)
    assert climb.rate_rps == 40.0
    assert replace(climb, met=Rung(40.0, 0.99)).rate_rps == pytest.approx(40.8)
    assert replace(climb, met=Rung(40.0, 0.99), missed=Rung(40.8, 1.01)).rate_rps is None
    known = replace(climb, beats_rps=30.0, met=Rung(30.0, 0.5))
    assert known.rate_rps == 40.0, "short runs show more than one full run far from the limit"


@pytest.mark.parametrize(
    ("strain", "misses", "lower"),
    [(1.01, 1, 1.02), (1.44, 1, 1.2), (1.44, 2, 1.44), (None, 1, 0.75**-0.5), (0.9, 3, 0.75**-0.5)],
)
def test_a_full_run_that_misses_the_limit_near_the_rate_of_short_ones_shows_how_far_down_it_lies(
    strain: float | None, misses: int, lower: float
) -> None:
    climb = Climb(100.0, 1.02, None, missed=Rung(40.0, strain), tried=misses, hint_rps=41.0)
    assert climb.rate_rps == pytest.approx(40.0 / lower)


@pytest.mark.parametrize(
    ("before", "met", "likely"),
    [
        (Rung(10.0, 0.5), Rung(12.0, 0.6), 20.0),
        (Rung(10.0, 0.5), Rung(20.0, 0.5 * 2**0.5), 40.0),
        (Rung(10.0, 0.6), Rung(12.0, 0.6), math.inf),
        (Rung(10.0, None), Rung(12.0, 0.6), 12.0 / 0.6 ** (1 / RISING)),
        (None, Rung(12.0, 0.6), 12.0 / 0.6 ** (1 / RISING)),
    ],
)
def test_the_next_rate_is_where_strains_that_grow_by_a_power_reach_the_limit(
    before: Rung | None, met: Rung, likely: float
) -> None:
    climb = Climb(1000.0, 1.02, None, met=met, met_before=before)
    assert climb.rate_rps == pytest.approx(min(likely / math.sqrt(1.02), math.sqrt(met.rate_rps * 1000.0)))


def test_between_two_rates_the_next_one_is_the_mean_of_what_rates_below_and_both_show() -> None:
    climb = Climb(1000.0, 1.02, None, met=Rung(12.0, 0.6), missed=Rung(48.0, 1.2))
    interpolated = 12.0 * 4 ** (math.log(1 / 0.6) / math.log(2))
    assert climb.rate_rps == pytest.approx(interpolated / math.sqrt(1.02))
    below = replace(climb, met_before=Rung(10.0, 0.5))
    assert below.rate_rps == pytest.approx(math.sqrt(interpolated * 20.0) / math.sqrt(1.02))


def test_short_runs_are_long_enough_to_show_a_rate_and_full_ones_correct_them() -> None:
    q = random_question(1, 4)
    q = replace(q, workload=q.workload.model_copy(update={"requests": 2000}))
    candidates = space_of(q.study).candidates
    _, plans, _ = CandidateFilter(q, PlanCache(q, candidates)).sorted_by_kind(candidates)
    plan, asked = plans[0], list[int]()
    summary = Simulation(plan.deployment, q.stream(plan.candidate, 0.1, 20), Slo(), None).run()

    def simulated(_: BoundedCandidate, rate_rps: float, requests: int) -> SimulationFinding:
        """Short runs last a lifetime for every 500 requests, and meet the SLO up to half of the bound."""
        asked.append(requests)
        lasts = summary.summary.model_copy(update={"lifetimes": requests / 500, "requests": requests})
        return replace(summary, met=rate_rps <= plan.bound_rps / 2, strain=None, summary=lasts)

    hints = RateHints(q, simulated)
    first = hints.first(plan)
    assert first is not None
    assert {*asked} == {500, 1200}
    assert asked.index(1200) == len(asked) - asked.count(1200), "no run is too short after one was"
    assert plan.bound_rps / 2 / 1.02 <= first <= plan.bound_rps / 2
    hints.learn(0.8 * first)
    assert hints.first(plan) == pytest.approx(0.8 * first)
    asked.clear()
    longer = replace(summary, summary=summary.summary.model_copy(update={"requests": 2001}))
    coarse = hints.after(plan, 0.4 * plan.bound_rps, longer)
    assert coarse is not None
    assert {*asked} == {2000}, "the study's own requests are a short run of one that was made longer"
    assert plan.bound_rps / 2 / 1.02**2 <= coarse <= plan.bound_rps / 2, "nothing was learnt of runs of this length"
    asked.clear()
    assert hints.after(plan, 0.4 * plan.bound_rps, replace(longer, strain=NEAR)) is None
    assert not asked, "a full run near its limit shows more than short runs"


def test_a_journal_tells_short_runs_from_full_ones() -> None:
    assert len({key_of(plan(1, 1), 3.0, 0, requests) for requests in (100, 500, 2000)}) == 3


def test_the_plan_that_a_search_begins_with_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_runs, "LEAST", 100)
    q, judged = random_question(3004, 8), list[str]()
    load = q.workload.model_copy(update={"requests": 1600})
    q = replace(q, workload=load, study=q.study.model_copy(update={"objective": "goodput"}))
    monkeypatch.setattr(PlanJudge, "judge", _noting(PlanJudge.judge, judged))
    tuned = optimize(q, jobs=1)
    assert len(set(judged)) == len(judged)
    assert tuned.value <= tuned.bound


def _noting(judge: Callable[..., None], judged: list[str]) -> Callable[..., None]:
    def noting(self: PlanJudge, plan: BoundedCandidate, low: float | None) -> None:
        judged.append(plan.candidate.name)
        judge(self, plan, low)

    return noting


def test_plans_are_ruled_out_by_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_runs, "LEAST", 100)
    q = random_question(3, 4)
    load = q.workload.model_copy(update={"requests": 400})
    q = replace(q, workload=load, study=q.study.model_copy(update={"objective": "goodput"}))
    assert len(space_of(q.study).candidates) > 1
    tuned = optimize(q, jobs=1)
    rows = [row for row in tuned.rows if row is not tuned.chosen]  # the chosen plan is compared with on short runs
    short = [tried for row in rows for tried in row.tried if tried.requests is not None and not tried.all_cores]
    assert short, "no plan was ruled out by a short run"
    assert not any(tried.met for tried in short), "those that meet the SLO decide nothing"


@pytest.mark.parametrize(("lifetimes", "requests", "met"), [(None, 0, True), (1.0, 0, True), (0.25, 2400, False)])
def test_a_run_that_ends_before_its_first_requests_shows_no_rate(
    lifetimes: float | None, requests: int, met: bool
) -> None:
    """Requests that all arrive before one is answered leave no prompt to stall their decodes."""
    q = question(max_num_seqs=(64,), max_num_batched_tokens=(2048,))
    candidate = space_of(q.study).candidates[0]
    finding = Simulation(q.deploy(candidate, 8192), q.stream(candidate, 0.1, 20), Slo(), None).run()
    assert finding.met
    finding = replace(finding, summary=finding.summary.model_copy(update={"lifetimes": lifetimes, "requests": 500}))
    assert lasting(finding) == requests
    assert as_shown(finding).met == met
    missed = replace(finding, met=False)
    assert lasting(missed) == 0
    assert as_shown(missed) == missed
