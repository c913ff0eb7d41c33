"""What is said of a plan, of its neighbours, and of a model, follows from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.api import deploy_plan
from simtune.report.models import fits_on, weights
from simtune.report.neighbours import neighbours
from simtune.report.page import render
from simtune.report.plan_in_words import explain
from simtune.runs.run_reader import read_run
from simtune.specs.catalog import load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool

RunMaker = Callable[..., Path]


def test_a_plan_is_explained_by_its_own_numbers() -> None:
    batching = Batching(max_num_seqs=128, max_num_batched_tokens=2048)
    pool = Pool(
        hardware="h100-sxm",
        instances=2,
        parallelism=Parallelism(tp=2),
        batching=batching,
        kv_cache=KvCache(prefix_caching=True),
        max_model_len=8192,
    )
    deployment = deploy_plan(Plan(name="p", model="llama-3.1-8b", pools=(pool,)))
    (_, whole), (title, sentences) = explain(deployment)
    assert whole == (
        "llama-3.1-8b (8.0B parameters, bf16 weights) on 4 GPUs in 1 pool",
        "2 servers of 2 GPUs, 128 seats, 2,048 tokens a step",
        "requests are routed by round_robin",
    )
    assert title == "pool mixed"
    text = "\n".join(sentences)
    tokens = deployment.memory.num_blocks * 16
    assert "tp 2: every layer is cut over 2 GPUs" in text
    assert f"{tokens:,} tokens" in text
    assert "of which decodes take 6.2 % at most" in text
    assert "prompts that begin alike share their blocks" in text


def test_explanation_names_front_end_and_gpu_share() -> None:
    shared = {"hardware": "h100-sxm", "instances": 1, "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 2048}}
    shared |= {"max_model_len": 8192, "kv_cache": {"memory_utilization": 0.45}}
    half = {"processors": 0.5, "bandwidth": 0.4}
    pools = [
        {"name": "a", "role": "prefill", **shared, "share": half, "front_end": {"request_s": 0.002, "token_s": 3e-6}},
        {"name": "b", "role": "decode", **shared, "share": {**half, "beside": "a"}},
    ]
    links = [{"from": "a", "to": "b"}]
    plan = {"name": "p", "model": "llama-3.1-8b", "pools": pools, "links": links}
    (_, whole), (_, front), _ = explain(deploy_plan(Plan.model_validate(plan, strict=False)))
    assert "on 1 GPU in 2 pools" in whole[0]
    assert "links: KV caches go from a to b over a link of their own" in whole
    assert "front_end: requests pass it one by one, 2 ms each and 3 us for each prompt token" in front
    assert "share: 50.0 % of the processors and 40.0 % of the memory bandwidth of its GPUs" in front
    pool = {**shared, "kv_cache": {}, "research": {"offload": {"weights": 0.5}}, "parallelism": {"cp": 2}}
    (_, (_, sentences)) = explain(
        deploy_plan(Plan.model_validate({**plan, "links": None, "pools": [pool]}, strict=False))
    )
    assert "cp 2: groups of tp ranks share every sequence, each with 1/2 of its tokens and KV cache" in sentences
    assert "offload: 50.0 % of the weights and 0.0 % of the KV cache stand in host memory" in sentences


@pytest.mark.parametrize(
    ("model", "pool", "said"),
    [
        ("llama-3.1-8b", {"parallelism": {"pp": 2}}, "pp 2: the layers are cut into 2 stages that work on batches of"),
        (
            "llama-3.1-8b",
            {
                "speculation": {
                    "drafter": {"kind": "ngram", "lookup_max": 3},
                    "scheme": {"kind": "chain", "tokens": 3},
                    "acceptance": "eagle3-llama-3.1-8b",
                },
                "async_scheduling": False,
            },
            "speculation: drafts of ngram",
        ),
        (
            "qwen3-30b-a3b",
            {"parallelism": {"tp": 2, "expert_parallel": True, "expert_replicas": 8}},
            "expert_replicas 8: experts are placed by their load, the busiest more than once",
        ),
        (
            "qwen3-30b-a3b",
            {
                "parallelism": {
                    "attention_dp": 2,
                    "expert_parallel": True,
                    "expert_replicas": 8,
                    "elastic_experts": True,
                }
            },
            "elastic_experts: an instance goes on with fewer ranks if some fail or leave",
        ),
        (
            "qwen3-30b-a3b",
            {"parallelism": {"attention_dp": 2}, "research": {"afd": {"ffn_devices": 2}}},
            "afd: feed-forward blocks are on 2 GPUs of their own; ",
        ),
    ],
)
def test_explanation_names_parallelism_and_drafter(model: str, pool: dict[str, Any], said: str) -> None:
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    whole = {"hardware": "h100-sxm", "instances": 1, "max_model_len": 2048, "batching": batching, **pool}
    plan = Plan.model_validate({"name": "p", "model": model, "pools": [whole]}, strict=False)
    (_, (_, sentences)) = explain(deploy_plan(plan))
    assert any(sentence.startswith(said) for sentence in sentences), sentences


def test_explanation_names_role_control() -> None:
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    pools = [
        {
            "name": role,
            "role": role,
            "hardware": "h100-sxm",
            "instances": 2,
            "max_model_len": 2048,
            "batching": batching,
        }
        for role in ("prefill", "decode")
    ]
    control = {"every_s": 2.0, "prefill": {"high": 4.0}, "decode": {"high": 4.0}}
    plan = {"name": "p", "model": "llama-3.1-8b", "pools": pools, "link": {}, "control": control}
    (_, whole), *_ = explain(deploy_plan(Plan.model_validate(plan, strict=False)))
    assert "control: every 2 s one instance may take the other role" in whole


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"kind": "rate", "requests_per_s": 2.5}, "every 180 s one for each 2.5 requests/s of the last interval"),
        (
            {"kind": "thresholds", "watch": "waiting", "up": 4, "down": 0},
            "every 5 s one more if waiting of any reaches 4, one less if all are at 0 or less",
        ),
        (
            {"kind": "target", "watch": "kv_cache", "load": 0.5},
            "every 15 s as many as bring kv_cache to 0.5 each, within 10.0 %",
        ),
        (
            {"kind": "sla", "ttft_s": 1.0, "tpot_s": 0.05},
            "every 5 s one more if all are estimated to miss a TTFT of 1 s or TPOT of 0.05 s, one less if the others",
        ),
        (
            {"kind": "saturation"},
            "every 60 s one more if less than 10.0 % of KV cache or 3 waiting requests are to spare",
        ),
    ],
)
def test_explanation_names_the_rule_of_autoscaling(rule: dict[str, Any], sentence: str) -> None:
    scaling = {"rule": rule, "startup_s": 90.0, "max_instances": 4}
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    pool = {"hardware": "h100-sxm", "instances": 2, "max_model_len": 2048, "batching": batching, "autoscaling": scaling}
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool]}, strict=False)
    (_, whole), (_, sentences) = explain(deploy_plan(plan))
    assert "on 4 GPUs in 1 pool" in whole[0]
    (words,) = (words for words in sentences if words.startswith("autoscaling"))
    assert sentence in words
    assert "1 to 4 instances, up 90 s after their start" in words


@pytest.mark.parametrize(("pause_s", "pause"), [(2.5, "2.5 s"), (None, "while experts are sent")])
def test_explanation_names_ranks_that_come_and_go(pause_s: float | None, pause: str) -> None:
    rule = {"kind": "rate", "requests_per_s": 2.0}
    pool = {
        "hardware": "h100-sxm", "instances": 1, "max_model_len": 2048,
        "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
        "parallelism": {"attention_dp": 4, "expert_parallel": True, "expert_replicas": 128, "elastic_experts": True},
        "autoscaling": {"rule": rule, "startup_s": 90.0, "min_ranks": 2, "pause_s": pause_s},
    }  # fmt: skip
    plan = Plan.model_validate({"name": "p", "model": "qwen3-30b-a3b", "pools": [pool]}, strict=False)
    _, (_, sentences) = explain(deploy_plan(plan))
    (words,) = (words for words in sentences if words.startswith("autoscaling"))
    assert "every 180 s one for each 2 requests/s of the last interval; 2 to 4 ranks in each instance" in words
    assert words.endswith(f"all ranks pause then, {pause}")


def test_neighbours_are_candidates_one_setting_away(make_run: RunMaker) -> None:
    run = read_run(make_run())
    chosen = run.candidates[0]
    steps = neighbours(run)
    assert {step.knob for step in steps} == {"tp", "pp", "instances", "max_num_seqs"}
    (fewer,) = [step for step in steps if step.knob == "max_num_seqs"]
    assert (fewer.chosen, fewer.value) == ("256", "128")
    (other,) = [c for c in run.candidates if c.candidate == chosen.candidate.replace("s256", "s128")]
    assert other.goodput_rps_per_gpu is not None
    assert chosen.goodput_rps_per_gpu is not None
    less = 100 * (1 - other.goodput_rps_per_gpu / chosen.goodput_rps_per_gpu)
    assert fewer.effect == f"{less:.1f} % less goodput per GPU"
    assert "One step of each setting" in render(run)
    assert neighbours(run._replace(candidates=())) == []


def test_a_model_is_shown_with_the_cards_it_fits_on() -> None:
    model = load_model("llama-3.1-70b")
    cards = dict(fits_on(model))
    assert cards["NVIDIA H100 SXM5 80GB"].startswith("2 x, ")
    assert cards["NVIDIA L4"].startswith(("8 x, ", "not on"))
    assert len(cards) == len(set(cards)) > 10
    assert weights(model) == "131.4 GiB"


def test_neighbour_equal_to_another_plan_has_the_effect_of_that_plan(make_run: RunMaker) -> None:
    run = read_run(make_run())
    chosen = next(c for c in run.candidates if c.status == "chosen")
    more = {"status": "infeasible", "max_num_seqs": chosen.max_num_seqs * 2}
    twin = chosen.model_copy(
        update={
            **more,
            "candidate": "twin",
            "reason": f"at 9.5 requests/s misses the SLO as {chosen.candidate} does: why",
        }
    )
    worse = chosen.model_copy(update={"status": "infeasible", "candidate": "worse", "reason": "TPOT", "tp": 64})
    less = twin.model_copy(
        update={"max_num_seqs": chosen.max_num_seqs // 2, "reason": "misses the SLO as worse does: why"}
    )
    effects = {step.value: step.effect for step in neighbours(run._replace(candidates=(chosen, twin, less, worse)))}
    assert effects[str(twin.max_num_seqs)] == "nothing changes: no limit that tells them apart is reached"
    assert effects[str(less.max_num_seqs)] == "TPOT (as the plan with worse)"
