"""Rates are judged in steady state, and confirmed on requests that the search has not seen."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import UsageError
from simtune.results.result import parts_of
from simtune.sim.deployment import Deployment
from simtune.specs.catalog import load_workload
from simtune.specs.study import Confirmation, StudyLimits
from simtune.specs.workload import FixedInterval, FixedLength, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, Certificate, certificate_of
from simtune.tuner.doubt.draw_spread import CAPACITY
from simtune.tuner.objectives import Goodput, Miss, PlanFacts
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.climb import Simulation, missed_in_part
from simtune.tuner.search.confirm import DrawsVerdict, FreshDraws, highest_rung, num_draws
from simtune.tuner.search.draws import LoadDraws
from simtune.tuner.search.evaluator import Evaluator
from simtune.tuner.search.plan_judge import PlanJudge
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Tuned
from simtune.workload.requests import build_stream
from tests.tuner.test_search import HARDWARE, LOAD, question

DRAWS = Confirmation(draws=2, requests=1000)


def asked(**given: Any) -> Question:
    load = LOAD.model_copy(update={"requests": 60})
    one_card = {"tp": (1,), "pp": (1,), "devices": 1, "max_num_seqs": (64,), "max_num_batched_tokens": (2048,)}
    return question(**{"workload": load, **one_card, "confirm": DRAWS, "slo": Slo(ttft_s={"p90": 0.5}), **given})


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return optimize(asked(), jobs=1)


def test_the_rate_holds_on_draws_that_the_search_has_not_seen(tuned: Tuned) -> None:
    assert tuned.confirmed is not None
    assert tuned.confirmed.draws == 2
    assert tuned.confirmed.requests >= 1000
    assert tuned.confirmed.lifetimes is not None
    assert tuned.confirmed.lifetimes >= 10
    rate = tuned.chosen.rate_rps
    fresh = [tried for tried in tuned.chosen.tried if tried.draw]
    # Twice if the first draws are too short to show that the plan keeps up.
    held = sorted((tried.draw, tried.met) for tried in fresh if tried.rate_rps == rate)
    assert held in ([(1, True), (2, True)], [(1, True), (1, True), (2, True), (2, True)])
    # 60 requests of one draw promise more than 1,000 of another hold.
    once = optimize(asked(confirm=Confirmation(draws=0)), jobs=1)
    assert once.confirmed is None
    assert any(not tried.met for tried in fresh)
    assert tuned.value < once.value, "no rate that high is confirmed, even if one draw of several meets it"


def test_the_certificate_holds_the_draws_and_checks_them(tuned: Tuned) -> None:
    certificate = certificate_of(tuned)
    assert Audit(certificate, tuned.question).run()
    assert certificate.confirmed is not None
    assert certificate.confirmed.draws == 2
    content = certificate.model_dump(mode="json", by_alias=True)
    content.pop("digest")
    for fate in content["plans"]:
        fate["simulated"] = [tried for tried in fate["simulated"] if tried["draw"] != 2]
    forged = Certificate.sealed(**{key: value for key, value in certificate if key not in ("digest", "schema_id")}
                                | {"plans": Certificate.model_validate({**content, "digest": ""}).plans})  # fmt: skip
    audit = Audit(forged, tuned.question)
    assert not audit.run()
    assert any("fresh draws" in problem for problem in audit.problems)


def test_a_plan_for_a_given_load_is_confirmed_too() -> None:
    found = optimize(asked(objective="e2el", slo=Slo(ttft_s={"p90": 5.0})), jobs=1)
    assert found.confirmed is not None
    assert found.confirmed.requests >= 1000


def test_a_run_is_made_longer_until_it_lasts_ten_lifetimes(tuned: Tuned) -> None:
    q = asked()
    (candidate,) = {row.candidate for row in tuned.rows}
    deployment = q.deploy(candidate, 4096)
    draws = LoadDraws(q.workload, None, 0)
    loose = Slo(ttft_s={"p90": 100.0})
    short = Simulation(deployment, draws.stream(60), loose, 8.0).run()
    assert short.summary.lifetimes is not None
    assert short.summary.lifetimes < 10
    finding = Simulation(deployment, draws.stream(60), loose, 8.0, draws=draws).run()
    assert finding.met
    assert finding.summary.lifetimes is not None
    assert finding.summary.lifetimes >= 10
    assert finding.summary.requests > 60


def test_each_part_of_a_long_draw_must_keep_the_slo(tuned: Tuned) -> None:
    """A burst of 60 requests is within the percentile of 1,200, and not within that of the 200 that it is part of."""
    q = asked(slo=Slo(ttft_s={"p90": 0.3}))
    deployment = q.deploy(next(iter(tuned.rows)).candidate, 8192)
    stream = build_stream(LOAD, None, requests=1200, seed=0)
    arrival_s = np.arange(1200) / 4.0
    arrival_s[400:460] = arrival_s[400]
    burst = replace(stream, arrival_s=arrival_s)
    whole = Simulation(deployment, burst, q.study.slo, None).run()
    parts = Simulation(deployment, burst, q.study.slo, None, part=200).run()
    assert whole.met
    assert not parts.met
    assert parts.reason.startswith("in requests 401 to 600 of 1,200: p90 TTFT")
    assert "given up after" in parts.reason, "as soon as the part has missed it"
    assert (parts.missed_by, parts.summary.requests) == (200, 1200)
    assert Simulation(deployment, burst, q.study.slo, None, part=601).run().met


@functools.cache
def deployed() -> Deployment:
    (candidate,) = space_for(asked()).candidates
    return asked().deploy(candidate, 8192)


@given(
    at=st.integers(0, 550),
    size=st.integers(2, 90),
    part=st.sampled_from([50, 125, 200]),
    limit=st.sampled_from([{"p90": 0.3}, {"p99": 1.0}, {"mean": 0.2}]),
)
def test_a_run_that_ends_with_its_part_is_judged_as_the_whole_run_is(
    at: int, size: int, part: int, limit: dict[str, float]
) -> None:
    q, deployment = asked(slo=Slo(ttft_s=limit)), deployed()
    arrival_s = np.arange(600) / 4.0
    arrival_s[at : at + size] = arrival_s[at]
    stream = replace(build_stream(LOAD, None, requests=600, seed=0), arrival_s=np.sort(arrival_s))
    finding = Simulation(deployment, stream, q.study.slo, None, part=part).run()
    whole = deployment.simulate(stream, q.study.slo)
    missed, by = missed_in_part(whole, part)
    assert finding.met == (whole.meets_slo and not missed)
    if whole.meets_slo:
        # The first of its parts, or another one that was lost before.
        assert (finding.missed_by > 0) == (by > 0)
        assert finding.missed_by in (0, *(item.stop - item.start for item in parts_of(600, part)))


def test_rates_near_one_that_short_draws_do_not_decide_are_drawn_long_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q = asked()
    (plan,) = map(CandidateFilter(q, PlanCache(q, space_for(q).candidates)).check, space_for(q).candidates)
    assert isinstance(plan, BoundedCandidate)
    lengths: list[int] = []

    def undecided(fresh: FreshDraws, plan: BoundedCandidate, rate_rps: float | None, requests: int) -> DrawsVerdict:
        lengths.append(requests)
        return DrawsVerdict(None, "is not shown to be kept up with")

    monkeypatch.setattr(FreshDraws, "on_draws", undecided)
    # A backlog that shows nothing (tests/tuner/test_backlog.py has others).
    monkeypatch.setattr(FreshDraws, "_clears_backlog", lambda *_: False)
    fresh = FreshDraws(q, Evaluator(None, None))
    drawn = []
    for rate_rps in (10.0, 9.8, 8.9, 10.2):
        fresh.verdict(plan, rate_rps)
        drawn.append(len(lengths))
        lengths.clear()
    assert drawn == [2, 1, 2, 2]


def test_a_plan_that_must_do_the_same_begins_and_ends_where_another_did() -> None:
    """Two numbers of seats, neither of which is reached: the second plan is simulated at no rate."""
    q = asked(max_num_seqs=(512, 1024))
    candidates = space_for(q).candidates
    cache = PlanCache(q, candidates)
    first, second = (
        plan for plan in map(CandidateFilter(q, cache).check, candidates) if isinstance(plan, BoundedCandidate)
    )
    judge = PlanJudge(q, cache, Evaluator(None, None), lambda: iter(()), lambda plan: None)
    judge.judge(first, None)
    assert first.row.status == "feasible"
    assert first.row.rate_rps is not None
    judge.judge(second, first.row.rate_rps * 0.9)
    assert second.row.simulations == 0
    assert (second.row.rate_rps, second.row.best) == (first.row.rate_rps, first.row.best)
    alone = CandidateFilter(q, cache).check(second.candidate)
    assert isinstance(alone, BoundedCandidate)
    PlanJudge(q, cache, Evaluator(None, None), lambda: iter(()), lambda plan: None).judge(alone, None)
    assert (alone.row.rate_rps, alone.row.best) == (second.row.rate_rps, second.row.best)


@pytest.mark.parametrize("rate_rps", [2.0, 60.0])
def test_a_fresh_draw_is_simulated_once_for_plans_that_must_do_the_same(rate_rps: float) -> None:
    """Two numbers of seats, neither of which is reached."""
    q = asked(max_num_seqs=(512, 1024))
    candidates = space_for(q).candidates

    def plans() -> list[BoundedCandidate]:
        checked = map(CandidateFilter(q, PlanCache(q, candidates)).check, candidates)
        return [plan for plan in checked if isinstance(plan, BoundedCandidate)]

    first, second = plans()
    fresh = FreshDraws(q, Evaluator(None, None))
    verdict = fresh.on_draws(first, rate_rps, 400)
    assert first.row.simulations == (2 if rate_rps == 2.0 else 1)
    implied = fresh.on_draws(second, rate_rps, 400)
    assert second.row.simulations == 0
    assert (implied.confirmed, implied.missed) == (verdict.confirmed, verdict.missed)
    assert (implied.confirmed is None) == (rate_rps == 60.0)
    alone = plans()[1]
    simulated = FreshDraws(q, Evaluator(None, None)).on_draws(alone, rate_rps, 400)
    assert (simulated.confirmed, simulated.missed) == (implied.confirmed, implied.missed)
    assert sorted(alone.row.tried) == sorted(second.row.tried)
    assert alone.row.simulations == first.row.simulations


def test_the_draw_that_was_missed_comes_first_at_the_next_rate() -> None:
    q = asked()
    (plan,) = map(CandidateFilter(q, PlanCache(q, space_for(q).candidates)).check, space_for(q).candidates)
    assert isinstance(plan, BoundedCandidate)
    fresh = FreshDraws(q, Evaluator(None, None))
    rates = [rate for rate in np.geomspace(4.0, 60.0, 30) if fresh.on_draws(plan, float(rate), 200).missed]
    by_rate = {rate: [tried.draw for tried in plan.row.tried if tried.rate_rps == rate] for rate in rates}
    assert by_rate
    missed = {rate: next(t.draw for t in plan.row.tried if t.rate_rps == rate and not t.met) for rate in rates}
    for before, after in itertools.pairwise(rates):
        assert by_rate[after][0] == missed[before]


def test_draws_of_a_load_without_chance_are_one() -> None:
    fixed = Workload(
        name="fixed",
        arrivals=FixedInterval(rate_rps=1.0),
        prompt=FixedLength(tokens=100),
        output=FixedLength(tokens=10),
    )
    assert num_draws(replace(asked(), workload=fixed)) == 1
    assert num_draws(asked()) == 2
    assert num_draws(asked(confirm=Confirmation(draws=0))) == 0


def test_a_fresh_draw_is_another_one_and_always_the_same() -> None:
    workload, _ = load_workload("chat")
    draws = LoadDraws(workload, None, 5)
    assert (draws.stream(50).prompt_tokens == build_stream(workload, None, requests=50, seed=5).prompt_tokens).all()
    assert (draws.stream(50, 1).prompt_tokens != draws.stream(50, 2).prompt_tokens).any()
    assert (draws.stream(50, 1).prompt_tokens == LoadDraws(workload, None, 5).stream(50, 1).prompt_tokens).all()


@pytest.mark.parametrize(
    ("holds", "most", "rung"),
    [({0}, 5, 0), ({3, 4, 5}, 5, 3), ({5}, 5, 5), (set(), 5, None), (set(range(9, 99)), 98, 9)],
)
def test_a_rate_is_stepped_down_until_it_holds(holds: set[int], most: int, rung: int | None) -> None:
    assert highest_rung(lambda k: k in holds, most) == rung


def test_a_miss_on_few_requests_bounds_a_plan_less_tightly() -> None:
    facts = PlanFacts(1, None, 100.0)
    reached: Mapping[int, float] = {n: Goodput().reaches(facts, Miss(10.0, n), CAPACITY, 100.0) for n in (400, 8000)}
    assert reached[400] == pytest.approx(10 * math.exp(0.2))
    assert reached[8000] == pytest.approx(10 * math.exp(4 / math.sqrt(8000)))
    assert Goodput().reaches(facts, Miss(10.0, 400), CAPACITY, 11.0) == 11.0


def test_a_batch_is_searched_as_it_is() -> None:
    """Its requests come faster than they are served, and no run is longer than they are."""
    load = LOAD.model_copy(update={"requests": 60, "batch": True, "arrivals": FixedInterval(rate_rps=500.0)})
    found = optimize(asked(workload=load, objective="e2el", slo=Slo(e2el_s={"p90": 60.0})), jobs=1)
    assert found.confirmed is not None
    assert (found.confirmed.requests, found.confirmed.lifetimes) == (60, None)
    assert Audit(certificate_of(found), found.question).run()
    done = optimize(asked(workload=load, objective="makespan", slo=Slo()), jobs=1)
    assert done.value == done.result.duration_s
    assert done.chosen.reason.startswith("meets the SLO and is done after")
    assert Audit(certificate_of(done), done.question).run()


BATCH = LOAD.model_copy(update={"requests": 60, "batch": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workload": BATCH}, "objective goodput_per_gpu looks for a request rate, but workload load is a batch"),
        ({"workload": BATCH, "objective": "gpus", "limits": StudyLimits(goodput=1.0)}, "limit goodput is on a request"),
        ({"objective": "makespan"}, "workload load is no batch; set batch: true"),
        ({"objective": "gpus", "limits": StudyLimits(makespan=9.0)}, "limit makespan is of a finite load"),
        ({"workload": BATCH, "objective": "makespan", "requests": 100}, "is a batch of 60 requests; remove search"),
    ],
)
def test_a_batch_has_no_rate_and_only_a_batch_has_a_makespan(given: dict[str, Any], message: str) -> None:
    limits = given.get("limits", StudyLimits())
    q = asked(**{key: value for key, value in given.items() if key != "limits"})
    with pytest.raises(UsageError, match=message):
        optimize(replace(q, study=q.study.model_copy(update={"limits": limits})), jobs=1)


def test_the_cheapest_plan_that_is_done_in_time() -> None:
    """All requests of a batch are simulated whatever the number of instances, and its price is of what is served."""
    load = BATCH.model_copy(update={"requests": 400, "arrivals": FixedInterval(rate_rps=5000.0)})
    q = asked(workload=load, objective="gpus", slo=Slo(), devices=8, confirm=Confirmation(draws=0))
    done = {}
    for most_s in (None, 12.0):
        study = q.study.model_copy(update={"limits": StudyLimits(makespan=most_s)})
        done[most_s] = optimize(replace(q, study=study), jobs=1)
    assert (done[None].value, done[12.0].value) == (1, 2)
    assert done[12.0].result.duration_s <= 12.0 < done[None].result.duration_s
    assert len(done[12.0].result.stream) == 400
    cheap = optimize(replace(q, study=q.study.model_copy(update={"objective": "usd_per_million_tokens"})), jobs=1)
    price, served = HARDWARE.device.price_per_hour_usd, cheap.result.summary().output_tokens_per_s
    assert price is not None
    assert served is not None
    assert cheap.value == pytest.approx(price * cheap.chosen.candidate.num_gpus / 3600 / served * 1e6)
