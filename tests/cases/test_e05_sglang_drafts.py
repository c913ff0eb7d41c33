"""Drafts on SGLang are simulated, with what its host takes for each of their passes.

Source: sgl-project/SpecForge, issue 339: Qwen3-30B-A3B in bf16 on two H100, a chain of three drafts of EAGLE-3 that
keeps 1.86 tokens a round.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simtune.api import Experiment, load_specs, set_up
from simtune.errors import Infeasible
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.plan import Plan
from simtune.specs.workload import Workload
from simtune.workload.requests import build_stream

DATA = Path(__file__).parent / "data" / "e05-sglang-drafts"
ALONE, WITH_DRAFTS = {1: 222.0, 4: 566.0}, {1: 160.0, 4: 448.0}
"""Measured tokens per second by batch."""


@cache
def experiment() -> Experiment:
    acceptance = f"pools.0.speculation.acceptance={DATA / 'acceptance.yaml'}"
    return set_up(load_specs(None, None, "chat", str(DATA / "plan.yaml"), {"plan": [acceptance]}))


@cache
def deployment(drafts: bool) -> Deployment:
    drafting = experiment().deployment
    if drafts:
        return drafting
    (pool,) = drafting.plan.pools
    plan = drafting.plan.model_copy(update={"pools": (pool.model_copy(update={"speculation": None}),)})
    return deploy(plan, drafting.model, drafting.profiles)


def result(drafts: bool, users: int) -> Result:
    arrivals = {"kind": "closed_loop", "users": users}
    lengths = {"prompt": {"kind": "fixed", "tokens": 500}, "output": {"kind": "fixed", "tokens": 300}}
    load = Workload.model_validate({"name": "w", "arrivals": arrivals, **lengths})
    return deployment(drafts).simulate(build_stream(load, None, requests=12 * users, seed=0))


def tokens_per_s(drafts: bool, users: int) -> float:
    return float(users / result(drafts, users).tpot_s.mean())


@pytest.mark.parametrize("users", ALONE)
def test_drafts_of_a_small_moe_slow_it_down_by_as_much_as_measured(users: int) -> None:
    drafted, alone = tokens_per_s(True, users), tokens_per_s(False, users)
    assert drafted == pytest.approx(WITH_DRAFTS[users], rel=0.15)
    assert drafted / alone == pytest.approx(WITH_DRAFTS[users] / ALONE[users], rel=0.15)
    assert drafted / alone < 1, "the sign"


def test_a_round_keeps_as_many_tokens_as_stated() -> None:
    drafted = result(True, 4).drafted
    assert drafted.tokens / drafted.rounds == pytest.approx(1.86, rel=0.05)
    assert drafted.drafts == pytest.approx(3 * drafted.rounds, rel=0.01)


def test_the_host_is_not_hidden_while_drafts_are_awaited() -> None:
    (pool,) = deployment(True).plan.pools
    (plain,) = deployment(False).plan.pools
    assert pool.async_scheduling
    assert not pool.schedules_async
    assert plain.schedules_async


def plan_with(scheme: dict[str, Any]) -> Plan:
    plan = experiment().deployment.plan
    (pool,) = plan.pools
    assert pool.speculation is not None
    fields = pool.model_dump(exclude_none=True)
    fields["speculation"]["scheme"] = scheme
    return Plan.model_validate({"name": "p", "model": plan.model, "pools": [fields]})


def test_trees_run_and_lengths_that_vary_are_refused() -> None:
    drafting = experiment().deployment.drafting
    specs = experiment().deployment
    tree = {"kind": "static_tree", "nodes": [[1], [2], [1, 1], [1, 2]]}
    run = deploy(plan_with(tree), specs.model, specs.profiles, drafting=drafting)
    assert run.pools[0].spec.batching.policy == "sglang"
    varying = {"kind": "threshold", "max_tokens": 3, "stop_at": 0.5}
    with pytest.raises(Infeasible, match="drafts equally much in every round; choose scheme chain"):
        deploy(plan_with(varying), specs.model, specs.profiles, drafting=drafting)
