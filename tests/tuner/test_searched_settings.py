"""Settings beside the classic dimensions, searched as fragments: each is in the plan, and does what it is there for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtune.specs.study import PoolChoices
from simtune.specs.workload import FixedLength, Poisson, SharedPrefix, Workload
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import Candidate, space_of
from tests.costs.made_up import model, moe
from tests.tuner.fragments import with_variants
from tests.tuner.test_variants import question

EXPERTS = model(layers=8, hidden=256, heads=8, kv_heads=4, feed_forward=moe())


def settled(asked: Question) -> tuple[dict[str, Candidate], PlanCache]:
    """The plan of each variant that fits, by the variant's name."""
    every = space_of(asked.study).candidates
    cache = PlanCache(asked, every)
    fitting = [plan for candidate in every if not isinstance(plan := cache.settled(candidate), Refused)]
    return {candidate.decoding.shape.variant: candidate for candidate in fitting}, cache


def of_experts(*fragments: dict[str, Any], **search: Any) -> Question:
    asked = replace(question(devices=4, **search), model=EXPERTS)
    return with_variants(asked, *fragments)


def step_s(asked: Question, variant: str, decodes: int = 8) -> float:
    """Seconds of a step in which some sequences decode."""
    plans, cache = settled(asked)
    return float(cache.costs(plans[variant].decoding).decode(decodes, 400)[0])


@pytest.mark.parametrize(
    "kind", ["least_outstanding", "least_tokens", "power_of_two", "prefix_aware", "session_affinity"]
)
def test_router(kind: str) -> None:
    asked = question({}, {"router": {"kind": kind}})
    plans, _ = settled(asked)
    label = f"router-{kind.replace('_', '-')}"
    assert {name: asked.plan(plan, 1024).router.kind for name, plan in plans.items()} == {
        "": "round_robin",
        label: kind,
    }
    assert plans[label].name.startswith(f"tp1-pp1-v-{label}-x2")
    # Only cores that are dealt requests in turn can stand for all.
    assert [asked.cores_apart(plan) for plan in plans.values()] == [True, False]


def test_decode_router_and_link() -> None:
    slow = {"link": {"bytes_per_s": 1e4}}
    layouts: dict[str, Any] = {"layouts": ("prefill-decode",), "devices": 2}
    asked = question({}, slow, {"decode_router": {"kind": "round_robin"}}, **layouts)
    study = asked.study.model_copy(update={"link": asked.study.link})
    plans = {c.decoding.shape.variant: asked.plan(c, 1024) for c in space_of(study).candidates}
    links = {name: plan.link for name, plan in plans.items()}
    assert links["bytes-per-s-10000.0"] is not None
    assert links["bytes-per-s-10000.0"].bytes_per_s == 1e4
    routers = {name: None if plan.decode_router is None else plan.decode_router.kind for name, plan in plans.items()}
    assert routers == {"": None, "bytes-per-s-10000.0": None, "decode-router-round-robin": "round_robin"}


def test_prefix_caching_raises_the_capacity_of_a_load_that_shares_prefixes() -> None:
    load = Workload(
        name="shared",
        requests=60,
        arrivals=Poisson(rate_rps=6.0),
        shared_prefix=SharedPrefix(groups=2, tokens=96),
        prompt=FixedLength(tokens=120),
        output=FixedLength(tokens=5),
    )
    asked = replace(question({}, {"kv_cache": {"prefix_caching": True}}), workload=load)
    plans, cache = settled(asked)
    rps = {name: cache.capacity(plan).rps for name, plan in plans.items()}
    assert rps["prefix-caching"] > 1.5 * rps[""]
    assert plans["prefix-caching"].name.endswith("-cached")


def test_share_of_the_memory() -> None:
    asked = question({}, {"kv_cache": {"memory_utilization": 0.6}})
    plans, cache = settled(asked)
    blocks = {name: cache.memory(plan.decoding).num_blocks for name, plan in plans.items()}
    assert blocks["memory-utilization-0.6"] < 0.7 * blocks[""]


def test_replicas_of_a_pool_and_of_experts() -> None:
    plans, _ = settled(question({}, {"instances": 1}))
    assert {name: plan.num_gpus for name, plan in plans.items()} == {"": 2, "instances-1": 1}
    asked = of_experts({}, {"parallelism": {"expert_replicas": 4}}, tp=(2,), expert_parallel=(True,))
    replicas = {c.decoding.shape.variant: asked.plan(c, 1024) for c in space_of(asked.study).candidates}
    assert replicas["expert-replicas-4"].pools[0].parallelism.expert_replicas == 4
    assert replicas[""].pools[0].parallelism.expert_replicas is None


def test_exchange_with_experts() -> None:
    gather = {"expert_exchange": "all_gather"}
    asked = of_experts({}, gather, attention_dp=(2,), expert_parallel=(True,))
    study = asked.study
    exchange = {
        c.decoding.shape.variant: asked.plan(c, 1024).pools[0].expert_exchange for c in space_of(study).candidates
    }
    assert exchange == {"": "deepep", "expert-exchange-all-gather": "all_gather"}


def test_policy_longest_request_and_graphs() -> None:
    fragments: dict[str, dict[str, Any]] = {
        "policy-sarathi": {"batching": {"policy": "sarathi"}},
        "max-model-len-512": {"max_model_len": 512},
        "no-cuda-graphs": {"cuda_graphs": False},
    }
    asked = question({}, *fragments.values())
    plans, cache = settled(asked)
    pools = {name: cache.pool(plan.decoding) for name, plan in plans.items()}
    assert pools["policy-sarathi"].batching.policy == "sarathi"
    assert pools["max-model-len-512"].max_model_len == 512
    assert not pools["no-cuda-graphs"].cuda_graphs
    assert step_s(asked, "no-cuda-graphs") >= step_s(asked, "")


def test_settings_of_one_role_leave_the_other_pool_as_it_is() -> None:
    fragment = {"decode": {"batching": {"max_num_seqs": 4}}, "prefill": {"kv_cache": {"memory_utilization": 0.5}}}
    asked = question({}, fragment, layouts=("prefill-decode",), decode=PoolChoices(max_num_seqs=(8,)))
    (plan,) = [asked.plan(c, 1024) for c in space_of(asked.study).candidates if c.decoding.shape.variant]
    prefill, decode = plan.pools
    assert (prefill.batching.max_num_seqs, decode.batching.max_num_seqs) == (16, 4)
    assert (prefill.kv_cache.memory_utilization, decode.kv_cache.memory_utilization) == (0.5, 0.92)


def test_a_fragment_that_helps_is_chosen() -> None:
    asked = question(
        {"cuda_graphs": False, "async_scheduling": False, "host": {"step_s": 0.02, "per_sequence_s": 0.0}}, {}
    )
    tuned = optimize(asked, jobs=1)
    assert tuned.chosen.candidate.decoding.shape.variant == ""
