"""vLLM itself reads what is written for it: the argument parser of each release, and its checks of its configuration.

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/emit/test_vllm_parser.py

reads what is written for the newest; `make releases` unpacks those of the presets into .venv-vllm/releases, one folder
each (vllm-0.12, ...); RELEASES may name another place. No GPU is needed, the CPU build will do; on a CPU vLLM takes any
block size, and that one GPU backend or another refuses a block size or a dtype is not seen here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from simtune.emit import ENGINES
from simtune.errors import UsageError
from simtune.specs.catalog import load_engine, load_hardware, load_model, names
from simtune.specs.model import DenseFeedForward, FullAttention, Model, MoeFeedForward
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.preset import merged
from simtune.specs.schemes import ByBatch, Chain
from simtune.specs.study import Study
from simtune.tuner.space.candidates import PoolShape, space_of

PYTHON = os.environ.get("VLLM_PYTHON", "")
RELEASES = Path(os.environ.get("RELEASES", Path(PYTHON).parents[1] / "releases" if PYTHON else ""))
READER = Path(__file__).with_name("read_by_vllm.py")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEWEST = "newest"
OPTIONS: dict[str, dict[str, Any]] = {
    "cache": {"kv_cache": {"prefix_caching": True, "num_blocks": 9000}},
    "cache of fp8": {"kv_cache": {"dtype": "fp8"}},
    "watermark": {"kv_cache": {"watermark": 0.01}},
    "parallel": {"parallelism": {"tp": 2, "pp": 2}, "async_scheduling": False, "cuda_graphs": False},
    "asynchronous": {"async_scheduling": True},
    "asynchronous stages": {"parallelism": {"pp": 2}, "async_scheduling": True},
    "experts": {"parallelism": {"tp": 2, "attention_dp": 2, "expert_parallel": True}, "async_scheduling": False},
    "two batches": {
        "parallelism": {"tp": 1, "attention_dp": 2, "expert_parallel": True},
        "expert_exchange": "deepep",
        "overlap": "two_batches",
        "overlap_thresholds": {"decode_tokens": 64},
        "async_scheduling": False,
    },
    "experts by load": {
        "parallelism": {"tp": 2, "attention_dp": 2, "expert_parallel": True, "expert_replicas": 8},
        "async_scheduling": False,
    },
    "elastic experts": {
        "parallelism": {"attention_dp": 2, "expert_parallel": True, "expert_replicas": 8, "elastic_experts": True},
        "async_scheduling": False,
    },
    "cascade": {"cascade_attention": False, "kv_cache": {"prefix_caching": True}},
    "adapters": {"lora": {"rank": 32, "slots": 4, "host_slots": 20}},
    "priority": {"batching": {"policy": "vllm-priority", "max_num_seqs": 64, "max_num_batched_tokens": 512}},
    "whole prompts": {
        "batching": {"chunked_prefill": False, "max_num_batched_tokens": 16384},
        "max_model_len": 16384,
    },
    "long prompts": {"batching": {"long_prefill_token_threshold": 256}},
    "cadence": {"batching": {"prefill_schedule_interval": 4, "max_num_active_seqs": 8}},
    "limits of the queue": {"batching": {"max_num_queued_reqs": 300, "max_num_queued_tokens": 65536}},
    "first chunks": {"batching": {"scheduler_reserve_full_isl": False}},
    "quantised": {"weight_dtype": "fp8"},
    "messages of several tokens": {"stream_interval": 10},
    "tier": {"kv_cache": {"prefix_caching": True, "tiers": [{"name": "host", "bytes": 64e9, "bytes_per_s": 50e9}]}},
    "prefill": {"role": "prefill"},
    "images": {"encoder": {"tp_mode": "data", "disable_chunked_mm_input": True}},
}
OF_THE_CPU = ("on the CPU backend is not compatible with FP8 KV cache", "not supported with --kv-cache-dtype")
"""What some CPU builds say of a cache of fp8, after everything was read."""
OF_CUDA = "load balancing is only supported on CUDA devices"
"""What a build for the CPU says of experts by load, after everything was read."""
DRAFTERS = ("draft_model", "eagle", "eagle3", "ngram")
"""Those for which vLLM wants no package beside its own."""
RANGES = [{"first": 1, "last": 8, "tokens": 4}, {"first": 17, "last": 64, "tokens": 0}]
SCHEMES: dict[str, dict[str, Any]] = {
    "chain": {"kind": "chain", "tokens": 3},
    "by batch": {"kind": "by_batch", "max_tokens": 4, "ranges": RANGES},
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")]

Read = Callable[[list[tuple[str, Pool, Model]]], list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[NEWEST, *(name for name in names("engine") if name.startswith("vllm"))])
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != NEWEST and not (RELEASES / name).is_dir():
        pytest.skip(f"{RELEASES / name} is not there; make releases unpacks it")
    return name


@pytest.fixture
def read(release: str, tmp_path: Path) -> Read:
    """Gives what the release makes of settings files."""

    def read(cases: list[tuple[str, Pool, Model]]) -> list[dict[str, Any]]:
        asked = []
        for at, (settings, _, model) in enumerate(cases):
            folder = tmp_path / f"case-{at}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config_of(model)))
            (folder / "settings.yaml").write_text(settings)
            asked.append({"model": str(folder), "settings": str(folder / "settings.yaml")})
        (tmp_path / "cases.json").write_text(json.dumps(asked))
        own = {} if release == NEWEST else {"PYTHONPATH": str(RELEASES / release)}
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **own}
        run = subprocess.run(
            [PYTHON, READER, tmp_path / "cases.json"], cwd=tmp_path, env=os.environ | environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-4000:]
        answers: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
        assert len(answers) == len(cases)
        return answers

    return read


def config_of(model: Model, **more: Any) -> dict[str, Any]:
    """As much of a config.json as vLLM's checks look at."""
    (group,) = model.layers
    assert isinstance(group.attention, FullAttention)
    assert isinstance(group.feed_forward, DenseFeedForward | MoeFeedForward)
    moe = group.feed_forward.kind == "moe"
    return {
        "architectures": ["MixtralForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "mixtral" if moe else "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": model.hidden_size,
        "intermediate_size": group.feed_forward.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": group.attention.heads,
        "num_key_value_heads": group.attention.kv_heads,
        "head_dim": group.attention.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        **more,
    }


def plan_of(release: str, model: Model, pool: dict[str, Any]) -> Plan:
    """A plan of one pool, or of it and a decode pool; what it leaves out is as the release has it."""
    batching = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, **pool.get("batching", {})}
    pool = {"hardware": "h100-sxm", "instances": 1, "max_model_len": 32768, **pool, "batching": batching}
    if release != NEWEST:
        preset = load_engine(release).settings(load_hardware("h100-sxm").device, model)
        pool = {**merged(pool, preset), "engine": release}
    pools = [pool] if pool.get("role") is None else [{"name": "a", **pool}, {"name": "b", **pool, "role": "decode"}]
    link: dict[str, Any] = {} if pool.get("role") is None else {"link": {}}
    return Plan.model_validate({"name": "plan", "model": "a model", "pools": pools, **link})


def settings_of(plan: Plan, model: Model, drafts: dict[str, Model] | None = None) -> Iterator[tuple[str, Pool, Model]]:
    files = ENGINES["vllm"].files(plan, model, draft_models=drafts)
    for pool in plan.pools:
        yield files[f"engine/vllm-{pool.name}.yaml"], pool, model


def wrong(pool: Pool, found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where what vLLM reads is not what a pool says: (said, read) by key."""
    if "error" in found:
        if pool.kv_cache.dtype == "fp8" and any(words in found["error"] for words in OF_THE_CPU):
            return {}
        if pool.parallelism.expert_replicas is not None and OF_CUDA in found["error"]:
            return {}
        return {"error": (None, found["error"])}
    knows = ENGINES["vllm"].of(pool.engine).knows
    batching, cache, parallelism = pool.batching, pool.kv_cache, pool.parallelism
    said = {
        "tp": parallelism.tp,
        "pp": parallelism.pp,
        "attention_dp": parallelism.attention_dp,
        "expert_parallel": parallelism.expert_parallel,
        "expert_replicas": parallelism.expert_replicas,
        "elastic_experts": parallelism.elastic_experts,
        "max_num_seqs": batching.max_num_seqs,
        "max_num_batched_tokens": batching.max_num_batched_tokens,
        "chunked_prefill": batching.chunked_prefill,
        "policy": batching.policy.removeprefix("vllm-"),
        "watermark": cache.watermark if "watermark" in knows else None,
        "long_prefill_token_threshold": batching.long_prefill_token_threshold or 0,
        "scheduler_reserve_full_isl": (
            found.get("scheduler_reserve_full_isl")
            if batching.scheduler_reserve_full_isl is None or "scheduler_reserve_full_isl" not in knows
            else batching.scheduler_reserve_full_isl
        ),
        "block_size": cache.block_size,
        "num_blocks": cache.num_blocks,
        "memory_utilization": cache.memory_utilization,
        "prefix_caching": pool.stated("kv_cache.prefix_caching") is not False,
        "kv_dtype": "fp8" if cache.dtype == "fp8" else "auto",
        "quantization": pool.weight_dtype,
        "cuda_graphs": pool.cuda_graphs,
        "max_model_len": pool.max_model_len,
        "async_scheduling": pool.schedules_async,
        "connector": None if pool.role == "mixed" else "NixlConnector",
        "method": None if pool.speculation is None else pool.speculation.drafter.label,
        "drafts": None,
        "lora": None if pool.lora is None else [pool.lora.slots, pool.lora.rank, pool.lora.in_host],
        "by_batch": None,
    }
    scheme = None if pool.speculation is None else pool.speculation.scheme
    if isinstance(scheme, ByBatch):
        ranges = [[r.first, r.last, r.tokens] for r in scheme.ranges]
        said |= {"drafts": scheme.max_tokens, "by_batch": ranges}
    elif isinstance(scheme, Chain):
        said["drafts"] = scheme.tokens
    return {key: (value, found.get(key)) for key, value in said.items() if value != found.get(key)}


def settings_of_shape(engine: dict[str, Any], shape: PoolShape) -> dict[str, Any]:
    """Settings of instances of a shape, given those of an engine."""
    return {"hardware": shape.gpu, **engine}


def test_every_plan_that_an_example_may_choose(release: str, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, Pool, Model]] = []
    for path in sorted(EXAMPLES.glob("*/study.yaml")):
        monkeypatch.chdir(path.parent)
        study = Study.from_file(path)
        model = load_model(study.model)
        if len(model.layers) > 1 or (study.batching and study.batching.policy not in ENGINES["vllm"].policies):
            continue
        preset = {} if release == NEWEST else load_engine(release).settings(load_hardware("h100-sxm").device, model)
        engine = {} if release == NEWEST else {"engine": release}
        of_shape = partial(settings_of_shape, {**preset, **engine})
        for candidate in space_of(study).candidates:
            plan = candidate.plan(study, min(8192, model.max_position), of_shape)
            if any(pool.parallelism.pp > 1 and pool.schedules_async for pool in plan.pools):
                continue
            cases += settings_of(plan, model)
    answers = read(cases)
    assert len(cases) > 20
    assert [w for (_, pool, _), found in zip(cases, answers, strict=True) if (w := wrong(pool, found))] == []


def test_every_option_is_read_or_refused_with_reason(release: str, read: Read) -> None:
    model = load_model("mixtral-8x7b")
    said, refused = [], []
    for name, pool in OPTIONS.items():
        try:
            said += [(name, *case) for case in settings_of(plan_of(release, model, pool), model)]
        except UsageError:
            refused += [(name, *case) for case in settings_of(plan_of(NEWEST, model, pool), model)]
    answers = read([case[1:] for case in said + refused])
    assert {
        name: w for (name, _, read_as, _), found in zip(said, answers, strict=False) if (w := wrong(read_as, found))
    } == {}
    for (name, _, read_as, _), found in zip(refused, answers[len(said) :], strict=True):
        assert wrong(read_as, found), f"{name} is refused, and yet read: {found}"


def test_unknown_names_are_refused(release: str, read: Read) -> None:
    model = load_model("mixtral-8x7b")
    ((settings, pool, _),) = settings_of(plan_of(release, model, {}), model)
    lacking = {"watermark", "scheduler_reserve_full_isl"} - ENGINES["vllm"].of(pool.engine).knows
    lines = ["max-num-seqz: 8", *(f"{name.replace('_', '-')}: 0.01" for name in sorted(lacking))]
    answers = read([(f"{settings}{line}\n", pool, model) for line in lines])
    assert all("error" in found for found in answers), answers


def test_drafts_are_read_or_refused_with_reason(release: str, read: Read, tmp_path: Path) -> None:
    target, draft = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
    heads = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
    said, refused = [], []
    for kind in DRAFTERS:
        (head := tmp_path / kind).mkdir()
        more = {"architectures": [heads[kind]]} if kind in heads else {}
        (head / "config.json").write_text(json.dumps(config_of(draft if kind == "draft_model" else target, **more)))
        drafter = {
            "draft_model": {"kind": "draft_model", "model": "a draft"},
            "ngram": {"kind": "ngram", "lookup_min": 2, "lookup_max": 4},
        }.get(kind, {"kind": "eagle", "method": kind, "checkpoint": str(head)})
        drafts = {"a draft": draft.model_copy(update={"hf": str(head)})}
        for name, scheme in SCHEMES.items():
            for asynchronous in (False, True):
                speculation = {"drafter": drafter, "scheme": scheme, "acceptance": "mine"}
                pool = {"speculation": speculation, "async_scheduling": asynchronous}
                try:
                    ((settings, read_as, _),) = settings_of(plan_of(release, target, pool), target, drafts)
                    said.append(((kind, name, asynchronous), settings, read_as, target))
                except UsageError:
                    ((settings, read_as, _),) = settings_of(plan_of(NEWEST, target, pool), target, drafts)
                    refused.append(((kind, name, asynchronous), settings, read_as, target))
    answers = read([case[1:] for case in said + refused])
    differ = {case[0]: w for case, found in zip(said, answers, strict=False) if (w := wrong(case[2], found))}
    assert differ == {}
    for (drafts_of, _, read_as, _), found in zip(refused, answers[len(said) :], strict=True):
        assert wrong(read_as, found), f"{drafts_of} is refused, and yet read: {found}"
