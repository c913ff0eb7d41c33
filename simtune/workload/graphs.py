"""What a request graph comes to in numbers: who waits for whom, how long every prompt is, what prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simtune.arrays import Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.graph import in_order
from simtune.specs.workload import GraphNode

BLOCK_TOKENS = 16
"""What prompts of a family share is told in blocks of so many tokens."""


@dataclass(frozen=True, slots=True)
class FamilyGraph:
    """A graph by numbers of nodes, each behind all that it waits for. Members of a family are numbered node by node."""

    names: tuple[str, ...]
    count: tuple[int, ...]
    first: tuple[int, ...]
    """Answers after which a node is over."""
    after: tuple[tuple[int, ...], ...]
    """Nodes that must be over before it is sent."""
    delay: tuple[int, ...]
    """Ticks from then until it is."""
    since: tuple[int, ...]
    """Ticks after the arrival of the family before which it is not."""
    inherits: tuple[int, ...]
    """The node whose text its prompts go on from; -1 where they begin anew."""
    reads: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Requests of a family."""
        return sum(self.count)

    @property
    def begin(self) -> tuple[int, ...]:
        """The first member of each node."""
        return tuple(int(sum(self.count[:node])) for node in range(len(self.count)))

    @property
    def earliest(self) -> int:
        """The member that comes before all others of its family, or with them."""
        roots = [node for node, after in enumerate(self.after) if not after]
        return self.begin[min(roots, key=lambda node: max(self.delay[node], self.since[node]))]

    @property
    def node_of(self) -> Ints:
        """The node of each member."""
        return np.repeat(np.arange(len(self.count)), self.count)

    def parent_of(self, node: int, branch: int) -> int:
        """The member whose text a branch of a node goes on from; -1 for none."""
        parent = self.inherits[node]
        if parent < 0:
            return -1
        return self.begin[parent] + (branch if self.count[parent] > 1 else 0)

    def prompts(self, own: Ints, output: Ints) -> Ints:
        """Prompt tokens of each member (second axis) of each family, from those that are its own and from answers."""
        prompts = own.copy()
        for node, begin in enumerate(self.begin):
            members = slice(begin, begin + self.count[node])
            for branch in range(self.count[node]):
                parent = self.parent_of(node, branch)
                if parent >= 0:
                    prompts[:, begin + branch] += prompts[:, parent] + output[:, parent]
            for other in self.reads[node]:
                at = self.begin[other]
                prompts[:, members] += output[:, at : at + self.count[other]].sum(axis=1, keepdims=True)
        return prompts

    def blocks(self, prompts: Ints, output: Ints) -> tuple[tuple[int, ...], ...]:
        """Names of the blocks of every member's text, family by family: inherited ones are those of the parent, and the
        samples of a node that begins anew have their prompt in common."""
        names: list[tuple[int, ...]] = []
        fresh = 0
        whole = ((prompts + output) // BLOCK_TOKENS).tolist()
        asked = (prompts // BLOCK_TOKENS).tolist()
        for family, length in enumerate(whole):
            base = len(names)
            for node, begin in enumerate(self.begin):
                for branch in range(self.count[node]):
                    member, parent = begin + branch, self.parent_of(node, branch)
                    if parent >= 0:
                        shared = names[base + parent]
                    else:
                        shared = names[base + begin][: asked[family][member]] if branch else ()
                    own = max(0, length[member] - len(shared))
                    names.append((*shared[: length[member]], *range(fresh, fresh + own)))
                    fresh += own
        return tuple(names)


def compiled(nodes: Sequence[GraphNode]) -> FamilyGraph:
    """A graph that was checked, its nodes each behind all that it waits for."""
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
