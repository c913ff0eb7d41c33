"""Speculation: who drafts, by which scheme, and how often the target agrees."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from simtune.specs.base import Count, ErrorAt, NonNegative, Part, Seq

# --- drafters ---------------------------------------------------------------------------------------------


class DraftModel(Part):
    """A smaller model of its own, with its own KV cache. It must share the target's vocabulary."""

    kind: Literal["draft_model"] = "draft_model"
    model: str = Field(description="a model spec, by name or file")
    tp: Count | None = Field(None, description="the target's unless given; engines allow that or 1")


class Eagle(Part):
    """A head of one layer like the target's last that drafts from the target's hidden states, step by step."""

    kind: Literal["eagle"] = "eagle"
    method: Literal["eagle", "eagle3", "mtp"] = "eagle3"
    checkpoint: str | None = Field(None, description="what an engine loads; part of the target for mtp")
    draft_vocab_size: Count | None = Field(None, description="of a reduced head of its own; the target's unless given")


class Medusa(Part):
    """Heads that each guess one further position, all at once."""

    kind: Literal["medusa"] = "medusa"
    heads: Count
    checkpoint: str | None = None


class Ngram(Part):
    """Copies what followed the last tokens earlier in the text: no weights, no GPU."""

    kind: Literal["ngram"] = "ngram"
    lookup_min: Count = 1
    lookup_max: Count
    host_s: NonNegative = Field(0.0, description="host seconds per sequence and round; not known unless measured")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"lookup_min ({self.lookup_min}) exceeds lookup_max ({self.lookup_max})")
        return self


class Suffix(Part):
    """Copies from suffix trees over earlier outputs: no weights, no GPU."""

    kind: Literal["suffix"] = "suffix"
    host_s: NonNegative = Field(0.0, description="host seconds per sequence and round; not known unless measured")


class BlockDrafter(Part):
    """A few layers like the target's that draft a whole block in one step."""

    kind: Literal["block"] = "block"
    method: Literal["dflash", "dspark"] = "dflash"
    layers: Count
    checkpoint: str | None = None


Drafter = Annotated[DraftModel | Eagle | Medusa | Ngram | Suffix | BlockDrafter, Field(discriminator="kind")]


def awaited(drafter: Drafter) -> bool:
    """Whether the drafts must be known before the next step can be scheduled, so that with them scheduling is
    synchronous whatever is asked for: so it is in vLLM 0.32."""
    return isinstance(drafter, Medusa | Ngram | Suffix)


# --- schemes ----------------------------------------------------------------------------------------------


class Chain(Part):
    """Always the same number of draft tokens, one after the other."""

    kind: Literal["chain"] = "chain"
    tokens: Count


class BatchRange(Part):
    """Running batches from `first` to `last` sequences, both included."""

    first: Count
    last: Count
    tokens: Annotated[int, Field(ge=0)]


class ByBatch(Part):
    """A chain whose length depends on the running batch: vLLM's num_speculative_tokens_per_batch_size."""

    kind: Literal["by_batch"] = "by_batch"
    max_tokens: Count = Field(description="the longest draft buffers are made for; longer ones are cut to it")
    ranges: Annotated[Seq[BatchRange], Field(min_length=1)]

    @field_validator("ranges")
    @classmethod
    def _ascending(cls, ranges: tuple[BatchRange, ...]) -> tuple[BatchRange, ...]:
        if ranges[0].first != 1:
            raise ValueError(f"the first range must begin at a batch of 1, not {ranges[0].first}")
        end = 0
        for r in ranges:
            if r.first <= end or r.last < r.first:
                raise ValueError(f"ranges must ascend without overlap: {r.first}-{r.last} comes after {end}")
            end = r.last
        return ranges

    def tokens_for(self, batch: int) -> int:
        """Draft tokens at this batch: gaps, and what lies beyond the last range, inherit the range before."""
        at = max((r for r in self.ranges if r.first <= batch), key=lambda r: r.first)
        return min(at.tokens, self.max_tokens)


class Threshold(Part):
    """Drafts on until some rejection is as likely as `stop_at`, by the drafter's own confidence (SpecDec++)."""

    kind: Literal["threshold"] = "threshold"
    max_tokens: Count
    stop_at: Annotated[float, Field(gt=0, le=1)]


class StaticTree(Part):
    """A fixed tree. A node is the ranks along its path, from 1: [2, 1] is the best child of the second best root."""

    kind: Literal["static_tree"] = "static_tree"
    nodes: Annotated[Seq[Annotated[Seq[Count], Field(min_length=1)]], Field(min_length=1)]

    @field_validator("nodes")
    @classmethod
    def _rooted(cls, nodes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        known = set(nodes)
        if len(known) < len(nodes):
            raise ValueError("a node stands there twice")
        for node in nodes:
            if len(node) > 1 and node[:-1] not in known:
                raise ValueError(f"node {list(node)} has no parent {list(node[:-1])} in the tree")
        return nodes


class DynamicTree(Part):
    """EAGLE-2: `steps` levels of the `topk` likeliest nodes with topk children each, of which the `tokens`
    likeliest are verified. The root, which needs no verification, is not counted.
    """

    kind: Literal["dynamic_tree"] = "dynamic_tree"
    steps: Count
    topk: Count
    tokens: Count

    @model_validator(mode="after")
    def _enough(self) -> Self:
        drafted = self.topk + (self.steps - 1) * self.topk**2
        if not self.steps <= self.tokens <= drafted:
            raise ValueError(
                f"tokens ({self.tokens}) must lie between steps ({self.steps}) and the {drafted} nodes that "
                f"{self.steps} steps with topk {self.topk} draft"
            )
        return self


class TokenBudget(Part):
    """`tokens` draft tokens for the whole batch, to where they are likeliest to be kept (TETRIS)."""

    kind: Literal["budget"] = "budget"
    tokens: Count
    max_tokens: Count = Field(description="of one request")


class Pearl(Part):
    """A chain drafted while the target verifies the one before, on devices of the drafter's own (arXiv 2408.11850).

    After a rejection the target computes one token, beside which the drafter drafts `tokens`. If the first of them is
    that one, the others are verified next, beside the next `tokens`, and so on until something is rejected. Rates by
    position count from the first draft that a step verifies.
    """

    kind: Literal["pearl"] = "pearl"
    tokens: Annotated[int, Field(ge=2, description="in turn, beside each step of the target")]
    replicas: ClassVar[int] = 1


class Dsi(Part):
    """A chain drafted on and on while replicas of the target verify it in turn (DSI, arXiv 2405.14105), in lockstep.

    In every tick the drafter drafts `tokens`, and the verification of one window begins on one replica; its verdict
    comes `replicas` ticks later, so that one verdict comes in every tick while all drafts are right. After a rejection
    the target begins anew, with the one token that follows: nothing is delivered until its verdict. From there on it
    is PEARL, which is DSI with one replica. Rounds are counted by verdict, so windows thrown away before theirs are not
    among the wasted tokens; times between tokens (ITL) are told by tick, with those that bring no verdict.
    """

    kind: Literal["dsi"] = "dsi"
    tokens: Count = Field(description="the look-ahead: drafts made in turn in every tick, and verified together")
    replicas: Count = Field(
        description="of the target, each on GPUs of its own with the whole KV cache; a verification no longer than "
        "replicas x tokens drafts keeps up with the drafter"
    )


class Frontier(Part):
    """A chain in chunks on one GPU: each is verified while the next one is drafted (like FASER, arXiv 2604.20503).

    While both run, each has its share of the processors; alone it has them all. What is verified and kept is that of
    the chain.
    """

    kind: Literal["frontier"] = "frontier"
    tokens: Count
    chunks: Annotated[int, Field(ge=2)]
    draft_share: Annotated[float, Field(gt=0, le=1, description="of the processors, while the target verifies")]
    verify_share: Annotated[float, Field(gt=0, le=1, description="of the processors, while the drafter drafts")]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.chunks > self.tokens:
            raise ValueError(f"{self.tokens} tokens cannot be cut into {self.chunks} chunks")
        if self.draft_share + self.verify_share > 1:
            raise ValueError(
                f"draft_share ({self.draft_share:g}) and verify_share ({self.verify_share:g}) are of the same "
                "processors and exceed 1 together"
            )
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Draft tokens of each chunk; what is left over goes to the first ones."""
        size, rest = divmod(self.tokens, self.chunks)
        return tuple(size + (i < rest) for i in range(self.chunks))


Scheme = Annotated[
    Chain | ByBatch | Threshold | StaticTree | DynamicTree | TokenBudget | Pearl | Dsi | Frontier,
    Field(discriminator="kind"),
]


class Speculation(Part):
    """What a pool drafts with, by which scheme, and the acceptance it counts on."""

    drafter: Drafter
    scheme: Scheme
    acceptance: str = Field(description="an acceptance spec, by name or file")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        check_scheme(self.drafter, self.scheme)
        return self

    def own_devices(self, tp: int) -> int:
        """GPUs beside those of one target on `tp`: of its other replicas, and what the drafter has for itself."""
        if not isinstance(self.scheme, Pearl | Dsi):
            return 0
        assert isinstance(self.drafter, DraftModel)
        return (self.scheme.replicas - 1) * tp + (self.drafter.tp or tp)


def check_scheme(drafter: Drafter, scheme: Scheme | None) -> None:
    """Raises ErrorAt where a drafter cannot do what a scheme asks."""
    if isinstance(scheme, Pearl | Dsi) and not isinstance(drafter, DraftModel):
        raise ErrorAt(
            f"scheme {scheme.kind} drafts while the target verifies, which takes a model of its own; drafter "
            f"{drafter.kind} has none: take a draft_model, or a chain",
            "scheme",
        )
    if isinstance(scheme, Frontier) and not isinstance(drafter, DraftModel | Eagle):
        raise ErrorAt(
            f"scheme frontier drafts some tokens while others are verified, which takes a drafter that makes one after "
            f"the other; drafter {drafter.kind} does not: take a draft_model or eagle, or a chain",
            "scheme",
        )
