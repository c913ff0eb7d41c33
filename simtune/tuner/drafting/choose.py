"""The best way to speculate at every batch size and context, and the closest setting that an engine offers.

A setting (a chain, a tree, a threshold, or nothing) yields some tokens per round and sequence whatever the load;
the time of a round depends on batch and context. In each cell of a grid the best setting is the one with the most
tokens per second, B x tokens / seconds; for a given size the heaviest nodes are best (`tree`), so all sizes and
depths are tried and nothing else needs to be.

Gains are of time for the same tokens. With w the share of its time an engine spends in a cell while it does not
speculate, settings s take

    sum over cells of w rate(no speculation) / rate(s)

of that time. Cells count alike unless shares are given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simtune.arrays import Array
from simtune.specs.acceptance import BetaMixture, Rates, Revealed
from simtune.specs.schemes import BatchRange, ByBatch, Chain, DynamicTree, Scheme, StaticTree, Threshold
from simtune.specs.trees import Node, depth_of, dynamic, weight, width_of
from simtune.tuner.drafting import chain, tree

S = TypeVar("S", bound=Scheme)

TOPK = (1, 2, 3, 4, 6, 8, 10)
"""Ranks per node (topk) of the dynamic trees that are tried."""

STOP_AT = tuple(round(0.05 * i, 2) for i in range(2, 20))
"""Thresholds that are tried: .1, .15, ... .95."""

BETA_REQUESTS = 32
"""Number of equally likely requests that stand for a Beta distribution."""


class RoundCost(Protocol):
    """Time of a round: `simtune.costs.drafting.RoundModel`, or any function with the same signature."""

    def __call__(self, batch: int, context: int, verify_tokens: int, draft_depth: int, draft_width: int) -> float:
        """Return the seconds of a round of `batch` sequences of `context` tokens, of which each verifies
        `verify_tokens` tokens after drafting `draft_depth` deep, at most `draft_width` tokens at a depth. (1, 0, 1) is
        a decode step."""
        ...


Cost = Callable[[int, int, int], float]
"""RoundCost at one batch and context."""


@dataclass(frozen=True)
class DraftSetting:
    """A way to speculate, the same in all cells; `scheme` is None for no speculation."""

    scheme: Scheme | None
    tokens: float
    """Mean tokens per round and sequence, including the target's own."""
    depth: int
    width: int
    verify_tokens: int
    """Tokens verified per sequence, including the certain one; for a threshold the largest number."""
    at_least: tuple[float, ...] | None = None
    """P(a sequence drafts at least k tokens) for k = 1 ... depth, if the scheme is a threshold."""

    def seconds(self, batch: int, cost: Cost) -> float:
        """Return the seconds of a round.

        A threshold drafts until the last sequence stops, and verifies the mean number of drafted tokens.
        """
        if self.at_least is None:
            return cost(self.verify_tokens, self.depth, self.width)
        at_least = np.array(self.at_least)
        any_drafts = np.concatenate([[1.0], 1 - (1 - at_least) ** batch, [0.0]])
        mean = 1 + float(at_least.sum())
        low = int(mean)
        total = 0.0
        for depth, share in enumerate((any_drafts[:-1] - any_drafts[1:]).tolist()):
            if share > 0:
                between = cost(low, depth, 1), cost(low + 1, depth, 1)
                total += share * (between[0] + (mean - low) * (between[1] - between[0]))
        return total

    @property
    def kind(self) -> str:
        """Kind of the scheme; `none` without one."""
        return "none" if self.scheme is None else self.scheme.kind

    def in_words(self) -> str:
        """Return the text for a cell of a table."""
        return "none" if self.scheme is None else self.scheme.in_words()

    def in_short(self) -> str:
        """Return the text for a cell of a map."""
        return "off" if self.scheme is None else self.scheme.in_short()


NONE = DraftSetting(scheme=None, tokens=1.0, depth=0, width=1, verify_tokens=1)


class Projection(NamedTuple, Generic[S]):
    """The closest setting to a schedule that an engine offers."""

    scheme: S | None
    """None if no setting that the engine knows is better than no speculation."""
    gain: float
    """Time without speculation over time with this scheme."""
    loss: float
    """Share of the schedule's gain in speed that this scheme loses."""


@dataclass(frozen=True)
class Schedule:
    """Rates of all settings in all cells, and the best settings that follow from them."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    settings: tuple[DraftSetting, ...]
    rates: Array
    """Tokens per second of the whole batch: (batches, contexts, settings). The first setting is no speculation."""
    shares: Array
    """Share of the time spent in each cell without speculation: (batches, contexts)."""
    dynamic: tuple[DraftSetting, ...]
    dynamic_rates: Array
    """Rates of the dynamic trees, which are used only for engines that offer nothing else."""

    def best(self, batch: int, context: int, kind: str | None = None) -> tuple[DraftSetting, float]:
        """Return (setting, gain over no speculation) of a cell: the best of all, or the best of one kind and no
        speculation."""
        b, c = self.batches.index(batch), self.contexts.index(context)
        at = [i for i, s in enumerate(self.settings) if kind in (None, s.kind) or i == 0]
        chosen = at[_first_best(self.rates[b, c, at])]
        return self.settings[chosen], float(self.rates[b, c, chosen] / self.rates[b, c, 0])

    def chain_lengths(self) -> NDArray[np.int64]:
        """Return (batches, contexts): the best length of a chain, 0 if speculation should be off."""
        return np.array([[self.best(b, c, "chain")[0].depth for c in self.contexts] for b in self.batches])

    def gains(self) -> Array:
        """Return (batches, contexts): rate of the best setting of each cell over no speculation."""
        gains: Array = self.rates.max(axis=2) / self.rates[:, :, 0]
        return gains

    @property
    def gain(self) -> float:
        """Time without speculation over time with the best setting of every cell."""
        return 1 / float((self.shares / self.gains()).sum())

    def fixed(self) -> tuple[DraftSetting, float]:
        """Return (setting, gain) of the best single setting for all cells, which may be no speculation."""
        at, gain = _best_everywhere(self.rates, self.rates[:, :, 0], self.shares)
        return self.settings[at], gain

    def by_batch(self) -> Projection[ByBatch]:
        """Return the best scheme that vLLM offers: the length of a chain by batch size alone.

        Batch sizes between two of the grid get the length of the lower one.
        """
        chains = [0, *(i for i, s in enumerate(self.settings) if s.kind == "chain")]
        none = self.rates[:, :, :1]
        # All contexts of a batch size share one length: vLLM selects it by batch size alone.
        seconds = (self.shares[:, :, None] * none / self.rates[:, :, chains]).sum(axis=1)
        at = [_first_best(-row) for row in seconds]
        lengths = [self.settings[chains[i]].depth for i in at]
        ends = [*(b - 1 for b in self.batches[1:]), self.batches[-1]]
        ranges: list[BatchRange] = []
        for first, last, tokens in zip((1, *self.batches[1:]), ends, lengths, strict=True):
            if ranges and ranges[-1].tokens == tokens:
                first = ranges.pop().first
            ranges.append(BatchRange(first=first, last=last, tokens=tokens))
        gain = 1 / float(sum(row[i] for row, i in zip(seconds, at, strict=True)))
        scheme = ByBatch(max_tokens=max(lengths), ranges=tuple(ranges)) if max(lengths) else None
        return Projection(scheme, gain, 1 - gain / self.gain)

    def projection_for(self, schemes: Collection[type[Scheme]]) -> Projection[Scheme]:
        """Return the best projection for an engine that knows these schemes; no drafts if it knows none."""
        projections = [projection_of(self) for scheme, projection_of in PROJECTIONS.items() if scheme in schemes]
        return max(
            projections, key=lambda projection: projection.gain, default=Projection(None, 1.0, 1 - 1 / self.gain)
        )

    def dynamic_tree(self) -> Projection[DynamicTree]:
        """Return the best scheme that SGLang and TensorRT-LLM offer: one EAGLE-2 tree for all loads, or none.

        Its value is counted by depth and rank alone; a drafter that knows the context does better.
        """
        at, gain = _best_everywhere(self.dynamic_rates, self.rates[:, :, 0], self.shares)
        scheme = self.dynamic[at].scheme if gain > 1 else None
        assert scheme is None or isinstance(scheme, DynamicTree)
        gain = max(1.0, gain)
        return Projection(scheme, gain, 1 - gain / self.gain)


PROJECTIONS: dict[type[Scheme], Callable[[Schedule], Projection[Any]]] = {
    ByBatch: Schedule.by_batch,
    DynamicTree: Schedule.dynamic_tree,
}
"""Projection of a schedule onto each scheme that engines know."""


def choose(
    rates: Rates,
    round_cost: RoundCost,
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    max_length: int = 8,
    max_nodes: int = 64,
    shares: ArrayLike | None = None,
) -> Schedule:
    """Return the schedule for drafts up to max_length deep and of up to max_nodes tokens, in every cell of the grid.

    No longer drafts are considered than the rates cover. `shares` are those of time without speculation,
    (batches, contexts), scaled to 1.
    """
    longest = max_length if rates.longest is None else min(max_length, rates.longest)
    settings = (NONE, *chains(rates, longest), *trees(rates, longest, max_nodes), *thresholds(rates, longest))
    eagle = tuple(dynamic_trees(rates, longest, max_nodes))
    weights = np.ones((len(batches), len(contexts))) if shares is None else np.asarray(shares, dtype=np.float64)
    table = np.array(
        [[_rates((*settings, *eagle), batch, context, round_cost) for context in contexts] for batch in batches]
    )
    return Schedule(
        batches=tuple(batches),
        contexts=tuple(contexts),
        settings=settings,
        rates=table[:, :, : len(settings)],
        shares=weights / weights.sum(),
        dynamic=eagle,
        dynamic_rates=table[:, :, len(settings) :],
    )


def _rates(settings: Sequence[DraftSetting], batch: int, context: int, round_cost: RoundCost) -> list[float]:
    @cache
    def cost(verify_tokens: int, depth: int, width: int) -> float:
        return round_cost(batch, context, verify_tokens, depth, width)

    return [batch * s.tokens / s.seconds(batch, cost) for s in settings]


def chains(rates: Rates, longest: int) -> list[DraftSetting]:
    """Return a setting for every length of a chain."""
    alive = chain.survival(rates.chain(longest))
    return [
        DraftSetting(Chain(tokens=k), 1 + float(alive[:k].sum()), depth=k, width=1, verify_tokens=k + 1)
        for k in range(1, longest + 1)
    ]


def trees(rates: Rates, longest: int, max_nodes: int) -> list[DraftSetting]:
    """Return the best trees of every size and depth, without those that are chains."""
    ranks, tokens = rates.ranks(longest), {}
    for depth in range(1, longest + 1):
        if tree.falling(ranks[:depth]):
            order = tree.greedy(ranks[:depth], max_nodes)
            candidates = [order[:n] for n in range(len(order) + 1)]
        else:
            candidates = tree.best_trees(ranks[:depth], max_nodes)
        for nodes in candidates:
            if any(node[-1] > 1 for node in nodes):
                tokens[tuple(sorted(nodes))] = 1 + tree.expected_accepted(nodes, ranks)
    return [_tree(nodes, mean) for nodes, mean in tokens.items()]


def dynamic_trees(rates: Rates, longest: int, max_nodes: int) -> list[DraftSetting]:
    """Return EAGLE-2 trees that SGLang and TensorRT-LLM both accept: at least one token at each depth, at most topk."""
    ranks, settings = rates.ranks(longest), []
    widest = max((len(row) for row in ranks), default=1)
    for steps in range(1, longest + 1):
        for topk in (k for k in TOPK if k <= widest):
            nodes = dynamic(ranks, steps, topk, min(max_nodes, steps * topk))
            values = [0.0, *accumulate(weight(node, ranks) for node in nodes)]
            for tokens in range(steps, len(nodes) + 1):
                scheme = DynamicTree(steps=steps, topk=topk, tokens=tokens)
                mean = 1 + values[tokens]
                settings.append(DraftSetting(scheme, mean, depth=steps, width=topk, verify_tokens=tokens + 1))
    return settings


def thresholds(rates: Rates, longest: int) -> list[DraftSetting]:
    """Return thresholds of adaptive stopping; empty if the drafter's confidence carries no information."""
    settings = []
    for stop_at in STOP_AT:
        if isinstance(rates, Revealed):
            drafted = chain.stopped(rates.rate, rates.share, longest, 1 - stop_at)
        elif isinstance(rates, BetaMixture):
            from scipy.stats import beta

            quantiles = (np.arange(BETA_REQUESTS) + 0.5) / BETA_REQUESTS
            requests = beta.ppf(quantiles, rates.a, rates.b).tolist()
            drafted = chain.stopped_by_request(requests, [1 / BETA_REQUESTS] * BETA_REQUESTS, longest, 1 - stop_at)
        else:
            return []
        scheme = Threshold(max_tokens=longest, stop_at=stop_at)
        at_least = tuple(drafted.at_least.tolist())
        settings.append(DraftSetting(scheme, 1 + drafted.accepted, longest, 1, longest + 1, at_least))
    return settings


def _tree(nodes: tuple[Node, ...], tokens: float) -> DraftSetting:
    return DraftSetting(StaticTree(nodes=nodes), tokens, depth_of(nodes), width_of(nodes), len(nodes) + 1)


def _first_best(values: Array) -> int:
    """Return the index of the first value that is best except for rounding: settings are ordered from small to
    large."""
    return int(np.flatnonzero(values >= values.max() - 1e-12 * abs(values.max()))[0])


def _best_everywhere(rates: Array, none: Array, shares: Array) -> tuple[int, float]:
    """Return (setting, gain) with the least time over all cells."""
    seconds = (shares[:, :, None] * none[:, :, None] / rates).sum(axis=(0, 1))
    at = _first_best(-seconds)
    return at, 1 / float(seconds[at])
