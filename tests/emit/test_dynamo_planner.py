"""Autoscaling as Dynamo's planner takes it: the rules that it has, and why not where it has none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from simtune.emit import ENGINES
from simtune.emit.dynamo_planner import planner_config
from simtune.specs.catalog import load_model
from simtune.specs.plan import Plan

MODEL = load_model("llama-3.1-8b")
FIELDS = {
    "backend", "mode", "optimization_target", "max_gpu_budget", "min_endpoint", "prefill_min_endpoint",
    "decode_min_endpoint", "decode_engine_num_gpu", "prefill_engine_num_gpu", "ttft_ms", "itl_ms", "load_predictor",
    "enable_throughput_scaling", "enable_load_scaling", "throughput_adjustment_interval_seconds",
    "load_adjustment_interval_seconds", "load_scaling_down_sensitivity", "prefill_scale_up_queue_tokens",
    "prefill_scale_down_queue_tokens", "decode_scale_up_kv_rate", "decode_scale_down_kv_rate",
}  # fmt: skip
"""Fields of `PlannerConfig` of ai-dynamo 1.6.1 that are written; all of them were accepted by it."""


def plan_of(*scaled: tuple[str, dict[str, Any] | None], **keys: Any) -> Plan:
    """A plan with a pool of each role, of two GPUs an instance, scaled by a rule if there is one."""
    pools = []
    for role, rule in scaled:
        pool: dict[str, Any] = {
            "name": role,
            "role": role,
            "hardware": "h100-sxm",
            "instances": 2,
            "parallelism": {"tp": 2},
            "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
        }
        if rule is not None:
            pool["autoscaling"] = {"rule": rule, "startup_s": 60.0, "min_instances": 2, "max_instances": 4, **keys}
        pools.append(pool)
    link: dict[str, Any] = {} if len(pools) == 1 else {"link": {}}
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": pools, **link}, strict=False)


def manifest(plan: Plan) -> tuple[str, dict[str, Any]]:
    """The deployment, and the configuration of its planner; empty without one."""
    text = ENGINES["vllm"].files(plan, MODEL)["engine/dynamo.yaml"]
    service = yaml.safe_load(text)["spec"]["services"].get("Planner")
    if service is None:
        return text, {}
    assert service["componentType"] == "planner"
    container = service["extraPodSpec"]["mainContainer"]
    assert container["command"] == ["python3", "-m", "dynamo.planner"]
    option, config = container["args"]
    assert option == "--config"
    return text, json.loads(config)


def test_a_rate_is_the_throughput_based_mode() -> None:
    text, config = manifest(plan_of(("mixed", {"kind": "rate", "requests_per_s": 4.0})))
    assert config == {
        "backend": "vllm",
        "mode": "agg",
        "max_gpu_budget": 8,
        "min_endpoint": 2,
        "decode_engine_num_gpu": 2,
        "optimization_target": "sla",
        "load_predictor": "constant",
        "enable_load_scaling": False,
        "throughput_adjustment_interval_seconds": 180,
    }
    assert "requests_per_s: the planner finds the rate of an instance by its own model" in text


def test_thresholds_are_its_load_target() -> None:
    prefill = {"kind": "thresholds", "watch": "prompt_tokens", "up": 4096.0, "down": 400.0}
    decode = {"kind": "thresholds", "watch": "kv_demand", "up": 0.9, "down": 0.5}
    _, config = manifest(plan_of(("prefill", prefill), ("decode", decode)))
    assert config == {
        "backend": "vllm",
        "mode": "disagg",
        "max_gpu_budget": 16,
        "prefill_min_endpoint": 2,
        "decode_min_endpoint": 2,
        "prefill_engine_num_gpu": 2,
        "decode_engine_num_gpu": 2,
        "enable_throughput_scaling": False,
        "enable_load_scaling": True,
        "load_adjustment_interval_seconds": 5,
        "optimization_target": "load",
        "prefill_scale_up_queue_tokens": 4096,
        "prefill_scale_down_queue_tokens": 400,
        "decode_scale_up_kv_rate": 90.0,
        "decode_scale_down_kv_rate": 50.0,
    }
    _, alone = manifest(plan_of(("prefill", None), ("decode", decode)))
    assert (alone["mode"], alone["max_gpu_budget"]) == ("decode", 12)
    assert "prefill_min_endpoint" not in alone


def test_an_sla_is_given_in_milliseconds() -> None:
    prefill = {"kind": "sla", "ttft_s": 0.5, "sensitivity": 0.7}
    _, config = manifest(plan_of(("prefill", prefill), ("decode", {"kind": "sla", "tpot_s": 0.025})))
    keys = ("optimization_target", "ttft_ms", "itl_ms", "load_scaling_down_sensitivity")
    assert [config[key] for key in keys] == ["sla", 500.0, 25.0, 70]


@pytest.mark.parametrize(
    ("rule", "keys", "why"),
    [
        ({"kind": "target", "watch": "waiting", "load": 2.0}, {}, "it has no rule like target"),
        ({"kind": "saturation"}, {}, "it has no rule like saturation"),
        ({"kind": "rate", "requests_per_s": 1.0}, {"every_s": 2.5}, "every_s of pool mixed must be whole seconds"),
        (
            {"kind": "thresholds", "watch": "waiting", "up": 4.0, "down": 1.0},
            {},
            "of mixed instances it watches kv_cache or kv_demand, not waiting",
        ),
        (
            {"kind": "thresholds", "watch": "kv_demand", "up": 1.5, "down": 0.6},
            {},
            "of pool mixed it takes up to 1 of the KV cache, not 1.5",
        ),
    ],
)
def test_a_rule_that_the_planner_has_not_is_named(rule: dict[str, Any], keys: dict[str, Any], why: str) -> None:
    text, config = manifest(plan_of(("mixed", rule), **keys))
    assert config == {}
    assert f"autoscaling of pool mixed: replicas stay as they are here; of Dynamo's planner: {why}" in " ".join(
        line.removeprefix("#").strip() for line in text.splitlines()
    )


def test_pools_with_rules_of_their_own_have_no_planner() -> None:
    rate = {"kind": "rate", "requests_per_s": 4.0}
    text, config = manifest(plan_of(("prefill", rate), ("decode", {"kind": "sla", "tpot_s": 0.03})))
    assert config == {}
    assert "it has one rule and one interval for all pools" in text
    assert manifest(plan_of(("mixed", None)))[1] == {}


def test_all_that_is_written_is_a_field_of_the_planner() -> None:
    rules: list[dict[str, Any]] = [
        {"kind": "rate", "requests_per_s": 4.0},
        {"kind": "sla", "ttft_s": 0.5, "tpot_s": 0.025},
        {"kind": "thresholds", "watch": "kv_cache", "up": 0.9, "down": 0.5},
    ]
    for module, backend in (("dynamo.vllm", "vllm"), ("dynamo.sglang", "sglang"), ("dynamo.trtllm", "trtllm")):
        for rule in rules:
            config = planner_config(plan_of(("mixed", rule)), module)
            assert config is not None
            assert config["backend"] == backend
            assert config.keys() <= FIELDS
    assert planner_config(plan_of(("mixed", rules[0])), "other") is None
