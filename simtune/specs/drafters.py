"""Drafters, which propose tokens. Each class states what engines, costs and memory need to know of its drafter."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simtune.errors import Infeasible
from simtune.specs.base import Drafts, GpuCount, NonNegative, Part, Width
from simtune.specs.kinds import OneOf, by_kind
from simtune.specs.model import DenseFeedForward, LayerGroup, Model, MoeFeedForward
from simtune.specs.plugins import PartKind


class Drafter(Part):
    """A drafter, which proposes tokens. The defaults of this class are those of a drafter that does not run on the GPU.

    Fields `method`, `checkpoint` and `host_s` of a class are read here. A drafter from outside the package is named by
    import path, `kind: package.module:Class`.
    """

    kind: str

    on_gpu: ClassVar[bool] = False
    """True if it takes time of the GPU."""
    at_once: ClassVar[bool] = False
    """True if one pass makes all drafts of a round."""
    writes_kv: ClassVar[bool] = False
    """True if it has keys and values of its own, in the blocks of the requests."""
    awaited: ClassVar[bool] = False
    """True if drafts must be known before the next step can be scheduled, which makes scheduling synchronous whatever
    the plan sets: so it is in vLLM 0.32.
    """
    joins_hidden_states: ClassVar[bool] = False
    """True if a layer joins the embedding of each token to the hidden state it was drafted from."""
    drops_last_hit: ClassVar[bool] = False
    """True if the last block found in the prefix cache is computed again, because the drafter needs what the target
    makes of those tokens: EAGLE, MTP and block drafters in vLLM.
    """

    @property
    def label(self) -> str:
        """Method of the drafter if there are several of a kind, else its kind."""
        return str(getattr(self, "method", self.kind))

    @property
    def own_model(self) -> str | None:
        """The model spec it names, if it is a model of its own and not a part of the target."""
        return None

    @property
    def loads_checkpoint(self) -> bool:
        """True if an engine loads weights for it that are neither the target's nor those of a model of its own."""
        return "checkpoint" in type(self).model_fields

    @property
    def weights(self) -> str | None:
        """The checkpoint that it names for them."""
        return getattr(self, "checkpoint", None)

    @property
    def parallel_heads(self) -> int:
        """Heads on the target's last hidden state that run in parallel, however many drafts a round has."""
        return 0

    @property
    def most_depth(self) -> int | None:
        """Most drafts in turn that the drafter can make; None if there is no limit."""
        return self.parallel_heads or None

    @property
    def divides_prompts(self) -> bool:
        """True if groups of ranks that divide prompts divide them for the drafter too."""
        return False

    @property
    def own_head(self) -> bool:
        """True if a drafter that is a part of the target has an output head of its own."""
        return False

    @property
    def host_cost_s(self) -> float:
        """Host seconds per sequence and round, which nothing hides."""
        return float(getattr(self, "host_s", 0.0))

    def ranks(self, target: int) -> int:
        """Tensor-parallel ranks of the drafter if the target has `target` ranks; every drafter is on one pipeline
        stage.
        """
        return target

    def network(self, target: Model, draft: Model | None = None) -> Model | None:
        """Return the layers that draft, as a model; None if nothing or only parallel heads run on the GPU.

        `draft` is the model that `own_model` names. Raises Infeasible if it does not fit the target.
        """
        return None

    def passes(self, depth: int) -> int:
        """Forward passes in turn on the GPU that make `depth` drafts in turn."""
        if not self.on_gpu:
            return 0
        return min(depth, 1) if self.at_once else depth

    def lookahead(self, drafts: int) -> int:
        """Tokens beyond those of a step that a request's blocks must have room for: vLLM's num_lookahead_tokens."""
        return drafts if self.writes_kv else 0

    def extra_slots(self, drafts: int) -> int:
        """Tokens of the budget that a request takes for what only the drafter computes, as in vLLM."""
        return 0


class DraftModel(Drafter):
    """A smaller model of its own, with its own KV cache. It must share the target's vocabulary."""

    kind: Literal["draft_model"] = "draft_model"
    model: str = Field(description="a model spec, by name or file")
    tp: GpuCount | None = Field(None, description="the target's unless given; engines allow that or 1")

    on_gpu: ClassVar[bool] = True
    writes_kv: ClassVar[bool] = True

    @property
    def own_model(self) -> str:
        """The one it names."""
        return self.model

    def ranks(self, target: int) -> int:
        """Ranks of its own if `tp` is set, else those of the target."""
        return self.tp or target

    def network(self, target: Model, draft: Model | None = None) -> Model:
        """Return the draft model. Raises Infeasible if its vocabulary is not the target's."""
        assert draft is not None, "a draft_model needs its model"
        if draft.vocab_size != target.vocab_size:
            raise Infeasible(
                f"draft model {draft.name}: its vocabulary of {draft.vocab_size} is not the {target.vocab_size} of "
                f"{target.name}; its tokens would mean something else to the target"
            )
        return draft

    def extra_slots(self, drafts: int) -> int:
        """Return 1: the draft model reads the token that follows those of the target."""
        return 1


def _as_layers(drafter: Drafter, target: Model, group: LayerGroup, vocab: int) -> Model:
    return target.model_copy(
        update={"name": f"{target.name}-{drafter.kind}", "layers": (group,), "vocab_size": vocab, "hf": None}
    )


def _dense_like_the_last(target: Model, layers: int, width: int | None) -> LayerGroup:
    """Layers with the attention of the target's last and a dense feed-forward, `width` wide.

    Unless that is given, it is as wide as the target's own, or as the experts together that one token visits: so wide
    are the EAGLE-3 heads of Qwen3-30B-A3B and Kimi-K2, and half as wide as those of Qwen3-235B-A22B, DeepSeek-V3 and
    Llama-4-Scout (configs of sgl-project/SpecForge).
    """
    group = target.layers[-1].model_copy(update={"count": layers})
    feed_forward = group.feed_forward
    if isinstance(feed_forward, MoeFeedForward):
        feed_forward = DenseFeedForward(
            intermediate_size=feed_forward.experts_per_token * feed_forward.intermediate_size
            + feed_forward.shared_intermediate_size
        )
    if width is not None:
        feed_forward = feed_forward.model_copy(update={"intermediate_size": width})
    return group.model_copy(update={"feed_forward": feed_forward})


class Eagle(Drafter):
    """A head of one layer that drafts from the target's hidden states, step by step.

    Its attention is that of the target's last layer. An MTP head is that layer once more, its experts included; other
    heads have a dense feed-forward.
    """

    kind: Literal["eagle"] = "eagle"
    method: Literal["eagle", "eagle3", "mtp"] = "eagle3"
    checkpoint: str | None = Field(None, description="checkpoint that an engine loads; part of the target for mtp")
    draft_vocab_size: Width | None = Field(
        None, description="vocabulary of a reduced head of its own; the target's unless given"
    )
    intermediate_size: Width | None = Field(
        None,
        description="width of its dense feed-forward; unless given the target's, or that of all experts a token "
        "visits; not for mtp",
    )

    on_gpu: ClassVar[bool] = True
    writes_kv: ClassVar[bool] = True
    joins_hidden_states: ClassVar[bool] = True
    drops_last_hit: ClassVar[bool] = True

    @property
    def loads_checkpoint(self) -> bool:
        """Unless it is an MTP head, which comes with the target."""
        return self.method != "mtp"

    @property
    def divides_prompts(self) -> bool:
        """True for an MTP head, in vLLM from 0.32 on (`PCPManager.prepare_draft_prefill`)."""
        return self.method == "mtp"

    @property
    def weights(self) -> str | None:
        """Checkpoint of the drafter; None for an MTP head."""
        return self.checkpoint if self.loads_checkpoint else None

    @property
    def own_head(self) -> bool:
        """A reduced one."""
        return self.draft_vocab_size is not None

    def network(self, target: Model, draft: Model | None = None) -> Model:
        """Return the drafter as a model: one layer, under its own or the target's head."""
        if self.method == "mtp":
            group = target.layers[-1].model_copy(update={"count": 1})
        else:
            group = _dense_like_the_last(target, 1, self.intermediate_size)
        return _as_layers(self, target, group, self.draft_vocab_size or target.vocab_size)

    @model_validator(mode="after")
    def _dense_only(self) -> Self:
        if self.method == "mtp" and self.intermediate_size is not None:
            raise ValueError("intermediate_size: an mtp head is a layer like the target's last; leave it out")
        return self


class Medusa(Drafter):
    """Heads that each guess one further position, in parallel."""

    kind: Literal["medusa"] = "medusa"
    heads: Drafts
    checkpoint: str | None = None

    on_gpu: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    awaited: ClassVar[bool] = True

    @property
    def parallel_heads(self) -> int:
        """Number of heads, all of which run in parallel."""
        return self.heads


class Ngram(Drafter):
    """Copies what followed the last tokens earlier in the text: no weights, no GPU."""

    kind: Literal["ngram"] = "ngram"
    lookup_min: Drafts = 1
    lookup_max: Drafts
    host_s: NonNegative = Field(0.0, description="host seconds per sequence and round; unknown unless measured")

    awaited: ClassVar[bool] = True

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"lookup_min ({self.lookup_min}) exceeds lookup_max ({self.lookup_max})")
        return self


class Suffix(Drafter):
    """Copies from suffix trees over earlier outputs: no weights, no GPU."""

    kind: Literal["suffix"] = "suffix"
    host_s: NonNegative = Field(0.0, description="host seconds per sequence and round; unknown unless measured")

    awaited: ClassVar[bool] = True


class BlockDrafter(Drafter):
    """A few layers, dense, with the attention of the target's last, that draft a whole block in one step."""

    kind: Literal["block"] = "block"
    method: Literal["dflash", "dspark"] = "dflash"
    layers: Drafts
    checkpoint: str | None = None

    on_gpu: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    writes_kv: ClassVar[bool] = True
    drops_last_hit: ClassVar[bool] = True

    def network(self, target: Model, draft: Model | None = None) -> Model:
        """Return the drafter as a model: `layers` layers under the target's head."""
        return _as_layers(self, target, _dense_like_the_last(target, self.layers, None), target.vocab_size)

    def lookahead(self, drafts: int) -> int:
        """Return `drafts`, and one more for dflash, whose block begins with the token that is certain."""
        return drafts + (self.method == "dflash")

    def extra_slots(self, drafts: int) -> int:
        """The block; that of dspark begins with the last token of the target."""
        return drafts - (self.method == "dspark")


class ParallelDecoder(Drafter):
    """The target itself, which fills several positions in one pass: block diffusion, Jacobi iterations, heads inside.

    A pass works on the `tokens` of a chain and the one that is certain, keeps tokens from the left by the acceptance,
    and guesses the others again; no other drafter runs. The next pass reads the guesses of this one, so a step is
    scheduled when the one before has ended, on the GPU: the host's time is hidden.
    """

    kind: Literal["self"] = "self"


DRAFTERS: dict[str, type[Drafter]] = by_kind(DraftModel, Eagle, Medusa, Ngram, Suffix, BlockDrafter, ParallelDecoder)
"""The drafters of the package by the `kind` in a spec."""

DRAFTER = PartKind("drafter", "simtune.drafters", DRAFTERS, Drafter)
AnyDrafter = Annotated[Drafter, OneOf(DRAFTER)]
