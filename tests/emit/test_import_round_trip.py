"""What is written for an engine is read back as the same plan: pools, roles, ranks, batching, memory and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import engine_files
from simtune.emit.importing import Imported, ImportRequest, import_plan
from simtune.specs.catalog import load_model, load_plan
from simtune.specs.plan import Plan

EVERY = (
    "vllm-0.11",
    "vllm-0.33",
    "sglang-0.5",
    "sglang-0.5.23",
    "trtllm-1.2",
    "trtllm-1.4",
    "llamacpp",
    "transformers",
)
SEVERAL_GPUS = EVERY[:6]
DENSE, EXPERTS = "llama-3.1-8b", "mixtral-8x7b"
ACCEPTANCE = "eagle3-llama-3.1-8b"
SET: dict[str, Any] = {
    "max_model_len": 4096,
    "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 1024},
    "kv_cache": {"num_blocks": 30_000, "dtype": "fp8", "prefix_caching": False},
    "async_scheduling": False,
    "cuda_graphs": False,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft-model": {"kind": "draft_model", "model": "llama-3.2-1b"},
    "eagle": {"kind": "eagle", "method": "eagle3", "checkpoint": "org/head"},
    "mtp": {"kind": "eagle", "method": "mtp"},
    "medusa": {"kind": "medusa", "heads": 3, "checkpoint": "org/heads"},
    "ngram": {"kind": "ngram", "lookup_max": 4, "lookup_min": 4},
    "suffix": {"kind": "suffix"},
}
DRAFTS = [
    *(("vllm-0.33", drafter, {"kind": "chain", "tokens": 3}) for drafter in DRAFTERS if drafter != "medusa"),
    ("vllm-0.28", "medusa", {"kind": "chain", "tokens": 3}),
    *(("sglang-0.5.23", drafter, {"kind": "chain", "tokens": 3}) for drafter in ("draft-model", "eagle", "mtp")),
    *(("trtllm-1.4", drafter, {"kind": "chain", "tokens": 3}) for drafter in ("draft-model", "eagle", "mtp")),
    ("sglang-0.5.23", "eagle", {"kind": "dynamic_tree", "steps": 3, "topk": 4, "tokens": 8}),
    ("trtllm-1.4", "eagle", {"kind": "dynamic_tree", "steps": 3, "topk": 4, "tokens": 8}),
    ("vllm-0.33", "eagle", {"kind": "by_batch", "max_tokens": 4, "ranges": [
        {"first": 1, "last": 8, "tokens": 4}, {"first": 9, "last": 64, "tokens": 2}]}),
]  # fmt: skip


def plan_of(
    folder: Path, engine: str, *pools: dict[str, Any], model: str = DENSE, stage: dict[str, Any] | None = None
) -> Plan:
    rows = [{"hardware": "h100-sxm", "engine": engine, "instances": 1, **pool} for pool in pools]
    link: dict[str, Any] = {"link": {}} if len(pools) > 1 else {}
    data = {"schema": "simtune/plan@1", "name": "some.plan", "model": model, "pools": rows, **link}
    data |= {} if stage is None else {"stages": [{"name": "see", "pool": "mixed", **stage}]}
    (folder / "plan.yaml").write_text(yaml.safe_dump(data))
    return load_plan(str(folder / "plan.yaml"))


def written(folder: Path, plan: Plan, devices_per_node: int = 8) -> Path:
    drafts = {"llama-3.2-1b": load_model("llama-3.2-1b")}
    (folder / "engine").mkdir()
    for name, text in engine_files(plan, load_model(plan.model), devices_per_node, drafts).items():
        (folder / name).write_text(text)
    return folder / "engine"


def read(file: Path, engine: str | None, **more: Any) -> Imported:
    return import_plan(
        ImportRequest("h100-sxm", file.read_text(), file=str(file), folder=file.parent, engine=engine, **more)
    )


def same(folder: Path, plan: Plan, devices_per_node: int = 8, **more: Any) -> Imported:
    file = written(folder, plan, devices_per_node) / "launch.sh"
    imported = read(file, plan.pools[0].engine, **more)
    assert imported.plan.to_data() == plan.to_data()
    return imported


@pytest.mark.parametrize("engine", EVERY)
def test_a_preset(tmp_path: Path, engine: str) -> None:
    imported = same(tmp_path, plan_of(tmp_path, engine, {"instances": 3}))
    assert not [note for note in imported.notes if not note.startswith("ignored: ")]
    (tmp_path / "again.yaml").write_text(imported.text)
    assert load_plan(str(tmp_path / "again.yaml")) == imported.plan


@pytest.mark.parametrize("engine", SEVERAL_GPUS)
def test_what_a_plan_changes(tmp_path: Path, engine: str) -> None:
    interval = {} if engine == "vllm-0.11" else {"stream_interval": 4}
    weights = {} if "trtllm" in engine else {"weight_dtype": "fp8"}
    same(tmp_path, plan_of(tmp_path, engine, {**SET, **interval, **weights, "parallelism": {"tp": 2, "pp": 2}}))


def test_cascade_attention(tmp_path: Path) -> None:
    same(tmp_path, plan_of(tmp_path, "vllm-0.28", {"cascade_attention": True, "kv_cache": {"prefix_caching": True}}))


@pytest.mark.parametrize("options", [
    {"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8},
    {"attention_dp_enable_balance": True, "attention_dp_batching_wait_iters": 0},
])  # fmt: skip
def test_prompts_that_wait(tmp_path: Path, options: dict[str, Any]) -> None:
    same(tmp_path, plan_of(tmp_path, "trtllm-1.4", {"batching": {"options": options}}))


@pytest.mark.parametrize("engine", ["vllm-0.11", "vllm-0.33", "sglang-0.5", "sglang-0.5.23", "trtllm-1.4"])
@pytest.mark.parametrize("host_slots", [{}, {"host_slots": 100}])
def test_slots_for_adapters(tmp_path: Path, engine: str, host_slots: dict[str, int]) -> None:
    targets = {"targets": "attention"} if "trtllm" in engine and host_slots else {}
    lora = {"rank": 64, "slots": 12, **host_slots, **targets}
    same(tmp_path, plan_of(tmp_path, engine, {"lora": lora, "parallelism": {"tp": 2}}))


@pytest.mark.parametrize(("engine", "tier"), [
    ("vllm-0.33", {"bytes": 64.0 * 2**30, "fetched": "ahead"}),
    ("sglang-0.5.23", {"device_ratio": 3.0, "fetched": "beside"}),
    ("sglang-0.5.23", {"bytes_per_device": 32e9, "fetched": "beside", "written": "evicted"}),
    ("trtllm-1.4", {"bytes_per_device": 8e9, "written": "evicted"}),
])  # fmt: skip
def test_a_tier_in_host_memory(tmp_path: Path, engine: str, tier: dict[str, Any]) -> None:
    pool = {"kv_cache": {"prefix_caching": True, "tiers": [{"name": "host", **tier}]}, "parallelism": {"tp": 2}}
    imported = same(tmp_path, plan_of(tmp_path, engine, pool))
    assert any("at the rate of the hardware's link to it" in note for note in imported.notes)


@pytest.mark.parametrize("engine", ["vllm-0.33", "sglang-0.5.23"])
@pytest.mark.parametrize(("replicas", "elastic"), [(0, None), (8, None), (8, True)])
def test_experts_that_are_placed_by_load(tmp_path: Path, engine: str, replicas: int, elastic: bool | None) -> None:
    ranks = {"attention_dp": 8, "expert_parallel": True, "expert_replicas": replicas}
    parallelism = ranks if elastic is None else ranks | {"elastic_experts": elastic}
    same(tmp_path, plan_of(tmp_path, engine, {"parallelism": parallelism}, model=EXPERTS))


def test_two_batches_with_their_thresholds(tmp_path: Path) -> None:
    ranks = {"parallelism": {"tp": 1, "attention_dp": 8, "expert_parallel": True}, "expert_exchange": "deepep"}
    for number, thresholds in enumerate(({}, {"overlap_thresholds": {"decode_tokens": 64, "prefill_tokens": 1024}})):
        (tmp_path / str(number)).mkdir()
        pool = {**ranks, "overlap": "two_batches", **thresholds}
        same(tmp_path / str(number), plan_of(tmp_path / str(number), "vllm-0.33", pool, model=EXPERTS))


@pytest.mark.parametrize(("engine", "limits"), [
    ("vllm-0.33", {"max_num_queued_reqs": 300, "max_num_queued_tokens": 65_536}),
    ("sglang-0.5.23", {"max_queued_requests": 40}),
])  # fmt: skip
def test_limits_of_queues(tmp_path: Path, engine: str, limits: dict[str, int]) -> None:
    same(tmp_path, plan_of(tmp_path, engine, {"batching": limits}))


def test_what_is_said_of_llama_cpp_and_transformers(tmp_path: Path) -> None:
    pool = {"batching": {"max_num_seqs": 9, "max_num_batched_tokens": 512}, "kv_cache": {"num_blocks": 50_000}}
    for engine, more in (("llamacpp", {"max_model_len": 4096, "parallelism": {"pp": 4}}), ("transformers", {})):
        (tmp_path / engine).mkdir()
        seats = {} if engine == "llamacpp" else {"max_num_seqs": 256}
        batching = {**pool["batching"], **seats}
        same(tmp_path / engine, plan_of(tmp_path / engine, engine, {**pool, "batching": batching, **more}))


@pytest.mark.parametrize("engine", SEVERAL_GPUS)
@pytest.mark.parametrize(
    "cut", [{"tp": 4}, {"tp": 8, "expert_parallel": True}, {"tp": 2, "attention_dp": 4, "expert_parallel": True},
            {"tp": 1, "attention_dp": 8}]
)  # fmt: skip
def test_ranks(tmp_path: Path, engine: str, cut: dict[str, Any]) -> None:
    if "trtllm" in engine and "attention_dp" in cut:
        cut = {**cut, "tp": 1}
    same(tmp_path, plan_of(tmp_path, engine, {"parallelism": cut}, model=EXPERTS))


@pytest.mark.parametrize(("engine", "cut", "model"), [
    ("vllm-0.28", {"tp": 2, "prefill_context_parallel": 4, "expert_parallel": True}, "deepseek-v3"),
    ("vllm-0.33", {"tp": 4, "prefill_context_parallel": 2}, "deepseek-v3"),
    ("sglang-0.5.23", {"tp": 1, "prefill_context_parallel": 8, "expert_parallel": True}, "deepseek-v3"),
    ("sglang-0.5.23", {"tp": 1, "attention_dp": 2, "prefill_context_parallel": 4, "expert_parallel": True},
     "deepseek-v3"),
    ("sglang-0.5.23", {"tp": 2, "prefill_context_parallel": 4, "expert_parallel": True}, "deepseek-v3.2"),
    ("sglang-0.5.23", {"tp": 2, "prefill_context_parallel": 2}, EXPERTS),
])  # fmt: skip
def test_groups_that_divide_prompts(tmp_path: Path, engine: str, cut: dict[str, Any], model: str) -> None:
    same(tmp_path, plan_of(tmp_path, engine, {"parallelism": cut}, model=model))


@pytest.mark.parametrize("engine", SEVERAL_GPUS)
@pytest.mark.parametrize("devices_per_node", [8, 16])
def test_prefill_and_decode(tmp_path: Path, engine: str, devices_per_node: int) -> None:
    front = {"name": "front", "role": "prefill", "instances": 2, "parallelism": {"tp": 2}}
    back = {"name": "back.end", "role": "decode", "instances": 3, "parallelism": {"tp": 4}}
    same(tmp_path, plan_of(tmp_path, engine, front, {**back, "kv_cache": {"num_blocks": 40_000}}), devices_per_node)


@pytest.mark.parametrize("engine", ["sglang-0.5", "sglang-0.5.23"])
@pytest.mark.parametrize(
    "stage", [{"encoder": "weights", "devices": 1}, {"encoder": "data", "devices": 2, "instances": 2}]
)
def test_servers_that_encode(tmp_path: Path, engine: str, stage: dict[str, Any]) -> None:
    pool = {"instances": 2, "parallelism": {"tp": 2}}
    imported = same(tmp_path, plan_of(tmp_path, engine, pool, model="qwen2.5-vl-7b", stage=stage))
    assert not [note for note in imported.notes if not note.startswith("ignored: ")]


@pytest.mark.parametrize("engine", ["sglang-0.5.23", "vllm-0.33"])
@pytest.mark.parametrize("instances", [1, 7])
def test_servers_that_encode_in_front_of_prefill_servers(tmp_path: Path, engine: str, instances: int) -> None:
    """Also on two nodes: 4 + 2 + 7 GPUs."""
    pools = [{"name": "prefill", "role": "prefill", "instances": 2, "parallelism": {"tp": 2}},
             {"name": "decode", "role": "decode", "instances": 2}]  # fmt: skip
    stage = {"encoder": "weights", "devices": 1, "instances": instances, "pool": "prefill"}
    same(tmp_path, plan_of(tmp_path, engine, *pools, model="qwen2.5-vl-7b", stage=stage))


@pytest.mark.parametrize("encoder", ["weights", "data"])
def test_servers_of_vllm_that_encode(tmp_path: Path, encoder: str) -> None:
    stage = {"encoder": encoder, "devices": 1, "instances": 7}
    same(tmp_path, plan_of(tmp_path, "vllm-0.33", {"instances": 3}, model="qwen2.5-vl-7b", stage=stage))


def test_servers_that_encode_on_two_nodes(tmp_path: Path) -> None:
    stage = {"encoder": "data", "devices": 2, "instances": 5}
    same(tmp_path, plan_of(tmp_path, "sglang-0.5.23", {"instances": 3}, model="qwen2.5-vl-7b", stage=stage))


@pytest.mark.parametrize(("engine", "drafter", "scheme"), DRAFTS)
def test_drafts(tmp_path: Path, engine: str, drafter: str, scheme: dict[str, Any]) -> None:
    speculation = {"drafter": DRAFTERS[drafter], "scheme": scheme, "acceptance": ACCEPTANCE}
    plan = plan_of(tmp_path, engine, {"parallelism": {"tp": 2}, "speculation": speculation})
    same(tmp_path, plan, acceptance=ACCEPTANCE)


def test_drafts_without_acceptance_are_refused_or_left_out(tmp_path: Path) -> None:
    speculation = {"drafter": DRAFTERS["mtp"], "scheme": {"kind": "chain", "tokens": 1}, "acceptance": ACCEPTANCE}
    plan = plan_of(tmp_path, "vllm-0.33", {"speculation": speculation})
    file = written(tmp_path, plan) / "launch.sh"
    with pytest.raises(Exception, match="give --acceptance"):
        read(file, "vllm-0.33")
    assert read(file, "vllm-0.33", lenient=True).plan.pools[0].speculation is None


def test_layers_of_a_block_drafter_are_stated_by_the_user(tmp_path: Path) -> None:
    drafter = {"kind": "block", "layers": 5, "checkpoint": "org/block"}
    speculation = {"drafter": drafter, "scheme": {"kind": "chain", "tokens": 7}, "acceptance": ACCEPTANCE}
    plan = plan_of(tmp_path, "vllm-0.33", {"speculation": speculation})
    same(tmp_path, plan, acceptance=ACCEPTANCE, settings=["pools.0.speculation.drafter.layers=5"])


@pytest.mark.parametrize("engine", SEVERAL_GPUS[:4])
def test_a_dynamo_deployment(tmp_path: Path, engine: str) -> None:
    front = {"name": "front", "role": "prefill", "instances": 2, "parallelism": {"tp": 2}}
    plan = plan_of(tmp_path, engine, front, {"name": "back", "role": "decode", **{**SET, "async_scheduling": True}})
    imported = read(written(tmp_path, plan) / "dynamo.yaml", engine, name="some.plan")
    assert imported.plan.to_data() == plan.to_data()


@pytest.mark.parametrize("engine", EVERY)
def test_a_settings_file(tmp_path: Path, engine: str) -> None:
    plan = plan_of(tmp_path, engine, {"name": "pool.1"})
    (file,) = written(tmp_path, plan).glob("*-pool.1.yaml")
    assert read(file, engine, model=DENSE).plan.to_data() == plan.to_data()


@pytest.mark.parametrize("engine", ["vllm-0.11", "sglang-0.5", "llamacpp", "transformers"])
def test_the_release_is_that_of_the_files(tmp_path: Path, engine: str) -> None:
    plan = plan_of(tmp_path, engine, {})
    assert read(written(tmp_path, plan) / "launch.sh", None).plan.pools[0].engine == engine


def test_without_its_router_a_role_is_asked_for_or_stated(tmp_path: Path) -> None:
    front = {"name": "front", "role": "prefill", "parallelism": {"tp": 2}}
    plan = plan_of(tmp_path, "vllm-0.33", front, {"name": "back", "role": "decode"})
    file = written(tmp_path, plan) / "launch.sh"
    (file.parent / "router.sh").unlink()
    with pytest.raises(Exception, match="give --role POOL=prefill"):
        read(file, None)
    imported = read(file, None, roles={"front": "prefill", "back": "decode"})
    assert imported.plan.to_data() == plan.to_data()
