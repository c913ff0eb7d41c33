"""Times of a step and its repetitions, by cost models of each kind.

A step may be repeated for as long as the scheduler reports that nothing can change and the cost model that its time is
known: then all repetitions are one jump.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simtune.costs.protocol import ChunkList, ImbalanceCosts, RoundCosts, StepCosts
from simtune.engine import Step

"""(past tokens, new tokens) of prefill chunks."""


@dataclass(slots=True)
class JumpTime:
    """Ticks of the repetitions of a step: an arithmetic progression, or a list."""

    first: int = 0
    """Ticks of the first repetition."""
    slope: int = 0
    """Ticks by which each further repetition is longer."""
    repetitions: int = 0
    ends: Sequence[int] | None = None
    """Ticks after which each repetition ends; None if they follow `first` and `slope`."""

    def take(self, ticks: int) -> None:
        """Set the time of one step of `ticks` ticks that is not repeated."""
        self.first, self.slope, self.repetitions, self.ends = ticks, 0, 1, None

    @property
    def total(self) -> int:
        """Ticks of all repetitions."""
        n = self.repetitions
        if self.ends is not None:
            return self.ends[n - 1]
        return n * self.first + self.slope * (n * (n - 1) // 2)

    def elapsed(self, repetitions: int) -> int:
        """Return the ticks of the first `repetitions` repetitions."""
        if self.ends is not None:
            return self.ends[repetitions - 1] if repetitions else 0
        return repetitions * self.first + self.slope * (repetitions * (repetitions - 1) // 2)

    def reaching(self, ticks: int) -> tuple[int, int]:
        """Return (n, ticks of n repetitions) for the smallest n, at least 1, that take `ticks` or longer.

        Solves first*n + slope*n(n-1)/2 = ticks for n in floating point, exact or a little too small once it is cut to
        a whole number, which is stepped up.
        """
        if self.ends is not None:
            n = bisect_left(self.ends, ticks) + 1
            return n, self.elapsed(n)
        first, slope = self.first, self.slope
        # The root in the form without cancellation: for small slopes the usual one loses all digits.
        b = 2.0 * first - slope
        root = math.sqrt(b * b + 8.0 * slope * ticks)
        n = int(4.0 * ticks / (root + b) if b > 0 else (root - b) / (2.0 * slope)) or 1
        while (elapsed := n * first + slope * (n * (n - 1) // 2)) < ticks:
            n += 1
        return n, elapsed

    def over_after(self, ticks: int) -> int:
        """Return the number of repetitions that are over after `ticks`."""
        if self.ends is not None:
            return bisect_right(self.ends, ticks)
        n, elapsed = self.reaching(ticks)
        return n if elapsed <= ticks else n - 1


class StepTimer(ABC):
    """Computes the time of steps with a cost model."""

    affine: Callable[[int, int], tuple[int, int, int]] | None = None
    """The function `StepCosts.decode`, if it gives the whole time of a step without chunks."""
    asks_longest = False
    """True if steps must state their longest context."""

    @abstractmethod
    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """Return the ticks of a step with prefill chunks, of which `completing` reach the end of their prompt."""

    def of_part(self, step: Step, ticks: int) -> int:
        """Return the ticks of one part of a step that takes `ticks` as a whole: all parts together take as long, plus
        the time of requests that decode in each part."""
        i, n = step.part
        alone = self.mixed(step, (), 0) if step.decodes_whole and step.num_decodes else 0
        shared_ticks = max(ticks - alone, 0)
        return alone + shared_ticks // n + (i < shared_ticks % n)

    @abstractmethod
    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """Set the time of a step without chunks that is repeated at most `most` times."""


class PlainTimer(StepTimer):
    """Timer of steps in which every decode computes one token."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.affine = costs.decode

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """Return the ticks of the step, with one sample for each decode and for each complete prompt."""
        return self._costs.mixed(step.num_decodes, step.context_tokens, chunks, step.num_decodes + completing)

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """Set the time of the repetitions for which the costs are linear."""
        time.first, time.slope, span = self._costs.decode(step.num_decodes, step.context_tokens)
        time.repetitions = most if most < span else span


class ImbalanceTimer(PlainTimer):
    """Timer of plain steps that take longer the further the longest context is above the mean."""

    asks_longest = True

    def __init__(self, costs: ImbalanceCosts) -> None:
        super().__init__(costs)
        self.affine = None
        self._imbalance = costs.imbalance

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """Return the ticks of the step, with those that load imbalance adds."""
        ticks = super().mixed(step, chunks, completing)
        return ticks + self._imbalance(step.num_decodes, step.context_tokens, step.longest_context, True)

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """Set the time of the repetitions; load imbalance adds the same to each of them."""
        super().decode(step, most, time)
        time.first += self._imbalance(step.num_decodes, step.context_tokens, step.longest_context, False)


class DraftTimer(StepTimer):
    """Timer of steps in which every decode verifies drafts; contexts grow as drafts are accepted, so the ends of a jump
    are listed."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs

    def mixed(self, step: Step, chunks: ChunkList, completing: int) -> int:
        """Return the ticks of the step, in which decodes verify their drafts beside the chunks."""
        return self._costs.round(
            step.num_decodes, step.verify_tokens, step.draft_depth, step.context_tokens, chunks, completing
        )

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """Set the time of one round, or of rounds whose ends are listed."""
        costs, decodes, depth, contexts = self._costs, step.num_decodes, step.draft_depth, step.contexts
        tokens = decodes + step.draft_tokens
        if most == 1 or contexts is None:
            time.take(costs.round(decodes, tokens, depth, step.context_tokens))
            return
        if not step.discarded:
            ends = costs.rounds(decodes, tokens, depth, contexts)
        # Requests whose answer is complete take part in the first repetition only.
        else:
            first = costs.round(decodes, tokens, depth, step.context_tokens)
            later = costs.rounds(decodes - step.discarded, tokens - step.discarded_tokens, depth, contexts[1:])
            ends = [first, *[first + end for end in later]]
        time.ends, time.first, time.repetitions = ends, ends[0], len(ends)


def timer_for(costs: StepCosts, drafts: bool) -> StepTimer:
    """Return the timer for a core with these costs, whose scheduler drafts or not.

    Raises TypeError if it drafts and the costs have no rounds of drafts.
    """
    if drafts:
        if not isinstance(costs, RoundCosts):
            raise TypeError(f"the scheduler drafts, and {type(costs).__name__} has no `round` and `rounds`")
        return DraftTimer(costs)
    # Checking a protocol takes long, and most costs are balanced.
    if not getattr(costs, "balanced", True) and isinstance(costs, ImbalanceCosts):
        return ImbalanceTimer(costs)
    return PlainTimer(costs)
