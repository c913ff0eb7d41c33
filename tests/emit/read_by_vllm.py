"""What a release of vLLM makes of settings: run by an interpreter that has it, `read_by_vllm.py CASES.json`.

CASES.json lists objects with `model`, a folder with a config.json, and `settings`, a file for --config. Written to
stdout, in its last line, is a list with what its parser and its own configuration hold of each, or {"error": ...}.
Nothing of simtune is imported here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import cmd_init

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:  # before 0.12
    from vllm.utils import FlexibleArgumentParser


def read(parser: Any, serve: Any, model: str, settings: str) -> dict[str, Any]:
    """By the words of a plan's pool; what a release has not is left out."""
    arguments = parser.parse_args(["serve", model, "--config", settings, "--port", "8003"])
    serve.validate(arguments)
    arguments.model = arguments.model_tag
    if hasattr(arguments, "swap_space"):
        arguments.swap_space = 0  # releases that swap look whether this machine has memory for it
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    parallel, scheduler, cache = config.parallel_config, config.scheduler_config, config.cache_config
    drafting, transfer, lora = config.speculative_config, config.kv_transfer_config, config.lora_config
    found = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "attention_dp": parallel.data_parallel_size,
        "expert_parallel": parallel.enable_expert_parallel,
        "expert_replicas": parallel.eplb_config.num_redundant_experts if parallel.enable_eplb else None,
        "elastic_experts": getattr(parallel, "enable_elastic_ep", None) or None,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": getattr(scheduler, "enable_chunked_prefill", None),
        "policy": scheduler.policy,
        "watermark": getattr(scheduler, "watermark", None),
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "scheduler_reserve_full_isl": getattr(scheduler, "scheduler_reserve_full_isl", None),
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks_override,
        "memory_utilization": cache.gpu_memory_utilization,
        "prefix_caching": cache.enable_prefix_caching,
        "kv_dtype": cache.cache_dtype,
        "quantization": arguments.quantization,
        "cuda_graphs": not config.model_config.enforce_eager,
        "max_model_len": config.model_config.max_model_len,
        "async_scheduling": arguments.async_scheduling,
        "connector": transfer and transfer.kv_connector,
        "method": drafting and drafting.method,
        "drafts": drafting and drafting.num_speculative_tokens,
        "lora": lora and [lora.max_loras, lora.max_lora_rank, lora.max_cpu_loras],
        "by_batch": drafting and getattr(drafting, "num_speculative_tokens_per_batch_size", None),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def main() -> None:
    """Read all cases."""
    parser = FlexibleArgumentParser()
    (serve,) = cmd_init()
    serve.subparser_init(parser.add_subparsers())
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    answers = []
    for case in cases:
        try:
            answers.append(read(parser, serve, case["model"], case["settings"]))
        except (Exception, SystemExit) as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
