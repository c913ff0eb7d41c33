"""Schemes: how many tokens are drafted, in which shape and when. Each class states all that other modules need to know
of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from simtune.specs.acceptance import Rates
from simtune.specs.base import Drafts, ErrorAt, Part, Seats, Seq
from simtune.specs.drafters import Drafter, DraftModel, Eagle
from simtune.specs.feedback import Rule
from simtune.specs.kinds import OneOf, by_kind
from simtune.specs.plugins import PartKind
from simtune.specs.trees import Node, Ranks, at_least, depth_of, dynamic, width_of


class Chunks(NamedTuple):
    """Division of a chain if each chunk is verified while the next one is drafted."""

    sizes: tuple[int, ...]
    """Draft tokens of each chunk."""
    draft_share: float
    """Share of the processors for the drafter while the target verifies."""
    verify_share: float
    """Share of the processors for the target while the drafter drafts."""


class RoundShape(NamedTuple):
    """Most that one sequence drafts and verifies in a round."""

    depth: int
    """Drafts in turn."""
    width: int
    """Tokens of the widest depth."""
    drafts: int
    """Draft tokens that the target computes, besides the one that is certain."""
    tree: bool
    replicas: int = 0
    """Replicas of a target that verifies earlier drafts while the drafter goes on; 0 if one waits for the other."""
    chunks: Chunks | None = None
    """Chunks of a chain that is verified in chunks, else None."""

    @property
    def overlapped(self) -> bool:
        """Drafted while the target verifies what was drafted before, on devices of the drafter's own."""
        return self.replicas > 0

    @property
    def in_turn(self) -> bool:
        """Drafted, then verified in one pass."""
        return not self.overlapped and self.chunks is None

    @property
    def ahead(self) -> int:
        """Drafts of a request that exist and are not verified, at most."""
        return self.depth * self.replicas if self.overlapped else self.drafts


def _chain(tokens: int) -> RoundShape:
    return RoundShape(depth=tokens, width=1, drafts=tokens, tree=False)


class Scheme(Part):
    """Scheme by which tokens are drafted. The defaults of this class are those of chains that are drafted in turn.

    A scheme from outside the package is named by import path, `kind: package.module:Class`; it must define its shape.
    """

    kind: str

    words: ClassVar[str] = "{kind}"
    """Text for a cell of a table, with fields in braces."""
    counts_ahead: ClassVar[bool] = False
    """True if a step can be scheduled before its drafts are made: their number is known then, and an engine has the
    scheme. Else scheduling is synchronous, whatever the host's work costs.
    """
    varies_with_batch: ClassVar[bool] = False
    """True if `tokens_for` depends on the batch."""
    adapts: ClassVar[bool] = False
    """True if a request's draft lengths depend on how many of its earlier drafts were kept; `lengths` computes them."""
    needs: ClassVar[tuple[type[Drafter], ...]] = ()
    """Drafter classes that the scheme works with; all if empty."""
    needs_because: ClassVar[str] = "does not go with drafter {drafter}"
    """Reason why only those drafters work, as a message about `{drafter}`."""

    @property
    @abstractmethod
    def shape(self) -> RoundShape:
        """Most that a sequence drafts and verifies in a round."""

    @property
    def stops_below(self) -> float | None:
        """The probability that all drafts are kept, the next one included, below which the drafter stops; None if it
        does not stop by itself.
        """
        return None

    @property
    def batch_tokens(self) -> int | None:
        """Draft tokens of the whole batch, given to the requests that are likeliest to keep them; None if each request
        has its own.
        """
        return None

    @property
    def _may_be_fewer(self) -> bool:
        return self.varies_with_batch or self.adapts or self.stops_below is not None or self.batch_tokens is not None

    @property
    def shortest(self) -> int:
        """Draft tokens in turn of the shortest round that drafts at all."""
        return 1 if self._may_be_fewer else self.shape.depth

    def tokens_for(self, batch: int) -> int:
        """Draft tokens of each request at this running batch."""
        return self.shape.drafts

    def lengths(self, kept: Iterator[int]) -> Iterator[int]:
        """Yield the drafts made in each round of a request that adapts, given how many would be kept of each if all
        were made; the number of a round is yielded before the result of the round is read.
        """
        return repeat(self.shape.depth)

    def in_words(self) -> str:
        """Return the scheme in words, for a cell of a table."""
        return self.words.format(**dict(self))

    def in_short(self) -> str:
        """Return the scheme for a cell of a map: the draft tokens, with a T before those of a tree and ≤ before a
        number that may be smaller.
        """
        shape = self.shape
        if shape.tree and self.as_chain() is None:
            return f"T{shape.drafts}"
        return f"≤{shape.depth}" if self._may_be_fewer else str(shape.depth)

    def as_chain(self) -> Chain | None:
        """The chain of one length that this is, whatever it is called."""
        return None

    def tree(self, ranks: Ranks) -> Sequence[Node]:
        """Nodes of a round that drafts all it may: for a chain, its path."""
        return [(1,) * depth for depth in range(1, self.shape.depth + 1)]

    def survival(self, rates: Rates) -> tuple[float, ...]:
        """P(at least d draft tokens are kept), d = 1 ... depth, of a round that drafts all it may.

        Raises ValueError if the rates do not reach as far as the drafts.
        """
        depth = self.shape.depth
        _check_depth(depth, rates)
        return tuple(accumulate(rates.chain(depth), mul))


def _check_depth(depth: int, rates: Rates) -> None:
    if rates.longest is not None and rates.longest < depth:
        raise ValueError(f"drafts are {depth} tokens deep, and the rates are known for {rates.longest}")


class Chain(Scheme):
    """Always the same number of draft tokens, one after the other."""

    kind: Literal["chain"] = "chain"
    tokens: Drafts

    words: ClassVar[str] = "chain of {tokens}"
    counts_ahead: ClassVar[bool] = True

    @property
    def shape(self) -> RoundShape:
        """Shape of a chain of `tokens` drafts in turn."""
        return _chain(self.tokens)

    def as_chain(self) -> Chain:
        """Itself."""
        return self


class BatchRange(Part):
    """Running batches from `first` to `last` sequences, both included."""

    first: Seats
    last: Seats
    tokens: Annotated[int, Field(ge=0, le=1024)]


class ByBatch(Scheme):
    """A chain whose length depends on the running batch: vLLM's num_speculative_tokens_per_batch_size."""

    kind: Literal["by_batch"] = "by_batch"
    max_tokens: Drafts = Field(description="longest draft that buffers are made for; longer ones are cut")
    ranges: Annotated[Seq[BatchRange], Field(min_length=1)]

    counts_ahead: ClassVar[bool] = True
    varies_with_batch: ClassVar[bool] = True

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

    @property
    def shape(self) -> RoundShape:
        """Shape of the longest chain."""
        return _chain(min(self.max_tokens, max(r.tokens for r in self.ranges)))

    @property
    def shortest(self) -> int:
        """Ranges without drafts are left out."""
        return min((r.tokens for r in self.ranges if r.tokens), default=0)

    def tokens_for(self, batch: int) -> int:
        """Gaps, and what lies beyond the last range, inherit the range before."""
        at = max((r for r in self.ranges if r.first <= batch), key=lambda r: r.first)
        return min(at.tokens, self.max_tokens)

    def in_words(self) -> str:
        """Return the scheme in words, with all ranges."""
        parts = [f"{min(r.tokens, self.max_tokens)} to batch {r.last}" for r in self.ranges]
        return "chain of " + ", ".join(parts)


class Threshold(Scheme):
    """Drafts on until some rejection is as likely as `stop_at`, by the drafter's own confidence (SpecDec++)."""

    kind: Literal["threshold"] = "threshold"
    max_tokens: Drafts
    stop_at: Annotated[float, Field(gt=0, le=1)]

    words: ClassVar[str] = "chain of {max_tokens} at most, stopped at {stop_at:g}"

    @property
    def shape(self) -> RoundShape:
        """A chain that is never stopped."""
        return _chain(self.max_tokens)

    @property
    def stops_below(self) -> float:
        """The probability of some rejection turned round."""
        return 1 - self.stop_at


class Adaptive(Scheme):
    """A chain whose length each request's own rounds decide, by a rule that looks at how many drafts were kept."""

    kind: Literal["adaptive"] = "adaptive"
    start: Drafts = Field(description="draft tokens of the first round")
    min_tokens: Drafts = 1
    max_tokens: Drafts
    rule: Rule

    words: ClassVar[str] = "chain of {min_tokens} to {max_tokens}, by acceptance ({rule.kind})"
    adapts: ClassVar[bool] = True

    @model_validator(mode="after")
    def _within(self) -> Self:
        if not self.min_tokens <= self.start <= self.max_tokens:
            raise ErrorAt(
                f"start ({self.start}) must lie between min_tokens ({self.min_tokens}) and max_tokens "
                f"({self.max_tokens})",
                "start",
            )
        return self

    @property
    def shape(self) -> RoundShape:
        """Shape of the longest chain."""
        return _chain(self.max_tokens)

    @property
    def shortest(self) -> int:
        """Drafts of the rule's shortest round."""
        return self.min_tokens

    def lengths(self, kept: Iterator[int]) -> Iterator[int]:
        """Yield the draft length of each round by the rule."""
        return self.rule.lengths(self.start, self.min_tokens, self.max_tokens, kept)


class TreeScheme(Scheme):
    """A scheme that drafts trees."""

    counts_ahead: ClassVar[bool] = True

    def survival(self, rates: Rates) -> tuple[float, ...]:
        """Return, for each depth, the sum of the weights of the tree's nodes."""
        depth = self.shape.depth
        _check_depth(depth, rates)
        ranks = rates.ranks(depth)
        nodes = self.tree(ranks)
        for node in nodes:
            for at, rank in enumerate(node):
                if rank > len(ranks[at]):
                    raise ValueError(
                        f"node {list(node)} of the tree has rank {rank} at depth {at + 1}, where the rates know "
                        f"{len(ranks[at])}"
                    )
        return at_least(nodes, ranks)


class StaticTree(TreeScheme):
    """A fixed tree. A node is the ranks along its path, from 1: [2, 1] is the best child of the second best root."""

    kind: Literal["static_tree"] = "static_tree"
    nodes: Annotated[Seq[Annotated[Seq[Drafts], Field(min_length=1)]], Field(min_length=1)]

    @field_validator("nodes")
    @classmethod
    def _rooted(cls, nodes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        distinct = set(nodes)
        if len(distinct) < len(nodes):
            raise ValueError("a node is listed twice; keep one")
        for node in nodes:
            if len(node) > 1 and node[:-1] not in distinct:
                raise ValueError(f"node {list(node)} has no parent {list(node[:-1])} in the tree")
        return nodes

    @property
    def shape(self) -> RoundShape:
        """Shape of the tree, all of whose nodes are verified."""
        return RoundShape(depth_of(self.nodes), width_of(self.nodes), len(self.nodes), tree=True)

    def tree(self, ranks: Ranks) -> Sequence[Node]:
        """The same nodes at all rates."""
        return self.nodes

    def as_chain(self) -> Chain | None:
        """Return the chain that the tree is if every node is the best child of the one before, else None."""
        return Chain(tokens=len(self.nodes)) if all(max(node) == 1 for node in self.nodes) else None

    def in_words(self) -> str:
        """Return the scheme in words: the size of the tree only."""
        return f"tree of {len(self.nodes)}, {depth_of(self.nodes)} deep"


class DynamicTree(TreeScheme):
    """EAGLE-2: `steps` times, the `topk` likeliest nodes get topk children each; of all, the `tokens` likeliest are
    verified. The root, which needs no verification, is not counted.
    """

    kind: Literal["dynamic_tree"] = "dynamic_tree"
    steps: Drafts
    topk: Drafts
    tokens: Drafts

    words: ClassVar[str] = "EAGLE-2 tree of {tokens}: {steps} steps, topk {topk}"

    @model_validator(mode="after")
    def _enough(self) -> Self:
        drafted = self.topk + (self.steps - 1) * self.topk**2
        if not self.steps <= self.tokens <= drafted:
            raise ValueError(
                f"tokens ({self.tokens}) must lie between steps ({self.steps}) and the {drafted} nodes that "
                f"{self.steps} steps with topk {self.topk} draft"
            )
        return self

    @property
    def shape(self) -> RoundShape:
        """Shape of the tree, in which at most `topk` nodes are expanded at each depth."""
        return RoundShape(self.steps, self.topk, self.tokens, tree=True)

    def tree(self, ranks: Ranks) -> Sequence[Node]:
        """Return the tree by rates of depth and rank only; real confidences know the context and choose better."""
        return dynamic(ranks, self.steps, self.topk, self.tokens)

    def as_chain(self) -> Chain | None:
        """Return the chain that the tree is if topk is 1, else None."""
        return Chain(tokens=self.tokens) if self.topk == 1 else None

    def in_words(self) -> str:
        """Return the scheme in words: those of a chain if topk is 1."""
        chain = self.as_chain()
        return super().in_words() if chain is None else chain.in_words()


class TokenBudget(Scheme):
    """Scheme with `tokens` draft tokens for the whole batch, given to the requests that are likeliest to keep them
    (TETRIS).
    """

    kind: Literal["budget"] = "budget"
    tokens: Drafts
    max_tokens: Drafts = Field(description="most draft tokens of one request")

    words: ClassVar[str] = "{tokens} tokens for the batch, {max_tokens} for each at most"

    @property
    def shape(self) -> RoundShape:
        """Shape of a request that gets the most drafts it may."""
        return _chain(self.max_tokens)

    @property
    def batch_tokens(self) -> int:
        """The budget."""
        return self.tokens


class BesideScheme(Scheme):
    """A scheme that drafts on devices of its own while the target verifies."""

    needs: ClassVar[tuple[type[Drafter], ...]] = (DraftModel,)
    needs_because: ClassVar[str] = (
        "drafts while the target verifies, which takes a model of its own; drafter {drafter} has none"
    )


class Pearl(BesideScheme):
    """A chain drafted while the target verifies the one before, on devices of the drafter's own (arXiv 2408.11850).

    After a rejection the target computes one token, beside which the drafter drafts `tokens`. If the first of them is
    that one, the others are verified next, beside the next `tokens`, and so on until something is rejected. Rates by
    position count from the first draft that a step verifies.
    """

    kind: Literal["pearl"] = "pearl"
    tokens: Annotated[int, Field(ge=2, le=1024, description="draft tokens in turn, beside each step of the target")]

    words: ClassVar[str] = "chain of {tokens} beside every step (PEARL)"

    @property
    def shape(self) -> RoundShape:
        """Windows that one target verifies."""
        return _windows(self.tokens, replicas=1)


class Dsi(BesideScheme):
    """A chain drafted on and on while replicas of the target verify it in turn (DSI, arXiv 2405.14105), in lockstep.

    In every tick the drafter drafts `tokens`, and the verification of one window begins on one replica; its verdict
    comes `replicas` ticks later, so that one verdict comes in every tick while all drafts are right. After a rejection
    the target begins anew, with the one token that follows: nothing is delivered until its verdict. From there on it is
    PEARL, which is DSI with one replica. Rounds are counted by verdict, so windows thrown away before theirs are not
    among the wasted tokens; times between tokens (ITL) are counted by tick, ticks without a verdict included.

    Replicas that make no tick shorter would only make verdicts later, so that a verdict comes after as many ticks as a
    verification lasts, rounded up. They are idle; their price and the power they draw while idle count. How many are
    used is found for one sequence of half the longest length, and holds for every batch.
    """

    kind: Literal["dsi"] = "dsi"
    tokens: Drafts = Field(description="the look-ahead: drafts made in turn in every tick, and verified together")
    replicas: Drafts = Field(
        description="replicas of the target, each on GPUs of its own with the whole KV cache; a verification no longer "
        "than replicas x tokens drafts keeps up with the drafter"
    )

    words: ClassVar[str] = "chain of {tokens} in every tick of {replicas} replicas (DSI)"

    @property
    def shape(self) -> RoundShape:
        """Windows that the replicas verify in turn."""
        return _windows(self.tokens, self.replicas)


def _windows(tokens: int, replicas: int) -> RoundShape:
    # The last draft of a window need not be computed to be verified: that it is right shows before it.
    return RoundShape(depth=tokens, width=1, drafts=tokens - 1, tree=False, replicas=replicas)


class Frontier(Scheme):
    """A chain in chunks on one GPU: each is verified while the next one is drafted (like FASER, arXiv 2604.20503).

    While both run, each has its share of the processors; alone it has them all. What is verified and kept is that of
    the chain.
    """

    kind: Literal["frontier"] = "frontier"
    tokens: Drafts
    chunks: Annotated[int, Field(ge=2, le=1024)]
    draft_share: Annotated[float, Field(gt=0, le=1, description="share of the processors while the target verifies")]
    verify_share: Annotated[float, Field(gt=0, le=1, description="share of the processors while the drafter drafts")]

    words: ClassVar[str] = "chain of {tokens} in {chunks} chunks"
    needs: ClassVar[tuple[type[Drafter], ...]] = (DraftModel, Eagle)
    needs_because: ClassVar[str] = (
        "drafts some tokens while others are verified, which takes a drafter that makes one after the other; drafter "
        "{drafter} does not"
    )

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
        """Draft tokens of each chunk; the first chunks get one more each if the tokens do not divide evenly."""
        size, remainder = divmod(self.tokens, self.chunks)
        return tuple(size + (i < remainder) for i in range(self.chunks))

    @property
    def shape(self) -> RoundShape:
        """A chain, cut."""
        return _chain(self.tokens)._replace(chunks=Chunks(self.sizes, self.draft_share, self.verify_share))


SCHEMES: dict[str, type[Scheme]] = by_kind(
    Chain, ByBatch, Threshold, Adaptive, StaticTree, DynamicTree, TokenBudget, Pearl, Dsi, Frontier
)
"""The schemes of the package by the `kind` in a spec."""

SCHEME: PartKind[Scheme] = PartKind("scheme", "simtune.schemes", SCHEMES, Scheme)  # type: ignore[type-abstract]
AnyScheme = Annotated[Scheme, OneOf(SCHEME, "shape")]
