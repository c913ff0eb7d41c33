"""What the simulator asks of a cost model. Anything with the two methods of `StepCosts` can drive it.

Three more protocols are asked for where they apply, once, when an engine core is made: `ImbalanceCosts` by the methods
they have, `RoundCosts` where the scheduler drafts, `GroupCosts` where cores step together. A fourth, `TellingCosts`, is
asked after a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

UNBOUNDED = 1 << 60
"""A number of steps that no run reaches: the span of a form that holds for ever."""


class StepCosts(Protocol):
    """Duration of engine steps in integer ticks (`simtune.costs.ticks`).

    `context_tokens` is the number of KV tokens the decodes of a step read: the sum over decoding sequences
    of tokens already computed, plus one each. It grows by `num_decodes` per step while nobody joins or
    leaves.

    Two laws let many steps be taken as one jump that is exact to the tick:

    * `mixed(b, c, [], b) == decode(b, c)[0]`
    * with `first, slope, span = decode(b, c)`, `decode(b, c + k * b)[0] == first + k * slope` for 0 <= k <
      span
    """

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """(ticks of the next pure decode step, ticks each further step takes longer, steps for which that
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
    """Costs that know of load imbalance: `decode` and `mixed` take contexts to be alike, and a step takes longer
    because the longest of them lasts longer than the others."""

    @property
    def balanced(self) -> bool:
        """Whether `imbalance` is always 0, so that it need not be asked."""
        ...

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        """Ticks that come on top of `decode` or, with chunks, of `mixed`: the longest context has so many tokens.

        While nobody joins or leaves all contexts grow alike, and so must leave these ticks as they are.
        """
        ...


@runtime_checkable
class GroupCosts(StepCosts, Protocol):
    """Costs of one group of ranks under data-parallel attention: `decode` and `mixed` take all groups to have as many
    tokens as it has, and the experts that they share take less or more time where they have not."""

    def together(self, ticks: int, num_tokens: int, num_seqs: int, everybodys: int, with_chunks: bool) -> int:
        """What a step of `ticks`, with so many tokens and sequences of its own, takes if all groups together have
        `everybodys` tokens. A step that waits for the host stays as long as it is."""
        ...


@runtime_checkable
class TellingCosts(StepCosts, Protocol):
    """Costs that know what the time of a step rests on."""

    def basis(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> int:
        """A `simtune.costs.predict.Basis`."""
        ...

    @property
    def log_sd(self) -> float:
        """Standard deviation of the log error of steps that were not measured."""
        ...


@runtime_checkable
class RoundCosts(StepCosts, Protocol):
    """Duration of the steps of an engine that drafts and verifies: `round` and `rounds` take the place of `decode` and
    `mixed`.

    Contexts grow as drafts are accepted, by no rule. So the rounds of a jump are listed one by one, and the law is

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
        beside prefill chunks (past tokens, new tokens), of which `completing` get to the end of their prompt; and of
        drafting for the next step, `depth` drafts in turn.

        `context_tokens` counts the KV tokens that the decodes read, `verify_tokens` included.
        """
        ...

    def rounds(
        self, num_decodes: int, verify_tokens: int, depth: int, computed: Sequence[int] | NDArray[np.int64]
    ) -> Sequence[int]:
        """After how many ticks each of some steps ends that have no chunks and are alike but for the tokens that the
        decodes have computed before, which rise."""
        ...
