"""Autoscaling as Dynamo's planner takes it: the configuration of `python3 -m dynamo.planner --config` (`PlannerConfig`
in ai-dynamo 1.6.1, dynamo/planner/config/planner_config.py).

One planner scales all pools of a deployment, by one target at one interval. It has no rule like that of the
HorizontalPodAutoscaler or of llm-d, whose programs have files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simtune.specs.autoscaling import Autoscaling, RateRule, SlaRule, ThresholdRule
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool

BACKENDS = {"dynamo.vllm": "vllm", "dynamo.sglang": "sglang", "dynamo.trtllm": "trtllm"}
"""Backends of the planner by the module of a worker."""
_RULES = {"rate": RateRule, "thresholds": ThresholdRule, "sla": SlaRule}
_KV_WATCHED = ("kv_cache", "kv_demand")


def planner_config(plan: Plan, module: str) -> dict[str, Any] | None:
    """Return the planner's configuration for the autoscaled pools of a plan, whose workers run `module`; None if no
    pool is autoscaled, or the planner has no such rule (`planner_refusal`)."""
    scaled = _scaled(plan)
    if not scaled or planner_refusal(plan, module):
        return None
    rules: dict[str, Any] = {pool.role: scaling.rule for pool, scaling in scaled}
    config = {
        "backend": BACKENDS[module],
        "mode": _mode(plan, scaled),
        "max_gpu_budget": plan.num_devices,
        **_least(scaled),
        **{f"{_planner_role(pool)}_engine_num_gpu": pool.devices for pool in plan.pools},
    }
    every_s = round(scaled[0][1].interval_s)
    first = scaled[0][1].rule
    if isinstance(first, RateRule):
        by_rate = {"optimization_target": "sla", "load_predictor": "constant", "enable_load_scaling": False}
        return {**config, **by_rate, "throughput_adjustment_interval_seconds": every_s}
    config |= {
        "enable_throughput_scaling": False, "enable_load_scaling": True, "load_adjustment_interval_seconds": every_s,
    }  # fmt: skip
    return {**config, **(_of_sla(rules) if isinstance(first, SlaRule) else _of_thresholds(rules))}


def planner_refusal(plan: Plan, module: str) -> str:
    """Return why Dynamo's planner cannot scale the pools of a plan as their rules do; empty if it can, or if no pool is
    autoscaled."""
    scaled = _scaled(plan)
    kinds = {scaling.rule.kind for _, scaling in scaled}
    if not scaled:
        return ""
    if any(scaling.scales_ranks for _, scaling in scaled):
        return "it starts and stops instances, and no ranks of them"
    if unknown := sorted(kinds - _RULES.keys()):
        return f"it has no rule like {unknown[0]}"
    if len(kinds) > 1 or len({scaling.interval_s for _, scaling in scaled}) > 1:
        return "it has one rule and one interval for all pools; give the pools the same"
    if module not in BACKENDS or len(plan.pools) > 2 or len({pool.role for pool in plan.pools}) < len(plan.pools):
        return "it scales one mixed pool, or one pool of each role"
    return next(filter(None, (_odd(pool, scaling) for pool, scaling in scaled)), "")


def left_to_planner(plan: Plan) -> Iterator[str]:
    """Yield what the planner does otherwise than the rules of a plan."""
    for pool, scaling in _scaled(plan):
        at = f"autoscaling of pool {pool.name}"
        if isinstance(scaling.rule, RateRule):
            yield (
                f"{at}: requests_per_s: the planner finds the rate of an instance by its own model of the engine, for "
                "ttft_ms and itl_ms, which are to be added to its config"
            )
        if scaling.window_s:
            yield f"{at}: stabilise_s: the planner has none"
        if isinstance(scaling.rule, ThresholdRule) and pool.role == "mixed":
            yield f"{at}: the planner reads the KV cache of mixed instances, with the prompts that wait"


def _scaled(plan: Plan) -> list[tuple[Pool, Autoscaling]]:
    return [(pool, pool.autoscaling) for pool in plan.pools if pool.autoscaling is not None]


def _odd(pool: Pool, scaling: Autoscaling) -> str:
    """Return why the planner has no rule like that of a pool; empty if it has."""
    if scaling.interval_s < 1 or scaling.interval_s != round(scaling.interval_s):
        return f"every_s of pool {pool.name} must be whole seconds, not {scaling.interval_s:g}"
    rule = scaling.rule
    if not isinstance(rule, ThresholdRule):
        return ""
    if pool.role == "prefill":
        return (
            "" if rule.watch == "prompt_tokens" else f"of prefill instances it watches prompt_tokens, not {rule.watch}"
        )
    if rule.watch not in _KV_WATCHED:
        return f"of {pool.role} instances it watches kv_cache or kv_demand, not {rule.watch}"
    return "" if rule.up <= 1 else f"of pool {pool.name} it takes up to 1 of the KV cache, not {rule.up:g}"


def _planner_role(pool: Pool) -> str:
    """Return the role by which the planner names a pool; mixed instances are `decode`."""
    return "prefill" if pool.role == "prefill" else "decode"


def _mode(plan: Plan, scaled: Sequence[tuple[Pool, Autoscaling]]) -> str:
    if plan.pools[0].role == "mixed":
        return "agg"
    return "disagg" if len(scaled) > 1 else scaled[0][0].role


def _least(scaled: Sequence[tuple[Pool, Autoscaling]]) -> dict[str, int]:
    """Return the least numbers of instances."""
    if scaled[0][0].role == "mixed":
        return {"min_endpoint": scaled[0][1].min_instances}
    return {f"{pool.role}_min_endpoint": scaling.min_instances for pool, scaling in scaled}


def _of_sla(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of rules by SLA in ms, the tightest of all pools, and the largest margin."""
    ttfts = [rule.ttft_s for rule in rules.values() if rule.ttft_s is not None]
    tpots = [rule.tpot_s for rule in rules.values() if rule.tpot_s is not None]
    limits = {"ttft_ms": ttfts, "itl_ms": tpots}
    return {
        "optimization_target": "sla",
        **{key: 1e3 * min(values) for key, values in limits.items() if values},
        "load_scaling_down_sensitivity": round(100 * min(rule.sensitivity for rule in rules.values())),
    }


def _of_thresholds(rules: Mapping[str, ThresholdRule]) -> dict[str, Any]:
    """Return thresholds in tokens of prompts that wait, and in percent of the KV cache."""
    config: dict[str, Any] = {"optimization_target": "load"}
    for role, rule in rules.items():
        if role == "prefill":
            config["prefill_scale_up_queue_tokens"] = round(rule.up)
            config["prefill_scale_down_queue_tokens"] = round(rule.down)
        else:
            config["decode_scale_up_kv_rate"] = 100 * rule.up
            config["decode_scale_down_kv_rate"] = 100 * rule.down
    return config
