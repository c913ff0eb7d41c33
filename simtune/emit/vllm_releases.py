"""Releases of vLLM in which the settings that are written first appeared.

Facts of each release from 0.10 to 0.33, by file: options in vllm/engine/arg_utils.py, drafts in
vllm/config/speculative.py, what goes together in vllm/config/vllm.py (before 0.12 in arg_utils.py), words for dtypes in
vllm/config/cache.py. The parsers and checks of six of them read what is written: tests/emit/test_vllm_parser.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from simtune.emit.releases import ReleaseNumber

NEWEST: ReleaseNumber = (0, 33)
_FIRST: ReleaseNumber = (0, 10)
"""First release that is covered; an option that this release has is not listed."""

_OPTIONS: Mapping[str, ReleaseNumber] = {
    "decode_context_parallel_size": (0, 11),
    "stream_interval": (0, 12),
    "tiers": (0, 12),
    "scheduler_reserve_full_isl": (0, 19),
    "watermark": (0, 24),
    # First release whose option was checked; earlier ones may have it. So of those that follow.
    "mm_encoder_tp_mode": (0, 28),
    "limit_mm_per_prompt": (0, 28),
    "video_pruning_rate": (0, 33),
    "enable_eplb": (0, 12),
    "eplb_config": (0, 12),
    "data_parallel_backend": (0, 12),
    "enable_elastic_ep": (0, 17),
    # Earlier releases have the option, and no attention that runs with it.
    "prefill_context_parallel_size": (0, 28),
    "max_num_queued_reqs": (0, 30),
    "max_num_queued_tokens": (0, 30),
    "max_num_active_seqs": (0, 31),
    "long_prefill_token_threshold_adaptive": (0, 31),
    # Since 0.24 with data-parallel ranks alone.
    "prefill_schedule_interval": (0, 33),
}
_DRAFTS: Mapping[str, ReleaseNumber] = {
    "mtp": (0, 11),
    "suffix": (0, 12),
    "draft_model": (0, 15),
    "dflash": (0, 20),
    "dspark": (0, 25),
    "num_speculative_tokens_per_batch_size": (0, 24),
}
_LAST_DRAFTS: Mapping[str, ReleaseNumber] = {"medusa": (0, 32)}
_HIDDEN: Mapping[str, ReleaseNumber] = {"draft_model": (0, 16)}
_HIDDEN_HEADS: ReleaseNumber = (0, 12)
_HIDDEN_PIPELINES: ReleaseNumber = (0, 15)
_WHOLE_PROMPTS: ReleaseNumber = (0, 12)
_TWO_BATCHES: ReleaseNumber = (0, 28)
"""First release whose settings of two batches were checked; earlier ones may have them."""
_LAST_CASCADE: ReleaseNumber = (0, 28)
"""Last release that was found to have cascade attention; 0.33 has none."""
_ADAPTERS: Mapping[str, ReleaseNumber] = {
    "drafts": (0, 14),
    "experts": (0, 14),
    "whole experts": (0, 24),
    "latents": (0, 32),
}
"""First releases that were found to run LoRA adapters beside drafts, on experts, on experts that ranks have as a whole
(vllm/lora/layers/fused_moe.py: 0.19 asserts that there are none), and on the products into both latents, which is one
layer (vllm/lora/layers/column_parallel_linear.py: 0.28 leaves it out)."""
_DIVIDED_DRAFTS: ReleaseNumber = (0, 32)
"""First release that was found to draft, by MTP heads and DSpark, beside groups of ranks that divide prompts."""
_COUNTED_ADAPTERS: ReleaseNumber = (0, 33)
"""First release that counts the adapters of all requests that run; earlier ones count those of each batch."""
_DEALT_DECODES: ReleaseNumber = (0, 32)
"""First release that was found to decode each request on one of the groups that divide prompts; 0.28 does on all."""
_KV_DTYPES: Mapping[str, ReleaseNumber] = {"bfloat16": (0, 11)}


def knows(release: ReleaseNumber) -> frozenset[str]:
    """Settings of a pool that not every engine has, and this release has."""
    return frozenset(
        {"long_prefill_token_threshold", "lora", *(key for key, since in _OPTIONS.items() if since <= release)}
    )


def options_by_release() -> tuple[str, ...]:
    """Return the options that not every release has."""
    return tuple(_OPTIONS)


def drafts_since(name: str) -> ReleaseNumber:
    """The first release that has a method or a setting of drafts."""
    return _DRAFTS.get(name, _FIRST)


def drafts_until(name: str) -> ReleaseNumber:
    """The last release that has a method of drafts."""
    return _LAST_DRAFTS.get(name, NEWEST)


def hides_since(method: str) -> ReleaseNumber:
    """Return the first release that schedules asynchronously with a drafting method."""
    return _HIDDEN.get(method, _HIDDEN_HEADS)


def hides_pipelines(release: ReleaseNumber) -> bool:
    """True if a release schedules asynchronously over a pipeline of stages."""
    return release >= _HIDDEN_PIPELINES


def takes_whole_prompts(release: ReleaseNumber) -> bool:
    """True if a release can be set not to cut prompts; earlier releases of V1 always cut them."""
    return release >= _WHOLE_PROMPTS


def splits_steps(release: ReleaseNumber) -> bool:
    """True if a release is known to run a step as two batches."""
    return release >= _TWO_BATCHES


def shares_prefixes(release: ReleaseNumber) -> bool:
    """True if a release is known to have cascade attention."""
    return release <= _LAST_CASCADE


def deals_decodes(release: ReleaseNumber) -> bool:
    """True if a release decodes each request on one of the groups of ranks that divide prompts."""
    return release >= _DEALT_DECODES


def adapts_since(part: str) -> ReleaseNumber:
    """The first release that was found to run LoRA adapters with `drafts`, `experts`, `whole experts`, `latents`."""
    return _ADAPTERS[part]


def divides_beside_drafts(release: ReleaseNumber) -> bool:
    """True if a release drafts beside groups of ranks that divide prompts: 0.28 refuses all drafts."""
    return release >= _DIVIDED_DRAFTS


def counts_all_adapters(release: ReleaseNumber) -> bool:
    """True if the adapters of all requests that run in a pipeline may not exceed the slots."""
    return release >= _COUNTED_ADAPTERS


def kv_dtype_since(word: str) -> ReleaseNumber:
    """The first release that has a word for the dtype of the KV cache."""
    return _KV_DTYPES.get(word, _FIRST)
