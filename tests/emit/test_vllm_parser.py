"""vLLM itself reads what is written for it: its argument parser, and the checks of its own configuration.

Needs vLLM 0.32 and is skipped without; no GPU is needed, vLLM's CPU build will do:

    python -m pytest tests/emit/test_vllm_parser.py -m slow

On a CPU vLLM switches asynchronous scheduling off after its checks and takes any block size; that one GPU backend or
another refuses a block size or a dtype is not seen here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.emit.vllm import VLLM_VERSION, Vllm
from simtune.specs.catalog import load_model
from simtune.specs.model import Model
from simtune.specs.plan import Plan, Pool
from simtune.specs.study import Study
from simtune.tuner.space import space_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Read = Callable[..., list[tuple[Pool, Any, Any]]]


def config_of(model: Model) -> dict[str, Any]:
    """As much of a config.json as vLLM's checks look at."""
    (group,) = model.layers
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
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    return tmp_path


@pytest.fixture
def read(folder: Path) -> Read:
    """Writes a plan's files and gives, by pool, what vLLM's parser and its configuration made of them."""
    pytest.importorskip("vllm", reason=f"vLLM is not installed; its {VLLM_VERSION} would check the emitted options")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    (serve,) = cmd_init()
    serve.subparser_init(parser.add_subparsers())

    def read(plan: Plan, model: Model, drafts: dict[str, Model] | None = None) -> list[tuple[Pool, Any, Any]]:
        (folder / "config.json").write_text(json.dumps(config_of(model)))
        (folder / "engine").mkdir(exist_ok=True)
        for name, text in Vllm().files(plan, model, draft_models=drafts).items():
            (folder / name).write_text(text)
        found = []
        for pool in plan.pools:
            settings = folder / "engine" / f"vllm-{pool.name}.yaml"
            arguments = parser.parse_args(["serve", str(folder), "--config", str(settings), "--port", "8003"])
            serve.validate(arguments)
            arguments.model = arguments.model_tag
            found.append((pool, arguments, AsyncEngineArgs.from_cli_args(arguments).create_engine_config()))
        return found

    return read


def check(pool: Pool, arguments: Any, config: Any) -> None:
    parallel, scheduler, cache = config.parallel_config, config.scheduler_config, config.cache_config
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (
        pool.parallelism.tp,
        pool.parallelism.pp,
    )
    assert parallel.data_parallel_size == pool.parallelism.attention_dp
    assert parallel.enable_expert_parallel == pool.parallelism.expert_parallel
    assert scheduler.max_num_seqs == pool.batching.max_num_seqs
    assert scheduler.max_num_batched_tokens == pool.batching.max_num_batched_tokens
    assert scheduler.enable_chunked_prefill == pool.batching.chunked_prefill
    assert f"vllm-{scheduler.policy}" == pool.batching.policy
    assert scheduler.watermark == pool.kv_cache.watermark
    assert scheduler.long_prefill_token_threshold == pool.batching.long_prefill_token_threshold
    assert scheduler.scheduler_reserve_full_isl == pool.batching.scheduler_reserve_full_isl
    assert cache.block_size == pool.kv_cache.block_size
    assert cache.num_gpu_blocks_override == pool.kv_cache.num_blocks
    assert cache.gpu_memory_utilization == pool.kv_cache.memory_utilization
    assert cache.enable_prefix_caching == pool.kv_cache.prefix_caching
    assert config.model_config.enforce_eager != pool.cuda_graphs
    assert pool.max_model_len in (None, config.model_config.max_model_len)
    if pool.speculation is None:
        assert arguments.async_scheduling == pool.async_scheduling


@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXAMPLES.glob("*/study.yaml")))
def test_every_plan_that_an_example_may_choose(name: str, read: Read) -> None:
    study = Study.from_file(EXAMPLES / name / "study.yaml")
    model = load_model(study.model)
    for candidate in space_of(study).candidates:
        for found in read(candidate.plan(study, max_model_len=8192), model):
            check(*found)


def test_pools_that_hand_over(read: Read) -> None:
    plan = Plan.from_file(EXAMPLES / "prefill-decode" / "plan.yaml")
    for pool, arguments, config in read(plan, load_model(plan.model)):
        check(pool, arguments, config)
        assert config.kv_transfer_config.kv_connector == "NixlConnector"


@pytest.mark.parametrize(
    "pool",
    [
        {"kv_cache": {"dtype": "fp8", "prefix_caching": True, "watermark": 0.01, "num_blocks": 9000}},
        {"parallelism": {"tp": 2, "pp": 2}, "async_scheduling": False, "cuda_graphs": False},
        {"parallelism": {"tp": 2, "attention_dp": 2, "expert_parallel": True}},
        {"batching": {"policy": "vllm-priority", "max_num_seqs": 64, "max_num_batched_tokens": 512}},
        {"batching": {"chunked_prefill": False, "max_num_batched_tokens": 16384}, "max_model_len": 16384},
        {"batching": {"long_prefill_token_threshold": 256, "scheduler_reserve_full_isl": False}},
    ],
    ids=["cache", "parallel", "experts", "priority", "whole prompts", "long prompts"],
)
def test_every_other_option(pool: dict[str, Any], read: Read) -> None:
    for found in read(plan_of(pool), load_model("mixtral-8x7b")):
        check(*found)


@pytest.mark.parametrize(
    "kind",
    ["draft_model", "eagle", "eagle3", "ngram"],  # those for which vLLM wants no package beside its own
)
@pytest.mark.parametrize("by_batch", [False, True], ids=["chain", "by batch"])
def test_drafts(kind: str, by_batch: bool, read: Read, folder: Path) -> None:
    target, draft = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
    head = folder / "head"
    head.mkdir()
    heads = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
    architecture = {"architectures": [heads[kind]]} if kind in heads else {}
    (head / "config.json").write_text(json.dumps(config_of(draft if kind == "draft_model" else target) | architecture))
    drafter = {
        "draft_model": {"kind": "draft_model", "model": "a draft"},
        "ngram": {"kind": "ngram", "lookup_min": 2, "lookup_max": 4},
    }.get(kind, {"kind": "eagle", "method": kind, "checkpoint": str(head)})
    ranges = [{"first": 1, "last": 8, "tokens": 4}, {"first": 17, "last": 64, "tokens": 0}]
    scheme = {"kind": "by_batch", "max_tokens": 4, "ranges": ranges} if by_batch else {"kind": "chain", "tokens": 3}
    plan = plan_of({"speculation": {"drafter": drafter, "scheme": scheme, "acceptance": "mine"}})
    ((pool, arguments, config),) = read(plan, target, {"a draft": draft.model_copy(update={"hf": str(head)})})
    check(pool, arguments, config)
    drafting = config.speculative_config
    assert drafting.method == kind
    assert drafting.num_speculative_tokens == (4 if by_batch else 3)
    assert drafting.num_speculative_tokens_per_batch_size == ([(1, 8, 4), (17, 64, 0)] if by_batch else None)
    assert arguments.async_scheduling is (kind != "ngram")


def plan_of(pool: dict[str, Any]) -> Plan:
    batching = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, **pool.get("batching", {})}
    pool = {"hardware": "h100-sxm", "instances": 1, "max_model_len": 32768, **pool, "batching": batching}
    return Plan.model_validate({"name": "plan", "model": "a model", "pools": [pool]})
