"""Whole plans in the words of SGLang and TensorRT-LLM: what is written is what the plan says, or it is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import ENGINES, engine_files, engine_for
from simtune.errors import UsageError
from simtune.runs.engine_files import launch_of
from simtune.specs.catalog import load_hardware, load_model, load_plan
from simtune.specs.plan import Plan
from simtune.specs.preset import merged

MODEL = load_model("llama-3.1-8b")
PLAN: dict[str, Any] = {
    "schema": "simtune/plan@1",
    "name": "p",
    "model": "llama-3.1-8b",
    "pools": [{"hardware": "h100-sxm", "instances": 2, "max_model_len": 8192, "parallelism": {"tp": 2}}],
}


def plan_of(folder: Path, engine: str, **pool: Any) -> Plan:
    (folder / "plan.yaml").write_text(
        yaml.safe_dump({**PLAN, "pools": [merged(pool, {**PLAN["pools"][0], "engine": engine})]})
    )
    return load_plan(str(folder / "plan.yaml"))


def written(plan: Plan, engine: str) -> dict[str, Any]:
    files = engine_files(plan, MODEL, 8, {})
    dynamo = {"engine/dynamo.yaml"} if engine != "tensorrt-llm" else set()
    assert set(files) == {f"engine/{engine}-mixed.yaml", "engine/launch.sh"} | dynamo
    checked = subprocess.run(["sh", "-n"], input=files["engine/launch.sh"], text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    settings: dict[str, Any] = yaml.safe_load(files[f"engine/{engine}-mixed.yaml"])
    return settings


@pytest.mark.parametrize("preset", ["sglang-0.5", "trtllm-1.2", "vllm-0.24"])
def test_files_of_servers_alone_make_the_same_commands(tmp_path: Path, preset: str) -> None:
    plan = plan_of(tmp_path, preset)
    every, servers = (engine_files(plan, MODEL, 8, {}, servers_only=only) for only in (False, True))
    assert servers.items() <= every.items()
    assert ("engine/dynamo.yaml" in servers) == (preset == "sglang-0.5")
    assert launch_of({**servers}, MODEL.hf) == launch_of({**every}, MODEL.hf)


def test_sglang(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "sglang-0.5", kv_cache={"num_blocks": 100_001, "prefix_caching": False})
    assert written(plan, "sglang") == {
        "tp-size": 2,
        "pp-size": 1,
        "max-running-requests": 2048,
        "chunked-prefill-size": 8192,
        "context-length": 8192,
        "mem-fraction-static": 0.87,
        "max-total-tokens": 100_001,
        "page-size": 1,
        "kv-cache-dtype": "auto",
        "schedule-policy": "fcfs",
        "disable-radix-cache": True,
    }


def test_sglang_is_told_what_the_plan_changes(tmp_path: Path) -> None:
    changed = {
        "batching": {"chunked_prefill": False, "options": {"schedule_conservativeness": 0.5}},
        "kv_cache": {"dtype": "fp8"},
        "async_scheduling": False,
        "cuda_graphs": False,
    }
    settings = written(plan_of(tmp_path, "sglang-0.5", **changed), "sglang")
    assert (settings["chunked-prefill-size"], settings["max-prefill-tokens"]) == (-1, 8192)
    assert settings["schedule-conservativeness"] == 0.5
    assert settings["kv-cache-dtype"] == "fp8_e4m3"
    assert settings["disable-overlap-schedule"]
    assert settings["disable-decode-cuda-graph"]
    assert settings["disable-prefill-cuda-graph"]


def test_tensorrt_llm(tmp_path: Path) -> None:
    assert written(plan_of(tmp_path, "trtllm-1.2", kv_cache={"prefix_caching": False}), "tensorrt-llm") == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "enable_attention_dp": False,
        "max_batch_size": 2048,
        "max_num_tokens": 8192,
        "max_seq_len": 8192,
        "enable_chunked_prefill": False,
        "disable_overlap_scheduler": False,
        "kv_cache_config": {
            "free_gpu_memory_fraction": 0.9,
            "tokens_per_block": 32,
            "enable_block_reuse": False,
            "dtype": "auto",
        },
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 512},
    }


@pytest.mark.parametrize(
    ("preset", "engine", "option"),
    [
        ("sglang-0.5", "sglang", "stream-interval"),
        ("trtllm-1.2", "tensorrt-llm", "stream_interval"),
        ("vllm-0.33", "vllm", "stream-interval"),
    ],
)
def test_an_engine_sends_several_tokens_at_a_time(tmp_path: Path, preset: str, engine: str, option: str) -> None:
    assert option not in written(plan_of(tmp_path, preset), engine)
    assert written(plan_of(tmp_path, preset, stream_interval=10), engine)[option] == 10


def test_sglang_is_given_dynamic_chunks(tmp_path: Path) -> None:
    """Its smooth factor is no setting of its file."""
    chunks = {"batching": {"chunk_pipeline": "dynamic", "options": {"smooth_factor": 0.65}}, "parallelism": {"pp": 2}}
    plan = plan_of(tmp_path, "sglang-0.5", **chunks)
    assert written(plan, "sglang")["enable-dynamic-chunking"] is True
    text = engine_files(plan, MODEL, 8, {})["engine/sglang-mixed.yaml"]
    assert "batching.options.smooth_factor: set SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR to 0.65" in text
    fixed = plan_of(tmp_path, "sglang-0.5", parallelism={"pp": 2})
    assert "enable-dynamic-chunking" not in written(fixed, "sglang")


CADENCE = {"prefill_schedule_interval": 4, "max_num_active_seqs": 8}
ADAPTIVE = {"long_prefill_token_threshold": 256, "long_prefill_token_threshold_adaptive": True}


def test_vllm_is_given_the_cadence_of_prompts_by_the_releases_that_have_it(tmp_path: Path) -> None:
    given = {name.replace("_", "-"): value for name, value in (CADENCE | ADAPTIVE).items()}
    plan = plan_of(tmp_path, "vllm-0.33", batching=CADENCE | ADAPTIVE)
    assert given.items() <= written(plan, "vllm").items()
    old = plan_of(tmp_path, "vllm-0.28", batching=CADENCE | ADAPTIVE)
    assert not {*given} & {*written(old, "vllm")} - {"long-prefill-token-threshold"}
    text = engine_files(old, MODEL, 8, {})["engine/vllm-mixed.yaml"]
    for reason in (
        "batching.prefill_schedule_interval: every step may have prompts here",
        "batching.max_num_active_seqs: as many requests run as there are seats here",
        "batching.long_prefill_token_threshold_adaptive: the threshold is the same whatever requests there are here",
    ):
        assert f"# Not said here: {reason}" in text
        assert reason not in engine_files(plan, MODEL, 8, {})["engine/vllm-mixed.yaml"]


@pytest.mark.parametrize(("preset", "pool", "message"), [
    ("vllm-0.33", {}, "vLLM runs two batches only if data-parallel ranks exchange tokens with experts by DeepEP"),
    ("vllm-0.10", {}, "two batches of vLLM 0.10 were not checked"),
    ("sglang-0.5.23", {}, "SGLang is not set to run two batches here"),
    ("trtllm-1.4", {}, "TensorRT-LLM is not set to run two batches here"),
])  # fmt: skip
def test_two_batches_are_refused_where_they_cannot_be(
    tmp_path: Path, preset: str, pool: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        engine_files(plan_of(tmp_path, preset, overlap="two_batches", **pool), MODEL, 8, {})


def test_cascade_attention_is_asked_for_in_releases_that_have_it(tmp_path: Path) -> None:
    pool = {"cascade_attention": True, "kv_cache": {"prefix_caching": True}}
    assert written(plan_of(tmp_path, "vllm-0.28", **pool), "vllm")["no-disable-cascade-attn"] is True
    for preset, message in (("vllm-0.33", "vLLM 0.33 has none"), ("sglang-0.5.23", "SGLang has none")):
        with pytest.raises(UsageError, match=f"cascade_attention: {message}"):
            engine_files(plan_of(tmp_path, preset, **pool), MODEL, 8, {})


def test_slots_for_adapters_are_written_for_engines_that_serve_them(tmp_path: Path) -> None:
    lora = {"rank": 32, "slots": 4, "host_slots": 50, "targets": "all"}
    vllm = written(plan_of(tmp_path, "vllm-0.33", lora=lora), "vllm")
    names = ["enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras"]
    assert [vllm[name] for name in names] == [True, 4, 32, 50]
    sglang = written(plan_of(tmp_path, "sglang-0.5.23", lora=lora), "sglang")
    names = ["enable-lora", "max-loras-per-batch", "max-lora-rank", "max-loaded-loras", "lora-target-modules"]
    assert [sglang[name] for name in names] == [True, 4, 32, 50, "all"]
    for preset, engine in (("vllm-0.33", "vllm"), ("sglang-0.5.23", "sglang")):
        files = engine_files(plan_of(tmp_path, preset, lora=lora | {"targets": "attention"}), MODEL, 8, {})
        text = files[f"engine/{engine}-mixed.yaml"]
        assert "lora.targets: add --lora-target-modules q_proj k_proj v_proj o_proj" in text
        assert "lora-target-modules" not in yaml.safe_load(text)
    assert written(plan_of(tmp_path, "trtllm-1.4", lora=lora), "tensorrt-llm")["lora_config"] == {
        "max_lora_rank": 32,
        "max_loras": 4,
        "max_cpu_loras": 50,
        "lora_target_modules": ["attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h"],
    }
    with pytest.raises(UsageError, match=r"lora: llama.cpp is not set to serve adapters here; remove it"):
        engine_files(plan_of(tmp_path, "llamacpp", lora=lora), MODEL, 8, {})


def test_limits_of_queues_are_left_out_for_engines_without_them(tmp_path: Path) -> None:
    limits = {"max_num_queued_reqs": 300, "max_num_queued_tokens": 65_536}
    for preset, engine in (("vllm-0.28", "vllm"), ("sglang-0.5.23", "sglang"), ("trtllm-1.4", "tensorrt-llm")):
        files = engine_files(plan_of(tmp_path, preset, batching=limits), MODEL, 8, {})
        text = files[f"engine/{engine}-mixed.yaml"]
        assert "# Not said here: batching.max_num_queued_reqs: any number of requests is queued here" in text
        assert "300" not in [str(value) for value in yaml.safe_load(text).values()]


HOST = {"name": "host", "bytes": 64e9, "bytes_per_s": 50e9}


def test_published_caches_are_written_by_their_sizes(tmp_path: Path) -> None:
    """Two GPUs: LMCache's 5 GiB are of each; HiCache's ratio is SGLang's own option."""

    def settings(preset: str, engine: str, tiers: str) -> dict[str, Any]:
        return written(plan_of(tmp_path, preset, kv_cache={"prefix_caching": True, "tiers": tiers}), engine)

    assert settings("vllm-0.33", "vllm", "lmcache")["kv-offloading-size"] == 10.0
    hicache = settings("sglang-0.5.23", "sglang", "hicache")
    assert hicache["enable-hierarchical-cache"] is True
    assert hicache["hicache-ratio"] == 2.0
    assert "hicache-size" not in hicache
    assert "kv-offloading-size" not in settings("vllm-0.33", "vllm", "hicache")


def test_a_tier_in_host_memory_is_written(tmp_path: Path) -> None:
    tiers = {"tiers": [HOST, {"name": "store", "bytes_per_s": 5e9, "shared": True}]}
    for engine, preset, wanted in (
        ("vllm", "vllm-0.33", {"kv-offloading-size": 59.6046}),
        (
            "sglang",
            "sglang-0.5",
            {"enable-hierarchical-cache": True, "hicache-size": 32, "hicache-write-policy": "write_through"},
        ),
    ):
        plan = plan_of(tmp_path, preset, kv_cache=tiers)
        assert wanted.items() <= written(plan, engine).items()
        text = engine_files(plan, MODEL, 8, {})[f"engine/{engine}-mixed.yaml"]
        assert "kv_cache.tiers: store is not set here; the engine keeps nothing in it" in text
        assert "tiers: host" not in text
    plan = plan_of(tmp_path, "trtllm-1.2", kv_cache={"tiers": [{**HOST, "written": "evicted"}]})
    assert written(plan, "tensorrt-llm")["kv_cache_config"]["host_cache_size"] == 32_000_000_000
    plan = plan_of(tmp_path, "vllm-0.11", kv_cache=tiers)
    assert "kv-offloading-size" not in written(plan, "vllm")


def test_vllm_before_release_12_sends_every_token(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "vllm-0.11", stream_interval=10)
    text = engine_files(plan, MODEL, 8, {})["engine/vllm-mixed.yaml"]
    assert "stream-interval" not in yaml.safe_load(text)
    assert "stream_interval: every token is sent on its own here" in text


def test_tensorrt_llm_drafts_under_a_key_of_their_own(tmp_path: Path) -> None:
    speculation = {
        "drafter": {"kind": "eagle", "method": "eagle3", "checkpoint": "org/head", "draft_vocab_size": 32000},
        "scheme": {"kind": "chain", "tokens": 3},
        "acceptance": "eagle3-llama-3.1-8b",
    }
    plan = plan_of(tmp_path, "trtllm-1.2").model_copy()
    pool = plan.pools[0].model_validate({**plan.pools[0].model_dump(exclude_none=True), "speculation": speculation})
    plan = plan.model_copy(update={"pools": (pool,)})
    settings = yaml.safe_load(ENGINES["tensorrt-llm"].files(plan, MODEL)["engine/tensorrt-llm-mixed.yaml"])
    assert settings["speculative_config"] == {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "org/head",
    }


@pytest.mark.parametrize("engine", ["sglang-0.5", "trtllm-1.2", "vllm-0.24"])
def test_a_plan_is_written_for_the_engine_it_names(engine: str, tmp_path: Path) -> None:
    policy = plan_of(tmp_path, engine).pools[0].batching.policy
    emitter = engine_for(policy)
    assert emitter is not None
    assert emitter.name == {"sglang-0.5": "sglang", "trtllm-1.2": "tensorrt-llm", "vllm-0.24": "vllm"}[engine]


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_what_an_engine_does_not_have_is_refused(engine: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "vllm-0.24", kv_cache={"dtype": "int8", "preemption": "swap"})
    with pytest.raises(UsageError) as refused:
        ENGINES[engine].files(plan, MODEL)
    assert [line.split(": ")[2] for line in str(refused.value).splitlines()] == [
        "batching.policy",
        "kv_cache.preemption",
        "kv_cache.dtype",
    ]


def test_groups_of_several_ranks_are_refused_by_tensorrt_llm(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "trtllm-1.2", parallelism={"attention_dp": 2, "expert_parallel": True})
    with pytest.raises(UsageError, match="set tp to 1"):
        ENGINES["tensorrt-llm"].files(plan, load_model("mixtral-8x7b"))


def test_the_device_decides_what_is_set_aside() -> None:
    from simtune.specs.catalog import load_engine

    preset = load_engine("sglang-0.5")
    budgets = {
        name: preset.settings(load_hardware(name).device, MODEL)["batching"]["max_num_batched_tokens"]
        for name in ("rtx-4090", "l40s", "h100-sxm", "h200-sxm", "b200")
    }
    assert budgets == {"rtx-4090": 2048, "l40s": 4096, "h100-sxm": 8192, "h200-sxm": 8192, "b200": 16384}


def test_the_host_times_of_a_preset_are_the_engines_own(tmp_path: Path) -> None:
    emitter = ENGINES["sglang"]
    (preset,) = plan_of(tmp_path, "sglang-0.5").pools
    assert preset.host is not None
    assert not [one for one in emitter.unsaid(preset) if one.startswith("host: ")]
    (other,) = plan_of(tmp_path, "sglang-0.5", host={"step_s": 0.5}, exposed_host="all").pools
    assert [one for one in emitter.unsaid(other) if "host: " in one] == [
        "host: its times are the engine's own",
        "exposed_host: its times are the engine's own",
    ]


def test_tensorrt_llm_is_told_to_capture_no_graphs(tmp_path: Path) -> None:
    """Left out, the setting is the engine's default, which captures graphs."""
    settings = written(plan_of(tmp_path, "trtllm-1.4", cuda_graphs=False), "tensorrt-llm")
    assert settings["cuda_graph_config"] is None


def test_vllm_divides_images_over_ranks(tmp_path: Path) -> None:
    """As 0.33 has it; its cache of embeddings is as large as a step."""
    encoder = {"tp_mode": "data", "disable_chunked_mm_input": True, "cache_size": 40_000}
    plan = plan_of(tmp_path, "vllm-0.33", encoder=encoder)
    settings = written(plan, "vllm")
    assert (settings["mm-encoder-tp-mode"], settings["disable-chunked-mm-input"]) == ("data", True)
    text = engine_files(plan, MODEL, 8, {})["engine/vllm-mixed.yaml"]
    assert "encoder.cache_size: as many embeddings as max_num_batched_tokens here" in text
    plain = written(plan_of(tmp_path, "vllm-0.33", encoder={}), "vllm")
    assert not {"mm-encoder-tp-mode", "disable-chunked-mm-input"} & {*plain}
    limited = written(plan_of(tmp_path, "vllm-0.33", encoder={"limit_per_prompt": {"image": 4, "video": 0}}), "vllm")
    assert limited["limit-mm-per-prompt"] == '{"image": 4, "video": 0}'
    assert "limit-mm-per-prompt" not in plain
    with pytest.raises(UsageError, match=r"encoder\.limit_per_prompt: was not checked in vLLM 0\.10"):
        written(plan_of(tmp_path, "vllm-0.10", encoder={"limit_per_prompt": {"video": 0}}), "vllm")
    with pytest.raises(UsageError, match=r"encoder\.tp_mode: data was not checked in vLLM 0\.10"):
        written(plan_of(tmp_path, "vllm-0.10", encoder={"tp_mode": "data"}), "vllm")
    with pytest.raises(UsageError, match="encoder: SGLang is given no encoder settings here; remove it"):
        written(plan_of(tmp_path, "sglang-0.5", encoder={}), "sglang")


def test_tensorrt_llm_is_told_how_prompts_wait(tmp_path: Path) -> None:
    """Ranks that wait for one another, and prompts that wait for a fuller step."""
    options = {
        "attention_dp_enable_balance": True,
        "attention_dp_timeout_iters": 60,
        "batch_wait_timeout_iters": 40,
        "batch_wait_max_tokens_ratio": 0.8,
    }
    settings = written(plan_of(tmp_path, "trtllm-1.4", batching={"options": options}), "tensorrt-llm")
    assert settings["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 60}
    assert (settings["batch_wait_timeout_iters"], settings["batch_wait_max_tokens_ratio"]) == (40, 0.8)


EXPERTS = load_model("mixtral-8x7b")
RANKS = {"tp": 1, "attention_dp": 4, "expert_parallel": True, "expert_replicas": 4}


@pytest.mark.parametrize(
    ("engine", "parallelism", "why"),
    [
        (
            "sglang-0.5.23",
            {"expert_replicas": 2},
            "parallelism.expert_replicas: SGLang needs as many experts on each of 4 ranks, and 8 with 2 replicas are "
            "not; set it to 4",
        ),
        (
            "vllm-0.33",
            {"expert_replicas": 7},
            "parallelism.expert_replicas: vLLM needs as many experts on each of 4 ranks, and 8 with 7 replicas are "
            "not; set it to 8",
        ),
        ("vllm-0.11", {}, "parallelism.expert_replicas: vLLM 0.11 is not set to place experts by load here"),
        ("trtllm-1.4", {}, "after 1.2.1 is not set to place experts by load here; remove it"),
        ("vllm-0.12", {"elastic_experts": True}, "parallelism.elastic_experts: vLLM 0.12 has none; take release 0.17"),
        (
            "sglang-0.5",
            {"elastic_experts": True},
            "parallelism.elastic_experts: SGLang 0.5.14 was not checked; take release 0.5.23",
        ),
    ],
)
def test_a_placement_that_an_engine_lacks_is_refused(
    tmp_path: Path, engine: str, parallelism: dict[str, Any], why: str
) -> None:
    plan = plan_of(tmp_path, engine, parallelism={**RANKS, **parallelism})
    with pytest.raises(UsageError) as refused:
        engine_files(plan.model_copy(update={"model": EXPERTS.name}), EXPERTS, 8, {})
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm-0.33", "POST /scale_elastic_ep with new_data_parallel_size by the rule, first for 2 of the"),
        ("sglang-0.5.23", "ranks are neither added nor removed on request; every instance keeps"),
    ],
)
def test_who_has_to_add_and_remove_ranks_by_load_is_named(tmp_path: Path, engine: str, words: str) -> None:
    autoscaling = {"rule": {"kind": "rate", "requests_per_s": 2.0}, "startup_s": 60.0, "min_ranks": 2}
    plan = plan_of(tmp_path, engine, parallelism={**RANKS, "elastic_experts": True}, autoscaling=autoscaling)
    files = engine_files(plan, EXPERTS, 8, {})
    (text,) = (text for name, text in files.items() if name.endswith("-mixed.yaml"))
    ranks = plan.pools[0].parallelism.attention_dp
    assert f"{words} {ranks}" in text
    assert ("enable-elastic-ep: true" in text) == engine.startswith("vllm")
    dynamo = " ".join(line.removeprefix("#").strip() for line in files["engine/dynamo.yaml"].splitlines())
    assert "of Dynamo's planner: it starts and stops instances, and no ranks of them" in dynamo


def test_who_goes_on_with_fewer_ranks_is_named(tmp_path: Path) -> None:
    words = {"vllm-0.33": "POST /scale_elastic_ep; if one fails", "sglang-0.5.23": "none is removed on request"}
    for engine, said in words.items():
        plan = plan_of(tmp_path, engine, parallelism={**RANKS, "elastic_experts": True})
        files = engine_files(plan, EXPERTS, 8, {})
        (text,) = (text for name, text in files.items() if name.endswith("-mixed.yaml"))
        assert f"Not said here: parallelism.elastic_experts: ranks {'are' if 'vllm' in engine else 'may'}" in text
        assert said in text
