"""Request graphs as numbers: which node waits for which, prompt lengths, and blocks that prompts share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.graph import in_order
from simtune.specs.workload import GraphNode

BLOCK_TOKENS = 16
"""Tokens per block in which the shared text of a family is named."""


class FamilyShape(NamedTuple):
    """Nodes of one family, each after all nodes that it waits for; its requests are numbered node by node."""

    begin: Sequence[int]
    """Number of the first request of each node within the family."""
    counts: Sequence[int]
    first: Sequence[int]
    """Answers after which each node is over."""
    waits_for: Sequence[int]
    """Number of nodes that must be over before each node is sent."""
    followers: Sequence[Sequence[int]]
    """Nodes that wait for each node."""
    delay: Sequence[int]
    """Ticks from then until the node is sent."""
    since: Sequence[int]
    """Earliest tick of the node, counted from the arrival of the family."""
    node_of: Sequence[int]
    """Node of each request."""
    earliest: int
    """Number of the request that arrives first."""


class Families(ABC):
    """Families of a stream: consecutive requests that arrive as one and follow one another."""

    @property
    @abstractmethod
    def begin(self) -> Ints:
        """Number of the first request of each family, and after the last one the number of all requests."""

    @abstractmethod
    def shape(self, family: int) -> FamilyShape:
        """Return the nodes of a family."""

    @property
    @abstractmethod
    def needed(self) -> NDArray[np.bool_]:
        """True for each request that is answered to the end; the others may be aborted when their node is over."""

    @property
    @abstractmethod
    def has_pauses(self) -> bool:
        """True if requests are sent later than what they wait for is over."""

    @abstractmethod
    def longest_s(self, alone_s: Array, *, pauses: bool = True) -> Array:
        """Return the seconds that each family takes if every request takes `alone_s`, with or without its pauses."""

    def __len__(self) -> int:
        return len(self.begin) - 1

    @property
    def sizes(self) -> Ints:
        """Requests of each family."""
        return np.diff(self.begin)

    @property
    def may_abort(self) -> bool:
        """True if requests may be aborted."""
        return not self.needed.all()


@dataclass(frozen=True, slots=True)
class FamilyGraph:
    """A graph by numbers of nodes, each after all nodes that it waits for.

    Members of a family are numbered node by node.
    """

    names: tuple[str, ...]
    count: tuple[int, ...]
    first: tuple[int, ...]
    """Answers after which a node is over."""
    after: tuple[tuple[int, ...], ...]
    """Nodes that must be over before the node is sent."""
    delay: tuple[int, ...]
    """Ticks from then until the node is sent."""
    since: tuple[int, ...]
    """Earliest tick of the node, counted from the arrival of the family."""
    inherits: tuple[int, ...]
    """The node whose text the prompts of this node continue; -1 if they begin anew."""
    reads: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Requests per family."""
        return sum(self.count)

    @property
    def begin(self) -> tuple[int, ...]:
        """Number of the first member of each node."""
        return tuple(int(sum(self.count[:node])) for node in range(len(self.count)))

    @property
    def shape(self) -> FamilyShape:
        """The nodes as the simulation reads them."""
        begin = self.begin
        roots = [node for node, after in enumerate(self.after) if not after]
        followers: list[list[int]] = [[] for _ in self.after]
        for node, after in enumerate(self.after):
            for before in after:
                followers[before].append(node)
        return FamilyShape(
            begin=begin,
            counts=self.count,
            first=self.first,
            waits_for=[len(after) for after in self.after],
            followers=followers,
            delay=self.delay,
            since=self.since,
            node_of=self.node_of.tolist(),
            earliest=begin[min(roots, key=lambda node: max(self.delay[node], self.since[node]))],
        )

    @property
    def node_of(self) -> Ints:
        """Node of each member."""
        return np.repeat(np.arange(len(self.count)), self.count)

    @property
    def needed(self) -> NDArray[np.bool_]:
        """True for each member that is never aborted, as its node is over only when all of its requests are."""
        return np.repeat(np.equal(self.first, self.count), self.count)

    def parent_of(self, node: int, branch: int) -> int:
        """Return the member whose text a branch of a node continues; -1 for none."""
        parent = self.inherits[node]
        if parent < 0:
            return -1
        return self.begin[parent] + (branch if self.count[parent] > 1 else 0)

    def prompts(self, own: Ints, output: Ints) -> Ints:
        """Return the prompt tokens of each member (second axis) of each family: its own, those of the text that it
        inherits, and those of the answers that it reads."""
        prompts = own.copy()
        for node, begin in enumerate(self.begin):
            members = slice(begin, begin + self.count[node])
            for branch in range(self.count[node]):
                parent = self.parent_of(node, branch)
                if parent >= 0:
                    prompts[:, begin + branch] += prompts[:, parent] + output[:, parent]
            for source in self.reads[node]:
                at = self.begin[source]
                prompts[:, members] += output[:, at : at + self.count[source]].sum(axis=1, keepdims=True)
        return prompts

    def blocks(self, prompts: Ints, output: Ints) -> tuple[tuple[int, ...], ...]:
        """Return the names of the blocks of every member's text, family by family: inherited ones are those of the
        parent, and the samples of a node that begins anew share their prompt."""
        names: list[tuple[int, ...]] = []
        fresh = 0
        text_blocks = ((prompts + output) // BLOCK_TOKENS).tolist()
        prompt_blocks = (prompts // BLOCK_TOKENS).tolist()
        for family, length in enumerate(text_blocks):
            base = len(names)
            for node, begin in enumerate(self.begin):
                for branch in range(self.count[node]):
                    member, parent = begin + branch, self.parent_of(node, branch)
                    if parent >= 0:
                        shared = names[base + parent]
                    else:
                        shared = names[base + begin][: prompt_blocks[family][member]] if branch else ()
                    num_own = max(0, length[member] - len(shared))
                    names.append((*shared[: length[member]], *range(fresh, fresh + num_own)))
                    fresh += num_own
        return tuple(names)


class GraphFamilies(Families):
    """Families of a request graph: all have the same nodes."""

    def __init__(self, graph: FamilyGraph, families: int) -> None:
        self._graph, self._shape = graph, graph.shape
        self._begin: Ints = np.arange(families + 1) * graph.size

    @property
    def begin(self) -> Ints:
        """See `Families`."""
        return self._begin

    def shape(self, family: int) -> FamilyShape:
        """See `Families`."""
        return self._shape

    @property
    def needed(self) -> NDArray[np.bool_]:
        """See `Families`."""
        return np.tile(self._graph.needed, len(self))

    @property
    def has_pauses(self) -> bool:
        """See `Families`."""
        return any(self._graph.delay) or any(self._graph.since)

    def longest_s(self, alone_s: Array, *, pauses: bool = True) -> Array:
        """See `Families`; a node is over when the number of its requests that it needs are answered."""
        graph = self._graph
        of_families = alone_s.reshape(-1, graph.size)
        over_s: list[Array] = []
        for node, (begin, count, first) in enumerate(zip(graph.begin, graph.count, graph.first, strict=True)):
            sent_s = np.max([np.zeros(len(of_families)), *(over_s[before] for before in graph.after[node])], axis=0)
            if pauses:
                delay_s, since_s = graph.delay[node] / TICKS_PER_SECOND, graph.since[node] / TICKS_PER_SECOND
                sent_s = np.maximum(sent_s + delay_s, since_s)
            over_s.append(sent_s + np.sort(of_families[:, begin : begin + count], axis=1)[:, first - 1])
        longest: Array = np.max(over_s, axis=0)
        return longest


def compiled(nodes: Sequence[GraphNode]) -> FamilyGraph:
    """Return the graph of checked nodes, each after all nodes that it waits for."""
    nodes = [nodes[i] for i in in_order(nodes)]
    number = {node.name: i for i, node in enumerate(nodes)}
    return FamilyGraph(
        names=tuple(node.name for node in nodes),
        count=tuple(node.count for node in nodes),
        first=tuple(node.first or node.count for node in nodes),
        after=tuple(tuple(number[name] for name in dict.fromkeys(node.after)) for node in nodes),
        delay=tuple(round(node.delay_s * TICKS_PER_SECOND) for node in nodes),
        since=tuple(round(node.from_s * TICKS_PER_SECOND) for node in nodes),
        inherits=tuple(-1 if node.inherits is None else number[node.inherits] for node in nodes),
        reads=tuple(tuple(number[name] for name in node.reads) for node in nodes),
    )
