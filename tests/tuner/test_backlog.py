"""Requests that are all present at once show which rates are kept up with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simtune.specs.study import Confirmation
from simtune.specs.workload import ClosedLoop, Slo
from simtune.tuner.certificate.search_certificate import Audit, Certificate, certificate_of
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search import confirm
from simtune.tuner.search.backlog import shows_drift
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.candidate_filter import BoundedCandidate, CandidateFilter
from simtune.tuner.search.confirm import backlog_task, margin
from simtune.tuner.search.evaluator import Evaluator
from simtune.tuner.space.expressible import space_for
from tests.tuner.test_confirm import asked

LONG = Confirmation(draws=2, requests=3000)


def the_plan(q: Question) -> BoundedCandidate:
    (plan,) = map(CandidateFilter(q, PlanCache(q, space_for(q).candidates)).check, space_for(q).candidates)
    assert isinstance(plan, BoundedCandidate)
    return plan


@pytest.mark.parametrize("seats", [4, 16])
def test_lower_rates_are_kept_up_with_and_much_higher_ones_are_not(seats: int) -> None:
    q = asked(confirm=LONG, max_num_seqs=(seats,))
    plan = the_plan(q)
    task = backlog_task(q, plan)
    assert task is not None
    below_rps = task.run().kept_up_below_rps
    assert below_rps is not None
    capacity_rps = plan.plan_cache.capacity(plan.candidate).rps
    assert 0.3 * capacity_rps < below_rps < capacity_rps

    def waiting(rate_rps: float) -> list[float]:
        """Return the mean wait in each half of a run."""
        result = plan.deployment.simulate(q.draws.stream(6000, 7).at_rate(rate_rps), Slo())
        return [float(part.mean()) for part in (result.queue_s[:3000], result.queue_s[3000:])]

    early, late = waiting(0.97 * below_rps)
    assert late < 3 * early + 1
    early, late = waiting(1.2 * below_rps)
    assert late > 2 * early


def test_a_run_that_is_too_short_shows_nothing() -> None:
    q = asked(confirm=Confirmation(draws=2, requests=600))
    task = backlog_task(q, the_plan(q))
    assert task is not None
    assert task.run().kept_up_below_rps == 0.0


def test_only_requests_that_come_by_themselves_and_are_served_in_order_show_it() -> None:
    q = asked()
    plan = the_plan(q)
    assert shows_drift(q, plan.deployment)
    users = q.workload.model_copy(update={"arrivals": ClosedLoop(users=4)})
    assert not shows_drift(replace(q, workload=users), plan.deployment)
    (pool,) = plan.deployment.plan.pools
    for update in ({"policy": "shortest-predicted-first"}, {"policy": "sglang"}):
        spec = pool.model_copy(update={"batching": pool.batching.model_copy(update=update)})
        pools = tuple(replace(deployed, spec=spec) for deployed in plan.deployment.pools)
        assert not shows_drift(q, replace(plan.deployment, pools=pools))


def test_a_rate_near_the_capacity_keeps_the_slo_with_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that show nothing of whether it is kept up with; a backlog does."""
    monkeypatch.setattr(confirm, "STRAYS", dict.fromkeys((1, 2, 3), 0.0))
    q = asked(confirm=Confirmation(draws=2, requests=2000), max_num_seqs=(8,))
    tuned = optimize(q, jobs=1)
    assert tuned.confirmed is not None
    assert tuned.chosen.rate_rps is not None
    assert tuned.confirmed.requests < 32_000
    higher_rps = tuned.chosen.rate_rps * margin(q)
    with_margin = {
        attempt.draw: attempt.met for attempt in tuned.chosen.tried if attempt.rate_rps == pytest.approx(higher_rps)
    }
    assert {1: True, 2: True}.items() <= with_margin.items()
    certificate = certificate_of(tuned)
    assert Audit(certificate, q).run()
    plans = tuple(
        fate.model_copy(
            update={
                "simulated": tuple(
                    attempt
                    for attempt in fate.simulated
                    if not attempt.draw or attempt.rate_rps is None or attempt.rate_rps < higher_rps * (1 - 1e-9)
                )
            }
        )
        for fate in certificate.plans
    )
    content = {key: value for key, value in certificate if key not in ("digest", "schema_id")}
    audit = Audit(Certificate.sealed(**content | {"plans": plans}), q)
    assert not audit.run()
    assert any("fresh draws do not confirm it" in problem for problem in audit.problems)


def test_a_backlog_is_simulated_once_for_all_rates() -> None:
    q = asked(confirm=LONG)
    plan, fresh = the_plan(q), confirm.FreshDraws(q, Evaluator(None, None))
    rates = [rate for rate in (0.01, 1.0, 1e6) if fresh._clears_backlog(plan, rate)]
    assert rates == [0.01, 1.0]
    assert plan.row.simulations == 1
