"""Classes of plans: what no allocation exceeds, who is ruled out with it, and that changed numbers are refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import Infeasible
from simtune.specs.pool import Role
from simtune.specs.study import StudyLimits
from simtune.specs.workload import FixedLength, Slo
from simtune.tuner.bounds import relaxation
from simtune.tuner.bounds.relaxation import Aim, Relaxation, Worths
from simtune.tuner.certificate.search_certificate import Audit, Certificate, certificate_of
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.allocation import allocate
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.tuner.space.plan_classes import PlanClasses
from simtune.tuner.trial import Tuned
from tests.tuner.simulated_once import simulated_once
from tests.tuner.test_allocation import FLEET, KV, RATES, some_rates
from tests.tuner.test_exhaustive import random_question

LINKED = replace(FLEET, link_bytes_per_s=math.inf)


def random_worths(rng: random.Random) -> Worths:
    roles = {role: rng.uniform(0, 1) for role in ("prefill", "decode", "mixed")}
    return Worths(roles, rng.choice([0.0, rng.uniform(0, 0.3)]), rng.uniform(0, 12))  # type: ignore[arg-type]


# --- the programme ----------------------------------------------------------------------------------------


def test_the_oracles_instance_is_bounded(oracle_dir: Path) -> None:
    """milp.json: 11.8 requests/s, and 9 for 56 an hour; dual values come within what a fraction of a node is worth."""
    oracle = json.loads((oracle_dir / "milp.json").read_text())
    most = Relaxation(FLEET, RATES, "most")
    assert oracle["allocation_max_rate"]["rate"] <= most.bound(most.best(solver=True))
    demand, price = (oracle["allocation_min_cost"][name] for name in ("demand", "price"))
    cheapest = Relaxation(FLEET, RATES, "least cost", demand)
    assert 0.85 * price < cheapest.bound(cheapest.best(solver=True)) <= price


@pytest.mark.parametrize("aim", ["most", "per cost", "least cost"])
def test_no_allocation_passes_a_bound_whatever_the_worths(aim: Aim) -> None:
    rng = random.Random(7)
    for _ in range(8):
        rates, budget = some_rates(rng), rng.choice([math.inf, 30.0, 50.0])
        fleet, demand = replace(LINKED, budget_per_hour=budget), rng.uniform(2.0, 7.0)
        programme = Relaxation(fleet if aim == "most" else LINKED, tuple(rates), aim, demand)
        every = [programme.solved(), *programme.balanced(), *(random_worths(rng) for _ in range(20))]
        bounds = [programme.bound(worths) for worths in every]
        best = programme.bound(programme.best(solver=True))
        if aim == "least cost":
            answer = allocate(LINKED, rates, kv_bytes_per_request=KV, demand_rps=demand)
            assert max(bounds) <= answer.value
            assert best >= answer.lp_bound * (1 - 1e-5), "as the linear relaxation, or nearer"
        else:
            answer = allocate(programme.fleet, rates, kv_bytes_per_request=KV)
            reached = answer.rate_rps if aim == "most" else answer.rate_rps / answer.price_per_hour
            assert min(bounds) >= reached
            assert aim == "per cost" or best <= answer.lp_bound * (1 + 1e-5)


@pytest.mark.parametrize("demand", [0.3, 2.3, 5.1])
def test_one_kind_of_instance_is_bounded_in_proportion(demand: float) -> None:
    """Mixed instances on 2 of 16 H GPUs, at 4 an hour each, serve 1.15 requests/s; a pair takes 8 / 3.1 for prefill and
    8 / 2 for decode."""
    alone, pair = RATES[6:7], (RATES[0], RATES[3])
    assert [(kind.role, kind.gpus, kind.rate_rps) for kind in (*alone, *pair)] == [
        ("mixed", 2, 1.15), ("prefill", 2, 3.1), ("decode", 2, 2.0)
    ]  # fmt: skip

    def widened(bound: float, exact: float) -> float:
        """Return the relative amount by which a bound is wider than exact arithmetic makes it."""
        return abs(bound / exact - 1)

    close = pytest.approx(relaxation.ROUNDING, rel=0.01)
    for rates, cost in ((alone, 8 / 1.15), (pair, 8 / 3.1 + 8 / 2)):
        cheapest, per_cost = Relaxation(LINKED, rates, "least cost", demand), Relaxation(LINKED, rates, "per cost")
        for solver in (False, True):
            bound = cheapest.bound(cheapest.best(solver=solver))
            assert bound < cost * demand
            assert bound == pytest.approx(cost * demand)
            assert per_cost.bound(per_cost.best(solver=solver)) == pytest.approx(1 / cost)
        assert widened(cheapest.bound(cheapest.best(solver=False)), cost * demand) == close
        assert widened(per_cost.bound(per_cost.best(solver=False)), 1 / cost) == close
    most = Relaxation(LINKED, alone, "most")
    assert widened(most.bound(most.best(solver=False)), 8 * 1.15) == close, "eight instances"
    assert most.serves() == pytest.approx(8 * 1.15)


def test_worths_that_prove_nothing() -> None:
    most, cheapest = Relaxation(LINKED, RATES, "most"), Relaxation(LINKED, RATES, "least cost", 5.0)
    even: dict[Role, float] = {"prefill": 1.0, "decode": 1.0}
    too_large = dict.fromkeys(even, 1e308)
    for worths in (
        Worths({}),
        Worths({"prefill": -1.0, "decode": 1.0}),
        Worths(even, -1.0, -1.0),
        Worths(even, math.nan, math.nan),
        Worths(even, math.inf, math.inf),
        Worths(too_large),
    ):
        assert most.bound(worths) == math.inf
        assert cheapest.bound(worths) == 0.0
    assert most.bound(Worths({"prefill": 2.0, "decode": 6.0})) == most.bound(Worths({"prefill": 1.0, "decode": 3.0}))


def test_a_large_worth_of_cost_leaves_no_less_than_there_is() -> None:
    """Where the budget is just what one instance of each role costs, all but rounding cancels out."""
    rates = (RATES[0], RATES[3])
    price = {nodes.gpu: nodes.price_per_gpu_hour for nodes in LINKED.nodes}
    cost = sum(kind.gpus * price[kind.gpu] for kind in rates)
    just = Relaxation(replace(LINKED, budget_per_hour=cost), rates, "most", one_of_each=True)
    served = min(kind.rate_rps for kind in rates)
    for of_cost in (1.0, 1e9, 1e18, 1e300, 1.7e308):
        assert just.bound(Worths({"prefill": 1.0, "decode": 1.0}, of_cost)) >= served


def test_an_instance_that_serves_whatever_comes_limits_nothing() -> None:
    """As one for decode does where answers are one token."""
    prefill, decode = RATES[0], replace(RATES[3], rate_rps=math.inf)
    alone = Relaxation(LINKED, (prefill,), "most").bound(Worths({"prefill": 1.0, "decode": 0.0}))
    both = Relaxation(LINKED, (prefill, decode), "most")
    assert both.bound(both.best(solver=True)) == alone < math.inf


def test_where_one_of_each_is_needed_it_is_counted() -> None:
    """A little load takes a GPU for each role, however little of it is used."""
    small = Relaxation(replace(LINKED, nodes=LINKED.nodes[:1]), RATES[:2] + RATES[3:4], "least cost", 0.01)
    assert small.bound(small.best(solver=True)) < 1.0
    both = replace(small, one_of_each=True)
    assert both.bound(both.best(solver=True)) == pytest.approx((2 + 2) * 4.0)


def test_a_solver_that_says_nothing_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> dict[str, float]:
        raise Infeasible("no")

    alone = Relaxation(LINKED, RATES[:1] + RATES[4:5], "per cost")
    solved = alone.bound(alone.solved())
    monkeypatch.setattr(relaxation, "shadow_prices", fails)
    assert alone.bound(alone.best(solver=True)) == pytest.approx(solved)


# --- the classes of a study -------------------------------------------------------------------------------


def several(seed: int, most_devices: int = 6, **given: Any) -> Question:
    """A random study with pools of two kinds beside one another."""
    asked = random_question(seed, most_devices)
    search = {"layouts": ("mixed", "prefill-decode")} | ({"mixed_kinds": True} if len(asked.study.hardware) > 1 else {})
    study = asked.study.model_copy(update={"search": asked.study.search.model_copy(update=search), **given})
    return replace(asked, study=study)


OBJECTIVES = ("goodput", "goodput_per_gpu", "goodput_per_dollar", "gpus", "usd_per_million_tokens")


@pytest.mark.parametrize(("seed", "objective"), [*enumerate(OBJECTIVES, 50)])
def test_no_plan_could_reach_more_than_its_class(seed: int, objective: str) -> None:
    asked = several(seed, objective=objective)
    every = space_of(asked.study).candidates
    plan_cache = PlanCache(asked, every)
    classes = PlanClasses(asked, plan_cache)
    _, whole = classes.sorted_out(every)
    groups = classes.bounded_all(whole)
    groups += [part for group in groups for part in classes.split(group)]
    assert {group.name for group in groups} <= classes.named(every).keys()
    compared = 0
    for group in groups:
        for candidate in map(plan_cache.settled, group.candidates):
            if not isinstance(candidate, Candidate):
                continue
            stream, capacity = plan_cache.stream(candidate), plan_cache.capacity(candidate).rps
            offered = stream.offered_rate_rps
            assert offered is not None
            if not asked.searches_rate and capacity < offered:
                continue
            rate = capacity if asked.searches_rate else offered
            best = asked.objective.best(asked.facts(candidate, stream), rate, 0.0)
            assert group.best is not None, candidate.name
            assert not asked.objective.better(best, group.best), (candidate.name, group.name)
            compared += 1
    assert compared


def test_what_was_ruled_out_whole_is_not_better_when_it_is_simulated() -> None:
    asked = several(1004, objective="goodput")
    tuned = optimize(asked, jobs=1)
    unseen = [row for row in tuned.rows if row.allocation]
    assert unseen
    assert all(row.simulations == 0 and row.status == "pruned" for row in unseen)
    assert all(row.best is not None and row.best <= tuned.bound for row in unseen)
    assert "no allocation of" in unseen[0].reason
    plan_cache = PlanCache(asked, space_of(asked.study).candidates)
    for row in unseen[:: max(1, len(unseen) // 6)]:
        settled = plan_cache.settled(row.candidate)
        assert isinstance(settled, Candidate)
        capacity = plan_cache.capacity(settled).rps
        rate = tuned.bound * 1.001
        assert capacity < rate or not asked.judge(settled, plan_cache.deployment(settled), rate).meets_slo


@pytest.mark.parametrize("given", [{"objective": "e2el"}, {"objective": "joules_per_token"}])
def test_where_rates_and_costs_do_not_say_there_are_none(given: dict[str, Any]) -> None:
    asked = several(20, **given)
    every = space_of(asked.study).candidates
    assert PlanClasses(asked, PlanCache(asked, every)).sorted_out(every) == ([*every], {})


def test_out_of_reach_is_said() -> None:
    asked = several(1004, objective="gpus")
    load = asked.workload.model_copy(
        update={"arrivals": asked.workload.arrivals.model_copy(update={"rate_rps": 9000.0})}
    )
    asked = replace(asked, workload=load)
    every = space_of(asked.study).candidates
    classes = PlanClasses(asked, PlanCache(asked, every))
    groups = classes.bounded_all(classes.sorted_out(every)[1])
    assert groups
    assert all(group.best is None and "are offered" in group.reason for group in groups)
    with pytest.raises(Infeasible):
        optimize(asked, jobs=1)


def test_a_budget_bounds_a_class() -> None:
    bounds = []
    for limits in (StudyLimits(), StudyLimits(usd_per_hour=3.0)):
        asked = several(1004, objective="goodput", limits=limits)
        every = space_of(asked.study.model_copy(update={"limits": StudyLimits()})).candidates
        classes = PlanClasses(asked, PlanCache(asked, every))
        bounds.append({group.name: group.best for group in classes.bounded_all(classes.sorted_out(every)[1])})
    free, tight = bounds
    assert all(0 < (tight[name] or 0) <= (free[name] or 0) for name in free)
    # 3 dollars are one H100, or three L40S of which there are two.
    assert (tight["mixed h100-sxm + mixed l40s"] or 0) < 0.5 * (free["mixed h100-sxm + mixed l40s"] or 0)
    assert tight["prefill l40s + decode l40s"] == free["prefill l40s + decode l40s"]


# --- the certificate --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return optimize(several(1004, objective="goodput"), jobs=1)


def audited(certificate: Certificate, asked: Question) -> Audit:
    audit = Audit(certificate, asked)
    assert audit.run() == (not audit.problems)
    return audit


def test_the_certificate_holds_without_a_solver(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = certificate_of(tuned)
    monkeypatch.setattr(relaxation, "shadow_prices", None)
    audit = audited(certificate, tuned.question)
    assert audit.problems == []
    assert audit.allocations == len(certificate.allocations) == len(tuned.classes) > 1
    ruled_out = {fate.allocation for fate in certificate.plans} - {""}
    assert ruled_out < {bound.name for bound in certificate.allocations}


def changes_of(data: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], object]]:
    fates, bounds = data["plans"], data["allocations"]
    plan = next(i for i, fate in enumerate(fates) if fate["allocation"])
    at = next(i for i, bound in enumerate(bounds) if bound["name"] == fates[plan]["allocation"])
    pair = next(i for i, bound in enumerate(bounds) if all(bound["roles"].values()) and bound["roles"])
    elsewhere = next(bound["name"] for bound in bounds if bound["name"] != fates[plan]["allocation"])
    tried = {"rate_rps": 1.0, "met": False, "all_cores": False}
    return {
        "a lower bound of a class": lambda d: d["allocations"][at].update(best=bounds[at]["best"] * 0.9),
        "a higher one": lambda d: d["allocations"][at].update(best=bounds[at]["best"] * 1.1),
        "no bound": lambda d: d["allocations"][at].update(best=None),
        "a worth below 0": lambda d: d["allocations"][pair]["roles"].update(prefill=-1.0),
        "another worth": lambda d: d["allocations"][pair]["roles"].update(decode=2 * bounds[pair]["roles"]["decode"]),
        "a worth of money": lambda d: d["allocations"][at].update(of_cost=-0.5),
        "a class less": lambda d: d["allocations"].pop(at),
        "a class that is none": lambda d: d["allocations"][at].update(name="mixed tpu"),
        "a plan in another class": lambda d: d["plans"][plan].update(allocation=elsewhere),
        "a plan in no class": lambda d: d["plans"][plan].update(allocation=""),
        "another bound of a plan": lambda d: d["plans"][plan].update(best=fates[plan]["best"] * 0.9),
        "other GPUs": lambda d: d["plans"][plan].update(num_gpus=fates[plan]["num_gpus"] + 1),
        "a simulation": lambda d: d["plans"][plan].update(simulated=[tried]),
        "a plan less": lambda d: d["plans"].pop(plan),
        "chosen and unseen": lambda d: d["incumbent"].update(plan=fates[plan]["plan"]),
    }


def test_worths_that_prove_nothing_rule_nothing_out(tuned: Tuned) -> None:
    """A bound that is not there is no claim that a class can do nothing."""
    data = certificate_of(tuned).to_data()
    pair = next(bound for bound in data["allocations"] if bound["roles"] and bound["name"].startswith("prefill"))
    pair.update(best=None, roles={})
    for fate in data["plans"]:
        if fate["allocation"] == pair["name"]:
            fate.update(best=None)
    changed = Certificate.model_validate_json(json.dumps(data))
    problems = audited(changed.model_copy(update={"digest": changed.expected_digest}), tuned.question).problems
    assert problems == [f"allocations of {pair['name']}: the worths that are given prove no bound"]


def test_answers_of_one_token_are_searched_too() -> None:
    """No decode instance limits them."""
    asked = several(1004, objective="goodput", slo=Slo(ttft_s={"p99": 1.0}))
    load = asked.workload.model_copy(update={"output": FixedLength(tokens=1)})
    asked = replace(asked, workload=load)
    every = space_of(asked.study).candidates
    classes = PlanClasses(asked, PlanCache(asked, every))
    groups = classes.bounded_all(classes.sorted_out(every)[1])
    assert all(group.best is not None and 0 < group.best < math.inf for group in groups)
    answer = optimize(asked, jobs=1)
    assert audited(certificate_of(answer), asked).problems == []


def test_whatever_is_changed_is_refused(tuned: Tuned) -> None:
    """Also by whoever knows to make a new digest."""
    claimed = certificate_of(tuned).to_data()
    with simulated_once():
        assert audited(certificate_of(tuned), tuned.question).problems == []
        for name, change in changes_of(claimed).items():
            data = json.loads(json.dumps(claimed))
            change(data)
            changed = Certificate.model_validate_json(json.dumps(data))
            sealed = changed.model_copy(update={"digest": changed.expected_digest})
            problems = audited(sealed, tuned.question).problems
            if name == "a plan in no class":  # its own bound is as low
                assert not problems or "could reach" in problems[0]
            else:
                assert problems, name
