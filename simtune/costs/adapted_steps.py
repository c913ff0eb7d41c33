"""Costs of steps and rounds with the products of LoRA adapters, made of the tables of steps without."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy

from simtune.costs.compiled import CompiledCosts
from simtune.costs.drafting import CompiledRounds
from simtune.costs.drafting.lines import TickLine

_MOST_LINES = 4096
"""Lines of rounds that are kept, one for each composition of a batch and ticks of its products."""


class _Raised:
    """List with a number added to each entry."""

    __slots__ = ("_entries", "_more")

    def __init__(self, entries: Sequence[int], more: int) -> None:
        self._entries, self._more = entries, more

    def __getitem__(self, at: int) -> int:
        return self._entries[at] + self._more


class AdaptedSteps(CompiledCosts):
    """Step costs with `extra` ticks on the GPU, set before each call; they may hide behind the host as others do."""

    extra = 0

    def __init__(self, costs: CompiledCosts) -> None:
        vars(self).update(vars(costs))
        self._plain_lists, self._plain_large = self._mixed_lists, self._large

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """See `simtune.costs.protocol.StepCosts.decode`."""
        extra = self.extra
        starts, values, slopes, floor, after = self._steps[num_decodes] or self._make_step(num_decodes)
        at = bisect_right(starts, context_tokens, 1)
        start, per_token = starts[at - 1], slopes[at - 1]
        ticks = values[at - 1] + per_token * (context_tokens - start) + extra
        span = -((context_tokens - starts[at]) // num_decodes)
        if ticks >= floor:
            return ticks + after, per_token * num_decodes, span
        if per_token:
            span = min(span, (floor - ticks) // (per_token * num_decodes) + 1)
        return floor + after, 0, span

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """See `simtune.costs.protocol.StepCosts.mixed`: max(t + extra, floor) = extra + max(t, floor - extra)."""
        if not chunks:
            return self.decode(num_decodes, context_tokens)[0]
        linear, head, floors, after = self._plain_lists
        self._mixed_lists = linear, head, _Raised(floors, -self.extra), _Raised(after, self.extra)  # type: ignore[assignment]
        self._large = _Raised(self._plain_large, -self.extra)  # type: ignore[assignment]
        return super().mixed(num_decodes, context_tokens, chunks, num_samples)


class AdaptedRounds(CompiledRounds):
    """Costs of rounds with `extra` ticks in the target's pass, set before each call: the target verifies drafts with
    the adapters of their requests, and drafters have none. For schemes that verify all drafts of a round in one pass.
    """

    def __init__(self, costs: CompiledRounds) -> None:
        vars(self).update(vars(costs))
        self.order = copy(costs.order)
        self.order.target = copy(costs.order.target)
        self._by_extra: dict[tuple[int, int, int, int], TickLine] = {}

    @property
    def extra(self) -> int:
        """Ticks of the adapters' products in a round."""
        return self.order.target.adapted

    @extra.setter
    def extra(self, ticks: int) -> None:
        self.order.target.adapted = ticks

    def _line(self, num_decodes: int, verify_tokens: int, depth: int) -> TickLine:
        """Return the line of a round without chunks, with the ticks of products inside the target's pass."""
        key = num_decodes, verify_tokens, depth, self.extra
        line = self._by_extra.get(key)
        if line is None:
            if len(self._by_extra) >= _MOST_LINES:
                self._by_extra.clear()
            self._lines = {}
            line = self._by_extra[key] = super()._line(num_decodes, verify_tokens, depth)
        return line
