"""Request graphs: which requests of a family wait for which, and what is wrong with a graph that cannot run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

from pydantic import Field

from simtune.errors import suggest
from simtune.specs.base import ErrorAt

Branches = Annotated[int, Field(ge=1, le=4096)]
"""Requests of one node."""


class Vertex(Protocol):
    """Fields of a node of a graph that the checks read."""

    @property
    def name(self) -> str:
        """Name of the node; no two nodes have the same."""

    @property
    def count(self) -> int:
        """Requests that are sent together."""

    @property
    def first(self) -> int | None:
        """Answers after which the others are aborted."""

    @property
    def after(self) -> Sequence[str]:
        """Nodes that are over before."""

    @property
    def inherits(self) -> str | None:
        """Name of the node whose text this node continues."""

    @property
    def reads(self) -> Sequence[str]:
        """Nodes whose answers are read."""


def check_graph(nodes: Sequence[Vertex]) -> None:
    """Raise ErrorAt for a node that waits for itself or for an unknown node, that joins more branches than there are,
    or that reads what is not known when it is sent.
    """
    by_name = {node.name: node for node in nodes}
    for i, node in enumerate(nodes):
        if any(earlier.name == node.name for earlier in nodes[:i]):
            raise ErrorAt(f"two nodes are called {node.name}; give one another name", i, "name")
        _known(i, node, by_name)
        if node.first is not None and node.first > node.count:
            raise ErrorAt(f"{node.name} has {node.count} branches, so no {node.first} can be joined", i, "first")
    before = ancestors(nodes)
    for i, node in enumerate(nodes):
        if node.name in before[node.name]:
            raise ErrorAt(f"{node.name} waits for itself: the graph is cyclic; take one of these out", i, "after")
        _readable(i, node, by_name, before[node.name])


def _known(i: int, node: Vertex, by_name: Mapping[str, Vertex]) -> None:
    parent = () if node.inherits is None else (node.inherits,)
    for key, names in (("after", node.after), ("inherits", parent), ("reads", node.reads)):
        for name in names:
            if name not in by_name:
                raise ErrorAt(f"no node is called {name!r}{suggest(name, by_name)}", i, key)


def _readable(i: int, node: Vertex, by_name: Mapping[str, Vertex], before: set[str]) -> None:
    parent = () if node.inherits is None else (node.inherits,)
    for key, names in (("inherits", parent), ("reads", node.reads)):
        for name in names:
            if name not in before:
                raise ErrorAt(f"{node.name} does not wait for {name}; name it under after", i, key)
            if by_name[name].first is not None:
                raise ErrorAt(f"which answers of {name} come first is not known beforehand", i, key)
    if node.inherits is not None and 1 < by_name[node.inherits].count < node.count:
        most = by_name[node.inherits].count
        raise ErrorAt(f"{node.inherits} has {most} texts to go on from, not {node.count}", i, "count")


def ancestors(nodes: Sequence[Vertex]) -> dict[str, set[str]]:
    """Return for each node, by name, all nodes that are over before it is sent; itself among them if it waits for
    itself.
    """
    after = {node.name: set(node.after) for node in nodes}
    for _ in nodes:
        after = {name: before.union(*(after[parent] for parent in before)) for name, before in after.items()}
    return after


def in_order(nodes: Sequence[Vertex]) -> list[int]:
    """Return the numbers of the nodes, each after all nodes that it waits for."""
    before = ancestors(nodes)
    return sorted(range(len(nodes)), key=lambda i: len(before[nodes[i].name]))
