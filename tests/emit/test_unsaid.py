"""What a plan sets and an engine cannot be told: the settings say so, and a plan that no engine has says why."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.emit import ENGINES, Emitter, engine_files, why_none
from simtune.emit.dynamo import _unsaid
from simtune.errors import UsageError
from simtune.runs.engine_files import launch_of
from simtune.specs.autoscaling import Autoscaling
from simtune.specs.catalog import load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import HostTimes
from simtune.specs.role_control import Pressure, RoleControl
from tests.emit.test_llama_cpp import plan_of

MODEL = load_model("llama-3.1-8b")
BATCHING = {"max_num_seqs": 8, "max_num_batched_tokens": 8192}
CONTROL = RoleControl(every_s=1.0, prefill=Pressure(high=4.0), decode=Pressure(high=4.0))
POOL = {"hardware": "h100-sxm", "instances": 2, "max_model_len": 8192}


def plan(*pools: dict[str, Any], **fields: Any) -> Plan:
    whole = [{**POOL, **pool, "batching": {**BATCHING, **pool.get("batching", {})}} for pool in pools]
    return Plan.model_validate({"name": "p", "model": MODEL.name, "pools": whole, **fields}, strict=False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_cache": {"watermark": 0.25}}, "kv_cache.watermark: 0.25 of the blocks stay free in the plan"),
        ({"batching": {"long_prefill_token_threshold": 64}}, "a long prompt may take a whole step here"),
        ({"batching": {"safety_margin": 0.1}}, "batching.safety_margin: the engine admits by a rule of its own"),
        ({"kv_cache": {"other_memory_gib": 3.0}}, "kv_cache.other_memory_gib: the engine measures what else takes"),
        (
            {"batching": {"chunk_pipeline": "fixed"}, "parallelism": {"pp": 2}},
            "batching.chunk_pipeline: one chunk of a prompt is in the pipeline at a time here",
        ),
        (
            {"batching": {"scheduler_reserve_full_isl": True}},
            "batching.scheduler_reserve_full_isl: the engine admits by a rule of its own",
        ),
        ({"host": HostTimes(step_s=1e-3, per_sequence_s=0.0)}, "host: its times are the engine's own"),
        ({"kv_cache": {"num_blocks": None}}, "give ctx-size what the device has room for"),
    ],
)
def test_the_settings_name_what_they_leave_out(changed: dict[str, Any], said: str) -> None:
    """Of an engine that knows none of them; it says nothing of what the plan does not set."""
    engine = ENGINES["llamacpp"]
    (base,) = plan_of(kv_cache={"num_blocks": 8193}).pools
    pool = base
    for key, fields in changed.items():
        whole = getattr(base, key).model_copy(update=fields) if isinstance(fields, dict) else fields
        pool = pool.model_copy(update={key: whole})
    assert not any(said in one for one in engine.unsaid(base))
    assert sum(said in one for one in engine.unsaid(pool)) == 1


@pytest.mark.parametrize(
    ("engine", "changed", "said"),
    [
        (
            "sglang",
            {"research": {"offload": {"weights": 0.5}}},
            "research.offload: is simulated only; remove it to have engine settings written",
        ),
        (
            "llamacpp",
            {"weight_dtype": "int4"},
            "weight_dtype: llama.cpp has no setting that quantises weights to int4; remove it, or name",
        ),
        (
            "vllm",
            {"weight_dtype": "nvfp4"},
            "weight_dtype: vLLM has no setting that quantises weights to nvfp4; it has one for fp8",
        ),
        (
            "llamacpp",
            {"parallelism": {"tp": 2, "expert_parallel": True}},
            "parallelism.expert_parallel: llama.cpp has none; leave it out",
        ),
        ("vllm", {"kv_cache": {"preemption": "swap"}}, "kv_cache.preemption: vLLM V1 recomputes what it preempts"),
        ("vllm", {"batching": {"policy": "sglang"}}, "batching.policy: vLLM has no sglang; it has vllm-fcfs"),
        (
            "vllm",
            {
                "speculation": {
                    "drafter": {"kind": "ngram", "lookup_max": 3},
                    "scheme": {"kind": "static_tree", "nodes": [[1], [2]]},
                    "acceptance": "a",
                }
            },
            "speculation: vLLM has no setting for a static_tree scheme: ",
        ),
        (
            "tensorrt-llm",
            {
                "speculation": {
                    "drafter": {"kind": "suffix"},
                    "scheme": {"kind": "chain", "tokens": 3},
                    "acceptance": "a",
                }
            },
            "speculation: TensorRT-LLM (commit 0004396, after 1.2.1): no suffix drafter is written here",
        ),
    ],
)
def test_what_an_engine_is_not_told_is_refused_by_its_key(engine: str, changed: dict[str, Any], said: str) -> None:
    (pool,), (plain,) = plan(changed).pools, plan({}).pools
    assert not any(one.startswith(said[:20]) for one in ENGINES[engine].refusals(plain, MODEL, {}))
    (told,) = (one for one in ENGINES[engine].refusals(pool, MODEL, {}) if one.startswith(said.partition(":")[0]))
    assert told.startswith(said)


def test_drafts_of_a_model_that_is_elsewhere_are_no_refusal_before_it_is_given() -> None:
    """Whether the engine can be told them is known once the draft model is."""
    drafts = {"drafter": {"kind": "draft_model", "model": "small"}, "scheme": {"kind": "chain", "tokens": 3}}
    (pool,) = plan({"speculation": {**drafts, "acceptance": "a"}, "batching": {"policy": "sglang"}}).pools
    assert not any("speculation" in one for one in ENGINES["sglang"].refusals(pool, MODEL, {}))


def test_an_engine_of_drafts_alone_writes_no_plan() -> None:
    class Drafts(Emitter):
        name, title, version = "drafts", "Drafts", "1"

    (pool,) = plan({}).pools
    assert not Drafts().schedules(pool)
    with pytest.raises(UsageError, match="Drafts: only speculative-decoding settings can be emitted"):
        Drafts().files(plan({}), MODEL)


def test_llama_cpp_hands_no_cache_over() -> None:
    (one, _) = plan({"role": "prefill", "name": "a"}, {"role": "decode", "name": "b"}, link={}).pools
    said = [*ENGINES["llamacpp"].refusals(one, MODEL, {})]
    assert "role: llama.cpp hands no KV cache from one server to another; take a mixed pool" in said


def test_dynamo_names_what_it_leaves_out() -> None:
    apart = plan(
        {"role": "prefill", "name": "a"},
        {"role": "decode", "name": "b", "hardware": "l40s"},
        link={},
        events=[{"kind": "failure", "pool": "a", "instance": 0, "at_s": 1.0}],
        router={"kind": "round_robin", "weights": {"a": 2.0}},
    )
    said = "\n".join(_unsaid(apart, MODEL))
    assert "events: what happens to instances is not a setting" in said
    assert "router: its options are Dynamo's own" in said
    assert "hardware: give the pods of each pool a node selector for its GPUs" in said
    alike = plan({"role": "prefill", "name": "a"}, {"role": "decode", "name": "b"}, link={})
    moving = "\n".join(_unsaid(alike.model_copy(update={"control": CONTROL}), MODEL))
    assert "control: instances keep their roles; Dynamo's planner scales pools by rules of its own" in moving
    assert "control" not in said
    scaling = Autoscaling.model_validate(
        {"rule": {"kind": "rate", "requests_per_s": 2.0}, "startup_s": 60.0, "max_instances": 4}
    )
    pools = tuple(pool.model_copy(update={"autoscaling": scaling}) for pool in alike.pools)
    assert "autoscaling" not in said
    assert any(one.startswith("autoscaling: an engine serves one instance") for one in ENGINES["vllm"].unsaid(pools[0]))
    assert "hardware" not in "\n".join(_unsaid(alike, MODEL))
    assert "events" not in "\n".join(_unsaid(alike, MODEL))


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        (("dual-queue",), "no engine has policy dual-queue"),
        (("skip-join-mlfq", "dual-queue"), "no engine has policy dual-queue or skip-join-mlfq"),
    ],
)
def test_a_plan_that_no_engine_has_says_why(policies: tuple[str, ...], why: str) -> None:
    one = plan(*({"name": f"pool{i}", "batching": {"policy": name}} for i, name in enumerate(policies)))
    assert engine_files(one, MODEL, 8, {}) == {}
    assert why_none(one) == why


def test_who_preempts_as_no_engine_does_has_none() -> None:
    swaps = plan({"kv_cache": {"preemption": "swap"}, "batching": {"policy": "sglang"}})
    assert why_none(swaps) == "no engine schedules and preempts as the plan does"
    assert why_none(plan({})) == "no engine has settings for its drafts"


def test_what_to_type_has_every_switch() -> None:
    settings = "enable-x: true\nprefix: false\nconfig: {a: 1}\nname: it's\n"
    typed = launch_of({"engine/vllm-mixed.yaml": settings}, None)
    assert typed == """vllm serve MODEL --enable-x --no-prefix --config '{"a": 1}' --name 'it'"'"'s'"""
    assert launch_of({"engine/launch.sh": "#!/bin/sh\n"}, None) == "#!/bin/sh\n"


def test_stages_are_told_to_nobody() -> None:
    one = plan({}, stages=[{"name": "see", "pool": "mixed", "seconds": 0.1}])
    assert engine_files(one, MODEL, 8, {}) == {}
    assert "stages" in why_none(one)
