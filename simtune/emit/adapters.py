"""Settings of LoRA adapters, as engines have them. The adapters themselves are named as the engine is started.

Facts: vllm/config/lora.py of vLLM 0.33; srt/arg_groups/fields/lora.py of SGLang 0.5.23; tensorrt_llm/lora_helper.py of
TensorRT-LLM 1.x. Host memory keeps as many adapters as slots unless set otherwise (vLLM), or any number (SGLang).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simtune.emit.releases import ReleaseNumber, words
from simtune.emit.vllm_releases import adapts_since, counts_all_adapters
from simtune.specs.drafters import DraftModel
from simtune.specs.model import MlaAttention, Model, MoeFeedForward
from simtune.specs.pool import Pool

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Suffixes of the matrices of attention."""
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""Suffixes of those of latent attention."""
TRTLLM_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_dense")
TRTLLM_ALL = (*TRTLLM_ATTENTION, "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")
"""Words of TensorRT-LLM for these matrices, and for all with those of feed-forward blocks."""


def vllm_lora(pool: Pool) -> dict[str, Any]:
    """Return the settings of vLLM, with _ for - in their names."""
    if pool.lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": pool.lora.slots,
        "max_lora_rank": pool.lora.rank,
        "max_cpu_loras": pool.lora.host_slots,
    }


def sglang_lora(pool: Pool) -> dict[str, Any]:
    """Return the settings of SGLang, with _ for - in their names. Without paths it must be given the matrices."""
    if pool.lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras_per_batch": pool.lora.slots,
        "max_lora_rank": pool.lora.rank,
        "max_loaded_loras": pool.lora.in_host,
        "lora_target_modules": "all" if pool.lora.targets == "all" else None,
    }


def trtllm_lora(pool: Pool) -> dict[str, Any] | None:
    """Return the `lora_config` of TensorRT-LLM; None without slots."""
    if pool.lora is None:
        return None
    return {
        "max_lora_rank": pool.lora.rank,
        "max_loras": pool.lora.slots,
        "max_cpu_loras": pool.lora.in_host,
        "lora_target_modules": list(TRTLLM_ALL if pool.lora.targets == "all" else TRTLLM_ATTENTION),
    }


def lora_unsaid(pool: Pool) -> Iterator[str]:
    """Yield the settings of adapters that are given as an engine is started."""
    if pool.lora is not None and pool.lora.targets == "attention":
        usual, latent = (" ".join(names) for names in (ATTENTION, _LATENT))
        yield f"lora.targets: add --lora-target-modules {usual}, or with latent attention {latent}"


def vllm_lora_refusals(pool: Pool, model: Model, release: ReleaseNumber) -> Iterator[str]:
    """Yield what a release of vLLM does not serve adapters with, or was not found to."""
    if pool.lora is None:
        return
    attentions, blocks = ([getattr(group, name) for group in model.layers] for name in ("attention", "feed_forward"))
    latents = any(isinstance(a, MlaAttention) and a.q_lora_rank is not None for a in attentions)
    experts = pool.lora.targets == "all" and any(isinstance(block, MoeFeedForward) for block in blocks)
    for part, is_set, otherwise in (
        ("drafts", pool.speculation is not None, "remove speculation"),
        ("experts", experts, "set targets to attention"),
        ("whole experts", experts and pool.parallelism.expert_parallel, "set targets to attention"),
        ("latents", latents, "remove it"),
    ):
        if is_set and (since := adapts_since(part)) > release:
            yield (
                f"lora: vLLM {words(release)} was not found to serve adapters with {part}; take release "
                f"{words(since)}, or {otherwise}"
            )


def vllm_lora_unsaid(pool: Pool, release: ReleaseNumber) -> Iterator[str]:
    """Yield how a release of vLLM counts adapters otherwise than simulated."""
    if pool.lora is not None and pool.parallelism.pp > 1 and not counts_all_adapters(release):
        yield f"lora.slots: vLLM {words(release)} counts adapters of each batch in the pipeline; simulated: of all"


def sglang_lora_refusals(pool: Pool) -> Iterator[str]:
    """Yield the drafts beside which SGLang serves no adapters (`check_lora_speculative_compatibility` in
    srt/arg_groups/lora_hook.py, 0.5.23: NGRAM, EAGLE, NEXTN, EAGLE3, DFLASH and DSPARK alone)."""
    if pool.lora is not None and pool.speculation is not None and isinstance(pool.speculation.drafter, DraftModel):
        yield (
            "lora: SGLang 0.5.23 refuses adapters with draft models (STANDALONE); choose another drafter, or remove it"
        )
