"""What engines are told: exact names, and a refusal where an engine cannot do it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simtune.emit import ENGINES, Emitter
from simtune.errors import UsageError
from simtune.specs.catalog import load_model
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Medusa, Ngram, Suffix
from simtune.specs.schemes import (
    BatchRange,
    ByBatch,
    Chain,
    Dsi,
    DynamicTree,
    Frontier,
    Pearl,
    Scheme,
    StaticTree,
    Threshold,
    TokenBudget,
)
from simtune.specs.speculation import Speculation

HEAD = Eagle(checkpoint="org/head")
DRAFTER = DraftModel(model="llama-3.1-8b")
DRAFT = load_model(DRAFTER.model)
BY_BATCH = ByBatch(
    max_tokens=3, ranges=(BatchRange(first=1, last=64, tokens=3), BatchRange(first=65, last=512, tokens=0))
)
TREE = DynamicTree(steps=4, topk=8, tokens=24)
DSI = Dsi(tokens=4, replicas=2)
CHUNKS = Frontier(tokens=4, chunks=2, draft_share=0.5, verify_share=0.5)
vllm, sglang, tensorrt_llm = (ENGINES[name] for name in ("vllm", "sglang", "tensorrt-llm"))


def told(emitter: Emitter, drafter: Drafter, scheme: Scheme) -> dict[str, Any]:
    settings = emitter.speculation(Speculation(drafter=drafter, scheme=scheme, acceptance="mine"), DRAFT)
    assert emitter.problems(settings) == []
    assert json.loads(json.dumps(settings)) == settings
    return settings


@pytest.mark.parametrize(
    ("drafter", "told_of_it"),
    [
        (HEAD, {"method": "eagle3", "model": "org/head"}),
        (Eagle(method="eagle", checkpoint="x"), {"method": "eagle", "model": "x"}),
        (Eagle(method="mtp"), {"method": "mtp"}),
        (
            DraftModel(model="llama-3.1-8b", tp=1),
            {"method": "draft_model", "model": "meta-llama/Llama-3.1-8B", "draft_tensor_parallel_size": 1},
        ),
        (Ngram(lookup_max=4), {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}),
        (Suffix(), {"method": "suffix"}),
        (BlockDrafter(layers=5, checkpoint="x"), {"method": "dflash", "model": "x"}),
    ],
)
def test_vllm_drafters(drafter: Drafter, told_of_it: dict[str, Any]) -> None:
    assert told(vllm, drafter, Chain(tokens=5)) == {**told_of_it, "num_speculative_tokens": 5}


def test_a_method_that_a_release_dropped_is_refused() -> None:
    """vLLM 0.33 has no Medusa among the methods of vllm/config/speculative.py."""
    medusa = Medusa(heads=4, checkpoint="x")
    settings = told(vllm.of("vllm-0.28"), medusa, Chain(tokens=4))
    assert settings == {"method": "medusa", "model": "x", "num_speculative_tokens": 4}
    with pytest.raises(UsageError, match=r"vLLM 0\.33 has no medusa; vLLM 0\.32 was the last that has it"):
        told(vllm, medusa, Chain(tokens=4))


def test_vllm_lengths_by_batch() -> None:
    assert told(vllm, HEAD, BY_BATCH) == {
        "method": "eagle3",
        "model": "org/head",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 64, 3], [65, 512, 0]],
    }
    assert told(vllm, HEAD, StaticTree(nodes=((1,), (1, 1))))["num_speculative_tokens"] == 2, "a chain by another name"


def test_sglang_counts_the_root() -> None:
    assert told(sglang, HEAD, TREE) == {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": "org/head",
        "speculative-num-steps": 4,
        "speculative-eagle-topk": 8,
        "speculative-num-draft-tokens": 25,
    }
    chain = told(sglang, Eagle(method="mtp"), Chain(tokens=3))
    assert chain == {
        "speculative-algorithm": "NEXTN",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    }
    assert told(sglang, DraftModel(model="llama-3.1-8b"), TREE)["speculative-algorithm"] == "STANDALONE"
    assert told(sglang, Ngram(lookup_max=4), Chain(tokens=7))["speculative-num-draft-tokens"] == 8


def test_tensorrt_llm_trees() -> None:
    assert told(tensorrt_llm, HEAD, TREE) == {
        "decoding_type": "Eagle3",
        "speculative_model": "org/head",
        "max_draft_len": 4,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 8,
        "max_total_draft_tokens": 24,
    }
    assert told(tensorrt_llm, HEAD, Chain(tokens=3)) == {
        "decoding_type": "Eagle3",
        "speculative_model": "org/head",
        "max_draft_len": 3,
    }
    ngram = {"decoding_type": "NGram", "max_matching_ngram_size": 4, "max_draft_len": 3}
    assert told(tensorrt_llm, Ngram(lookup_max=4), Chain(tokens=3)) == ngram


@pytest.mark.parametrize(
    ("emitter", "drafter", "scheme", "why"),
    [
        (vllm, HEAD, TREE, "vLLM has no setting for a dynamic_tree scheme: it drafts chains"),
        (vllm, HEAD, StaticTree(nodes=((1,), (2,))), "vLLM has no setting for a static_tree scheme"),
        (vllm, HEAD, Threshold(max_tokens=8, stop_at=0.7), "vLLM has no setting for a threshold scheme"),
        (vllm, HEAD, TokenBudget(tokens=64, max_tokens=8), "vLLM has no setting for a budget scheme"),
        (vllm, DRAFTER, Pearl(tokens=4), "vLLM has no setting for a pearl scheme: it drafts and verifies in turn"),
        (sglang, DRAFTER, Pearl(tokens=4), "SGLang has no setting for a pearl scheme"),
        (tensorrt_llm, DRAFTER, Pearl(tokens=4), "TensorRT-LLM has no setting for a pearl scheme"),
        (vllm, DRAFTER, DSI, "vLLM has no setting for a dsi scheme: it drafts and verifies in turn; take a chain"),
        (sglang, DRAFTER, DSI, "SGLang has no setting for a dsi scheme: it drafts and verifies in turn"),
        (tensorrt_llm, DRAFTER, DSI, "TensorRT-LLM has no setting for a dsi scheme"),
        (vllm, HEAD, CHUNKS, "vLLM has no setting for a frontier scheme: it drafts and verifies in turn; take a chain"),
        (sglang, HEAD, CHUNKS, "SGLang has no setting for a frontier scheme: it drafts and verifies in turn"),
        (tensorrt_llm, HEAD, CHUNKS, "TensorRT-LLM has no setting for a frontier scheme"),
        (vllm, Eagle(), Chain(tokens=3), "drafter eagle3: name the `checkpoint` that vLLM loads"),
        (sglang, HEAD, BY_BATCH, "SGLang has no setting for a by_batch scheme"),
        (sglang, Medusa(heads=4, checkpoint="x"), Chain(tokens=3), "has no medusa drafter"),
        (sglang, BlockDrafter(layers=5, checkpoint="x"), TREE, "a block drafter drafts a chain"),
        (tensorrt_llm, HEAD, BY_BATCH, "TensorRT-LLM has no setting for a by_batch scheme"),
        (tensorrt_llm, Eagle(method="mtp"), TREE, "only its Eagle3 drafts trees"),
        (tensorrt_llm, HEAD, DynamicTree(steps=4, topk=8, tokens=40), "must have between 4 and topk x steps = 32"),
        (tensorrt_llm, Suffix(), Chain(tokens=3), "no suffix drafter is written here"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(emitter: Emitter, drafter: Drafter, scheme: Scheme, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        told(emitter, drafter, scheme)
    with pytest.raises(UsageError, match="its spec names no `hf`"):
        emitter.speculation(Speculation(drafter=DraftModel(model="mine"), scheme=Chain(tokens=3), acceptance="mine"))


def test_names_are_checked() -> None:
    assert vllm.problems({"method": "eagle3", "num_speculative_token": 3}) == [
        f"vllm {vllm.version} has no num_speculative_token, did you mean num_speculative_tokens?"
    ]
    assert vllm.problems({"method": "medus", "num_speculative_tokens": 3}) == [
        f"vllm {vllm.version} has no method medus, did you mean medusa?"
    ]
    assert sglang.problems({"speculative-num-steps": True}) == [
        f"sglang {sglang.version}: speculative-num-steps cannot be True"
    ]
    bad = {"method": "eagle3", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}
    assert vllm.problems(bad) == [f"vllm {vllm.version}: [1, 8, 4] is no [first batch, last batch, tokens]"]
    assert "speculative_token_tree" in vllm.problems({"method": "eagle", "speculative_token_tree": "x"})[0]
