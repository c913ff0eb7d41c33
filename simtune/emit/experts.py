"""Settings of experts placed by their load, and of instances that go on with fewer ranks, as engines have them.

Facts: vllm/config/parallel.py and vllm/v1/engine/core_client.py of vLLM 0.32; srt/arg_groups/parallel_hook.py and
srt/eplb of SGLang 0.5.23. vLLM adds and removes ranks on request, if Ray starts them, and aborts all requests if one
fails. SGLang goes on if one fails, as far as ranks exchange tokens by Mooncake, and removes none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from simtune.specs.model import Model, MoeFeedForward
from simtune.specs.pool import Pool


def vllm_experts(pool: Pool) -> dict[str, Any]:
    """Return the settings of vLLM, with _ for - in their names."""
    parallelism = pool.parallelism
    if parallelism.expert_replicas is None:
        return {}
    config: dict[str, Any] = {}
    if parallelism.expert_replicas:
        config["num_redundant_experts"] = parallelism.expert_replicas
    if parallelism.elastic_experts:
        # Ranks compute nothing while experts move, and no package beside vLLM is needed.
        config["use_async"] = False
    settings: dict[str, Any] = {
        "enable_eplb": True,
        "eplb_config": json.dumps(config) if config else None,
    }
    if parallelism.elastic_experts:
        settings |= {"enable_elastic_ep": True, "data_parallel_backend": "ray"}
    return settings


def sglang_experts(pool: Pool) -> dict[str, Any]:
    """Return the settings of SGLang, with _ for - in their names."""
    parallelism = pool.parallelism
    if parallelism.expert_replicas is None:
        return {}
    settings: dict[str, Any] = {
        "enable_eplb": True,
        "ep_num_redundant_experts": parallelism.expert_replicas or None,
    }
    if parallelism.elastic_experts:
        settings |= {"elastic_ep_backend": "mooncake", "moe_a2a_backend": "mooncake"}
    return settings


def placement_refusals(pool: Pool, model: Model, title: str) -> Iterator[str]:
    """Yield why an engine that places experts by load would not start with a pool."""
    parallelism = pool.parallelism
    if parallelism.expert_replicas is None:
        return
    ranks = parallelism.tp * parallelism.attention_dp
    for block in (group.feed_forward for group in model.layers):
        if isinstance(block, MoeFeedForward) and (block.experts + parallelism.expert_replicas) % ranks:
            enough = -(-(block.experts + parallelism.expert_replicas) // ranks) * ranks - block.experts
            yield (
                f"parallelism.expert_replicas: {title} needs as many experts on each of {ranks} ranks, and "
                f"{block.experts} with {parallelism.expert_replicas} replicas are not; set it to {enough}"
            )
            return
