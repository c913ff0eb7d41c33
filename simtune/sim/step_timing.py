"""How long a step and its repetitions take, by cost models of each kind.

A step may be repeated as often as the scheduler says that nothing can change and the cost model says that its time is
known: then all repetitions are one jump.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simtune.costs.protocol import ImbalanceCosts, RoundCosts, StepCosts
from simtune.engine import Step

Chunks = Sequence[tuple[int, int]]
"""(past tokens, new tokens) of prefill chunks."""


@dataclass(slots=True)
class JumpTime:
    """Ticks of the repetitions of a step: an arithmetic progression, or listed."""

    first: int = 0
    """Of the first repetition."""
    slope: int = 0
    """How much longer each further one takes."""
    repetitions: int = 0
    ends: Sequence[int] | None = None
    """After how many ticks each repetition ends, where they follow no rule."""

    def take(self, ticks: int) -> None:
        """One step of so many ticks, not repeated."""
        self.first, self.slope, self.repetitions, self.ends = ticks, 0, 1, None

    @property
    def total(self) -> int:
        """Ticks of all repetitions."""
        n = self.repetitions
        if self.ends is not None:
            return self.ends[n - 1]
        return n * self.first + self.slope * (n * (n - 1) // 2)

    def elapsed(self, repetitions: int) -> int:
        """Ticks of the first `repetitions` repetitions."""
        if self.ends is not None:
            return self.ends[repetitions - 1] if repetitions else 0
        return repetitions * self.first + self.slope * (repetitions * (repetitions - 1) // 2)

    def reaching(self, ticks: int) -> tuple[int, int]:
        """(n, ticks of n repetitions) for the smallest n, at least 1, that take `ticks` or longer.

        Solves first*n + slope*n(n-1)/2 = ticks for n in floating point, exact or a little too small once it is cut to
        a whole number, which is stepped up.
        """
        if self.ends is not None:
            n = bisect_left(self.ends, ticks) + 1
            return n, self.elapsed(n)
        first, slope = self.first, self.slope
        b = 2.0 * first - slope
        root = math.sqrt(b * b + 8.0 * slope * ticks)
        n = int(4.0 * ticks / (root + b) if b > 0 else (root - b) / (2.0 * slope)) or 1
        while (elapsed := n * first + slope * (n * (n - 1) // 2)) < ticks:
            n += 1
        return n, elapsed

    def over_after(self, ticks: int) -> int:
        """How many repetitions are over after `ticks`."""
        if self.ends is not None:
            return bisect_right(self.ends, ticks)
        n, elapsed = self.reaching(ticks)
        return n if elapsed <= ticks else n - 1


class StepTimer(ABC):
    """Asks a cost model for the time of steps."""

    affine: Callable[[int, int], tuple[int, int, int]] | None = None
    """`StepCosts.decode`, where it is all that a step without chunks takes."""
    asks_longest = False
    """Whether steps must say how long their longest context is."""

    @abstractmethod
    def mixed(self, step: Step, chunks: Chunks, completing: int) -> int:
        """Ticks of a step with prefill chunks, of which `completing` get to the end of their prompt."""

    def of_part(self, step: Step, ticks: int) -> int:
        """Ticks of one part of a step that takes so many as a whole: all parts together take as long, but for those who
        decode in each of them."""
        i, n = step.part
        alone = self.mixed(step, (), 0) if step.decodes_whole and step.num_decodes else 0
        rest = max(ticks - alone, 0)
        return alone + rest // n + (i < rest % n)

    @abstractmethod
    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """Write down the time of a step without chunks, repeated at most `most` times."""


class PlainTimer(StepTimer):
    """Every decode computes one token."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.affine = costs.decode

    def mixed(self, step: Step, chunks: Chunks, completing: int) -> int:
        """One sample for each decode, and for each prompt that is complete."""
        return self._costs.mixed(step.num_decodes, step.context_tokens, chunks, step.num_decodes + completing)

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """The repetitions for which the costs promise a straight line."""
        time.first, time.slope, span = self._costs.decode(step.num_decodes, step.context_tokens)
        time.repetitions = most if most < span else span


class ImbalanceTimer(PlainTimer):
    """The same, and steps take longer the further the longest context is above the mean."""

    asks_longest = True

    def __init__(self, costs: ImbalanceCosts) -> None:
        super().__init__(costs)
        self.affine = None
        self._imbalance = costs.imbalance

    def mixed(self, step: Step, chunks: Chunks, completing: int) -> int:
        """What the load imbalance adds comes on top."""
        ticks = super().mixed(step, chunks, completing)
        return ticks + self._imbalance(step.num_decodes, step.context_tokens, step.longest_context, True)

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """It adds the same to every repetition of a jump."""
        super().decode(step, most, time)
        time.first += self._imbalance(step.num_decodes, step.context_tokens, step.longest_context, False)


class DraftTimer(StepTimer):
    """Every decode verifies its drafts; contexts grow as they are accepted, so the ends of a jump are listed."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs

    def mixed(self, step: Step, chunks: Chunks, completing: int) -> int:
        """The decodes verify their drafts beside the chunks."""
        return self._costs.round(
            step.num_decodes, step.verify_tokens, step.draft_depth, step.context_tokens, chunks, completing
        )

    def decode(self, step: Step, most: int, time: JumpTime) -> None:
        """One round, or rounds whose ends are listed."""
        costs, decodes, depth, contexts = self._costs, step.num_decodes, step.draft_depth, step.contexts
        tokens = decodes + step.draft_tokens
        if most == 1 or contexts is None:
            time.take(costs.round(decodes, tokens, depth, step.context_tokens))
            return
        if not step.discarded:
            ends = costs.rounds(decodes, tokens, depth, contexts)
        else:  # those whose answer is complete are in the first repetition only
            first = costs.round(decodes, tokens, depth, step.context_tokens)
            rest = costs.rounds(decodes - step.discarded, tokens - step.discarded_tokens, depth, contexts[1:])
            ends = [first, *[first + end for end in rest]]
        time.ends, time.first, time.repetitions = ends, ends[0], len(ends)


def timer_for(costs: StepCosts, drafts: bool) -> StepTimer:
    """The timer for a core with these costs, whose scheduler drafts or not.

    Raises TypeError where it drafts and the costs do not know rounds of drafts.
    """
    if drafts:
        if not isinstance(costs, RoundCosts):
            raise TypeError(f"the scheduler drafts, and {type(costs).__name__} has no `round` and `rounds`")
        return DraftTimer(costs)
    if isinstance(costs, ImbalanceCosts) and not costs.balanced:
        return ImbalanceTimer(costs)
    return PlainTimer(costs)
