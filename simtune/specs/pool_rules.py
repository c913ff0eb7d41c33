"""Rules by which settings of a pool go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simtune.specs.base import ErrorAt

if TYPE_CHECKING:
    from simtune.specs.pool import Pool


def check_pool(pool: Pool) -> None:
    """Raise ErrorAt for the first rule that a pool breaks."""
    for rule in _RULES:
        rule(pool)


def _refines_a_limit(pool: Pool) -> None:
    batching = pool.batching
    if batching.max_num_active_seqs is not None and batching.max_num_active_seqs > batching.max_num_seqs:
        raise ErrorAt(
            f"{batching.max_num_active_seqs} exceeds max_num_seqs ({batching.max_num_seqs}); lower or remove it",
            "batching",
            "max_num_active_seqs",
        )
    if batching.long_prefill_token_threshold_adaptive and batching.long_prefill_token_threshold is None:
        raise ErrorAt(
            "requires a threshold; set long_prefill_token_threshold, or remove it",
            "batching",
            "long_prefill_token_threshold_adaptive",
        )


def _rejects_new_requests(pool: Pool) -> None:
    for key in pool.queue_limits:
        if pool.role == "decode":
            raise ErrorAt(
                "applies to new requests, which decode pools do not get; set it on prefill pools, or remove it",
                "batching",
                key,
            )
        if pool.role == "prefill" and key == "max_queued_requests":
            raise ErrorAt(
                "has no effect with separate prefill and decode, where SGLang ignores it; remove it",
                "batching",
                key,
            )


def _holds_one_request(pool: Pool) -> None:
    blocks, longest = pool.kv_cache.num_blocks, pool.max_model_len
    if blocks is not None and longest is not None:
        blocks_needed = -(-longest // pool.kv_cache.block_size)
        if (blocks - 1) // pool.parallelism.pp < blocks_needed:
            raise ErrorAt(
                f"{blocks} KV blocks, one of them the engine's own, cannot hold one request of max_model_len "
                f"({longest}), which needs {blocks_needed * pool.parallelism.pp}; give "
                f"{blocks_needed * pool.parallelism.pp + 1} or more, or lower max_model_len",
                "kv_cache",
                "num_blocks",
            )


def _goes_with_afd(pool: Pool) -> None:
    if pool.studied.afd is None:
        return
    shares = "cannot be combined with afd, whose devices have equal shares of the experts; remove it"
    alone = "cannot be combined with afd, which overlaps its own parts and has both sides on GPUs; remove it"
    for path, value, why in (
        (("parallelism", "expert_replicas"), pool.parallelism.expert_replicas, shares),
        (("research", "expert_locality"), pool.studied.expert_locality, shares),
        (("overlap",), pool.overlap, alone),
        (("research", "offload"), pool.studied.offload, alone),
    ):
        if value is not None:
            raise ErrorAt(why, *path)


def _splits_steps(pool: Pool) -> None:
    if pool.overlap_thresholds is not None and pool.overlap != "two_batches":
        raise ErrorAt(
            "has no effect unless steps are split; set overlap to two_batches, or remove it", "overlap_thresholds"
        )


def _has_a_ring(pool: Pool) -> None:
    if pool.studied.cp_ring is not None and pool.parallelism.context_ranks == 1:
        raise ErrorAt("requires ranks that share sequences; set cp above 1, or remove cp_ring", "research", "cp_ring")


def _exchanges_what_is_spared(pool: Pool) -> None:
    if pool.studied.expert_locality is None:
        return
    if not (pool.parallelism.expert_parallel and pool.parallelism.attention_dp > 1):
        raise ErrorAt(
            "requires data-parallel attention and whole experts on other ranks; set expert_parallel and an "
            "attention_dp above 1, or remove it",
            "research",
            "expert_locality",
        )
    if pool.expert_exchange == "all_gather":
        raise ErrorAt(
            "has no effect if all ranks gather all tokens; set expert_exchange to deepep, or remove it",
            "research",
            "expert_locality",
        )


def _one_target_for_each_drafter(pool: Pool) -> None:
    if pool.devices > pool.model_devices:
        for key in ("pp", "attention_dp"):
            if getattr(pool.parallelism, key) > 1:
                raise ErrorAt(
                    f"a drafter with GPUs of its own drafts for one batch at a time, and {key} makes "
                    f"{getattr(pool.parallelism, key)} of them; set it to 1, raise tp instead, or draft a chain",
                    "parallelism",
                    key,
                )


_RULES = (
    _refines_a_limit,
    _rejects_new_requests,
    _holds_one_request,
    _goes_with_afd,
    _splits_steps,
    _has_a_ring,
    _exchanges_what_is_spared,
    _one_target_for_each_drafter,
)
