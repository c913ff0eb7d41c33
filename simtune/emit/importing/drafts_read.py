"""Speculation of a pool from an engine's settings: the reverse of `Emitter.speculation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simtune.emit.importing.launches import Given, whole_number
from simtune.emit.importing.pool_draft import PoolDraft
from simtune.errors import SpecError

_EAGLES = ("eagle", "eagle3", "mtp")
_BLOCKS = ("dflash", "dspark")


def set_speculation(draft: PoolDraft, option: Given, drafter: dict[str, Any], scheme: dict[str, Any]) -> None:
    """Set a drafter and a scheme. Raises SpecError if no acceptance is given: an engine's settings do not state it."""
    if draft.acceptance is None and draft.lenient:
        draft.refuse(option, "how tokens are drafted; without --acceptance each is decoded singly")
        return
    if draft.acceptance is None:
        raise SpecError(
            option.problem("how often drafts are kept is in no engine's settings; give --acceptance NAME or FILE")
        )
    draft.set("speculation", {"drafter": drafter, "scheme": scheme, "acceptance": draft.acceptance})


def drafter_of(draft: PoolDraft, option: Given, method: str, checkpoint: str | None) -> dict[str, Any]:
    """Return the drafter of a method by the words of vLLM. Raises SpecError for a method that is not simulated."""
    of_checkpoint = {} if checkpoint is None else {"checkpoint": checkpoint}
    if method == "draft_model":
        if checkpoint is None:
            raise SpecError(option.problem("a draft model needs a `model`; name it"))
        return {"kind": "draft_model", "model": draft.reference_of(checkpoint)}
    if method in _EAGLES:
        return {"kind": "eagle", "method": method, **({} if method == "mtp" else of_checkpoint)}
    if method in _BLOCKS:
        return {"kind": "block", "method": method, **of_checkpoint}
    if method in ("suffix", "ngram", "medusa"):
        return {"kind": method, **(of_checkpoint if method == "medusa" else {})}
    raise SpecError(option.problem(f"no {method} drafts are simulated; see `simtune list drafters`"))


def _vllm_scheme(option: Given, settings: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    by_batch = settings.get("num_speculative_tokens_per_batch_size")
    if by_batch is None:
        return {"kind": "chain", "tokens": tokens}
    if not isinstance(by_batch, list) or any(not isinstance(row, list) or len(row) != 3 for row in by_batch):
        raise SpecError(option.problem("num_speculative_tokens_per_batch_size: rows of [first, last, tokens]"))
    ranges = [{"first": first, "last": last, "tokens": count} for first, last, count in by_batch]
    return {"kind": "by_batch", "max_tokens": tokens, "ranges": ranges}


def read_vllm(draft: PoolDraft, option: Given, settings: Mapping[str, Any]) -> None:
    """Read vLLM's speculative_config."""
    tokens = whole_number(Given(option.name, settings.get("num_speculative_tokens", ""), option.file, option.line))
    checkpoint = settings.get("model")
    method = str(settings.get("method") or ("draft_model" if checkpoint else "mtp"))
    method = "mtp" if method.endswith("_mtp") else method
    drafter = drafter_of(draft, option, method, checkpoint)
    if method == "medusa":
        draft.assume(f"the checkpoint has {tokens} Medusa heads, as many as tokens are drafted")
        drafter["heads"] = tokens
    if method == "ngram":
        drafter |= {"lookup_max": settings.get("prompt_lookup_max") or settings.get("prompt_lookup_min") or 5}
        drafter |= {"lookup_min": settings.get("prompt_lookup_min") or drafter["lookup_max"]}
    if "draft_tensor_parallel_size" in settings and method == "draft_model":
        drafter["tp"] = settings["draft_tensor_parallel_size"]
    set_speculation(draft, option, drafter, _vllm_scheme(option, settings, tokens))
    names = {"num_speculative_tokens", "model", "method", "prompt_lookup_max", "prompt_lookup_min"}
    names |= {"draft_tensor_parallel_size", "num_speculative_tokens_per_batch_size"}
    _rest(draft, option, settings, names)


_ALGORITHMS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "NEXTN": "mtp", "STANDALONE": "draft_model", "NGRAM": "ngram"}
_BLOCK_ALGORITHMS = {method.upper(): method for method in _BLOCKS}


def read_sglang(draft: PoolDraft, option: Given, settings: Mapping[str, Given]) -> None:
    """Read SGLang's options of drafts, by their names without `speculative-`."""
    algorithm = str(option.value).upper()
    method = {**_ALGORITHMS, **_BLOCK_ALGORITHMS}.get(algorithm)
    if method is None:
        raise SpecError(option.problem(f"no {algorithm} drafts are simulated"))
    path = settings.get("draft-model-path")
    if algorithm == "EAGLE" and path is None:
        draft.assume("EAGLE without speculative-draft-model-path drafts with the target's MTP head")
        method = "mtp"
    drafter = drafter_of(draft, option, method, None if path is None else str(path.value))
    counts = {name: whole_number(count) for name, count in settings.items() if name in _COUNTS}
    if method == "ngram":
        drafter |= {"lookup_max": counts.get("ngram-max-trie-depth", 18)}
        if "ngram-max-trie-depth" not in counts:
            draft.assume("lookups match 18 tokens; --set pools.0.speculation.drafter.lookup_max=N changes that")
    tokens = counts.get("num-draft-tokens", counts.get("num-steps", 0) + 1) - 1
    topk, steps = counts.get("eagle-topk", 1), counts.get("num-steps", tokens)
    scheme: dict[str, Any] = {"kind": "chain", "tokens": tokens}
    if topk > 1 and method != "ngram":
        scheme = {"kind": "dynamic_tree", "steps": steps, "topk": topk, "tokens": tokens}
    if tokens < 1:
        raise SpecError(option.problem("how many tokens are drafted is not known; give --speculative-num-draft-tokens"))
    set_speculation(draft, option, drafter, scheme)


_COUNTS = ("num-steps", "eagle-topk", "num-draft-tokens", "ngram-max-trie-depth")
_DECODING = {"Draft_Target": "draft_model", "MTP": "mtp", "Eagle3": "eagle3", "Eagle": "eagle3", "NGram": "ngram"}


def read_trtllm(draft: PoolDraft, option: Given, settings: Mapping[str, Any]) -> None:
    """Read TensorRT-LLM's speculative_config."""
    kind = str(settings.get("decoding_type"))
    method = {name.lower(): method for name, method in _DECODING.items()}.get(kind.lower())
    if method is None:
        raise SpecError(option.problem(f"decoding_type: no {kind} drafts are simulated"))
    drafter = drafter_of(
        draft, option, method, settings.get("speculative_model", settings.get("speculative_model_dir"))
    )
    if method == "ngram":
        drafter["lookup_max"] = settings.get("max_matching_ngram_size", 2)
    tokens = settings.get("max_draft_len", settings.get("num_nextn_predict_layers"))
    scheme: dict[str, Any] = {"kind": "chain", "tokens": tokens}
    if settings.get("use_dynamic_tree"):
        topk, total = settings.get("dynamic_tree_max_topK"), settings.get("max_total_draft_tokens")
        scheme = {"kind": "dynamic_tree", "steps": tokens, "topk": topk, "tokens": total}
    set_speculation(draft, option, drafter, scheme)
    names = {"decoding_type", "speculative_model", "speculative_model_dir", "max_matching_ngram_size", "max_draft_len"}
    names |= {"num_nextn_predict_layers", "use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens"}
    _rest(draft, option, settings, names)


def _rest(draft: PoolDraft, option: Given, settings: Mapping[str, Any], names: set[str]) -> None:
    for name in sorted(set(map(str, settings)) - names):
        draft.unknown(Given(f"{option.name}.{name}", None, option.file, option.line))
