"""Loads and pools that LoRA adapters go with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simtune.costs.adapted_products import adaptable, has_experts, has_latents
from simtune.errors import UsageError
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.workload.requests import RequestStream


def check_adapters(pools: Sequence[Pool], stream: RequestStream) -> None:
    """Raise UsageError if a pool cannot serve the adapters for which requests ask."""
    if stream.adapter is None or not len(stream):
        return
    count = int(stream.adapter.max()) + 1
    for pool in pools:
        if pool.lora is None and count:
            raise UsageError(
                f"pool {pool.name}: requests ask for LoRA adapters, and the pool has no slots for any; set lora, or "
                "remove adapters from the load"
            )
        if pool.lora is not None and pool.lora.storage_bytes_per_s is None and count > pool.lora.in_host:
            raise UsageError(
                f"pool {pool.name}: lora.host_slots ({pool.lora.in_host}) is less than the {count} adapters of the "
                "load, which are then read from storage; set lora.storage_bytes_per_s, or raise host_slots"
            )


_READ = "vllm-"
"""Beginning of the policies whose engine's adapters of experts and of latent attention were read."""


def refusals(pool: Pool, model: Model) -> Iterator[str]:
    """Yield a message for each setting and kind of layer that adapters do not go with."""
    if pool.lora is None:
        return
    if not adaptable(model, pool):
        yield (
            "lora needs full, windowed or latent attention without an indexer in all layers, and with targets all "
            f"dense feed-forward blocks or experts of the hidden size too; {model.name} has other kinds: set targets "
            "to attention, or leave lora out"
        )
        return
    yield from _of_layers(pool, model)
    parallelism, studied, batching = pool.parallelism, pool.studied, pool.batching
    for key, value in (
        ("parallelism.cp", parallelism.cp if parallelism.context_ranks > 1 else None),
        ("cascade_attention", pool.cascade_attention or None),
        ("batching.prefill_schedule_interval", batching.prefill_schedule_interval),
        ("research.offload", studied.offload),
        ("research.afd", studied.afd),
    ):
        if value is not None:
            yield f"lora and {key} do not go together; leave one of them out"
    if pool.speculation is not None and not pool.speculation.scheme.shape.in_turn:
        yield (
            f"lora and scheme {pool.speculation.scheme.kind} do not go together: products of adapters are modelled in "
            "verifications of all drafts at once; choose another scheme, or leave lora out"
        )


def _of_layers(pool: Pool, model: Model) -> Iterator[str]:
    """Yield a message for each part whose adapters the pool's policy or ranks are not known to serve."""
    assert pool.lora is not None
    policy, remedy = pool.batching.policy, "choose vllm-fcfs or vllm-priority, or leave lora out"
    if pool.parallelism.pp > 1 and not policy.startswith(_READ):
        yield f"adapters in pipelines (pp) are modelled as in vLLM alone, and the policy is {policy}; {remedy}"
    if has_latents(model) and not policy.startswith(_READ):
        yield f"adapters of latent attention are modelled as in vLLM alone, and the policy is {policy}; {remedy}"
    if pool.lora.targets == "attention" or not has_experts(model):
        return
    if not policy.startswith(_READ):
        yield f"adapters of experts are modelled as in vLLM alone, and the policy is {policy}; {remedy}"
    for key, value in (
        ("attention_dp", pool.parallelism.attention_dp > 1),
        ("expert_replicas", pool.parallelism.expert_replicas),
    ):
        if value:
            yield (
                f"lora with targets all and parallelism.{key} do not go together: experts would need the adapters of "
                "other ranks' requests; set targets to attention, or leave one of them out"
            )
