"""Costs of steps with the products of LoRA adapters, made of the tables of steps without."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from simtune.costs.compiled import CompiledCosts


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
        self._large = self._plain_large - self.extra
        return super().mixed(num_decodes, context_tokens, chunks, num_samples)
