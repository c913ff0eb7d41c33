"""Protocols of cost models. Any object with the two methods of `StepCosts` can drive the simulator.

Three more protocols are looked up once, when an engine core is made: `ImbalanceCosts` by its methods, `RoundCosts` if
the scheduler drafts, `GroupCosts` if cores step together. A fourth, `TellingCosts`, is used after a run; a
fifth, `ElasticCosts`, if events change the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

UNBOUNDED = 1 << 60
"""Number of steps that no run reaches: the span of a form that holds forever."""

ChunkList = Sequence[tuple[int, int]]
"""Prompt chunks of a step: tokens computed before, and new tokens."""


class StepCosts(Protocol):
    """Duration of engine steps in integer ticks (`simtune.costs.ticks`).

    `context_tokens` is the number of KV tokens the decodes of a step read: the sum over decoding sequences
    of tokens already computed, plus one each. It grows by `num_decodes` per step while no sequence joins or
    leaves.

    Two laws let many steps be combined to one jump that is exact to the tick:

    * `mixed(b, c, [], b) == decode(b, c)[0]`
    * with `first, slope, span = decode(b, c)`, `decode(b, c + k * b)[0] == first + k * slope` for 0 <= k <
      span
    """

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """Return (ticks of the next pure decode step, ticks that each further step takes longer, steps for which that
        holds).

        The third number is at least 1. `num_decodes` must be at least 1.
        """
        ...

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """Ticks of one step with prefill chunks (past tokens, new tokens).

        `num_samples` sequences get a token: all decodes, and every chunk that completes its prompt.
        """
        ...


@runtime_checkable
class ImbalanceCosts(StepCosts, Protocol):
    """Costs with load imbalance: `decode` and `mixed` assume equal contexts; a step takes longer if the longest context
    exceeds the mean."""

    @property
    def balanced(self) -> bool:
        """True if `imbalance` is always 0, so that it need not be called."""
        ...

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        """Ticks on top of `decode` or, with chunks, of `mixed`, for a longest context of `longest_context` tokens.

        While no sequence joins or leaves, all contexts grow alike; these ticks must not change then.
        """
        ...


@runtime_checkable
class GroupCosts(StepCosts, Protocol):
    """Costs of one group of ranks under data-parallel attention: `decode` and `mixed` assume that all groups have as
    many tokens as this one; the experts that they share take less or more time if they have not."""

    def together(self, ticks: int, num_tokens: int, num_seqs: int, everybodys: int, with_chunks: bool) -> int:
        """Ticks of a step of `ticks` ticks, with `num_tokens` tokens and `num_seqs` sequences of its own, if all groups
        together have `everybodys` tokens. A step that waits for the host stays as long as it is."""
        ...


@runtime_checkable
class ElasticCosts(StepCosts, Protocol):
    """Costs from outside that are known for other numbers of data-parallel ranks too, for events and autoscaling that
    change it."""

    def with_ranks(self, ranks: int) -> StepCosts:
        """Return the costs of an instance that goes on with `ranks` ranks."""
        ...


@runtime_checkable
class TellingCosts(StepCosts, Protocol):
    """Costs that report the basis of the time of a step."""

    def basis(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> int:
        """Return a `simtune.costs.predict.Basis`."""
        ...

    @property
    def log_sd(self) -> float:
        """Standard deviation of the log error of steps that were not measured."""
        ...


@runtime_checkable
class RoundCosts(StepCosts, Protocol):
    """Duration of the steps of an engine that drafts and verifies: `round` and `rounds` replace `decode` and `mixed`.

    Contexts grow as drafts are accepted, irregularly. So the rounds of a jump are listed one by one, and the law is

    * `rounds(b, t, d, computed)[i] == sum(round(b, t, d, c + t) for c in computed[: i + 1])`.
    """

    def round(
        self,
        num_decodes: int,
        verify_tokens: int,
        depth: int,
        context_tokens: int,
        chunks: Sequence[tuple[int, int]] = (),
        completing: int = 0,
    ) -> int:
        """Ticks of one step in which `num_decodes` sequences verify `verify_tokens` tokens, one each and their drafts,
        with prefill chunks (past tokens, new tokens), `completing` of which end their prompt; and of drafting for the
        next step, `depth` drafts in turn.

        `context_tokens` counts the KV tokens that the decodes read, `verify_tokens` included.
        """
        ...

    def rounds(
        self, num_decodes: int, verify_tokens: int, depth: int, computed: Sequence[int] | NDArray[np.int64]
    ) -> Sequence[int]:
        """Return the ticks after which each of several consecutive steps ends.

        The steps have no chunks and differ only in the tokens that the decodes have computed before, `computed`, which
        rise.
        """
        ...
