"""Plans of several pools are products of pools that can be: the same plans as one by one, the same numbers left out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, certificate_of, foreign
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import Candidate, PoolChoice, space_of, without_numbers
from simtune.tuner.space.census import census
from simtune.tuner.space.expressible import left_out_names, space_for

LOAD = Workload(
    name="load",
    requests=150,
    arrivals=Poisson(rate_rps=4.0),
    prompt=FixedLength(tokens=400),
    output=FixedLength(tokens=40),
)
PAIRS: dict[str, Any] = {"layouts": ("mixed", "prefill-decode"), "tp": (1, 2, 4), "pp": (1, 2)}
KINDS = (HardwareCount(profile="h100-sxm", devices=4), HardwareCount(profile="l40s", devices=4))
ALWAYS: dict[str, Any] = {"constraints": ("devices >= 1",)}
"""A constraint that leaves nothing out, but takes every plan to be asked."""
CASES: dict[str, dict[str, Any]] = {
    "pairs": {"search": PAIRS},
    "counted": {"search": {**PAIRS, "pp": (1,)}, "objective": "gpus"},
    "kinds": {"search": {"tp": (1, 2, 4), "mixed_kinds": True}, "hardware": KINDS},
    "both": {"search": {**PAIRS, "pp": (1,), "mixed_kinds": True}, "hardware": KINDS},
}


def question(
    search: dict[str, Any], objective: Any = "goodput", hardware: Any = KINDS[:1], constraints: tuple[str, ...] = ()
) -> Question:
    settings = {"max_num_seqs": (64, 256), "max_num_batched_tokens": (2048, 8192)}
    study = Study(
        name="study",
        model="llama-3.1-70b",
        hardware=hardware,
        workload=LOAD.name,
        slo=Slo(ttft_s={"p99": 1.0}, tpot_s={"mean": 0.06}),
        objective=objective,
        search=Search(**{**settings, **search}),
        constraints=constraints,
    )
    return Question(study, load_model(study.model), tuple(load_hardware(e.profile) for e in hardware), LOAD, None)


def one_by_one(asked: Question) -> tuple[list[Candidate], Counter[str], set[Candidate]]:
    """Plans of several pools that fit, the number of the others by the reason, and all others, plan by plan."""
    every = space_of(asked.study).candidates
    plan_cache = PlanCache(asked, every)
    fit, reasons, unfit = [], Counter[str](), set()
    for candidate in every:
        settled = plan_cache.settled(candidate)
        if isinstance(settled, Refused):
            reasons[without_numbers(settled.reason)] += 1
            unfit.add(candidate)
        else:
            fit.append(candidate)
    return fit, reasons, unfit


@pytest.mark.parametrize("case", CASES)
def test_plans_are_those_that_fit_one_by_one(case: str) -> None:
    asked = question(**CASES[case])
    fit, reasons, unfit = one_by_one(asked)
    space = space_for(asked)
    assert sum(len(plan.pools) > 1 for plan in unfit) > 10
    assert [plan for plan in space.candidates if plan not in unfit] == fit
    assert [plan.key for plan in space.candidates] == sorted(plan.key for plan in space.candidates)
    assert census(asked).left_out == dict(reasons.most_common())
    assert len(space.candidates) + sum(space.unfit.values()) == len(fit) + len(unfit)
    assert left_out_names(asked, space) == {plan.name for plan in unfit - set(space.candidates)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("constraints", [{}, ALWAYS])
def test_each_pool_that_cannot_be_is_shown_in_one_plan(case: str, constraints: dict[str, Any]) -> None:
    asked = question(**CASES[case], **constraints)
    space = space_for(asked)

    def wrong(plan: Candidate) -> PoolChoice | None:
        """The first pool that cannot be, in any number of instances."""
        return next((pool.alone for pool in plan.pools if space.plan_cache.unfit(pool, plan)), None)

    every = {wrong(plan) for plan in space_of(asked.study).candidates if len(plan.pools) > 1} - {None}
    shown = Counter(wrong(plan) for plan in space.candidates if len(plan.pools) > 1)
    assert every
    assert {pool: number for pool, number in shown.items() if pool is not None} == dict.fromkeys(every, 1)


@pytest.mark.parametrize("case", CASES)
def test_a_constraint_that_leaves_nothing_out_changes_nothing(case: str) -> None:
    plain, asked = (space_for(question(**CASES[case], **more)) for more in ({}, ALWAYS))

    def fit(space: Any) -> list[Candidate]:
        return [plan for plan in space.candidates if not isinstance(space.plan_cache.settled(plan), Refused)]

    assert fit(plain) == fit(asked)
    assert plain.unfit == asked.unfit
    assert plain.reasons == asked.reasons


def test_a_certificate_of_an_earlier_version_may_list_plans_that_do_not_fit() -> None:
    """Earlier versions listed every plan with a pool that does not fit; nothing but a bound may be claimed of it."""
    sizes = {"max_num_seqs": (64,), "max_num_batched_tokens": (2048, 8192), "confirm": Confirmation(draws=0)}
    asked = question({**PAIRS, "tp": (1, 2), "pp": (1,), **sizes})
    tuned = optimize(asked, jobs=1)
    certificate = certificate_of(tuned)
    fate = next(fate for fate in certificate.plans if fate.best is None and not fate.simulated)
    name, *_ = sorted(left_out_names(asked, space_for(asked)))

    def listed(**claim: Any) -> list[str]:
        plans = (*certificate.plans, fate.model_copy(update={"plan": name, **claim}))
        audit = Audit(certificate.model_copy(update={"plans": plans}), asked)
        return foreign({plan.plan: plan for plan in plans[-1:]}, audit)

    assert listed() == listed(best=12.0) == []
    assert listed(plan="tp9-pp9") == ["tp9-pp9"]
    assert listed(same_as=tuned.chosen.candidate.name) == [name]
