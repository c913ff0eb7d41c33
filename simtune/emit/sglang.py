"""Drafts as SGLang reads them: its long options without their dashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from simtune.emit.emitter import Emitter, Settings, loaded
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Ngram
from simtune.specs.model import Model
from simtune.specs.schemes import Chain, DynamicTree, Scheme
from simtune.specs.speculation import Speculation

_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "dflash": "DFLASH", "dspark": "DSPARK"}

_OF_A_LOOKUP = (
    "speculative-algorithm",
    "speculative-num-draft-tokens",
    "speculative-ngram-min-bfs-breadth",
    "speculative-ngram-max-bfs-breadth",
)


def _chain(scheme: Chain) -> Settings:
    return _tree(scheme.tokens, 1, scheme.tokens)


def _dynamic_tree(scheme: DynamicTree) -> Settings:
    return _tree(scheme.steps, scheme.topk, scheme.tokens)


def _tree(steps: int, topk: int, tokens: int) -> Settings:
    """SGLang's number of draft tokens counts the root, which needs no drafting."""
    return {
        "speculative-num-steps": steps,
        "speculative-eagle-topk": topk,
        "speculative-num-draft-tokens": tokens + 1,
    }


def _draft_model(drafter: DraftModel, checkpoint: str | None) -> Settings:
    return {"speculative-algorithm": "STANDALONE", **loaded("speculative-draft-model-path", checkpoint)}


def _part_of_the_target(drafter: Eagle | BlockDrafter, checkpoint: str | None) -> Settings:
    algorithm = _ALGORITHMS[drafter.method]
    return {"speculative-algorithm": algorithm, **loaded("speculative-draft-model-path", checkpoint)}


def _ngram(drafter: Ngram, checkpoint: str | None) -> Settings:
    return {
        "speculative-algorithm": "NGRAM",
        "speculative-ngram-min-bfs-breadth": 1,
        "speculative-ngram-max-bfs-breadth": 1,
    }


class Sglang(Emitter):
    """Options of `python -m sglang.launch_server`."""

    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    options: ClassVar[Mapping[str, type]] = {
        "speculative-algorithm": str,
        "speculative-draft-model-path": str,
        "speculative-num-steps": int,
        "speculative-eagle-topk": int,
        "speculative-num-draft-tokens": int,
        "speculative-adaptive": bool,
        "speculative-ngram-min-bfs-breadth": int,
        "speculative-ngram-max-bfs-breadth": int,
    }
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], Settings]]] = {Chain: _chain, DynamicTree: _dynamic_tree}
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], Settings]]] = {
        DraftModel: _draft_model,
        Eagle: _part_of_the_target,
        BlockDrafter: _part_of_the_target,
        Ngram: _ngram,
    }
    takes = "it drafts one chain or one EAGLE-2 tree for all loads: Schedule.dynamic_tree()"

    def speculation(self, speculation: Speculation, draft: Model | None = None) -> Settings:
        """See `Emitter.speculation`; a lookup is told nothing of steps."""
        settings = super().speculation(speculation, draft)
        if settings["speculative-algorithm"] == "NGRAM":
            return {option: settings[option] for option in _OF_A_LOOKUP}
        return settings

    def refuses_together(self, drafter: Drafter, scheme: Scheme) -> str:
        """Only heads that draft step by step, and draft models, draft trees."""
        if not scheme.shape.tree or isinstance(drafter, DraftModel | Eagle):
            return ""
        return f"a {drafter.kind} drafter drafts a chain"
