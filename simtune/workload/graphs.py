"""Request graphs as numbers: which node waits for which, prompt lengths, and blocks that prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.graph import in_order
from simtune.specs.workload import GraphNode

BLOCK_TOKENS = 16
"""Tokens per block in which the shared text of a family is named."""


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
    def earliest(self) -> int:
        """Number of the member that arrives first in its family."""
        roots = [node for node, after in enumerate(self.after) if not after]
        return self.begin[min(roots, key=lambda node: max(self.delay[node], self.since[node]))]

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
