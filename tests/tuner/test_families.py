"""Searches for loads with a request graph: limits and objectives on the latency of a family."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.errors import UsageError
from simtune.runs.contents import of_study
from simtune.specs.study import Confirmation
from simtune.specs.workload import ClosedLoop, FixedLength, GraphNode, Poisson, Sessions, Slo, Workload
from simtune.tuner.bounds.lone_requests import LoneRequests
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.trial import Tuned
from simtune.workload.requests import build_stream
from tests.tuner.test_search import question

FAMILIES = Workload(
    name="families",
    requests=40,
    arrivals=Poisson(rate_rps=1.0),
    prompt=FixedLength(tokens=300),
    output=FixedLength(tokens=20),
    graph=(
        GraphNode(name="plan"),
        GraphNode(name="branch", count=3, after=("plan",), inherits="plan"),
        GraphNode(name="join", after=("branch",), reads=("branch",)),
    ),
)


def asked(objective: str, slo: Slo, load: Workload = FAMILIES, **given: Any) -> Question:
    confirm = Confirmation(draws=0)
    settings = {"tp": (1, 2), "pp": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (512,), "confirm": confirm}
    return question(objective=objective, slo=slo, workload=load, devices=2, **{**settings, **given})


@pytest.fixture(scope="module")
def quickest() -> Tuned:
    return optimize(asked("family", Slo(family_s={"p90": 3.0}, ttft_s={"p50": 0.5})), jobs=1)


def test_the_plan_with_the_least_latency_of_a_family(quickest: Tuned) -> None:
    latencies = {}
    for row in quickest.rows:
        deployment = quickest.question.deploy(row.candidate, quickest.deployment.max_model_len)
        stream = quickest.question.stream(row.candidate)
        latencies[row.candidate.name] = float(deployment.simulate(stream).values("family").mean())
    assert quickest.value == pytest.approx(min(latencies.values()), rel=0.02)
    assert quickest.value == float(quickest.result.values("family").mean())
    assert "latency of a family" in quickest.chosen.reason
    assert quickest.result.stream.arrivals == 40
    audit = Audit(certificate_of(quickest), quickest.question)
    assert audit.run(), audit.problems


def test_the_summary_has_the_probability_of_a_limit_on_families(quickest: Tuned) -> None:
    summary = of_study(quickest, jobs=1).run.summary
    assert summary.slo_probability is not None
    assert summary.slo_probability.probability > 0.5
    assert [limit.metric for limit in summary.slo] == ["ttft", "family"]
    assert summary.objective is not None
    assert summary.objective.name == "family"


@pytest.mark.slow
def test_a_rate_counts_families_and_keeps_their_limit() -> None:
    confirm = Confirmation(draws=2, requests=60)
    tuned = optimize(asked("goodput", Slo(family_s={"p90": 1.0}), tp=(1,), confirm=confirm), jobs=1)
    assert tuned.confirmed is not None
    assert tuned.confirmed.requests >= 5 * 60
    limit = tuned.result.statistic("family", "p90")
    assert limit is not None
    assert limit <= 1.0
    assert tuned.result.stream.offered_rate_rps == pytest.approx(tuned.value)
    audit = Audit(certificate_of(tuned), tuned.question)
    assert audit.run(), audit.problems


PLAIN = FAMILIES.model_copy(update={"graph": None})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": "family", "slo": Slo(), "load": PLAIN}, "objective family is of families, but workload"),
        ({"objective": "gpus", "slo": Slo(family_s={"p90": 1.0}), "load": PLAIN}, "slo.family_s limits families of a"),
        ({"objective": "family", "slo": Slo(), "layouts": ("prefill-decode",)}, "needs pools of role mixed"),
    ],
)
def test_what_does_not_apply_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize(asked(**given), jobs=1)


SESSIONS = Workload(
    name="sessions",
    requests=12,
    arrivals=ClosedLoop(users=4),
    prompt=FixedLength(tokens=300),
    output=FixedLength(tokens=20),
    sessions=Sessions(turns=3, pause_s=2.0),
    warm_up=4,
)


def test_the_plan_with_the_least_latency_of_a_session_without_pauses() -> None:
    limits = Slo(family_s={"p90": 6.0}, family_active_s={"p90": 2.0})
    tuned = optimize(asked("family_active", limits, SESSIONS), jobs=1)
    assert tuned.value == float(tuned.result.values("family_active").mean())
    assert len(tuned.result.values("family_active")) == tuned.result.stream.arrivals - 4
    assert tuned.result.values("family").min() > 4.0
    assert "without pauses" in tuned.chosen.reason
    audit = Audit(certificate_of(tuned), tuned.question)
    assert audit.run(), audit.problems


def test_pauses_that_are_longer_than_a_limit_rule_plans_out() -> None:
    deployment = optimize(asked("family", Slo(), SESSIONS, tp=(1,)), jobs=1).deployment
    stream = build_stream(SESSIONS, None, requests=12, seed=0)
    bounds = LoneRequests(deployment, stream)
    assert bounds.families_late(Slo(family_s={"p90": 4.0}))
    assert not bounds.families_late(Slo(family_active_s={"p90": 4.0}))
    result = deployment.simulate(stream)
    first = stream.families.begin[:-1]  # type: ignore[union-attr]
    assert (bounds.family_s <= result.family_s[first]).all()
    assert (bounds.family_active_s <= result.family_active_s[first]).all()
