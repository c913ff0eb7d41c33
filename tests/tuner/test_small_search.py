"""A search of four plans and a front of two, small enough that every number of theirs follows from a few others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtune.specs.study import Confirmation
from simtune.tuner.certificate.front_certificate import FrontAudit, FrontCertificate, front_certificate_of
from simtune.tuner.certificate.search_certificate import Audit, Certificate, certificate_of
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.climb import Simulation
from simtune.tuner.search.front import answer
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Trial, Tuned
from tests.tuner import test_front
from tests.tuner.test_confirm import asked

pytestmark = pytest.mark.quick
MIXED, FEW_SEATS = "tp1-pp1-x2-s64-t2048", "tp1-pp1-x2-s8-t2048"
PAIRS = "p.tp1-pp1-x1-s64-t2048_d.tp1-pp1-x1-s64-t2048", "p.tp1-pp1-x1-s64-t2048_d.tp1-pp1-x1-s8-t2048"
CLASS = "prefill h100-sxm + decode h100-sxm"


@pytest.fixture(scope="module")
def q() -> Question:
    """Two GPUs, mixed or apart, with 64 seats or 8, for 60 requests."""
    return asked(
        confirm=Confirmation(draws=0),
        layouts=("mixed", "prefill-decode"),
        devices=2,
        objective="goodput",
        max_num_seqs=(8, 64),
    )


@pytest.fixture(scope="module")
def tuned(q: Question) -> Tuned:
    return optimize(q, jobs=1)


def row_of(tuned: Tuned, name: str) -> Trial:
    (row,) = (row for row in tuned.rows if row.candidate.name == name)
    return row


def test_fates_of_all_plans(q: Question, tuned: Tuned) -> None:
    assert {row.candidate.name for row in tuned.rows} == {MIXED, FEW_SEATS, *PAIRS}
    assert tuned.chosen is row_of(tuned, MIXED)
    space, step = space_for(q), 1 + q.study.search.rate_tolerance
    settled = [space.plan_cache.settled(candidate) for candidate in space.candidates]
    capacities = {plan.name: space.plan_cache.capacity(plan).rps for plan in settled if isinstance(plan, Candidate)}
    # The chosen plan: simulated at every rate that is listed, once on all cores, up to the rate that it keeps.
    chosen = tuned.chosen
    assert chosen.simulations == len(chosen.tried)
    sampled = [attempt for attempt in chosen.tried if not attempt.all_cores]
    assert [attempt.all_cores for attempt in chosen.tried] == [False] * len(sampled) + [True]
    assert len({attempt.rate_rps for attempt in sampled}) == len(sampled)
    highest = max(attempt.rate_rps or 0.0 for attempt in sampled if attempt.met)
    lowest = min(attempt.rate_rps or 0.0 for attempt in sampled if not attempt.met)
    assert highest < lowest <= highest * step * (1 + 1e-9)
    assert chosen.rate_rps == tuned.value == chosen.tried[-1].rate_rps == highest
    # Another draw may allow more than the lowest rate that missed, but nothing above the capacity.
    cache, (candidate,) = space.plan_cache, [plan for plan in space.candidates if plan.name == MIXED]
    task = Simulation(cache.deployment(candidate), cache.stream(candidate), q.study.slo, lowest, draws=q.draws)
    assert task.run().missed_by > 60, "the run was made longer until it lasts ten lifetimes"
    assert chosen.best == tuned.bound == pytest.approx(lowest * q.draw_spread.allowance(task.run().missed_by))
    assert tuned.bound <= capacities[MIXED]
    assert tuned.gap == 0.0, "the capacities of all other plans are lower"
    # Few seats: the capacity is below what the chosen plan reaches.
    few = row_of(tuned, FEW_SEATS)
    assert (few.status, few.simulations, few.tried) == ("pruned", 0, [])
    assert few.best == capacities[FEW_SEATS] < tuned.value
    # Pairs: no division of two GPUs between prefill and decode serves as much.
    (group,) = tuned.classes
    assert group.name == CLASS
    assert group.best is not None
    assert group.best < tuned.value
    for name in PAIRS:
        row = row_of(tuned, name)
        assert (row.status, row.simulations, row.tried) == ("pruned", 0, [])
        assert (row.allocation, row.best, row.bounded_by) == (CLASS, group.best, "allocation")
        assert capacities[name] <= group.best * (1 + 1e-9)


def test_the_course_ends_with_the_answer(tuned: Tuned) -> None:
    course = tuned.course
    assert course[-1].simulations == sum(row.simulations for row in tuned.rows) - 1, "all cores come afterwards"
    assert (course[-1].plan, course[-1].value, course[-1].bound) == (MIXED, tuned.value, tuned.bound)
    assert course[-1].decided == len(tuned.rows)
    for name in ("simulations", "decided"):
        counts = [getattr(point, name) for point in course]
        assert counts == sorted(counts)
    values = [point.value for point in course if point.value is not None]
    assert values == sorted(values)


def changed(certificate: Certificate, plans: dict[str, dict[str, Any]], **update: Any) -> Certificate:
    """The certificate with other claims, and the digest that goes with them."""
    fates = tuple(fate.model_copy(update=plans.get(fate.plan, {})) for fate in certificate.plans)
    forged = certificate.model_copy(update={"plans": fates, **update})
    return forged.model_copy(update={"digest": forged.expected_digest})


def test_the_certificate_lists_what_the_rows_say_and_is_checked_by_three_simulations(q: Question, tuned: Tuned) -> None:
    certificate = certificate_of(tuned)
    assert [fate.plan for fate in certificate.plans] == sorted((MIXED, FEW_SEATS, *PAIRS))
    for fate in certificate.plans:
        row = row_of(tuned, fate.plan)
        assert (fate.num_gpus, fate.best, fate.by) == (2, row.best, row.bounded_by)
        assert [attempt[:2] for attempt in row.tried] == [(attempt.rate_rps, attempt.met) for attempt in fate.simulated]
        assert (fate.allocation, fate.same_as) == (row.allocation, "")
    assert certificate.bound == tuned.bound
    assert certificate.gap == pytest.approx(tuned.gap)
    written = next(fate for fate in certificate.to_data()["plans"] if fate["plan"] == MIXED)["simulated"]
    assert all("missed_by" not in tried for tried in written), "no part of a run missed the SLO alone"
    in_part = certificate.plans[2].simulated[0].model_copy(update={"missed_by": 40})
    assert in_part.model_dump()["missed_by"] == 40
    audit = Audit(certificate, q, tuned.deployment.plan)
    assert audit.run(), audit.problems
    # Of the chosen plan the lowest rate that missed, the highest that met and the rate on all cores; bounds of both
    # mixed plans.
    assert (audit.simulations, audit.bounds, audit.allocations) == (3, 2, 1)


def test_a_certificate_that_claims_anything_else_is_refused_for_that_reason(q: Question, tuned: Tuned) -> None:
    certificate = certificate_of(tuned)
    pair, incumbent = PAIRS[0], certificate.incumbent
    attempts = certificate.plans[2].simulated
    closed = f"{pair} was simulated, but is listed as ruled out with class {CLASS}"
    forged: dict[str, tuple[Certificate, str]] = {
        "the chosen plan is in a class that was ruled out": (
            changed(certificate, {}, incumbent=incumbent.model_copy(update={"plan": pair})), closed
        ),
        "one of the class was simulated": (changed(certificate, {pair: {"simulated": attempts[:1]}}), closed),
        "one of the class does the same as another": (changed(certificate, {pair: {"same_as": MIXED}}), closed),
        "of another class": (
            changed(certificate, {FEW_SEATS: {"allocation": CLASS}}),
            f"{FEW_SEATS} does not belong to class {CLASS}, or the class has no bound",
        ),
        "more GPUs in the class": (
            changed(certificate, {pair: {"num_gpus": 3}}),
            f"{pair}: GPUs is 3 in the certificate, but 2 was computed",
        ),
        "more GPUs": (
            changed(certificate, {MIXED: {"num_gpus": 3}}),
            f"{MIXED}: GPUs is 3 in the certificate, but 2 was computed",
        ),
        "another value": (
            changed(certificate, {}, incumbent=incumbent.model_copy(update={"value": 2 * incumbent.value})),
            f"{MIXED}: value is {2 * incumbent.value:.6g} in the certificate, but {incumbent.value:.6g} was computed",
        ),
        "a bound without its simulation": (
            changed(certificate, {MIXED: {"simulated": attempts[:2]}}),
            f"{MIXED} could reach {row_of(tuned, MIXED).rate_bound_rps:.6g}, and {tuned.bound:.6g} is claimed at most",
        ),
        "another gap": (
            changed(certificate, {}, gap=0.5),
            f"gap is 0.5 in the certificate, but {certificate.gap:.6g} was computed",
        ),
    }  # fmt: skip
    for name, (claim, problem) in forged.items():
        audit = Audit(claim, q)
        assert not audit.run(), name
        assert audit.problems[0] == problem, name


def test_no_plan_that_is_refused_was_chosen(q: Question, tuned: Tuned) -> None:
    certificate = certificate_of(tuned)
    fates = {fate.plan: fate.model_copy(update={"best": None}) for fate in certificate.plans}
    for name, problems in ((FEW_SEATS, []), (MIXED, [f"{MIXED} was chosen, and does not fit"])):
        audit = Audit(certificate, q)
        audit._check_refused(Trial(row_of(tuned, name).candidate, "does not fit", "does not fit"), fates[name])
        assert audit.problems == problems


# --- a front ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def front() -> Tuned:
    small = test_front.question(tp=(1, 2), max_num_seqs=(64,), max_num_batched_tokens=(2048,), front=2)
    return answer(replace(small, workload=small.workload.model_copy(update={"requests": 60})), jobs=1)


def test_a_front_is_computed_anew_and_every_claim_of_it_compared(front: Tuned) -> None:
    claimed, ladder = front_certificate_of(front), front.ladder
    assert ladder is not None
    assert claimed.plans == ("tp1-pp1-x2-s64-t2048", "tp2-pp1-x1-s64-t2048")
    assert (claimed.loads, claimed.settled, len(claimed.loads)) == (ladder.loads, 2, 2)
    audit = FrontAudit(claimed, front.question)
    assert audit.run(), audit.problems
    assert audit.simulations + audit.bounds >= len(claimed.points) > 0
    claims: dict[str, Any] = {
        "simtune": "0.0.1",
        "study": "another",
        "seed": 7,
        "inputs": {**claimed.inputs, "trace": "0" * 64},
        "plans": claimed.plans[:1],
        "loads": (claimed.loads[0] * 1.01, claimed.loads[1]),
        "points": claimed.points[1:],
    }
    audit = FrontAudit(sealed(claimed.model_copy(update=claims)), front.question)
    assert not audit.run()
    *differ, point = audit.problems
    assert differ == [
        f"{key}: differs from the value computed from the study's inputs" for key in claims if key != "points"
    ]
    assert point.startswith(f"at {claimed.points[0].rate_rps:.6g} requests/s: no point in the file, and ")


def sealed(certificate: FrontCertificate) -> FrontCertificate:
    return certificate.model_copy(update={"digest": certificate.expected_digest})
