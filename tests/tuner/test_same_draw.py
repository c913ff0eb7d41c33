"""Plans held against the chosen plan on the same requests: the rule of the search, and the gap that it states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from simtune.specs.workload import Slo
from simtune.tuner.certificate.differences import Differences
from simtune.tuner.certificate.search_certificate import Audit, Certificate, Resimulations, Tried, certificate_of
from simtune.tuner.doubt.draw_spread import CAPACITY, DrawSpread
from simtune.tuner.doubt.same_draw import (
    Beginning,
    ChosenOnDraw,
    Lengths,
    PlanOnDraw,
    RulingRun,
    decisive,
    gap_in_words,
    rates_met,
)
from simtune.tuner.objectives import Miss
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import Simulation
from simtune.tuner.search.confirm import ConfirmedPlan
from simtune.tuner.search.evaluator import Evaluator
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.search.same_requests import ended_otherwise, gaps, show_on_draw, value_on_draw
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Attempt, Tuned
from tests.tuner.test_search import LOAD, question

REQUESTS = 1600
"""Long enough for short runs."""
FULL = Beginning(0, REQUESTS, REQUESTS)


def asked(**settings: Any) -> Question:
    defaults: dict[str, Any] = {
        "workload": LOAD.model_copy(update={"requests": REQUESTS}),
        "slo": Slo(ttft_s={"p90": 0.4}, tpot_s={"p90": 0.02}),
        "pp": (1,),
        "max_num_seqs": (64, 128),
        "max_num_batched_tokens": (512, 1024, 2048),
    }
    return question(**{**defaults, **settings})


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return optimize(asked(), jobs=1)


def test_the_answer_of_several_processes_is_that_of_one(tuned: Tuned) -> None:
    together = optimize(asked(), jobs=2)
    tried = [[row.tried for row in search.rows] for search in (tuned, together)]
    assert tried[0] == tried[1]


def bounded(q: Question) -> dict[str, BoundedCandidate]:
    candidates = space_for(q).candidates
    _, plans, _ = CandidateFilter(q, PlanCache(q, candidates)).sorted_by_kind(candidates)
    return {plan.candidate.name: plan for plan in plans}


def test_no_plan_exceeds_the_stated_gap_on_the_same_requests(tuned: Tuned) -> None:
    """Every other plan misses the SLO at what the chosen plan meets, times one and the gap, on the requests that ruled
    it out; the simulations are made here, without the search."""
    q, gap = tuned.question, tuned.gap_on_draw
    assert gap is not None
    assert 0 < gap < tuned.gap
    assert any(run.met and run.requests is not None for run in tuned.chosen.tried), "it was not compared on a short run"
    plans, chosen = bounded(q), tuned.chosen
    worth = q.objective.worth(plans[chosen.candidate.name].facts)  # type: ignore[attr-defined]
    met = rates_met(chosen.tried, Lengths(REQUESTS, q.num_requests(chosen.candidate)))
    compared = short = 0
    for row in tuned.rows[1:]:
        plan, lengths = plans[row.candidate.name], Lengths(REQUESTS, q.num_requests(row.candidate))
        missed = decisive(row.tried, lengths, q.draw_spread)
        if missed is None or row.same_as:
            continue
        on = lengths.of(missed)
        stream = q.draws.stream(on.requests, on.draw)
        rate = met[on] * (1 + gap) * worth / q.objective.worth(plan.facts) * (1 + 1e-9)  # type: ignore[attr-defined]
        run = Simulation(plan.deployment, stream, q.study.slo, rate, draws=q.draws if on == FULL else None)
        assert not run.run().met, row.candidate.name
        compared, short = compared + 1, short + (on != FULL)
    assert compared > 3
    assert short > 0, "runs of all requests alone were compared"


SHORT = Beginning(0, 400, 400)
CHOSEN = ChosenOnDraw(9.0, 1.0, {FULL: 10.0, SHORT: 12.0}, FULL)
"""A plan that reaches 9 requests/s on any requests and more on the draw of the search."""


def missed(rate_rps: float, on: Beginning = FULL, reaches: float = 13.0, worth: float = 1.0) -> PlanOnDraw:
    return PlanOnDraw(reaches, worth, RulingRun(rate_rps, on, on.simulated))


def test_the_gap_is_the_best_of_each_plans_comparison() -> None:
    bounded_only, full = PlanOnDraw(reaches=10.5), missed(10.2)
    for rivals, gap in (
        ([], 0.0),
        ([full], 0.02),
        ([full, missed(12.6, SHORT)], 0.05),
        ([full, bounded_only], 0.05),
        # Without runs on the same requests a plan counts by what it reaches on any.
        ([full, missed(9.0, Beginning(2, 8000, 8000), reaches=9.9)], 0.1),
        ([missed(8.0, Beginning(0, 2 * REQUESTS, REQUESTS), reaches=9.45)], 0.05),
        ([missed(11.0, reaches=9.5)], 9.5 / 9 - 1),
        ([missed(16.0, reaches=4.0, worth=0.5)], 0.0),
    ):
        gaps = CHOSEN.gaps(rivals, CAPACITY)
        assert gaps is not None
        assert gaps.on_draw == pytest.approx(gap)
    assert CHOSEN._replace(met={SHORT: 12.0}).gaps([full], CAPACITY) is None


def test_the_gap_on_any_requests_allows_for_what_their_number_leaves_open() -> None:
    bounded_only, full, short = PlanOnDraw(reaches=10.5), missed(10.2), missed(12.24, SHORT)
    unlike = missed(9.0, Beginning(0, 2 * REQUESTS, REQUESTS), reaches=9.9)
    for rivals, times in (
        ([], 1.0),
        ([full], 1.02 * math.exp(1.4 * 2 / math.sqrt(REQUESTS))),
        ([full, short], 1.02 * math.exp(1.4 * 2 / math.sqrt(400))),
        # Bounds hold on any, and so does what a plan reaches that was given other requests.
        ([full, bounded_only], 10.5 / 9),
        ([missed(11.0, reaches=9.1)], 9.1 / 9),
        ([unlike], 1.1),
    ):
        gaps = CHOSEN.gaps(rivals, CAPACITY)
        assert gaps is not None
        assert gaps.on_any == pytest.approx(times - 1)


@pytest.mark.parametrize(
    ("slos", "alone"),
    [
        ([Slo(ttft_s={"mean": 1.0})], 2.0),
        ([Slo(ttft_s={"p90": 1.0}), Slo(tpot_s={"p50": 0.1})], 2.0),
        ([Slo(ttft_s={"p90": 1.0}, tpot_s={"p99": 0.1})], 5.0),
        ([Slo(ttft_s={"p90": 1.0}), Slo(e2el_s={"p99.9": 10.0})], 0.5 / math.sqrt(0.001)),
        ([Slo(ttft_s={"p90": 1.0}, attainment=0.96)], 2.5),
    ],
)
def test_the_farthest_percentile_decides_by_how_much_draws_differ(slos: list[Slo], alone: float) -> None:
    spread = DrawSpread.of(slos)
    assert spread.alone == pytest.approx(alone)
    assert spread.allowance(1600) == pytest.approx(math.exp(2 * alone / 40))
    assert spread.of_ratio(1600) < spread.allowance(1600)


def test_a_short_run_decides_if_it_proves_more() -> None:
    lengths = Lengths(REQUESTS, 4 * REQUESTS)
    full, short = Attempt(10.0, False), Attempt(9.9, False, requests=4 * 400)
    assert decisive([full, short], lengths, CAPACITY) is full
    proves_as_much = 10.0 / CAPACITY.slack(REQUESTS, 400)
    lower = short._replace(rate_rps=proves_as_much * 0.999)
    assert decisive([full, lower], lengths, CAPACITY) is lower
    assert (lengths.of(lower), lengths.simulated(lower)) == ((0, 4 * 400, 400), 400)
    assert decisive([Attempt(10.0, True)], lengths, CAPACITY) is None
    on_all_cores = Attempt(12.0, True, all_cores=True, requests=400)
    assert rates_met([Attempt(9.0, True), Attempt(8.0, True), on_all_cores, full], lengths) == {
        lengths.full: 9.0,
        SHORT: 12.0,
    }


@pytest.mark.parametrize(("gap", "problem"), [("gap_on_draw", "gap on the same requests"), ("gap", "gap")])
def test_a_certificate_that_states_less_is_refused(tuned: Tuned, gap: str, problem: str) -> None:
    certificate = certificate_of(tuned)
    content = {key: value for key, value in certificate if key not in ("digest", "schema_id")}
    assert Audit(Certificate.sealed(**content), tuned.question).run()
    audit = Audit(Certificate.sealed(**{**content, gap: content[gap] / 2}), tuned.question)
    assert not audit.run()
    assert [found.partition(" is ")[0] for found in audit.problems] == [problem]


def test_short_runs_that_meet_the_slo_are_made_again_as_long_as_they_were(tuned: Tuned) -> None:
    """The search does not make them longer until they last ten lifetimes, as it does full ones."""
    q, chosen = tuned.question, bounded(tuned.question)[tuned.chosen.candidate.name]
    short = [run for run in tuned.chosen.tried if run.met and run.requests is not None and not run.all_cores]
    assert short
    resimulations = Resimulations(q, chosen.plan_cache, Differences())
    for run in short:
        tried = Tried(**run._asdict())
        again = resimulations.finding(chosen, tried)
        assert again.met
        assert again.summary.requests == run.requests
    assert resimulations.finding(chosen, Tried(rate_rps=0.5, met=True, all_cores=False)).met


@dataclass
class Judged:
    """A plan with the results that the rule reads."""

    plan: BoundedCandidate

    def at(self, rate_rps: float, met_rps: float, tightest: str = "ttft") -> BoundedCandidate:
        self.plan.row.rate_rps, self.plan.met_rps, self.plan.tightest = rate_rps, met_rps, tightest
        self.plan.row.status = "infeasible"
        return self.plan


def test_what_fresh_draws_take_off_every_plan_is_not_held_against_one() -> None:
    q = asked(objective="goodput")
    leader, rival = (Judged(plan) for plan in list(bounded(q).values())[:2])
    limit = q.draw_spread.allowance(REQUESTS)
    assert value_on_draw(q, leader.at(10.0, 10.0 * limit * 0.999)) == pytest.approx(10.0 * limit * 0.999)
    assert value_on_draw(q, leader.at(10.0, 10.0 * limit * 1.001)) == 10.0, "the draws took more than draws differ by"
    # The rate of a rival that another limit ends may fall less.
    confirmed = leader.at(10.0, 10.5)
    for missed_at, tightest, again in ((10.5, "tpot", True), (10.3, "tpot", False), (10.5, "ttft", False)):
        plan = rival.at(missed_at, 0.0, tightest)
        plan.row.best = missed_at
        found = ended_otherwise(q, confirmed, [plan])
        assert [low for _, low in found] == ([pytest.approx(10.0 * 1.02**2)] if again else [])
    rival.plan.row.best, rival.plan.given_up = 10.5, True
    assert ended_otherwise(q, confirmed, [rival.at(10.5, 0.0, "tpot")]) == []


def test_all_cores_of_the_chosen_plan_are_run_for_plans_of_which_all_are_simulated() -> None:
    q = asked(devices=8, tp=(1, 2), max_num_seqs=(64,), max_num_batched_tokens=(512,))
    plans = bounded(q)
    chosen, rival = plans["tp1-pp1-x8-s64-t512"], plans["tp2-pp1-x4-s64-t512"]
    assert (q.num_requests(chosen.candidate, 400), q.num_requests(rival.candidate, 400)) == (800, 400)
    rate_rps = 0.1 * chosen.bound_rps
    chosen.row.rate_rps = chosen.met_rps = rate_rps
    chosen.row.tried = [Attempt(rate_rps, True)]
    rival.row.tried = [Attempt(0.99 * rate_rps, False, requests=400)]
    rival.miss(Miss(0.99 * rate_rps, 400))
    rival.row.best = rival.reaches
    judge = PlanJudge(q, chosen.plan_cache, Evaluator(None, None), lambda: iter(()), lambda _: None)
    confirmed = ConfirmedPlan(chosen, q.deploy(chosen.candidate, chosen.plan_cache.max_model_len), None, None)  # type: ignore[arg-type]
    before = gaps(q, chosen, [chosen, rival], [])
    assert before is not None
    assert before.on_draw > 0.1, "the rival was given other requests"
    show_on_draw(q, judge, confirmed, [chosen, rival])
    assert chosen.row.tried[1:] == [Attempt(rate_rps, True, all_cores=True, requests=400)]
    found = gaps(q, chosen, [chosen, rival], [])
    assert found is not None
    assert found.on_draw == 0.0
    assert found.on_any == pytest.approx(0.99 * q.draw_spread.of_ratio(400) - 1)
    rival.row.tried = [Attempt(0.5 * rate_rps, False, requests=800)]
    rival.missed = Miss(0.5 * rate_rps, 800)
    show_on_draw(q, judge, confirmed, [chosen, rival])
    assert len(chosen.row.tried) == 2, "it cannot be better on any requests"


def test_both_gaps_are_said() -> None:
    assert gap_in_words(0.08, 0.02).startswith("no plan in this space is more than 2.0% better on the same requests")
    assert "8.0% on any" in gap_in_words(0.08, 0.02)
    assert gap_in_words(0.08, None) == "no plan in this space is more than 8.0% better under this cost model"
