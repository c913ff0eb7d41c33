"""Settings of a plan that change nothing are named; those that its engine's preset makes are not."""

from __future__ import annotations

from typing import Any, cast

import pytest

from simtune.costs.memory import Memory
from simtune.costs.protocol import StepCosts
from simtune.sim.deployment import Deployment
from simtune.sim.idle import idle_settings
from simtune.sim.pools import DeployedPool
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import Plan

H100 = load_hardware("h100-sxm")


def said(model: str, *pools: dict[str, Any], **plan: Any) -> list[str]:
    """What is said of a plan of these pools on H100s."""
    batching = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    given = [{"hardware": "h100-sxm", "instances": 1, "batching": batching, **pool} for pool in pools]
    checked = Plan.model_validate({"name": "idle", "model": model, "pools": given, **plan})
    deployed = tuple(
        # Neither memory nor costs are asked.
        DeployedPool(pool, H100, cast(Memory, None), cast(StepCosts, None), max_model_len=1, kv_block_bytes=1)
        for pool in checked.pools
    )
    return list(idle_settings(Deployment(checked, load_model(model), deployed)))


def test_a_norm_is_held_by_all_reduces_of_some_devices_only() -> None:
    assert said("llama-3.1-8b", {"fused": ["norm"], "parallelism": {"tp": 2}}) == []
    assert said("llama-3.1-8b", {"fused": ["norm", "rope"]}) == [
        "pools.0.fused: tp 1 has no all-reduce that could hold a norm; leave norm out, or raise tp"
    ]
    (sixteen,) = said("llama-3.1-70b", {"fused": ["norm"], "parallelism": {"tp": 16}})
    assert sixteen == f"pools.0.fused: no all-reduce of 16 {H100.device.name} holds a norm; leave norm out"
    assert said("llama-3.1-8b", {"fused": ["rope"]}) == []


@pytest.mark.parametrize(
    ("model", "parallelism", "words"),
    [
        ("llama-3.1-8b", {}, "llama-3.1-8b has no routed experts; leave it out"),
        ("gpt-oss-120b", {"tp": 2}, "one group has all tokens and exchanges none"),
        ("gpt-oss-120b", {"attention_dp": 2}, "set parallelism.expert_parallel"),
        ("gpt-oss-120b", {"attention_dp": 2, "expert_parallel": True}, None),
    ],
)
def test_tokens_are_exchanged_between_groups(model: str, parallelism: dict[str, Any], words: str | None) -> None:
    notes = said(model, {"expert_exchange": "all_gather", "parallelism": parallelism})
    if words is None:
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith("pools.0.expert_exchange: ")
        assert words in note
    assert said(model, {"parallelism": parallelism}) == []


def test_decode_pools_have_no_front_end_of_their_own() -> None:
    front = {"front_end": {"request_s": 0.001, "token_s": 1e-6}}
    pools = {"name": "p", "role": "prefill", **front}, {"name": "d", "role": "decode"}
    assert said("llama-3.1-8b", *pools, link={}) == []
    (note,) = said("llama-3.1-8b", pools[0], {**pools[1], **front}, link={})
    assert note == (
        "pools.1.front_end: requests come to a decode pool from prefill pools, past a front end of its own; "
        "leave it out"
    )


def test_what_a_preset_says_is_not_told() -> None:
    model, engine = load_model("llama-3.1-8b"), load_engine("vllm-0.24")
    settings = engine.settings(H100.device, model)
    assert settings["fused"] == ["norm"]
    decode = {"name": "d", "role": "decode", "engine": "vllm-0.24", **settings}
    prefill = {"name": "p", "role": "prefill", "engine": "vllm-0.24", **settings}
    assert said("llama-3.1-8b", prefill, decode, link={}) == []
    assert len(said("llama-3.1-8b", prefill, {**decode, "fused": ["norm", "rope"]}, link={})) == 1


def test_a_preset_of_ones_own_is_told_of_as_a_plan_is() -> None:
    assert len(said("llama-3.1-8b", {"engine": "ours", "fused": ["norm"]})) == 1


def test_a_host_that_nothing_hides_is_said_of_asynchronous_scheduling() -> None:
    host = {"step_s": 1e-3, "per_sequence_s": 1e-5}
    assert said("llama-3.1-8b", {"host": host, "async_scheduling": False}) == []
    for exposed in ("all", host):
        assert said("llama-3.1-8b", {"exposed_host": exposed}) == []
        assert said("llama-3.1-8b", {"exposed_host": exposed, "async_scheduling": False}) == [
            "pools.0.exposed_host: without asynchronous scheduling all of the host's time is exposed; leave it out, or "
            "set async_scheduling"
        ]
    preset = load_engine("vllm-0.10").settings(H100.device, load_model("llama-3.1-8b"))
    assert preset["exposed_host"]
    assert said("llama-3.1-8b", {"engine": "vllm-0.10", **preset}) == []


@pytest.mark.parametrize("overlap", ["two_batches", "split_sequence", "ladder"])
def test_overlap_without_communication_changes_nothing(overlap: str) -> None:
    (note,) = said("llama-3.1-8b", {"overlap": overlap})
    assert note.startswith("pools.0.overlap: ")
    assert "leave it out" in note
    notes = said("llama-3.1-8b", {"overlap": overlap, "parallelism": {"tp": 2}})
    assert bool(notes) == (overlap == "two_batches"), "two batches hide no all-reduce"
    wide = {"attention_dp": 2, "expert_parallel": True}
    assert said("gpt-oss-120b", {"overlap": overlap, "parallelism": wide}) == []


def test_replicas_of_experts_without_skew_change_nothing() -> None:
    wide = {"attention_dp": 2, "expert_parallel": True, "expert_replicas": 16}
    (note,) = said("gpt-oss-120b", {"parallelism": wide})
    assert note.startswith("pools.0.parallelism.expert_replicas: routing of gpt-oss-120b has no skew")
