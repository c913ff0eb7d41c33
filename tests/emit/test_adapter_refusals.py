"""Adapters with drafts, experts and latent attention: the releases of engines that serve them."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.emit import ENGINES
from simtune.specs.catalog import load_model
from simtune.specs.pool import Pool

DENSE, EXPERTS, LATENT = (load_model(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"))
NGRAM = {"drafter": {"kind": "ngram", "lookup_max": 4}, "scheme": {"kind": "chain", "tokens": 3}, "acceptance": "a"}
DRAFT_MODEL = NGRAM | {"drafter": {"kind": "draft_model", "model": "llama-3.2-1b"}}


def pool(policy: str = "vllm-fcfs", targets: str = "all", **more: Any) -> Pool:
    fields: dict[str, Any] = {
        "hardware": "h100-sxm",
        "instances": 1,
        "batching": {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 512},
        "lora": {"rank": 16, "slots": 4, "targets": targets},
    }
    return Pool.model_validate(fields | more, strict=False)


WHOLE: dict[str, Any] = {"parallelism": {"tp": 4, "expert_parallel": True}}
CASES = [
    ("vllm-0.12", "vllm-0.14", "drafts; take release 0.14, or remove speculation", DENSE, pool(speculation=NGRAM)),
    ("vllm-0.12", "vllm-0.14", "experts; take release 0.14, or set targets to attention", EXPERTS, pool()),
    ("vllm-0.19", "vllm-0.24", "whole experts; take release 0.24, or set targets to attention", EXPERTS, pool(**WHOLE)),
    ("vllm-0.28", "vllm-0.33", "latents; take release 0.32, or remove it", LATENT, pool(targets="attention")),
]


@pytest.mark.parametrize(("older", "newer", "words", "model", "of_pool"), CASES, ids=[case[2][:12] for case in CASES])
def test_releases_of_vllm_that_cannot_are_named(older: str, newer: str, words: str, model: Any, of_pool: Pool) -> None:
    (reason, *more) = _of_adapters(older, model, of_pool)
    assert reason.endswith(words)
    assert not more
    assert not _of_adapters(newer, model, of_pool)


def _of_adapters(release: str, model: Any, of_pool: Pool) -> list[str]:
    emitter = ENGINES["vllm"].of(release)
    return [reason for reason in emitter.refusals(of_pool, model, {}) if reason.startswith("lora: ")]


def test_adapters_of_attention_alone_leave_experts_as_they_are() -> None:
    assert not _of_adapters("vllm-0.12", EXPERTS, pool(targets="attention", **WHOLE))


def test_sglang_has_no_adapters_with_draft_models() -> None:
    for speculation, refused in ((NGRAM, False), (DRAFT_MODEL, True)):
        reasons = ENGINES["sglang"].refusals(pool("sglang", speculation=speculation), DENSE, {})
        assert any("refuses adapters with draft models (STANDALONE)" in reason for reason in reasons) == refused


def test_tensorrt_llm_was_not_checked_with_drafts() -> None:
    for speculation, refused in ((None, False), (NGRAM, True)):
        reasons = ENGINES["tensorrt-llm"].refusals(pool("tensorrt-llm", speculation=speculation), DENSE, {})
        assert any("was not checked with adapters and drafts" in reason for reason in reasons) == refused


def test_earlier_releases_count_the_adapters_of_each_batch_in_a_pipeline() -> None:
    of_pool = pool(parallelism={"pp": 2})
    for release, differs in (("vllm-0.28", True), ("vllm-0.33", False)):
        emitter = ENGINES["vllm"].of(release)
        assert not [reason for reason in emitter.refusals(of_pool, DENSE, {}) if "lora" in reason]
        assert any(reason.startswith("lora.slots: ") for reason in emitter.unsaid(of_pool)) == differs
