"""Speculation as engines read it: vLLM's speculative_config, SGLang's options, TensorRT-LLM's speculative_config.

No engine knows every scheme. vLLM takes chains, by batch size if asked; SGLang and TensorRT-LLM take EAGLE-2 trees,
one for all loads. What an engine does not know is refused with the projection that it does know
(`simtune.tuner.speculation`), never rounded in silence.
"""

from __future__ import annotations

from typing import Any

from simtune.errors import UsageError, suggest
from simtune.specs.model import Model
from simtune.specs.speculation import (
    BlockDrafter,
    ByBatch,
    Chain,
    Drafter,
    DraftModel,
    Dsi,
    DynamicTree,
    Eagle,
    Frontier,
    Medusa,
    Ngram,
    Pearl,
    Scheme,
    Speculation,
    StaticTree,
)

VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "tensorrt-llm": "commit 0004396, after 1.2.1"}
"""Whose names these are."""

KNOWN: dict[str, dict[str, type | tuple[type, ...]]] = {
    "vllm": {
        "method": str,
        "model": str,
        "num_speculative_tokens": int,
        "num_speculative_tokens_per_batch_size": list,
        "draft_tensor_parallel_size": int,
        "prompt_lookup_max": int,
        "prompt_lookup_min": int,
        "parallel_drafting": bool,
        "rejection_sample_method": str,
    },
    "sglang": {
        "speculative-algorithm": str,
        "speculative-draft-model-path": str,
        "speculative-num-steps": int,
        "speculative-eagle-topk": int,
        "speculative-num-draft-tokens": int,
        "speculative-adaptive": bool,
        "speculative-ngram-min-bfs-breadth": int,
        "speculative-ngram-max-bfs-breadth": int,
    },
    "tensorrt-llm": {
        "decoding_type": str,
        "max_draft_len": int,
        "speculative_model": str,
        "use_dynamic_tree": bool,
        "dynamic_tree_max_topK": int,
        "max_total_draft_tokens": int,
        "max_matching_ngram_size": int,
    },
}
"""Exact names by engine, as far as speculation can be set with them here, and the types of their values."""

_VLLM_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "ngram", "suffix", "dflash", "dspark")
_SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "dflash": "DFLASH", "dspark": "DSPARK"}


def vllm(speculation: Speculation, draft: Model | None = None) -> dict[str, Any]:
    """vLLM's `--speculative-config`, to be written as JSON. `draft` is the model that a draft_model names.

    Raises UsageError where vLLM cannot do it.
    """
    drafter, scheme = speculation.drafter, speculation.scheme
    settings: dict[str, Any] = {"method": _method(drafter)}
    model = _checkpoint("vLLM", drafter, draft)
    if model is not None:
        settings["model"] = model
    if isinstance(drafter, DraftModel) and drafter.tp is not None:
        settings["draft_tensor_parallel_size"] = drafter.tp
    if isinstance(drafter, Ngram):
        settings |= {"prompt_lookup_max": drafter.lookup_max, "prompt_lookup_min": drafter.lookup_min}
    if isinstance(scheme, ByBatch):
        settings["num_speculative_tokens"] = scheme.max_tokens
        settings["num_speculative_tokens_per_batch_size"] = [
            [r.first, r.last, min(r.tokens, scheme.max_tokens)] for r in scheme.ranges
        ]
        return settings
    length = _chain_length(scheme)
    if length is None:
        raise _refused("vLLM", scheme, "it drafts chains, of one length or by batch size: Schedule.by_batch()")
    return {**settings, "num_speculative_tokens": length}


def sglang(speculation: Speculation, draft: Model | None = None) -> dict[str, Any]:
    """SGLang's long options without their dashes. Raises UsageError where SGLang cannot do it.

    Its number of draft tokens counts the root, which needs no drafting.
    """
    drafter, scheme = speculation.drafter, speculation.scheme
    length = _chain_length(scheme)
    method = _method(drafter)
    if isinstance(drafter, Ngram) and length is not None:
        return {
            "speculative-algorithm": "NGRAM",
            "speculative-num-draft-tokens": length + 1,
            "speculative-ngram-min-bfs-breadth": 1,
            "speculative-ngram-max-bfs-breadth": 1,
        }
    if not isinstance(drafter, DraftModel) and method not in _SGLANG_ALGORITHMS:
        raise UsageError(f"SGLang {VERSIONS['sglang']} has no {drafter.kind} drafter")
    if isinstance(scheme, DynamicTree):
        steps, topk, tokens = scheme.steps, scheme.topk, scheme.tokens
    elif length is not None:
        steps, topk, tokens = length, 1, length
    else:
        raise _refused(
            "SGLang", scheme, "it drafts one chain or one EAGLE-2 tree for all loads: Schedule.dynamic_tree()"
        )
    if isinstance(drafter, BlockDrafter) and topk > 1:
        raise _refused("SGLang", scheme, "a block drafter drafts a chain")
    model = _checkpoint("SGLang", drafter, draft)
    algorithm = "STANDALONE" if isinstance(drafter, DraftModel) else _SGLANG_ALGORITHMS[method]
    return {
        "speculative-algorithm": algorithm,
        **({"speculative-draft-model-path": model} if model is not None else {}),
        "speculative-num-steps": steps,
        "speculative-eagle-topk": topk,
        "speculative-num-draft-tokens": tokens + 1,
    }


def tensorrt_llm(speculation: Speculation, draft: Model | None = None) -> dict[str, Any]:
    """TensorRT-LLM's `speculative_config`, to be written as YAML. Raises UsageError where it cannot do it."""
    drafter, scheme = speculation.drafter, speculation.scheme
    length = _chain_length(scheme)
    tree = isinstance(scheme, DynamicTree) and length is None
    if length is None and not tree:
        raise _refused("TensorRT-LLM", scheme, "it drafts one chain or one EAGLE-2 tree: Schedule.dynamic_tree()")
    if isinstance(drafter, Ngram):
        kind: dict[str, Any] = {"decoding_type": "NGram", "max_matching_ngram_size": drafter.lookup_max}
    elif isinstance(drafter, DraftModel):
        kind = {"decoding_type": "Draft_Target"}
    elif isinstance(drafter, Eagle):
        kind = {"decoding_type": "MTP" if drafter.method == "mtp" else "Eagle3"}
    else:
        raise UsageError(f"TensorRT-LLM ({VERSIONS['tensorrt-llm']}): no {drafter.kind} drafter is written here")
    model = _checkpoint("TensorRT-LLM", drafter, draft)
    settings = kind | ({"speculative_model": model} if model is not None else {})
    if not isinstance(scheme, DynamicTree) or length is not None:
        return {**settings, "max_draft_len": length}
    if settings["decoding_type"] != "Eagle3":
        raise _refused("TensorRT-LLM", scheme, "only its Eagle3 drafts trees")
    if not scheme.steps <= scheme.tokens <= scheme.topk * scheme.steps:
        raise _refused(
            "TensorRT-LLM",
            scheme,
            f"its tree of {scheme.tokens} tokens must have between {scheme.steps} and topk x steps = "
            f"{scheme.topk * scheme.steps}",
        )
    return {
        **settings,
        "max_draft_len": scheme.steps,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": scheme.topk,
        "max_total_draft_tokens": scheme.tokens,
    }


def check(engine: str, settings: dict[str, Any]) -> list[str]:
    """What is wrong with the names and types of an engine's settings: nothing, for all that is written here."""
    known, problems = KNOWN[engine], []
    for name, value in settings.items():
        if name not in known:
            problems.append(f"{engine} {VERSIONS[engine]} has no {name}{suggest(name, known)}")
        elif not isinstance(value, known[name]) or (known[name] is int and isinstance(value, bool)):
            problems.append(f"{engine} {VERSIONS[engine]}: {name} cannot be {value!r}")
    if engine == "vllm":
        if (method := settings.get("method")) not in _VLLM_METHODS:
            problems.append(f"vllm {VERSIONS['vllm']} has no method {method}{suggest(str(method), _VLLM_METHODS)}")
        for entry in settings.get("num_speculative_tokens_per_batch_size", []):
            if len(entry) != 3 or entry[0] > entry[1] or not 0 <= entry[2] <= settings["num_speculative_tokens"]:
                problems.append(f"vllm {VERSIONS['vllm']}: {entry} is no [first batch, last batch, tokens]")
    return problems


def _method(drafter: Drafter) -> str:
    return drafter.method if isinstance(drafter, Eagle | BlockDrafter) else drafter.kind


def _checkpoint(engine: str, drafter: Drafter, draft: Model | None) -> str | None:
    """What the engine loads beside the target, None where nothing."""
    if isinstance(drafter, DraftModel):
        if draft is None or draft.hf is None:
            raise UsageError(f"draft model {drafter.model}: its spec names no `hf`, which {engine} would load")
        return draft.hf
    if not isinstance(drafter, Eagle | Medusa | BlockDrafter) or _method(drafter) == "mtp":
        return None
    if drafter.checkpoint is None:
        raise UsageError(f"drafter {_method(drafter)}: name the `checkpoint` that {engine} loads")
    return drafter.checkpoint


def _chain_length(scheme: Scheme) -> int | None:
    """Of schemes that are one chain whatever they are called."""
    if isinstance(scheme, Chain):
        return scheme.tokens
    if isinstance(scheme, DynamicTree) and scheme.topk == 1:
        return scheme.tokens
    if isinstance(scheme, StaticTree) and all(max(node) == 1 for node in scheme.nodes):
        return len(scheme.nodes)
    return None


def _refused(engine: str, scheme: Scheme, why: str) -> UsageError:
    if isinstance(scheme, Pearl | Dsi | Frontier):
        why = "it drafts and verifies in turn; take a chain"
    return UsageError(f"{engine} cannot be told a {scheme.kind} scheme: {why}")
