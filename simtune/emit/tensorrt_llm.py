"""Drafts as TensorRT-LLM reads them: the `speculative_config` of its YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from simtune.emit.emitter import Emitter, Files, Settings, loaded
from simtune.specs.drafters import Drafter, DraftModel, Eagle, Ngram
from simtune.specs.schemes import Chain, DynamicTree, Scheme


def _chain(scheme: Chain) -> Settings:
    return {"max_draft_len": scheme.tokens}


def _dynamic_tree(scheme: DynamicTree) -> Settings:
    return {
        "max_draft_len": scheme.steps,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": scheme.topk,
        "max_total_draft_tokens": scheme.tokens,
    }


def _draft_model(drafter: DraftModel, checkpoint: str | None) -> Settings:
    return {"decoding_type": "Draft_Target", **loaded("speculative_model", checkpoint)}


def _eagle(drafter: Eagle, checkpoint: str | None) -> Settings:
    kind = "MTP" if drafter.method == "mtp" else "Eagle3"
    return {"decoding_type": kind, **loaded("speculative_model", checkpoint)}


def _ngram(drafter: Ngram, checkpoint: str | None) -> Settings:
    return {"decoding_type": "NGram", "max_matching_ngram_size": drafter.lookup_max}


class TensorrtLlm(Emitter):
    """The speculative_config of `trtllm-serve`."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    version = "commit 0004396, after 1.2.1"
    options: ClassVar[Mapping[str, type]] = {
        "decoding_type": str,
        "max_draft_len": int,
        "speculative_model": str,
        "use_dynamic_tree": bool,
        "dynamic_tree_max_topK": int,
        "max_total_draft_tokens": int,
        "max_matching_ngram_size": int,
    }
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], Settings]]] = {Chain: _chain, DynamicTree: _dynamic_tree}
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], Settings]]] = {
        DraftModel: _draft_model,
        Eagle: _eagle,
        Ngram: _ngram,
    }
    takes = "it drafts one chain or one EAGLE-2 tree: Schedule.dynamic_tree()"
    no_drafter = "{title} ({version}): no {drafter} drafter is written here"

    def refuses_together(self, drafter: Drafter, scheme: Scheme) -> str:
        """Trees are drafted by its Eagle3, with no more tokens than it has room for."""
        if not isinstance(scheme, DynamicTree):
            return ""
        if not isinstance(drafter, Eagle) or drafter.method == "mtp":
            return "only its Eagle3 drafts trees"
        if scheme.tokens > scheme.topk * scheme.steps:
            return (
                f"its tree of {scheme.tokens} tokens must have between {scheme.steps} and topk x steps = "
                f"{scheme.topk * scheme.steps}"
            )
        return ""

    def drafting_file(self, settings: Settings, what: str) -> Files:
        """Settings of speculation stand under a key of their own."""
        return super().drafting_file({"speculative_config": settings}, what)
