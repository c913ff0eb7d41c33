"""What a plan sets and an engine cannot be told: the settings say so, and a plan that no engine has says why."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.emit import ENGINES, engine_files, why_none
from simtune.emit.dynamo import _unsaid
from simtune.specs.catalog import load_model
from simtune.specs.plan import Plan
from tests.emit.test_llama_cpp import plan_of

MODEL = load_model("llama-3.1-8b")
BATCHING = {"max_num_seqs": 8, "max_num_batched_tokens": 8192}
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
        ({"kv_cache": {"num_blocks": None}}, "give ctx-size what the device has room for"),
    ],
)
def test_the_settings_name_what_they_leave_out(changed: dict[str, Any], said: str) -> None:
    """Of an engine that knows none of them; it says nothing of what the plan does not set."""
    engine = ENGINES["llamacpp"]
    (base,) = plan_of(kv_cache={"num_blocks": 8193}).pools
    ((key, fields),) = changed.items()
    pool = base.model_copy(update={key: getattr(base, key).model_copy(update=fields)})
    assert not any(said in one for one in engine.unsaid(base))
    assert sum(said in one for one in engine.unsaid(pool)) == 1


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
    )
    said = "\n".join(_unsaid(apart, MODEL))
    assert "events: what happens to instances is not a setting" in said
    assert "hardware: give the pods of each pool a node selector for its GPUs" in said
    alike = plan({"role": "prefill", "name": "a"}, {"role": "decode", "name": "b"}, link={})
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


def test_stages_are_told_to_nobody() -> None:
    one = plan({}, stages=[{"name": "see", "pool": "mixed", "seconds": 0.1}])
    assert engine_files(one, MODEL, 8, {}) == {}
    assert "stages" in why_none(one)
